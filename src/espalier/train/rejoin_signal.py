"""Rejoin signal: after a peer was restarted, the supervisor tells a surviving rank to rebuild its process group in
place.

A call comes through a pipe, in a thread of its own, as the rank itself may wait for the one that is gone. No torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from espalier.recipe.errors import HostLost, PeerLost
from espalier.train.failure import kind_of

PATIENCE = 5.0
"""Seconds in which a rank that lost another is called, or ends too."""


@dataclass(frozen=True)
class Call:
    """Where all meet next: the number of the attempt, and the address of its store.

    `gone`: ranks that were lost; `later`: the others go on without them, and come at the end of a round;
    `between_failures`: seconds, as `checkpoint.shared_memory` has them, on which all ranks must agree.
    """

    attempt: int
    host: str
    port: int
    gone: tuple[int, ...] = ()
    later: bool = False
    between_failures: float = 0.0


class Recall:
    """The end of the line at which a rank listens. Has state: the thread, the newest call, and what lets a wait end.

    Args:
        file: descriptor to read; -1: nobody calls.
    """

    def __init__(self, file: int = -1) -> None:
        self._file = file
        self._call: Call | None = None
        self.gone: frozenset[int] = frozenset()
        """Ranks that are known to be lost."""
        self.look: Callable[[], None]
        """Learns, while it can, what is to be released."""
        self.released_by(lambda whole: None)
        self.answered = False
        """Whether this rank has ever stayed."""
        self.called = threading.Event()
        """Set from a call to its `answer`."""

    def listen(self) -> None:
        """Begins to, until the process ends."""
        if self._file >= 0:
            threading.Thread(target=self._listen, name="recall", daemon=True).start()

    def release(self) -> None:
        """Makes this rank's waits for others fail."""
        self._release(True)

    def released_by(self, release: Callable[[bool], None], look: Callable[[], None] = lambda: None) -> None:
        """Calls `release` when a call comes, in another thread, with whether all have to leave at once: then it makes
        each wait of this rank for others fail, else those that cannot go on without one of them. `look` is called now
        and then, to learn which those are."""
        self._release = release
        self.look = look

    def goes_on(self) -> bool:
        """Whether this rank, which has just lost another, goes on without it to the end of a round."""
        return self._file >= 0 and self.called.wait(PATIENCE) and self._call is not None and self._call.later

    def answer(self, seconds: float = PATIENCE) -> Call | None:
        """The call, waiting for it as long; None where there was none."""
        if self._file < 0 or not self.called.wait(seconds):
            return None
        self.called.clear()
        self.answered = True
        self.released_by(lambda whole: None)
        self.gone = frozenset()
        return self._call

    def _listen(self) -> None:
        rest = b""
        while part := os.read(self._file, 4096):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                self._call = msgspec.json.decode(line, type=Call)
                self.gone |= frozenset(self._call.gone)
                self._release(not self._call.later)
                self.called.set()  # last: what this rank connects to from then on is not to be released


def tell(file: int, call: Call) -> None:
    """Calls the rank at the other end of `file`. One that is gone is not missed."""
    try:
        os.write(file, msgspec.json.encode(call) + b"\n")
    except OSError:
        return


def is_loss(error: BaseException) -> bool:
    """Whether an error says only that other ranks are gone."""
    if isinstance(error, PeerLost):
        return not isinstance(error, HostLost)
    return kind_of(type(error).__name__, 1) == "lost" or "gloo/transport" in str(error)
