"""Products that read packed rows equal those of the rows unpacked, sums of integers to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from espalier.mechanisms.few_bits.packed_spmm import PackedMatrix, packed_matmul


def matrix(rows: int, columns: int, signed: bool, seed: int, whole: bool, width: int | None = None) -> PackedMatrix:
    random = np.random.default_rng(seed)
    widths = torch.from_numpy(random.integers(0, 9, rows).astype(np.uint8))
    if width is not None:
        widths[:] = width
    codes = random.integers(0, 256, (rows, columns)) & ((1 << widths.numpy()[:, None].astype(int)) - 1)
    if signed:
        half = 1 << widths.numpy()[:, None].astype(int) >> 1
        codes = (codes ^ half) - half
    scales = torch.ones(rows) if whole else torch.rand(rows)
    return PackedMatrix.of(torch.from_numpy(codes).to(torch.int8 if signed else torch.uint8), widths, scales)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("columns", [1, 7, 64, 129, 300])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [None, 0, 3, 8])
def test_packed_products_are_those_of_the_rows_unpacked(
    signed: bool, columns: int, weighted: bool, width: int | None
) -> None:
    """Rows of unlike widths, or of one, whose places need no look-up; the last rows end where the bytes do. Sums with
    weights agree to a millionth of the largest."""
    rows = matrix(50, columns, signed, columns, whole=not weighted, width=width)
    degrees = torch.randint(0, 9, (40,))
    indptr = torch.nn.functional.pad(degrees.cumsum(0), (1, 0))
    indices = torch.randint(0, 50, (int(indptr[-1]),))
    weights = torch.rand(len(indices)) if weighted else None
    plain = packed_matmul.reference.run(rows, indptr, indices, weights)
    found = packed_matmul(rows, indptr, indices, weights)
    if weighted:
        torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6 * float(plain.abs().max()))
    else:
        assert torch.equal(found, plain)


@pytest.mark.parametrize("signed", [False, True])
def test_integers_of_many_rows_do_not_overflow(signed: bool) -> None:
    codes = torch.full((3, 33), 127 if signed else 255, dtype=torch.int8 if signed else torch.uint8)
    rows = PackedMatrix.of(codes, torch.full((3,), 8, dtype=torch.uint8), torch.ones(3))
    indptr = torch.tensor([0, 127, 127, 255, 512, 1500])
    indices = torch.arange(1500) % 3
    assert torch.equal(packed_matmul(rows, indptr, indices), packed_matmul.reference.run(rows, indptr, indices))
