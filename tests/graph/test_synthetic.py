"""Generated graphs: seeded, simple and undirected, the same whatever the chunk they are made in."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.graph.data import synthetic
from espalier.recipe.errors import UserError


def edges_of(graph):
    return list(zip(graph.targets().tolist(), graph.indices.tolist(), strict=True))


@pytest.mark.parametrize("text", ["rmat:scale=9,degree=6,features=4", "planted:nodes=300,degree=8,features=4"])
def test_graphs_are_simple_undirected_and_seeded(tmp_path, text, monkeypatch):
    graph = synthetic.load(text, tmp_path / "one")
    pairs = edges_of(graph)
    assert pairs == sorted(set(pairs))
    assert {(b, a) for a, b in pairs} == set(pairs)
    assert all(a != b for a, b in pairs)
    assert sum(len(ids) for _, ids in graph.parts.named()) == graph.nodes
    monkeypatch.setattr(synthetic, "_ROWS", 64)  # many pieces to put in order
    monkeypatch.setattr(synthetic, "_PIECE", 7)
    again = synthetic.load(text, tmp_path / "two")
    assert edges_of(again) == pairs
    assert np.array_equal(again.features, graph.features)
    assert graph.fingerprint() == again.fingerprint()
    other = synthetic.load(f"{text},seed=2", tmp_path / "one")
    assert other.fingerprint() != graph.fingerprint()
    assert edges_of(other) != pairs


def test_groups_meet_their_own_and_features_tell_them(tmp_path):
    graph = synthetic.load("planted:nodes=4000,degree=12,classes=4,homophily=0.7,signal=3", tmp_path)
    same = (graph.labels[graph.indices] == graph.labels[graph.targets()]).mean()
    assert 0.7 + 0.3 / 4 - 0.03 < same < 0.7 + 0.3 / 4 + 0.03
    means = np.stack([graph.features[graph.labels == at].mean(0) for at in range(4)])
    np.testing.assert_allclose(np.linalg.norm(means, axis=1), 3, rtol=0.1)
    assert graph.degrees().max() > 5 * graph.degrees().mean()


@settings(max_examples=20)
@given(st.integers(1, 40))
def test_scrambling_is_a_permutation(scale):
    ids = np.unique(np.random.default_rng(scale).integers(0, 1 << scale, 200))
    scrambled = synthetic._scrambled(ids, scale)
    assert len(np.unique(scrambled)) == len(ids)
    assert np.array_equal(synthetic._unscrambled(scrambled, scale), ids)


def test_what_was_begun_and_not_ended_is_no_graph(tmp_path, monkeypatch):
    def fail(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(synthetic, "_write_nodes", fail)
        with pytest.raises(KeyboardInterrupt):
            synthetic.load("rmat:scale=5", tmp_path)
    assert not list(tmp_path.iterdir())
    assert synthetic.load("rmat:scale=5", tmp_path).nodes == 32


def test_memory_does_not_grow_with_the_graph(tmp_path, monkeypatch):
    for name in ("CHUNK", "_ROWS"):
        monkeypatch.setattr(synthetic, name, 1 << 12)
    monkeypatch.setattr(synthetic, "_PIECE", 1 << 8)

    def peak(nodes: int) -> int:
        tracemalloc.start()
        synthetic.write(synthetic.Planted(nodes=nodes, degree=8, skew=1.0), tmp_path / str(nodes))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(2_000)
    assert peak(80_000) < 1.3 * peak(20_000)


def test_few_nodes_train_where_the_recipe_says_so(tmp_path):
    graph = synthetic.load("planted:nodes=20000,degree=2,features=2,train=0.05", tmp_path)
    train, validation, test = (len(ids) for _, ids in graph.parts.named())
    assert 0.04 < train / graph.nodes < 0.06
    assert 0.18 < (validation + test) / graph.nodes < 0.22
    with pytest.raises(UserError, match=r"train = 0\.9 of the nodes is not possible"):
        synthetic.parse("planted:train=0.9")
