"""Adaptive-Package on the CPU, in numba: rows out of packages, groups of 64 side by side. See package.py."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from espalier.kernels.numba_compile import jit, njit


@njit
def _code(words: Any, bit: Any, width: Any) -> Any:
    at, shift = bit >> 6, np.uint64(bit & 63)
    found = words[at] >> shift
    if (bit & 63) + width > 64:
        found |= words[at + 1] << (np.uint64(64) - shift)
    return found & ((np.uint64(1) << np.uint64(width)) - np.uint64(1))


@njit
def _fits(words: Any, word: Any, width: Any) -> Any:
    """Words of the package at `word`; 0 where it is none of that width."""
    if word >= words.size:
        return 0
    mode = np.int64(words[word] & np.uint64(3))
    if mode == 3 or np.int64((words[word] >> np.uint64(2)) & np.uint64(7)) + 1 != width:
        return 0
    return mode + 1 if word + mode + 1 <= words.size else 0


@njit
def _column_bitmap(occupied: Any, row: int, stride: int, column: int) -> Any:
    """The next occupied column from `column` on."""
    while not (occupied[row * stride + (column >> 3)] >> np.uint8(column & 7)) & np.uint8(1):
        column += 1
    return column


@njit
def _list_column(occupied: Any, at: Any) -> Any:
    low = np.int64(occupied[4 * at]) | (np.int64(occupied[4 * at + 1]) << 8)
    return low | (np.int64(occupied[4 * at + 2]) << 16) | (np.int64(occupied[4 * at + 3]) << 24)


@njit
def _group(words: Any, known: Any, options: Any, out: Any, group: int) -> Any:  # noqa: C901 - one pass over values
    widths, counts, occupied, index = known
    begin, end, signed, kind = options
    columns, stride = out.shape[1], (out.shape[1] + 7) // 8
    word: Any = np.int64(index[group, 0])
    place: Any = np.int64(index[group, 1])
    value: Any = np.int64(index[group, 2])
    current: Any = 0
    size: Any = 0
    room: Any = 0
    for row in range(64 * group, min(64 * group + 64, end)):
        width, count = np.int64(widths[row]), counts[row]
        if width == 0 or count == 0:
            continue
        column = -1
        for k in range(count):
            if current == 0 or place == room or width != current:
                if current:
                    word += size
                    place = 0
                size = _fits(words, word, width)
                if size == 0:
                    return 64 * word
                current, room = width, (64 * size - 5) // width
            code = _code(words, 64 * word + 5 + place * width, width)
            if kind == 0:
                column = _column_bitmap(occupied, row, stride, column + 1)
            elif kind == 1:
                column = _list_column(occupied, value)
            else:
                column = k
            if signed and (code >> np.uint64(width - 1)) & np.uint64(1):
                code |= ~((np.uint64(1) << np.uint64(width)) - np.uint64(1))
            if column >= columns:
                return 64 * word
            out[row - begin, column] = np.uint8(code & np.uint64(255))
            place += 1
            value += 1
    return -1


_KNOWN = "Tuple((uint8[::1], int64[::1], uint8[::1], uint64[:, ::1]))"


@jit(f"int64(uint64[::1], {_KNOWN}, UniTuple(int64, 4), uint8[:, ::1])", parallel=True)
def decode(words: Any, known: Any, options: Any, out: Any) -> Any:
    """Fills `out` with the codes of rows `options[0]` to `options[1]`, which are whole groups; -1, or the bit of the
    first package that is not what its rows ask for. `known`: widths and counts of rows, what tells the columns, the
    index."""
    first, last = options[0] // 64, (options[1] + 63) // 64
    bad = np.full(max(1, last - first), -1, np.int64)
    for group in numba.prange(first, last):
        bad[group - first] = _group(words, known, options, out, group)
    for at in bad:
        if at >= 0:
            return at
    return -1
