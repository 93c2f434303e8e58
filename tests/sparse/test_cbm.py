"""CBM: the differences are the matrix again, the tree is the cheapest, and products equal the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from awkward import pretend_threads
from csr_of import csr_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from espalier.recipe.errors import UserError
from espalier.sparse import CBM, CSR, DiagonalScale, matmul
from espalier.sparse.cbm import build
from espalier.sparse.cbm.matrix import cbm_matmul, pays
from espalier.sparse.cost import cost

ALPHAS = (0, 1, 4, 16, 10**9)


@st.composite
def dense(draw: st.DrawFn, most: int = 40, square: bool = False) -> Tensor:
    """0/1 float64: noise over a few patterns of rows, so that rows are alike; empty and full ones among them."""
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    rows = draw(st.integers(1, most))
    columns = rows if square else draw(st.integers(1, most))
    patterns = random.random((draw(st.integers(1, 5)), columns)) < draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
    found = patterns[random.integers(len(patterns), size=rows)]
    found ^= random.random(found.shape) < draw(st.sampled_from([0.0, 0.03, 0.5]))
    return torch.from_numpy(found).double()


def binary(matrix: Tensor) -> CSR:
    return csr_of(matrix, binary=True)


def cliques(count: int = 12, size: int = 25) -> CSR:
    """Cliques with 5 % of their edges dropped."""
    random = torch.Generator().manual_seed(0)
    upper = torch.block_diag(*(torch.ones(size, size) for _ in range(count))).triu(1)
    upper *= torch.rand(upper.shape, generator=random) > 0.05
    return binary(upper + upper.t())


@settings(max_examples=80)
@given(dense(), st.sampled_from(ALPHAS), st.sampled_from(["exact", "fast"]))
def test_the_differences_are_the_matrix_again(matrix: Tensor, alpha: int, search: Any) -> None:
    whole = binary(matrix)
    compressed = CBM.of(whole, alpha, search)
    again = compressed.to_csr()
    assert torch.equal(again.indptr, whole.indptr)
    assert torch.equal(again.indices, whole.indices)
    deltas = compressed.deltas
    assert deltas is not None
    assert deltas.additions <= whole.entries
    if alpha == 10**9:
        assert deltas.edges == 0
        assert deltas.differences == whole.entries
    stats = compressed.stats()
    assert stats.entries == whole.entries
    assert stats.csr_bytes == 4 * (len(whole.indptr) + whole.entries)


@settings(max_examples=60)
@given(dense(), st.sampled_from(ALPHAS), st.sampled_from(["exact", "fast"]))
def test_the_tree_reaches_every_row_after_its_parent_and_every_edge_saves(
    matrix: Tensor, alpha: int, search: Any
) -> None:
    deltas = build.compress(binary(matrix), alpha, search)
    place = {row: at for at, row in enumerate(deltas.order.tolist())}
    assert sorted(place) == list(range(len(matrix)))
    cuts, parents = deltas.cuts.tolist(), deltas.parent.tolist()
    assert (cuts[0], cuts[-1]) == (0, len(matrix))
    for at, (row, parent) in enumerate(zip(deltas.order.tolist(), parents, strict=True)):
        if parent >= 0:
            assert place[parent] < at
            assert (matrix[row] != matrix[parent]).sum() < matrix[row].sum() - alpha
            assert not [cut for cut in cuts if place[parent] < cut <= at], "a piece of work waits for none before it"


@settings(max_examples=60)
@given(dense(most=12), st.sampled_from(ALPHAS))
def test_the_tree_is_the_minimum_arborescence(matrix: Tensor, alpha: int) -> None:
    whole = binary(matrix)
    parent = build.parents(whole, build.overlaps(whole, alpha), alpha).tolist()
    degree = matrix.sum(1).int().tolist()
    distance = (matrix[:, None] != matrix[None]).sum(-1).tolist()
    graph = nx.DiGraph()
    graph.add_weighted_edges_from(("root", v, degree[v]) for v in range(len(matrix)))
    edges = [(u, v, distance[u][v]) for u in range(len(matrix)) for v in range(len(matrix)) if u != v]
    graph.add_weighted_edges_from(edge for edge in edges if edge[2] < degree[edge[1]] - alpha)
    least = nx.minimum_spanning_arborescence(graph).size(weight="weight")
    assert sum(degree[v] if u < 0 else distance[u][v] for v, u in enumerate(parent)) == least


def test_an_edge_that_saves_too_little_in_its_direction_is_not_in_the_tree() -> None:
    """The second row saves 10 as a difference from the first and 12 from the fourth, which saves 4 from the second. A
    tree that knew no directions would hang the second below the first and the fourth below the second."""
    matrix = torch.zeros(4, 21)
    for row, columns in enumerate((range(10), range(20), range(21), range(8, 20))):
        matrix[row, list(columns)] = 1
    whole = binary(matrix)
    parents = {alpha: build.parents(whole, build.overlaps(whole, alpha), alpha).tolist() for alpha in (3, 4)}
    assert parents == {3: [-1, 0, 1, 1], 4: [-1, 3, 1, -1]}


def test_equal_rows_cost_nothing_but_their_edge() -> None:
    stats = CBM.of(binary(torch.ones(9, 7)), 0).stats()
    assert (stats.differences, stats.tree_edges, stats.branches, stats.form) == (7, 8, 1, "cbm")


@settings(max_examples=80)
@given(dense(), st.sampled_from(ALPHAS), st.sampled_from([1, 5, 16, 33, 200]), st.sampled_from(["f4", "f8"]))
def test_products_of_whole_numbers_are_those_of_csr_to_the_bit(
    matrix: Tensor, alpha: int, width: int, kind: str
) -> None:
    whole = binary(matrix)
    x = torch.from_numpy(np.random.default_rng(0).integers(-50, 50, (matrix.shape[1], width)).astype(kind))
    compressed = CBM.of(whole, alpha)
    assert torch.equal(compressed.matmul(x), whole.matmul(x))
    assert torch.equal(cbm_matmul.reference.run(compressed, x), whole.matmul(x))
    assert cbm_matmul.pick(compressed, x).name == "branch_by_branch"


@settings(max_examples=40)
@given(dense(square=True), st.sampled_from([None, "row", "symmetric"]), st.booleans())
def test_its_product_equals_the_plain_one_forward_and_backward(matrix: Tensor, scale: Any, symmetric: bool) -> None:
    matrix = ((matrix + matrix.t()) > 0).double() if symmetric else matrix
    whole = binary(matrix)
    plain = whole if scale is None else whole.normalised(scale)
    compressed = CBM.from_csr(whole.indptr, whole.indices, whole.shape, alpha=0, scale=scale)
    x = torch.randn(len(matrix), 9, dtype=torch.float64, requires_grad=True)
    ours, theirs = matmul(compressed, x), matmul(plain, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(cbm_matmul.reference.run(compressed, x), theirs, rtol=1e-13, atol=1e-13)
    seed = torch.randn_like(ours)
    gradients = (torch.autograd.grad(one, x, seed)[0] for one in (ours, theirs))
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-13)


@settings(max_examples=30)
@given(dense(most=60), st.integers(0, 2**31))
def test_the_error_is_bounded_by_the_length_of_the_path(matrix: Tensor, seed: int) -> None:
    compressed = CBM.of(binary(matrix), 0)
    x = torch.randn(matrix.shape[1], 20, generator=torch.Generator().manual_seed(seed))
    error = (compressed.matmul(x).double() - matrix @ x.double()).abs().max()
    terms = compressed.stats().depth + 2 * matrix.sum(1).max()
    bound = torch.finfo(torch.float32).eps * terms * matrix.sum(1).max().clamp(min=1) * x.abs().max()
    assert error <= bound


def test_gradients_are_right_twice() -> None:
    matrix = (torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) < 0.7).double()
    left, right = torch.rand(6), torch.rand(8)
    for scale in (None, (left, None), (None, right), (left, right)):
        whole = binary(matrix)
        compressed = CBM.from_csr(whole.indptr, whole.indices, whole.shape, alpha=0, scale=scale)
        x = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(compressed.matmul, (x,))
        assert torch.autograd.gradgradcheck(compressed.matmul, (x,))


def test_a_node_without_neighbours_has_no_scale_and_no_result() -> None:
    compressed = CBM.from_csr([0, 0, 2, 4], [1, 2, 1, 2], (3, 3), alpha=0, scale="symmetric")
    y = compressed.matmul(torch.ones(3, 2))
    assert torch.isfinite(y).all()
    assert y[0].tolist() == [0, 0]


def test_the_number_of_threads_changes_no_bit() -> None:
    whole, x = cliques().normalised("symmetric"), torch.randn(300, 33)
    found = []
    for threads in (1, 2):
        pretend_threads(threads)
        found.append((CBM.of(whole, 0).matmul(x), CBM.of(whole, 0, "fast").matmul(x)))
    pretend_threads(1)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_heavy_branches_are_cut_for_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LIGHT", 40)
    whole = cliques()
    cut = CBM.of(whole, 0)
    monkeypatch.undo()
    assert cut.stats().branches > CBM.of(whole, 0).stats().branches
    x = torch.randint(-9, 9, (300, 5)).float()
    assert torch.equal(cut.matmul(x), whole.matmul(x))


def test_auto_keeps_the_plain_format_where_nothing_is_gained() -> None:
    random = binary((torch.rand(200, 200, generator=torch.Generator().manual_seed(0)) < 0.03).double())
    assert CBM.from_csr(random.indptr, random.indices, random.shape).stats().form == "csr"
    stats = CBM.of(cliques()).stats()
    assert stats.form == "cbm"
    assert stats.ratio > 2


def test_auto_multiplies_few_columns_by_the_entries_where_differences_save_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clique of 12 saves some 8 additions a row: too few for 16 columns, enough for 512."""
    matrix, whole = CBM.of(cliques(30, 12)), cliques(30, 12)
    assert matrix.stats().form == "cbm"
    used: list[int] = []

    def differences(_: CBM, x: Tensor) -> Tensor:
        used.append(x.shape[1])
        return whole.matmul(x)

    monkeypatch.setattr("espalier.sparse.cbm.matrix.cbm_matmul", differences)
    for width in (1, 16, 64, 512):
        x = torch.randint(-9, 9, (360, width)).float()
        assert torch.equal(matrix.matmul(x), whole.matmul(x))
    assert used == [512]
    x = torch.randint(-9, 9, (360, 8)).float().requires_grad_()
    ours, theirs = (torch.autograd.grad(one.matmul(x).square().sum(), x)[0] for one in (matrix, whole))
    assert torch.equal(ours, theirs)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 512))
def test_what_pays_for_few_columns_pays_for_more(entries: int, additions: int, rows: int, width: int) -> None:
    if pays(entries, additions, rows, width):
        assert pays(entries, additions, rows, 2 * width)
        assert pays(entries + 1, additions, rows, width)


def test_the_fast_search_keeps_nine_tenths_of_the_compression() -> None:
    whole = cliques(8, 60)
    exact, fast = (build.compress(whole, 0, search).additions for search in ("exact", "fast"))
    assert exact <= fast <= exact / 0.9


def test_hubs_are_searched_fast_and_still_exact_in_their_product() -> None:
    hub, leaves = torch.zeros(2500, dtype=torch.int64), torch.arange(2500)
    whole = CSR.from_edges(torch.cat([torch.stack([hub, leaves]), torch.stack([leaves, hub])], dim=1), (2500, 2500))
    assert build.comparisons(whole) > build.EXACT_WORK * whole.entries
    x = torch.randint(-9, 9, (2500, 3)).float()
    assert torch.equal(CBM.of(whole, 0).matmul(x), whole.matmul(x))


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (0, 3), (1, 1), (4, 4)])
def test_nothing_is_a_matrix_too(shape: tuple[int, int]) -> None:
    for alpha in ("auto", 0):
        empty = CBM.from_csr(torch.zeros(shape[0] + 1, dtype=torch.int64), [], shape, alpha=alpha)  # type: ignore[arg-type]
        assert empty.matmul(torch.ones(shape[1], 2)).tolist() == [[0, 0]] * shape[0]
        assert empty.stats().entries == 0
        assert empty.to_csr().shape == shape


BAD: dict[str, Callable[[], Any]] = {
    "has weights": lambda: CBM.of(CSR.of([0, 1], [0], (1, 1), [2.0])),
    "is there twice": lambda: CBM.from_csr([0, 2], [0, 0], (1, 1)),
    "alpha = -1": lambda: CBM.from_csr([0, 1], [0], (1, 1), alpha=-1),
    "alpha = 'most'": lambda: CBM.from_csr([0, 1], [0], (1, 1), alpha="most"),  # type: ignore[arg-type]
    "holds the id 4": lambda: CBM.from_csr([0, 1], [4], (1, 1)),
    "needs a square": lambda: CBM.from_csr([0, 1], [0], (1, 2), scale="symmetric"),
    "x has shape": lambda: CBM.from_csr([0, 1], [0], (1, 2), alpha=0).matmul(torch.ones(3, 1)),
    "no values of its own": lambda: matmul(CBM.of(cliques(2, 9)), torch.ones(18, 1), torch.ones(3)),
}


@pytest.mark.parametrize("said", BAD)
def test_what_it_cannot_hold_is_refused_by_name(said: str) -> None:
    with pytest.raises(UserError) as error:
        BAD[said]()
    assert said in str(error.value)


def test_values_of_one_are_binary() -> None:
    whole = cliques(2, 9)
    ones = CSR(whole.indptr, whole.indices, whole.shape, torch.ones(whole.entries))
    assert CBM.of(ones, 0).stats().form == "cbm"


def test_the_predicted_cost_orders_the_formats_as_their_additions_do() -> None:
    whole = cliques()
    deltas = CBM.of(whole).deltas
    assert deltas is not None
    found = cost(300, np.array([whole.entries, deltas.additions]), 128).seconds["aggregate"]
    assert found[0] > found[1] > 0


def test_a_scale_is_folded_into_the_same_tree() -> None:
    whole, left = cliques(3, 20), torch.rand(60)
    compressed = CBM.of(whole.scaled(DiagonalScale(left, left)), 0)
    assert compressed.transposed.deltas is compressed.deltas
    torch.testing.assert_close(compressed.to_csr().to_dense(), left[:, None] * whole.to_dense() * left)


def test_scales_may_be_numpys_and_have_strides() -> None:
    cliques = csr_of(torch.block_diag(*[torch.ones(20, 20)] * 3), binary=True)
    wide = torch.rand(60, 2)
    strided = CBM.from_csr(cliques.indptr, cliques.indices, (60, 60), scale=(wide[:, 0], torch.ones(1).expand(60)))
    arrays = CBM.from_csr(cliques.indptr, cliques.indices, (60, 60), scale=(wide[:, 0].numpy(), None))
    x = torch.randn(60, 4)
    assert torch.allclose(strided @ x, arrays @ x)
    assert torch.allclose(strided @ x, wide[:, :1] * (cliques.to_dense() @ x), atol=1e-5)
