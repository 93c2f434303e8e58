"""A rank that stops counting is dead after the silence, one that says so at once, and one that counts never is."""

from __future__ import annotations

import os
import signal
import time

import pytest
from torch._C._distributed_c10d import HashStore

from espalier.comm import store_client
from espalier.launch.ranks.store_server import served
from espalier.mechanisms.local_rounds.membership import MemberHeartbeats

SILENCE = 0.4


def watched(beats: MemberHeartbeats, ranks: list[int], seconds: float) -> tuple[list[int], float]:
    """Who is silent first, looking all the while, and after how long."""
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        if found := beats.silent(ranks):
            return found, time.monotonic() - began
        time.sleep(0.02)
    return [], seconds


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def test_who_counts_is_alive(store: HashStore) -> None:
    mine, other = MemberHeartbeats(store, 0, SILENCE), MemberHeartbeats(store, 1, SILENCE)
    assert watched(mine, [1], 3 * SILENCE)[0] == []
    other.close()
    mine.close()


def test_who_has_ended_is_dead_at_once(store: HashStore) -> None:
    mine, other = MemberHeartbeats(store, 0, 60.0), MemberHeartbeats(store, 1, 60.0)
    assert mine.silent([1]) == []
    other.close()
    assert mine.silent([1]) == [1]
    mine.close()


def test_who_was_never_heard_is_dead_after_the_silence(store: HashStore) -> None:
    mine = MemberHeartbeats(store, 0, SILENCE)
    found, took = watched(mine, [1, 2], 10 * SILENCE)
    assert found == [1, 2]
    assert took >= SILENCE
    mine.close()


def test_what_happened_while_nobody_looked_is_held_against_nobody(store: HashStore) -> None:
    mine = MemberHeartbeats(store, 0, SILENCE)
    store.set("outer/alive/1", b"7")
    assert mine.silent([1]) == []
    time.sleep(1.5 * SILENCE)  # as when this process was stopped itself
    assert mine.silent([1]) == []
    mine.close()


def test_a_stopped_process_is_silent_and_one_that_goes_on_is_not() -> None:
    with served() as port:
        child = os.fork()
        if child == 0:
            MemberHeartbeats(store_client.connect("127.0.0.1", port, 20.0), 1, SILENCE)
            time.sleep(60)
            os._exit(0)
        store = store_client.connect("127.0.0.1", port, 20.0)
        mine = MemberHeartbeats(store_client.clone(store), 0, SILENCE)
        try:
            store.get("outer/alive/1")
            assert watched(mine, [1], 2 * SILENCE)[0] == []
            os.kill(child, signal.SIGSTOP)
            assert watched(mine, [1], 20 * SILENCE)[0] == [1]
            os.kill(child, signal.SIGCONT)
            time.sleep(SILENCE)
            assert mine.silent([1]) == []
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            mine.close()
