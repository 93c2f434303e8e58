"""ZFP's blocks on the CPU, in numba: see zfp.py.

A plane of four values is a nibble, and what the coder remembers from plane to plane is a number n from 0 to 4. So two
planes are one look-up by n and a byte, and a plane of the decoder is one by n, the bits that are left (seven at most)
and the next seven bits.
"""

# ruff: noqa: C901, PLR0912, PLR0915, PLW3301  (a block goes through in one piece)

from __future__ import annotations

from typing import Any

import numpy as np

from espalier.kernels.compiled import jit, njit

_SCALES = np.array([2.0 ** (30 - (e - 127)) for e in range(256)])
"""By the stored exponent."""


def _plane(n: int, nibble: int) -> tuple[list[int], int]:
    """The bits of one plane, and n after it."""
    found = [nibble >> i & 1 for i in range(n)]
    while n < 4:
        found.append(int(nibble >> n != 0))
        if not found[-1]:
            break
        while n < 3 and not nibble >> n & 1:
            found.append(0)
            n += 1
        if n < 3:
            found.append(1)
        n += 1
    return found, n


def _packing() -> Any:
    """[5 * 256] the code of two planes (the higher first, in the high nibble), its length << 16, and n << 24."""
    table = np.zeros(5 * 256, np.uint32)
    for n in range(5):
        for byte in range(256):
            first, middle = _plane(n, byte >> 4)
            second, after = _plane(middle, byte & 15)
            bits = first + second
            table[n * 256 + byte] = sum(bit << i for i, bit in enumerate(bits)) | len(bits) << 16 | after << 24
    return table


def _unpacking() -> Any:
    """[8 * 5 * 128] by bits left, n and the next seven bits: the nibble, the bits taken << 4, and n << 8."""
    table = np.zeros(8 * 5 * 128, np.uint16)
    for left in range(8):
        for n in range(5):
            for bits in range(128):
                nibble, taken, after = _read(n, bits, left)
                table[(left * 5 + n) * 128 + bits] = nibble | taken << 4 | after << 8
    return table


def _read(n: int, bits: int, left: int) -> tuple[int, int, int]:
    at = min(n, left)
    nibble = bits & ((1 << at) - 1)
    while n < 4 and at < left:
        at += 1
        if not bits >> (at - 1) & 1:
            break
        while n < 3 and at < left:
            at += 1
            if bits >> (at - 1) & 1:
                break
            n += 1
        nibble |= 1 << n
        n += 1
    return nibble, at, n


PACKING, UNPACKING = _packing(), _unpacking()
_WHOLE = 7 * 5 * 128
"""Where the entries with seven bits left begin."""


@njit
def _spread(x: Any) -> Any:
    """Sixteen bits, each to every fourth place."""
    x = np.uint64(x)
    x = (x | (x << np.uint64(24))) & np.uint64(0x000000FF000000FF)
    x = (x | (x << np.uint64(12))) & np.uint64(0x000F000F000F000F)
    x = (x | (x << np.uint64(6))) & np.uint64(0x0303030303030303)
    return (x | (x << np.uint64(3))) & np.uint64(0x1111111111111111)


@njit
def _planes(a: Any, b: Any, c: Any, d: Any, shift: int) -> Any:
    s, low = np.uint32(shift), np.uint32(0xFFFF)
    near = _spread((a >> s) & low) | (_spread((b >> s) & low) << np.uint64(1))
    return near | (_spread((c >> s) & low) << np.uint64(2)) | (_spread((d >> s) & low) << np.uint64(3))


@njit
def _negabinary(c: Any) -> Any:
    mask = np.uint32(0xAAAAAAAA)
    return np.uint32(np.uint32(np.uint32(c) + mask) ^ mask)


@jit("int64(float32[::1], int64, uint32[::1], uint64[::1])")
def pack(values: Any, bits: int, table: Any, words: Any) -> int:
    """Fills `words`; 1 and unfinished where a value is not finite."""
    last = np.zeros(4, np.float32)
    ints, last_ints = values.view(np.uint32), last.view(np.uint32)
    whole = values.size // 4
    rest = values.size - 4 * whole
    if rest:
        last[:rest] = values[4 * whole :]
        if rest == 1:
            last[1] = last[2] = last[0]
        elif rest == 2:
            last[2] = last[1]
        last[3] = last[0]
    low31 = np.uint32(0x7FFFFFFF)
    buffer, fill, at = np.uint64(0), 0, 0
    for block in range(whole + (rest > 0)):
        if block < whole:
            i = 4 * block
            v0, v1, v2, v3 = values[i], values[i + 1], values[i + 2], values[i + 3]
            m = max(max(ints[i] & low31, ints[i + 1] & low31), max(ints[i + 2] & low31, ints[i + 3] & low31))
        else:
            v0, v1, v2, v3 = last[0], last[1], last[2], last[3]
            m = max(max(last_ints[0] & low31, last_ints[1] & low31), max(last_ints[2] & low31, last_ints[3] & low31))
        exponent = np.int64(m >> np.uint32(23))
        if exponent == 255:
            return 1
        left = bits
        if m:
            exponent += 1
            scale = _SCALES[exponent]
            x, y = np.int32(v0 * scale), np.int32(v1 * scale)
            z, w = np.int32(v2 * scale), np.int32(v3 * scale)
            x = np.int32((x + w) >> 1)
            w = np.int32(w - x)
            z = np.int32((z + y) >> 1)
            y = np.int32(y - z)
            x = np.int32((x + z) >> 1)
            z = np.int32(z - x)
            w = np.int32((w + y) >> 1)
            y = np.int32(y - w)
            w = np.int32(w + (y >> 1))
            y = np.int32(y - (w >> 1))
            a, b, c, d = _negabinary(x), _negabinary(y), _negabinary(z), _negabinary(w)
            code: Any = np.uint64(2 * exponent + 1)
            size: Any = 9
            planes, pair = _planes(a, b, c, d, 16), 0
            n: Any = 0
            while True:
                size = min(size, left)
                left -= size
                buffer |= code << np.uint64(fill)
                fill += size
                if fill >= 64:
                    words[at] = buffer
                    at += 1
                    fill -= 64
                    buffer = (code >> np.uint64(size - fill)) if fill else np.uint64(0)
                if left == 0 or pair == 16:
                    break
                if pair == 8:
                    planes = _planes(a, b, c, d, 0)
                entry = table[n * 256 + np.int64(planes >> np.uint64(56))]
                planes <<= np.uint64(8)
                pair += 1
                n = np.int64(entry >> np.uint32(24))
                size = np.int64((entry >> np.uint32(16)) & np.uint32(255))
                code = np.uint64(entry & np.uint32(0xFFFF))
                if size > left:
                    code &= (np.uint64(1) << np.uint64(left)) - np.uint64(1)
        fill += left
        while fill >= 64:
            words[at] = buffer
            at += 1
            fill -= 64
            buffer = np.uint64(0)
    if fill:
        words[at] = buffer
    return 0


@njit
def _peek(words: Any, at: int) -> Any:
    """64 bits of the stream from bit `at`; zeros behind its end."""
    word, shift = at >> 6, np.uint64(at & 63)
    if word >= words.size:
        return np.uint64(0)
    found = words[word] >> shift
    if shift and word + 1 < words.size:
        found |= words[word + 1] << (np.uint64(64) - shift)
    return found


@njit
def _lanes(nibble: Any) -> Any:
    """Four bits, each to the lowest place of a lane of 16."""
    return (np.uint64(nibble) * np.uint64(0x0000200040008001)) & np.uint64(0x0001000100010001)


@njit
def _signed(high: Any, low: Any, lane: int) -> Any:
    mask, shift = np.uint32(0xAAAAAAAA), np.uint64(16 * lane)
    top = np.uint32((high >> shift) & np.uint64(0xFFFF)) << np.uint32(16)
    u = np.uint32(top | np.uint32((low >> shift) & np.uint64(0xFFFF)))
    return np.int32(np.uint32(np.uint32(u ^ mask) - mask))


@jit("(uint64[::1], int64, uint16[::1], float32[::1])")
def unpack(words: Any, bits: int, table: Any, values: Any) -> None:
    """Fills `values`."""
    four = np.zeros(4, np.float32)
    for block in range((values.size + 3) // 4):
        at = block * bits
        window = _peek(words, at)
        there: Any = 64
        if window & np.uint64(1):
            exponent = np.int64((window >> np.uint64(1)) & np.uint64(255))
            left: Any = bits - 9
            window >>= np.uint64(9)
            there -= 9
            high, low = np.uint64(0), np.uint64(0)
            n: Any = 0
            k = 15
            while left >= 7 and k > -17:
                if there < 7:
                    window, there = _peek(words, at + bits - left), 64
                entry = np.int64(table[_WHOLE + n + np.int64(window & np.uint64(127))])
                taken = (entry >> 4) & 15
                n = (entry >> 8) << 7
                left -= taken
                there -= taken
                window >>= np.uint64(taken)
                if k >= 0:
                    high |= _lanes(entry & 15) << np.uint64(k)
                else:
                    low |= _lanes(entry & 15) << np.uint64(k + 16)
                k -= 1
            while left > 0 and k > -17:
                if there < 7:
                    window, there = _peek(words, at + bits - left), 64
                entry = np.int64(table[left * 640 + n + np.int64(window & np.uint64(127))])
                taken = (entry >> 4) & 15
                n = (entry >> 8) << 7
                left -= taken
                there -= taken
                window >>= np.uint64(taken)
                if k >= 0:
                    high |= _lanes(entry & 15) << np.uint64(k)
                else:
                    low |= _lanes(entry & 15) << np.uint64(k + 16)
                k -= 1
            x, y = _signed(high, low, 0), _signed(high, low, 1)
            z, w = _signed(high, low, 2), _signed(high, low, 3)
            y = np.int32(y + (w >> 1))
            w = np.int32(w - (y >> 1))
            y = np.int32(y + w)
            w = np.int32((w << 1) - y)
            z = np.int32(z + x)
            x = np.int32((x << 1) - z)
            y = np.int32(y + z)
            z = np.int32((z << 1) - y)
            w = np.int32(w + x)
            x = np.int32((x << 1) - w)
            scale = 1.0 / _SCALES[exponent]
            four[0], four[1], four[2], four[3] = x * scale, y * scale, z * scale, w * scale
        else:
            four[:] = 0
        i = 4 * block
        if i + 4 <= values.size:
            values[i], values[i + 1], values[i + 2], values[i + 3] = four[0], four[1], four[2], four[3]
        else:
            for j in range(values.size - i):
                values[i + j] = four[j]
