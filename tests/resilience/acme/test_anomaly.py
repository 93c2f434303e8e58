import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.resilience.acme.anomaly import IN_A_ROW, WINDOW, Losses


def fed(losses, patience=50):
    """(step, verdict) of the first verdict, counting steps from 1."""
    watch = Losses(patience)
    for step, loss in enumerate(losses, 1):
        verdict = watch.take(step, loss)
        if verdict is not None:
            return step, verdict
    return None


def healthy(count, seed=0):
    return [3.0 + 0.1 * math.sin(seed + 1.7 * step) for step in range(count)]


@pytest.mark.parametrize("bad", [9.0, math.inf, math.nan])
def test_a_rise_that_stays_is_found_after_its_patience_and_its_steps_are_named(bad):
    step, verdict = fed([*healthy(200), *[bad] * 100])
    assert step == 200 + IN_A_ROW + 50
    assert (verdict.first, verdict.last) == (201, step)


@pytest.mark.parametrize("length", range(1, IN_A_ROW + 50))
def test_a_blip_and_what_heals_in_time_are_left_alone(length):
    assert fed([*healthy(200), *[9.0] * length, *healthy(300)]) is None


def test_a_blip_does_not_even_open_an_anomaly_once_it_is_over():
    watch = Losses(50)
    for step, loss in enumerate([*healthy(100), 9.0], 1):
        watch.take(step, loss)
    assert watch.since == 101
    watch.take(102, 3.0)
    assert watch.since is None


def test_abnormal_losses_do_not_become_usual():
    assert fed([*healthy(WINDOW), *[9.0] * 2, 3.0] * 30 + healthy(10)) is None
    assert fed([*healthy(WINDOW), *([9.0] * 2 + [3.0]) * 100, *[9.0] * 60]) is not None


@settings(max_examples=20)
@given(st.integers(0, 1000), st.floats(0.5, 20.0))
def test_training_that_gets_better_is_never_abnormal(seed, first):
    losses = [first / (1 + step / 50) * (1 + 0.05 * math.sin(seed + 3.1 * step)) for step in range(400)]
    assert fed(losses, patience=0) is None


def test_nothing_is_judged_before_enough_is_known():
    assert fed([*healthy(10), *[50.0] * 5, *healthy(20)], patience=0) is None
