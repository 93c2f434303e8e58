"""A rank that stays: when another was replaced, it is called to meet all of them anew, in the process where it is.

A call comes through a pipe, in a thread of its own, as the rank itself may wait for the one that is gone. No torch.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from espalier.errors import HostLost, PeerLost
from espalier.resilience.base import kind_of

if TYPE_CHECKING:
    from espalier.launch.base import Place, Task

PATIENCE = 5.0
"""Seconds in which a rank that lost another is called, or ends too."""


@dataclass(frozen=True)
class Call:
    """Where all meet next: the number of the attempt, and the address of its store."""

    attempt: int
    host: str
    port: int


class Recall:
    """The end of the line at which a rank listens. Has state: the thread, the newest call, and what lets a wait end.

    Args:
        file: descriptor to read; -1: nobody calls.
    """

    def __init__(self, file: int = -1) -> None:
        self._file = file
        self._call: Call | None = None
        self._release: Callable[[], None] = _nothing
        self.called = threading.Event()
        """Set from a call to its `answer`."""

    def listen(self) -> None:
        """Begins to, until the process ends."""
        if self._file >= 0:
            threading.Thread(target=self._listen, name="recall", daemon=True).start()

    def released_by(self, release: Callable[[], None]) -> None:
        """Calls `release` when a call comes, in another thread: it makes this rank's waits for others fail."""
        self._release = release

    def answer(self, seconds: float = PATIENCE) -> Call | None:
        """The call, waiting for it as long; None where there was none."""
        if self._file < 0 or not self.called.wait(seconds):
            return None
        self.called.clear()
        self._release = _nothing
        return self._call

    def _listen(self) -> None:
        rest = b""
        while part := os.read(self._file, 4096):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                self._call = Call(**json.loads(line))
                self.called.set()
                self._release()


def _nothing() -> None:
    """Where there is nothing to release."""


NOBODY = Recall()
"""Of ranks that are never called."""


def tell(file: int, call: Call) -> None:
    """Calls the rank at the other end of `file`. One that is gone is not missed."""
    try:
        os.write(file, json.dumps(asdict(call)).encode() + b"\n")
    except OSError:
        return


def staying(task: Task, place: Place) -> Any:
    """What `task` returns, begun anew at another place in this process whenever this rank lost others and is called."""
    while True:
        try:
            return task(place)
        except Exception as error:
            if not is_loss(error):
                raise
            place.pulse.stands()
            call = place.recall.answer()
            if call is None:
                raise
        place.pulse.starts()
        gc.collect()  # the groups of the attempt that is over, before there are others
        place = replace(
            place, attempt=call.attempt, host=call.host, port=call.port, serves=False, listen_fd=-1
        )  # fmt: skip


def is_loss(error: BaseException) -> bool:
    """Whether an error says only that other ranks are gone."""
    if isinstance(error, PeerLost):
        return not isinstance(error, HostLost)
    return kind_of(type(error).__name__, 1) == "lost" or "gloo/transport" in str(error)
