"""CSR: it holds what it was given, refuses what is no matrix, and its products equal the plain forms, gradients too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from awkward import pretend_threads
from csr_of import csr_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from espalier.kernels.buffer_pool import LEAST, Buffers
from espalier.recipe.errors import UserError
from espalier.sparse import CSR, DiagonalScale, attention_aggregate, cbsr_aggregate, csr, matmul
from espalier.sparse.attention import graph_attention, row_shares
from espalier.sparse.cbsr import scattered, sparse_rows
from espalier.sparse.csr import csr_matmul
from espalier.sparse.spmm_kernels import tiles


@st.composite
def dense(draw: st.DrawFn, square: bool = False) -> Tensor:
    """0/1 float64 of any shape up to 40 x 40, with rows alike, empty and full among them."""
    seed = draw(st.integers(0, 2**31))
    random = torch.Generator().manual_seed(seed)
    rows = draw(st.integers(1, 40))
    columns = rows if square else draw(st.integers(1, 40))
    share = draw(st.sampled_from([0.0, 0.05, 0.4, 0.9, 1.0]))
    found = (torch.rand(rows, columns, generator=random) < share).double()
    if draw(st.booleans()):
        found = found[torch.randint(rows, (rows,), generator=random)]
    return found


def binary(matrix: Tensor) -> CSR:
    return csr_of(matrix, binary=True)


WIDTHS = st.sampled_from([1, 2, 7, 8, 15, 16, 17, 31, 64, 100, 129, 300])


@settings(max_examples=60)
@given(dense())
def test_a_matrix_is_what_it_was_made_of(matrix: Tensor) -> None:
    weights = matrix * torch.rand(matrix.shape, dtype=torch.float64).add_(0.5)
    assert torch.equal(binary(matrix).to_dense(torch.float64), matrix)
    weighted = csr_of(weights)
    assert torch.equal(weighted.to_dense(torch.float64), weights)
    assert torch.equal(weighted.transposed.to_dense(torch.float64), weights.t())
    assert torch.equal(binary(matrix).transposed.to_dense(torch.float64), matrix.t())
    assert torch.equal(binary(matrix).rows, torch.nonzero(matrix)[:, 0])


def test_rows_are_sorted_and_edges_given_twice_are_joined() -> None:
    mixed = CSR.of([0, 3, 3, 4], [4, 0, 2, 1], (3, 5), [4.0, 0.0, 2.0, 1.0])
    assert mixed.indices.tolist() == [0, 2, 4, 1]
    assert mixed.values is not None
    assert mixed.values.tolist() == [0, 2, 4, 1]
    edges = [[0, 1, 0], [2, 2, 2]]
    assert CSR.from_edges(edges, (3, 3)).to_dense().tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 0]]
    assert CSR.from_edges(edges, (3, 3), [1.0, 2, 3]).to_dense().tolist() == [[0, 0, 0], [0, 0, 0], [4, 2, 0]]


def test_a_loop_is_there_once() -> None:
    with_one = CSR.from_edges([[0, 1], [0, 2]], (3, 3)).with_self_loops()
    assert with_one.to_dense().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16, np.uint32])
def test_any_integers_will_do(kind: Any) -> None:
    matrix = CSR.of(np.array([0, 1, 3], kind), np.array([2, 0, 1], kind), (2, 3))
    assert matrix.to_dense().tolist() == [[0, 0, 1], [1, 1, 0]]


BAD: dict[str, Callable[[], Any]] = {
    "holds the id 3": lambda: CSR.of([0, 1], [3], (1, 3)),
    "holds the id -1": lambda: CSR.of([0, 1], [-1], (1, 3)),
    "a target of edges holds the id 5": lambda: CSR.from_edges([[0], [5]], (3, 3)),
    "a source of edges holds the id 9": lambda: CSR.from_edges([[9], [0]], (3, 3)),
    "indptr has 2 offsets": lambda: CSR.of([0, 1], [0], (2, 3)),
    "indptr goes from 0 to 2": lambda: CSR.of([0, 2], [0], (1, 3)),
    "offsets ascend": lambda: CSR.of([0, 2, 1], [0], (2, 3)),
    "indices is of type float32": lambda: CSR.of([0, 1], torch.ones(1), (1, 3)),
    "[2, edges]": lambda: CSR.from_edges([[0, 1, 2]], (3, 3)),
    "values has shape": lambda: CSR.of([0, 1], [0], (1, 3), [1.0, 2.0]),
    "needs a square matrix": lambda: CSR.of([0, 1], [0], (1, 3)).with_self_loops(),
    "normalised('symmetric') needs a square": lambda: CSR.of([0, 1], [0], (1, 3)).normalised("symmetric"),
    "is not known": lambda: CSR.of([0, 1], [0], (1, 1)).normalised("rows"),
    "has weights already": lambda: CSR.of([0, 1], [0], (1, 1), [2.0]).normalised("row"),
    "A diagonal": lambda: CSR.of([0, 1], [0], (1, 3)).scaled(DiagonalScale(None, torch.ones(2))),
    "shape is 3": lambda: CSR.from_edges([[0], [1]], 3),  # type: ignore[arg-type]
    "x is ndarray": lambda: matmul(CSR.of([0, 1], [0], (1, 1)), np.ones((1, 2))),  # type: ignore[arg-type]
    "shape is (-1, 3)": lambda: CSR.of([0], [], (-1, 3)),
    "x has shape (2, 4)": lambda: matmul(CSR.of([0, 1], [0], (1, 3)), torch.ones(2, 4)),
    "the matrix has 1 entries": lambda: matmul(CSR.of([0, 1], [0], (1, 3)), torch.ones(3, 4), torch.ones(2)),
    "features has shape": lambda: attention_aggregate(
        CSR.of([0, 1], [0], (1, 3)), torch.ones(2, 1, 4), (torch.ones(1, 1), torch.ones(3, 1))
    ),
    "scores[1] has shape": lambda: attention_aggregate(
        CSR.of([0, 1], [0], (1, 3)), torch.ones(3, 1, 4), (torch.ones(1, 1), torch.ones(2, 1))
    ),
    "scores[0] is float64, features are float32": lambda: attention_aggregate(
        CSR.of([0, 1], [0], (1, 3)), torch.ones(3, 1, 4), (torch.ones(1, 1).double(), torch.ones(3, 1))
    ),
    "the width is 2": lambda: cbsr_aggregate(CSR.of([0, 1], [0], (1, 1)), torch.ones(1, 1), torch.tensor([[2]]), 2),
    "both are": lambda: cbsr_aggregate(CSR.of([0, 1], [0], (1, 1)), torch.ones(1, 1), torch.tensor([[0, 1]]), 2),
}


@pytest.mark.parametrize("said", BAD)
def test_what_is_no_matrix_is_refused_by_name(said: str) -> None:
    with pytest.raises(UserError) as error:
        BAD[said]()
    assert said in str(error.value)


@given(st.integers(1, 700), st.sampled_from([4, 8]))
def test_tiles_cover_a_row_and_stay_inside(width: int, element_bytes: int) -> None:
    covered = np.zeros(width, dtype=bool)
    for column, vectors, live in tiles(width, element_bytes):
        end = column + (vectors * (64 // element_bytes) or live)
        assert 0 <= column < end <= width
        covered[column:end] = True
    assert covered.all()


@settings(max_examples=80)
@given(dense(), WIDTHS, st.integers(0, 2**31), st.sampled_from([torch.float32, torch.float64]))
def test_the_product_of_whole_numbers_is_exact(matrix: Tensor, width: int, seed: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.randint(-50, 50, (matrix.shape[1], width), generator=random).to(dtype)
    assert torch.equal(matmul(binary(matrix), x), matrix.to(dtype) @ x)
    weights = matrix * torch.randint(1, 9, matrix.shape, generator=random)
    assert torch.equal(matmul(csr_of(weights.to(dtype)), x), weights.to(dtype) @ x)


@settings(max_examples=30)
@given(dense(), WIDTHS, st.booleans())
def test_the_fast_product_equals_the_plain_one_with_gradients(matrix: Tensor, width: int, weighted: bool) -> None:
    found = binary(matrix)
    x = torch.randn(matrix.shape[1], width, dtype=torch.float64, requires_grad=True)
    values = torch.randn(found.entries, dtype=torch.float64, requires_grad=True) if weighted else None
    inputs = [x] if values is None else [x, values]
    fast, plain = csr_matmul(found, x, values), csr_matmul.reference.run(found, x, values)
    seed = torch.randn_like(plain)
    torch.testing.assert_close(fast, plain)
    if found.entries:
        assert csr_matmul.pick(found, x, values).name == "summed_in_registers"
        for ours, theirs in zip(
            torch.autograd.grad(fast, inputs, seed), torch.autograd.grad(plain, inputs, seed), strict=True
        ):
            torch.testing.assert_close(ours, theirs)


def test_gradients_of_products_are_right_twice() -> None:
    matrix = binary((torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) < 0.5).double())
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    values = torch.randn(matrix.entries, dtype=torch.float64, requires_grad=True)
    for function, inputs in ((matrix.matmul, (x,)), (lambda x, v: matmul(matrix, x, v), (x, values))):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_shapes_and_types_come_back_as_they_went_in() -> None:
    matrix = binary(torch.ones(3, 4))
    assert matmul(matrix, torch.ones(4)).shape == (3,)
    assert matmul(matrix, torch.ones(4, 2, 5)).shape == (3, 2, 5)
    assert matmul(matrix, torch.ones(4, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert (matrix @ torch.ones(2, 4).t()).tolist() == [[4, 4]] * 3
    assert matmul(matrix, torch.ones(4, 0)).shape == (3, 0)
    assert matmul(CSR.of([0, 0], [], (1, 4)), torch.ones(4, 2)).tolist() == [[0, 0]]


def test_the_number_of_threads_changes_no_bit() -> None:
    random = torch.Generator().manual_seed(0)
    matrix = binary((torch.rand(300, 200, generator=random) < 0.2).double())
    x, scores = torch.randn(200, 33, generator=random), torch.randn(200, 3, generator=random)
    targets, features = torch.randn(300, 3, generator=random), torch.randn(200, 3, 11, generator=random)
    results = []
    for threads in (1, 2):
        pretend_threads(threads)
        inputs = [one.clone().requires_grad_() for one in (x, features, targets, scores)]
        found = [matmul(matrix, inputs[0]), attention_aggregate(matrix, inputs[1], (inputs[2], inputs[3]))]
        results.append([*found, *torch.autograd.grad([one.sin().sum() for one in found], inputs)])
    pretend_threads(1)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@settings(max_examples=30)
@given(dense(square=True), st.sampled_from(["row", "symmetric"]))
def test_normalised_equals_the_formula(matrix: Tensor, kind: str) -> None:
    degree = matrix.sum(1)
    inverse = torch.where(degree > 0, 1 / degree, 0.0)
    root = inverse.sqrt()
    wanted = inverse[:, None] * matrix if kind == "row" else root[:, None] * matrix * root
    found = binary(matrix).normalised(kind)
    exactly = {"rtol": 1e-13, "atol": 1e-13}
    torch.testing.assert_close(found.to_dense(torch.float64), wanted, **exactly)
    torch.testing.assert_close(found.transposed.to_dense(torch.float64), wanted.t(), **exactly)
    x = torch.randn(len(matrix), 3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(found.matmul(x), wanted @ x, **exactly)
    seed = torch.randn(len(matrix), 3, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(found.matmul(x), x, seed)[0], wanted.t() @ seed, **exactly)
    single = found.matmul(x.detach().float())
    torch.testing.assert_close(single.double(), wanted @ x, rtol=1e-4, atol=1e-5)


def test_shares_of_a_row_add_up_to_one_even_of_huge_scores() -> None:
    matrix = CSR.of([0, 3, 3, 5], [0, 1, 2, 0, 2], (3, 3))
    shares = row_shares(matrix.rows, 3, torch.tensor([1e4, 1e4, -1e4, -torch.inf, 0.0])[:, None])
    assert shares.flatten().tolist() == [0.5, 0.5, 0.0, 0.0, 1.0]
    scores = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda values: row_shares(matrix.rows, 3, values), (scores,))


@settings(max_examples=30)
@given(dense(), st.integers(1, 4), st.sampled_from([1, 7, 8, 33]), st.booleans())
def test_fused_attention_equals_the_plain_one_with_gradients(
    matrix: Tensor, heads: int, width: int, dropped: bool
) -> None:
    found = binary(matrix)
    rows, columns = found.shape
    shapes = ((columns, heads, width), (rows, heads), (columns, heads))
    features, target, source = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    keep = (torch.rand(found.entries, heads) < 0.5).double() * 2 if dropped else None
    fast = graph_attention(found, features, (target, source), 0.2, keep)
    plain = graph_attention.reference.run(found, features, (target, source), 0.2, keep)
    torch.testing.assert_close(fast, plain)
    if found.entries:
        assert graph_attention.pick(found, features, (target, source), 0.2, keep).name == "fused"
        seed, inputs = torch.randn_like(fast), (features, target, source)
        for ours, theirs in zip(
            torch.autograd.grad(fast, inputs, seed), torch.autograd.grad(plain, inputs, seed), strict=True
        ):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("width", [1, 8, 10, 21])
def test_attention_in_single_precision_takes_isolated_nodes_loops_and_edges_given_twice(heads: int, width: int) -> None:
    random = torch.Generator().manual_seed(0)
    indptr, rows = torch.tensor([0, 0, 3, 3, 7, 27]), 5
    indices = torch.cat([torch.tensor([1, 1, 4, 3, 3, 3, 0]), torch.randint(0, 5, (20,), generator=random)])
    for integers in (torch.int32, torch.int64):
        found = CSR.of(indptr.to(integers), indices.to(integers), (rows, rows))
        shapes = ((rows, heads, width), (rows, heads), (rows, heads))
        inputs = [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]
        keep = 2.0 * (torch.rand(found.entries, heads, generator=random) < 0.5)
        fast = graph_attention(found, inputs[0], (inputs[1], inputs[2]), 0.2, keep)
        plain = graph_attention.reference.run(found, inputs[0], (inputs[1], inputs[2]), 0.2, keep)
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)
        seed = torch.randn(fast.shape, generator=random)
        for ours, theirs in zip(*(torch.autograd.grad(one, inputs, seed) for one in (fast, plain)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@settings(max_examples=30)
@given(dense(), WIDTHS, st.booleans(), st.booleans())
def test_a_product_may_be_added_to_a_row_or_to_rows(matrix: Tensor, width: int, weighted: bool, shared: bool) -> None:
    found = csr_of(matrix * torch.rand_like(matrix)) if weighted else binary(matrix)
    x, start = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((matrix.shape[1], width), (width,) if shared else (matrix.shape[0], width))
    )
    fast, plain = matmul(found, x, start=start), csr_matmul.reference.run(found, x, found.values, start)
    torch.testing.assert_close(fast, plain)
    seed = torch.randn_like(plain)
    for ours, theirs in zip(*(torch.autograd.grad(one, (x, start), seed) for one in (fast, plain)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_attention_are_right() -> None:
    matrix = binary((torch.rand(4, 5, generator=torch.Generator().manual_seed(1)) < 0.6).double())
    shapes = ((5, 2, 3), (4, 2), (5, 2))
    inputs = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    keep = (torch.rand(matrix.entries, 2) < 0.7).double()
    assert torch.autograd.gradcheck(lambda x, t, s: attention_aggregate(matrix, x, (t, s), keep=keep), inputs)


@settings(max_examples=40)
@given(dense(), st.sampled_from([1, 5, 40, 300]), st.data())
def test_cbsr_equals_the_dense_product_with_gradients(matrix: Tensor, width: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, width))
    weights = matrix * torch.rand(matrix.shape, dtype=torch.float64)
    found = data.draw(st.sampled_from([binary(matrix), csr_of(weights)]))
    values, indices = torch.randn(matrix.shape[1], width, dtype=torch.float64).topk(kept)
    values.requires_grad_()
    fast, plain = scattered(found, values, indices, width), sparse_rows.reference.run(found, values, indices, width)
    torch.testing.assert_close(fast, plain)
    torch.testing.assert_close(cbsr_aggregate(found, values, indices, width), plain)
    seed = torch.randn_like(fast)
    if found.entries:
        ours, theirs = (torch.autograd.grad(one, values, seed)[0] for one in (fast, plain))
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_cbsr_are_right_twice() -> None:
    matrix = binary((torch.rand(4, 6, generator=torch.Generator().manual_seed(2)) < 0.6).double())
    indices = torch.rand(6, 40).topk(3).indices
    values = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda one: scattered(matrix, one, indices, 40), (values,))
    assert torch.autograd.gradgradcheck(lambda one: scattered(matrix, one, indices, 40), (values,))


def test_a_result_in_use_is_never_given_out_again() -> None:
    buffers, size = Buffers(), LEAST // 4
    first, second = buffers.empty((size, 1), torch.float32), buffers.empty((size, 1), torch.float32)
    first.fill_(1)
    second.fill_(2)
    view, place = first[7:], first.data_ptr()
    del first
    third = buffers.empty((size,), torch.float32).fill_(3)
    assert (view == 1).all()
    assert (second == 2).all()
    del view
    assert buffers.empty((size // 2, 2), torch.float32).data_ptr() == place, "and is, once nothing refers to it"
    assert (third == 3).all()


def test_free_memory_is_kept_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier.kernels.buffer_pool.MOST", LEAST)
    buffers = Buffers()
    held = [buffers.empty((LEAST,), torch.uint8) for _ in range(3)]
    held.clear()
    assert buffers._bytes == LEAST
    assert not buffers._used


@pytest.mark.parametrize("kind", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_offsets_without_a_sign_are_looked_at_too(kind: torch.dtype) -> None:
    whole = CSR.of(torch.tensor([0, 2, 3], dtype=kind), torch.arange(3).to(kind), (2, 3))
    assert whole.degrees.tolist() == [2, 1]
    with pytest.raises(UserError, match="indptr goes from 0 to 6"):
        CSR.of(torch.tensor([0, 5, 3, 6]).to(kind), torch.arange(6), (3, 6))


@pytest.mark.parametrize("shape", [(2, 2**33), (-1, 3)])
def test_edges_of_a_matrix_that_cannot_be_held_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(UserError, match="shape is"):
        CSR.from_edges(torch.tensor([[2**32 + 1, 3], [0, 1]]), shape)


@pytest.mark.parametrize("kind", [torch.complex64, torch.int64, torch.bool])
def test_only_floats_are_multiplied(kind: torch.dtype) -> None:
    matrix = CSR.of([0, 1, 2], [1, 0], (2, 2))
    with pytest.raises(UserError, match="x is of type"):
        matmul(matrix, torch.ones(2, 3).to(kind))
    with pytest.raises(UserError, match="values"):
        matmul(matrix, torch.ones(2, 3), torch.ones(2).to(kind))


def test_attention_is_differentiated_once_and_says_so() -> None:
    looped = CSR.from_edges(torch.randint(0, 8, (2, 20)), (8, 8)).with_self_loops()
    features = torch.randn(8, 2, 3, requires_grad=True)
    scores = tuple(torch.randn(8, 2, requires_grad=True) for _ in range(2))
    out = attention_aggregate(looped, features, scores)
    (gradient,) = torch.autograd.grad(out.square().sum(), features, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("shape", [(700, 500), (1, 400), (300, 1), (600, 600)])
def test_counting_turns_a_matrix_as_sorting_does(shape, monkeypatch) -> None:
    rows, columns = shape
    draw = torch.Generator().manual_seed(rows)
    pairs = torch.stack([torch.randint(columns, (2000,), generator=draw), torch.randint(rows, (2000,), generator=draw)])
    indptr, order = torch.bincount(pairs[1], minlength=rows).cumsum(0), pairs[1].argsort(stable=True)
    matrix = CSR.of(torch.cat([torch.zeros(1, dtype=torch.int64), indptr]), pairs[0][order], shape)  # with duplicates
    sorted_ = matrix.transpose
    monkeypatch.setattr(csr, "_SORTED", 0)
    counted = CSR(matrix.indptr, matrix.indices, matrix.shape).transpose
    assert torch.equal(counted.order, sorted_.order)
    assert torch.equal(counted.pattern.indptr, sorted_.pattern.indptr)
    assert torch.equal(counted.pattern.indices, sorted_.pattern.indices)
