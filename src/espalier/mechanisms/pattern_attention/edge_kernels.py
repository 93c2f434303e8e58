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


def _shares(lanes: Lanes, log: Any, weighted: Any) -> None:
    """score, <gradient, value> -> share, gradient of the score; one row's."""
    share = power_of_e(lanes.builder, lanes.minus(lanes.read(0), lanes.vectors.spread(log)))
    lanes.write(0, share)
    lanes.write(1, lanes.times(share, lanes.minus(lanes.read(1), lanes.vectors.spread(weighted))))


def _shares_each(lanes: Lanes) -> None:
    """score, <gradient, value>, log, weighted -> the same, each lane with its own row's."""
    share = power_of_e(lanes.builder, lanes.minus(lanes.read(0), lanes.read(2)))
    lanes.write(0, share)
    lanes.write(1, lanes.times(share, lanes.minus(lanes.read(1), lanes.read(3))))


_POWERS, _SHARES, SHARES_EACH = lanewise(1, _powers), lanewise(2, _shares), lanewise(4, _shares_each)


@njit
def _edge_forward(  # type: ignore[no-untyped-def]
    first, last, out, logs, indptr, indices, q, k, v, bias, scale
):
    """`edge_forward`, of the rows first .. last - 1."""
    heads = np.int64(logs.shape[1])
    row = np.int64(q.shape[1])
    width = np.int64(row // heads)
    qs, ks, vs, sums = q.reshape(-1), k.reshape(-1), v.reshape(-1), out.reshape(-1)
    most = longest(indptr, first, last)
    scores = np.empty(most * heads, q.dtype)
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
    "(real[:, ::1], real[:, ::1], int64[::1], int32[::1], int64[::1], real[:, ::1], real[:, ::1],"
    " real[:, ::1], real[:, ::1], real)",
    parallel=True,
    uses=(simd64, sddmm_kernels),
)
def edge_forward(  # type: ignore[no-untyped-def]
    out, logs, indptr, indices, cuts, q, k, v, bias, scale
):
    """out [rows, heads · width] and logs = log Σ exp(score) [rows, heads]; zeros and -inf in rows without entries.

    q [rows, heads · width]; k, v [columns, heads · width]; bias is empty or [entries, heads].
    """
    for piece in numba.prange(len(cuts) - 1):
        _edge_forward(cuts[piece], cuts[piece + 1], out, logs, indptr, indices, q, k, v, bias, scale)


@njit
def _edge_backward_queries(  # type: ignore[no-untyped-def]
    first, last, dq, dbias, indptr, indices, q, k, v, bias, logs, weighted, gradient, scale, joined
):
    """`edge_backward_queries`, of the rows first .. last - 1."""
    heads = np.int64(logs.shape[1])
    row = np.int64(q.shape[1])
    width = np.int64(row // heads)
    qs, ks, vs, gs, sums = q.reshape(-1), k.reshape(-1), v.reshape(-1), gradient.reshape(-1), dq.reshape(-1)
    most = longest(indptr, first, last)
    shares, gradients = np.empty(most * heads, q.dtype), np.empty(most * heads, q.dtype)
    for i in range(first, last):
        start, degree = indptr[i], indptr[i + 1] - indptr[i]
        if not joined:
            dq[i] = 0
        for e in range(degree):
            at = np.int64(indices[start + e]) * row
            soon = np.int64(indices[min(start + e + AHEAD, len(indices) - 1)]) * row
            prefetch(row, ks, soon)
            prefetch(row, vs, soon)
            for h in range(heads):
                score = scale * dot(width, qs, i * row + h * width, ks, at + h * width)
                if len(bias):
                    score += bias[start + e, h]
                shares[h * degree + e] = score
                gradients[h * degree + e] = dot(width, gs, i * row + h * width, vs, at + h * width)
        for h in range(heads):
            _SHARES(degree, shares, h * degree, gradients, h * degree, logs[i, h], weighted[i, h])
        for e in range(degree):
            at = np.int64(indices[start + e]) * row
            for h in range(heads):
                gradient = gradients[h * degree + e]
                if len(dbias):
                    dbias[start + e, h] = gradient
                add_scaled(width, sums, i * row + h * width, ks, at + h * width, scale * gradient)


@jit(
    "(real[:, ::1], real[:, ::1], int64[::1], int32[::1], int64[::1], real[:, ::1], real[:, ::1],"
    " real[:, ::1], real[:, ::1], real[:, ::1], real[:, ::1], real[:, ::1], real, int64)",
    parallel=True,
    uses=(simd64, sddmm_kernels),
)
def edge_backward_queries(  # type: ignore[no-untyped-def]
    dq, dbias, indptr, indices, cuts, q, k, v, bias, logs, weighted, gradient, scale, joined
):
    """dq [rows, heads · width], added to what is there if `joined`; dbias is empty or [entries, heads].

    gradient is that of out; weighted = <gradient, out> of each row and head [rows, heads].
    """
    for piece in numba.prange(len(cuts) - 1):
        _edge_backward_queries(
            cuts[piece],
            cuts[piece + 1],
            dq,
            dbias,
            indptr,
            indices,
            q,
            k,
            v,
            bias,
            logs,
            weighted,
            gradient,
            scale,
            joined,
        )


@njit
def _edge_backward_keys(  # type: ignore[no-untyped-def]
    first, last, dk, dv, indptr, indices, q, k, v, bias, logs, weighted, gradient, scale, joined
):
    """`edge_backward_keys`, of the rows first .. last - 1."""
    heads = np.int64(logs.shape[1])
    row = np.int64(q.shape[1])
    width = np.int64(row // heads)
    qs, ks, vs, gs = q.reshape(-1), k.reshape(-1), v.reshape(-1), gradient.reshape(-1)
    keys, values, many, sums = dk.reshape(-1), dv.reshape(-1), logs.reshape(-1), weighted.reshape(-1)
    shares, slopes = np.empty(heads, q.dtype), np.empty(heads, q.dtype)
    for c in range(first, last):
        if not joined:
            dk[c] = 0
            dv[c] = 0
        for t in range(indptr[c], indptr[c + 1]):
            i = np.int64(indices[t])
            soon = np.int64(indices[min(t + AHEAD, len(indices) - 1)])
            prefetch(row, qs, soon * row)
            prefetch(row, gs, soon * row)
            prefetch(heads, many, soon * heads)
            prefetch(heads, sums, soon * heads)
            for h in range(heads):
                score = scale * dot(width, qs, i * row + h * width, ks, c * row + h * width)
                if len(bias):
                    score += bias[t, h]
                shares[h] = score
                slopes[h] = dot(width, gs, i * row + h * width, vs, c * row + h * width)
            SHARES_EACH(heads, shares, np.int64(0), slopes, np.int64(0), many, i * heads, sums, i * heads)
            for h in range(heads):
                add_scaled(width, keys, c * row + h * width, qs, i * row + h * width, scale * slopes[h])
                add_scaled(width, values, c * row + h * width, gs, i * row + h * width, shares[h])


@jit(
    "(real[:, ::1], real[:, ::1], int64[::1], int32[::1], int64[::1], real[:, ::1], real[:, ::1],"
    " real[:, ::1], real[:, ::1], real[:, ::1], real[:, ::1], real[:, ::1], real, int64)",
    parallel=True,
    uses=(simd64, sddmm_kernels),
)
def edge_backward_keys(  # type: ignore[no-untyped-def]
    dk, dv, indptr, indices, cuts, q, k, v, bias, logs, weighted, gradient, scale, joined
):
    """dk, dv [columns, heads · width] by the transposed pattern, added to what is there if `joined`.

    Row c of the pattern are the rows i that read column c; bias is in the order of its entries.
    """
    for piece in numba.prange(len(cuts) - 1):
        _edge_backward_keys(
            cuts[piece],
            cuts[piece + 1],
            dk,
            dv,
            indptr,
            indices,
            q,
            k,
            v,
            bias,
            logs,
            weighted,
            gradient,
            scale,
            joined,
        )
