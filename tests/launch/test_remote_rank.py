"""A rank on another host looks to the policy as one of this machine does."""

from __future__ import annotations

from espalier.launch.hosts import leader
from espalier.launch.hosts.supervisor_protocol import End
from espalier.launch.ranks import rank_process
from espalier.recipe import serialization
from espalier.recipe.errors import RunFailed, UserError, words_of
from espalier.train.rank_spec import RankSpec


def polled(one: leader.Distant) -> list[object]:
    return [found for found in rank_process.endings([one], 0.05) if found is not None]


def test_its_end_wakes_who_polls_and_is_that_of_a_child() -> None:
    one = leader.expected(RankSpec(rank=3))
    assert (one.failed, one.error, one.returned) == (False, None, None)
    one.reap(block=False)
    assert one.status is None
    one.hear(End(3, -9, False))
    one.hear(End(3, 0, True))  # only its first end counts
    assert polled(one) == [one]
    assert one.failed
    assert "Rank 3 was killed (SIGKILL)" in rank_process.died(one).what
    one.kill()
    one.close()


def test_what_it_raised_is_raised_here() -> None:
    for error, raised in ((UserError("bad", why="so", do="that"), ""), (RunFailed("x: KeyError"), "KeyError")):
        words = words_of(error)
        told = ("crashed", words, raised) if raised else ("raised", words)
        there = rank_process.Child(RankSpec(rank=1), -1, -1, -1, serialization.dumps(told), 1)
        one = leader.expected(RankSpec(rank=1))
        one.hear(End.of(there))
        one.reap()
        assert (type(one.error), str(one.error), one.raised) == (type(error), str(error), raised)
        one.close()


def test_a_rank_that_did_its_work_has_not_failed() -> None:
    there = rank_process.Child(RankSpec(rank=1), -1, -1, -1, serialization.dumps(("returned", 5)), 0)
    left = rank_process.Child(RankSpec(rank=1), -1, -1, -1, b"", 0)  # by os._exit(0), without a word
    for child_, failed in ((there, False), (left, True)):
        one = leader.expected(RankSpec(rank=1))
        one.hear(End.of(child_))
        one.reap()
        assert one.failed is failed
        one.close()
