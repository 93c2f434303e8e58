"""Kernels of attention over a sparse pattern, entry by entry.

They keep one logarithm per row and head for backward and recompute the shares from it (FlashAttention, arXiv
2205.14135). Gradients of keys and values come from a second pass over the transposed pattern: nothing is added up
across threads, and results do not depend on their number.
"""

# ruff: noqa: C901, PLR0913, PLR0917  (kernels are loops in loops, and take their arrays one by one)

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from espalier.kernels import simd64
from espalier.kernels.numba_compile import jit, njit
from espalier.kernels.simd64 import Lanes, add_scaled, dot, lanewise, power_of_e, prefetch
from espalier.sparse import sddmm_kernels
from espalier.sparse.sddmm_kernels import longest

AHEAD = 4
"""Entries before its turn that what an entry reads at random is fetched."""


def _powers(lanes: Lanes, highest: Any) -> Any:
    """scores -> e^(score - highest); their sum."""
    power = power_of_e(lanes.builder, lanes.minus(lanes.read(0), lanes.vectors.spread(highest)))
    lanes.write(0, power)
    return lanes.total(power)


def _shares_each(lanes: Lanes) -> None:
    """score, <gradient, value>, log, weighted -> share, gradient of the score."""
    share = power_of_e(lanes.builder, lanes.minus(lanes.read(0), lanes.read(2)))
    lanes.write(0, share)
    lanes.write(1, lanes.times(share, lanes.minus(lanes.read(1), lanes.read(3))))


_POWERS, SHARES_EACH = lanewise(1, _powers), lanewise(4, _shares_each)


_PATTERN = "Tuple((int64[::1], int32[::1])), int64[::1]"
"""Where the rows of the pattern begin and the columns of its entries; cuts of the rows."""


@njit
def _edge_forward(first, last, out, logs, pattern, q, k, v, bias, scale):  # type: ignore[no-untyped-def]
    """`edge_forward`, of the rows first .. last - 1."""
    indptr, indices = pattern
    heads, row = np.int64(logs.shape[1]), np.int64(q.shape[1])
    width = np.int64(row // heads)
    qs, ks, vs, sums = q.reshape(-1), k.reshape(-1), v.reshape(-1), out.reshape(-1)
    scores = np.empty(longest(indptr, first, last) * heads, q.dtype)
    for i in range(first, last):
        start, degree = indptr[i], indptr[i + 1] - indptr[i]
        out[i] = 0
        for e in range(degree):
            at = np.int64(indices[start + e]) * row
            soon = np.int64(indices[min(start + e + AHEAD, len(indices) - 1)]) * row
            prefetch(row, ks, soon)
            prefetch(row, vs, soon)
            for h in range(heads):
                score = scale * dot(width, qs, i * row + h * width, ks, at + h * width)
                if len(bias):
                    score += bias[start + e, h]
                scores[h * degree + e] = score
        for h in range(heads):
            highest = q.dtype.type(-np.inf)
            for e in range(degree):
                highest = max(highest, scores[h * degree + e])
            if highest == -np.inf:  # of NaN alone too, which `max` passes over
                highest = q.dtype.type(0)
            total = _POWERS(degree, scores, h * degree, highest)
            if total == 0:
                logs[i, h] = -np.inf
                continue
            logs[i, h] = highest + np.log(total)
            for e in range(degree):
                scores[h * degree + e] /= total
        for e in range(degree):
            at = np.int64(indices[start + e]) * row
            for h in range(heads):
                add_scaled(width, sums, i * row + h * width, vs, at + h * width, scores[h * degree + e])


@jit(
    f"(real[:, ::1], real[:, ::1], {_PATTERN}, real[:, ::1], real[:, ::1], real[:, ::1], real[:, ::1], real)",
    parallel=True,
    uses=(simd64, sddmm_kernels),
)
def edge_forward(out, logs, pattern, cuts, q, k, v, bias, scale):  # type: ignore[no-untyped-def]
    """out [rows, heads · width] and logs = log Σ exp(score) [rows, heads]; zeros and -inf in rows without entries.

    q [rows, heads · width]; k, v [columns, heads · width]; bias is empty or [entries, heads].
    """
    for piece in numba.prange(len(cuts) - 1):
        _edge_forward(cuts[piece], cuts[piece + 1], out, logs, pattern, q, k, v, bias, scale)


@njit
def _edge_backward(  # type: ignore[no-untyped-def]
    first, last, made, pattern, sides, saved, scale, by_column, joined
):
    """`edge_backward`, of the rows first .. last - 1."""
    (made_factors, made_slopes, dbias), (logs, weighted), (indptr, indices) = made, saved, pattern
    row_factors, row_slopes, column_factors, column_slopes, bias = sides
    heads, row, kind = np.int64(logs.shape[1]), np.int64(row_factors.shape[1]), logs.dtype
    width = np.int64(row // heads)
    lefts, left_slopes = row_factors.reshape(-1), row_slopes.reshape(-1)
    rights, right_slopes = column_factors.reshape(-1), column_slopes.reshape(-1)
    into, into_slopes = made_factors.reshape(-1), made_slopes.reshape(-1)
    most = longest(indptr, first, last) * heads
    shares, slopes, log, sums = np.empty(most, kind), np.empty(most, kind), np.empty(most, kind), np.empty(most, kind)
    for i in range(first, last):
        start, degree = indptr[i], indptr[i + 1] - indptr[i]
        if not joined:
            made_factors[i] = 0
            made_slopes[i : i + 1] = 0
        for e in range(degree):
            column = np.int64(indices[start + e])
            soon = np.int64(indices[min(start + e + AHEAD, len(indices) - 1)]) * row
            prefetch(row, rights, soon)
            prefetch(row, right_slopes, soon)
            query = column if by_column else i
            for h in range(heads):
                left, right, at = i * row + h * width, column * row + h * width, h * degree + e
                shares[at] = scale * dot(width, lefts, left, rights, right)
                if len(bias):
                    shares[at] += bias[start + e, h]
                slopes[at] = dot(width, left_slopes, left, right_slopes, right)
                log[at], sums[at] = logs[query, h], weighted[query, h]
        SHARES_EACH(heads * degree, shares, 0, slopes, 0, log, 0, sums, 0)
        for e in range(degree):
            column = np.int64(indices[start + e])
            for h in range(heads):
                left, right, at = i * row + h * width, column * row + h * width, h * degree + e
                if len(dbias):
                    dbias[start + e, h] = slopes[at]
                add_scaled(width, into, left, rights, right, scale * slopes[at])
                if len(made_slopes):
                    add_scaled(width, into_slopes, left, right_slopes, right, shares[at])


@jit(
    f"(real[:, ::1], real[:, ::1], real[:, ::1], {_PATTERN}, real[:, ::1], real[:, ::1], real[:, ::1], real[:, ::1],"
    " real[:, ::1], real[:, ::1], real[:, ::1], real, int64, int64)",
    parallel=True,
    uses=(simd64, sddmm_kernels),
)
def edge_backward(  # type: ignore[no-untyped-def]
    made_factors,
    made_slopes,
    dbias,
    pattern,
    cuts,
    row_factors,
    row_slopes,
    column_factors,
    column_slopes,
    bias,
    logs,
    weighted,
    scale,
    by_column,
    joined,
):
    """Gradients of queries, and of the bias; or of keys and values, by the transposed pattern, if `by_column`.

    Scores are products of factors, their gradients of slopes: a query and its gradient read keys and values, a key and
    its value the queries and gradients that read it. Adds to what is there if `joined`. `made_slopes` and dbias may be
    empty; bias is in the order of the entries, logs and weighted = <gradient, out> are those of queries [rows, heads].
    """
    for piece in numba.prange(len(cuts) - 1):
        made, saved = (made_factors, made_slopes, dbias), (logs, weighted)
        sides = (row_factors, row_slopes, column_factors, column_slopes, bias)
        _edge_backward(cuts[piece], cuts[piece + 1], made, pattern, sides, saved, scale, by_column, joined)
