"""A supervisor that does not lead does as it is told, reports, and leaves nobody behind."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from espalier.launch.hosts.follower import Follower
from espalier.launch.hosts.host_map import HostMap
from espalier.launch.hosts.supervisor_protocol import Command, ControlLink, MeetingPoint, Report
from espalier.launch.ranks.agent import LocalAgent, Signals, passing_on_signals
from espalier.launch.ranks.supervisor import RestartOptions
from espalier.recipe.errors import HostLost


def follower(line: MeetingPoint, task: Any, signals: Signals) -> Follower:
    team = HostMap(line, ("a", "b"), (0, 1))
    return Follower([team.place(1)], team, RestartOptions(heartbeat=line.heartbeat), LocalAgent(task, signals))


def said(leader: ControlLink, holds: Any, within: float = 20.0) -> Report:
    deadline = time.monotonic() + within
    while leader.said(1) is None or not holds(leader.said(1)):
        assert time.monotonic() < deadline, leader.said(1)
        time.sleep(0.01)
    return leader.said(1)


def test_it_forks_reports_and_ends_its_ranks_as_it_is_told(port: int) -> None:
    line = MeetingPoint(0, 2, "127.0.0.1", port, "it", 0.2)
    leader = ControlLink(line, Report).begin(Command())
    heard: list[Report] = []

    def lead() -> None:
        leader.tell(Command(1, run=True))
        heard.append(said(leader, lambda one: one.attempt == 1 and one.living and one.signs[0].beat >= 0))
        leader.tell(Command(1))
        heard.append(said(leader, lambda one: one.attempt == 1 and not one.living))
        leader.tell(Command(2, run=True))
        heard.append(said(leader, lambda one: one.attempt == 2 and one.ends))
        leader.tell(Command(2, over=True))
        heard.append(said(leader, lambda one: one.left))

    thread = threading.Thread(target=lead)
    thread.start()
    seat = MeetingPoint(1, 2, line.address, line.port, "it", 0.2)
    with passing_on_signals() as signals:
        task = lambda place: time.sleep(30.0 if place.attempt == 0 else 0.0) or 10 * place.rank  # noqa: E731
        returned = follower(seat, task, signals).run()
    thread.join(20)
    leader.close()
    assert returned == [10]
    assert [one.attempt for one in heard] == [1, 1, 2, 2]
    assert heard[2].ends[0].well


def test_a_leader_whose_store_is_gone_is_given_up_in_three_heartbeats() -> None:
    seat = MeetingPoint(1, 2, "127.0.0.1", 1, "it", 0.2)  # nobody listens at port 1
    begun = time.monotonic()
    with passing_on_signals() as signals, pytest.raises(HostLost, match="Host a, which leads the run"):
        follower(seat, lambda place: None, signals).run()
    assert 0.6 <= time.monotonic() - begun < 15


def test_a_supervisor_in_place_of_another_begins_with_the_attempt_after_the_one_that_runs(port: int) -> None:
    line = MeetingPoint(0, 2, "127.0.0.1", port, "it", 0.2)
    leader = ControlLink(line, Report).begin(Command(3, run=True, lives=(0, 0)))
    heard: list[Report] = []

    def lead() -> None:
        heard.append(said(leader, lambda one: one.attempt == 3))
        leader.tell(Command(4, run=True, lives=(0, 1)))
        heard.append(said(leader, lambda one: one.attempt == 4 and one.ends))
        leader.tell(Command(4, over=True, lives=(0, 1)))

    thread = threading.Thread(target=lead)
    thread.start()
    seat = MeetingPoint(1, 2, line.address, line.port, "it", 0.2, life=1)
    with passing_on_signals() as signals:
        returned = follower(seat, lambda place: place.attempt, signals).run()
    thread.join(20)
    leader.close()
    assert returned == [3], "of the second of the two orders"
    assert [(one.life, one.living) for one in heard] == [(1, False), (1, True)]


def test_a_supervisor_whose_place_was_taken_leaves(port: int) -> None:
    line = MeetingPoint(0, 2, "127.0.0.1", port, "it", 0.2)
    leader = ControlLink(line, Report).begin(Command(2, run=True, lives=(0, 2)))
    seat = MeetingPoint(1, 2, line.address, line.port, "it", 0.2, life=1)
    with passing_on_signals() as signals, pytest.raises(HostLost, match="taken the place of this one on host b"):
        follower(seat, lambda place: None, signals).run()
    leader.close()
