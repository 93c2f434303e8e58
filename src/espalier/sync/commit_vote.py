"""Commit vote: whether all ranks of all members have done something, as one word in the store that is never replaced.

The last to have done it says so, the first to fail says the opposite; who waits looks at the word.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class CommitVote:
    """Whether all ranks of all members have done something. Has state: the answer, once there is one."""

    space: Any
    number: int
    ranks: int
    limit: float
    known: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    done_at: float = math.inf
    begun: float = field(default_factory=time.monotonic)

    def here(self) -> None:
        """This rank has done it."""
        if self.space.add(f"arrived/{self.number}", 1) == self.ranks:
            self.space.compare_set(f"verdict/{self.number}", "", "all")
        self.done_at = time.monotonic()

    def failed(self, error: BaseException) -> None:
        """This rank has not, and nobody has."""
        self.error = self.error or error
        self.space.compare_set(f"verdict/{self.number}", "", "failed")

    def look(self, rank: int) -> bool:
        """Whether there is an answer; of a failure the others learn at once that this rank is alive."""
        if time.monotonic() > self.done_at + self.limit:
            self.failed(RuntimeError(f"the others did not finish exchange {self.number} in {self.limit:g} s"))
        word = f"verdict/{self.number}"
        if not self.space.check([word]):
            return False
        if self.space.get(word) != b"all":
            self.space.set(f"left/{rank}", "")
            self.error = self.error or RuntimeError(f"exchange {self.number} did not reach every member")
        self.known.set()
        return True

    def wait(self, heard: Callable[[], float]) -> None:
        """Returns when all have done it. Raises what went wrong; TimeoutError when the store, last `heard` from then
        (monotonic seconds), does not answer any more: a question to a server that was cut off never returns."""
        while not self.known.wait(1.0):
            silent = time.monotonic() - max(heard(), self.begun)
            if silent > self.limit + 1.0:
                raise TimeoutError(f"the store has not answered for {silent:.0f} s")
        if self.error is not None:
            raise self.error
