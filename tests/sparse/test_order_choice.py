from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from espalier.recipe.errors import UserError
from espalier.sparse.order_choice import PURPOSES, order
from espalier.sparse.partition import by_metis, by_sweeps, clusters, crossing, cut, symmetric
from espalier.sparse.rcmpp.cuthill_mckee import trace
from espalier.sparse.rcmpp.pattern import SparsityPattern
from espalier.sparse.rcmpp.pattern_passes import touched


def mesh(side: int) -> sparse.csr_array:
    """A shuffled side x side grid."""
    line = sparse.diags_array([np.ones(side - 1), np.ones(side - 1)], offsets=[-1, 1])
    eye = sparse.eye_array(side)
    found = sparse.csr_array(sparse.kron(line, eye) + sparse.kron(eye, line))
    places = np.random.default_rng(0).permutation(side * side)
    return sparse.csr_array(found[places][:, places])


def communities(count: int, size: int, degree: int, across: float, seed: int = 1) -> sparse.csr_array:
    """Random graphs of `size` nodes, a share of their edges to anywhere: levels are wide, yet clusters are there."""
    draw = np.random.default_rng(seed)
    nodes = count * size
    rows = np.repeat(np.arange(nodes), degree)
    near = rows // size * size + draw.integers(0, size, len(rows))
    columns = np.where(draw.random(len(rows)) < across, draw.integers(0, nodes, len(rows)), near)
    found = sparse.csr_array((np.ones(len(rows)), (rows, columns)), shape=(nodes, nodes))
    places = draw.permutation(nodes)
    return sparse.csr_array((found + found.T)[places][:, places])


@pytest.mark.parametrize("purpose", PURPOSES)
def test_a_shuffled_mesh_is_ordered_by_rcmpp(purpose: str) -> None:
    found = order(mesh(150), purpose)
    assert found.method == "rcm++"
    assert found.gain > 1.2
    assert found.after < found.before / 2
    assert sorted(found.permutation.tolist()) == list(range(150 * 150))
    assert f"{found.gain:.2f}" in found.reason


@pytest.mark.parametrize("library", ["metis", "sweeps"])
def test_a_small_world_of_communities_is_ordered_by_clusters(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if library == "sweeps":
        monkeypatch.setattr("espalier.sparse.partition.installed", lambda: False)
    else:
        pytest.importorskip("pymetis")
    matrix = communities(40, 256, 12, 0.01)
    found = order(matrix, "disk")
    assert found.method == "clusters"
    assert found.gain > 1.2
    assert sorted(found.permutation.tolist()) == list(range(matrix.shape[0]))


def test_a_graph_without_structure_keeps_its_order() -> None:
    ends = np.random.default_rng(2).integers(0, 6000, (2, 40_000))
    found = order(sparse.csr_array((np.ones(40_000), ends), shape=(6000, 6000)))
    assert found.method == "none"
    assert found.permutation is None
    assert found.gain == 1
    assert "below" in found.reason


def test_an_order_that_is_local_already_is_left_alone() -> None:
    shuffled = mesh(120)
    places = order(shuffled).permutation
    assert order(sparse.csr_array(shuffled[places][:, places])).method == "none"


def test_every_way_to_give_a_graph_gives_the_same_order() -> None:
    matrix = mesh(90)
    tensors = torch.from_numpy(matrix.indptr).long(), torch.from_numpy(matrix.indices).long()
    with_shape = SimpleNamespace(indptr=matrix.indptr, indices=matrix.indices, shape=matrix.shape)
    expected = order(matrix, "disk").permutation.tolist()
    for graph in (matrix.tocsc(), (matrix.indptr, matrix.indices), tensors, with_shape):
        assert order(graph, "disk").permutation.tolist() == expected
    assert isinstance(order(tensors, "disk").permutation, torch.Tensor)


@given(
    edges=st.lists(st.tuples(st.integers(0, 24), st.integers(0, 24)), max_size=80),
    window=st.integers(1, 30),
    page=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_what_is_touched_is_counted_as_sets_count(edges: Any, window: int, page: int, seed: int) -> None:
    rows, columns = np.array(sorted(edges), np.int64).reshape(-1, 2).T
    pattern = SparsityPattern.of(np.searchsorted(rows, np.arange(26)), columns)
    old = np.random.default_rng(seed).permutation(25).astype(np.uint32)
    new = np.argsort(old).astype(np.uint32)
    found = touched(pattern.indptr, pattern.indices, old, new, window, page)
    assert found == len({(int(new[row]) // window, int(new[column]) // page) for row, column in edges})


@pytest.mark.parametrize("divide", [by_metis, by_sweeps])
@pytest.mark.parametrize("parts", [2, 7])
def test_parts_are_even_and_cut_less_than_pieces_of_an_order(divide: Any, parts: int) -> None:
    if divide is by_metis:
        pytest.importorskip("pymetis")
    matrix = communities(7, 100, 8, 0.05)
    pattern = SparsityPattern.of(matrix.indptr, matrix.indices)
    labels = divide(pattern, parts)
    pieces = np.empty(700, np.int32)
    pieces[trace(pattern).permutation] = np.arange(700) * parts // 700
    assert labels.dtype == np.int32
    assert set(labels.tolist()) == set(range(parts))
    assert np.bincount(labels).max() <= np.ceil(700 / parts * 1.03) + 1
    assert cut(symmetric(pattern), labels) < 0.9 * cut(symmetric(pattern), pieces)
    assert (divide(pattern, parts) == labels).all()


@pytest.mark.parametrize("library", ["metis", "sweeps"])
@pytest.mark.parametrize("shares", [[1, 2, 3, 6], [5.0, 1.0]])
def test_parts_have_the_shares_that_are_asked_for(library: str, shares: list[float], monkeypatch: Any) -> None:
    if library == "sweeps":
        monkeypatch.setattr("espalier.sparse.partition.installed", lambda: False)
    else:
        pytest.importorskip("pymetis")
    matrix = communities(12, 60, 8, 0.05)
    labels = clusters(matrix.indptr, matrix.indices, len(shares), shares)
    wanted = 720 * np.array(shares) / sum(shares)
    assert (np.abs(np.bincount(labels, minlength=len(shares)) - wanted) <= 0.07 * wanted + 1).all()
    other = clusters(matrix.indptr, matrix.indices, len(shares), [100 * one for one in shares])
    assert (labels == other).all()


def test_metis_cuts_less_than_sweeps_and_the_less_volume_of_its_two_objectives_counts() -> None:
    pytest.importorskip("pymetis")
    for seed in range(4):
        matrix = communities(8, 80, 6, 0.2, seed)
        pattern = SparsityPattern.of(matrix.indptr, matrix.indices)
        both = symmetric(pattern)
        few, edges = by_metis(pattern, 6), by_metis(pattern, 6, volume=False)
        assert crossing(both, few) <= crossing(both, edges)
        assert cut(both, edges) <= cut(both, by_sweeps(pattern, 6))


def test_rows_that_cross_are_counted_as_sets_count() -> None:
    matrix = communities(5, 20, 4, 0.3)
    both = symmetric(SparsityPattern.of(matrix.indptr, matrix.indices))
    labels = np.random.default_rng(0).integers(0, 4, 100)
    rows, columns = both.nonzero()
    pairs = zip(rows.tolist(), columns.tolist(), strict=True)
    read = {(int(labels[row]), column) for row, column in pairs if labels[row] != labels[column]}
    assert crossing(both, labels) == len(read)


def test_parts_of_odd_numbers() -> None:
    matrix = mesh(6)
    assert set(clusters(matrix.indptr, matrix.indices, 1).tolist()) == {0}
    assert len(by_sweeps(SparsityPattern.of(matrix.indptr, matrix.indices), 36)) == 36
    for wrong in (0, 37, True, 2.0):
        with pytest.raises(UserError, match="parts="):
            clusters(matrix.indptr, matrix.indices, wrong)  # type: ignore[arg-type]


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(UserError, match=r"for_='disk'"):
        order(mesh(3), "disc")
    with pytest.raises(UserError, match="square"):
        order(sparse.csr_array((3, 4)))
    with pytest.raises(UserError, match="cannot read a graph"):
        order(np.ones((3, 3)).tolist())
