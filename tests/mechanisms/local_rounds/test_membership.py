"""Members that die, fall silent or are slow, as processes: the others go on as one, and nobody waits without end."""

from __future__ import annotations

import os
import signal

import pytest
from processes import crew, crew_and_store


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["co2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("streaming_diloco", "diloco"))]
)
def test_one_of_four_is_killed_and_the_rest_finish_as_one(method: str) -> None:
    with crew(4, method, 40) as members:
        members[2].reach("round 6")
        members[2].send(signal.SIGKILL)
        said = [members[index].last() for index in (0, 1, 3)]
    assert len({line.split()[0] for line in said}) == 1, "the survivors' parameters are the same bits"
    assert all("lost (2,) left (0, 1, 3)" in line for line in said)


@pytest.mark.slow
def test_all_but_one_are_killed_and_it_finishes_alone() -> None:
    with crew(3, "co2", 30) as members:
        members[1].reach("round 4")
        members[0].send(signal.SIGKILL)
        members[1].reach("round 12")
        members[2].send(signal.SIGKILL)
        said = members[1].last()
    assert "lost (0,) left (1, 2)" in said
    assert "lost (2,) left (1,)" in said


@pytest.mark.slow
def test_a_member_that_stands_still_is_given_up_and_told_so() -> None:
    with crew(3, "co2", 30, pause=0.005) as members:
        members[0].reach("round 5")
        members[1].send(signal.SIGSTOP)
        said = [members[index].last() for index in (0, 2)]
        assert said[0].split()[0] == said[1].split()[0]
        members[1].send(signal.SIGCONT)
        assert "Replica 1" in members[1].last(code=7)


def test_without_faults_all_are_one() -> None:
    with crew(3, "co2", 12, pause=0.0) as members:
        said = {one.last() for one in members}
    assert len(said) == 1


@pytest.mark.slow
def test_a_store_that_falls_silent_is_not_waited_for_for_ever() -> None:
    with crew_and_store(2, "co2", 10_000) as (members, store):
        members[0].reach("round 5")
        os.kill(store.pid, signal.SIGSTOP)  # as where the link to its host is cut: no answer, and no end
        said = [one.last(code=7) for one in members]
    assert all("lost its connections to the other replicas and to the store" in line for line in said)
