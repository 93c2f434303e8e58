"""The k largest of every row: RTop-K, arXiv 2409.00822 (ICLR 2025), beside torch.topk.

Many short rows (activations, expert scores, gradients in buckets) need no sort: a threshold is searched per row until
exactly k elements reach it. The fast forms stand in rtopk_cpu.py and rtopk_gpu.py with what they do otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from espalier.kernels.base import operation
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Int, Shaped

Found = tuple[Tensor, Tensor]

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes of the fast forms, by the number that their kernels know them by."""
_NARROWEST = 16
"""One vector: rows narrower than that are torch's."""
_LEAST = {"AVX512": 1, "AVX2": 4}.get(torch.backends.cpu.get_cpu_capability())
"""Smallest k worth it: on AVX2, where packing takes many instructions, torch's heap of one value is faster. On other
processors nothing was measured, and torch is left alone."""
_SMALL = 16384
"""Fewer elements than that are torch's: it is done with them before ours are allocated and the kernel is called."""
_NARROW, _SMALL_IF_NARROW = 256, 24576
"""Narrower rows need more elements, for a core's branch predictor learns torch's comparisons by heart where the same
tensor comes again: 12,000 normal elements in rows of 32 took 20 µs the tenth time, 24,000 took 120 (bench/rtopk.py)."""
_GRAIN = 32768
"""Elements that torch's own top-k gives to a thread before it asks for another."""
_SERIAL = 65536
"""Fewer elements are searched on one thread: waking another takes some 10 µs."""
_FEW = 128
"""So few elements are sorted in no time. Up to this width torch's maximum takes less time than a search: at 64, 240 µs
for 1563 rows, against 370."""
_WIDEST_ON_GPU = {torch.float32: 8192, torch.bfloat16: 4096, torch.float16: 4096}
"""A row is held in the registers of one block. On an H100 rows of 8192 take torch 1.3 to 1.6 times as long in
float32, but in bfloat16 mostly less."""


_ENOUGH = 1100
"""Bisections after which no float of 64 bits lies between the bounds: its exponents and its mantissa."""


def rtopk(
    x: Shaped[Tensor, "*rows width"], k: int, max_iterations: int | None = None, sorted: bool = False
) -> tuple[Shaped[Tensor, "*rows k"], Int[Tensor, "*rows k"]]:
    """The k largest elements along the last dim, as torch.topk returns them: values and int64 columns.

    NaN counts as largest. Which of equal elements are taken is not promised, nor without `sorted` their order.

    Args:
        x: any dtype and device torch.topk takes, any strides; fast for float32, bfloat16 and float16.
        k: from 0 to the width.
        max_iterations: end the search of a row after that many bisections and, as the paper counts, one more look at
            the middle: k elements still, the largest among them, but a few of the others may miss the k largest.
            Meant for GPUs; on CPUs the exact search is as fast. Rows with NaN and integers are always exact.
        sorted: values fall along the row.

    Returns:
        Values, differentiable in `x` (reverse mode, any order), and columns.

    Raises:
        UserError: `k` or `max_iterations` out of range, `x` a scalar, not dense, of a dtype without order.
    """
    try:
        if max_iterations is None and type(k) is int:
            elements = x.numel()
            if 1 < elements < _SMALL:  # nothing else fits into torch's 2 µs, of which reading more options takes 0.1
                return x.topk(k) if sorted or elements < _FEW or k == 1 else x.topk(k, -1, True, False)
            if 1 < elements < 4 * _SERIAL and x.is_cpu and _is_small(elements, x.shape[-1], k):
                return x.topk(k, -1, True, sorted)
    except (AttributeError, RuntimeError, TypeError, IndexError):
        _check(x, k, max_iterations)
        raise
    plain = type(x) is Tensor and x.dtype in KINDS and type(k) is int and max_iterations is None
    if not (plain and x.dim() and 0 <= k <= x.shape[-1] and x.layout is torch.strided):
        _check(x, k, max_iterations)
    if k == x.shape[-1] and not sorted:
        columns = torch.arange(k, device=x.device).expand(x.shape).contiguous()
        return x.clone(memory_format=torch.contiguous_format), columns
    enough = None if max_iterations is None else min(max_iterations, _ENOUGH)
    return row_topk(x, k, enough, sorted)


def _check(x: Tensor, k: int, max_iterations: int | None) -> None:
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        type_name = "a sparse tensor" if isinstance(x, Tensor) else type(x).__name__
        do = "x.to_dense()" if isinstance(x, Tensor) else "torch.as_tensor(x)"
        raise UserError(f"x is {type_name}.", why="rtopk takes a dense tensor", do=do)
    if x.dim() == 0:
        raise UserError("rtopk got a scalar.", do="x.reshape(1)")
    if x.dtype is torch.bool or x.is_complex():
        do = "x.abs()" if x.is_complex() else "x.to(torch.uint8)"
        raise UserError(f"rtopk got dtype {x.dtype}, which torch.topk does not order.", do=do)
    if x.is_floating_point() and x.element_size() == 1:
        raise UserError(f"rtopk got dtype {x.dtype}, which torch.topk does not order.", do="x.float()")
    given: tuple[tuple[str, Any], ...] = (("k", k), ("max_iterations", 1 if max_iterations is None else max_iterations))
    for name, value in given:
        if isinstance(value, Tensor):
            raise UserError(f"{name} = {value} is a tensor.", do=f"int({name})")
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise UserError(f"{name} = {value!r} is no whole number.", do=f"{name}=8")
    if not 0 <= k <= x.shape[-1]:
        raise UserError(
            f"k = {k}, but a row has {x.shape[-1]} elements.",
            do=f"a k from 0 to {x.shape[-1]}" if x.shape[-1] else "rows with elements",
        )
    if max_iterations is not None and max_iterations < 1:
        raise UserError(f"max_iterations = {max_iterations}.", do="8, or None for the exact result")


@operation("rtopk")
def row_topk(x: Tensor, k: int, max_iterations: int | None, sorted: bool) -> Found:
    """torch.topk; with `max_iterations`, the bisection that the fast forms do, on all rows at once."""
    if max_iterations is None or not x.is_floating_point() or x.numel() == 0 or k == 0:
        values, columns = torch.topk(x, k, sorted=sorted)
        return values, columns
    with torch.no_grad():
        chosen = _bisected(x.float() if x.dtype in KINDS else x, k, _steps(max_iterations))
        strange = x.isnan().any(-1, keepdim=True)
        if strange.any():
            exact = torch.zeros_like(chosen).scatter_(-1, torch.topk(x, k).indices, True)
            chosen = torch.where(strange, exact, chosen)
        columns = chosen.nonzero()[:, -1].reshape(*x.shape[:-1], k)
    return _ordered(x, columns) if sorted else (x.gather(-1, columns), columns)


def _steps(max_iterations: int | None) -> int:
    """Looks at a row; negative: until it is exact."""
    return -1 if max_iterations is None else max_iterations + 1


def _ordered(x: Tensor, columns: Tensor) -> Found:
    values, order = x.gather(-1, columns).sort(dim=-1, descending=True, stable=True)
    return values, columns.gather(-1, order)


def _bisected(x: Tensor, k: int, steps: int) -> Tensor:
    """Which k elements of every row are kept after so many halvings of its bracket [low, high)."""
    low, top = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    high = torch.full_like(low, torch.nan)  # which no element is at least
    above = torch.zeros_like(low, dtype=torch.int64)
    ended = torch.zeros_like(above, dtype=torch.bool)
    finite = torch.finfo(x.dtype).max
    for _ in range(steps):
        middle = 0.5 * low.clamp(min=-finite) + 0.5 * top.clamp(max=finite)
        between = (low < middle) & (middle < top)
        ended |= ~between & ((low == top) | (top == high))
        middle = torch.where(between, middle, top)
        count = (x >= middle).sum(-1, keepdim=True)
        up, down = ~ended & (count > k), ~ended & (count <= k)
        low = torch.where(up, middle, low)
        high, top = torch.where(down, middle, high), torch.where(down, middle, top)
        above = torch.where(down, count, above)
        ended |= count == k
    open_ = high.isnan()  # the maximum is still inside: keep it before what else is
    count = (x >= top).sum(-1, keepdim=True)
    high, above = (torch.where(open_ & (count <= k), new, old) for new, old in ((top, high), (count, above)))
    low = torch.where(open_ & (count > k), top, low)
    above_bound = x >= high
    inside = ~above_bound & (x >= low)
    return above_bound | (inside & (inside.cumsum(-1) <= k - above))


def _transformed(x: Tensor) -> bool:
    """Inside vmap, jvp, functionalize and the like, whose tensors have no memory of their own."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(x)


def _wins_on_cpu(x: Tensor, k: int, max_iterations: int | None, sorted: bool) -> bool:
    if _LEAST is None or x.dtype not in KINDS or _transformed(x):
        return False
    width = x.shape[-1]
    return _LEAST <= k < width and width >= _NARROWEST and not _is_small(x.numel(), width, k)


def _is_small(elements: int, width: int, k: int) -> bool:
    """Whether torch is done on a processor before our kernel is."""
    if elements <= _GRAIN:
        return elements < (_SMALL_IF_NARROW if width < _NARROW else _SMALL)
    least = _SERIAL if width < _NARROW else _SMALL
    return elements < (4 * _SERIAL if k <= 2 else least) and torch.get_num_threads() > 1


def _wins_on_gpu(x: Tensor, k: int, max_iterations: int | None, sorted: bool) -> bool:
    fits = x.dtype in KINDS and 0 < k < x.shape[-1] <= _WIDEST_ON_GPU[x.dtype] and x.numel() >= _SMALL
    return fits and not _transformed(x)


def _is_one_of_few(x: Tensor, k: int, max_iterations: int | None, sorted: bool) -> bool:
    return k == 1 and x.shape[-1] <= _FEW and x.numel() > _GRAIN and not _is_small(x.numel(), 1, k)


@row_topk.fast("cpu", wins=_is_one_of_few)
def by_maximum(x: Tensor, k: int, max_iterations: int | None, sorted: bool) -> Found:
    """The one largest of a narrow row is its maximum."""
    values, columns = x.max(dim=-1, keepdim=True)
    return values, columns


@row_topk.fast("cpu", wins=_wins_on_cpu)
def on_vectors(x: Tensor, k: int, max_iterations: int | None, sorted: bool) -> Found:
    """numba on vectors of 16 floats."""
    plain = type(x) is Tensor and not (x.requires_grad and torch.is_grad_enabled())
    run = _numba if plain and not torch.compiler.is_compiling() else _fast  # an operator costs 30 µs more
    values, columns = run(x, k, _steps(max_iterations), sorted)
    return values, columns


@row_topk.fast("cuda", wins=_wins_on_gpu)
def in_registers(x: Tensor, k: int, max_iterations: int | None, sorted: bool) -> Found:
    """Triton, a row per program."""
    values, columns = _fast(x, k, _steps(max_iterations), sorted)
    return values, columns


@functools.cache
def _cpu() -> tuple[Any, Callable[[], int]]:
    """The module of the kernels, and how many threads they use: an import that is done already takes 1 µs."""
    from espalier.kernels import numba_compile, rtopk_cpu

    return rtopk_cpu, numba_compile.threads


def _pieces(rows: int, elements: int) -> int:
    """Several for each thread, as rows take unlike times, but none that takes only microseconds."""
    count = _cpu()[1]()
    return 1 if count == 1 or elements < _SERIAL else min(rows, 8 * count, 1 + elements // 2**14)


def _numba(x: Tensor, k: int, steps: int, ranked: bool) -> tuple[Tensor, Tensor]:
    kernels, _ = _cpu()
    x = x.contiguous()
    *before, width = x.shape
    elements, kind = x.numel(), KINDS[x.dtype]
    rows = elements // width
    values, columns = torch.empty((*before, k)), torch.empty((*before, k), dtype=torch.int64)
    what = (rows, width, k), (kind, steps, int(ranked))
    to = (values.data_ptr(), columns.data_ptr())
    pieces = _pieces(rows, elements)
    if pieces == 1:
        kernels.select_alone.direct(x.data_ptr(), *what, to)
    else:
        kernels.select(x.data_ptr(), *what, pieces, to)
    return values.to(x.dtype) if kind else values, columns


def _numba_back(gradient: Tensor, columns: Tensor, width: int) -> Tensor:
    k = columns.shape[-1]
    rows = columns.numel() // k
    gradients = torch.empty(*columns.shape[:-1], width)
    pieces = _pieces(rows, gradients.numel())
    _cpu()[0].back(gradient.contiguous().view(rows, k), columns.view(rows, k), pieces, gradients.view(rows, width))
    return gradients


def _triton(x: Tensor, k: int, steps: int, ranked: bool) -> tuple[Tensor, Tensor]:
    from espalier.kernels.rtopk_gpu import select

    values, columns = select(x.detach().contiguous(), k, steps)
    return _ordered(x.detach(), columns) if ranked else (values, columns)


def _shapes(x: Tensor, k: int, steps: int, ranked: bool) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.width = inputs[0].shape[-1]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _spread_back(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None]:
    (columns,) = ctx.saved_tensors
    fits = type(gradient) is Tensor and gradient.device.type == "cpu" and gradient.dtype is torch.float32
    if fits and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _numba_back(gradient, columns, ctx.width), None, None, None
    zeros = gradient.new_zeros(*columns.shape[:-1], ctx.width)
    return zeros.scatter(-1, columns, gradient), None, None, None


# An operator of torch's own kind: torch.compile, autocast and fake tensors then see one node with a gradient.
_fast = torch.library.custom_op("espalier::rtopk", _numba, mutates_args=(), device_types="cpu")
_fast.register_kernel("cuda", _triton)
_fast.register_fake(_shapes)
_fast.register_autograd(_spread_back, setup_context=_keep)
