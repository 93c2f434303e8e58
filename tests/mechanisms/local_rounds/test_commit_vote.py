"""One word for all: the first to fail decides, the last to arrive does, and nobody waits for a store that is gone."""

from __future__ import annotations

import time

import pytest
from torch._C._distributed_c10d import HashStore

from espalier.mechanisms.local_rounds.membership import CommitVote


def two() -> tuple[CommitVote, CommitVote]:
    store = HashStore()
    return CommitVote(store, 1, 2, 30.0), CommitVote(store, 1, 2, 30.0)


def test_it_is_done_when_the_last_has_done_it() -> None:
    first, last = two()
    first.arrive()
    assert not first.look(0)
    last.arrive()
    assert first.look(0)
    assert last.look(1)
    first.wait(time.monotonic)


def test_a_failure_stands_and_the_others_learn_who_lives() -> None:
    first, last = two()
    first.failed(ValueError("torn"))
    last.arrive()
    first.arrive()
    assert last.look(1)
    with pytest.raises(RuntimeError, match="did not reach every member"):
        last.wait(time.monotonic)
    assert last.space.check(["left/1"])
    assert first.look(0)
    with pytest.raises(ValueError, match="torn"):
        first.wait(time.monotonic)


def test_a_store_that_no_longer_answers_is_not_waited_for() -> None:
    gone = CommitVote(HashStore(), 1, 2, limit=-1.0)
    with pytest.raises(TimeoutError, match="store has not answered"):
        gone.wait(lambda: 0.0)
