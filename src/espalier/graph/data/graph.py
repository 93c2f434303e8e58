"""`Graph`: nodes, the edges into each of them, what is known of both. NumPy arrays, which may lie on disk.

Edges are kept by target (compressed sparse columns of the adjacency): `indices[indptr[v]:indptr[v + 1]]` are the nodes
that node v hears from, ascending. Policy: an edge given twice becomes one (weights are added, features are the first's)
and an edge from a node to itself is dropped: networks that want one (GCN, GAT) add exactly one for every node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from espalier.graph.data import targets as target_kinds
from espalier.graph.data.targets import Scale, as_array
from espalier.recipe.errors import UserError, nearest
from espalier.recipe.offsets import offsets_of

if TYPE_CHECKING:
    from espalier.parallel.workload import Shard

Array = target_kinds.Array
Progress = Callable[[int, int], None]
"""Is called with how many are done, and of how many."""
IGNORED = target_kinds.IGNORED


SplitShares = tuple[float, float, float]
"""Of all items: those that train, validate and test."""


class DataSplit(NamedTuple):
    """Which nodes (or graphs) train, validate and test: ascending int64 ids. They may leave nodes out."""

    train: Array
    validation: Array
    test: Array

    def held_out(self, shard: Shard) -> Iterator[tuple[str, Array, Array]]:
        """For validation ("") and test ("test_"): the prefix of its figures, all its ids, and those of a share of them
        as large as `shard` is of what validates."""
        total = max(1, len(self.validation))
        for prefix, ids in (("", self.validation), ("test_", self.test)):
            first, last = (len(ids) * bound // total for bound in (shard.start, shard.stop))
            yield prefix, ids, ids[first:last]

    def named(self) -> tuple[tuple[str, Array], ...]:
        """The three with their names."""
        return tuple(self._asdict().items())


class Examples:
    """What a task learns from: the nodes, links or graphs of `parts`."""

    def __init__(self, parts: DataSplit) -> None:
        self.parts = parts
        self.items = len(parts.train)

    @property
    def validation(self) -> int:
        """How many validate."""
        return len(self.parts.validation)

    def ids(self, positions: Array) -> Array:
        """Those that train, at `positions` of the global order."""
        return self.parts.train[positions]


class Partition(NamedTuple):
    """A graph whose parts wait in `folder`: how many they are, and the edges of all of them.

    Attributes:
        degrees: int64 [nodes], of all edges.
        root: float32 [nodes], what GCN scales nodes by (`neighbor_sampler.symmetric_root`).
        signed: see `signed`.
    """

    folder: Path
    ranks: int
    edges: int
    degrees: Array
    root: Array
    signed: bool | None = None


@dataclass(frozen=True)
class Graph:
    """One graph, or many small ones side by side.

    Attributes:
        indptr: int64 [nodes + 1]; indices: int32 or int64 [edges], the source of each edge.
        features: float32 [nodes, width].
        labels: int64 [nodes] (classes; -1: none), float32 [nodes, tasks] (0 to 1; NaN: none), with `values` float64
            [nodes, columns] (NaN: none), or None. See `targets.read`.
        parts: the split the data brings, None when it brings none; splits: where its masks are columns, each of theirs.
        weights: float32 [edges], None: every edge counts 1. edge_features: float32 [edges, columns].
        starts: int64 [graphs + 1], the first node of each small graph; labels and parts are then of graphs.
        classes: names of the classes; names: of the nodes; label_columns: of the labels' columns; all may be empty.
        origin: where it came from. notes: what was mended while reading.
        columns: names of the features; edge_columns: of the edges' features; both may be empty.
        partition: where the parts are that hold the edges and the features, which this graph then has none of.
        numbers: int64 [nodes], the nodes' ids as they were given, None: as they are.
        cut: int32 [nodes], the rank of each node where the recipe gives it (`graph.halo.parts`).
        placed: features have the averages and encodings that a graph transformer reads.
        link_parts: the split of links the data brings, each as its lower end * nodes + its higher end, ascending.
        identity: stands for the content where reading all of it would take long; empty: the content is hashed.
        texts: columns of words that are not features yet, by name.
        column_scales: of `column_scales.scales_of`, by which features were standardised; None: they were not.
        values: labels are values of a regression, trained by `scale`, that of the training part (None: not yet known).
    """

    indptr: Array
    indices: Array
    features: Array
    labels: Array | None = None
    parts: DataSplit | None = None
    weights: Array | None = None
    edge_features: Array | None = None
    starts: Array | None = None
    classes: tuple[str, ...] = ()
    names: Sequence[str] = ()
    origin: str = "graph"
    notes: tuple[str, ...] = ()
    numbers: Array | None = None
    identity: str = ""
    columns: tuple[str, ...] = ()
    edge_columns: tuple[str, ...] = ()
    partition: Partition | None = None
    cut: Array | None = None
    placed: bool = False
    link_parts: DataSplit | None = None
    values: bool = False
    scale: Scale | None = None
    label_columns: tuple[str, ...] = ()
    column_scales: Array | None = None
    splits: tuple[DataSplit, ...] = ()
    texts: Mapping[str, Array] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.indptr) - 1

    @property
    def edges(self) -> int:
        """How many directed edges there are, each way counted."""
        return len(self.indices)

    @property
    def items(self) -> int:
        """What labels are of: nodes, or small graphs."""
        return self.nodes if self.starts is None else len(self.starts) - 1

    @property
    def kind(self) -> str | None:
        """What labels are: classes, tasks or values. None without labels."""
        if self.labels is None:
            return None
        return "values" if self.values else "classes" if self.labels.ndim == 1 else "tasks"

    @property
    def outputs(self) -> int:
        """Columns a network needs to answer the labels: classes, tasks, or values. 0 without labels."""
        if self.labels is None:
            return 0
        if self.labels.ndim == 2:
            return int(self.labels.shape[1])
        return len(self.classes) or int(self.labels.max(initial=-1)) + 1

    def degrees(self) -> Array:
        """int64 [nodes]: edges into each node."""
        return np.diff(self.indptr)

    def targets(self) -> Array:
        """int64 [edges]: the node each edge leads to."""
        return np.repeat(np.arange(self.nodes), self.degrees())

    def key(self, node: int) -> str | int:
        """A node's name, else the number it was given."""
        if len(self.names):
            return self.names[node]
        return int(node) if self.numbers is None else int(self.numbers[node])

    def called(self, node: int) -> str:
        """A node's name, else `node 7` by the number it was given."""
        return self.names[node] if len(self.names) else f"node {self.key(node)}"

    def mention(self, node: int) -> str:
        """A node in messages: `node 'a'` by its name, else `node 7` by the number it was given."""
        return f"node {self.names[node]!r}" if len(self.names) else self.called(node)

    def find(self, text: str) -> int:
        """The node with that name or number. Raises UserError naming the nearest name."""
        if len(self.names) and text in self.names:
            return list(self.names).index(text)
        numbered = any(name.isdecimal() for name in self.names)  # a number is then a name, never a row
        if text.isdecimal() and int(text) < self.nodes and not numbered:
            return int(text) if self.numbers is None else int(np.flatnonzero(self.numbers == int(text))[0])
        near = nearest(text, self.names) if len(self.names) else None
        other = f"one of them, such as {self.names[0]}" if len(self.names) else f"up to {self.nodes - 1}"
        raise UserError(
            f"The graph has no node {text!r}.",
            why=f"it has {self.nodes:,} nodes, {'with names of their own' if len(self.names) else 'numbered from 0'}",
            do=f"did you mean {near}?" if near else other,
        )

    def fingerprint(self) -> str:
        """Hash of everything that training sees; ranks compare it at start."""
        if self.identity and (self.numbers is None or self.partition is not None):
            return self.identity
        if self.identity:  # in another order
            return _mixed(self.identity, self.numbers)
        digest = xxhash.xxh3_128()
        arrays = [self.indptr, self.indices, self.features, self.labels, self.weights, self.edge_features, self.starts]
        arrays += [*(self.parts or ()), *(self.link_parts or ())]
        for array in arrays:
            digest.update(b"none" if array is None else f"{array.dtype}{array.shape}".encode())
            if array is not None:
                flat = array.reshape(-1)
                for at in range(0, len(flat), 1 << 22):  # in pieces: it may lie on disk
                    digest.update(np.ascontiguousarray(flat[at : at + (1 << 22)]).tobytes())
        return digest.hexdigest()[:16]

    @staticmethod
    def from_edges(sources: Any, targets: Any, *, features: Any, undirected: bool = False, **known: Any) -> Graph:
        """A graph from two lists of node ids, `sources[e]` -> `targets[e]`; mirrored when `undirected`.

        `known` are attributes of `Graph`, with `weights` and `edge_features` in the order of the edges given, and
        `labels` as `targets.read` takes them, for which `target` is `graph.target`. Arrays and tensors. Raises
        UserError for ids outside the graph, lengths that differ, NaN features, labels that do not match, a split that
        names strangers, and a graph without nodes.
        """
        known |= _labels(known, known.pop("target", None))
        ends = _ids(sources, "sources"), _ids(targets, "targets")
        features = _floats(features, "features")
        count = len(features)
        notes = list(known.pop("notes", ()))
        if len(ends[0]) != len(ends[1]):
            raise UserError(
                f"The graph has {len(ends[0])} sources for {len(ends[1])} targets of edges.", do="give each edge both"
            )
        for name, ids in zip(("sources", "targets"), ends, strict=True):
            _refuse_strangers(ids, count, name)
        values = {name: known.pop(name, None) for name in ("weights", "edge_features")}
        for name, given in values.items():
            if given is None:
                continue
            values[name] = rows = _floats(given, name)
            if len(rows) != len(ends[0]):
                raise UserError(
                    f"The graph has {len(rows)} rows of {name} for {len(ends[0])} edges.", do="give each edge a row"
                )
        indptr, indices, edges = _compressed(*ends, count, undirected, notes)
        made = Graph(
            indptr,
            indices,
            features,
            weights=None if values["weights"] is None else edges.added(values["weights"]),
            edge_features=selected(values["edge_features"], edges.first),
            notes=tuple(notes),
            **known,
        )
        return replace(checked(made), notes=(*made.notes, *_label_notes(made)))


def _labels(known: Mapping[str, Any], target: str | None) -> dict[str, Any]:
    """The attributes of a graph that say what its labels are."""
    given = known.get("labels")
    classes = known.get("classes", ())
    if given is None:
        return {}
    origin = known.get("origin", Graph.origin)
    chosen = target_kinds.read(given, origin, target or ("classes" if classes else None))
    return {
        "labels": chosen.labels,
        "classes": classes or chosen.classes,
        "values": chosen.kind == "values",
        "notes": (*known.get("notes", ()), *chosen.notes),
    }


def targeted(graph: Graph, target: str | None) -> Graph:
    """`graph`, whose labels are `target` (None: as they are). Raises UserError where they cannot be."""
    if target is None or graph.labels is None or graph.kind == target:
        return graph
    labels = graph.labels
    if graph.classes:
        labels = np.array([*graph.classes, ""])[labels]
    elif graph.kind == "classes":
        labels = np.where(labels == IGNORED, np.nan, labels)
    made = _labels({"labels": labels, "origin": graph.origin, "notes": graph.notes}, target)
    identity = graph.identity and _mixed(graph.identity, np.frombuffer(target.encode(), np.uint8))
    return checked(replace(graph, **made, identity=identity))


def scaled(graph: Graph) -> Graph:
    """`graph`, whose values have a scale: that of its training part, unless it has one. Raises UserError where no value
    trains."""
    if not graph.values or graph.labels is None or graph.parts is None or graph.scale is not None:
        return graph
    known = ~np.isnan(graph.labels[graph.parts.train]).all(0)
    if not known.any() and len(graph.parts.train):
        raise UserError(
            f"{graph.origin} has no target in its training part.",
            why=f"{len(graph.parts.train):,} train, and each is NaN or empty",
            do="give targets to some of them, or leave the split out (graph.split)",
        )
    empty = [f"targets: column {at} has no value in the training part" for at in np.flatnonzero(~known)]
    return replace(
        graph, scale=Scale.of(graph.labels, graph.parts.train), notes=(*graph.notes, *(empty if known.any() else ()))
    )


_VALUES = 1 << 22  # of features looked at once: they may lie on disk


Signs = tuple[bool | None, ...]
"""`signed` of the features, where it is known."""


def signed(features: Array) -> bool | None:
    """Whether features have negative values; None: each row has one value but 0 (bags of words). Of all rows, up to the
    first negative value."""
    single = True
    rows = max(1, _VALUES // max(1, features.shape[1]))
    for at in range(0, features.shape[0], rows):
        some = features[at : at + rows]
        some = some.toarray() if hasattr(some, "toarray") else np.asarray(some)
        if some.min(initial=0) < 0:
            return True
        single = single and bool(((some == 0) | (some == some.max(1, keepdims=True, initial=0))).all())
    return None if single else False


@dataclass(frozen=True)
class _Kept:
    """Which of the edges given became which edge kept: `first[e]` of edge e; all of `order` by groups at `group`."""

    first: Array
    order: Array
    group: Array

    def added(self, values: Array) -> Array:
        """float32 [edges]: the sum of the values of all that became one edge."""
        if not len(self.group):
            return np.zeros(0, np.float32)
        return np.add.reduceat(values[self.order].astype(np.float64), self.group).astype(np.float32)


def _compressed(
    sources: Array, targets: Array, nodes: int, undirected: bool, notes: list[str]
) -> tuple[Array, Array, _Kept]:
    number = np.arange(len(sources))
    loops = sources == targets
    if loops.any():
        notes.append(f"{int(loops.sum()):,} edges from a node to itself were dropped (networks add their own)")
        sources = sources[~loops]
        targets = targets[~loops]
        number = number[~loops]
    given = len(sources)
    keys = targets * np.int64(nodes) + sources
    if undirected:
        mirrored = sources * np.int64(nodes) + targets
        # Where every edge is given both ways already, mirroring would double the weights.
        undirected = not np.array_equal(np.unique(keys), np.unique(mirrored))
    if undirected:
        keys = np.concatenate([keys, mirrored])
        number = np.concatenate([number, number])
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    fresh = np.ones(len(keys), bool)
    fresh[1:] = keys[1:] != keys[:-1]
    group = np.flatnonzero(fresh)
    keys = keys[group]
    expected = given * (2 if undirected else 1)
    if not undirected and len(keys) < expected:
        notes.append(f"{expected - len(keys):,} edges were given more than once and are kept once")
    kind = np.int32 if nodes < 2**31 else np.int64
    indptr = np.zeros(nodes + 1, np.int64)
    rows = keys // nodes if nodes else keys
    np.cumsum(np.bincount(rows, minlength=nodes), out=indptr[1:])
    indices = (keys - rows * nodes).astype(kind)
    return indptr, indices, _Kept(number[order[group]], number[order], group)


# --- checks ------------------------------------------------------------------------------------------------------


def checked(graph: Graph) -> Graph:
    """`graph`, found consistent. Raises UserError naming what does not fit."""
    if graph.nodes == 0:
        raise UserError(f"The graph {graph.origin} is empty.", why="it has no nodes", do="give one with nodes")
    for name, rows in (("rows of features", graph.features), ("names", graph.names)):
        if len(rows) != graph.nodes and (len(rows) or name != "names"):
            raise UserError(f"The graph has {len(rows)} {name} for {graph.nodes} nodes.", do="give each node its own")
    for name in ("features", "weights", "edge_features"):
        _refuse_not_finite(getattr(graph, name), name, graph.columns if name == "features" else ())
    if graph.labels is not None:
        _refuse_labels(graph, graph.labels)
    for name, ids in graph.parts.named() if graph.parts else ():
        _refuse_strangers(ids, graph.items, f"the {name} part")
    if graph.parts is not None:
        joined = np.concatenate(graph.parts)
        if len(np.unique(joined)) != len(joined):
            raise UserError(
                "The split has nodes in two parts at once.",
                why="training nodes would be evaluated",
                do="give disjoint masks, or none and graph.split",
            )
    return graph


def _label_notes(graph: Graph) -> Iterator[str]:
    """What is said of items without a label, and of labels that are all of one class."""
    labels = graph.labels
    if labels is None or len(labels) < 2:
        return
    whole = labels.dtype.kind in "iu"
    missing = labels < 0 if whole else np.isnan(labels).reshape(len(labels), -1).all(1)
    if missing.any():
        items = "nodes" if graph.starts is None else "graphs"
        yield f"{int(missing.sum()):,} of {len(labels):,} {items} have no label"
    known = np.unique(labels[~missing])
    if whole and len(known) == 1:
        name = graph.classes[int(known[0])] if graph.classes else int(known[0])
        hint = "; -1 means that there is none: number classes 0, 1, …" if missing.any() else ""
        yield f"all {int((~missing).sum()):,} labels are of the class {name}{hint}"


_FEW = 1000  # so many classes are never too many: a piece of a larger graph keeps its numbers


def _refuse_labels(graph: Graph, labels: Array) -> None:
    if len(labels) != graph.items:
        what = "nodes" if graph.starts is None else "graphs"
        raise UserError(
            f"The labels do not match: {len(labels)} for {graph.items} {what}.",
            do="give each one label; -1 where there is none",
        )
    if labels.ndim != 1:
        return
    if labels.min(initial=IGNORED) < IGNORED:
        raise UserError(
            f"A label is {labels.min()}.",
            why="classes are numbered from 0, and -1 says that there is no label",
            do="number the classes 0, 1, …; -1 where there is none",
        )
    if graph.classes:
        _refuse_strangers(np.maximum(labels, 0), len(graph.classes), "a label")
    elif (most := int(labels.max(initial=-1))) >= max(graph.items, _FEW):
        raise UserError(
            f"A label is {most}, which would make {most + 1} classes for {graph.items} labels.",
            why="classes are numbered from 0, and there cannot be more of them than labels",
            do='number the classes 0, 1, …; -1 where there is none; graph.target = "values" trains a regression',
        )


def _refuse_strangers(ids: Array, count: int, name: str) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= count):
        bad = int(ids[(ids < 0) | (ids >= count)][0])
        raise UserError(
            f"{name[0].upper()}{name[1:]} has the id {bad}, outside the graph.",
            why=f"there are {count}, numbered from 0" if count else "there are none",
            do="give every node a row of features, or drop what names others",
        )


_PIECE = 1 << 16  # rows looked at at once: the array may lie on disk


def _refuse_not_finite(array: Array | None, name: str, columns: Sequence[str] = ()) -> None:
    if array is None:
        return
    for at in range(0, len(array), _PIECE):
        good = np.isfinite(array[at : at + _PIECE])
        if not good.all():
            first = np.argwhere(~good)[0]
            column = f", column {columns[first[1]]!r}" if columns else ""
            raise UserError(
                f"The graph's {name} hold NaN or infinity, first in row {at + int(first[0])}{column}.",
                why="one such value spreads to all neighbouring nodes",
                do="replace it before training (numpy.nan_to_num)",
            )


def _ids(values: Any, name: str) -> Array:
    array = as_array(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"The {name} of edges are {array.dtype}, not whole numbers.", do="give int64 node ids")
    return array.reshape(-1).astype(np.int64)


def _floats(values: Any, name: str) -> Array:
    array = as_array(values)
    if array.dtype.kind not in "fiub":
        raise UserError(f"The graph's {name} are {array.dtype}, not numbers.", do="give float32 values")
    if name == "weights":
        array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
        if array.ndim != 1:
            raise UserError(f"The graph's weights have the shape {list(array.shape)}.", do="give one for each edge")
    elif array.ndim != 2:
        raise UserError(f"The graph's {name} have {array.ndim} dimensions.", do="give a matrix [rows, columns]")
    return np.ascontiguousarray(array, dtype=np.float32)


# --- splits ------------------------------------------------------------------------------------------------------


def divided(graph: Graph, shares: SplitShares, seed: int) -> Graph:
    """`graph` with a seeded random split where it brings none: `shares` of its labelled items."""
    if graph.parts is not None:
        return graph
    ids = np.arange(graph.items)
    if graph.labels is not None:
        known = graph.labels >= 0 if graph.labels.ndim == 1 else ~np.isnan(graph.labels).all(1)
        ids = ids[known]
    return replace(graph, parts=parted(ids, shares, seed))


def parted(ids: Array, shares: SplitShares, seed: int) -> DataSplit:
    """`ids` dealt out by `shares`, seeded; each part ascending."""
    order = np.random.default_rng([seed, 0x5B11]).permutation(ids)
    cuts = [round(len(ids) * shares[0]), round(len(ids) * (shares[0] + shares[1]))]
    return DataSplit(*map(np.sort, np.split(order, cuts)))


def _mixed(identity: str, array: Any) -> str:
    """What stands for the content of a graph that was changed by `array`."""
    return xxhash.xxh3_128_hexdigest(identity.encode() + np.ascontiguousarray(array).tobytes())[:16]


def without_edges(graph: Graph, gone: Array) -> Graph:
    """`graph` without the edges where `gone` (bool [edges]) holds."""
    counts = np.bincount(graph.targets()[~gone], minlength=graph.nodes)
    return replace(
        graph,
        indptr=offsets_of(counts),
        indices=graph.indices[~gone],
        weights=selected(graph.weights, ~gone),
        edge_features=selected(graph.edge_features, ~gone),
        identity=graph.identity and _mixed(graph.identity, np.packbits(gone)),
    )


def relabelled(graph: Graph, permutation: Array) -> Graph:
    """`graph` with its nodes in another order: node `new` is what `permutation[new]` was. Rows stay ascending."""
    nodes = graph.nodes
    inverse = np.empty(graph.nodes, np.int64)
    inverse[permutation] = np.arange(nodes)
    targets = inverse[graph.targets()]
    sources = inverse[graph.indices]
    order = np.argsort(targets * np.int64(nodes) + sources)
    parts = graph.parts
    return replace(
        graph,
        indptr=offsets_of(np.bincount(targets, minlength=nodes)),
        indices=sources[order].astype(graph.indices.dtype),
        features=np.ascontiguousarray(graph.features[permutation]),
        labels=selected(graph.labels, permutation),
        parts=None if parts is None else DataSplit(*(np.sort(inverse[ids]) for ids in parts)),
        weights=selected(graph.weights, order),
        edge_features=selected(graph.edge_features, order),
        names=[graph.names[at] for at in permutation] if len(graph.names) else (),
        numbers=np.asarray(permutation, np.int64) if graph.numbers is None else graph.numbers[permutation],
        cut=selected(graph.cut, permutation),
        link_parts=None if graph.link_parts is None else _moved_links(graph.link_parts, inverse),
    )


def _moved_links(parts: DataSplit, inverse: Array) -> DataSplit:
    """The links `parts` where node `v` has become `inverse[v]`."""
    nodes = np.int64(len(inverse))
    ends = [(inverse[keys // nodes], inverse[keys % nodes]) for keys in parts]
    return DataSplit(*(np.sort(np.minimum(a, b) * nodes + np.maximum(a, b)) for a, b in ends))


def selected(values: Any, places: Any) -> Any:
    """`values[places]`; None where there are no values."""
    return None if values is None else values[places]


def seen_in_training(graph: Graph) -> Graph:
    """`graph` as an inductive run trains on it: without the edges that touch nodes held out."""
    assert graph.parts is not None
    hidden = np.zeros(graph.nodes, bool)
    hidden[graph.parts.validation] = True
    hidden[graph.parts.test] = True
    return without_edges(graph, hidden[graph.indices] | hidden[graph.targets()])
