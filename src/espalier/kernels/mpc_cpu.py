"""MPC's stages on the CPU, in numba: see mpc.py. A chunk lies as [bits, tiles], so that vectors run over its tiles."""

# ruff: noqa: C901, PLR0912  (a chunk goes through in one piece)

from __future__ import annotations

from typing import Any

import numpy as np

from espalier.kernels.numba_compile import jit, njit

CHUNK = 1024


@njit
def _bits(word: Any) -> Any:
    """Of a word: a constant to the compiler, which an array's itemsize is not."""
    kind = type(word)
    return 16 if kind(1 << 16) == 0 else 32 if kind(1 << 32) == 0 else 64


@njit
def _turn(grid: Any, bits: int) -> None:
    """Transposes the bit matrix of every column of `grid` [bits * tiles] (Warren, Hacker's Delight, section 7-3).

    Places are counted without sign in one flat array: numba then neither looks for negative ones nor counts who holds a
    row, and the loop over tiles is one of vectors.
    """
    kind = grid.dtype.type
    tiles = np.uint64(grid.size // bits)
    step = bits // 2
    unit = kind(1)
    mask = kind((unit << kind(step)) - unit)
    while step:
        shift = kind(step)
        far = np.uint64(step) * tiles
        for base in range(0, bits, 2 * step):
            for k in range(base, base + step):
                near = np.uint64(k) * tiles
                for i in range(tiles):
                    swap = kind(((grid[near + i] >> shift) ^ grid[near + far + i]) & mask)
                    grid[near + far + i] ^= swap
                    grid[near + i] ^= kind(swap << shift)
        step //= 2
        mask = kind(mask ^ (mask << kind(step)))


@jit(
    "int64(uint16[::1], int64, uint16[::1], uint16[::1])",
    "int64(uint32[::1], int64, uint32[::1], uint32[::1])",
    "int64(uint64[::1], int64, uint64[::1], uint64[::1])",
)
def pack(words: Any, dims: int, marks: Any, stored: Any) -> int:
    """Fills `marks` and the beginning of `stored`; returns how many words are kept."""
    kind = words.dtype.type
    bits = np.uint64(_bits(kind(1)))
    tiles = np.uint64(CHUNK) // bits
    residual = np.zeros(CHUNK, words.dtype)
    grid = np.zeros(CHUNK, words.dtype)
    line = np.zeros(CHUNK + 1, words.dtype)
    far, at, mark_at = np.uint64(dims), np.uint64(0), np.uint64(0)
    for first in range(0, words.size, CHUNK):
        v = words[first : first + CHUNK]
        n = np.uint64(v.size)
        if v.size < CHUNK:
            residual[:] = 0
        for i in range(min(far, n)):
            residual[i] = v[i]
        for i in range(n - min(far, n)):
            residual[i + far] = v[i + far] - v[i]
        for tile in range(tiles):
            for i in range(bits):
                grid[i * tiles + tile] = residual[tile * bits + i]
        _turn(grid, _bits(kind(1)))
        for tile in range(tiles):
            for i in range(bits):
                line[np.uint64(1) + tile * bits + i] = grid[i * tiles + tile]
        for i in range(np.uint64(CHUNK)):
            residual[i] = line[i + np.uint64(1)] - line[i]
        for tile in range((n + bits - np.uint64(1)) // bits):
            mark = kind(0)
            for i in range(bits):
                s = residual[tile * bits + i]
                stored[at] = s
                there = s != 0
                at += np.uint64(there)
                mark |= kind(there) << kind(i)
            marks[mark_at] = mark
            mark_at += np.uint64(1)
    return int(at)


@jit(
    "(uint16[::1], uint16[::1], int64, uint16[::1])",
    "(uint32[::1], uint32[::1], int64, uint32[::1])",
    "(uint64[::1], uint64[::1], int64, uint64[::1])",
)
def unpack(marks: Any, stored: Any, dims: int, words: Any) -> None:
    """Fills `words`. `stored` has as many words as `marks` has bits set."""
    kind = words.dtype.type
    bits = np.uint64(_bits(kind(1)))
    tiles = np.uint64(CHUNK) // bits
    far, unit = np.uint64(dims), np.uint64(1)
    grid = np.zeros(CHUNK, words.dtype)
    line = np.zeros(CHUNK, words.dtype)
    at, mark_at = np.uint64(0), np.uint64(0)
    last = np.uint64(max(stored.size, 1) - 1)
    if stored.size == 0:
        words[:] = 0
        return
    for first in range(0, words.size, CHUNK):
        v = words[first : first + CHUNK]
        n = np.uint64(v.size)
        total = kind(0)
        whole = (n + bits - unit) // bits
        for tile in range(whole):
            mark = marks[mark_at]
            mark_at += unit
            for i in range(bits):
                there = (np.uint64(mark) >> i) & unit
                total = kind(total + (stored[min(at, last)] & kind(np.uint64(0) - there)))
                at += there
                line[tile * bits + i] = total
        line[np.int64(whole * bits) :] = 0
        for i in range(bits):
            for tile in range(tiles):
                grid[i * tiles + tile] = line[tile * bits + i]
        _turn(grid, _bits(kind(1)))
        for tile in range(n // bits):
            for i in range(bits):
                v[tile * bits + i] = grid[i * tiles + tile]
        for i in range(n % bits):
            v[n // bits * bits + i] = grid[i * tiles + n // bits]
        if far == unit:  # in a register: a word just stored is not there for the next one yet
            total = kind(0)
            for i in range(n):
                total = kind(total + v[i])
                v[i] = total
        else:
            for i in range(n - min(far, n)):
                v[i + far] += v[i]
