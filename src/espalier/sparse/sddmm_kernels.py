"""SDDMM kernels: one value for each entry of a sparse matrix (dot products, softmax, GAT's attention) and sums over
them.

Sums of a row go in the order of its entries.
"""

# ruff: noqa: PLR0913, PLR0917  (kernels take their arrays one by one)

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from espalier.kernels import simd64
from espalier.kernels.numba_compile import jit, njit
from espalier.kernels.simd64 import Lanes, add_freely, add_scaled, dot, lanewise, power_of_e, prefetch


@jit(
    "(real[::1], int64[::1], int32[::1], real[:, ::1], real[:, ::1], int64[::1])",
    parallel=True,
    uses=(simd64,),
)
def dot_rows(values, indptr, indices, left, right, cuts):  # type: ignore[no-untyped-def]
    """values[e] = <left[row of e], right[indices[e]]>: the gradient of the weights of a product."""
    for piece in numba.prange(len(cuts) - 1):
        for i in range(cuts[piece], cuts[piece + 1]):
            for e in range(indptr[i], indptr[i + 1]):
                total = left[i, 0] * right[indices[e], 0]
                for f in range(1, left.shape[1]):
                    total = add_freely(total, left[i, f] * right[indices[e], f])
                values[e] = total


@jit(
    "(real[:, ::1], real[:, ::1], int64[::1], int64[::1])",
    parallel=True,
    uses=(simd64,),
)
def sum_segments(totals, values, indptr, cuts):  # type: ignore[no-untyped-def]
    """totals[i] = sum of values [entries, heads] over the entries of row i."""
    for piece in numba.prange(len(cuts) - 1):
        for i in range(cuts[piece], cuts[piece + 1]):
            totals[i] = 0
            for e in range(indptr[i], indptr[i + 1]):
                for h in range(values.shape[1]):
                    totals[i, h] += values[e, h]


@njit
def longest(indptr, first, last):  # type: ignore[no-untyped-def]
    """The most entries of one of the rows first .. last - 1."""
    most = np.int64(0)
    for i in range(first, last):
        most = max(most, indptr[i + 1] - indptr[i])
    return most


AHEAD = 6
"""Edges before its turn that what an edge reads at random is fetched."""


def _edge_scores(lanes: Lanes, slope: Any) -> None:
    """scores, highest, target, source -> the leaky ReLU of an edge's score, by head, and the highest so far."""
    score, _ = lanes.rectified(lanes.plus(lanes.read(2), lanes.read(3)), slope)
    lanes.write(0, score)
    lanes.write(1, lanes.larger(lanes.read(1), score))


def _powers_each(lanes: Lanes) -> None:
    """scores, highest, total -> e^(score - highest), joined to the total; each lane with its own."""
    power = power_of_e(lanes.builder, lanes.minus(lanes.read(0), lanes.read(1)))
    lanes.write(0, power)
    lanes.write(2, lanes.plus(lanes.read(2), power))


def _edge_gradients(lanes: Lanes, slope: Any) -> None:
    """share, dscores, dsource, target, source, logs, weighted, keep -> the share that was kept, and the gradient of an
    edge's score; `share` holds <gradient, x> by head before."""
    score, steep = lanes.rectified(lanes.plus(lanes.read(3), lanes.read(4)), slope)
    share = power_of_e(lanes.builder, lanes.minus(score, lanes.read(5)))
    factor = lanes.read(7)
    dscore = lanes.times(share, lanes.minus(lanes.times(factor, lanes.read(0)), lanes.read(6)))
    dscore = lanes.times(dscore, steep)
    lanes.write(1, dscore)
    lanes.write(2, lanes.plus(lanes.read(2), dscore))
    lanes.write(0, lanes.times(share, factor))


_SCORES, POWERS_EACH, _GRADIENTS = lanewise(4, _edge_scores), lanewise(3, _powers_each), lanewise(8, _edge_gradients)


@jit(
    "(real[:, ::1], real[:, ::1], int64[::1], int32[::1], int64[::1], real[:, ::1], real[::1],"
    " real[::1], real[::1], real)",
    parallel=True,
    uses=(simd64,),
)
def attend(out, logs, indptr, indices, cuts, x, target, source, keep, slope):  # type: ignore[no-untyped-def]
    """out [rows, heads · width], and logs = log Σ exp(score) of each row and head [rows, heads].

    x [columns, heads · width]; target [rows · heads]; source [columns · heads]; keep is empty or [entries · heads].
    """
    heads = np.int64(logs.shape[1])
    width = np.int64(x.shape[1] // heads)
    zero = np.int64(0)
    unit = x.dtype.type(1)
    flat = x.reshape(-1)
    sums = out.reshape(-1)
    for piece in numba.prange(len(cuts) - 1):
        shares = np.empty(longest(indptr, cuts[piece], cuts[piece + 1]) * heads, x.dtype)
        highest = np.empty(heads, x.dtype)
        total = np.empty(heads, x.dtype)
        for i in range(cuts[piece], cuts[piece + 1]):
            start = indptr[i]
            degree = indptr[i + 1] - indptr[i]
            highest[:] = -np.inf
            total[:] = 0
            out[i] = 0
            for e in range(degree):
                at = np.int64(indices[start + e]) * heads
                prefetch(heads * width, flat, at * width)
                _SCORES(heads, shares, e * heads, highest, zero, target, i * heads, source, at, slope)
            for e in range(degree):
                POWERS_EACH(heads, shares, e * heads, highest, zero, total, zero)
            for h in range(heads):
                logs[i, h] = highest[h] + np.log(total[h])
                total[h] = unit / total[h]
            for e in range(degree):
                at = np.int64(indices[start + e]) * heads
                for h in range(heads):
                    share = shares[e * heads + h] * total[h]
                    if len(keep):
                        share *= keep[(start + e) * heads + h]
                    add_scaled(width, sums, (i * heads + h) * width, flat, (at + h) * width, share)


@jit(
    "(real[:, ::1], real[::1], real[::1], int64[::1], int32[::1], int64[::1], int64[::1], real[:, ::1],"
    " real[::1], real[::1], real[::1], real[::1], real[::1], real[::1], real)",
    parallel=True,
    uses=(simd64,),
)
def attend_backward(  # type: ignore[no-untyped-def]
    dx, dsource, dscores, indptr, indices, order, cuts, x, target, source, keep, logs, weighted, gradient, slope
):
    """The gradients of `attend`, by the transposed pattern: row c of it are the rows i that read source c.

    dscores [entries · heads] is in the order of the original entries; weighted = <gradient, out> of each row and head.
    """
    columns = len(x)
    heads = np.int64(len(source) // columns)
    width = np.int64(x.shape[1] // heads)
    zero = np.int64(0)
    flat = x.reshape(-1)
    sums = dx.reshape(-1)
    for piece in numba.prange(len(cuts) - 1):
        shares = np.empty(heads, x.dtype)
        ones = np.ones(heads, x.dtype)
        for c in range(cuts[piece], cuts[piece + 1]):
            at = c * heads
            dx[c] = 0
            dsource[at : at + heads] = 0
            for t in range(indptr[c], indptr[c + 1]):
                row = np.int64(indices[t]) * heads
                e = order[t] * heads
                soon = min(t + AHEAD, len(indices) - 1)
                at_soon = np.int64(indices[soon]) * heads
                e_soon = order[soon] * heads
                prefetch(heads * width, gradient, at_soon * width)
                prefetch(heads, target, at_soon)
                prefetch(heads, logs, at_soon)
                prefetch(heads, weighted, at_soon)
                prefetch(heads, dscores, e_soon)
                prefetch(min(heads, len(keep)), keep, e_soon)
                for h in range(heads):
                    shares[h] = dot(width, gradient, (row + h) * width, flat, (at + h) * width)
                if len(keep):
                    _GRADIENTS(
                        heads, shares, zero, dscores, e, dsource, at, target, row, source, at, logs, row, weighted, row,
                        keep, e, slope,
                    )  # fmt: skip
                else:
                    _GRADIENTS(
                        heads, shares, zero, dscores, e, dsource, at, target, row, source, at, logs, row, weighted, row,
                        ones, zero, slope,
                    )  # fmt: skip
                for h in range(heads):
                    add_scaled(width, sums, (at + h) * width, gradient, (row + h) * width, shares[h])
