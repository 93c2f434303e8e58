"""MPC's stages on the CPU, in numba: see mpc.py. A chunk lies as [bits, tiles], so that vectors run over its tiles."""

# ruff: noqa: C901  (a chunk goes through in one piece)

from __future__ import annotations

from typing import Any

import numpy as np

from espalier.kernels.compiled import jit, njit

CHUNK = 1024


@njit
def _turn(grid: Any, bits: int) -> None:
    """Transposes the bit matrix of every column of `grid` [bits, tiles] (Warren, Hacker's Delight, section 7-3)."""
    tiles = grid.shape[1]
    step = bits // 2
    one = grid.dtype.type(1)
    mask = grid.dtype.type((one << grid.dtype.type(step)) - one)
    while step:
        shift = grid.dtype.type(step)
        for base in range(0, bits, 2 * step):
            for k in range(base, base + step):
                low, high = grid[k], grid[k + step]
                for i in range(tiles):
                    swap = grid.dtype.type(((low[i] >> shift) ^ high[i]) & mask)
                    high[i] ^= swap
                    low[i] ^= swap << shift
        step //= 2
        mask = grid.dtype.type(mask ^ (mask << grid.dtype.type(step)))


@jit(
    "int64(uint16[::1], int64, uint16[::1], uint16[::1])",
    "int64(uint32[::1], int64, uint32[::1], uint32[::1])",
    "int64(uint64[::1], int64, uint64[::1], uint64[::1])",
)
def pack(words: Any, dims: int, marks: Any, kept: Any) -> int:
    """Fills `marks` and the beginning of `kept`; returns how many words are kept."""
    kind = words.dtype.type
    bits = words.itemsize * 8
    tiles = CHUNK // bits
    residual = np.zeros(CHUNK, words.dtype)
    grid = np.zeros((bits, tiles), words.dtype)
    line = np.zeros(CHUNK + 1, words.dtype)
    at = 0
    for first in range(0, words.size, CHUNK):
        v = words[first : first + CHUNK]
        n = v.size
        if n < CHUNK:
            residual[:] = 0
        for i in range(min(dims, n)):
            residual[i] = v[i]
        for i in range(dims, n):
            residual[i] = v[i] - v[i - dims]
        for tile in range(tiles):
            for i in range(bits):
                grid[i, tile] = residual[tile * bits + i]
        _turn(grid, bits)
        for tile in range(tiles):
            for i in range(bits):
                line[1 + tile * bits + i] = grid[i, tile]
        for i in range(CHUNK):
            residual[i] = line[i + 1] - line[i]
        for tile in range((n + bits - 1) // bits):
            mark = kind(0)
            for i in range(bits):
                s = residual[tile * bits + i]
                kept[at] = s
                there = s != 0
                at += there
                mark |= kind(there) << kind(i)
            marks[first // bits + tile] = mark
    return at


@jit(
    "(uint16[::1], uint16[::1], int64, uint16[::1])",
    "(uint32[::1], uint32[::1], int64, uint32[::1])",
    "(uint64[::1], uint64[::1], int64, uint64[::1])",
)
def unpack(marks: Any, kept: Any, dims: int, words: Any) -> None:
    """Fills `words`. `kept` has as many words as `marks` has bits set."""
    kind = words.dtype.type
    bits = words.itemsize * 8
    tiles = CHUNK // bits
    grid = np.zeros((bits, tiles), words.dtype)
    at: Any = 0
    last = kept.size - 1
    for first in range(0, words.size, CHUNK):
        v = words[first : first + CHUNK]
        n = v.size
        total = kind(0)
        for tile in range((n + bits - 1) // bits):
            mark = marks[first // bits + tile]
            for i in range(bits):
                there = (mark >> kind(i)) & kind(1)
                word = kept[min(at, last)] if last >= 0 else kind(0)
                total = kind(total + word * there)
                at += np.int64(there)
                grid[i, tile] = total
        for tile in range((n + bits - 1) // bits, tiles):
            grid[:, tile] = 0
        _turn(grid, bits)
        for tile in range((n + bits - 1) // bits):
            for i in range(min(bits, n - tile * bits)):
                v[tile * bits + i] = grid[i, tile]
        for i in range(dims, n):
            v[i] += v[i - dims]
