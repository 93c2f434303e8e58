"""Rows of codes of few bits: what is unpacked is what was packed, in the plain and in the fast form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.kernels import row_bits
from espalier.recipe.errors import UserError


def codes_of(widths: torch.Tensor, columns: int, signed: bool, seed: int) -> torch.Tensor:
    """Codes over the whole range of each row's width, its ends among them."""
    drawn = np.random.default_rng(seed).integers(0, 256, (len(widths), columns))
    drawn[:, :1], drawn[:, 1:2] = 255, 128
    shift = widths[:, None].long()
    codes = torch.from_numpy(drawn) & ((1 << shift) - 1)
    half = 1 << shift >> 1
    return ((codes ^ half) - half).to(torch.int8) if signed else codes.to(torch.uint8)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 8), max_size=20), st.integers(0, 70), st.booleans(), st.integers(0, 999))
def test_unpacking_gives_back_what_was_packed(given: list[int], columns: int, signed: bool, seed: int) -> None:
    widths = row_bits.widths_of(len(given), given)
    codes = codes_of(widths, columns, signed, seed)
    packed = row_bits.pack_by_words(codes, widths)
    assert len(packed) == sum(-(-width * columns // 8) for width in given)
    assert torch.equal(packed, row_bits.pack_rows.reference.run(codes, widths))
    for unpack in (row_bits.unpack_by_words, row_bits.unpack_rows.reference.run):
        assert torch.equal(unpack(packed, widths, columns, signed), codes)


@pytest.mark.parametrize("width", range(9))
@pytest.mark.parametrize("signed", [False, True])
def test_many_rows_on_all_threads(width: int, signed: bool) -> None:
    widths = row_bits.widths_of(1001, width)
    codes = codes_of(widths, 33, signed, width)
    packed = row_bits.pack_rows(codes, widths)
    assert torch.equal(packed, row_bits.pack_rows.reference.run(codes, widths))
    assert torch.equal(row_bits.unpack_rows(packed, widths, 33, signed), codes)


def test_the_lowest_bit_comes_first() -> None:
    widths = torch.tensor([3, 1, 8], dtype=torch.uint8)
    codes = torch.tensor([[1, 2, 7], [1, 0, 1], [255, 0, 9]], dtype=torch.uint8)
    assert row_bits.pack_rows(codes, widths).tolist() == [0b11010001, 0b1, 0b101, 255, 0, 9]


@pytest.mark.parametrize("run", [row_bits.pack_by_words, row_bits.pack_rows.reference.run])
@pytest.mark.parametrize(("dtype", "code"), [(torch.uint8, 4), (torch.int8, 2), (torch.int8, -3)])
def test_a_code_that_does_not_fit_is_refused_with_its_row(run, dtype, code) -> None:  # type: ignore[no-untyped-def]
    codes = torch.zeros(50, 9, dtype=dtype)
    codes[37, 8] = code
    with pytest.raises(UserError, match="Row 37"):
        run(codes, row_bits.widths_of(50, 2))


@pytest.mark.parametrize("bits", [-1, 9])
def test_widths_outside_0_to_8_are_refused(bits: int) -> None:
    with pytest.raises(UserError, match=f"Row 1 has {bits} bits"):
        row_bits.widths_of(2, [8, bits])
    with pytest.raises(UserError, match="one integer"):
        row_bits.widths_of(2, [8, 8, 8])
    with pytest.raises(UserError, match="one integer"):
        row_bits.widths_of(2, 1.5)


def test_bytes_that_miss_or_follow_are_refused() -> None:
    widths = row_bits.widths_of(10, 3)
    packed = row_bits.pack_rows(torch.ones(10, 8, dtype=torch.uint8), widths)
    for length in range(30):
        with pytest.raises(UserError, match=f"they end in row {length // 3}"):
            row_bits.unpack_rows(packed[:length], widths, 8)
    with pytest.raises(UserError, match="bytes follow the last row"):
        row_bits.unpack_rows(torch.cat([packed, packed]), widths, 8)
