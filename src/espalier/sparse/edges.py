"""Kernels: one value for each entry of a sparse matrix, and sums over them: dot products, softmax, GAT's attention.

The exponential of float32 is a polynomial (Cephes' expf, 2 units in the last place), which LLVM runs on whole vectors;
the library's takes one number at a time. Sums of a row go in the order of its entries.
"""

# ruff: noqa: C901, PLR0913, PLR0917  (kernels take their arrays one by one)

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from espalier.kernels.compiled import intrinsic, jit

_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
"""Cephes' constants: e^r for |r| <= ln(2)/2, and ln(2) in two parts of which the first is short."""
_LOWEST = -87.33
"""e^x is below float32's normal numbers from here on, and taken as 0."""


def _add_freely(typing: Any, total: Any, term: Any) -> Any:
    """total + term, where a loop of such additions may be reordered into vectors."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.fadd(given[0], given[1], flags=["reassoc", "contract", "nsz"])

    return total(total, term), generate


def _exponential(typing: Any, x: Any) -> Any:
    """e^x; of a float32 x at most 88."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        (value,) = given
        if x == types.float64:
            return builder.call(builder.module.declare_intrinsic("llvm.exp", [value.type]), [value])
        number, flags = ir.FloatType(), ["contract"]

        def times(left: Any, right: Any) -> Any:
            return builder.fmul(left, right, flags=flags)

        def plus(left: Any, right: Any) -> Any:
            return builder.fadd(left, right, flags=flags)

        safe = builder.select(builder.fcmp_ordered(">", value, number(_LOWEST)), value, number(_LOWEST))
        floor = builder.module.declare_intrinsic("llvm.floor", [number])
        power = builder.call(floor, [plus(times(safe, number(1.44269504088896341)), number(0.5))])
        rest = plus(plus(safe, times(power, number(-_LN2_HIGH))), times(power, number(-_LN2_LOW)))
        sum_ = number(_POLYNOMIAL[0])
        for coefficient in _POLYNOMIAL[1:]:
            sum_ = plus(times(sum_, rest), number(coefficient))
        sum_ = plus(plus(times(times(rest, rest), sum_), rest), number(1.0))
        integer = ir.IntType(32)
        bits = builder.shl(builder.add(builder.fptosi(power, integer), integer(127)), integer(23))
        found = builder.fmul(sum_, builder.bitcast(bits, number))
        found = builder.select(builder.fcmp_ordered("<=", value, number(_LOWEST)), number(0.0), found)
        return builder.select(builder.fcmp_unordered("uno", value, value), value, found)

    return x(x), generate


add_freely: Any = intrinsic(_add_freely)
exponential: Any = intrinsic(_exponential)


@jit(
    "(float32[::1], int64[::1], int32[::1], float32[:, ::1], float32[:, ::1], int64[::1])",
    "(float64[::1], int64[::1], int32[::1], float64[:, ::1], float64[:, ::1], int64[::1])",
    parallel=True,
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
    "(float32[:, ::1], float32[:, ::1], int64[::1], int64[::1])",
    "(float64[:, ::1], float64[:, ::1], int64[::1], int64[::1])",
    parallel=True,
)
def softmax(shares, scores, indptr, cuts):  # type: ignore[no-untyped-def]
    """shares = softmax of scores [entries, heads] over the entries of each row."""
    heads = scores.shape[1]
    for piece in numba.prange(len(cuts) - 1):
        highest, total = np.empty(heads, scores.dtype), np.empty(heads, scores.dtype)
        for i in range(cuts[piece], cuts[piece + 1]):
            highest[:] = -np.inf
            total[:] = 0
            for e in range(indptr[i], indptr[i + 1]):
                for h in range(heads):
                    highest[h] = max(highest[h], scores[e, h])
            for e in range(indptr[i], indptr[i + 1]):
                for h in range(heads):
                    shares[e, h] = exponential(scores[e, h] - highest[h])
                    total[h] += shares[e, h]
            for e in range(indptr[i], indptr[i + 1]):
                for h in range(heads):
                    shares[e, h] /= total[h]


@jit(
    "(float32[:, ::1], float32[:, ::1], int64[::1], int64[::1])",
    "(float64[:, ::1], float64[:, ::1], int64[::1], int64[::1])",
    parallel=True,
)
def sum_segments(totals, values, indptr, cuts):  # type: ignore[no-untyped-def]
    """totals[i] = sum of values [entries, heads] over the entries of row i."""
    for piece in numba.prange(len(cuts) - 1):
        for i in range(cuts[piece], cuts[piece + 1]):
            totals[i] = 0
            for e in range(indptr[i], indptr[i + 1]):
                for h in range(values.shape[1]):
                    totals[i, h] += values[e, h]


@jit(
    "(float32[:, :, ::1], float32[:, ::1], int64[::1], int32[::1], int64[::1], float32[:, :, ::1], float32[:, ::1],"
    " float32[:, ::1], float32[:, ::1], float64)",
    "(float64[:, :, ::1], float64[:, ::1], int64[::1], int32[::1], int64[::1], float64[:, :, ::1], float64[:, ::1],"
    " float64[:, ::1], float64[:, ::1], float64)",
    parallel=True,
)
def attend(out, logs, indptr, indices, cuts, x, target, source, keep, slope):  # type: ignore[no-untyped-def]
    """out (zeros before), and logs = log Σ exp(score) of each row and head. `keep` is empty or [entries, heads]."""
    heads, width = x.shape[1], x.shape[2]
    for piece in numba.prange(len(cuts) - 1):
        longest = 0
        for i in range(cuts[piece], cuts[piece + 1]):
            longest = max(longest, indptr[i + 1] - indptr[i])
        shares = np.empty((longest, heads), x.dtype)
        highest, total = np.empty(heads, x.dtype), np.empty(heads, x.dtype)
        for i in range(cuts[piece], cuts[piece + 1]):
            start, degree = indptr[i], indptr[i + 1] - indptr[i]
            highest[:] = -np.inf
            total[:] = 0
            for e in range(degree):
                for h in range(heads):
                    score = target[i, h] + source[indices[start + e], h]
                    shares[e, h] = score if score > 0 else score * x.dtype.type(slope)
                    highest[h] = max(highest[h], shares[e, h])
            for e in range(degree):
                for h in range(heads):
                    shares[e, h] = exponential(shares[e, h] - highest[h])
                    total[h] += shares[e, h]
            for h in range(heads):
                logs[i, h] = highest[h] + np.log(total[h])
            for e in range(degree):
                for h in range(heads):
                    share = shares[e, h] / total[h]
                    if len(keep):
                        share *= keep[start + e, h]
                    for f in range(width):
                        out[i, h, f] += share * x[indices[start + e], h, f]


@jit(
    "(float32[:, :, ::1], float32[:, ::1], float32[:, ::1], int64[::1], int32[::1], int64[::1], int64[::1],"
    " float32[:, :, ::1], float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[:, ::1],"
    " float32[:, :, ::1], float64)",
    "(float64[:, :, ::1], float64[:, ::1], float64[:, ::1], int64[::1], int32[::1], int64[::1], int64[::1],"
    " float64[:, :, ::1], float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[:, ::1],"
    " float64[:, :, ::1], float64)",
    parallel=True,
)
def attend_backward(  # type: ignore[no-untyped-def]
    dx, dsource, dscores, indptr, indices, order, cuts, x, target, source, keep, logs, weighted, gradient, slope
):
    """The gradients of `attend`, by the transposed pattern: row c of it are the rows i that read source c.

    dx and dsource are zeros before; dscores [entries, heads] is in the order of the original entries;
    weighted = <gradient, out> of each row and head.
    """
    heads, width = x.shape[1], x.shape[2]
    for piece in numba.prange(len(cuts) - 1):
        for c in range(cuts[piece], cuts[piece + 1]):
            for t in range(indptr[c], indptr[c + 1]):
                i, e = indices[t], order[t]
                for h in range(heads):
                    score = target[i, h] + source[c, h]
                    steep = x.dtype.type(1) if score > 0 else x.dtype.type(slope)
                    share = exponential(score * steep - logs[i, h])
                    kept = keep[e, h] if len(keep) else x.dtype.type(1)
                    dot = gradient[i, h, 0] * x[c, h, 0]
                    for f in range(1, width):
                        dot = add_freely(dot, gradient[i, h, f] * x[c, h, f])
                    dscore = share * (kept * dot - weighted[i, h]) * steep
                    dscores[e, h] = dscore
                    dsource[c, h] += dscore
                    share *= kept
                    for f in range(width):
                        dx[c, h, f] += share * gradient[i, h, f]
