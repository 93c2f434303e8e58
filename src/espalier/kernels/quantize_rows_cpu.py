"""Rows to codes rounded at random on the CPU, in numba: see quantize_rows.py."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from espalier.kernels import row_bits_cpu, simd
from espalier.kernels.numba_compile import jit, njit
from espalier.kernels.row_bits_cpu import pack_row, store_byte, unpack_row
from espalier.kernels.simd import address

_INFINITE = np.int32(0x7F800000)
_TINY = np.float32(2.0**-118)
_SIGN = np.int32(0x7FFFFFFF)
_LOW = np.int32(0xFFFF)
_HIGH = np.int32(-0x10000)


@njit
def _mixed(h: Any) -> Any:
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D))
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(h ^ (h >> np.uint32(16)))


@njit
def _range(words: Any) -> Any:
    """Smallest and largest of float32 values given by their bits, as integers that order as they do; whether all are
    finite."""
    low, high, top = np.int32(0x7FFFFFFF), np.int32(-0x80000000), np.int32(0)
    for j in range(words.size):
        word = words[j]
        order = np.int32(word ^ (np.int32(word >> np.int32(31)) & _SIGN))
        low, high = min(low, order), max(high, order)
        top = max(top, np.int32(word & _SIGN))
    return low, high, top < _INFINITE


@njit
def _codes(row: Any, low: Any, inverse: Any, limits: Any, start: Any, codes: Any) -> None:
    most, spread = limits
    for j in range(row.size):
        noise = np.float32(_mixed(np.uint32(start + np.uint32(np.uint32(j) * np.uint32(0x85EBCA6B)))) >> np.uint32(8))
        code = np.int32((row[j] - low) * inverse + noise * spread)
        codes[j] = np.uint8(min(code, most))


@njit
def _store_scales(to: int, words: Any) -> None:
    for k in range(2):
        store_byte(to + 2 * k, np.uint64(np.uint32(words[k]) >> np.uint32(16)))
        store_byte(to + 2 * k + 1, np.uint64(np.uint32(words[k]) >> np.uint32(24)))


@jit(
    "int64(float32[:, ::1], int64[::1], uint8[::1], int64[::1], uint8[::1], UniTuple(int64, 3))",
    parallel=True,
    uses=(simd, row_bits_cpu),
)
def quantize(rows: Any, chosen: Any, widths: Any, begins: Any, wire: Any, options: Any) -> int:
    """Fills `wire`; the first of `chosen` that is not finite, or -1. `options`: the key, pieces,
    whether nearest."""
    key, pieces, nearest = options
    spread = np.float32(0.0) if nearest else np.float32(2.0**-24)
    columns, count = rows.shape[1], chosen.size
    words = rows.view(np.int32)
    to = address(wire)
    bad = np.full(pieces, -1, np.int64)
    for piece in numba.prange(pieces):
        codes = np.zeros(columns + 8, np.uint8)
        scales = np.zeros(2, np.float32)
        raw = scales.view(np.int32)
        for at in range(piece * count // pieces, (piece + 1) * count // pieces):
            node, bits = chosen[at], np.int64(widths[at])
            low, high, finite = _range(words[node])
            raw[0] = np.int32(low ^ (np.int32(low >> np.int32(31)) & _SIGN))
            raw[1] = np.int32(high ^ (np.int32(high >> np.int32(31)) & _SIGN))
            cut = np.int32(raw[0] & _HIGH)
            if raw[0] < 0 and cut != raw[0]:
                cut = np.int32(cut + np.int32(0x10000))
            raw[0] = cut
            if columns == 0:
                raw[:] = 0
            most = (1 << bits) - 1
            scales[1] = (scales[1] - scales[0]) / np.float32(most + nearest)
            raw[1] = np.int32(np.int32(raw[1] + _LOW) & _HIGH)
            if not finite or np.int32(raw[1] & _SIGN) >= _INFINITE:
                bad[piece] = at
                break
            if scales[1] < _TINY:
                raw[1] = 0
            inverse = np.float32(1.0) / scales[1] if scales[1] > 0 else np.float32(0.0)
            start = _mixed(np.uint32(np.uint32(np.uint32(at) * np.uint32(0x9E3779B1)) + np.uint32(key)))
            _codes(rows[node], scales[0], inverse, (np.int32(most), spread), start, codes[:columns])
            place = to + begins[at]
            if nearest:
                scales[0] += np.float32(0.5) * scales[1]
                raw[0] = np.int32(raw[0] + np.int32(0x7FFF) + np.int32((raw[0] >> np.int32(16)) & np.int32(1)))
            _store_scales(place, raw)
            pack_row(address(codes), columns, bits, place + 4, place + 4 + (bits * columns + 7) // 8)
    for piece in range(pieces):
        if bad[piece] >= 0:
            return bad[piece]
    return -1


@njit
def _values(codes: Any, low: Any, scale: Any, start: Any, out: Any) -> None:
    for j in range(out.size):
        noise = np.float32(_mixed(np.uint32(start + np.uint32(np.uint32(j) * np.uint32(0x85EBCA6B)))) >> np.uint32(8))
        out[j] = low + (np.float32(codes[j]) + (np.float32(0.5) - noise * np.float32(2.0**-24))) * scale


@jit(
    "(uint8[::1], int64[::1], uint8[::1], float32[:, ::1], UniTuple(int64, 3))",
    parallel=True,
    uses=(simd, row_bits_cpu),
)
def restore(wire: Any, begins: Any, widths: Any, out: Any, options: Any) -> None:
    """Fills `out`. `options`: the key, pieces, whether dither is taken off."""
    key, pieces, dithered = options
    count, columns = out.shape
    source, end = address(wire), address(wire) + wire.size
    for piece in numba.prange(pieces):
        codes = np.zeros(columns + 8, np.uint8)
        scales = np.zeros(2, np.float32)
        raw = scales.view(np.int32)
        for at in range(piece * count // pieces, (piece + 1) * count // pieces):
            begin, bits = begins[at], np.int64(widths[at])
            for k in range(2):
                low, high = np.int32(wire[begin + 2 * k]), np.int32(wire[begin + 2 * k + 1])
                raw[k] = np.int32((low << np.int32(16)) | (high << np.int32(24)))
            unpack_row(source + begin + 4, end, bits, np.uint64(0), columns, address(codes))
            low_, scale = scales[0], scales[1]
            if dithered:
                start = _mixed(np.uint32(np.uint32(np.uint32(at) * np.uint32(0x9E3779B1)) + np.uint32(key)))
                _values(codes[:columns], low_, scale, start, out[at])
                continue
            for j in range(columns):
                out[at, j] = low_ + np.float32(codes[j]) * scale
