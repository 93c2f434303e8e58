"""Graphs of other programs: networkx's node-link JSON, GraphML and METIS give the graph that tables give."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
from tests.graph.conftest import load

from espalier.recipe.errors import UserError


def graph_of(directed: bool = False) -> Any:
    """Ten people with a class, a part and numbers, who know one another."""
    random = np.random.default_rng(0)
    graph = (networkx.DiGraph if directed else networkx.Graph)()
    for at in range(10):
        part = ("train", "val", "test")[at % 3]
        graph.add_node(f"p{at}", label="ab"[at % 2], part=part, age=20.5 + at, member=bool(at % 2))
    for source, target in random.integers(0, 10, (25, 2)).tolist():
        if source != target:
            graph.add_edge(f"p{source}", f"p{target}", weight=float(source + target))
    return graph


def tables(folder: Path, graph: Any) -> Path:
    rows = [f"{n},{d['label']},{d['part']},{d['age']},{d['member']}" for n, d in graph.nodes(data=True)]
    (folder / "nodes.csv").write_text("\n".join(["id,label,part,age,member", *rows]) + "\n")
    rows = [f"{a},{b},{d['weight']}" for a, b, d in graph.edges(data=True)]
    (folder / "edges.csv").write_text("\n".join(["source,target,weight", *rows]) + "\n")
    return folder / "edges.csv"


def same(left: Any, right: Any) -> None:
    for name in ("indptr", "indices", "features", "labels", "weights"):
        assert np.array_equal(getattr(left, name), getattr(right, name)), name
    for (_, ids), (_, others) in zip(left.parts.named(), right.parts.named(), strict=True):
        assert np.array_equal(ids, others)
    assert (left.names, left.classes, left.columns) == (right.names, right.classes, right.columns)


@pytest.mark.parametrize("form", ["json", "links.json", "json.gz", "graphml"])
@pytest.mark.parametrize("directed", [False, True])
def test_networkx_graphs_are_read_as_their_tables(tmp_path: Path, form: str, directed: bool) -> None:
    graph = graph_of(directed)
    (tmp_path / "tables").mkdir()
    expected = load(tables(tmp_path / "tables", graph), undirected=not directed)
    file = tmp_path / f"g.{form}"
    if form == "graphml":
        networkx.write_graphml(graph, file)
    else:
        text = json.dumps(networkx.node_link_data(graph, edges="links" if form == "links.json" else "edges"))
        file.write_bytes(gzip.compress(text.encode()) if form.endswith("gz") else text.encode())
    same(load(file, undirected=False), expected)
    said = [note for note in load(file).notes if "directed are read both ways" in note]
    assert len(said) == directed


def test_json_names_what_it_does_not_use_and_keeps_edges_between_two_nodes_apart(tmp_path: Path) -> None:
    graph = networkx.MultiGraph(name="friends")
    graph.add_node(0, size=1.5, tags=["a"])
    graph.add_node(1, size=2)
    graph.add_edge(0, 1, weight=2.0)
    graph.add_edge(0, 1, weight=3.0)
    (tmp_path / "g.json").write_text(json.dumps(networkx.node_link_data(graph)))
    read = load(tmp_path / "g.json")
    assert read.weights.tolist() == [5, 5]
    assert read.edge_features is None
    assert read.features.tolist() == [[1.5], [2]]
    notes = "\n".join(read.notes)
    assert "not used: key 'graph'" in notes
    assert "not used: column 'tags'" in notes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", "cannot be read"),
        ('{"nodes": [{"id": 0}]}', "cannot be read"),
        ('{"nodes": [{"id": 0}, {"id": 0}], "links": [{"source": 0, "target": 0}]}', "two nodes have the id 0"),
        ('{"nodes": [{"id": 0}], "links": [{"source": 0, "target": 7}]}', "7"),
        ('{"nodes": [{"id": 0, "x": 1}, {"id": 1}], "links": [{"source": 0, "target": 1}]}', "feature 'x'"),
        ('{"nodes": [{"id": 0}], "links": [{"start": 0, "target": 0}]}', "none for the other end"),
        ('{"nodes": [{"id"', "cannot be read"),
    ],
)
def test_json_that_is_no_graph_is_refused_in_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "g.json").write_text(text)
    with pytest.raises(UserError, match=says):
        load(tmp_path / "g.json")


def metis(folder: Path, text: str, name: str = "g.metis") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("name", ["g.metis", "g.graph"])
def test_metis_lists_the_neighbours_of_each_node(tmp_path: Path, name: str) -> None:
    graph = load(metis(tmp_path, "% a comment\n4 3\n2 3\n1\n% another\n1 4\n3\n", name), undirected=False)
    ends = sorted(zip(graph.indices.tolist(), graph.targets().tolist(), strict=True))
    assert ends == [(0, 1), (0, 2), (1, 0), (2, 0), (2, 3), (3, 2)]
    assert graph.weights is None
    weighted = load(metis(tmp_path, "3 1 1\n2 5\n1 5\n\n", name))
    assert (weighted.nodes, weighted.weights.tolist()) == (3, [5, 5])
    (tmp_path / "nodes.csv").write_text("id,label\nx,a\ny,b\nz,a\n")
    assert load(metis(tmp_path, "3 1 001\n2 5\n1 5\n\n", name)).names == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2 1 11\n1 2 1\n1 1 1\n", "weights of nodes"),
        ("2 1 010 2\n1 2 1\n1 1 1\n", "weights of nodes"),
        ("2 2\n2\n1\n", "2 nodes and 2 edges, and its lines name others"),
        ("2 1\n3\n1\n", "2 nodes and 1 edges, and its lines"),
        ("2 1\n0\n1\n", "2 nodes and 1 edges, and its lines"),
        ("2 1\n1.5\n1\n", "not whole numbers"),
        ("2 2\n2\n1\n1\n2\n", "2 nodes and 2 edges"),
        ("9000000 1\n2\n1\n", "outside|9,?000,?000|8999999"),
        ("a b\n", "cannot be read"),
        ("", "cannot be read"),
    ],
)
def test_metis_that_is_no_graph_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load(metis(tmp_path, text))
