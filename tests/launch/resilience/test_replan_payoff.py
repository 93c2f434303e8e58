import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.launch.resilience.replan_payoff import MARGIN, MOST, NEWS, REST, Turns, weigh

seconds = st.floats(1e-3, 1e4)


@given(seconds, st.floats(0.05, 3), st.integers(0, 10**6), seconds)
def test_a_switch_is_worth_it_only_if_the_rest_gets_shorter_by_the_margin(step, ratio, left, cost):
    verdict = weigh(step, ratio, left, cost)
    assert verdict.gain == pytest.approx(left * step * (1 - ratio) - cost, abs=1e-6 * (left * step + cost + 1))
    assert verdict.worth == (verdict.stay - verdict.go > MARGIN * verdict.stay)
    assert not (verdict.worth and ratio >= 1 - MARGIN), "a plan that is no faster never pays"
    assert not (verdict.worth and cost >= left * step), "nor does a switch longer than the rest"


@given(seconds, st.floats(0.05, 0.85), seconds)
def test_the_same_switch_pays_once_enough_is_left_and_ever_after(step, ratio, cost):
    needed = math.ceil(cost / (step * (1 - ratio - MARGIN))) + 1
    assert weigh(step, ratio, needed, cost).worth
    assert weigh(step, ratio, 10 * needed, cost).worth


@given(st.floats(0.5, 100), st.lists(st.floats(0.1, 500), min_size=1, max_size=40))
def test_however_often_it_is_asked_a_run_switches_so_often_at_most_and_rests_in_between(cost, waits):
    turns, now, taken = Turns(), 0.0, []
    for index, wait in enumerate(waits):
        now += wait
        if turns.allowed(now, index + 1, {}):
            turns.took(now, cost, index, {})
            taken.append(now)
    assert len(taken) <= MOST
    assert all(later - one >= REST * cost for one, later in itertools.pairwise(taken))


@given(st.lists(st.floats(0.2, 20), min_size=1, max_size=6), st.floats(1 / 1.2, 1.2), st.data())
def test_a_shape_that_was_left_is_taken_again_only_on_new_evidence(slower, noise, data):
    turns, speeds = Turns(), dict(enumerate(slower))
    turns.took(0.0, 0.0, "before", speeds)
    assert not turns.allowed(1.0, "before", {seat: value * noise for seat, value in speeds.items()})
    assert turns.allowed(1.0, "another", speeds)
    seat = data.draw(st.sampled_from(sorted(speeds)))
    assert turns.allowed(1.0, "before", speeds | {seat: speeds[seat] * NEWS * 1.01})
