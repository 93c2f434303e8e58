"""How often the state goes to the disk: Young's formula over measured saves, never faster than the disk, told."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.checkpoint import save_interval, young_daly
from espalier.checkpoint.save_interval import Pace, RunBeginning

SECONDS = st.floats(1e-3, 1e3)


class Disk:
    """A store that is busy when told so."""

    busy = False
    wrote = 0.0


def own(values):
    """The mean over one rank."""
    return list(values)


def run(disk, begin, steps, *, step=0.1, stood=0.02, beside=0.0, writing=2, validate=0):
    """Steps at which a run saves whose saves cost `stood` and, for `writing` steps, `beside` each; what it told."""
    told, saves, left = [], [], 0
    made = Pace(disk, begin, own, lambda every, why: told.append((every, why)))
    for number in range(begin.step + 1, begin.step + steps + 1):
        disk.busy = left > 1
        made.clock(number, step + (beside if left else 0.0))
        left = max(0, left - 1)
        if made.due(number, validated=bool(validate) and number % validate == 0):
            saves.append(number)
            made.saved(number, stood)
            left = writing
    return saves, told


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_the_period_is_youngs_and_no_shorter_than_writing(cost, written, step, between):
    found = save_interval.choose(cost, written, step, between)
    best = max(young_daly.optimal(cost, between), written)
    assert found.steps == max(1, round(best / step))


def test_the_first_saves_are_the_plans_and_the_next_follow_what_they_cost():
    saves, told = run(Disk(), RunBeginning(10, 0), 1000)
    period = round(young_daly.optimal(0.02, young_daly.ASSUMED) / 0.1)
    assert saves[:3] == [10, 20, 20 + period]
    assert {b - a for a, b in itertools.pairwise(saves[1:])} == {period}
    ((every, why),) = told
    assert every == period
    assert "sqrt(2 s M) = 12 s with s = 0.02 s" in why


def test_what_steps_beside_writing_lose_counts_as_cost():
    alone, _ = run(Disk(), RunBeginning(10, 0), 2000)
    slowed, _ = run(Disk(), RunBeginning(10, 0), 2000, beside=0.03)
    assert slowed[3] - slowed[2] == pytest.approx((alone[3] - alone[2]) * (0.08 / 0.02) ** 0.5, rel=0.02)


def test_failures_make_saves_more_frequent_and_a_slow_disk_less():
    disk = Disk()
    usual, _ = run(Disk(), RunBeginning(10, 0), 1000)
    failing, _ = run(Disk(), RunBeginning(10, 0, 0, young_daly.ASSUMED / 16, 15), 1000)
    disk.wrote = 60.0
    slow, _ = run(disk, RunBeginning(10, 0), 3000)
    periods = [saves[3] - saves[2] for saves in (failing, usual, slow)]
    assert periods[0] == pytest.approx(periods[1] / 4, abs=1)
    assert periods[2] == 600


def test_a_save_bears_a_validation_loss_where_one_is_near():
    saves, _ = run(Disk(), RunBeginning(10, 0), 2000, validate=70)
    assert saves[3:]
    assert all(step % 70 == 0 for step in saves[3:])


def test_a_run_that_is_taken_up_again_counts_from_its_newest_save():
    assert run(Disk(), RunBeginning(25, 40, saved=40), 60)[0][0] == 65
    assert run(Disk(), RunBeginning(25, 60, saved=40), 60)[0][0] == 65
    assert run(Disk(), RunBeginning(25, 80, saved=40), 60)[0][0] == 81


def test_failures_that_are_known_make_the_first_save_come_sooner():
    assert run(Disk(), RunBeginning(40, 0, 0, young_daly.ASSUMED / 16, 15), 60)[0][0] == 10
    assert run(Disk(), RunBeginning(40, 0, 0, 1e6 / 16, 15, 1e6), 60)[0][0] == 10
    assert run(Disk(), RunBeginning(40, 0, 0, 1e6, 0, 1e6), 60)[0][0] == 40
