"""Fitted steps of rows (`a2q.fitted`), rounding, its gradients (`a2q.FakeQuantize`) and the shift of widths under a
target (`base.MemoryTarget`) on the CPU, in numba."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from espalier.kernels import simd
from espalier.kernels.numba_compile import emitted, jit, named, njit
from espalier.kernels.simd import (
    LANES,
    address,
    at_least,
    count_lanes,
    floats,
    larger,
    load,
    load_one,
    load_part,
    packed,
    plus,
    smaller,
    spread,
    store,
    store_part,
    times,
    total,
    where,
)

BLOCKS = 64
"""Pieces of the rows that sums for columns are taken over, so that they are the same for any number of threads."""
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)


@emitted(floats)
def minus(builder: Any, left: Any, right: Any) -> Any:
    """The differences, lane by lane."""
    return builder.fsub(left, right)


@emitted(floats)
def over(builder: Any, left: Any, right: Any) -> Any:
    """The quotients, lane by lane."""
    return builder.fdiv(left, right)


@emitted(floats)
def floors(builder: Any, vector: Any) -> Any:
    """The largest integers that are not above."""
    return named(builder, "llvm.floor.v16f32", vector.type, vector)


@emitted(floats)
def absolute(builder: Any, vector: Any) -> Any:
    """Without signs."""
    return named(builder, "llvm.fabs.v16f32", vector.type, vector)


@emitted(floats)
def with_sign(builder: Any, vector: Any, of: Any) -> Any:
    """The lanes of `vector` with the signs of those of `of`."""
    return named(builder, "llvm.copysign.v16f32", vector.type, vector, of)


@njit
def _size(values: Any, signed: Any) -> Any:
    """What codes are made of: |x|, without signs max(x, 0)."""
    if signed:
        return absolute(values)
    return larger(spread(ZERO), values)


@njit
def _codes(sizes: Any, step: Any, largest: Any) -> Any:
    """Sizes in steps, and the nearest codes."""
    quotients = over(sizes, step)
    return quotients, smaller(largest, floors(plus(quotients, spread(HALF))))


@njit
def _values(x: Any, row: int, options: Any, nonzeros: Any) -> int:
    """The sizes of a row's values that are not 0, to the front of `nonzeros`; how many."""
    signed, gain = options
    count, columns = 0, x.shape[1]
    for first in range(0, columns, LANES):
        lanes = (1 << min(LANES, columns - first)) - 1
        sizes = _size(load_part(address(x) + 4 * (row * columns + first), lanes), signed)
        if gain != ONE:
            sizes = over(sizes, spread(gain))
        some = ~at_least(spread(ZERO), sizes) & lanes
        store(address(nonzeros) + 4 * count, packed(sizes, some))
        count += count_lanes(some)
    return count


@njit
def _errors(nonzeros: Any, count: int, tried: Any, doubles: Any, largest: Any) -> Any:
    """Squared errors of values in `nonzeros[0]` by 16 steps from the address `tried` on. Where every second one
    `doubles`, two divisions do for all, as halves are exact: the other lines of `nonzeros` are for those."""
    step, top, error = load(tried), spread(largest), spread(ZERO)
    lines = address(nonzeros), address(nonzeros) + 4 * nonzeros.shape[1], address(nonzeros) + 8 * nonzeros.shape[1]
    bases = spread(load_one(tried)), spread(load_one(tried + 4))
    share = over(where(0xAAAA, bases[1], bases[0]), step)
    for first in range(0, 4 * count, 4 * LANES):
        store(lines[1] + first, over(load(lines[0] + first), bases[0]))
        store(lines[2] + first, over(load(lines[0] + first), bases[1]))
    for index in range(count):
        sizes = spread(nonzeros[0, index])
        if doubles:
            quotients = times(where(0xAAAA, spread(nonzeros[2, index]), spread(nonzeros[1, index])), share)
        else:
            quotients = over(sizes, step)
        apart = minus(sizes, times(smaller(top, floors(plus(quotients, spread(HALF)))), step))
        error = plus(error, times(apart, apart))
    return error


@jit(
    "(float32[:, ::1], Tuple((float32[::1], float32[::1])), Tuple((float32[::1], float32[::1])), "
    "Tuple((int64, float32)), float32[::1])",
    parallel=True,
    uses=(simd,),
)
def fit(x: Any, pairs: Any, tables: Any, options: Any, out: Any) -> None:
    """Fills `out` with log2 of steps. `pairs`: of each row log2 of the step that others are tried round, and the
    largest code; `tables`: steps half an octave apart, the middle one of which is 1, with 16 times the first before
    and the last behind; and octaves to try, halves of one apart, at most 16, a lane each; `options`: signed, and what
    values are divided by."""
    middle, largest = pairs
    steps, offsets = tables
    rows, columns = x.shape
    most = len(steps) - LANES
    for block in numba.prange(BLOCKS):
        errors, nonzeros = np.empty(LANES, np.float32), np.zeros((3, columns + LANES), np.float32)
        for row in range(rows * np.int64(block) // BLOCKS, rows * np.int64(block + 1) // BLOCKS):
            at = min(max(int(np.rint(2 * (middle[row] + offsets[0]))) + len(steps) // 2, 0), most)
            doubles = LANES <= at <= most - len(offsets)
            count = _values(x, row, options, nonzeros)
            store(address(errors), _errors(nonzeros, count, address(steps) + 4 * at, doubles, largest[row]))
            least, best = np.float32(np.inf), middle[row]
            for lane in range(len(offsets)):
                if errors[lane] < least:
                    least, best = errors[lane], middle[row] + offsets[lane]
            out[row] = best


@njit
def _add(place: Any, values: Any, lanes: Any) -> None:
    store_part(place, plus(load_part(place, lanes), values), lanes)


@njit
def _within(given: Any, values: Any, inside: Any, signed: Any) -> Any:
    """The gradients of values that are not clipped, else 0."""
    gradients = where(inside, given, spread(ZERO))
    return gradients if signed else where(at_least(values, spread(ZERO)), gradients, spread(ZERO))


@jit(
    "(float32[:, ::1], float32[:, ::1], Tuple((float32[::1], float32[::1])), UniTuple(int64, 4), float32[:, ::1], "
    "float32[:, :, ::1])",
    parallel=True,
    uses=(simd,),
)
def round_values(x: Any, upstream: Any, pairs: Any, options: Any, out: Any, sums: Any) -> None:
    """Fills `out` with step * code, or, where `upstream` has rows, with the gradients of values. Adds to `sums`
    [2, 1, rows] or [2, BLOCKS, columns]: |x / step - code| within the range, beyond it minus the largest code, and how
    many are beyond it; of gradients theirs, with the sign of x, times code - x / step, beyond the largest code; and
    theirs beyond. `pairs`: steps and largest codes, of rows or columns; `options`: whether of rows, signed, whether
    gradients pass, and how many rows are added."""
    steps, largest = pairs
    by_row, signed, passes, added = options
    rows, columns = x.shape
    back, zeros = upstream.size > 0, spread(ZERO)
    for block in numba.prange(BLOCKS):
        for row in range(rows * np.int64(block) // BLOCKS, rows * np.int64(block + 1) // BLOCKS):
            step, top = spread(steps[row if by_row else 0]), spread(largest[row if by_row else 0])
            errors, beyond = zeros, zeros
            for first in range(0, columns, LANES):
                lanes, at = (1 << min(LANES, columns - first)) - 1, 4 * (row * columns + first)
                if not by_row:
                    step = load_part(address(steps) + 4 * first, lanes)
                    top = load_part(address(largest) + 4 * first, lanes)
                values = load_part(address(x) + at, lanes)
                sizes = _size(values, signed)
                quotients, codes = sizes, sizes
                if added or not back:
                    quotients, codes = _codes(sizes, step, top)
                inside = at_least(times(step, top), sizes)
                clipped = where(inside, zeros, spread(ONE))
                if back:
                    given = load_part(address(upstream) + at, lanes)
                    written = given if passes else _within(given, values, inside, signed)
                    turned = times(given, with_sign(spread(ONE), values))
                    error = times(turned, where(inside, minus(codes, quotients), top))
                    clipped = times(turned, clipped)
                else:
                    written = times(codes, step)
                    written = with_sign(written, values) if signed else written
                    error = where(inside, absolute(minus(quotients, codes)), minus(zeros, top))
                store_part(address(out) + at, written, lanes)
                if by_row:
                    errors, beyond = plus(errors, error), plus(beyond, clipped)
                elif row < added:
                    _add(address(sums) + 4 * (block * columns + first), error, lanes)
                    _add(address(sums) + 4 * ((BLOCKS + block) * columns + first), clipped, lanes)
            if by_row and row < added:
                sums[0, 0, row], sums[1, 0, row] = total(errors), total(beyond)


@njit
def _width(bits: Any, shift: Any, most: Any) -> Any:
    """Of real-valued bits taken down by `shift`."""
    return min(max(np.rint(max(abs(bits) - np.float32(shift), ONE)), ONE), np.float32(most))


@jit("float64(float32[::1], float64[::1], int64[::1], float64[:, ::1], UniTuple(float64, 2))")
def least_shift(bits: Any, counts: Any, layers: Any, sizes: Any, options: Any) -> Any:
    """`base.least_shift` of entries by `layers`, whose widths take `sizes` [layers, widths] bytes. `options`: bytes
    that are allowed, and the shift that always is enough. Entries whose width is the same at both ends of what is
    searched are added once."""
    target, high = options
    low, fixed, left, most = 0.0, 0.0, len(bits), sizes.shape[1] - 1
    order, widths = np.arange(left), np.empty((3, left), np.int8)
    for entry in range(left):
        widths[0, entry], widths[2, entry] = _width(bits[entry], low, most), _width(bits[entry], high, most)
        fixed += counts[entry] * sizes[layers[entry], widths[0, entry]]
    if fixed <= target:
        return low
    fixed = 0.0
    for _ in range(30):
        middle, used = (low + high) / 2, fixed
        for k in range(left):
            entry = order[k]
            widths[1, entry] = _width(bits[entry], middle, most)
            used += counts[entry] * sizes[layers[entry], widths[1, entry]]
        end = 2 if used <= target else 0
        low, high = (low, middle) if end else (middle, high)
        remaining = 0
        for k in range(left):
            entry = order[k]
            width = widths[end, entry] = widths[1, entry]
            if width == widths[2 - end, entry]:
                fixed += counts[entry] * sizes[layers[entry], width]
            else:
                order[remaining] = entry
                remaining += 1
        left = remaining
    return high
