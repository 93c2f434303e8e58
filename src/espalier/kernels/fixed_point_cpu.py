"""Fixed-point integers with a shared exponent on the CPU, in numba: see fixed_point.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from espalier.kernels.numba_compile import jit

BLOCK = 256
_EXPONENT = np.int32(0x7F800000)
NOT_FINITE = 255
"""Exponent of NaN and infinity in float32; the value's own bits 23 to 30 are what is exchanged."""


@jit("(float32[::1], uint8[::1])")
def exponents(values: Any, out: Any) -> None:
    """Fills `out` with the largest exponent of each block of `values`."""
    words = values.view(np.int32)
    for block in range(out.size):
        largest = np.int32(0)
        for i in range(block * BLOCK, min(values.size, block * BLOCK + BLOCK)):
            largest = max(largest, words[i] & _EXPONENT)
        out[block] = largest >> np.int32(23)


@jit(
    "(int8[::1], float32[::1], uint8[::1], int64, float32[::1])",
    "(int16[::1], float32[::1], uint8[::1], int64, float32[::1])",
    "(int32[::1], float32[::1], uint8[::1], int64, float32[::1])",
)
def encode(codes: Any, values: Any, shared: Any, places: int, residual: Any) -> None:
    """Fills `codes`, and `residual` (where it has elements) with what they leave out."""
    most = float(2**places - 1)
    for block in range(shared.size):
        first = block * BLOCK
        last = min(values.size, first + BLOCK)
        if shared[block] == NOT_FINITE:
            codes[first:last] = 0
            if residual.size:
                residual[first:last] = 0
            continue
        power = places + 126 - int(shared[block])
        up, down = math.ldexp(1.0, power), math.ldexp(1.0, -power)
        for i in range(first, last):
            code = min(max(np.rint(np.float64(values[i]) * up), -most), most)
            codes[i] = np.int32(code)
            if residual.size:
                residual[i] = np.float32(np.float64(values[i]) - code * down)


@jit("(int8[::1], float32[::1], uint8[::1], int64, uint64)")
def encode_stochastic(codes: Any, values: Any, shared: Any, places: int, key: Any) -> None:
    """Fills `codes`, rounded up with the probability of what is over."""
    most, state = float(2**places - 1), key
    for block in range(shared.size):
        first = block * BLOCK
        last = min(values.size, first + BLOCK)
        finite = shared[block] != NOT_FINITE
        up = math.ldexp(1.0, places + 126 - int(shared[block])) if finite else 0.0
        for i in range(first, last):
            state += np.uint64(0x9E3779B97F4A7C15)
            mixed = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            drawn = np.float64((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(40)) / 16777216.0
            codes[i] = np.int32(min(max(np.floor(np.float64(values[i]) * up + drawn), -most), most)) if finite else 0


@jit("(int8[::1], int32[::1])", "(int16[::1], int32[::1])", "(int32[::1], int32[::1])")
def add(codes: Any, total: Any) -> None:
    """Adds `codes` to `total`."""
    for i in range(codes.size):
        total[i] += codes[i]


@jit("(int32[::1], float32[::1], uint8[::1], int64)")
def decode(total: Any, values: Any, shared: Any, places: int) -> None:
    """Fills `values`."""
    for block in range(shared.size):
        first = block * BLOCK
        last = min(values.size, first + BLOCK)
        if shared[block] == NOT_FINITE:
            values[first:last] = np.nan
            continue
        down = math.ldexp(1.0, int(shared[block]) - 126 - places)
        for i in range(first, last):
            values[i] = np.float32(np.float64(total[i]) * down)
