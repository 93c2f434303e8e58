"""Losses: a departure that lasts is found where it begins; blips, noise, learning and zero are none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.ops.diagnosis import departure
from espalier.ops.log_scan.scan import Loss


def series(values):
    return [Loss(at + 1, float(value), b"") for at, value in enumerate(values)]


@given(st.integers(12, 300), st.integers(3, 200), st.floats(1.7, 20), st.integers(0, 2**32 - 1))
def test_a_departure_is_found_at_its_first_loss(before, after, times, seed):
    draw = np.random.default_rng(seed)
    values = np.concatenate([2 + 0.02 * draw.standard_normal(before), 2 * times + 0.02 * draw.standard_normal(after)])
    found = departure(series(values))
    assert found is not None
    assert found.number == before + 1


@given(st.integers(20, 300), st.integers(0, 2**32 - 1), st.floats(0.0, 0.05))
def test_noise_and_learning_are_no_departure(count, seed, noise):
    draw = np.random.default_rng(seed)
    values = (2 + 9 * np.exp(-np.arange(count) / 30)) * (1 + noise * draw.standard_normal(count))
    assert departure(series(values)) is None


@given(st.integers(20, 100), st.integers(5, 60), st.integers(1, 2))
def test_a_blip_that_comes_back_is_none(before, after, wide):
    assert departure(series([2.0] * before + [9.0] * wide + [2.0] * after)) is None


@pytest.mark.parametrize(
    "values", [[], [2.0] * 5 + [9.0] * 3, [0.0] * 20 + [5.0] * 20, [-1.0] * 20 + [5.0] * 20, [2.0] * 40]
)
def test_short_and_signless_series_say_nothing(values):
    assert departure(series(values)) is None
