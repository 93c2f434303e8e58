"""Ack and Credit: whatever is lost, late or doubled, no number is lost, and none is sent beyond Credit."""

# ruff: noqa: C901, PLR0912  (a scheduler is a list of actions)

from __future__ import annotations

import random

import pytest

from espalier.plan.axes.flow_control import ReceiveWindow, SendWindow

FRAMES, SLOTS = 12, 3


class Worker:
    """A sender whose frames and heartbeats cross a network that loses, delays, doubles and reorders."""

    def __init__(self, slots: int) -> None:
        self.sending, self.receiving = SendWindow(), ReceiveWindow()
        self.receiving.grant(slots)
        self.frames: list[int] = []
        self.beats: list[tuple[int, int]] = [(0, slots)]
        self.received: list[int] = []


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(one, marks=pytest.mark.slow) for one in range(40, 300))])
def test_a_random_scheduler_finds_no_frame_lost_and_none_beyond_credit(seed: int) -> None:
    """Model check of many workers, one node and its slots: every action below is taken at random, and the invariants
    hold after each; then the network is fair, and all frames of all workers arrive once and in order."""
    draw = random.Random(seed)
    workers = {rank: Worker(SLOTS) for rank in range(draw.randint(1, 4))}
    for worker in workers.values():
        for _ in range(FRAMES):
            worker.sending.add()
    freed = 0
    for turn in range(4000):
        fair = turn > 400
        worker = draw.choice(list(workers.values()))
        act = draw.choice(["send", "deliver", "tell", "hear", "resend", "free", "lose"])
        if act == "send" and worker.sending.sendable():
            assert worker.sending.cursor < worker.sending.credit <= freed + SLOTS
            worker.frames.append(worker.sending.cursor)
            worker.sending.cursor += 1
        elif act == "deliver" and worker.frames:
            number = worker.frames.pop(0 if fair else draw.randrange(len(worker.frames)))
            if worker.receiving.accepts(number):  # checks Credit
                worker.received.append(number)
                worker.receiving.arrived()
        elif act == "tell":
            worker.beats.append((worker.receiving.expected, worker.receiving.credit))
        elif act == "hear" and worker.beats:
            place = draw.randrange(len(worker.beats))
            worker.sending.heard(*worker.beats[place])
            if draw.random() < 0.7:  # else it comes twice
                worker.beats.pop(place)
        elif act == "resend":
            worker.sending.resend()
        elif act == "free" and freed < min(one.receiving.expected for one in workers.values()):
            freed += 1
            for one in workers.values():
                one.receiving.grant(freed + SLOTS)
        elif act == "lose" and not fair:
            if worker.frames and draw.random() < 0.5:
                worker.frames.pop(draw.randrange(len(worker.frames)))
            elif worker.beats:
                worker.beats.pop(draw.randrange(len(worker.beats)))
        for one in workers.values():
            assert one.sending.acked <= one.receiving.expected <= one.sending.following
            assert one.sending.acked <= one.sending.cursor <= one.sending.credit
            assert one.receiving.expected <= freed + SLOTS
        assert freed <= min(one.receiving.expected for one in workers.values())
    assert all(one.received == list(range(FRAMES)) for one in workers.values())
    assert freed == FRAMES


def test_heartbeats_that_come_late_change_nothing() -> None:
    window = SendWindow(10)
    for _ in range(4):
        window.add()
    assert window.heard(12, 14)
    window.cursor = 14
    assert not window.heard(11, 12)
    assert (window.acked, window.credit, window.cursor) == (12, 14, 14)
    window.resend()
    assert window.cursor == 12


def test_an_ack_of_what_was_never_sent_is_ignored() -> None:
    window = SendWindow()
    window.add()
    assert not window.heard(2, 5)
    assert window.acked == 0
