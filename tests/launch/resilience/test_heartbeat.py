import os
import signal
import time
from types import SimpleNamespace

import pytest

from espalier.train import heartbeat as pulse_module
from espalier.train.heartbeat import SILENT, Pulses


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.nanoseconds = 1_000_000_000

    def passes(self, seconds: float) -> None:
        self.nanoseconds += round(1e9 * seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pulse_module, "time", SimpleNamespace(monotonic_ns=lambda: made.nanoseconds))
    return made


def test_a_host_without_ranks_has_no_signs_of_life() -> None:
    assert Pulses(0, 1.0).read() == []


def test_what_a_fork_shows_is_read_here_even_after_it_was_killed():
    pulses = Pulses(3, 0.02)
    pid = os.fork()
    if pid == 0:
        pulse = pulses.of(1)
        pulse.beat()
        pulse.begins(4)
        pulse.stepped(5)
        pulse.asked()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    before, shown, after = pulses.read()
    assert before == after
    assert (shown.resumed, shown.step, shown.doing) == (4, 5, "stepping")
    assert 0 < shown.first <= shown.asked < shown.beat < time.monotonic()


def test_the_first_step_does_not_count_as_a_usual_one(clock):
    pulses = Pulses(1, 1.0)
    pulse = pulses.of(0)
    pulse.begins(0)
    clock.passes(0.3)
    pulse.stepped(1)
    assert pulses.read()[0].usual == 0
    clock.passes(0.01)
    pulse.stepped(2)
    assert pulses.read()[0].usual == 0.01


def test_a_rank_that_waits_for_a_peer_it_does_not_hear_has_moved_and_that_is_no_part_of_its_step(clock):
    pulses = Pulses(1, 1.0)
    pulse = pulses.of(0)
    for _ in range(2):
        clock.passes(0.01)
        pulse.stepped(1)
    clock.passes(5.0)
    pulse.reconnects()
    assert pulses.read()[0].moved == pytest.approx(1e-9 * clock.nanoseconds)
    clock.passes(0.01)
    pulse.stepped(2)
    assert pulses.read()[0].usual == pytest.approx(0.01)
    SILENT.reconnects()


def test_waits_are_averaged_like_steps():
    pulses = Pulses(1, 1.0)
    pulse = pulses.of(0)
    for step in range(1, 60):
        pulse.stepped(step, waited=0.25)
    assert abs(pulses.read()[0].waited - 0.25) < 1e-6


def test_time_spent_elsewhere_is_no_part_of_a_step(clock):
    pulses = Pulses(1, 1.0)
    pulse = pulses.of(0)
    pulse.stepped(1)
    with pulse.elsewhere():
        assert pulses.read()[0].doing == "elsewhere"
        clock.passes(0.3)
    clock.passes(0.01)
    pulse.stepped(2)
    assert pulses.read()[0].usual == 0.01
    assert pulses.read()[0].doing == "stepping"


def test_a_rank_that_nobody_watches_shows_nothing():
    SILENT.beat()
    SILENT.begins(1)
    SILENT.stepped(2)
    SILENT.asked()
    SILENT.leaves()
    with SILENT.elsewhere():
        pass


def test_what_a_rank_showed_elsewhere_is_read_as_its_own() -> None:
    from espalier.train.heartbeat import Sign

    shared = Pulses(3, 1.0)
    sign = Sign(5.5, 4.25, "storing", 0.125, 7, 3, 4.0, 2.0, True, 0.0625)
    shared.show(1, sign)
    assert shared.read()[1] == sign
    assert shared.read()[0].step == shared.read()[2].step == 0


def test_a_rank_that_stays_shows_that_it_waits_and_then_that_it_begins() -> None:
    pulses = Pulses(2, 1.0)
    for rank in range(2):
        pulses.of(rank).stepped(3)
        pulses.of(rank).stepped(4, waited=0.5)
    pulses.of(1).stands()
    standing = pulses.read()[1]
    assert (standing.doing, standing.first, standing.usual, standing.step) == ("standing", 0.0, 0.0, 4)
    pulses.of(1).starts()
    assert pulses.read()[1].doing == "starting"
    assert pulses.read()[0].doing == "stepping"
    pulses.begin(time.monotonic())
    assert [(sign.doing, sign.first, sign.waited) for sign in pulses.read()] == [("starting", 0.0, 0.0)] * 2
    SILENT.stands()
    SILENT.starts()
