from dataclasses import replace

from espalier.resilience.hang import Vital, Watcher
from espalier.resilience.pulse import Sign

SIGN = Sign(beat=100.0, moved=100.0, doing="stepping", usual=0.1, step=5, resumed=0, first=90.0, asked=0.0)
IDLE = Vital(3.0, "S")


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


def test_one_busy_rank_is_enough_to_wait_a_minute():
    busy = lambda now: [IDLE, Vital(3.0 + now, "S")]  # noqa: E731
    when, _ = found([SIGN, SIGN], busy, 300)
    assert 60 <= when - SIGN.moved <= 62


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


def test_starting_and_saving_may_take_longer():
    for doing, least in (("starting", 30), ("elsewhere", 60)):
        when, _ = found([SIGN, replace(SIGN, doing=doing)], [IDLE, IDLE], 300)
        assert least <= when - SIGN.moved < least + 1
        busy = lambda now: [IDLE, Vital(now, "R")]  # noqa: E731
        assert found([SIGN, replace(SIGN, doing=doing)], busy, 1000) is None


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
