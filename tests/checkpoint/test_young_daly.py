import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.checkpoint.young_daly import ASSUMED, FREE, between_failures, interval, optimal

SECONDS = st.floats(1e-4, 1e4)


def wasted(period, stall, between):
    """Share of the time lost to saves and to work done again, at one save every `period` seconds."""
    return stall / period + period / (2 * between)


@given(SECONDS, SECONDS, st.floats(0.1, 10.0).filter(lambda factor: abs(factor - 1) > 1e-3))
def test_no_other_period_wastes_less_than_youngs(stall, between, factor):
    best = optimal(stall, between)
    assert wasted(best, stall, between) < wasted(best * factor, stall, between)


@given(SECONDS, SECONDS, SECONDS)
def test_the_interval_is_whole_steps_and_never_longer_than_optimal(stall, step, between):
    found = interval(stall, step, between)
    assert found.steps >= 1
    assert found.period == pytest.approx(found.steps * step)
    assert found.steps == 1 or found.period <= found.optimal * (1 + 1e-9)
    assert found.steps == 1 or found.period <= stall / FREE * (1 + 1e-9)


def test_what_costs_nothing_is_done_at_every_step():
    assert interval(0.001, 0.2, 1e6).steps == 1
    assert interval(0.001, 0.02, 1e6).steps == 5


def test_failures_and_quiet_hours_correct_what_was_assumed():
    assert between_failures(0.0, 0) == ASSUMED
    assert between_failures(10 * ASSUMED, 0) == 11 * ASSUMED
    assert between_failures(ASSUMED, 19) == pytest.approx(ASSUMED / 10)


@given(st.floats(60.0, 1e9), st.floats(0.0, 1e7), st.integers(1, 100))
def test_failures_that_were_seen_count_for_more_than_those_that_were_expected(expected, seconds, failures):
    assert between_failures(seconds, 0, expected) == expected + seconds
    assert between_failures(seconds, failures, expected) <= between_failures(seconds, failures)
    assert between_failures(seconds, failures, expected) <= (expected + seconds) / (1 + failures)


def test_the_formula_and_its_inputs_are_told():
    text = str(interval(0.02, 0.1, 3600.0))
    for words in ("every 20 steps", "sqrt(2 s M) = 12 s", "s = 0.02 s", "M = 3.6e+03 s"):
        assert words in text
