"""Two codecs of Adaptive-Packages, one of them bit by bit, write the same bytes and read each other's; bytes that stay
as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.mechanisms.few_bits import plain_package
from tests.mechanisms.few_bits.test_package import coded

from espalier.mechanisms.few_bits.a2q import Coded
from espalier.mechanisms.few_bits.mega.package import OCCUPIED, PackedRows, Sizes, encode

WIDTHS = {
    "short": ([3], 7),
    "lengths": ([1, 1, 2, 4, 8, 8, 8, 5, 6, 7, 0, 3], 45),
    "alternating": ([4, 0, 1, 8, 2] * 6, 19),
    "one run": ([2] * 40, 33),
    "blocks": ([1, 3, 8, 0, 2, 5] * 90, 3),
    "one column": ([1, 8, 4] * 30, 1),
    "no rows": ([], 5),
}
"""Widths of the rows, and columns; the blocks are three, rising, falling and rising again."""


def listed(given: Coded) -> tuple[list[list[int]], list[int], list[int]]:
    return tuple(one.tolist() for one in given)  # type: ignore[return-value]


def of_bytes(streams: dict[str, bytes], rows: int, columns: int, signed: bool, occupied) -> PackedRows:
    arrays = {name: np.frombuffer(bytearray(data), np.uint8) for name, data in streams.items()}
    return PackedRows(rows, columns, signed, occupied, arrays, Sizes(*(0,) * 6))


@pytest.mark.parametrize("occupied", OCCUPIED)
@pytest.mark.parametrize("case", WIDTHS)
def test_two_codecs_agree_byte_for_byte_and_read_each_other(case, occupied):
    widths, columns = WIDTHS[case]
    for seed, (signed, share) in enumerate([(False, 1.0), (False, 0.4), (True, 0.5), (True, 0.05)]):
        given = coded(widths, columns, signed, share, seed)
        packed = encode(given, occupied=occupied)
        ours = {name: one.tobytes() for name, one in packed.streams.items()}
        plain = plain_package.encode(*listed(given), columns, occupied)
        assert ours == plain
        assert plain_package.decode(ours, len(widths), columns, signed, occupied) == listed(given)
        assert listed(of_bytes(plain, len(widths), columns, signed, occupied).decoded()) == listed(given)


def test_the_cases_have_packages_of_every_length_and_width():
    seen = set()
    for widths, columns in WIDTHS.values():
        packed = encode(coded(widths, columns, False, 1.0, 0), occupied="dense")
        words, at = packed.streams["packages"].view(np.uint64), 0
        while at < len(words):
            mode, width = int(words[at]) & 3, (int(words[at]) >> 2 & 7) + 1
            seen |= {("mode", mode), ("width", width)}
            at += mode + 1
    assert seen == {("mode", mode) for mode in range(3)} | {("width", width) for width in range(1, 9)}


def counting(count: int, width: int, signed: bool = False) -> Coded:
    """A row of codes 1, 2, 3 and so on, signed ones negative at every second, and 0 where they begin again."""
    codes = torch.arange(1, count + 1) % (1 << (width - signed))
    codes = torch.where(torch.arange(count) % 2 > 0, -codes, codes) if signed else codes
    one = torch.tensor([width], dtype=torch.uint8)
    return Coded(codes[None].to(torch.int8 if signed else torch.uint8), one, torch.tensor([200], dtype=torch.uint8))


def falling() -> Coded:
    """257 rows of no bits, then rows of 1, 2 and 4 bits: in the second block, which is stored from 4 bits down."""
    codes = torch.zeros(260, 2, dtype=torch.uint8)
    codes[257:] = torch.tensor([[1, 1], [3, 2], [9, 0]])
    widths = torch.tensor([0] * 257 + [1, 2, 4], dtype=torch.uint8)
    return Coded(codes, widths, widths + 7)


EMPTY = "00" * 24
"""An entry of the index before the first code, and after the last one but for its last 8 bytes."""
GOLDEN = {
    "64 bits, dense": (counting(9, 4), "dense", "2c64a8ec30010000", "", EMPTY + "00" * 16 + "0900000000000000"),
    "128 bits, bitmap": (
        counting(30, 4),
        "bitmap",
        "2d64a8ec3075b9fd4386ca0e5397db01",
        "ff7fff3f",
        EMPTY + "00" * 16 + "1d00000000000000",
    ),
    "192 bits, bitmap, signed": (
        counting(40, 4, signed=True),
        "bitmap",
        "2e7cb8f4c2874b2f7cb8f4c2874b2f7cb8f4000000000000",
        "7f7f7f7f7f",
        EMPTY + "00" * 16 + "2300000000000000",
    ),
    "64 bits, lists": (
        counting(12, 3),
        "index",
        "281aeb4723000000",
        "0b10325486a90b",
        EMPTY + "00" * 16 + "0b00000000000000",
    ),
    "a block that falls, dense": (
        falling(),
        "dense",
        "2c01000000000000" + "6401000000000000" + "6000000000000000",
        "",
        2 * EMPTY + "00" * 16 + "0600000000000000",
    ),
    "a block that falls, lists": (
        falling(),
        "index",
        "2c01000000000000" + "6401000000000000" + "6000000000000000",
        "00" * 64 + "2914",
        2 * EMPTY + "00" * 16 + "0500000000000000",
    ),
}
"""Codes, how columns are told, packages, what tells the columns, and the index."""


@pytest.mark.parametrize("name", GOLDEN)
def test_bytes_are_those_written_here(name):
    given, occupied, packages, told, index = GOLDEN[name]
    streams = encode(given, occupied=occupied).streams
    assert [streams[one].tobytes().hex() for one in ("packages", "occupied", "index")] == [packages, told, index]
    if name.startswith("a block"):
        assert streams["rows"].tobytes().hex() == "00" * 64 + "e4"
        assert streams["pairs"].tobytes().hex() == "000701080209040b"
    else:
        assert streams["pairs"].tolist() == [int(given.widths[0]), 200]
    read = of_bytes({one: data.tobytes() for one, data in streams.items()}, *given.codes.shape,
                    given.codes.dtype == torch.int8, occupied)  # fmt: skip
    assert listed(read.decoded()) == listed(given)
