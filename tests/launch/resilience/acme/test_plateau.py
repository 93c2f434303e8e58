"""No false alarm over healthy curves, and every loss that stands still is found: simulated, many seeds of each."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.recipe import value_ranges
from espalier.train.plateau import BLOCKS, LEAST, MARGIN, Plateau, fall

WINDOW = 1000


def reports(losses, window=WINDOW, rates=None):
    watch = Plateau(window)
    judged = [True] * len(losses) if rates is None else [rate >= 0.5 for rate in rates]
    return [step for step, (loss, high) in enumerate(zip(losses, judged, strict=True), 1) if watch.take(loss, high)]


def noisy(curve, noise, seed, spikes=0.0):
    draw = random.Random(seed)
    return [value * (1 + noise * draw.gauss(0, 1)) * (5.0 if draw.random() < spikes else 1.0) for value in curve]


def power(steps, power):
    """A loss of the usual form that still falls by the margin over every window."""
    return [1.5 + 6.0 * (1 + step / 20) ** -power for step in range(steps)]


def still_falling(curve):
    ends = range(WINDOW, len(curve), WINDOW)
    return all(curve[end - WINDOW] - curve[end] > 1.2 * MARGIN * curve[end] for end in ends)


@pytest.mark.parametrize("noise", [0.0, 0.003, 0.01, 0.03, 0.1, 0.3])
@pytest.mark.parametrize("exponent", [0.15, 0.3, 0.5])
def test_a_loss_that_falls_is_never_called_a_plateau_however_it_scatters(noise, exponent):
    curve = power(6000, exponent)
    cut = next((end for end in range(2 * WINDOW, 6001, 500) if not still_falling(curve[:end])), 6001) - 500
    assert [seed for seed in range(10) if reports(noisy(curve[:cut], noise, seed))] == []


@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_the_tail_of_a_schedule_is_not_judged(noise):
    """Cosine: the loss stands still once the rate is gone. Warmup, stable, decay: it falls anew in the decay."""
    steps = 4000
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]
    at, curve = 6.0, []
    for rate in cosine:
        at -= 0.0012 * rate * (at - 2.0)
        curve.append(at)
    assert curve[-WINDOW] - curve[-1] < 0.1 * curve[-1]
    assert [seed for seed in range(10) if reports(noisy(curve, noise, seed), 400, cosine)] == []
    decay = [1.0] * 2000 + [1 - step / 1000 for step in range(1000)]
    stable = [2.0 + 3.0 * math.exp(-step / 1500) - (0.3 * (1 - rate)) for step, rate in enumerate(decay)]
    assert [seed for seed in range(10) if reports(noisy(stable, noise, seed), 400, decay)] == []


@pytest.mark.parametrize("noise", [0.0, 0.003, 0.01])
@pytest.mark.parametrize("spikes", [0.0, 0.01])
def test_a_loss_that_stands_still_is_reported_once_within_two_windows(noise, spikes):
    curve = [2.0 + 4.0 * math.exp(-step / 150) for step in range(1500)] + [2.0] * 4 * WINDOW
    for seed in range(8):
        (found,) = reports(noisy(curve, noise, seed, spikes))
        assert 1000 < found <= 1500 + 2 * WINDOW


def test_a_new_plateau_after_a_new_fall_is_reported_again():
    flat, down = [2.0] * 2500, [2.0 - 0.0005 * step for step in range(1000)]
    assert len(reports(noisy(flat + down + [1.5] * 2500, 0.005, 1))) == 2


@given(st.floats(-5, 5), st.floats(-1, 1))
def test_of_a_straight_line_the_fall_is_exact(start, slope):
    found = fall([start + slope * at for at in range(BLOCKS)])
    assert found.fall == pytest.approx(-slope * (BLOCKS - 1), abs=1e-9)
    assert found.error == pytest.approx(0.0, abs=1e-9)


def test_losses_that_are_no_numbers_are_no_plateau():
    assert reports([math.nan] * 5000) == []
    assert reports([math.inf] * 5000) == []


def test_the_shortest_window_of_the_option_is_that_of_the_test():
    assert [limit["bounds"] for limit in value_ranges._LIMITS if limit["keys"] == ["faults.plateau"]] == [{"ge": LEAST}]
