"""Rows of codes of 0 to 8 bits on the CPU, in numba: see row_bits.py.

Eight codes of b bits are b bytes. A 64-bit word holds them packed in its low bits, or apart, one in each byte; three
steps of masks and shifts lead from one to the other.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from espalier.kernels import simd
from espalier.kernels.numba_compile import emitted, jit, njit
from espalier.kernels.simd import address

_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_ONES = np.uint64(0x0101010101010101)


@emitted(types.uint64)
def load_word(builder: Any, place: Any) -> Any:
    """Eight bytes from an address of any alignment, the first in the lowest bits."""
    return builder.load(builder.inttoptr(place, _WORD.as_pointer()), align=1)


@emitted(types.void)
def store_word(builder: Any, place: Any, word: Any) -> None:
    """A word to an address of any alignment."""
    builder.store(word, builder.inttoptr(place, _WORD.as_pointer()), align=1)


@emitted(types.uint64)
def load_byte(builder: Any, place: Any) -> Any:
    """One byte."""
    return builder.zext(builder.load(builder.inttoptr(place, _BYTE.as_pointer()), align=1), _WORD)


@emitted(types.void)
def store_byte(builder: Any, place: Any, word: Any) -> None:
    """The lowest byte of a word."""
    builder.store(builder.trunc(word, _BYTE), builder.inttoptr(place, _BYTE.as_pointer()), align=1)


@njit
def field_masks(bits: Any) -> Any:
    """Masks of the first four codes of eight, of the first two of each four, and of every code in its byte."""
    unit = np.uint64(1)
    four = (unit << np.uint64(4 * bits)) - unit
    two = (unit << np.uint64(2 * bits)) - unit
    single = (unit << np.uint64(bits)) - unit
    return four, two | (two << np.uint64(32)), single * _ONES


@njit
def apart(word: Any, bits: Any, masks: Any) -> Any:
    """Eight packed codes, each moved to its own byte; what the word holds above them is dropped."""
    four, two, single = masks
    width = np.uint64(bits)
    word = (word & four) | (((word >> (width * np.uint64(4))) & four) << np.uint64(32))
    high = (two & np.uint64(0xFFFFFFFF)) << (width * np.uint64(2))
    high |= high << np.uint64(32)
    word = (word & two) | ((word & high) << (np.uint64(16) - width * np.uint64(2)))
    low = single & np.uint64(0x00FF00FF00FF00FF)
    return (word & low) | ((word & (low << width)) << (np.uint64(8) - width))


@njit
def joined(word: Any, bits: Any) -> Any:
    """Eight codes, one in each byte, packed into the low bits of a word."""
    width = np.uint64(bits)
    even = np.uint64(0x00FF00FF00FF00FF)
    word = (word & even) | ((word & ~even) >> (np.uint64(8) - width))
    even = np.uint64(0x0000FFFF0000FFFF)
    word = (word & even) | ((word & ~even) >> (np.uint64(16) - width * np.uint64(2)))
    return (word & np.uint64(0xFFFFFFFF)) | ((word >> np.uint64(32)) << (width * np.uint64(4)))


@njit
def load_bytes(place: int, count: int) -> Any:
    """The first `count` bytes, up to 8, of a word."""
    word = np.uint64(0)
    for k in range(count):
        word |= load_byte(place + k) << np.uint64(8 * k)
    return word


@njit
def _store_bytes(place: int, word: Any, count: int) -> None:
    for k in range(count):
        store_byte(place + k, word >> np.uint64(8 * k))


@njit
def unpack_row(source: int, end: int, bits: Any, sign: Any, columns: int, to: int) -> None:
    """One row at the address `source` to bytes at `to`. Reads no byte from `end` on; `sign`: of a code, 0 if unsigned.

    Eight bytes with the sign bit flipped, less the sign, are two's complement; bit 7 is set meanwhile so that no byte
    borrows from the next.
    """
    masks = field_masks(bits)
    signs, high = np.uint64(sign) * _ONES, np.uint64(0x80) * _ONES
    if bits == 8:
        signs = np.uint64(0)
    at = source
    for j in range(0, columns, 8):
        word = load_word(at) if at + 8 <= end else load_bytes(at, max(0, min(bits, end - at)))
        word = apart(word, bits, masks)
        word = (((word ^ signs) | high) - signs) ^ high if signs else word
        if j + 8 <= columns:
            store_word(to + j, word)
        else:
            _store_bytes(to + j, word, columns - j)
        at += bits


@njit
def pack_row(source: int, columns: int, bits: Any, to: int, end: int) -> None:
    """One row of bytes at `source` to the address `to`. Writes no byte from `end` on; reads whole words of `source`
    but at its end."""
    _, _, single = field_masks(bits)
    at = to
    for j in range(0, columns, 8):
        word = load_word(source + j) if j + 8 <= columns else load_bytes(source + j, columns - j)
        word = joined(word & single, bits)
        if at + 8 <= end:
            store_word(at, word)
        else:
            _store_bytes(at, word, min(bits, end - at))
        at += bits


@njit
def _fits(codes: Any, bits: Any, signed: int) -> bool:
    bias = np.uint8(1 << bits >> 1) if signed else np.uint8(0)
    over = np.uint8(0)
    for j in range(codes.size):
        over |= np.uint8(codes[j] + bias) >> np.uint8(bits)
    return bits == 8 or over == 0


@jit("int64(uint8[:, ::1], uint8[::1], int64[::1], uint8[::1], UniTuple(int64, 2))", parallel=True, uses=(simd,))
def pack(codes: Any, widths: Any, offsets: Any, packed: Any, options: Any) -> int:
    """Fills `packed`; the first row with a code that does not fit, or -1. `options`: signed, pieces of work."""
    signed, pieces = options
    rows, columns = codes.shape
    source, to = address(codes), address(packed)
    bad = np.full(pieces, -1, np.int64)
    for piece in numba.prange(pieces):
        for row in range(piece * rows // pieces, (piece + 1) * rows // pieces):
            bits = np.int64(widths[row])
            if bad[piece] < 0 and not _fits(codes[row], bits, signed):
                bad[piece] = row
            if bits:
                pack_row(source + row * columns, columns, bits, to + offsets[row], to + offsets[row + 1])
    for piece in range(pieces):
        if bad[piece] >= 0:
            return bad[piece]
    return -1


@jit("(uint8[::1], uint8[::1], int64[::1], uint8[:, ::1], UniTuple(int64, 2))", parallel=True, uses=(simd,))
def unpack(packed: Any, widths: Any, offsets: Any, codes: Any, options: Any) -> None:
    """Fills `codes`. `options`: signed, pieces of work."""
    signed, pieces = options
    rows, columns = codes.shape
    source, to, end = address(packed), address(codes), address(packed) + packed.size
    for piece in numba.prange(pieces):
        for row in range(piece * rows // pieces, (piece + 1) * rows // pieces):
            bits = np.int64(widths[row])
            if bits:
                sign = np.uint64(1) << np.uint64(bits - 1) if signed else np.uint64(0)
                unpack_row(source + offsets[row], end, bits, sign, columns, to + row * columns)
            else:
                codes[row] = 0
