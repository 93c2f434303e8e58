"""ZFP's blocks on the CPU, in numba: see zfp.py.

Two passes over a few hundred blocks at a time. One is the same for all blocks and runs in vectors over them: exponents,
scaling, the transform, and the transposition of four integers to 32 nibbles, one for each bit plane. The other is the
coder, block after block. What it remembers between two bits is one of 17 states, so the decoder takes eight bits in
one look-up, wherever a plane ends in them, and as many look-ups for every block: nothing is mispredicted.
"""

# ruff: noqa: PLW3301, PLR0913, PLR0917  (arrays of a chunk of blocks, by name)

from __future__ import annotations

from typing import Any

import numpy as np

from espalier.kernels.numba_compile import jit, njit

_CHUNK = 256
"""Blocks that go through together: their arrays stay in the first-level cache."""


def _plane(n: int, nibble: int) -> tuple[list[int], int]:
    """The bits of one plane, and n after it."""
    bits = [nibble >> i & 1 for i in range(n)]
    while n < 4:
        bits.append(int(nibble >> n != 0))
        if not bits[-1]:
            break
        while n < 3 and not nibble >> n & 1:
            bits.append(0)
            n += 1
        if n < 3:
            bits.append(1)
        n += 1
    return bits, n


def _packing() -> Any:
    """[5 * 256] by n and two planes (the higher first, in the high nibble): their code, its length << 16, n << 24."""
    table = np.zeros(5 * 256, np.uint32)
    for n in range(5):
        for byte in range(256):
            first, middle = _plane(n, byte >> 4)
            second, after = _plane(middle, byte & 15)
            bits = first + second
            table[n * 256 + byte] = sum(bit << i for i, bit in enumerate(bits)) | len(bits) << 16 | after << 24
    return table


# What a decoder waits for: bit i of the n that stand as they are; whether a 1 follows from n on; which one it is.
_STATES = [("raw", n, i) for n in range(1, 5) for i in range(n)]
_STATES += [("any", n, 0) for n in range(4)] + [("which", n, 0) for n in range(3)]
_NUMBER = {state: number for number, state in enumerate(_STATES)}
_BEGIN = _NUMBER["any", 0, 0]


def _begun(n: int) -> tuple[str, int, int]:
    """The state at the beginning of a plane."""
    return ("raw", n, 0) if n else ("any", 0, 0)


def _next(state: tuple[str, int, int], bit: int) -> tuple[tuple[str, int, int], int, bool]:
    """(state, what is added to the plane's nibble, whether the plane ends) after `bit`."""
    kind, n, i = state
    if kind == "raw":
        if i < n - 1:
            return ("raw", n, i + 1), bit << i, False
        return (("any", n, 0), bit << i, False) if n < 4 else (_begun(4), bit << i, True)
    if kind == "any":
        if not bit:
            return _begun(n), 0, True
        return (("which", n, 0), 0, False) if n < 3 else (_begun(4), 8, True)
    if bit:
        return ("any", n + 1, 0), 1 << n, False
    return (("which", n + 1, 0), 0, False) if n < 2 else (_begun(4), 8, True)


def _entry(state: tuple[str, int, int], bits: int, count: int) -> int:
    """The nibbles of the planes in `count` bits, the first one highest of 64 bits; four times how many planes end,
    << 16; and 256 times the state after them."""
    nibbles = ended = 0
    for at in range(count):
        state, more, ends = _next(state, bits >> at & 1)
        nibbles |= more << (60 - 4 * ended)
        ended += ends
    return nibbles | 4 * ended << 16 | _NUMBER[state] << 8


def _unpacking() -> tuple[Any, Any, Any]:
    """[17 * 256] entries by state and eight bits; [9 * 256] for the first 0 to 8 bits of a block; [17] the nibble of a
    1 whose place was cut off."""
    table = [_entry(state, bits, 8) for state in _STATES for bits in range(256)]
    first = [_entry(_STATES[_BEGIN], bits, count) for count in range(9) for bits in range(256)]
    cut = [1 << n if kind == "which" else 0 for kind, n, _ in _STATES]
    return np.array(table, np.uint64), np.array(first, np.uint64), np.array(cut, np.uint64)


PACKING, UNPACKING = _packing(), _unpacking()
_NIBBLES = np.uint64(0xFFFFFFFFF0000000)
_LOW = np.uint64(0xFFFF)
_0, _1, _2, _3, _4, _6, _8, _9, _16, _24, _32, _48, _56, _60, _63, _64, _127, _128, _255 = (
    np.uint64(constant) for constant in (0, 1, 2, 3, 4, 6, 8, 9, 16, 24, 32, 48, 56, 60, 63, 64, 127, 128, 255)
)


@njit
def _swapped(x: Any, low: Any, high: Any, mask: Any) -> Any:
    """Two index bits of 64 places change their meaning (`mask`: the places with the lower set and the higher not)."""
    shift = (_1 << high) - (_1 << low)
    moved = ((x >> shift) ^ x) & mask
    return x ^ moved ^ (moved << shift)


_MASKS = [
    np.uint64(sum(1 << p for p in range(64) if p >> low & 1 and not p >> high & 1))
    for low, high in ((0, 2), (0, 4), (1, 3), (1, 5))
]
_M02, _M04, _M13, _M15 = _MASKS


@njit
def _to_nibbles(x: Any) -> Any:
    """Four times 16 bits to 16 nibbles; the index bits turn by two."""
    x = _swapped(x, np.uint64(0), np.uint64(2), _M02)
    x = _swapped(x, np.uint64(0), np.uint64(4), _M04)
    x = _swapped(x, np.uint64(1), np.uint64(3), _M13)
    return _swapped(x, np.uint64(1), np.uint64(5), _M15)


@njit
def _from_nibbles(x: Any) -> Any:
    x = _swapped(x, np.uint64(1), np.uint64(5), _M15)
    x = _swapped(x, np.uint64(1), np.uint64(3), _M13)
    x = _swapped(x, np.uint64(0), np.uint64(4), _M04)
    return _swapped(x, np.uint64(0), np.uint64(2), _M02)


@njit
def _negabinary(c: Any) -> Any:
    mask = np.uint32(0xAAAAAAAA)
    return np.uint64(np.uint32(np.uint32(np.uint32(c) + mask) ^ mask))


@njit
def _transformed(part: Any, ints: Any, count: int, tops: Any, scales: Any, high: Any, low: Any) -> Any:
    """Fills `tops` (the stored exponents; 0: all zero) and the nibbles of planes 31 to 16 and 15 to 0; whether a value
    is not finite."""
    bits = scales.view(np.int64)
    low31 = np.uint32(0x7FFFFFFF)
    worst = np.uint32(0)
    for b in range(np.uint64(count)):
        i = _4 * b
        m = max(max(ints[i] & low31, ints[i + _1] & low31), max(ints[i + _2] & low31, ints[i + _3] & low31))
        worst = max(worst, m)
        e = np.int64(m >> np.uint32(23))
        tops[b] = np.uint64(e + 1) if m else _0
        bits[b] = (1023 + 30 + 127 - 1 - e) << 52
    for b in range(np.uint64(count)):
        i = _4 * b
        scale = scales[b]
        x, y = np.int32(part[i] * scale), np.int32(part[i + _1] * scale)
        z, w = np.int32(part[i + _2] * scale), np.int32(part[i + _3] * scale)
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
        a0, a1, a2, a3 = _negabinary(x), _negabinary(y), _negabinary(z), _negabinary(w)
        top = (a0 >> _16) | ((a1 >> _16) << _16) | ((a2 >> _16) << _32) | ((a3 >> _16) << _48)
        end = (a0 & _LOW) | ((a1 & _LOW) << _16) | ((a2 & _LOW) << _32) | ((a3 & _LOW) << _48)
        high[b], low[b] = _to_nibbles(top), _to_nibbles(end)
    return worst >= np.uint32(0x7F800000)


@njit
def _short(tops: Any, high: Any, low: Any, of: Any, table: Any, state: Any, words: Any) -> Any:
    """Writes blocks of at most 64 bits behind `state` (the last word, its bits, its place), which it returns."""
    count, size = of
    buffer, fill, at = state
    rest = _0 - _1 >> (_64 - size)
    for b in range(count):
        top = tops[b]
        if top:
            code, length = _1 | (top << _1), _9
            planes, n, pair = high[b], _0, 0
            while length < size and pair < 16:
                entry = np.uint64(table[n | (planes >> _56)])
                planes <<= _8
                pair += 1
                if pair == 8:
                    planes = low[b]
                code |= (entry & _LOW) << length
                n = (entry >> _24) << _8
                length += (entry >> _16) & _255
            code &= rest
            buffer |= code << fill
            if fill + size >= _64:
                words[at] = buffer
                at += _1
                buffer = (code >> _1) >> (_63 - fill)
        elif fill + size >= _64:
            words[at] = buffer
            at += _1
            buffer = _0
        fill = (fill + size) & _63
    return buffer, fill, at


@njit
def _long(tops: Any, high: Any, low: Any, of: Any, table: Any, state: Any, words: Any) -> Any:
    """The same for blocks of 65 to 128 bits."""
    count, size = of
    buffer, fill, at = state
    rest = _0 - _1 >> (_128 - size)
    for b in range(count):
        top = tops[b]
        near, far = _0, _0
        if top:
            near, length = _1 | (top << _1), _9
            planes, n, pair, code, before = high[b], _0, 0, _0, _0
            while length < _64 and pair < 16:
                entry = np.uint64(table[n | (planes >> _56)])
                planes <<= _8
                pair += 1
                if pair == 8:
                    planes = low[b]
                code, before = entry & _LOW, length
                near |= code << before
                n = (entry >> _24) << _8
                length += (entry >> _16) & _255
            far = (code >> _1) >> (_63 - before) if length > _64 else _0
            while length < size and pair < 16:
                entry = np.uint64(table[n | (planes >> _56)])
                planes <<= _8
                pair += 1
                if pair == 8:
                    planes = low[b]
                far |= (entry & _LOW) << (length - _64)
                n = (entry >> _24) << _8
                length += (entry >> _16) & _255
            far &= rest
        words[at] = buffer | (near << fill)
        at += _1
        buffer = ((near >> _1) >> (_63 - fill)) | (far << fill)
        if fill + size >= _128:
            words[at] = buffer
            at += _1
            buffer = (far >> _1) >> (_63 - fill)
        fill = (fill + size) & _63
    return buffer, fill, at


@jit("int64(float32[::1], int64, uint32[::1], uint64[::1])")
def pack(values: Any, bits: int, table: Any, words: Any) -> int:
    """Fills `words`; 1 and unfinished where a value is not finite."""
    last = np.zeros(4 * _CHUNK, np.float32)
    tops, scales = np.zeros(_CHUNK, np.uint64), np.zeros(_CHUNK)
    high, low = np.zeros(_CHUNK, np.uint64), np.zeros(_CHUNK, np.uint64)
    blocks = (values.size + 3) // 4
    size = np.uint64(bits)
    buffer, fill, at = _0, _0, _0
    for begin in range(0, blocks, _CHUNK):
        count = min(_CHUNK, blocks - begin)
        part = values[4 * begin : 4 * (begin + count)]
        if part.size < 4 * count:
            rest = part.size & 3
            i = part.size - rest
            last[: part.size] = part
            last[i + 3] = part[i]
            if rest == 1:
                last[i + 1] = last[i + 2] = part[i]
            elif rest == 2:
                last[i + 2] = part[i + 1]
            part = last[: 4 * count]
        if _transformed(part, part.view(np.uint32), count, tops, scales, high, low):
            return 1
        if bits <= 64:
            buffer, fill, at = _short(tops, high, low, (np.uint64(count), size), table, (buffer, fill, at), words)
        else:
            buffer, fill, at = _long(tops, high, low, (np.uint64(count), size), table, (buffer, fill, at), words)
    if fill:
        words[at] = buffer
    return 0


@njit
def _window(word: Any, after: Any, at: Any) -> Any:
    """64 bits of the stream from bit `at` on, which is in `word`. (A function that took the array would count it as
    held and let go again at each call.)"""
    return (word >> (at & _63)) | ((after << _1) << (_63 - (at & _63)))


@njit
def _nibbles(words: Any, begin: Any, bits: Any, count: int, tables: Any, tops: Any, high: Any, low: Any) -> None:
    """Decodes `count` blocks from the stream's block `begin` on: their stored exponents, and the nibbles of their
    planes."""
    table, first, cut = tables
    payload, end = bits - _9, np.uint64(words.size) - _1
    head = (payload - _1) % _8 + _1 if payload else _0
    steps = (payload - head) >> np.uint64(3)
    for b in range(np.uint64(count)):
        at = (begin + b) * bits
        word = at >> _6
        window = _window(words[word], words[min(word + _1, end)], at)
        alive = _0 - (window & _1)
        tops[b] = (window >> _1) & _255
        entry = first[(head << _8) | ((window >> _9) & ((_1 << head) - _1))]
        near, far = entry & _NIBBLES, _0
        plane = (entry >> _16) & _127
        at += _9 + head
        window = window >> (_9 + head)
        there = _64 - _9 - head
        for _ in range(steps):
            if there < _8:
                word = at >> _6
                window, there = _window(words[word], words[min(word + _1, end)], at), _64
            entry = table[(entry & np.uint64(0xFF00)) | (window & _255)]
            window >>= _8
            there -= _8
            at += _8
            nibble = entry & _NIBBLES
            if plane < _64:
                near |= nibble >> plane
                far |= (nibble << _1) << (_63 - plane)
            elif plane < _128:
                far |= nibble >> (plane - _64)
            plane += (entry >> _16) & _127
        nibble = cut[(entry >> _8) & _255] << _60
        if plane < _64:
            near |= nibble >> plane
        elif plane < _128:
            far |= nibble >> (plane - _64)
        high[b], low[b] = near & alive, far & alive


@njit
def _signed(top: Any, end: Any, shift: Any) -> Any:
    mask = np.uint32(0xAAAAAAAA)
    u = np.uint32((((top >> shift) & _LOW) << _16) | ((end >> shift) & _LOW))
    return np.int32(np.uint32(np.uint32(u ^ mask) - mask))


@njit
def _restored(tops: Any, scales: Any, high: Any, low: Any, count: int, out: Any) -> None:
    """The values of `count` blocks from their exponents and nibbles."""
    bits = scales.view(np.int64)
    for b in range(np.uint64(count)):
        bits[b] = (np.int64(tops[b]) + (1023 - 127 - 30)) << 52
    for b in range(np.uint64(count)):
        top, end = _from_nibbles(high[b]), _from_nibbles(low[b])
        x, y = _signed(top, end, _0), _signed(top, end, _16)
        z, w = _signed(top, end, _32), _signed(top, end, _48)
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
        i = _4 * b
        scale = scales[b]
        out[i], out[i + _1], out[i + _2], out[i + _3] = x * scale, y * scale, z * scale, w * scale


@jit("(uint64[::1], int64, Tuple((uint64[::1], uint64[::1], uint64[::1])), float32[::1])")
def unpack(words: Any, bits: int, tables: Any, values: Any) -> None:
    """Fills `values`."""
    last = np.zeros(4 * _CHUNK, np.float32)
    tops, scales = np.zeros(_CHUNK, np.uint64), np.zeros(_CHUNK)
    high, low = np.zeros(_CHUNK, np.uint64), np.zeros(_CHUNK, np.uint64)
    blocks = (values.size + 3) // 4
    for begin in range(0, blocks, _CHUNK):
        count = min(_CHUNK, blocks - begin)
        _nibbles(words, np.uint64(begin), np.uint64(bits), count, tables, tops, high, low)
        out = values[4 * begin : 4 * (begin + count)]
        if out.size == 4 * count:
            _restored(tops, scales, high, low, count, out)
        else:
            _restored(tops, scales, high, low, count, last)
            out[:] = last[: out.size]
