"""Kept graph: what a run keeps of its graph (classes, features, split, edges), and other data mapped to it by name.

`graph.json` has the names, `graph.npz` the arrays. A graph above `LIMIT` bytes stays where it is: of its arrays the
labels and the split are kept, with which the network is built; predictions need the graph itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from espalier.graph.data import graph as graphs
from espalier.graph.data.column_scales import SAID, standardised
from espalier.graph.data.graph import IGNORED, Array, DataSplit, Graph, Signs, SplitShares, parted
from espalier.graph.data.targets import Scale
from espalier.graph.tasks import link_prediction
from espalier.graph.tasks.link_prediction import Links
from espalier.recipe import Recipe
from espalier.recipe.errors import UserError

LIMIT = 1 << 30
"""Bytes of a graph that is kept whole."""

_NAMES = "graph.json"
_ARRAYS = "graph.npz"
_LARGE = ("indptr", "indices", "features", "weights", "edge_features", "starts")
_SMALL = ("labels", "numbers", "starts", "column_scales")
_TABLE = ("classes", "columns", "edge_columns", "origin", "notes", "identity", "values", "label_columns")


OtherNodes = tuple[int, Array | None] | None
"""See `other_nodes`."""


@dataclass(frozen=True)
class KeptGraph:
    """What `write` wrote. `graph` has no edges and features unless it is `whole`.

    Attributes:
        links: of a run that predicts links.
        outputs: columns of the network's answer; widths: of features and of edge features; weighted: edges had weights.
        signs: see `QuantizedGraph.signs`.
    """

    graph: Graph
    links: Links | None
    whole: bool
    outputs: int
    widths: tuple[int, int]
    weighted: bool
    signs: Signs = ()

    def outlined(self) -> Graph:
        """A graph of the run's sizes whose features are zeros without memory, and which has no edges: enough to build
        the network of a run that does not keep the whole."""
        width, edge_width = self.widths
        known: dict[str, Any] = {"features": np.broadcast_to(np.float32(0), (self.graph.nodes, width))}
        known["edge_features"] = np.zeros((0, edge_width), np.float32) if edge_width else None
        known["weights"] = np.zeros(0, np.float32) if self.weighted else None
        return replace(self.graph, **known)


def write(folder: Path, graph: Graph, links: Links | None, signs: Signs = ()) -> None:
    """Keeps `graph` and its split in `folder`."""
    arrays = {name: getattr(graph, name) for name in _LARGE}
    whole = sum(0 if array is None else array.nbytes for array in arrays.values()) <= LIMIT and graph.partition is None
    arrays = arrays if whole else {}
    arrays |= {name: getattr(graph, name) for name in _SMALL}
    arrays["names"] = np.asarray(graph.names, str) if len(graph.names) else None
    for prefix, parts in (("part", graph.parts), ("link", links.parts if links is not None else None)):
        arrays |= {f"{prefix}_{name}": ids for name, ids in (parts.named() if parts is not None else ())}
    arrays["link_pairs"] = None if links is None else links.pairs
    with (folder / _ARRAYS).open("wb") as file:
        entries: Any = {name: np.asarray(array) for name, array in arrays.items() if array is not None}
        np.savez(file, **entries)
    table = {name: getattr(graph, name) for name in _TABLE}
    table |= {"whole": whole, "nodes": graph.nodes, "outputs": graph.outputs, "widths": _widths(graph)}
    table |= {"weighted": graph.weights is not None, "signs": signs}
    scale = graphs.scaled(graph).scale
    table["scale"] = None if scale is None else scale.table()
    (folder / _NAMES).write_text(json.dumps(table, indent=1), encoding="utf-8")


def lacks(folder: Path) -> bool:
    """Whether the graph itself is not in `folder`."""
    return not json.loads((folder / _NAMES).read_text(encoding="utf-8"))["whole"]


def read(folder: Path) -> KeptGraph:
    """What `write` kept in `folder`."""
    table = json.loads((folder / _NAMES).read_text(encoding="utf-8"))
    with np.load(folder / _ARRAYS, allow_pickle=False) as opened:
        arrays = dict(opened)
    nodes = table["nodes"]
    names = arrays.get("names")
    known: dict[str, Any] = {"indptr": np.zeros(nodes + 1, np.int64), "indices": np.zeros(0, np.int32)}
    known["features"] = np.zeros((nodes, 0), np.float32)
    known |= {name: arrays[name] for name in (*_LARGE, *_SMALL) if name in arrays}
    given = {name: table[name] for name in _TABLE if name in table}  # older runs lack some
    known |= {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    known["scale"] = Scale.from_table(table["scale"])
    graph = Graph(**known, names=() if names is None else names.tolist(), parts=_parts(arrays, "part"))
    pairs = arrays.get("link_pairs")
    parts = _parts(arrays, "link")
    links = None if pairs is None or parts is None else link_prediction.cut(graph, pairs, parts)
    widths = tuple(table["widths"])
    signs = tuple(table["signs"])
    return KeptGraph(graph, links, table["whole"], table["outputs"], widths, table["weighted"], signs)


def _parts(arrays: dict[str, Array], prefix: str) -> DataSplit | None:
    each = [arrays.get(f"{prefix}_{name}") for name in DataSplit._fields]
    return None if each[0] is None else DataSplit(*(np.asarray(ids) for ids in each))


def _widths(graph: Graph) -> tuple[int, int]:
    return graph.features.shape[1], 0 if graph.edge_features is None else graph.edge_features.shape[1]


# --- other data ------------------------------------------------------------------------------------------------------


def mapped(graph: Graph, run_graph: KeptGraph) -> Graph:
    """`graph` with the columns and classes of the run, by name. Raises UserError naming what the run does not know."""
    before = run_graph.graph
    if (graph.weights is not None) != run_graph.weighted:
        has, had = ("has", "had none") if graph.weights is not None else ("lacks", "had one")
        raise UserError(
            f"{graph.origin} {has} a column of edge weights, and the run {had} ({before.origin}).",
            why="the network would aggregate other sums",
            do=f"data as {before.origin} was, or a new run",
        )
    features = _columns(
        (graph, run_graph), (graph.columns, before.columns), (graph.features, run_graph.widths[0]), "feature"
    )
    named = (graph.edge_columns, before.edge_columns)
    edges = _columns((graph, run_graph), named, (graph.edge_features, run_graph.widths[1]), "edge feature")
    assert features is not None
    if before.column_scales is not None and graph.partition is None:
        features = standardised(features, before.column_scales)
        graph = replace(graph, notes=(*graph.notes, *(note for note in before.notes if note.startswith(SAID))))
    ours = {
        name: getattr(before, name) for name in ("columns", "edge_columns", "label_columns", "scale", "column_scales")
    }
    known = replace(graph, features=features, edge_features=edges, **ours)
    return known if graph.labels is None or not run_graph.outputs else _classed(known, graph.labels, run_graph)


def _columns(
    graphs: tuple[Graph, KeptGraph],
    names: tuple[Sequence[str], Sequence[str]],
    values: tuple[Array | None, int],
    what: str,
) -> Array | None:
    """The columns of `values` in the order that the run has them in."""
    (now, before), (features, width) = names, values
    has = 0 if features is None else features.shape[1]
    if now and before and set(now) == set(before):
        assert features is not None
        return (
            features
            if tuple(now) == tuple(before)
            else np.ascontiguousarray(features[:, [list(now).index(column) for column in before]])
        )
    if has == width and not (now and before):
        return features
    strange = [column for column in now if column not in before]
    absent = [column for column in before if column not in now]
    difference = f"the {what} {strange[0]!r}" if strange else f"no {what} {absent[0]!r}" if absent else f"{has} {what}s"
    raise UserError(
        f"{graphs[0].origin} has {difference}, and the run was trained on {graphs[1].graph.origin}.",
        why=f"there: {_listed(now, has)}; in the run: {_listed(before, width)}",
        do="give the columns that the run has, under their names, or begin a new run",
    )


def _classed(graph: Graph, labels: Array, run_graph: KeptGraph) -> Graph:
    """With the classes of the run, by name; classes without names are numbers."""
    if graph.kind != "classes":
        if labels.shape[1] != run_graph.outputs:
            raise UserError(
                f"{graph.origin} has {labels.shape[1]} columns of answers, and the run {run_graph.outputs}.",
                do="give the columns that the run has, or begin a new run",
            )
        return graph
    run = run_graph.graph.classes or tuple(map(str, range(run_graph.outputs)))
    classes = graph.classes or tuple(map(str, range(int(labels.max(initial=-1)) + 1)))
    strange = [classes[at] for at in np.unique(labels[labels >= 0]).tolist() if classes[at] not in run]
    if strange:
        raise UserError(
            f"{graph.origin} has the class {strange[0]!r}, which the run does not know.",
            why=f"classes there: {_listed(classes, len(classes))}; in the run: {_listed(run, len(run))}",
            do="name it as the run does, or begin a new run",
        )
    table = np.array([*(run.index(name) if name in run else IGNORED for name in classes), IGNORED], np.int64)
    return replace(graph, labels=table[labels], classes=run)


def _listed(names: Sequence[str], count: int) -> str:
    shown = ", ".join(names[:12]) if names else f"{count} without names"
    return f"{shown}, … ({len(names)})" if len(names) > 12 else shown


def divided(graph: Graph, run_graph: KeptGraph | None, shares: SplitShares, seed: int) -> Graph:
    """`graph` with the split of the run for what it knows, by name or number; the rest is dealt out by `shares`."""
    fresh = graphs.divided(graph, shares, seed)
    if run_graph is None or graph.parts is not None or fresh.parts is None:
        return fresh
    before = run_graph.graph.parts
    if before is None:
        return fresh
    labelled = np.sort(np.concatenate(fresh.parts))
    place = places(graph, run_graph.graph, items=True)[labelled]
    return replace(graph, parts=_dealt(labelled, place, before, shares, seed))


def split(graph: Graph, run_graph: KeptGraph, shares: SplitShares, seed: int) -> Links:
    """The links of `graph`: those that the run knows are in the part where they were, the rest is dealt out."""
    links = link_prediction.split(graph, shares, seed)
    if run_graph.links is None:
        return links
    count = run_graph.graph.nodes
    ends = places(graph, run_graph.graph)[links.pairs]
    keys = np.where((ends >= 0).all(0), ends.min(0) * np.int64(count) + ends.max(0), -1)
    known = run_graph.links.pairs.min(0) * np.int64(count) + run_graph.links.pairs.max(0)
    parts = _dealt(np.arange(len(keys)), _positions(keys, known), run_graph.links.parts, shares, seed)
    return link_prediction.cut(graph, links.pairs, parts)


def _dealt(ids: Array, place: Array, before: DataSplit, shares: SplitShares, seed: int) -> DataSplit:
    """`ids` in the part where `before` has their `place` (-1: it has none), the rest by `shares`."""
    part = np.full(1 + max(int(members.max(initial=-1)) for members in (place, *before)) + 1, -1)
    for number, members in enumerate(before):
        part[members] = number
    of = part[place]  # the last entry stands for -1
    fresh = parted(ids[of < 0], shares, seed)
    return DataSplit(*(np.sort(np.concatenate([ids[of == at], new])) for at, new in enumerate(fresh)))


def places(graph: Graph, before: Graph, items: bool = False) -> Array:
    """int64: which node (or, with `items`, small graph) of `before` each of `graph` is; -1: none."""
    if items and graph.starts is not None:
        return np.where(np.arange(graph.items) < before.items, np.arange(graph.items), -1)
    if bool(len(graph.names)) != bool(len(before.names)):
        return np.full(graph.nodes, -1)
    return _positions(_keys(graph), _keys(before))


def other_nodes(graph: Graph, before: Graph, recipe: Recipe) -> OtherNodes:
    """How many nodes `before` has and, where `recipe` quantizes by node, the `places` of those of `graph` among them;
    None: they are the same."""
    assert recipe.graph is not None
    by_node = getattr(recipe.mechanisms.get("quant"), "by_node", False) and recipe.graph.task != "graph"
    place = places(graph, before) if by_node else None
    if place is not None and len(place) == before.nodes and np.array_equal(place, np.arange(len(place))):
        place = None
    return None if place is None and graph.nodes == before.nodes else (before.nodes, place)


def _keys(graph: Graph) -> Array:
    if len(graph.names):
        return np.asarray(graph.names, str)
    return np.arange(graph.nodes) if graph.numbers is None else graph.numbers


def _positions(keys: Array, known: Array) -> Array:
    """int64 [keys]: where each is in `known`, -1 where it is not."""
    if not len(known):
        return np.full(len(keys), -1)
    order = np.argsort(known, kind="stable")
    at = order[np.minimum(np.searchsorted(known, keys, sorter=order), len(known) - 1)]
    return np.where(known[at] == keys, at, -1)
