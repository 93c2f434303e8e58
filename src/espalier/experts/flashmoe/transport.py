"""Transport: messages of tiles, and the events by which a rank learns of them in the order in which they come."""

from __future__ import annotations

import queue
import time
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from espalier.comm.base import Traffic, traffic
from espalier.comm.comm_thread import CommThread


class Transport(Protocol):
    """What a layer needs of the ranks' links."""

    idle: float
    """Seconds in which this rank waited and had nothing to do."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Begins to send; the tensor must not change afterwards."""

    def expect(self, room: Tensor, peer: int, tag: int, event: Hashable) -> None:
        """Begins to receive into `room`; `event` follows. Of one peer, events of even tags come in the order of the
        calls, and so do those of odd ones: these are two lines, of which none waits for the other."""

    def next(self, wait: bool) -> Any:
        """The next event; None where there is none yet and the caller does not `wait`. Raises what a wait raises."""

    def ended(self) -> None:
        """A pass has ended: what was sent in the one before is at its receivers."""


class Messages:
    """Point-to-point messages of a process group. Has state: what is under way, and two threads for each peer that
    wait for rows and for answers (FlashMoE's subscribers)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads: dict[tuple[int, int], CommThread] = {}
        self._leaving: list[tuple[Any, Tensor]] = []
        self._earlier: list[tuple[Any, Tensor]] = []
        self.idle = 0.0

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """See `Transport.send`."""
        with traffic(Traffic.EXPERTS):
            self._leaving.append((self._group.send([tensor], peer, tag), tensor))

    def expect(self, room: Tensor, peer: int, tag: int, event: Hashable) -> None:
        """See `Transport.expect`."""
        line = (peer, tag % 2)
        if line not in self._threads:
            thread = self._threads[line] = CommThread(f"experts from rank {peer}")
            weakref.finalize(self, thread.close)
        with traffic(Traffic.EXPERTS):
            work = self._group.recv([room], peer, tag)
        self._threads[line].put(partial(_tell, work, event, self._events.put))

    def next(self, wait: bool) -> Any:
        """See `Transport.next`."""
        if not wait:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return None
        else:
            begun = time.perf_counter()
            event = self._events.get()
            self.idle += time.perf_counter() - begun
        if isinstance(event, BaseException):
            raise event
        return event

    def ended(self) -> None:
        """See `Transport.ended`."""
        for work, _ in self._earlier:
            work.wait()
        self._earlier, self._leaving = self._leaving, []


def _tell(work: Any, event: Hashable, put: Callable[[Any], None]) -> None:
    """Puts `event` once `work` has ended, or its error."""
    try:
        work.wait()
    except BaseException as error:
        put(error)
        raise
    put(event)
