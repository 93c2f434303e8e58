"""Heartbeats among members, through the store where they met: a stopped process sends no message and closes no
connection, so its peers would wait for as long as a message may take.

A thread counts in the store for as long as its process runs and its main thread lives; who waits for the others looks
whether they still count. Seconds are those of the clock of who looks, so no two clocks are compared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

SHARE = 8
"""Beats in the time after which silence is death: a busy machine may delay some of them."""
_GONE = b"gone"


class MemberHeartbeats:
    """This rank's signs of life, and what it sees of the others'. Has state: a thread, and when each was last heard.

    Args:
        store: a connection of its own, as a thread writes to it.
        rank: this rank's number among all ranks of all members.
        silence: seconds after which a rank that gives no sign counts as dead.
    """

    def __init__(self, store: Any, rank: int, silence: float) -> None:
        self.silence = silence
        self._store, self._rank = store, rank
        self._ended = threading.Event()
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._looked = 0.0
        self._beat(b"0")
        # No daemon: one that is in the store when the interpreter ends would bring the process down.
        threading.Thread(target=self._live, name="espalier-beats").start()

    def silent(self, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` that have ended, or gave no sign for `silence` seconds. Call it again and again while they
        are waited for: what happened between two calls far apart is not held against them."""
        now = time.monotonic()
        fresh, self._looked = now - self._looked < self.silence, now
        found = []
        for rank in ranks:
            count = self._store.get(_key(rank)) if self._store.check([_key(rank)]) else b""
            before, since = self._heard.get(rank, (None, now))
            if count != before or not fresh:
                self._heard[rank] = count, now
            elif now - since > self.silence:
                found.append(rank)
            if count == _GONE:
                found.append(rank)
        return found

    def close(self) -> None:
        """Says that this rank has ended."""
        self._ended.set()
        self._beat(_GONE)

    def _live(self) -> None:
        count = 0
        while not self._ended.wait(self.silence / SHARE):
            if not threading.main_thread().is_alive():  # it raised, and the process is on its way out
                self.close()
                return
            count += 1
            self._beat(str(count).encode())

    def _beat(self, word: bytes) -> None:
        try:
            self._store.set(_key(self._rank), word)
        except RuntimeError:  # the store is gone: whoever waits finds out by itself
            self._ended.set()


def _key(rank: int) -> str:
    return f"outer/alive/{rank}"
