"""Adaptive-Packages bit by bit, as the documentation of `mechanisms/few_bits/mega/package.py` has them: the plain
form of its codec.

A stream is a list of bits, the lowest of a value and of a byte first. Nothing here is shared with the package.
"""

from __future__ import annotations

import itertools

Bits = list[int]
Rows = list[list[int]]
LENGTHS = {0: 64, 1: 128, 2: 192}
"""Bits of a package by its mode."""


def bits_of(value: int, count: int) -> Bits:
    """Of a value, two's complement where it is negative."""
    return [(value >> at) & 1 for at in range(count)]


def value_of(bits: Bits) -> int:
    return sum(bit << at for at, bit in enumerate(bits))


def to_bytes(bits: Bits) -> bytes:
    """Filled up with zeros."""
    filled = bits + [0] * (-len(bits) % 8)
    return bytes(value_of(filled[at : at + 8]) for at in range(0, len(filled), 8))


def from_bytes(data: bytes) -> Bits:
    return [bit for byte in data for bit in bits_of(byte, 8)]


def needed(values: int) -> int:
    """Bits that tell so many values apart, at least one."""
    count = 1
    while 2**count < values:
        count += 1
    return count


def in_order(widths: list[int]) -> list[int]:
    """Rows as they are stored: blocks of 256, by width, rising in one and falling in the next."""
    found: list[int] = []
    for start in range(0, len(widths), 256):
        rows = range(start, min(start + 256, len(widths)))
        for width in range(9) if start % 512 == 0 else range(8, -1, -1):
            found += [row for row in rows if widths[row] == width]
    return found


def least(codes: int, width: int) -> list[int]:
    """Modes of the packages of a run: of the least bits, then the fewest, then with the most of 192 bits; longest
    first."""
    room = {mode: (length - 5) // width for mode, length in LENGTHS.items()}
    found = []
    most = [range(-(-codes // room[mode]) + 1) for mode in (0, 1)]
    for short, middle in itertools.product(range(min(3, len(most[0]))), range(min(3, len(most[1])))):
        left = max(0, codes - short * room[0] - middle * room[1])
        long = -(-left // room[2])
        found.append((64 * short + 128 * middle + 192 * long, short + middle + long, -long, short, middle))
    _, _, long, short, middle = min(found)
    return [2] * -long + [1] * middle + [0] * short


def encode(codes: Rows, widths: list[int], steps: list[int], columns: int, occupied: str) -> dict[str, bytes]:
    """The five streams of a matrix."""
    order = in_order(widths)
    told = {row: [c for c in range(columns) if widths[row] and (occupied == "dense" or codes[row][c])] for row in order}
    runs: list[tuple[int, Bits]] = []  # width, codes
    before = []  # of each block, codes before it
    place: list[tuple[int, int]] = []  # of each code, words before its package, and its place there
    count = 0
    for at, row in enumerate(order):
        if at % 256 == 0:
            before.append(count)
        if told[row]:
            if not runs or runs[-1][0] != widths[row]:
                runs.append((widths[row], []))
            runs[-1][1].extend(codes[row][column] for column in told[row])
            count += len(told[row])
    packages: Bits = []
    for width, values in runs:
        rest = list(values)
        for mode in least(len(rest), width):
            package = bits_of(mode, 2) + bits_of(width - 1, 3)
            words, here = len(packages) // 64, 0
            while rest and len(package) + width <= LENGTHS[mode]:
                package += bits_of(rest.pop(0), width)
                place.append((words, here))
                here += 1
            packages += package + [0] * (LENGTHS[mode] - len(package))
        assert not rest
    pairs = sorted(set(zip(widths, steps, strict=True)))
    index: Bits = []
    for at in [*before, count]:
        for value in (*(place[at] if at < count else (0, 0)), at):
            index += bits_of(value, 64)
    return {
        "packages": to_bytes(packages),
        "occupied": _occupied(order, told, columns, occupied),
        "index": to_bytes(index),
        "rows": to_bytes([bit for pair in zip(widths, steps, strict=True)
                          for bit in bits_of(pairs.index(pair), needed(len(pairs)))]),
        "pairs": bytes(value for pair in pairs for value in pair),
    }  # fmt: skip


def _occupied(order: list[int], told: dict[int, list[int]], columns: int, occupied: str) -> bytes:
    if occupied == "bitmap":
        return b"".join(to_bytes([int(column in told[row]) for column in range(columns)]) for row in order)
    if occupied == "dense":
        return b""
    counts = [bit for row in order for bit in bits_of(len(told[row]), needed(columns + 1))]
    return to_bytes(counts) + to_bytes([bit for row in order for c in told[row] for bit in bits_of(c, needed(columns))])


def decode(
    streams: dict[str, bytes], rows: int, columns: int, signed: bool, occupied: str
) -> tuple[Rows, list[int], list[int]]:
    """Codes, widths and steps; the index is not read."""
    pairs, each = streams["pairs"], needed(len(streams["pairs"]) // 2)
    named = from_bytes(streams["rows"])
    at = [value_of(named[row * each : (row + 1) * each]) for row in range(rows)]
    widths, steps = [pairs[2 * one] for one in at], [pairs[2 * one + 1] for one in at]
    order, codes = in_order(widths), [[0] * columns for _ in range(rows)]
    bits, start, inside, mode, width = from_bytes(streams["packages"]), 0, 0, 0, 0
    for row, columns_of in zip(order, _columns_of(streams["occupied"], order, widths, columns, occupied), strict=True):
        for column in columns_of:
            if widths[row] != width or inside + width > LENGTHS[mode]:
                start += LENGTHS[mode] if width else 0
                mode, width, inside = value_of(bits[start : start + 2]), value_of(bits[start + 2 : start + 5]) + 1, 5
                assert width == widths[row]
            code = value_of(bits[start + inside : start + inside + width])
            inside += width
            codes[row][column] = code - (1 << width) if signed and code >> (width - 1) else code
    assert start + (LENGTHS[mode] if width else 0) == len(bits), "nothing follows"
    return codes, widths, steps


def _columns_of(data: bytes, order: list[int], widths: list[int], columns: int, occupied: str) -> list[list[int]]:
    """Of each row in order those whose code is stored."""
    bits = from_bytes(data)
    if occupied == "dense":
        return [list(range(columns)) if widths[row] else [] for row in order]
    if occupied == "bitmap":
        stride = 8 * -(-columns // 8)
        return [[c for c in range(columns) if bits[at * stride + c]] for at in range(len(order))]
    of_count, of_column = needed(columns + 1), needed(columns)
    counts = [value_of(bits[at * of_count : (at + 1) * of_count]) for at in range(len(order))]
    begin, found = 8 * -(-len(order) * of_count // 8), []
    for count in counts:
        ends = range(begin, begin + count * of_column, of_column)
        found.append([value_of(bits[at : at + of_column]) for at in ends])
        begin += count * of_column
    return found
