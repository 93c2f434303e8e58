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
from espalier.recipe.foreign_files import Fields, FieldUse, parsing, printable

_DO = "networkx.node_link_data(graph) as JSON, networkx.write_graphml, or tables edges.csv and nodes.csv"
_LINES = "lines of neighbours without weights of nodes, or source,target lines"
_KEYS = Fields("key", frozenset(("directed", "multigraph", "nodes", "links", "edges")))


def node_link(file: Path) -> tuple[NodeTable, EdgeTable]:
    """Nodes and edges of node-link JSON or GraphML, with their attributes as columns. Raises UserError."""
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
    return {name: np.fromiter((row.get(name) for row in rows), object, len(rows)) for name in names}


def metis(file: Path) -> EdgeTable:
    """The edges of a METIS graph: line n has the neighbours of node n, from 1. Raises UserError."""
    separated_text.check_size(file)
    with parsing(file, _LINES), separated_text.opened(file) as text:
        header, *rows = (line.split() for line in text if not line.startswith("%"))
        nodes, edges, weighted = map(int, [*header, "0"][:3])
        if weighted > 1:
            raise ValueError("it has weights of nodes, which mean nothing here")
        cells = np.array([cell for row in rows for cell in row], np.float64).reshape(-1, 1 + weighted)
        sources = np.repeat(np.arange(len(rows)), [len(row) // (1 + weighted) for row in rows])
        targets = cells[:, 0] - 1
        ends = np.concatenate([sources, targets])
        if len(cells) != 2 * edges or ends.min(initial=0) < 0 or ends.max(initial=0) >= nodes:
            raise ValueError(f"it says it has {nodes} nodes and {edges} edges, and its lines name others")
    weights = cells[:, 1] if weighted else None
    return EdgeTable(Table(file, {}), sources, targets, weights, types=frozenset({"undirected"}), nodes=nodes)


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
            what = ", ".join((*refused, f"of {rows:,} rows and {columns:,} columns"))
            raise ValueError(f"it is {what}; edges are the entries of a square matrix of numbers in coordinates")
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
