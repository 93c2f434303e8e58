"""Kernels of attention over windows of 16 rows whose columns are compacted.

After Fused3S (arXiv 2505.08098): the columns that no row of a window reads are left out, and a bit mask says which of
the others each row reads. The lanes are the 16 rows, so a short head costs no more per product. Backward as in
`edge_kernels`.
"""

# ruff: noqa: C901, PLR0912, PLR0913, PLR0917  (kernels are loops in loops, and take their arrays one by one)

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.core import cgutils, types

from espalier.kernels import simd64
from espalier.kernels.numba_compile import intrinsic, jit, njit
from espalier.kernels.simd64 import INT64, Lanes, Vectors, lanewise
from espalier.mechanisms.pattern_attention import edge_kernels
from espalier.mechanisms.pattern_attention.edge_kernels import SHARES_EACH
from espalier.sparse import sddmm_kernels
from espalier.sparse.sddmm_kernels import POWERS_EACH, longest

ROWS = 16
"""Rows of a window."""
TILE = 4
"""Columns that `panel` works on together: with 16 lanes of float32 they fill half of AVX2's registers."""


@intrinsic
def panel(typing, n, c, c_at, a, a_at, b, b_at, b_step, b_next):  # type: ignore[no-untyped-def]
    """c[c_at + 16 t + lane] += Σ_{i < n} a[a_at + 16 i + lane] · b[b_at + b_step i + b_next t], t in 0 .. TILE-1."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size = INT64(4 if c.dtype == types.float32 else 8)
        vectors = Vectors(context, builder, c.dtype, TILE, ROWS)

        def address(array: int) -> Any:
            made = context.make_array(signature.args[array])(context, builder, args[array])
            return builder.add(builder.ptrtoint(made.data, INT64), builder.mul(args[array + 1], size))

        def place(start: Any, t: int) -> Any:
            offset = builder.add(start, builder.mul(size, INT64(ROWS * t)))
            return builder.inttoptr(offset, vectors.vector.as_pointer())

        def loaded(start: Any, t: int) -> Any:
            vector = builder.load(place(start, t))
            vector.align = vectors.bytes
            return vector

        into, left, right = address(1), address(3), address(5)
        for t, total in enumerate(vectors.sums):
            builder.store(loaded(into, t), total)
        step, following = builder.mul(args[7], size), builder.mul(args[8], size)
        row = builder.mul(size, INT64(ROWS))
        with cgutils.for_range_slice(builder, INT64(0), args[0], INT64(1), INT64) as (i, _):
            lanes = loaded(builder.add(left, builder.mul(i, row)), 0)
            at = builder.add(right, builder.mul(i, step))
            for t, total in enumerate(vectors.sums):
                number = builder.inttoptr(
                    builder.add(at, builder.mul(following, INT64(t))), vectors.element.as_pointer()
                )
                product = builder.fmul(lanes, vectors.spread(builder.load(number)), flags=["contract"])
                builder.store(builder.fadd(builder.load(total), product, flags=["contract"]), total)
        for t, total in enumerate(vectors.sums):
            builder.store(builder.load(total), place(into, t)).align = vectors.bytes
        return context.get_dummy_value()

    return types.void(n, c, c_at, a, a_at, b, b_at, b_step, b_next), write


def _fenced_scores(lanes: Lanes, scale: Any) -> None:
    """scores, fence -> scale · score + fence."""
    lanes.write(0, lanes.plus(lanes.times(lanes.read(0), lanes.vectors.spread(scale)), lanes.read(1)))


def _higher(lanes: Lanes) -> None:
    """highest, scores: the larger of both."""
    lanes.write(0, lanes.larger(lanes.read(0), lanes.read(1)))


_HIGHER, _FENCED = lanewise(2, _higher), lanewise(2, _fenced_scores)


@njit
def _turned(into, x, first, count, at, width):  # type: ignore[no-untyped-def]
    """into[16 d + lane] = x[first + lane, at + d]; zeros where there is no row."""
    into[:] = 0
    for lane in range(count):
        for d in range(width):
            into[ROWS * d + lane] = x[first + lane, at + d]


@njit
def _turned_back(x, first, count, at, width, made):  # type: ignore[no-untyped-def]
    """x[first + lane, at + d] += made[16 d + lane]."""
    for lane in range(count):
        for d in range(width):
            x[first + lane, at + d] += made[ROWS * d + lane]


@njit
def _gathered(into, x, columns, start, stop):  # type: ignore[no-untyped-def]
    """The rows of x that the columns name, one after the other."""
    row = x.shape[1]
    for j in range(start, stop):
        into[(j - start) * row : (j - start + 1) * row] = x[columns[j]]


@njit
def _fenced(fence, masks, start, stop):  # type: ignore[no-untyped-def]
    """fence[16 j + lane] = 0 where a row reads a column, else -inf."""
    for j in range(start, stop):
        at, mask = ROWS * (j - start), masks[j]
        for lane in range(ROWS):
            fence[at + lane] = 0 if mask >> lane & 1 else -np.inf


@njit
def _biased(scores, masks, start, stop, bias, starts, entries, h):  # type: ignore[no-untyped-def]
    """Each score that a row reads and its bias."""
    for j in range(start, stop):
        at, mask, e = ROWS * (j - start), masks[j], starts[j]
        for lane in range(ROWS):
            if mask >> lane & 1:
                scores[at + lane] += bias[entries[e], h]
                e += 1


@njit
def _products(scores, lanes, rows, size, at, row, width):  # type: ignore[no-untyped-def]
    """scores[16 j + lane] = Σ_d lanes[16 d + lane] · rows[row · j + at + d], of `size` rows."""
    scores[: ROWS * (size + TILE)] = 0
    for j in range(0, size, TILE):
        panel(width, scores, ROWS * j, lanes, 0, rows, row * j + at, 1, row)


@njit
def _sums(made, shares, rows, size, at, row, width):  # type: ignore[no-untyped-def]
    """made[16 d + lane] = Σ_j shares[16 j + lane] · rows[row · j + at + d], of `size` rows."""
    made[:] = 0
    for d in range(0, width, TILE):
        panel(size, made, ROWS * d, shares, 0, rows, at + d, row, 1)


_WINDOWS = "Tuple((int64[::1], int32[::1], int32[::1], int64[::1], int64[::1])), int64[::1]"
"""Starts of the windows' columns, columns, masks, starts of the columns' entries, entries; cuts of the windows."""


@njit
def _window_forward(first, last, out, logs, pattern, q, k, v, bias, scale):  # type: ignore[no-untyped-def]
    """`window_forward`, of the windows first .. last - 1."""
    windows, columns, masks, starts, entries = pattern
    heads, row = np.int64(logs.shape[1]), np.int64(q.shape[1])
    width = np.int64(row // heads)
    wide = (width + TILE - 1) // TILE * TILE
    room = longest(windows, first, last) + TILE
    turned, made = np.zeros(ROWS * wide, q.dtype), np.zeros(ROWS * wide, q.dtype)
    keys, values = np.zeros(room * row + TILE, q.dtype), np.zeros(room * row + TILE, q.dtype)
    fence = np.zeros(room * ROWS, q.dtype)
    scores, highest, total = np.zeros(room * ROWS, q.dtype), np.zeros(ROWS, q.dtype), np.zeros(ROWS, q.dtype)
    for w in range(first, last):
        start, stop, begin = windows[w], windows[w + 1], w * ROWS
        size, count = stop - start, min(ROWS, len(q) - begin)
        out[begin : begin + count] = 0
        logs[begin : begin + count] = -np.inf
        if not size:
            continue
        _gathered(keys, k, columns, start, stop)
        _gathered(values, v, columns, start, stop)
        _fenced(fence, masks, start, stop)
        for h in range(heads):
            at = h * width
            _turned(turned, q, begin, count, at, width)
            _products(scores, turned, keys, size, at, row, width)
            _FENCED(ROWS * size, scores, 0, fence, 0, scale)
            if len(bias):
                _biased(scores, masks, start, stop, bias, starts, entries, h)
            highest[:] = -np.inf
            total[:] = 0
            for j in range(size):
                _HIGHER(ROWS, highest, 0, scores, ROWS * j)
            for lane in range(ROWS):
                if highest[lane] == -np.inf:
                    highest[lane] = 0
            for j in range(size):
                POWERS_EACH(ROWS, scores, ROWS * j, highest, 0, total, 0)
            _sums(made, scores, values, size, at, row, width)
            for lane in range(count):
                if total[lane] != 0:  # NaN too
                    logs[begin + lane, h] = highest[lane] + np.log(total[lane])
                    for d in range(width):
                        out[begin + lane, at + d] = made[ROWS * d + lane] / total[lane]


@jit(
    f"(real[:, ::1], real[:, ::1], {_WINDOWS}, real[:, ::1], real[:, ::1], real[:, ::1], real[:, ::1], real)",
    parallel=True,
    uses=(simd64, edge_kernels, sddmm_kernels),
)
def window_forward(out, logs, pattern, cuts, q, k, v, bias, scale):  # type: ignore[no-untyped-def]
    """As `edge_forward`, of the entries that the windows hold; bias is empty or [entries of the pattern, heads]."""
    for piece in numba.prange(len(cuts) - 1):
        _window_forward(cuts[piece], cuts[piece + 1], out, logs, pattern, q, k, v, bias, scale)


@njit
def _window_backward(first, last, made_arrays, pattern, sides, saved, scale, by_column):  # type: ignore[no-untyped-def]
    """`window_backward`, of the windows first .. last - 1."""
    (made_factors, made_slopes, dbias), (logs, weighted) = made_arrays, saved
    windows, columns, masks, starts, entries = pattern
    lane_factors, lane_slopes, column_factors, column_slopes, bias = sides
    kind = lane_factors.dtype
    heads, row = np.int64(logs.shape[1]), np.int64(lane_factors.shape[1])
    width = np.int64(row // heads)
    wide = (width + TILE - 1) // TILE * TILE
    room = longest(windows, first, last) + TILE
    factors, slopes = np.zeros(ROWS * wide, kind), np.zeros(ROWS * wide, kind)
    made, log, sums = np.zeros(ROWS * wide, kind), np.zeros(ROWS, kind), np.zeros(ROWS, kind)
    read_factors, read_slopes = np.zeros(room * row + TILE, kind), np.zeros(room * row + TILE, kind)
    fence = np.zeros(room * ROWS, kind)
    shares, gradients = np.zeros(room * ROWS, kind), np.zeros(room * ROWS, kind)
    for w in range(first, last):
        start, stop, begin = windows[w], windows[w + 1], w * ROWS
        size, count = stop - start, min(ROWS, len(lane_factors) - begin)
        made_factors[begin : begin + count] = 0
        made_slopes[begin : begin + count] = 0
        if not size:
            continue
        _gathered(read_factors, column_factors, columns, start, stop)
        _gathered(read_slopes, column_slopes, columns, start, stop)
        _fenced(fence, masks, start, stop)
        for h in range(heads):
            at = h * width
            _turned(factors, lane_factors, begin, count, at, width)
            _turned(slopes, lane_slopes, begin, count, at, width)
            _products(shares, factors, read_factors, size, at, row, width)
            _products(gradients, slopes, read_slopes, size, at, row, width)
            _FENCED(ROWS * size, shares, 0, fence, 0, scale)
            if len(bias):
                _biased(shares, masks, start, stop, bias, starts, entries, h)
            if not by_column:
                log[:count] = logs[begin : begin + count, h]
                sums[:count] = weighted[begin : begin + count, h]
            for j in range(size):
                if by_column:
                    log[:] = logs[columns[start + j], h]
                    sums[:] = weighted[columns[start + j], h]
                SHARES_EACH(ROWS, shares, ROWS * j, gradients, ROWS * j, log, 0, sums, 0)
            if len(dbias):
                for j in range(size):
                    e = starts[start + j]
                    for lane in range(ROWS):
                        if masks[start + j] >> lane & 1:
                            dbias[entries[e], h] = gradients[ROWS * j + lane]
                            e += 1
            for j in range(size * ROWS):
                gradients[j] *= scale
            _sums(made, gradients, read_factors, size, at, row, width)
            _turned_back(made_factors, begin, count, at, width, made)
            if len(made_slopes):
                _sums(made, shares, read_slopes, size, at, row, width)
                _turned_back(made_slopes, begin, count, at, width, made)


@jit(
    f"(real[:, ::1], real[:, ::1], real[:, ::1], {_WINDOWS}, real[:, ::1], real[:, ::1], real[:, ::1], real[:, ::1],"
    " real[:, ::1], real[:, ::1], real[:, ::1], real, int64)",
    parallel=True,
    uses=(simd64, edge_kernels, sddmm_kernels),
)
def window_backward(  # type: ignore[no-untyped-def]
    made_factors,
    made_slopes,
    dbias,
    pattern,
    cuts,
    lane_factors,
    lane_slopes,
    column_factors,
    column_slopes,
    bias,
    logs,
    weighted,
    scale,
    by_column,
):
    """As `edge_backward`, of the entries that the windows hold; overwrites what is there."""
    for piece in numba.prange(len(cuts) - 1):
        made_arrays, saved = (made_factors, made_slopes, dbias), (logs, weighted)
        sides = (lane_factors, lane_slopes, column_factors, column_slopes, bias)
        _window_backward(cuts[piece], cuts[piece + 1], made_arrays, pattern, sides, saved, scale, by_column)
