"""Edge lists: `.csv`, `.npz` and `.parquet`, and the folders that OGB's data sets come in.

A table of edges has a column for each end (`source`, `target`, else the first two), maybe `weight`; other columns are
edge features. A table of nodes lies beside it (`edges.csv` and `nodes.csv`, or `x.csv` and `x.nodes.csv`): `id` (left
out: the row), `label`, `part` (train, validation, test), and a column for each feature. No label, or no part, is -1, an
empty cell, a null, `nan`, `None` or `null`.
"""

from __future__ import annotations

import contextlib
import csv
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from espalier.errors import UserError, missing_extra
from espalier.graph.data import Array, DataSplit, Graph

SUFFIXES = (".csv", ".npz", ".parquet")

Columns = Mapping[str, Array]


def load(file: Path, *, undirected: bool, target: str | None = None) -> Graph:
    """The graph whose edges are in `file`; `target` is `graph.target`. Raises UserError."""
    if file.suffix == ".npz":
        return _arrays(file, undirected, target)
    edges = _read(file)
    beside = [file.with_name(f"{file.stem}.nodes{file.suffix}"), file.with_name(f"nodes{file.suffix}")]
    nodes = next((_read(one) for one in beside if one.exists() and one != file), {})
    ends, rest = _ends(edges, file)
    ids = nodes.get("id")
    sources, targets = (_numbered(one, ids, file) for one in ends)
    count = _count(nodes, sources, targets)
    weights = rest.pop("weight", None)
    return Graph.from_edges(
        sources,
        targets,
        features=_features(nodes, (sources, targets), count, file),
        undirected=undirected,
        labels=nodes.get("label"),
        target=target,
        parts=_named_parts(nodes.get("part"), file),
        weights=None if weights is None else _numbers(weights, "weight", file),
        edge_features=np.stack([_numbers(one, name, file) for name, one in rest.items()], 1) if rest else None,
        names=() if ids is None else _words(ids),
        origin=str(file),
        columns=_feature_names(nodes) or ("1", "log(1 + degree)"),
        edge_columns=tuple(rest),
    )


def _read(file: Path) -> Columns:
    return _parquet(file) if file.suffix == ".parquet" else _csv(file)


def _csv(file: Path) -> Columns:
    try:
        with open(file, newline="", encoding="utf-8") as opened:
            lines = csv.reader(opened)
            first = next(lines, None)
            second = next(lines, first)
        if first is None or second is None:
            raise UserError(f"{file} is empty.", do="a line per edge: source,target")
        head = not all(_is_number(cell) for cell in first)
        names = [cell.strip() for cell in first] if head else [f"column{at}" for at in range(len(first))]
        if head and second is first:
            return {name: np.zeros(0, np.int64) for name in names}
        table = _cells(file, int(head), numbers=all(_is_number(cell) for cell in second))
    except (UnicodeDecodeError, ValueError) as error:
        raise UserError(
            f"{file} is not a table: {str(error).rstrip('.')}.", do="UTF-8 text, as many cells in every line"
        ) from None
    return {name: table[:, at] for at, name in enumerate(names)}


def _cells(file: Path, skipped: int, numbers: bool) -> Array:
    """float64 where all cells are numbers that it holds exactly, else text. `numbers`: the first line's are."""
    how: Any = {"delimiter": ",", "skiprows": skipped, "ndmin": 2, "comments": None, "quotechar": '"'}
    if numbers:
        with contextlib.suppress(ValueError):  # a word further down; what is worse is met again below
            table = np.loadtxt(file, dtype=np.float64, **how)
            if not (np.abs(table) >= _EXACT).any():
                return table
    return np.loadtxt(file, dtype=str, **how)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _parquet(file: Path) -> Columns:
    try:
        from pyarrow import parquet
    except ImportError:
        raise missing_extra("pyarrow", "graph", f"data.path = '{file}'") from None
    try:
        table = parquet.read_table(file)
    except Exception as error:  # pyarrow's errors have no common base
        raise UserError(f"{file} cannot be read.", why=str(error), do="give a Parquet file, .csv or .npz") from None
    return {name: table[name].to_numpy() for name in table.column_names}


def _ends(edges: Columns, file: Path) -> tuple[tuple[Array, Array], dict[str, Array]]:
    names = list(edges)
    if len(names) < 2:
        raise UserError(f"{file} has {len(names)} column.", why="an edge has two ends", do="columns source and target")
    pair = ("source", "target") if {"source", "target"} <= set(names) else (names[0], names[1])
    return (edges[pair[0]], edges[pair[1]]), {name: edges[name] for name in names if name not in pair}


def _numbered(ends: Array, ids: Array | None, file: Path) -> Array:
    """The ends of edges as rows of the table of nodes."""
    if ids is None:
        numbers = _numbers(ends, "ends of edges", file)
        if len(numbers) and not np.array_equal(numbers, np.round(numbers)):
            raise UserError(f"{file}: ends of edges are not whole numbers.", do="give ids, or names and a nodes table")
        if numbers.max(initial=0) >= _EXACT:
            raise UserError(
                f"{file} has an edge at {_words(ends)[int(numbers.argmax())]}.",
                why="without a table of nodes the ends of edges are its rows, 0, 1, 2 …",
                do=f"a table of nodes with a column id: {file.stem}.nodes{file.suffix}",
            )
        return numbers.astype(np.int64)
    known, ends = _alike(ids), _alike(ends)
    if known.dtype.kind != ends.dtype.kind:
        known, ends = known.astype(str), ends.astype(str)
    order = np.argsort(known, kind="stable")
    twice = known[order][1:] == known[order][:-1]
    if twice.any():
        raise UserError(
            f"{file}: two nodes have the id {known[order][1:][twice][0]}.",
            why="an edge there could mean either",
            do="give each node an id of its own",
        )
    at = np.searchsorted(known, ends, sorter=order)
    found = order[np.minimum(at, len(known) - 1)]
    strange = known[found] != ends
    if strange.any():
        raise UserError(
            f"{file} has an edge at {ends[strange][0]}, which is no id in the table of nodes.",
            do="give every node a line there, or drop such edges",
        )
    return found.astype(np.int64)


_EXACT = 2**53
"""Below it a float64 holds every whole number."""
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_POINTLESS = re.compile(r"(-?[0-9]+)\.0*")
_MISSING = ("", "-1", "nan", "NaN", "None", "null")


def _alike(ids: Array) -> Array:
    """Ids in the one form that can be compared: int64 where all are whole numbers, however stored, else text."""
    if ids.dtype.kind in "iu":
        return ids.astype(np.int64)
    if ids.dtype.kind == "f" and (np.abs(ids) < _EXACT).all() and (ids == np.round(ids)).all():
        return ids.astype(np.int64)
    words = _words(ids)
    return np.array([int(word) for word in words] if all(map(_WHOLE.fullmatch, words)) else words)


def _words(column: Array) -> list[str]:
    """A column as text: whole numbers without a point (39, not 39.0), nothing where a value is missing."""
    missing = [one is None or (isinstance(one, float) and math.isnan(one)) for one in column.tolist()]
    words = ["" if gone else str(one).strip() for one, gone in zip(column.tolist(), missing, strict=True)]
    return [_POINTLESS.sub(r"\1", word) if _POINTLESS.fullmatch(word) else word for word in words]


def _numbers(values: Array, name: str, file: Path) -> Array:
    try:
        return np.asarray(values, np.float64)
    except ValueError:
        word = next(str(one) for one in np.ravel(values).tolist() if not _is_number(str(one)))
        nodes = "add a nodes table (nodes.csv) with a column id, in a folder with edges.csv"
        do = nodes if name == "ends of edges" else "give numbers, or drop the column"
        raise UserError(f"{file}: {name} must be numbers, and one is {word!r}.", do=do) from None


def _count(nodes: Columns, sources: Array, targets: Array) -> int:
    if nodes:
        return len(next(iter(nodes.values())))
    return int(max(sources.max(initial=-1), targets.max(initial=-1))) + 1


def _feature_names(nodes: Columns) -> tuple[str, ...]:
    return tuple(name for name in nodes if name not in ("id", "label", "part"))


def _features(nodes: Columns, edges: tuple[Array, Array], count: int, file: Path) -> Array:
    """The columns that are features; without any: a one, and the logarithm of the degree."""
    names = _feature_names(nodes)
    if names:
        columns = [_numbers(nodes[name], f"the feature {name!r} of nodes", file) for name in names]
        return np.stack(columns, 1).astype(np.float32)
    valid = [ends[(ends >= 0) & (ends < count)] for ends in edges]
    degree = sum(np.bincount(ends, minlength=count) for ends in valid)
    return np.stack([np.ones(count), np.log1p(degree)], 1).astype(np.float32)


def _named_parts(column: Array | None, file: Path) -> DataSplit | None:
    if column is None:
        return None
    words = np.array(["" if word in _MISSING else word for word in _words(column)])
    strange = set(words.tolist()) - {"train", "validation", "test", ""}
    if strange:
        raise UserError(f"{file}: part = {min(strange)!r} is not possible.", do="train, validation, test, or empty")
    return DataSplit(*(np.flatnonzero(words == name) for name in ("train", "validation", "test")))


_WORDS = {
    "features": ("features", "x", "feat", "node_feat"),
    "labels": ("labels", "y", "label", "node_label"),
    "weights": ("weights", "edge_weight", "weight"),
    "edge_features": ("edge_features", "edge_attr", "edge_feat"),
}


def _arrays(file: Path, undirected: bool, target: str | None) -> Graph:
    """From `edge_index` [2, edges] (or `sources`, `targets`) and, under PyG's names or ours, what is known besides."""
    try:
        with np.load(file, allow_pickle=False) as opened:
            found = dict(opened)
    except (ValueError, OSError, MemoryError) as error:
        raise UserError(
            f"{file} cannot be read: {error}.",
            why="arrays of objects are pickled, and unpickling can execute arbitrary code"
            if "pickle" in str(error)
            else "",
            do="numpy.savez(file, edge_index=…, x=…, y=…)",
        ) from None
    if "edge_index" in found:
        sources, targets = both_ends(found["edge_index"], str(file))
    elif {"sources", "targets"} <= set(found):
        sources, targets = found["sources"], found["targets"]
    else:
        raise UserError(f"{file} has no edge_index.", why=f"it has {', '.join(found)}", do="int64 [2, edges]")
    known = {name: next((found[word] for word in words if word in found), None) for name, words in _WORDS.items()}
    features = known.pop("features")
    if features is None:
        features = _features({}, (sources, targets), _count({}, sources, targets), file)
    parts = masked_parts([found.get(name) for name in ("train_mask", "val_mask", "test_mask")], len(features))
    made = {"features": features, "parts": parts, "target": target, **known}
    return Graph.from_edges(sources, targets, undirected=undirected, origin=str(file), **made)


# --- what arrays mean, PyG's as well ----------------------------------------------------------------------------


def masked_parts(masks: Sequence[Any], nodes: int) -> DataSplit | None:
    """The split that masks of training, validation and test give; one left out is empty, None without any.

    Raises UserError for a mask that is not of all `nodes`.
    """
    given = [None if one is None else np.asarray(one).astype(bool) for one in masks]
    given = [one[:, 0] if one is not None and one.ndim == 2 else one for one in given]  # several splits: the first
    if all(one is None for one in given):
        return None
    for name, one in zip(("training", "validation", "test"), given, strict=True):
        if one is not None and one.shape != (nodes,):
            raise UserError(
                f"The mask of the {name} part has the shape {list(one.shape)}, and there are {nodes} nodes.",
                do="true or false for each node",
            )
    return DataSplit(*(np.zeros(0, np.int64) if one is None else np.flatnonzero(one) for one in given))


def both_ends(edges: Any, origin: str) -> tuple[Any, Any]:
    """Sources and targets of an `edge_index` [2, edges]. Raises UserError for another shape."""
    shape = tuple(np.shape(edges))
    if len(shape) != 2 or shape[0] != 2:
        raise UserError(
            f"{origin}: edge_index has the shape {list(shape)}, not [2, edges].",
            do="transpose it (edge_index.T)" if shape[1:] == (2,) else "a row of sources and a row of targets",
        )
    return edges[0], edges[1]


# --- OGB ---------------------------------------------------------------------------------------------------------


def is_ogb(folder: Path) -> bool:
    """Whether `folder` is laid out as OGB unpacks its data sets (arXiv 2005.00687): `raw/edge.csv.gz` and its kin."""
    return (folder / "raw" / "edge.csv.gz").exists()


def load_ogb(folder: Path, *, undirected: bool, target: str | None = None) -> Graph:
    """An OGB data set for nodes or for graphs, with the split it brings; `target` is `graph.target`."""
    raw = folder / "raw"
    sizes = _ogb(raw, "num-node-list", np.int64)
    edges = _ogb(raw, "edge", np.int64)
    many = len(sizes) > 1
    ends = edges.T
    if many:
        per_graph = _ogb(raw, "num-edge-list", np.int64)[:, 0]
        starts = np.concatenate([[0], np.cumsum(sizes[:, 0])])
        ends = ends + np.repeat(starts[:-1], per_graph)
    labels = _ogb(raw, "graph-label" if many else "node-label", np.float64)
    features = raw / "node-feat.csv.gz"
    nodes = int(sizes.sum())
    return Graph.from_edges(
        ends[0],
        ends[1],
        features=_ogb(raw, "node-feat", np.float32) if features.exists() else np.ones((nodes, 1), np.float32),
        undirected=undirected,
        labels=labels[:, 0] if labels.shape[1] == 1 else labels,
        target=target,
        parts=_ogb_parts(folder),
        edge_features=_ogb(raw, "edge-feat", np.float32) if (raw / "edge-feat.csv.gz").exists() else None,
        starts=starts if many else None,
        origin=str(folder),
    )


def _ogb(raw: Path, name: str, kind: Any) -> Array:
    file = raw / f"{name}.csv.gz"
    try:
        return np.loadtxt(file, dtype=kind, delimiter=",", ndmin=2)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}.", do="unpack the data set anew") from None


def _ogb_parts(folder: Path) -> DataSplit | None:
    splits = sorted(folder.glob("split/*/train.csv.gz"))
    if not splits:
        return None
    place = splits[0].parent
    return DataSplit(
        *(np.sort(np.loadtxt(place / f"{name}.csv.gz", dtype=np.int64, ndmin=1)) for name in ("train", "valid", "test"))
    )
