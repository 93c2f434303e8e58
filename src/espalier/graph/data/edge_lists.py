"""Edge lists: separated text, Parquet, `.npz`, the formats of `graph_formats`, and the tables of nodes beside them.

A table of edges has a column for each end, maybe a weight; other columns of numbers are edge features. A table of nodes
lies beside it (`edges.csv` and `nodes.csv`, or `x.csv` and `x.nodes.csv`): ids (left out: the rows), labels, parts
(train, validation, test), and a column for each feature. `table_columns` knows what columns are called. No label, or no
part, is -1, an empty cell, a null, `nan`, `None` or `null`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from espalier.graph.data import array_file, graph_formats, separated_text
from espalier.graph.data.array_file import DEGREE_COLUMNS, NO_FEATURE, NUMBERED, degree_features, refuse_far_ids
from espalier.graph.data.graph import Array, Graph
from espalier.graph.data.separated_text import ending
from espalier.graph.data.table_columns import (
    EdgeTable,
    NodeTable,
    alike,
    ends_as_numbers,
    read_edges,
    read_nodes,
    settled,
)
from espalier.graph.data.targets import EXACT, as_words
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import printable, unused

METIS = (".metis", ".graph")
TEXT = (*separated_text.ENDINGS, *METIS, ".mtx", ".json", ".graphml")
SUFFIXES = (*TEXT, ".npz", ".parquet")
_TABLES = (*separated_text.ENDINGS, ".parquet")


def is_edge_list(path: Path) -> bool:
    """Whether a file's name ends as those do that `load` reads."""
    return ending(path) in (TEXT if path.suffix.lower() == ".gz" else SUFFIXES)


def beside(folder: Path, stem: str, endings: Sequence[str]) -> list[Path]:
    """The files of `folder` that are called `stem` and end in one of `endings`, in any case."""
    names = {stem.lower() + suffix + packed for suffix in endings for packed in ("", ".gz")}
    return sorted(path for path in folder.iterdir() if path.name.lower() in names)


def load(file: Path, *, undirected: bool, target: str | None = None) -> Graph:
    """The graph whose edges are in `file`; `target` is `graph.target`. Raises UserError."""
    place = _nodes_beside(file)
    kind = ending(file)
    if kind == ".npz":
        graph = array_file.load(file, undirected=undirected, target=target)
        return graph if place is None else replace(graph, notes=(*graph.notes, unused("file", place.name)))
    if kind in (".json", ".graphml"):
        both, edges = graph_formats.node_link(file)
        if place is not None:
            edges = replace(edges, notes=(*edges.notes, unused("file", place.name)))
        return _graph(file, settled(both, edges.sources, edges.targets), edges, undirected, target)
    nodes = None if place is None else read_nodes(place)
    maybe = None if nodes is None else nodes.ids if nodes.maybe is None else nodes.table.columns[nodes.maybe]
    formats = {".mtx": graph_formats.matrix_market, **dict.fromkeys(METIS, graph_formats.metis)}
    edges = formats[kind](file) if kind in formats else read_edges(file, maybe)
    nodes = None if nodes is None else settled(nodes, edges.sources, edges.targets)
    return _graph(file, nodes, edges, undirected, target)


def _nodes_beside(file: Path) -> Path | None:
    """The table of nodes that belongs to the table of edges `file`."""
    stem = Path(file.stem).stem if file.suffix.lower() == ".gz" else file.stem
    for name in (f"{stem}.nodes", "nodes"):
        tables = [path for path in beside(file.parent, name, _TABLES) if path != file]
        alike_tables = [path for path in tables if ending(path) == ending(file)]
        tables = alike_tables if len(alike_tables) == 1 else tables
        if len(tables) > 1:
            raise UserError(
                f"{printable(file.parent)} has {' and '.join(path.name for path in tables)}.",
                why=f"each could be the nodes of {file.name}",
                do="leave one of them there",
            )
        if tables:
            return tables[0]
    return None


def _graph(file: Path, nodes: NodeTable | None, table: EdgeTable, undirected: bool, target: str | None) -> Graph:
    about = nodes or NodeTable(table.table)
    ids = about.ids
    by = ids if table.nodes is None else None  # a matrix has its own numbers: its rows are those of the table
    sources, targets = (_numbered(ends, by, file) for ends in (table.sources, table.targets))
    count = _count(file, nodes, table, sources, targets)
    notes = [*about.notes, *table.notes]
    if nodes is None and len(sources) and min(sources.min(), targets.min()) == 1:
        notes.append(f"no edge of {file.name} names node 0, which is in the graph: nodes are numbered from 0")
    columns = about.features
    if nodes is not None and not columns:
        notes.append(f"{NO_FEATURE}: each has 1 and log(1 + degree)")
    graph = Graph.from_edges(
        sources,
        targets,
        features=np.stack([*columns.values()], 1) if columns else degree_features((sources, targets), count),
        undirected=_both_ways(table, undirected, notes),
        labels=about.labels,
        label_columns=about.label_columns,
        target=target,
        parts=about.parts,
        weights=table.weights,
        edge_features=np.stack([*table.features.values()], 1) if table.features else None,
        names=() if ids is None else as_words(ids),
        origin=str(file),
        columns=tuple(columns) or DEGREE_COLUMNS,
        edge_columns=tuple(table.features),
        notes=notes,
    )
    return replace(graph, texts=about.texts)


def _both_ways(table: EdgeTable, undirected: bool, notes: list[str]) -> bool:
    """Whether edges run both ways, by the table where it says so."""
    name = printable(table.table.path)
    if len(table.types) > 1 and not undirected:
        raise UserError(
            f"{name} has directed and undirected edges.",
            why="graph.undirected is one for all of them",
            do="graph.undirected = true, or each undirected edge as two directed ones",
        )
    if undirected and "directed" in table.types:
        notes.append(f"edges of {name} called directed are read both ways: graph.undirected = false keeps them")
    return undirected or "undirected" in table.types


def _count(file: Path, nodes: NodeTable | None, table: EdgeTable, sources: Array, targets: Array) -> int:
    """How many nodes there are: those of their table, else up to the largest end of an edge."""
    if nodes is not None:
        _check_rows(nodes, table)
        return nodes.table.rows
    largest = int(max(sources.max(initial=-1), targets.max(initial=-1))) + 1
    count = max(largest, table.nodes or 0)
    refuse_far_ids(count, len(sources), file)
    return count


def _check_rows(nodes: NodeTable, table: EdgeTable) -> None:
    """Refuses a table of nodes whose rows cannot be those of the matrix that `table` was read from."""
    numbers = alike(np.zeros(0) if nodes.ids is None else nodes.ids)
    mixed = numbers.dtype.kind == "i" and (np.diff(numbers) < 0).any()
    if table.nodes is not None and (mixed or table.nodes != nodes.table.rows):
        raise UserError(
            f"{printable(nodes.table.path)} has {nodes.table.rows:,} rows for the {table.nodes:,} of the matrix.",
            why="the rows of a matrix are those of its table of nodes, with ids that ascend",
            do="a line for each row of the matrix, in its order",
        )


def _numbered(ends: Array, ids: Array | None, file: Path) -> Array:
    """The ends of edges as rows of the table of nodes."""
    if ids is None:
        return _rows(ends, file)
    known = alike(ids)
    ends = alike(ends)
    if known.dtype.kind != ends.dtype.kind:
        known = known.astype(str)
        ends = ends.astype(str)
    if known.dtype.kind == "U" and (known == "").any():
        raise UserError(
            f"{printable(file)}: a node has no id (row {int((known == '').argmax())} of its table).",
            why="an edge without an end would lead to it",
            do="give each node an id of its own, or drop the row",
        )
    order = np.argsort(known, kind="stable")
    twice = known[order][1:] == known[order][:-1]
    if twice.any():
        raise UserError(
            f"{printable(file)}: two nodes have the id {printable(known[order][1:][twice][0])}.",
            why="an edge there could mean either",
            do="give each node an id of its own",
        )
    at = np.searchsorted(known, ends, sorter=order)
    rows = order[np.minimum(at, len(known) - 1)] if len(known) else np.zeros(len(ends), np.int64)
    strange = known[rows] != ends if len(known) else np.ones(len(ends), bool)
    if strange.any():
        raise UserError(
            f"{printable(file)} has an edge at {printable(ends[strange][0]) or 'an empty cell'}, "
            "which is no id in the table of nodes.",
            do="give every node a line there, or drop such edges",
        )
    return rows.astype(np.int64)


def _rows(ends: Array, file: Path) -> Array:
    """The ends of edges as the row numbers that they are without ids."""
    numbers = ends_as_numbers(ends, file)
    if not np.array_equal(numbers, np.round(numbers)):
        raise UserError(
            f"{printable(file)}: ends of edges are not whole numbers.", do="give ids, or names and a nodes table"
        )
    if np.abs(numbers).max(initial=0) >= EXACT:
        raise UserError(
            f"{printable(file)} has an edge at {printable(as_words(ends)[int(np.abs(numbers).argmax())])}.",
            why="without a table of nodes the ends of edges are its rows, 0, 1, 2 …",
            do=NUMBERED,
        )
    return numbers.astype(np.int64)
