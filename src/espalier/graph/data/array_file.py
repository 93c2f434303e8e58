"""Arrays by name, from `.npz` files and from dicts: what keys mean, ours and PyG's, and which of them were not used."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from espalier.graph.data.graph import Array, DataSplit, Graph
from espalier.machine.resource_limits import refuse_large
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import Fields, FieldUse, parsing, printable, unused
from espalier.recipe.units import show_size

_TABLE = data_table(__file__)
_WORDS: dict[str, list[str]] = _TABLE["words"]
MASKS = ("train_mask", "val_mask", "test_mask")
KEYS = Fields("key", frozenset(chain.from_iterable(_WORDS.values())), _TABLE["refused"], "graph")
"""Keys of graphs, and those that change what the others mean."""
_MATRIX = Fields("key", frozenset({"format", "shape", "data", "indptr", "indices", "row", "col"}))
"""Keys of SciPy's sparse matrices."""

_ALONE, _EACH = 1000, 100
"""Nodes that edges may name without a table of nodes: so many, and so many more for each edge."""
NUMBERED = "number the nodes 0, 1, 2 …, or give edges.csv with a table of nodes, nodes.csv, that has a column id"


def understood(table: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The values of `table` that are used, by PyG's names. Raises UserError where two mean the same."""
    known = {}
    for name, words in _WORDS.items():
        given = [word for word in words if table.get(word) is not None]
        if len(given) > 1:
            raise UserError(
                f"{origin} has the keys {' and '.join(given)}.", why=f"each could be {name}", do="leave one of them out"
            )
        if given and "complex" in str(getattr(table[given[0]], "dtype", "")):
            raise UserError(f"{origin}: key {given[0]!r} holds complex numbers.", do="give real numbers")
        if given:
            known[name] = table[given[0]]
    refuse_large(origin, sum(getattr(value, "nbytes", 0) for value in known.values()))  # a view may repeat one number
    return known


def load(file: Path, **how: Any) -> Graph:
    """From `edge_index` [2, edges] (or `sources`, `targets`) and, under PyG's names or ours, what is known besides;
    `how`: `undirected` and `target`, as `Graph.from_edges` takes them."""
    table, names, notes = _read(file)
    known = understood(table, printable(file))
    if "edge_index" in known:
        sources, targets = both_ends(known["edge_index"], str(file))
    elif {"sources", "targets"} <= set(known):
        sources = known["sources"]
        targets = known["targets"]
    else:
        raise UserError(
            f"{printable(file)} has no edge_index.", why=f"it has {printable(', '.join(names))}", do="int64 [2, edges]"
        )
    features = known.get("x")
    if features is None:
        given = int(known.get("num_nodes", 0))
        count = given or int(max(sources.max(initial=-1), targets.max(initial=-1))) + 1
        refuse_far_ids(count, given or len(sources), file)
        features = degree_features((sources, targets), count)
    more: dict[str, Any] = {"origin": str(file), "notes": notes, **how}
    if "names" in known:
        more["names"] = known["names"].astype(str).tolist()
    return graph_of(known, (sources, targets), features, **more)


def graph_of(known: Mapping[str, Any], ends: tuple[Any, Any], features: Any, **more: Any) -> Graph:
    """The graph of what is `known` by PyG's names, with `more` for `Graph.from_edges`. Raises UserError."""
    masks = [known.get(name) for name in MASKS]
    more |= masked_parts(masks, len(features))
    for ours, name in (("labels", "y"), ("weights", "edge_weight"), ("edge_features", "edge_attr")):
        more[ours] = known.get(name)
    return Graph.from_edges(*ends, features=features, **more)


def _read(file: Path) -> tuple[dict[str, Array], list[str], list[str]]:
    """The arrays that are used, the names of all, and notes on the others. Sizes are compared with memory first."""
    do = (
        "numpy.savez(file, edge_index=…, x=…, y=…), of numbers: unpickling arrays of objects can execute arbitrary code"
    )
    with parsing(file, do), zipfile.ZipFile(file) as archive:
        sizes = {Path(info.filename).stem: info.file_size for info in archive.infolist()}
        matrix = {"format", "shape", "data"} <= sizes.keys()
        use = FieldUse(_MATRIX if matrix else KEYS, str(file))
        use.count(sizes)
        used = [name for name in sizes if name in use.fields.read]
        refuse_large(printable(file), 2 * sum(sizes[name] for name in used), do)
        with np.load(file, allow_pickle=False) as opened:
            table = {name: np.asarray(opened[name]) for name in used}
        table = _entries(table) if matrix else table
        for name, array in table.items():
            if array.dtype.kind not in ("biufSU" if name in (*_WORDS["y"], *_WORDS["names"]) else "biuf"):
                raise ValueError(f"key {name!r} holds {array.dtype}, not numbers")
        return table, list(sizes), [unused("key", name, show_size(sizes[name])) for name in use.unused]


def _entries(stored: Mapping[str, Array]) -> dict[str, Array]:
    """The entries of a square matrix as `scipy.sparse.save_npz` stores it, under the keys of graphs: its rows are
    sources, its columns targets, its values weights."""
    form = str(stored["format"].astype(str))
    rows, columns = stored["shape"].tolist()
    if rows != columns:
        raise ValueError(f"its matrix has {rows:,} rows and {columns:,} columns, and edges are those of a square one")
    if form == "coo":
        ends = [stored["row"], stored["col"]]
    elif form in ("csr", "csc"):
        ends = [np.repeat(np.arange(rows), np.diff(stored["indptr"])), stored["indices"]]
        ends = ends if form == "csr" else ends[::-1]
    else:
        raise ValueError(f"its matrix is in the format {form}; csr, csc and coo are read")
    return {"edge_index": np.stack(ends), "edge_weight": stored["data"], "num_nodes": np.array(rows)}


def masked_parts(masks: Sequence[Any], nodes: int) -> dict[str, Any]:
    """`parts` and `splits` of the graph whose masks of training, validation and test these are, [nodes] or
    [nodes, splits]; one left out is empty.

    Raises UserError for a mask that is not of all `nodes`.
    """
    given = [None if mask is None else np.asarray(mask) for mask in masks]
    count = max((mask.shape[1] for mask in given if mask is not None and mask.ndim == 2), default=1)
    if all(mask is None for mask in given):
        return {}
    splits = []
    for at in range(max(1, count)):
        columns = [
            mask[:, at] if mask is not None and mask.ndim == 2 and at < mask.shape[1] else mask for mask in given
        ]
        splits.append(_masked(columns, nodes))
    return {"parts": splits[0], "splits": tuple(splits)}


def _masked(masks: Sequence[Array | None], nodes: int) -> DataSplit:
    for name, mask in zip(("training", "validation", "test"), masks, strict=True):
        if mask is not None and mask.shape != (nodes,):
            raise UserError(
                f"The mask of the {name} part has the shape {list(mask.shape)}, and there are {nodes} nodes.",
                do="true or false for each node",
            )
        if mask is not None and not np.isin(mask, (0, 1)).all():
            raise UserError(f"The mask of the {name} part holds {mask.max()}.", do="true or false for each node")
    return DataSplit(*(np.zeros(0, np.int64) if mask is None else np.flatnonzero(mask) for mask in masks))


def both_ends(edges: Any, origin: str) -> tuple[Any, Any]:
    """Sources and targets of an `edge_index` [2, edges]. Raises UserError for another shape."""
    shape = tuple(np.shape(edges))
    if len(shape) != 2 or shape[0] != 2:
        raise UserError(
            f"{origin}: edge_index has the shape {list(shape)}, not [2, edges].",
            do="transpose it (edge_index.T)" if shape[1:] == (2,) else "a row of sources and a row of targets",
        )
    return edges[0], edges[1]


def refuse_far_ids(count: int, edges: int, file: Path) -> None:
    """Refuses ends of edges so far above their number that they cannot be rows: there are `count` nodes then."""
    if count > _ALONE + _EACH * edges:
        raise UserError(
            f"{printable(file)} has an edge at {count - 1}, and {edges:,} edges.",
            why="without a table of nodes the ends of edges are its rows, 0, 1, 2 …",
            do=NUMBERED,
        )
    refuse_large(f"{printable(file)}: a table of {count:,} nodes", 32 * count)


DEGREE_COLUMNS = ("1", "log(1 + degree)")
NO_FEATURE = "no column of nodes is a feature"
"""How the note on them begins."""


def degree_features(edges: tuple[Array, Array], count: int) -> Array:
    """float32 [count, 2] for nodes without features: a one, and the logarithm of the degree."""
    valid = [ends[(ends >= 0) & (ends < count)] for ends in edges]
    degree = sum(np.bincount(ends, minlength=count) for ends in valid)
    return np.stack([np.ones(count), np.log1p(degree)], 1).astype(np.float32)
