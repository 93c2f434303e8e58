from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.launch.resilience.hang_detector import Vital, Watcher
from espalier.train.heartbeat import Sign

SIGN = Sign(beat=100.0, moved=100.0, doing="stepping", usual=0.1, step=5, resumed=0, first=90.0, asked=0.0)
IDLE = Vital(3.0, "S")
STEPS = ("stepping", "validating")
LIMITS = {
    "starting": 30, "standing": 30, "stepping": 30, "validating": 30, "saving": 30, "elsewhere": 60, "storing": 7200,
}  # fmt: skip

SIMULATED = sorted(LIMITS.keys() - {"storing"})  # its two hours are long at short beats


def found(signs, vitals, until, watcher=None):
    """(when, what) is found, looking twice a second from second 100 on; both may be functions of time."""
    watcher = watcher or Watcher(1.0)
    now = 100.0
    while now <= until:
        shown = signs(now) if callable(signs) else [replace(sign, beat=now) for sign in signs]
        finding = watcher.look(now, shown, vitals(now) if callable(vitals) else vitals)
        if finding is not None:
            return now, finding
        now += 0.5
    return None


def test_a_run_in_which_nobody_does_anything_hangs_within_three_heartbeats():
    when, finding = found([SIGN, SIGN], [IDLE, IDLE], 200)
    assert finding.kind == "hang"
    assert when - SIGN.moved <= 3.0


def test_a_rank_that_computes_is_never_a_hang():
    busy = lambda now: [IDLE, Vital(3.0 + now, "S")]  # noqa: E731
    assert found([SIGN, SIGN], busy, 20_000) is None


def test_where_waits_take_cpu_time_a_run_that_computes_is_judged_by_its_usual_steps():
    busy = lambda now: [IDLE, Vital(3.0 + now, "S")]  # noqa: E731
    when, finding = found([SIGN, SIGN], busy, 300, Watcher(1.0, spins=True))
    assert 60 <= when - SIGN.moved <= 62
    assert finding.why.endswith("while one usually takes 0.1 s")


@pytest.mark.parametrize("spins", [False, True])
def test_until_two_steps_are_known_starting_s_allowance_holds(spins):
    new, busy = replace(SIGN, usual=0.0), lambda now: [IDLE, Vital(3.0 + now, "S")]
    assert found([new, new], busy, 7000, Watcher(1.0, spins=spins)) is None
    when, finding = found([new, new], [IDLE, IDLE], 300, Watcher(1.0, spins=spins))
    assert 30 <= when - SIGN.moved < 31
    assert "usually" not in finding.why
    slow = found([new, new], busy, 8000, Watcher(1.0, spins=spins))
    assert slow is None if not spins else "no usual one is known" in slow[1].why


def test_a_rank_that_starves_or_waits_for_a_disk_is_not_idle():
    for state in "RD":
        assert found([SIGN, SIGN], [IDLE, Vital(3.0, state)], 150) is None


def test_a_beat_that_is_met_running_now_and_then_is_no_work():
    beating = lambda now: [IDLE, Vital(3.0, "R" if now % 1.0 == 0 else "S")]  # noqa: E731
    when, _ = found([SIGN, SIGN], beating, 200)
    assert when - SIGN.moved <= 3.0


def test_slow_steps_are_waited_for():
    slow = replace(SIGN, usual=3.0)
    when, _ = found([slow, SIGN], [IDLE, IDLE], 200)
    assert 15 <= when - SIGN.moved < 16


@pytest.mark.parametrize(
    ("doing", "least"), [("starting", 30), ("standing", 30), ("saving", 30), ("elsewhere", 60), ("storing", 7200)]
)
def test_each_phase_has_its_allowance_of_idleness(doing, least):
    when, _ = found([SIGN, replace(SIGN, doing=doing)], [IDLE, IDLE], 8000)
    assert least <= when - SIGN.moved < least + 1
    busy = lambda now: [IDLE, Vital(now, "R")]  # noqa: E731
    assert found([SIGN, replace(SIGN, doing=doing)], busy, 1000) is None


def test_a_sleeper_in_validation_is_found_within_three_heartbeats():
    for sign in (replace(SIGN, doing="validating"), SIGN):
        when, _ = found([sign, replace(SIGN, doing="validating")], [IDLE, IDLE], 200)
        assert when - SIGN.moved <= 3.0


def test_who_reads_or_writes_files_is_not_idle():
    reads = lambda now: [IDLE, Vital(3.0, "S", round(1e6 * now))]  # noqa: E731
    assert found([SIGN, replace(SIGN, doing="saving")], reads, 1000) is None
    records = lambda now: [IDLE, Vital(3.0, "S", round(5e3 * now))]  # noqa: E731
    assert found([SIGN, SIGN], records, 1000) is not None


@given(
    phases=st.lists(
        st.tuples(st.sampled_from(SIMULATED), st.floats(0.1, 400.0), st.sampled_from(["cpu", "disk", "io"])),
        min_size=1, max_size=5,
    ),
    heartbeat=st.floats(0.2, 5.0),
    usual=st.just(0.0) | st.floats(0.001, 30.0),
    ranks=st.integers(1, 3),
    who=st.integers(0, 2),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_in_every_phase_a_sleeper_is_found_in_time_and_a_worker_never(phases, heartbeat, usual, ranks, who):
    """Phases of work of any length, in simulated time; in the last one all fall asleep at its end."""
    watcher, who = Watcher(heartbeat), who % ranks
    now, cpu, io = 1000.0, 1.0, 0

    def look(doing, moved, state):
        signs = [replace(SIGN, doing=doing, usual=usual, moved=moved, beat=now)] * ranks
        vitals = [IDLE] * ranks
        vitals[who] = Vital(cpu, state, io)
        return watcher.look(now, signs, vitals)

    moved = now
    for doing, seconds, work in phases:
        moved, until = now, now + seconds
        while now < until:
            assert look(doing, moved, "D" if work == "disk" else "S") is None, (doing, now - moved)
            now += heartbeat / 2
            cpu += 0.3 * heartbeat * (work == "cpu")
            io += round(2e5 * heartbeat) * (work == "io")
    asleep = now
    limit = max(2.5 * heartbeat, 5 * usual if usual and LIMITS[doing] == 30 and doing in STEPS else LIMITS[doing])
    while (finding := look(doing, moved, "S")) is None:
        now += heartbeat / 2
        assert now - asleep <= limit + 3 * heartbeat, doing
    assert finding.kind == "hang"


def test_saving_over_a_slow_network_is_no_hang():
    storing = replace(SIGN, doing="storing")
    assert found([SIGN, storing], [IDLE, IDLE], 7200) is None
    assert found([SIGN, storing], [IDLE, IDLE], 7400) is not None


def test_steps_are_progress():
    assert found(lambda now: [replace(SIGN, beat=now, moved=now - 0.3)], [IDLE], 300) is None


def test_ranks_that_are_leaving_hang_never():
    assert found([replace(SIGN, doing="leaving")], [IDLE], 1000) is None


def test_a_stopped_rank_is_found_after_a_heartbeat():
    when, finding = found(lambda now: [replace(SIGN, beat=100.0), SIGN], [Vital(1.0, "T"), IDLE], 200)
    assert (finding.kind, finding.rank) == ("stopped", 0)
    assert when - 100 <= 1.5


def test_what_was_stopped_together_with_its_supervisor_is_not_blamed():
    watcher = Watcher(1.0)
    assert watcher.look(100.0, [SIGN], [IDLE]) is None
    assert watcher.look(400.0, [SIGN], [Vital(3.0, "T")]) is None
    assert watcher.look(400.5, [SIGN], [IDLE]) is None


def test_patience_doubles_every_limit():
    when, _ = found([SIGN], [IDLE], 200, Watcher(1.0, patience=4.0))
    assert when - SIGN.moved == 10.0
