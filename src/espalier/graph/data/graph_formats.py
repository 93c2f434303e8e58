"""Graphs in formats of other programs: networkx's node-link JSON, GraphML, Matrix Market and METIS, as tables of nodes
and edges."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from espalier.graph.data import separated_text
from espalier.graph.data.array_file import refuse_far_ids
from espalier.graph.data.graph import Array
from espalier.graph.data.separated_text import ending
from espalier.graph.data.table_columns import EdgeTable, NodeTable, Table, edges_of, nodes_of
from espalier.machine.resource_limits import refuse_large
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import Fields, FieldUse, parsing, printable

_DO = "networkx.node_link_data(graph) as JSON, networkx.write_graphml, or tables edges.csv and nodes.csv"
_LINES = "lines of neighbours without weights of nodes, or source,target lines"
_KEYS = Fields("key", frozenset(("directed", "multigraph", "nodes", "links", "edges")))


def node_link(file: Path) -> tuple[NodeTable, EdgeTable]:
    """Nodes and edges of node-link JSON or GraphML, with their attributes as columns. Raises UserError."""
    refuse_large(printable(file), 20 * file.stat().st_size)
    separated_text.check_size(file)
    with parsing(file, _DO):
        if ending(file) == ".graphml":
            import networkx

            content: Any = networkx.node_link_data(networkx.read_graphml(file), edges="links")
        else:
            with separated_text.opened(file) as text:
                content = json.load(text)
        use = FieldUse(_KEYS, file.name)
        use.count([name for name, value in content.items() if value])
        columns = _columns(content["nodes"])
        links = _columns(content["links" if "links" in content else "edges"])
        directed = content.get("directed")
    if content.get("multigraph"):
        links.pop("key", None)  # a number for each edge between two nodes
    edges = replace(edges_of(Table(file, links)), types=frozenset({"directed" if directed else "undirected"}))
    return nodes_of(Table(file, columns, notes=tuple(use.notes()))), edges


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, Array]:
    """The values of each key of `rows`, None where a row lacks it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _column([row.get(name) for row in rows]) for name in names}


def _column(cells: list[Any]) -> Array:
    if {type(cell) for cell in cells} in ({int}, {float}, {int, float}, {bool}, {str}):
        return np.array(cells)
    return np.fromiter(cells, object, len(cells))


def metis(file: Path) -> EdgeTable:
    """The edges of a METIS graph: line n has the neighbours of node n, from 1. Raises UserError."""
    separated_text.check_size(file)
    with parsing(file, _LINES), separated_text.opened(file) as text:
        (nodes, edges, *form), *rows = (line.split() for line in text if not line.startswith("%"))
        weighted = len(form) > 0 and form[0].endswith("1")
        if len(form) > 1 or int(form[0] if form else 0) > 1:
            raise ValueError("it has weights of nodes, which mean nothing here")
        counts = [len(row) // (1 + weighted) for row in rows]
        cells = np.array([cell for row in rows for cell in row], np.float64).reshape(-1, 1 + weighted)
        if sum(counts) != 2 * int(edges) or any(counts[int(nodes) :]):
            raise ValueError(f"it says it has {edges} edges, and names {sum(counts)} neighbours")
        if len(cells) and not 1 <= cells[:, 0].min() <= cells[:, 0].max() <= int(nodes):
            raise ValueError(f"an edge lies outside its {nodes} nodes")
    return EdgeTable(
        Table(file, {}),
        np.repeat(np.arange(len(rows)), counts),
        cells[:, 0] - 1,
        cells[:, 1] if weighted else None,
        types=frozenset({"undirected"}),
        nodes=int(nodes),
    )


def matrix_market(file: Path) -> EdgeTable:
    """The entries of a square matrix: its rows are sources, its columns targets, its values weights."""
    from scipy import io

    do = "write it with scipy.io.mmwrite, or as source,target lines"
    separated_text.check_size(file)
    with parsing(file, do):
        with separated_text.opened(file) as text:
            content = BytesIO(text.read().encode())
        rows, columns, entries, *kinds = io.mminfo(content)
        refused = {"array", "complex", "skew-symmetric", "hermitian"} & {*kinds}
        if refused or rows != columns:
            reason = f"is {min(refused)}" if refused else f"has {rows:,} rows and {columns:,} columns"
            why = "edges are the entries of a square matrix of numbers in coordinates"
            raise UserError(f"{printable(file)} {reason}.", why=why, do=do)
        if 4 * entries > content.getbuffer().nbytes:
            raise ValueError(f"it says it has {entries:,} entries, and is too short for them")
        refuse_large(printable(file), 64 * entries)
        refuse_far_ids(rows, entries, file)
        content.seek(0)
        matrix = io.mmread(content)
    ends = (matrix.row.astype(np.int64), matrix.col.astype(np.int64))
    weights = None if "pattern" in kinds else matrix.data.astype(np.float64)
    types = frozenset({"undirected"} if "symmetric" in kinds else ())
    return EdgeTable(Table(file, {}), *ends, weights, types=types, nodes=rows)
