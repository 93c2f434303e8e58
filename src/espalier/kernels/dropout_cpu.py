"""Kernels: a nonlinearity and the dropout behind it, in one pass; and backward from the result alone.

The mask is a hash of a value's place (lowbias32 of Wellons' hash-prospector, public domain) that LLVM runs on whole
vectors: only one number is kept for backward, and the mask costs less than the memory it is applied to. The same for
every number of threads.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from espalier.kernels import simd64, split_mix
from espalier.kernels.numba_compile import jit, njit
from espalier.kernels.simd64 import exponential

PIECE = 1 << 14
"""Values of one iteration, whose places count from zero: enough to be worth a thread."""
NONE, RELU, ELU = 0, 1, 2

_SIGNATURE = "(real[::1], real[::1], real[::1], uint64, uint64, int64)"


mixed = njit(split_mix.mixed)


@njit
def stays(place: Any, first: Any, second: Any, cut: Any) -> Any:
    """Whether the value at that place of a piece is kept, `cut` of 2^32 times not."""
    x = np.uint32(np.uint32(place) + first)
    x = np.uint32((x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ np.uint32(x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)) ^ second) >= cut


@jit(_SIGNATURE, parallel=True, uses=(simd64, split_mix))
def activate(values, unused, out, seed, cut, kind):  # type: ignore[no-untyped-def]
    """out = the nonlinearity of `values`, dropped `cut` of 2^32 times, else scaled up by as much."""
    count, least, share = len(values), np.uint32(cut), values.dtype.type(1 / (1 - np.float64(cut) / 2.0**32))
    zero, unit, none = values.dtype.type(0), values.dtype.type(1), values.dtype.type(-np.inf)
    for piece in numba.prange((count + PIECE - 1) // PIECE):
        start = piece * PIECE
        size = min(PIECE, count - start)
        word = mixed(seed + np.uint64(piece + 1) * np.uint64(0x9E3779B97F4A7C15))
        first, second = np.uint32(word), np.uint32(word >> np.uint64(32))
        given, made = values[start : start + size], out[start : start + size]
        if kind == ELU:
            for i in range(size):
                value = given[i]
                value = exponential(min(value, zero)) - unit if value < zero else value
                made[i] = value * share if stays(i, first, second, least) else zero
        else:
            floor = zero if kind == RELU else none
            for i in range(size):
                value = floor if given[i] < floor else given[i]
                made[i] = value * share if stays(i, first, second, least) else zero


@jit(_SIGNATURE, parallel=True, uses=(simd64, split_mix))
def activate_backward(given, result, out, seed, cut, kind):  # type: ignore[no-untyped-def]
    """out = the gradient of `values`, from `given`, that of the result, and the result of `activate`."""
    count, least, share = len(given), np.uint32(cut), given.dtype.type(1 / (1 - np.float64(cut) / 2.0**32))
    zero = given.dtype.type(0)
    for piece in numba.prange((count + PIECE - 1) // PIECE):
        start = piece * PIECE
        size = min(PIECE, count - start)
        word = mixed(seed + np.uint64(piece + 1) * np.uint64(0x9E3779B97F4A7C15))
        first, second = np.uint32(word), np.uint32(word >> np.uint64(32))
        gradient, made = given[start : start + size], out[start : start + size]
        if kind == NONE:
            for i in range(size):
                made[i] = gradient[i] * share if stays(i, first, second, least) else zero
        elif kind == RELU:
            y = result[start : start + size]
            for i in range(size):
                made[i] = zero if y[i] <= zero else gradient[i] * share
        else:
            y = result[start : start + size]
            for i in range(size):
                slope = y[i] + share if y[i] < zero else share
                made[i] = gradient[i] * slope if stays(i, first, second, least) else zero
