"""The folders that OGB's data sets come in (arXiv 2005.00687): sets for nodes, for graphs and for links.

The graph of a link set holds the links to train on. Those that validate and test are added and taken out again by
`link_prediction`. A pair that the split has twice is held out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from espalier.graph.data import numpy_pickle, separated_text
from espalier.graph.data.array_file import refuse_far_ids
from espalier.graph.data.graph import Array, DataSplit, Graph
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import Fields, FieldUse, parsing, printable, unused
from espalier.recipe.offsets import offsets_of

_DO = "unpack the data set anew"
_FILES = ("edge", "num-node-list", "num-edge-list", "node-label", "graph-label", "node-feat", "edge-feat")
_HETEROGENEOUS = ("triplet-type-list", "num-node-dict", "nodetype-has-feat", "edge_reltype")
_KEYS = Fields("key", frozenset({"edge", "source_node", "target_node"}), {"relation": "it is of no graph of one kind"})


def is_ogb(folder: Path) -> bool:
    """Whether `folder` is laid out as OGB unpacks its data sets: `raw/edge.csv.gz` and its kin."""
    return any((folder / "raw" / f"{name}.csv.gz").exists() for name in ("edge", *_HETEROGENEOUS))


def load(folder: Path, *, undirected: bool, task: str = "node", target: str | None = None) -> Graph:
    """An OGB data set for nodes, graphs or (`task` = link) links, with the split it brings; `target` is `graph.target`.
    Raises UserError."""
    raw = folder / "raw"
    if any((raw / f"{name}.csv.gz").exists() for name in _HETEROGENEOUS):
        raise UserError(
            f"{printable(folder)} is a heterogeneous graph of OGB.",
            why="networks here have one kind of node and one kind of edge",
            do="take out one of its relations, as edges.csv",
        )
    sizes = _table(raw, "num-node-list", np.int64)
    edges = _table(raw, "edge", np.int64)
    known = {f"{name}.csv.gz" for name in _FILES}
    notes = [unused("file", path.name) for path in sorted(raw.iterdir()) if path.name not in known]
    many = len(sizes) > 1
    link_parts = None
    ends = edges.T
    if many:
        per_graph = _table(raw, "num-edge-list", np.int64)[:, 0]
        starts = offsets_of(sizes[:, 0])
        ends = ends + np.repeat(starts[:-1], per_graph)
    nodes = int(sizes.sum())
    name = "graph-label" if many else "node-label"
    labels = _optional(raw, name, np.float64)
    if labels is None and task != "link":
        raise UserError(
            f"{printable(folder)} has no labels ({name}.csv.gz).",
            why="OGB's sets for link prediction have none",
            do='graph.task = "link"',
        )
    if labels is None:
        ends, link_parts = _links(folder, ends, nodes, notes)
    refuse_far_ids(nodes, ends.shape[1], folder)
    features = _optional(raw, "node-feat", np.float32)
    edge_features = _optional(raw, "edge-feat", np.float32)
    if edge_features is not None and ends.shape[1] > len(edge_features):
        notes.append(unused("file", "edge-feat.csv.gz", "links held out have none"))
        edge_features = None
    return Graph.from_edges(
        ends[0],
        ends[1],
        features=np.ones((nodes, 1), np.float32) if features is None else features,
        undirected=undirected,
        labels=labels[:, 0] if labels is not None and labels.shape[1] == 1 else labels,
        target=target,
        parts=None if labels is None else _parts(folder, notes),
        link_parts=link_parts,
        edge_features=edge_features,
        starts=starts if many else None,
        origin=str(folder),
        notes=notes,
    )


def _optional(raw: Path, name: str, kind: Any) -> Array | None:
    """As `_table`; None where there is no such file."""
    return _table(raw, name, kind) if (raw / f"{name}.csv.gz").exists() else None


def _table(raw: Path, name: str, kind: Any) -> Array:
    """[rows, columns] of a compressed table of numbers."""
    file = raw / f"{name}.csv.gz"
    with parsing(file, _DO):
        separated_text.check_size(file)
        return np.loadtxt(file, dtype=kind, delimiter=",", ndmin=2)


def _split_folder(folder: Path, notes: list[str]) -> Path | None:
    """The folder of the split, the first by name; others are named in `notes`."""
    splits = sorted({path.parent for path in folder.glob("split/*/train.*")})
    notes += [unused("split", place.name, f"{splits[0].name} is used") for place in splits[1:]]
    return splits[0] if splits else None


def _parts(folder: Path, notes: list[str]) -> DataSplit | None:
    place = _split_folder(folder, notes)
    if place is None:
        return None
    with parsing(place, _DO):
        return DataSplit(
            *(
                np.sort(np.loadtxt(place / f"{name}.csv.gz", dtype=np.int64, ndmin=1))
                for name in ("train", "valid", "test")
            )
        )


# --- links -----------------------------------------------------------------------------------------------------------


def _links(folder: Path, ends: Array, nodes: int, notes: list[str]) -> tuple[Array, DataSplit | None]:
    """The edges of all parts, int64 [2, edges], and the parts as `Graph.link_parts`; None: the split is left out."""
    place = _split_folder(folder, notes)
    if place is None:
        return ends, None
    train, valid, test = (_pairs(place, name, nodes, notes) for name in ("train", "valid", "test"))
    training, validation, test_links = (
        np.unique(pairs.min(0) * np.int64(nodes) + pairs.max(0))
        for pairs in (np.concatenate([ends, train], 1), valid, test)
    )
    twice = len(training) + len(validation) + len(test_links)
    validation = np.setdiff1d(validation, test_links)
    training = np.setdiff1d(training, np.concatenate([validation, test_links]))
    twice -= len(training) + len(validation) + len(test_links)
    if not (len(training) and len(validation) and len(test_links)):
        notes.append(f"not used: split {place.name!r}, whose parts have the same links; graph.split divides them")
        return ends, None
    if twice:
        notes.append(f"{twice:,} links are in several parts of the split {place.name!r} and are held out")
    return np.concatenate([ends, train, valid, test], 1), DataSplit(training, validation, test_links)


def _pairs(place: Path, name: str, nodes: int, notes: list[str]) -> Array:
    """int64 [2, links] of one part of the split."""
    files = sorted(path for path in place.glob(f"{name}.*") if path.name in (f"{name}.pt", f"{name}.csv.gz"))
    if not files:
        raise UserError(f"{printable(place)} has no {name}.pt.", do=_DO)
    file = files[0]
    with parsing(file, _DO):
        if file.suffix == ".gz":
            pairs = _table(place, name, np.int64).T
        else:
            pairs = _saved_pairs(numpy_pickle.read_saved(file, _DO), file, notes)
        if pairs.ndim != 2 or len(pairs) != 2 or pairs.dtype.kind not in "iu":
            raise ValueError(f"its links are {pairs.dtype} {list(pairs.shape)}, not whole numbers [links, 2]")
        if pairs.size and (pairs.min() < 0 or pairs.max() >= nodes):
            raise ValueError(f"it names a node outside the {nodes:,} of the graph")
    return pairs.astype(np.int64)


def _saved_pairs(table: Mapping[str, Array], file: Path, notes: list[str]) -> Array:
    FieldUse(_KEYS, str(file)).count(table)
    notes += [
        unused("key", name, f"{values.dtype} {list(values.shape)} of {file.name}")
        for name, values in table.items()
        if name not in _KEYS.read
    ]
    if "edge" in table:
        return table["edge"].T
    return np.stack([table["source_node"], table["target_node"]])
