"""Ragged rows equal lists of rows, whatever is done to them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from espalier.kernels.ragged import Ragged
from espalier.recipe.errors import UserError

LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=9)


def listed(rows: Ragged) -> list[list[float]]:
    return [rows.row(index).flatten().tolist() for index in range(len(rows))]


def made(lengths: list[int], width: int = 2) -> tuple[Ragged, list[Tensor]]:
    rows = [torch.randn(length, width) for length in lengths]
    return Ragged.of_lengths(torch.cat(rows), torch.tensor(lengths)), rows


@settings(max_examples=40)
@given(LENGTHS, st.data())
def test_it_equals_a_list_of_rows(lengths: list[int], data: st.DataObject) -> None:
    ragged, rows = made(lengths)
    assert listed(ragged) == [row.flatten().tolist() for row in rows]
    assert ragged.row_ids().tolist() == [index for index, length in enumerate(lengths) for _ in range(length)]
    torch.testing.assert_close(ragged.sums(), torch.stack([row.sum(0) for row in rows]))
    turned = ragged.values[ragged.reversal()]
    assert listed(Ragged(turned, ragged.offsets)) == [row.flip(0).flatten().tolist() for row in rows]
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths))), dtype=bool)
    chosen = zip(rows, keep.split(lengths), strict=True)
    assert listed(ragged.selected(keep)) == [row[mask].flatten().tolist() for row, mask in chosen]
    start = data.draw(st.integers(0, len(lengths)))
    assert listed(ragged.rows(start, len(lengths))) == [row.flatten().tolist() for row in rows[start:]]


@settings(max_examples=30)
@given(LENGTHS)
def test_padding_and_its_removal_change_nothing(lengths: list[int]) -> None:
    ragged, _ = made(lengths)
    again = Ragged.of_padded(ragged.padded(7.0), ragged.lengths)
    assert torch.equal(again.values, ragged.values)
    assert torch.equal(again.offsets, ragged.offsets)


def test_sums_and_padding_have_gradients() -> None:
    values = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 0, 4, 6])
    assert torch.autograd.gradcheck(lambda one: (Ragged(one, offsets).sums(), Ragged(one, offsets).padded()), values)


@pytest.mark.parametrize("offsets", [[1, 3], [0, 2], [0, 2, 1, 3], []])
def test_offsets_of_other_values_are_refused(offsets: list[int]) -> None:
    with pytest.raises(UserError, match="offsets"):
        Ragged(torch.zeros(3), torch.tensor(offsets, dtype=torch.int64)).checked()
