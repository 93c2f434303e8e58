import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounts import account
from espalier.track.goodput import UNATTENDED


def run(time, step):
    return {"event": "run", "time": time, "step": step}


def steps(first, last, time, seconds=1.0):
    return [
        {"event": "step", "time": time + seconds * index, "step": step, "seconds": seconds}
        for index, step in enumerate(range(first, last + 1), 1)
    ]


def incident(time, kind="killed", attempt=0):
    return {"event": "incident", "time": time, "kind": kind, "step": 0, "attempt": attempt, "action": "start again"}


def recovered(time, seconds, kind="killed"):
    return {"event": "recovered", "time": time, "kind": kind, "seconds": seconds, "step": 0, "lost_steps": 0}


def end(time):
    return {"event": "end", "time": time, "reason": "finished"}


def test_a_run_without_failures_has_only_its_own_work():
    found = account([run(0.0, 0), *steps(1, 8, 0.0), end(10.0)])
    assert (found.wall, found.useful, found.failures, found.again) == (10.0, 8.0, 0, 0.0)
    assert found.goodput == pytest.approx(0.8)
    assert math.isinf(found.between_failures)


def test_the_seconds_of_a_run_are_divided_by_what_they_were_spent_on():
    waits = {"exposed": 0.25, "waited": 0.125}
    validation = {"event": "validation", "time": 9.0, "step": 8, "seconds": 0.5}
    checkpoint = {"event": "checkpoint", "time": 9.5, "step": 8, "seconds": 3.0, "blocked": 0.25}
    events = [run(0.0, 0), *({**step, **waits} for step in steps(1, 8, 0.0)), validation, checkpoint, end(10.0)]
    assert account(events).parts == {
        "computing": 5.0,
        "waiting for communication": 2.0,
        "waiting for batches": 1.0,
        "validating": 0.5,
        "saving": 0.25,
        "steps done again": 0.0,
        "recovering": 0.0,
        "starting and other": 1.25,
    }


def test_work_done_again_and_the_way_back_are_booked_on_their_cause():
    events = [run(0.0, 0), *steps(1, 6, 0.0), incident(6.5), run(7.0, 4), *steps(5, 5, 7.0), recovered(8.0, 1.5)]
    events += [*steps(6, 10, 8.0), end(13.0)]
    found = account(events)
    assert found.useful == 10.0
    (cause,) = found.causes
    assert (cause.kind, cause.count, cause.recovered, cause.steps, cause.again, cause.down) == (
        *("killed", 1, 1, 2, 2.0, 1.5),
    )
    assert found.between_failures == 13.0
    assert (found.parts["recovering"], found.parts["starting and other"]) == (1.0, 0.0)


def test_the_next_phase_is_no_failure():
    events = [{**run(0.0, 0), "until": 4}, *steps(1, 4, 0.0), {**run(6.0, 4), "until": 8}, *steps(5, 8, 6.0), end(10.0)]
    found = account(events)
    assert (found.wall, found.useful, found.failures, found.again) == (10.0, 8.0, 0, 0.0)
    lost = account([*events[:-1], {**run(11.0, 6), "until": 8}])
    assert (lost.failures, lost.again) == (1, 2.0)


def test_failures_of_one_kind_are_told_apart_by_their_diagnosis():
    named = {"category": "Infrastructure", "reason": "ECC Error"}
    events = [run(0.0, 0), *steps(1, 6, 0.0), {**incident(6.5), **named}, run(7.0, 6), {**recovered(8.0, 1.5), **named}]
    events += [incident(9.0, attempt=1), run(9.5, 6), recovered(9.5, 0.5), end(13.0)]
    ecc, plain = account(events).causes
    assert (ecc.kind, ecc.category, ecc.reason, ecc.count, ecc.recovered) == (
        *("killed", "Infrastructure", "ECC Error", 1, 1),
    )
    assert (plain.kind, plain.reason, plain.count, plain.recovered) == ("killed", "", 1, 1)


def test_the_time_when_nobody_ran_it_is_nobodys_loss():
    stopped = [run(0.0, 0), *steps(1, 3, 0.0), end(4.0), run(1000.0, 3), *steps(4, 6, 1000.0), end(1004.0)]
    assert account(stopped).wall == pytest.approx(8.0)
    assert account(stopped).failures == 0
    orphaned = [run(0.0, 0), *steps(1, 3, 0.0), run(1000.0, 2), *steps(3, 6, 1000.0), end(1004.0)]
    found = account(orphaned)
    assert found.wall == pytest.approx(7.0)
    assert [(cause.kind, cause.count, cause.steps) for cause in found.causes] == [(UNATTENDED, 1, 1)]


def test_checkpoints_that_could_not_be_read_are_no_failures_of_the_run():
    damaged = {"event": "incident", "time": 0.5, "kind": "checkpoint", "what": "damaged", "action": "took another"}
    assert account([run(0.0, 0), damaged, *steps(1, 2, 1.0), end(4.0)]).failures == 0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.floats(0.1, 5.0)), max_size=8))
def test_every_step_is_counted_once_as_useful_and_all_others_as_done_again(attempts):
    log, now, step, worked = [], 0.0, 0, 0
    for number, (length, back, down) in enumerate(attempts):
        log += [run(now, step), *steps(step + 1, step + length, now)]
        now, step, worked = now + length, step + length, worked + length
        log.append(incident(now, attempt=number))
        now, step = now + down, max(0, step - back)
    found = account([*log, run(now, step)])
    assert found.useful == step
    assert found.useful + found.again == worked
    assert found.wall == pytest.approx(now)
    assert sum(found.parts.values()) == pytest.approx(found.wall)
    assert min(found.parts.values()) > -1e-9
    assert found.failures == len(attempts)
