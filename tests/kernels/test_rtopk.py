"""The k largest of every row: the same values as torch.topk for every input, at their columns, with their gradient."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from awkward import WIDTHS, assert_right, hard_rows, pretend_threads, same, shares
from hypothesis import given
from hypothesis import strategies as st

from espalier.kernels import rtopk
from espalier.kernels.base import OPERATIONS
from espalier.recipe.errors import UserError

ROW_TOPK = OPERATIONS["rtopk"]
FAST = next(form.run for form in ROW_TOPK.forms if form.name == "on_vectors")
HALVES = (torch.bfloat16, torch.float16)
needs_vectors = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX512", "AVX2"), reason="torch.topk is chosen on this processor"
)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("width", WIDTHS)
def test_fast_form_finds_the_values_of_torch_topk(width: int, dtype: torch.dtype) -> None:
    x = hard_rows(width, dtype)
    for k in shares(width):
        assert_right(x, k, FAST(x, k, None, False))
        assert_right(x, k, FAST(x, k, None, True), falling=True)


@given(
    rows=st.integers(1, 40),
    width=st.integers(16, 1200),
    share=st.floats(0, 1),
    levels=st.sampled_from([2, 5, 100, 10**6]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_any_ties(rows: int, width: int, share: float, levels: int, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    x = torch.randint(-levels, levels, (rows, width), generator=made).float() / 7
    k = 1 + int(share * (width - 2))
    assert_right(x, k, FAST(x, k, None, False))
    assert_right(x, k, FAST(x, k, None, True), falling=True)


@given(st.lists(st.floats(width=32), min_size=17, max_size=80), st.integers(1, 16))
def test_any_float_even_those_nobody_expects(values: list[float], k: int) -> None:
    x = torch.tensor([values])
    assert_right(x, k, FAST(x, k, None, False))
    assert_right(x, k, FAST(x, k, None, True), falling=True)


@given(width=st.integers(16, 700), steps=st.integers(1, 12), seed=st.integers(0, 2**31))
def test_stopped_search_takes_what_the_reference_takes_and_never_loses_the_maximum(
    width: int, steps: int, seed: int
) -> None:
    x = hard_rows(width, torch.float32, seed)[[0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 12]]
    for k in shares(width)[:4]:
        values, columns = FAST(x, k, steps, False)
        assert torch.equal(columns, ROW_TOPK.reference.run(x, k, steps, False)[1])
        assert torch.equal(values.amax(-1), x.amax(-1))
        assert (columns.diff(dim=-1) > 0).all()


def test_stopped_search_hits_as_many_as_bisection_must() -> None:
    """Share of the true k largest in normal rows 256 wide, k = 32: a plain bisection, written apart, found these."""
    x = torch.randn(2000, 256, generator=torch.Generator().manual_seed(5))
    least = torch.topk(x, 32).values[:, -1:]
    for steps, share in {2: 0.652, 4: 0.912, 6: 0.975, 8: 0.993}.items():
        values, _ = rtopk(x, 32, max_iterations=steps)
        assert (values >= least).float().mean() > share - 0.01


def test_rows_with_nan_are_exact_however_early_the_search_stops() -> None:
    x = hard_rows(100, torch.float32)[5:7]
    for run in (FAST, ROW_TOPK.reference.run):
        assert same(run(x, 30, 1, True)[0], torch.topk(x, 30).values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8])
def test_other_dtypes_are_torchs(dtype: torch.dtype) -> None:
    x = (20 * torch.randn(50, 100, generator=torch.Generator().manual_seed(1))).abs().to(dtype)
    values, columns = rtopk(x, 10, sorted=True)
    assert torch.equal(values, torch.topk(x, 10).values)
    assert torch.equal(x.gather(1, columns), values)


def test_wider_tensors_strides_and_slices() -> None:
    x = torch.randn(6, 5, 40, 40, generator=torch.Generator().manual_seed(2))
    for one in (
        x,
        x.transpose(0, 2),
        x.transpose(2, 3),
        x[:, ::2],
        x[..., ::2],
        x[..., 3:35],
        x.expand(2, 6, 5, 40, 40),
    ):
        assert_right(one, 7, FAST(one, 7, None, False))
    assert_right(x[0, 0, 0], 3, rtopk(x[0, 0, 0], 3, sorted=True), falling=True)


def test_edges_of_k_and_empty_tensors() -> None:
    x = torch.randn(1000, 33, generator=torch.Generator().manual_seed(3))
    whole, columns = rtopk(x, 33)
    assert torch.equal(whole, x)
    assert whole.data_ptr() != x.data_ptr()
    assert torch.equal(columns[0], torch.arange(33))
    assert torch.equal(rtopk(x, 33, sorted=True)[0], torch.topk(x, 33).values)
    for empty, k in ((x, 0), (x[:0], 5), (x[:, :0], 0), (x[:300].view(3, 100, 33)[:, :0], 5)):
        values, columns = rtopk(empty, k)
        assert values.shape == columns.shape == (*empty.shape[:-1], k)
        assert rtopk(empty, k, max_iterations=3)[0].shape == values.shape


@pytest.mark.filterwarnings("ignore:Input #0 requires gradient and is not a double")
@pytest.mark.parametrize("sorted", [False, True])
@pytest.mark.parametrize("steps", [None, 4])
def test_gradient_is_that_of_torch_topk(sorted: bool, steps: int | None) -> None:
    """Elements apart from one another by more than the difference that gradcheck makes."""
    made = torch.Generator().manual_seed(4)
    x = torch.stack([torch.randperm(40, generator=made) for _ in range(3)]).float().requires_grad_()
    wide = x.detach().double().requires_grad_()

    def fast(one: torch.Tensor) -> torch.Tensor:
        return FAST(one, 9, steps, sorted)[0]

    def plain(one: torch.Tensor) -> torch.Tensor:
        return ROW_TOPK.reference.run(one, 9, steps, sorted)[0]

    assert torch.autograd.gradcheck(fast, x, eps=0.25, atol=1e-4)
    assert torch.autograd.gradcheck(plain, wide)
    weights = torch.randn(3, 9, generator=made)
    ours, theirs = (
        torch.autograd.grad((weights * run(x).square()).sum(), x, create_graph=True)[0] for run in (fast, plain)
    )
    if sorted or steps:
        assert torch.equal(ours, theirs)
        assert torch.equal(
            *(torch.autograd.grad(one.square().sum(), x, retain_graph=True)[0] for one in (ours, theirs))
        )


@given(rows=st.integers(1, 50), width=st.integers(16, 300), share=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_gradient_reaches_the_kept_elements_and_no_others(rows: int, width: int, share: float, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=made, requires_grad=True)
    k = 1 + int(share * (width - 2))
    values, columns = FAST(x, k, None, False)
    weights = torch.randn(rows, k, generator=made)
    (values * weights).sum().backward()
    assert torch.equal(x.grad, torch.zeros(rows, width).scatter(1, columns, weights))  # type: ignore[arg-type]


@needs_vectors
def test_fast_form_is_one_node_for_the_compiler() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return rtopk(x, 8, sorted=True)[0].exp().sum()

    x = torch.randn(80, 64, generator=torch.Generator().manual_seed(6))
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(one).backward()
    loss(other).backward()
    assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@needs_vectors
def test_the_form_is_chosen_by_dtype_and_shape() -> None:
    def chosen(*shape: int, k: int = 4, sorted: bool = False, dtype: torch.dtype = torch.float32) -> str:
        return ROW_TOPK.pick(torch.zeros(shape, dtype=dtype), k, None, sorted).name

    assert chosen(1000, 64) == chosen(1000, 64, dtype=torch.bfloat16) == chosen(4096, 16) == "on_vectors"
    assert chosen(4000, 15) == chosen(10, 64) == chosen(1000, 64, k=64) == chosen(1000, 64, k=0) == "row_topk"
    assert chosen(10, 5000, k=300, sorted=True) == "on_vectors"
    assert chosen(300, 64) == chosen(63, 256) == "row_topk", "torch is done before a kernel has started"
    assert chosen(64, 256) == "on_vectors", "wide rows pay sooner"
    assert chosen(1000, 64, k=1) == chosen(40000, 1, k=1) == "by_maximum"
    assert chosen(1000, 64, dtype=torch.float64) == chosen(1000, 64, dtype=torch.int32) == "row_topk"


@pytest.mark.parametrize("shape", [(1, 10), (2, 5), (7, 1), (64, 64), (4, 1024), (20, 300), (1000, 17), (3, 0, 4)])
def test_small_inputs_are_torchs_with_the_same_promises(shape: tuple[int, ...]) -> None:
    """Values of torch.topk at their columns, their gradient, and the same refusals, whoever finds them."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(11))
    for k in {0, 1, 2, shape[-1] // 2, shape[-1]} & set(range(shape[-1] + 1)):
        for ranked in (False, True):
            values, columns = rtopk(x, k, sorted=ranked)
            expected = torch.topk(x, k).values
            assert torch.equal(x.gather(-1, columns), values)
            assert torch.equal(values if ranked else values.sort(-1, descending=True).values, expected)
        leaf = x.clone().requires_grad_()
        values, columns = rtopk(leaf, k)
        values.sum().backward()
        assert torch.equal(leaf.grad, torch.zeros_like(x).scatter(-1, columns, 1.0))  # type: ignore[arg-type]
    for wrong in (-1, shape[-1] + 1):
        with pytest.raises(UserError, match="k = "):
            rtopk(x, wrong)


def test_one_thread_and_a_kernel_called_directly_find_what_many_do() -> None:
    from espalier.kernels import rtopk_cpu

    x = torch.randn(300, 100, generator=torch.Generator().manual_seed(12))
    found = []
    for run, pieces in ((rtopk_cpu.select, (7,)), (rtopk_cpu.select_alone.direct, ())):
        values, columns = torch.empty(300, 9), torch.empty(300, 9, dtype=torch.int64)
        run(x.data_ptr(), (300, 100, 9), (0, -1, 0), *pieces, (values.data_ptr(), columns.data_ptr()))
        found.append((values, columns))
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_threads_change_no_bit() -> None:
    x = torch.randn(601, 130, generator=torch.Generator().manual_seed(7))
    one = FAST(x, 20, None, False)
    pretend_threads(2)
    try:
        two = FAST(x, 20, None, False)
    finally:
        pretend_threads(1)
    assert all(torch.equal(left, right) for left, right in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("x", "k", "steps", "words"),
    [
        (torch.zeros(3, 10), 11, None, "k = 11, but a row has 10"),
        (torch.zeros(3, 10), -1, None, "k = -1"),
        (torch.zeros(3, 0), 1, None, "rows with elements"),
        (torch.tensor(1.0), 1, None, "scalar"),
        (torch.zeros(3, 10, dtype=torch.bool), 1, None, "torch.bool"),
        (torch.zeros(3, 10, dtype=torch.complex64), 1, None, "complex64"),
        (torch.zeros(3, 10, dtype=torch.float8_e4m3fn), 1, None, "float8"),
        (torch.zeros(3, 10).numpy(), 1, None, "x is ndarray"),
        (torch.zeros(3, 10).to_sparse(), 1, None, "sparse"),
        (torch.zeros(3, 10), torch.tensor(4), None, "is a tensor"),
        (torch.zeros(3, 10), 1, 0, "max_iterations = 0"),
        (torch.zeros(3, 10), 4.0, None, "k = 4.0 is no whole number"),
        (torch.zeros(3, 10), 1, 2.5, "max_iterations = 2.5 is no whole number"),
    ],
)
def test_bad_input_is_named(x: Any, k: Any, steps: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        rtopk(x, k, max_iterations=steps)


def test_more_bisections_than_there_are_floats_are_exact() -> None:
    x = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rtopk(x, 7, max_iterations=2**70, sorted=True)[0], x.topk(7).values)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processors_without_wide_vectors_find_the_same() -> None:
    """numba compiles for a processor of 2013."""
    script = """
import sys; sys.path.insert(0, sys.argv[1])
import torch
from espalier.kernels.base import OPERATIONS
import espalier.kernels
from awkward import assert_right, hard_rows
for width in (33, 1100):
    for dtype in (torch.float32, torch.float16):
        x = hard_rows(width, dtype)
        assert_right(x, 20, OPERATIONS["rtopk"].forms[1].run(x, 20, None, False))
"""
    features = "+avx,+avx2,+f16c,+fma,+popcnt,+bmi,+bmi2,+lzcnt,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2"
    environment = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-c", script, os.path.dirname(__file__)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("width", [1, 2, 17, 128])
def test_the_one_largest_of_narrow_rows(width: int) -> None:
    x = hard_rows(width, torch.float32) if width > 1 else torch.tensor([[1.0], [torch.nan], [-torch.inf]])
    run = next(form.run for form in ROW_TOPK.forms if form.name == "by_maximum")
    assert_right(x, 1, run(x, 1, None, True), falling=True)
    apart = torch.randn(20, width, generator=torch.Generator().manual_seed(9), requires_grad=True)
    ours, theirs = (torch.autograd.grad(one.sum(), apart)[0] for one in (run(apart, 1, 3, False)[0], apart.topk(1)[0]))
    assert torch.equal(ours, theirs)


def test_numpy_agrees() -> None:
    x = torch.randn(200, 500, generator=torch.Generator().manual_seed(8))
    values = rtopk(x, 50)[0].sort(dim=-1).values
    assert np.array_equal(values.numpy(), np.sort(np.partition(x.numpy(), 450, axis=1)[:, 450:], axis=1))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp
def test_functions_of_functions_and_changes_in_place_work() -> None:
    x = torch.randn(300, 64)
    expected = torch.topk(x, 4, sorted=True).values
    found = torch.func.functionalize(lambda rows: rtopk(rows, 4, sorted=True)[0])(x)
    assert torch.equal(found, expected)
    assert torch.equal(
        torch.vmap(lambda rows: rtopk(rows, 4, sorted=True)[0])(x.view(3, 100, 64)).view(300, 4), expected
    )
    _, tangent = torch.func.jvp(lambda rows: rtopk(rows, 4, sorted=True)[0], (x,), (torch.ones_like(x),))
    assert torch.equal(tangent, torch.ones(300, 4))
    leaf = x.clone().requires_grad_()
    values, _ = rtopk(leaf, 4)
    values.mul_(2).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.sum() == 2 * 4 * 300
