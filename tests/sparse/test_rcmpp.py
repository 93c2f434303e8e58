from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rcmpp_reference as plain
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from scipy.io import mmread
from scipy.sparse.csgraph import connected_components, reverse_cuthill_mckee

from espalier.recipe.errors import UserError
from espalier.sparse.rcmpp import FINDERS, bandwidth, profile, rcmpp
from espalier.sparse.rcmpp.cuthill_mckee import trace, trials
from espalier.sparse.rcmpp.pattern import SparsityPattern


def pattern(edges: Any, nodes: int) -> sparse.csr_array:
    """Ones at `edges`, as they are: directed, repeated, unsorted."""
    rows, columns = np.array(edges, np.int64).reshape(-1, 2).T
    order = np.argsort(rows, kind="stable")
    indptr = np.searchsorted(rows[order], np.arange(nodes + 1))
    return sparse.csr_array((np.ones(len(rows)), columns[order], indptr), shape=(nodes, nodes))


def mirrored(matrix: Any) -> sparse.csr_array:
    found = sparse.csr_array(matrix + matrix.T)
    found.data[:] = 1
    return found


def path(nodes: int) -> sparse.csr_array:
    return mirrored(pattern([(at, at + 1) for at in range(nodes - 1)], nodes))


def grid(*sides: int) -> sparse.csr_array:
    found = sparse.csr_array((1, 1))
    for side in sides:
        eyes = sparse.eye_array(found.shape[0]), sparse.eye_array(side)
        found = sparse.csr_array(sparse.kron(found, eyes[1]) + sparse.kron(eyes[0], path(side)))
    return found


def shuffled(matrix: Any, seed: int = 0) -> sparse.csr_array:
    order = np.random.default_rng(seed).permutation(matrix.shape[0])
    return sparse.csr_array(sparse.csr_array(matrix)[order][:, order])


@st.composite
def matrices(draw: st.DrawFn) -> sparse.csr_array:
    """Random patterns: directed or not, several unknowns at a node, loops, repeats, isolated nodes, any row order."""
    nodes = draw(st.integers(1, 30))
    ids = st.integers(0, nodes - 1)
    found = pattern(draw(st.lists(st.tuples(ids, ids), max_size=70)), nodes)
    if draw(st.booleans()):
        found = mirrored(found)
    if draw(st.booleans()):
        found = shuffled(
            sparse.kron(mirrored(found) + sparse.eye_array(nodes), np.ones((3, 3))), draw(st.integers(0, 9))
        )
    return found


def plainly(matrix: Any, finder: str, restarts: int) -> list[int]:
    rows = plain.neighbours(matrix.indptr, matrix.indices)
    few = trials(sum(map(len, rows)), len(rows)) if finder == "bi-criteria" else 0
    return plain.order(rows, finder, restarts, few)


@pytest.mark.parametrize("finder", FINDERS)
@settings(max_examples=40)
@given(matrix=matrices(), restarts=st.integers(1, 3))
def test_the_order_equals_the_plain_forms(finder: str, matrix: Any, restarts: int) -> None:
    restarts = 1 if finder == "mind" else restarts
    # Loops count as entries when trials are rationed; at these sizes there are always as many as may be.
    found = rcmpp(matrix.indptr, matrix.indices, finder=finder, restarts=restarts)
    assert found.tolist() == plainly(matrix, finder, restarts)


@pytest.mark.parametrize("seed", range(6))
def test_without_trials_the_width_decides_as_in_the_paper(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("espalier.sparse.rcmpp.cuthill_mckee"), "SPARE_WORK", 0)
    draw = np.random.default_rng(seed)
    matrix = mirrored(pattern(draw.integers(0, 300, (420, 2)), 300))
    rows = plain.neighbours(matrix.indptr, matrix.indices)
    for restarts in (1, 4):
        found = rcmpp(matrix.indptr, matrix.indices, restarts=restarts).tolist()
        assert found == plain.order(rows, "bi-criteria", restarts, 0)


@given(matrix=matrices(), finder=st.sampled_from(FINDERS))
def test_every_node_is_there_once_and_components_follow_each_other(matrix: Any, finder: str) -> None:
    found = rcmpp(matrix.indptr, matrix.indices, finder=finder)
    assert sorted(found.tolist()) == list(range(matrix.shape[0]))
    count, labels = connected_components(matrix, directed=False)
    assert np.count_nonzero(np.diff(labels[found])) == count - 1


@given(matrix=matrices(), finder=st.sampled_from(FINDERS))
def test_bandwidth_is_below_twice_the_width_of_the_roots_levels(matrix: Any, finder: str) -> None:
    found = rcmpp(matrix.indptr, matrix.indices, finder=finder)
    rows = plain.neighbours(matrix.indptr, matrix.indices)
    _, labels = connected_components(matrix, directed=False)
    roots = {labels[node]: int(node) for node in found}  # reversed: a component's root comes last
    widths = [plain.traverse(rows, root).width for root in roots.values()]
    assert bandwidth(matrix.indptr, matrix.indices, found) <= 2 * max(widths) - 1
    assert trace(SparsityPattern.of(matrix.indptr, matrix.indices), finder).width <= max(widths)


@given(matrix=matrices())
def test_the_reverse_has_no_larger_profile_than_the_order_itself(matrix: Any) -> None:
    found = rcmpp(matrix.indptr, matrix.indices)
    own, turned = (profile(matrix.indptr, matrix.indices, order) for order in (found, found[::-1].copy()))
    assert own <= turned  # Liu and Sherman, SIAM J. Numer. Anal. 13(2), 1976


@given(matrix=matrices(), finder=st.sampled_from(FINDERS))
def test_loops_repeats_directions_and_the_order_of_entries_make_no_difference(matrix: Any, finder: str) -> None:
    clean = mirrored(matrix)
    clean.setdiag(0)
    clean.eliminate_zeros()
    coo = matrix.tocoo()
    both = [(*coo.row, *coo.col, *range(0, matrix.shape[0], 2)), (*coo.col, *coo.row, *range(0, matrix.shape[0], 2))]
    messy = pattern(np.array(both).T[::-1], matrix.shape[0])
    first, second, third = (rcmpp(one.indptr, one.indices, finder=finder).tolist() for one in (clean, messy, matrix))
    assert first == second == third


@given(matrix=matrices(), seed=st.integers(0, 99))
def test_bandwidth_and_profile_are_those_of_the_ordered_matrix(matrix: Any, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(matrix.shape[0])
    rows, columns = (mirrored(matrix)[order][:, order] + sparse.eye_array(matrix.shape[0])).nonzero()
    ordered = sparse.csr_array(matrix[order][:, order])
    first = [rows.size and columns[rows == row].min() for row in range(matrix.shape[0])]
    expected = int(np.abs(rows - columns).max()), int((np.arange(matrix.shape[0]) - first).sum())
    assert (bandwidth(ordered.indptr, ordered.indices), profile(ordered.indptr, ordered.indices)) == expected
    assert bandwidth(matrix.indptr, matrix.indices, order) == expected[0]
    assert profile(matrix.indptr, matrix.indices, torch.from_numpy(order)) == expected[1]


@pytest.mark.parametrize("finder", FINDERS)
def test_graphs_whose_bandwidth_is_known(finder: str) -> None:
    cycle = mirrored(pattern([(at, (at + 1) % 17) for at in range(17)], 17))
    star = mirrored(pattern([(0, at) for at in range(1, 41)], 41))
    whole = sparse.csr_array(np.ones((9, 9)))
    cases = [(shuffled(path(31)), 1), (shuffled(cycle), 2), (star, 39), (whole, 8), (shuffled(grid(7, 12)), 13)]
    for matrix, most in cases:
        assert bandwidth(matrix.indptr, matrix.indices, rcmpp(matrix.indptr, matrix.indices, finder=finder)) <= most


def test_many_children_are_sorted_like_few() -> None:
    draw = np.random.default_rng(3)
    leaves = np.arange(1, 4000)
    edges = np.concatenate([np.stack([0 * leaves, leaves], 1), draw.integers(1, 4000, (3000, 2))])
    matrix = mirrored(pattern(edges, 4000))
    assert rcmpp(matrix.indptr, matrix.indices, finder="mind").tolist() == plainly(matrix, "mind", 1)


def test_more_traversals_than_marks_have_values() -> None:
    matrix = mirrored(pattern(np.random.default_rng(0).integers(0, 60, (90, 2)), 60))
    for finder in ("bi-criteria", "george-liu"):
        found = rcmpp(matrix.indptr, matrix.indices, finder=finder, restarts=300)
        assert found.tolist() == plainly(matrix, finder, 300)


def test_empty_and_edgeless_matrices() -> None:
    assert rcmpp(np.zeros(1, np.int64), np.zeros(0, np.int64)).tolist() == []
    assert bandwidth(np.zeros(1, np.int64), np.zeros(0, np.int64)) == 0
    assert sorted(rcmpp(np.zeros(6, np.int32), np.zeros(0, np.int32)).tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_tensors_give_tensors_and_arrays_arrays_of_the_same_type(dtype: Any) -> None:
    matrix = shuffled(grid(5, 6))
    indptr, indices = matrix.indptr.astype(dtype), matrix.indices.astype(dtype)
    array, tensor = rcmpp(indptr, indices), rcmpp(torch.from_numpy(indptr), torch.from_numpy(indices))
    assert array.dtype == dtype
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype == torch.from_numpy(indices).dtype
    assert tensor.tolist() == array.tolist()


def test_read_only_input_is_read_and_left_alone() -> None:
    matrix = grid(4, 5)
    copies = matrix.indptr.copy(), matrix.indices.copy()
    for one in (matrix.indptr, matrix.indices):
        one.setflags(write=False)
    rcmpp(matrix.indptr, matrix.indices)
    assert (matrix.indptr == copies[0]).all()
    assert (matrix.indices == copies[1]).all()


def test_the_ordered_product_is_the_product_in_order() -> None:
    matrix = shuffled(grid(6, 7, 3))
    dense = np.random.default_rng(0).random((matrix.shape[0], 5))
    order = rcmpp(matrix.indptr, matrix.indices)
    np.testing.assert_allclose((matrix @ dense)[order], matrix[order][:, order] @ dense[order], rtol=1e-14)


def test_shuffled_meshes_get_a_narrower_band_than_scipys_in_the_mean() -> None:
    ratios = []
    for seed in range(12):
        points = np.random.default_rng(seed).random((600, 2))
        near = sparse.csr_array(np.linalg.norm(points[:, None] - points[None], axis=2) < 0.07)
        ours, theirs = rcmpp(near.indptr, near.indices), reverse_cuthill_mckee(near, symmetric_mode=True)
        ratios.append(bandwidth(near.indptr, near.indices, ours) / bandwidth(near.indptr, near.indices, theirs))
    assert np.exp(np.log(ratios).mean()) < 0.95


@pytest.mark.parametrize("name", ["685_bus", "bcsstk13", "jagmesh7"])
def test_real_matrices_get_a_smaller_band_or_profile_than_scipys(data_folder: Path, name: str) -> None:
    file = data_folder / "matrices" / f"{name}.mtx"
    if not file.exists():
        pytest.skip(f"{file.name} is not there")
    matrix = mirrored(sparse.csr_array(mmread(file)))
    once, walked = (rcmpp(matrix.indptr, matrix.indices, restarts=count) for count in (1, 2))
    theirs = reverse_cuthill_mckee(matrix, symmetric_mode=True)
    points = [
        [measure(matrix.indptr, matrix.indices, one) for measure in (bandwidth, profile)]
        for one in (once, walked, theirs)
    ]
    assert points[0][0] <= points[2][0]
    assert np.prod(points[0]) <= np.prod(points[2])
    assert np.prod(points[1]) < 0.95 * np.prod(points[2])


@settings(max_examples=60)
@given(matrix=matrices())
def test_no_bandwidth_of_a_small_graph_is_above_scipys(matrix: Any) -> None:
    whole = mirrored(matrix)
    whole.setdiag(0)
    whole.eliminate_zeros()
    whole.sort_indices()
    ours, theirs = rcmpp(whole.indptr, whole.indices), reverse_cuthill_mckee(whole, symmetric_mode=True)
    assert bandwidth(whole.indptr, whole.indices, ours) <= bandwidth(whole.indptr, whole.indices, theirs)


@pytest.mark.parametrize("seed", range(4))
def test_no_bandwidth_of_a_shuffled_mesh_is_above_scipys(seed: int) -> None:
    draw = np.random.default_rng(seed)
    points = draw.random((int(10 ** draw.uniform(1.5, 3)), 2))
    near = sparse.csr_array(np.linalg.norm(points[:, None] - points[None], axis=2) < 1.7 * len(points) ** -0.5)
    near.setdiag(0)
    near.eliminate_zeros()
    ours, theirs = rcmpp(near.indptr, near.indices), reverse_cuthill_mckee(near, symmetric_mode=True)
    assert bandwidth(near.indptr, near.indices, ours) <= bandwidth(near.indptr, near.indices, theirs)


def test_a_path_is_traversed_once_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = shuffled(path(400))
    for spare in (2**21, 0):
        monkeypatch.setattr(import_module("espalier.sparse.rcmpp.cuthill_mckee"), "SPARE_WORK", spare)
        assert trace(SparsityPattern.of(matrix.indptr, matrix.indices)).traversals == 1
        assert bandwidth(matrix.indptr, matrix.indices, rcmpp(matrix.indptr, matrix.indices)) == 1


@settings(max_examples=20)
@given(matrix=matrices())
def test_more_restarts_are_never_worse(matrix: Any) -> None:
    """By the product that is made least, on one component; the trials are the last walk's, so many walks are needed."""
    _, labels = connected_components(matrix, directed=False)
    inside = np.flatnonzero(labels == np.bincount(labels).argmax())
    part = sparse.csr_array(matrix[inside][:, inside])
    rows = plain.neighbours(part.indptr, part.indices)
    one, more = (
        min(
            np.prod([float(x) for x in plain.reach(rows, found.order)])
            for number in range(count)
            for found in plain.walk(rows, number % len(rows), "bi-criteria")
        )
        for count in (1, len(rows))
    )
    assert more <= one


@pytest.mark.parametrize(
    ("indptr", "indices", "said"),
    [
        ([0, 1, 2], [0, 2], "outside a matrix of 2"),
        ([0, 1, 2], [0, -1], "holds -1"),
        ([0, 2, 1], [0, 1], "indptr"),
        ([1, 1, 2], [0, 1], "indptr"),
        ([0, 1, 3], [0, 1], "indptr"),
        ([], [], "indptr"),
        ([0.0, 1.0], [0], "float64"),
        ([0, 1], [[0]], "2 axes"),
    ],
)
def test_arrays_that_are_no_square_matrix_are_refused(indptr: Any, indices: Any, said: str) -> None:
    for run in (rcmpp, bandwidth, profile):
        with pytest.raises(UserError, match=said):
            run(np.array(indptr), np.array(indices))


def test_options_that_are_not_known_are_refused_with_the_nearest() -> None:
    matrix = path(3)
    with pytest.raises(UserError, match="finder='george-liu'"):
        rcmpp(matrix.indptr, matrix.indices, finder="george_liu")
    with pytest.raises(UserError, match="restarts=0"):
        rcmpp(matrix.indptr, matrix.indices, restarts=0)
    with pytest.raises(UserError, match="mind"):
        rcmpp(matrix.indptr, matrix.indices, finder="mind", restarts=2)
    for wrong in ([0, 1], [0, 1, 1], [0, 1, 3], [0, 1, -1]):
        with pytest.raises(UserError, match="permutation"):
            bandwidth(matrix.indptr, matrix.indices, np.array(wrong))
