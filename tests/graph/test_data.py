"""A graph is what was given: edges by target, duplicates and loops as the policy says, mistakes named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from espalier.graph.data import graph as graphs
from espalier.graph.data.graph import DataSplit, Graph, divided, relabelled, seen_in_training, without_edges
from espalier.recipe.errors import UserError

ONES = np.ones((3, 2))


def edges_of(graph: Graph) -> set[tuple[int, int]]:
    return set(zip(graph.indices.tolist(), graph.targets().tolist(), strict=True))


@given(
    st.integers(1, 12).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))))
    ),
    st.booleans(),
)
def test_edges_are_a_set_without_loops(nodes_and_edges, undirected):
    nodes, pairs = nodes_and_edges
    ends = np.array(pairs, np.int64).reshape(-1, 2).T
    graph = Graph.from_edges(*ends, features=np.ones((nodes, 1)), undirected=undirected)
    expected = {(a, b) for a, b in pairs if a != b}
    if undirected:
        expected |= {(b, a) for a, b in expected}
    assert edges_of(graph) == expected
    assert graph.edges == len(expected)
    for node in range(nodes):
        row = graph.indices[graph.indptr[node] : graph.indptr[node + 1]]
        assert (np.diff(row) > 0).all()


def test_weights_of_an_edge_given_twice_are_added_and_its_first_features_kept():
    graph = Graph.from_edges(
        [0, 1, 0], [1, 2, 1], features=ONES, weights=[1, 2, 4], edge_features=[[1.0], [2.0], [3.0]]
    )
    assert graph.weights.tolist() == [5, 2]
    assert graph.edge_features.tolist() == [[1], [2]]
    assert "given more than once" in graph.notes[0]


def test_edges_given_both_ways_are_not_mirrored_again():
    graph = Graph.from_edges([0, 1], [1, 0], features=ONES, weights=[2, 3], undirected=True)
    assert graph.weights.tolist() == [3, 2]


def test_a_graph_without_edges_is_a_graph():
    graph = Graph.from_edges([], [], features=ONES)
    assert graph.edges == 0
    assert graph.degrees().tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sources": [3]}, "Sources has the id 3, outside the graph"),
        ({"targets": [-1]}, "Targets has the id -1, outside the graph"),
        ({"sources": [0, 1]}, "2 sources for 1 targets"),
        ({"sources": [0.5]}, "not whole numbers"),
        ({"features": [[1.0, np.nan], [0, 0], [0, 0]]}, "features hold NaN or infinity, first in row 0"),
        ({"features": np.ones(3)}, "have 1 dimensions"),
        ({"features": np.empty((0, 2)), "sources": [], "targets": []}, "is empty"),
        ({"labels": np.zeros(2, int)}, "labels do not match: 2 for 3 nodes"),
        ({"labels": np.array([0, 1, 7]), "classes": ("a", "b")}, "A label has the id 7"),
        ({"weights": [1, 2]}, "2 rows of weights for 1 edges"),
        ({"weights": [np.inf]}, "weights hold NaN"),
        ({"parts": DataSplit(np.array([0]), np.array([0]), np.array([1]))}, "two parts at once"),
        ({"parts": DataSplit(np.array([5]), np.array([0]), np.array([1]))}, "The train part has the id 5"),
    ],
)
def test_what_cannot_be_is_named(changes, says):
    given = {"sources": [0], "targets": [1], "features": ONES, **changes}
    with pytest.raises(UserError, match=says):
        Graph.from_edges(given.pop("sources"), given.pop("targets"), **given)


def test_the_split_is_seeded_and_covers_every_labelled_node(make_graph):
    graph = make_graph(parts=None, labels=np.r_[np.zeros(50, int), np.full(10, -1)])
    one, two, other = (divided(graph, (0.5, 0.2, 0.3), seed).parts for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(one.named(), two.named(), strict=True))
    assert not np.array_equal(one.train, other.train)
    assert sorted(np.concatenate([ids for _, ids in one.named()]).tolist()) == list(range(50))
    assert [len(ids) for _, ids in one.named()] == [25, 10, 15]


def test_inductive_training_sees_no_edge_of_a_node_held_out(make_graph):
    graph = make_graph()
    seen = seen_in_training(graph)
    held = {*graph.parts.validation.tolist(), *graph.parts.test.tolist()}
    assert edges_of(seen) == {(a, b) for a, b in edges_of(graph) if a not in held and b not in held}


def test_relabelling_renames_and_nothing_else(make_graph):
    graph = make_graph(weights=np.arange(240.0) + 1)
    order = np.random.default_rng(3).permutation(graph.nodes)
    other = relabelled(graph, order)
    back = {(int(order[a]), int(order[b])): w for (a, b), w in zip(_pairs(other), other.weights, strict=True)}
    assert back == dict(zip(_pairs(graph), graph.weights, strict=True))
    assert np.array_equal(other.features, graph.features[order])
    assert sorted(order[other.parts.train]) == graph.parts.train.tolist()
    assert other.called(0) == f"node {order[0]}"
    assert other.find(str(order[5])) == 5


def _pairs(graph):
    return list(zip(graph.indices.tolist(), graph.targets().tolist(), strict=True))


def test_the_fingerprint_tells_any_change(make_graph):
    graph = make_graph()
    others = [make_graph(seed=1), make_graph(labels=None), make_graph(parts=None)]
    others.append(without_edges(graph, np.arange(graph.edges) == 0))
    prints = {one.fingerprint() for one in [graph, make_graph(), *others]}
    assert len(prints) == 5


def test_the_fingerprint_of_a_graph_that_stands_for_its_content_tells_order_and_edges_too(make_graph):
    """Parts in the cache are found by it."""
    graph = replace(make_graph(), identity="made")
    others = [without_edges(graph, np.arange(graph.edges) == one) for one in range(2)]
    every = [graph, *others, *(relabelled(one, np.arange(60)[::-1]) for one in (graph, others[0]))]
    assert graph.fingerprint() == "made"
    assert len({one.fingerprint() for one in every}) == 5


def test_a_node_is_found_by_its_name_or_the_nearest_is_told():
    graph = Graph.from_edges([0], [1], features=ONES, names=["alpha", "beta", "gamma"])
    assert graph.find("beta") == graph.find("1") == 1
    with pytest.raises(UserError, match="did you mean gamma"):
        graph.find("gama")


@pytest.mark.parametrize("kept", ["memory", "disk", "sparse"])
def test_the_signs_of_all_rows_are_looked_at(tmp_path, monkeypatch, kept):
    def signed(rows):
        if kept == "disk":
            np.save(tmp_path / "rows.npy", rows)
            rows = np.load(tmp_path / "rows.npy", mmap_mode="r")
        elif kept == "sparse":
            rows = sparse.csr_array(rows)
        return graphs.signed(rows)

    monkeypatch.setattr(graphs, "_VALUES", 1000)
    words = 2 * np.eye(4, dtype=np.float32)[np.arange(6000) % 4]
    late = words.copy()
    late[5500, 1:3] = 0.5, 1
    assert signed(words) is None
    assert signed(late) is False
    assert signed(np.where(late == 0.5, -0.5, late)) is True
    assert signed(np.where(np.arange(6000)[:, None] == 5999, -words, words)) is True
    assert signed(words[:0]) is None
