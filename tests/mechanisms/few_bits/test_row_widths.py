"""Widths of rows: one rule for rows that are stored, packed or sent, and bytes as of the rows one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.kernels import row_bits, row_widths
from espalier.mechanisms.disk_batches.row_format import RowFormat
from espalier.mechanisms.few_bits.bit_allocator import (
    BankBits,
    BitAllocator,
    DegreeBits,
    Layer,
    MemoryTarget,
    NodeBits,
    UniformBits,
    stored,
)
from espalier.mechanisms.halo_exchange import quantized_exchange as sylvie

DEGREES = torch.tensor([0, 1, 1, 2, 3, 5, 9, 17, 70, 400, 400, 12])


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), max_size=300), st.sampled_from(row_widths.LEVELS))
def test_shares_of_rows_follow_degrees_and_their_sizes_are_known_beforehand(degrees: list[int], least: int) -> None:
    many, found = np.array(degrees, np.int64), row_widths.levels(least)
    widths = row_widths.widths_of(least, row_widths.shares(many))
    told = row_widths.by_degree(least, len(many))
    assert [int((widths == bits).sum()) for bits in found] == told.counts.tolist()
    assert max(abs(told.counts - len(many) / len(found)), default=0) <= 1 + len(many) / 256
    by_degree = widths[np.argsort(many, kind="stable")].astype(int)
    assert bool((np.diff(by_degree) >= 0).all()), "more neighbours never have fewer bits"


def test_arrays_of_rows_have_widths_each() -> None:
    rows = np.array([[0, 5], [300, 17]])
    each = row_widths.by_degree(1, rows).total(lambda bits: 10 * bits)
    for place in np.ndindex(rows.shape):
        assert each[place] == row_widths.by_degree(1, int(rows[place])).total(lambda bits: 10 * bits)
    assert (row_widths.uniform(4, rows).total(lambda bits: 10 * bits) == 40 * rows).all()


@pytest.mark.parametrize(
    "allocator", [UniformBits(12, 3), NodeBits(12, 3), DegreeBits(DEGREES, 3), BankBits(12, 3, 4)], ids=type
)
@pytest.mark.parametrize("signed", [True, False])
def test_bytes_of_learned_widths_are_those_of_the_rows_one_by_one(allocator: BitAllocator, signed: bool) -> None:
    with torch.no_grad():
        allocator.raw_bits += torch.linspace(-2, 3, len(allocator.raw_bits))
    for shift in (0.0, 0.7):
        expected = sum(
            float(count) * -(-11 * int(stored(bits, signed)) // 8)
            for bits, count in zip((allocator.bits.detach().abs() - shift).clamp(min=1), allocator.counts, strict=True)
        )
        assert MemoryTarget.bytes_of(Layer(allocator, 11, signed), shift) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("columns", [1, 7, 64])
def test_packed_rows_on_disk_have_one_width_and_its_bytes(kind: str, columns: int) -> None:
    row = RowFormat(kind, columns, torch.float32)  # type: ignore[arg-type]
    encoded = row.encode(torch.randn(5, columns))
    bits = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}[kind]
    assert row.widths(5).bits.tolist() == [bits]
    assert encoded.shape == (5, row.row_bytes)
    scale = 4 if kind.startswith("int") else 0
    values = row_bits.row_bytes(columns, bits)
    assert row.row_bytes == scale + (-(-values // 4) * 4 if scale else values)


def test_rows_that_cross_take_the_bytes_of_their_widths() -> None:
    shares = row_widths.shares(DEGREES.numpy())
    widths = row_widths.widths_of(2, shares)
    one_by_one = sum(int(sylvie.row_bytes(64, int(bits))) for bits in widths)
    assert row_widths.by_degree(2, len(shares)).total(lambda bits: sylvie.row_bytes(64, bits)) == one_by_one
