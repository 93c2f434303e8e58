"""A rank on another host looks to the policy as one of this machine does."""

from __future__ import annotations

from espalier import encoding
from espalier.errors import RunFailed, UserError, words_of
from espalier.launch import child, distant
from espalier.launch.base import Place
from espalier.launch.exchange import End


def polled(one: distant.Distant) -> list[object]:
    return [found for found in child.endings([one], 0.05) if found is not None]


def test_its_end_wakes_who_polls_and_is_that_of_a_child() -> None:
    one = distant.expected(Place(rank=3))
    assert (one.failed, one.error, one.returned) == (False, None, None)
    one.reap(block=False)
    assert one.status is None
    one.hear(End(3, -9, False))
    one.hear(End(3, 0, True))  # only its first end counts
    assert polled(one) == [one]
    assert one.failed
    assert "Rank 3 was killed (SIGKILL)" in child.died(one).what
    one.kill()
    one.close()


def test_what_it_raised_is_raised_here() -> None:
    for error, raised in ((UserError("bad", why="so", do="that"), ""), (RunFailed("x: KeyError"), "KeyError")):
        words = words_of(error)
        told = ("crashed", words, raised) if raised else ("raised", words)
        there = child.Child(Place(rank=1), -1, -1, -1, encoding.dumps(told), 1)
        one = distant.expected(Place(rank=1))
        one.hear(End.of(there))
        one.reap()
        assert (type(one.error), str(one.error), one.raised) == (type(error), str(error), raised)
        one.close()


def test_a_rank_that_did_its_work_has_not_failed() -> None:
    there = child.Child(Place(rank=1), -1, -1, -1, encoding.dumps(("returned", 5)), 0)
    left = child.Child(Place(rank=1), -1, -1, -1, b"", 0)  # by os._exit(0), without a word
    for child_, failed in ((there, False), (left, True)):
        one = distant.expected(Place(rank=1))
        one.hear(End.of(child_))
        one.reap()
        assert one.failed is failed
        one.close()
