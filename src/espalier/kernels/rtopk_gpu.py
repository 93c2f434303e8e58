"""Row-wise top-k on a GPU: after RTop-K, arXiv 2409.00822, in Triton: a row per program, held in registers.

Where we deviate: after 16 halvings of the bracket of values, the order of float32 as integers is halved, so the search
ends after at most 32 steps more, whatever ties or infinities there are; NaN is the largest, as in torch; elements at or
above the bracket are kept first, so an early stop never loses the maximum. Rows need not be multiples of anything.
"""

from __future__ import annotations

# ruff: noqa: PLR0124, PLR0915 - in Triton x != x asks for NaN, and a kernel is one function
import torch
import triton
import triton.language as tl
from torch import Tensor

_VALUE_STEPS = 16
"""Normal rows of 128 to 8192 elements need 7 to 11 halvings."""


@triton.jit
def _key(x):  # type: ignore[no-untyped-def]
    """int32 in the order of the float32: NaN just above infinity, and below 2³¹ - 1."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7F800001, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _middle(low, top):  # type: ignore[no-untyped-def]
    """Halfway between two float32, neither overflowing nor NaN for infinities."""
    largest = 3.4028234663852886e38
    return 0.5 * tl.maximum(low, -largest) + 0.5 * tl.minimum(top, largest)


@triton.jit  # type: ignore[untyped-decorator]
def rtopk_rows(x_ptr, values_ptr, columns_ptr, width, k, limit, BLOCK: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    """The k largest of row `program_id` [width <= BLOCK], columns rising; EXACT: `limit` only ends the value steps."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < width
    raw = tl.load(x_ptr + row * width + column, mask=valid, other=0.0)
    x = raw.to(tl.float32)
    x = tl.where(x == 0, 0.0, x)  # no -0.0, whose key differs
    strange = tl.sum((valid & (x != x)).to(tl.int32), 0) > 0

    low = tl.min(tl.where(valid & (x == x), x, float("inf")), 0)
    top = tl.max(tl.where(valid & (x == x), x, float("-inf")), 0)
    high = tl.full((), float("nan"), tl.float32)  # which no element is at least
    above = tl.full((), 0, tl.int32)
    step = tl.full((), 0, tl.int32)
    searching = ~strange
    while searching & (step < limit):
        middle = _middle(low, top)
        between = (low < middle) & (middle < top)
        if ~between & ((low == top) | (top == high)):
            searching = searching & False
        else:
            middle = tl.where(between, middle, top)
            count = tl.sum((valid & (x >= middle)).to(tl.int32), 0)
            step += 1
            if count > k:
                low = middle
            else:
                high = middle
                top = middle
                above = count
                searching = searching & (count != k)

    if (~strange) & (high != high):  # the maximum is still inside: keep it before what else is
        count = tl.sum((valid & (x >= top)).to(tl.int32), 0)
        if count <= k:
            high = top
            above = count
        else:
            low = top

    # The bracket as keys: at least k reach low_key, fewer (or exactly k) reach high_key.
    key = _key(x)
    low_key = tl.where(strange, -0x7F800001, _key(low))
    high_key = tl.where(strange | (high != high), 0x7FFFFFFF, _key(high))
    if EXACT | strange:
        while (above != k) & (high_key.to(tl.int64) - low_key > 1):
            middle_key = ((low_key.to(tl.int64) + high_key) >> 1).to(tl.int32)
            count = tl.sum((valid & (key >= middle_key)).to(tl.int32), 0)
            if count > k:
                low_key = middle_key
            else:
                high_key = middle_key
                above = count

    selected = valid & (key >= high_key)
    inside = valid & (key >= low_key) & (key < high_key)
    selected = selected | (inside & (tl.cumsum(inside.to(tl.int32), 0) <= k - above))
    place = row * k + tl.cumsum(selected.to(tl.int32), 0) - 1
    tl.store(values_ptr + place, raw, mask=selected)
    tl.store(columns_ptr + place, column.to(tl.int64), mask=selected)


def select(x: Tensor, k: int, steps: int) -> tuple[Tensor, Tensor]:
    """Values and columns [..., k] of the k largest of every row of contiguous x [..., width], columns rising.

    x is float32, bfloat16 or float16 with elements, 0 < k < width. `steps` limits the halvings; negative: exact.
    """
    shape, width = (*x.shape[:-1], k), x.shape[-1]
    values = x.new_empty(shape)
    columns = x.new_empty(shape, dtype=torch.int64)
    block = triton.next_power_of_2(width)
    exact = steps < 0
    options = {"num_warps": min(max(block // 1024, 1), 8), "enable_fp_fusion": False}
    limit = _VALUE_STEPS if exact else steps
    with torch.cuda.device_of(x):
        grid = (x.numel() // width,)
        rtopk_rows[grid](x, values, columns, width, k, limit, BLOCK=block, EXACT=exact, **options)
    return values, columns
