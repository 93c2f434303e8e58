import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.train.anomaly import IN_A_ROW, WINDOW, Course, Losses


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


# --- loss and gradient norm together ---------------------------------------------------------------------------------


def judged(losses, norms, patience=50):
    watch = Course(patience)
    found = (watch.take(step, *pair) for step, pair in enumerate(zip(losses, norms, strict=True), 1))
    return next((verdict for verdict in found if verdict is not None), None)


def norms(count, seed, level=1.0, scatter=0.5):
    """Heavy-tailed, as those of small batches: log-normal."""
    draw = random.Random(seed)
    return [level * math.exp(scatter * draw.gauss(0, 1)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_a_norm_that_rises_and_stays_is_an_anomaly_where_the_loss_does_not_fall(seed):
    losses = healthy(400, seed)
    found = judged(losses, norms(200, seed) + norms(200, seed + 100, level=400.0))
    assert (found.what, found.first) == ("gradient norm", 201)
    assert found.last == 200 + IN_A_ROW + 50
    assert "gradient norm was abnormal" in str(found)


@pytest.mark.parametrize("seed", range(5))
def test_a_norm_that_rises_while_the_model_learns_is_none_and_its_new_level_is_usual(seed):
    losses = healthy(200, seed) + [3.0 - 0.02 * step for step in range(75)] + [1.5] * 400
    assert judged(losses, norms(200, seed) + norms(475, seed, level=400.0)) is None


@pytest.mark.parametrize("scatter", [0.0, 0.1, 0.5, 1.0])
def test_healthy_norms_raise_no_alarm(scatter):
    for seed in range(4):
        falling = [3.0 / (1 + step / 300) for step in range(700)]
        levels = [1.0 + 4.0 * math.exp(-step / 50) + step / 500 for step in range(700)]
        found = [level * norm for level, norm in zip(levels, norms(700, seed, scatter=scatter), strict=True)]
        assert judged(noised(falling, seed), found) is None
        tail = [max(0.02, 1 - step / 700) for step in range(700)]
        slowly = [norm * (2.0 - rate) for norm, rate in zip(norms(700, seed, scatter=scatter), tail, strict=True)]
        assert judged(noised([2.0 + 0.1 * rate for rate in tail], seed), slowly) is None


def noised(losses, seed):
    draw = random.Random(seed)
    return [loss * (1 + 0.03 * draw.gauss(0, 1)) for loss in losses]


@pytest.mark.parametrize("length", [1, 5, IN_A_ROW + 49])
def test_a_spike_of_the_norm_that_heals_is_left_alone(length):
    risen = norms(200, 1) + norms(length, 2, level=400.0) + norms(300, 3)
    assert judged(healthy(len(risen)), risen) is None


def test_the_losss_own_verdict_comes_first_and_since_is_the_earlier():
    watch = Course(10)
    for step in range(1, 101):
        watch.take(step, 3.0 + 0.01 * (step % 7), 1.0)
    watch.take(101, 3.0, 900.0)
    watch.take(102, 90.0, 900.0)
    assert watch.since == 101
    assert judged([*healthy(100), *[90.0] * 100], [*[1.0] * 100, *[900.0] * 100]).what == "loss"
