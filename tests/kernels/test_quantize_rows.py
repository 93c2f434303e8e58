"""Rows of few bits: the fast form writes the plain one's bytes, the mean of what comes back is the row, and bad
rows are found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.kernels import quantize_rows as kernels

FORMS = (kernels.quantize_by_words, kernels.quantize_rows.reference.run)


def placed(columns: int, widths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where rows begin, three bytes from the start on, and a buffer."""
    ends = torch.cumsum(kernels.wire_bytes(columns, widths.long()), 0)
    size = int(ends[-1]) if len(ends) else 0
    return ends - kernels.wire_bytes(columns, widths.long()) + 3, torch.zeros(size + 3, dtype=torch.uint8)


def back(rows: torch.Tensor, width: int, key: int, dither: bool = False) -> torch.Tensor:
    chosen, widths = torch.arange(len(rows)), torch.full((len(rows),), width, dtype=torch.uint8)
    places = placed(rows.shape[1], widths)
    assert kernels.quantize_rows(rows, chosen, widths, places, key) == -1
    found = torch.empty_like(rows)
    kernels.restore_rows(places[1], places[0], widths, found, key if dither else None)
    return found


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 8), max_size=20), st.integers(0, 70), st.integers(0, 2**32 - 1), st.booleans())
def test_the_fast_form_writes_the_bytes_of_the_plain_one(
    given: list[int], columns: int, key: int, nearest: bool
) -> None:
    random = np.random.default_rng(key)
    sizes = 10.0 ** random.integers(-44, 30, (len(given) + 3, 1))
    rows = torch.from_numpy((random.normal(size=(len(given) + 3, columns)) * sizes).astype(np.float32))
    rows[:1] = -2.5
    chosen = torch.from_numpy(random.integers(0, len(rows), len(given)))
    widths = torch.tensor(given, dtype=torch.uint8)
    wires, found = [], []
    for form, restore in zip(FORMS, (kernels.restore_by_words, kernels.restore_rows.reference.run), strict=True):
        begins, wire = placed(columns, widths)
        assert form(rows, chosen, widths, (begins, wire), None if nearest else key) == -1
        out = torch.empty(len(given), columns)
        restore(wire, begins, widths, out)
        less = torch.empty_like(out)
        restore(wire, begins, widths, less, key)
        wires.append(wire)
        found += [out, less]
    assert torch.equal(*wires)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@pytest.mark.parametrize("width", [1, 2, 8])
def test_what_is_lost_with_the_dither_taken_off_is_uniform_in_a_step_whatever_the_value(width: int) -> None:
    random = np.random.default_rng(width)
    rows = torch.from_numpy((random.normal(size=(24, 40)) * np.logspace(-6, 2, 24)[:, None]).astype(np.float32))
    rows[::2] = rows[::2].relu()  # half of the values are the smallest
    draws = 400
    plain, found = (torch.stack([back(rows, width, key, one) for key in range(draws)]) for one in (False, True))
    low = kernels._down(rows.amin(1))[:, None]
    step = kernels._up((rows.amax(1)[:, None] - low) / ((1 << width) - 1))
    lost = (found - rows) / step
    assert lost.abs().max() < 0.5 + 2.0 ** (width - 20)
    z = lost.mean(0) * (12 * draws) ** 0.5
    assert z.abs().max() < 5
    assert (lost.square().mean((0, 2)) * 12 - 1).abs().max() < 0.05
    values = (rows - low) / step % 1
    foreseen = float((values * (1 - values)).mean())
    assert float(((plain - rows) / step).square().mean()) == pytest.approx(foreseen, rel=0.1)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
def test_the_mean_of_what_comes_back_is_the_row(width: int) -> None:
    """A z-test by element over magnitudes from 1e-6 to 100: an exact scale sent rounded would fail in small rows."""
    random = np.random.default_rng(width)
    rows = torch.from_numpy((random.normal(size=(24, 40)) * np.logspace(-6, 2, 24)[:, None]).astype(np.float32))
    draws = 400
    found = torch.stack([back(rows, width, key) for key in range(draws)]).double()
    step = (found.amax((0, 2)) - found.amin((0, 2)))[:, None] / ((1 << width) - 1)
    z = (found.mean(0) - rows) / (step / (2 * draws**0.5))
    assert z.abs().max() < 5
    assert z.abs().mean() < 1.1 * (2 / np.pi) ** 0.5  # variances are at most S^2 / 4


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_what_the_nearest_code_loses_spans_a_2_to_the_bits_of_the_row(width: int, columns: int, seed: int) -> None:
    """To the rounding of the scales to bfloat16."""
    random = np.random.default_rng(seed)
    rows = torch.from_numpy((random.standard_t(3, (5, columns)) * 10.0 ** random.integers(-9, 9)).astype(np.float32))
    rows -= rows.mean(1, keepdim=True)
    places, widths = placed(columns, torch.full((5,), width)), torch.full((5,), width, dtype=torch.uint8)
    assert kernels.quantize_rows(rows, torch.arange(5), widths, places, None) == -1
    found = torch.empty_like(rows)
    kernels.restore_rows(places[1], places[0], widths, found)
    span = rows.amax(1) - rows.amin(1)
    assert ((found - rows).abs().amax(1) <= span * 2.0 ** -(width + 1) + 0.012 * rows.abs().amax(1)).all()


@pytest.mark.parametrize("width", range(1, 9))
def test_equally_spaced_values_come_back_as_they_are(width: int) -> None:
    levels = 1 << width
    rows = (torch.arange(64) % levels).float().repeat(3, 1) * torch.tensor([[0.5], [2.0], [64.0]])
    rows[:, 0], rows[:, 1] = 0, rows[:, 1:].amax(1) if levels > 64 else (levels - 1) * torch.tensor([0.5, 2.0, 64.0])
    if levels > 64:  # all levels have to be there
        rows = torch.arange(levels).float()[None] * torch.tensor([[0.5], [2.0], [64.0]])
    assert torch.equal(back(rows, width, 7), rows)
    constant = torch.full((2, 33), -1.5)
    assert torch.equal(back(constant, width, 7), constant)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38])
def test_a_row_that_is_not_finite_is_found(form, value: float) -> None:  # type: ignore[no-untyped-def]
    rows = torch.randn(9, 20)
    rows[4, 3], rows[4, 4] = value, -3.4e38
    widths = torch.full((6,), 2, dtype=torch.uint8)
    assert form(rows, torch.tensor([0, 1, 2, 4, 4, 5]), widths, placed(20, widths), 1) == 3
