"""Transport: messages of tiles, the events by which a rank learns of them in the order in which they come, and rows in
eight bits."""

from __future__ import annotations

import queue
import time
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from espalier.comm.base import Traffic, traffic
from espalier.comm.comm_thread import CommThread
from espalier.recipe.errors import UserError


class PeerMessages:
    """Point-to-point messages of a process group. Has state: what is under way, and two threads for each peer that
    wait for rows and for answers (FlashMoE's subscribers).

    Attributes:
        idle: seconds in which this rank waited and had nothing to do.
        near: the ranks that share memory with this one.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.near = frozenset[int]()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads: dict[tuple[int, int], CommThread] = {}
        self._leaving: list[tuple[Any, Tensor]] = []
        self._earlier: list[tuple[Any, Tensor]] = []
        self.idle = 0.0

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Begins to send; the tensor must not change afterwards."""
        with traffic(Traffic.EXPERTS):
            self._leaving.append((self._group.send([tensor], peer, tag), tensor))

    def expect(self, room: Tensor, peer: int, tag: int, event: Hashable) -> None:
        """Begins to receive into `room`; `event` follows. Of one peer, events of even tags come in the order of the
        calls, and so do those of odd ones: these are two lines, of which none waits for the other."""
        line = (peer, tag % 2)
        if line not in self._threads:
            thread = self._threads[line] = CommThread(f"experts from rank {peer}")
            weakref.finalize(self, thread.close)
        with traffic(Traffic.EXPERTS):
            work = self._group.recv([room], peer, tag)
        self._threads[line].put(partial(_tell, work, event, self._events.put))

    def announce(self) -> None:
        """Lets receivers know of all that was sent: this rank will be at work, or wait.

        Here a message announces itself.
        """

    def next(self, wait: bool) -> Any:
        """The next event; None where there is none yet and the caller does not `wait`. Raises what a wait raises."""
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
        """A pass has ended: what was sent in the one before is at its receivers."""
        for work, _ in self._earlier:
            work.wait()
        self._earlier = self._leaving
        self._leaving = []


def _tell(work: Any, event: Hashable, put: Callable[[Any], None]) -> None:
    """Puts `event` once `work` has ended, or its error."""
    try:
        work.wait()
    except BaseException as error:
        put(error)
        raise
    put(event)


class PlainRows:
    """How rows cross the links: as they are."""

    def room(self, count: int, like: Tensor) -> Tensor:
        """Where `count` rows of `like`'s width arrive."""
        return like.new_empty(count, like.shape[1])

    def pack(self, rows: Tensor) -> Tensor:
        """[rows, width] as they are sent: still a row for each, so that they can be permuted."""
        return rows

    def unpack(self, packed: Tensor, like: Tensor) -> Tensor:
        """The rows again, in `like`'s dtype."""
        return packed


class Int8Rows(PlainRows):
    """Eight bits for a value and one float32 scale for a row, of which a half at most is lost. Rows stay as they came
    until the product of their tile reads them (as in DeepSeek-V3, arXiv 2412.19437, section 3.2.2, with fp8), and a row
    with a value that is not finite comes out as NaN."""

    def room(self, count: int, like: Tensor) -> Tensor:
        """uint8 [count, width + 4]."""
        return torch.empty(count, like.shape[1] + 4, dtype=torch.uint8, device=like.device)

    def pack(self, rows: Tensor) -> Tensor:
        """uint8 [rows, width + 4]: codes, then the scale."""
        values = rows.float()
        scale = values.abs().amax(1, keepdim=True).div_(127) if rows.shape[1] else values.new_zeros(len(rows), 1)
        codes = values.div(torch.where(scale > 0, scale, 1.0)).nan_to_num_(0.0).round_().to(torch.int8)
        return torch.cat([codes.view(torch.uint8), scale.view(torch.uint8)], 1)

    def unpack(self, packed: Tensor, like: Tensor) -> Tensor:
        """[rows, width]."""
        scale = packed[:, -4:].contiguous().view(torch.float32)
        return (packed[:, :-4].view(torch.int8) * scale).to(like.dtype)


def row_codec(name: str) -> PlainRows:
    """Raises UserError for a name that is not `exact` or `int8`."""
    if name not in (row_codecs := {"exact": PlainRows, "int8": Int8Rows}):
        raise UserError(
            f"Rows of experts have no codec {name!r}.",
            why="they are permuted as they are sent, so each row is encoded by itself",
            do="exact, or int8",
        )
    return row_codecs[name]()
