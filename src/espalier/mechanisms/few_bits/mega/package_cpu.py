"""Adaptive-Package on the CPU: rows out of packages by loads of whole words, arrays one word longer than streams."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.cpython.unsafe.numbers import trailing_zeros

from espalier.kernels.numba_compile import jit, njit

GROUP = 256
"""Rows of an entry of the index, and of a block that is ordered by width; as in package.py, which imports no numba."""


@njit
def _bits(words: Any, bit: Any, width: Any) -> Any:
    """`width` bits (1 to 64) from `bit` on, as uint64."""
    at, shift = bit >> 6, np.uint64(bit & 63)
    word = (words[at] >> shift) | ((words[at + 1] << np.uint64(1)) << (np.uint64(63) - shift))
    return word & (~np.uint64(0) >> np.uint64(64 - width))


@njit
def _code(packages: Any, bit: Any, width: Any, half: Any) -> Any:
    """The byte of a code; `half`: the bit of its sign, 0 where it has none."""
    return np.uint8(((_bits(packages, bit, width) ^ half) - half) & np.uint64(255))


@njit
def _next(packages: Any, word: Any, width: Any) -> Any:
    """Words of the package at `word`; 0 where it is none of that width."""
    if word >= packages.size - 1:
        return 0
    mode = np.int64(packages[word] & np.uint64(3))
    if mode == 3 or np.int64((packages[word] >> np.uint64(2)) & np.uint64(7)) + 1 != width:
        return 0
    return mode + 1 if word + mode + 1 <= packages.size - 1 else 0


@njit
def _order(widths: Any, falling: Any) -> Any:
    """Rows by width, rising or `falling`, those of one width as they come."""
    starts = np.zeros(10, np.int64)
    for width in widths:
        starts[(9 - width) if falling else (width + 1)] += 1
    for width in range(1, 10):
        starts[width] += starts[width - 1]
    order = np.empty(widths.size, np.int64)
    for row in range(widths.size):
        at = (8 - widths[row]) if falling else widths[row]
        order[starts[at]] = row
        starts[at] += 1
    return order


@njit
def _group(streams: Any, widths: Any, options: Any, group: int, out: Any) -> Any:  # noqa: C901, PLR0912, PLR0915
    # one pass over the codes of a group
    packages, occupied, index = streams
    rows, columns, signed, kind, count_bits, column_bits, begin = options
    first, last = GROUP * group, min(GROUP * group + GROUP, rows)
    order = _order(widths[first - begin : last - begin], group % 2 == 1)
    word: Any = np.int64(index[group, 0])
    place: Any = np.int64(index[group, 1])
    value: Any = np.int64(index[group, 2])
    stride, listed = 8 * ((columns + 7) // 8), 8 * ((rows * count_bits + 7) // 8)
    current: Any = 0
    size: Any = 0
    room: Any = 0
    half: Any = np.uint64(0)
    for position in range(last - first):
        row = first - begin + order[position]
        width = np.int64(widths[row])
        if width == 0:
            continue
        count, within, pending, base = columns, (first + position) * stride, np.uint64(0), -64
        if kind == 1:
            count = np.int64(_bits(occupied, (first + position) * count_bits, count_bits))
        done = 0
        while True:
            if kind == 0:
                while pending == 0 and base + 64 < columns:
                    base += 64
                    pending = _bits(occupied, within + base, min(64, columns - base))
                if pending == 0:
                    break
            elif done == count:
                break
            if width != current or place == room:
                if current:
                    word, place = word + size, 0
                size = _next(packages, word, width)
                if size == 0:
                    return 64 * word
                current, room = width, (64 * size - 5) // width
                half = np.uint64(signed) << np.uint64(width - 1)
            bit = 64 * word + 5 + place * width
            if kind == 0:
                while pending != 0 and place < room:
                    column: Any = base + np.int64(trailing_zeros(pending))
                    pending &= pending - np.uint64(1)
                    out[row, column] = _code(packages, bit, width, half)
                    bit += width
                    place += 1
                    value += 1
            else:
                some = min(count - done, room - place)
                for k in range(done, done + some):
                    column = k
                    if kind == 1:
                        column = np.int64(_bits(occupied, listed + value * column_bits, column_bits))
                    if column >= columns:
                        return 64 * word
                    out[row, column] = _code(packages, bit, width, half)
                    bit += width
                    value += 1
                done += some
                place += some
    return -1 if value == np.int64(index[group + 1, 2]) else 64 * word


_STREAMS = "Tuple((uint64[::1], uint64[::1], uint64[:, ::1]))"


@jit(f"int64({_STREAMS}, uint8[::1], UniTuple(int64, 7), uint8[:, ::1])", parallel=True)
def decode(streams: Any, widths: Any, options: Any, out: Any) -> Any:
    """Fills `out` with the codes of whole groups of rows, from row `options[6]` on; -1, or the bit of a package that is
    not what its rows ask for. `streams`: packages, what tells the columns, the index; `widths`: of the rows of `out`.
    """
    first = options[6] // GROUP
    bad = np.full(max(1, (len(widths) + GROUP - 1) // GROUP), -1, np.int64)
    for group in numba.prange((len(widths) + GROUP - 1) // GROUP):
        bad[group] = _group(streams, widths, options, first + group, out)
    for at in bad:
        if at >= 0:
            return at
    return -1


@jit("int64(uint64[::1], int64, int64, uint8[:, ::1], uint8[:, ::1])")
def pairs_of(words: Any, bits: Any, first: Any, pairs: Any, out: Any) -> Any:
    """Fills `out` [rows, 2] with the pair that each row names, from row `first` on; -1, or the row whose is missing."""
    for row in range(len(out)):
        at = np.int64(_bits(words, (first + row) * bits, bits))
        if at >= len(pairs):
            return first + row
        out[row, 0], out[row, 1] = pairs[at, 0], pairs[at, 1]
    return -1
