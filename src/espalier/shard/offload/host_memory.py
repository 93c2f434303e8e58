"""Host memory: optimizer states of a GPU in pinned memory, copied to it and back extent by extent in a step.

Copies in and out have a stream each, so that they run beside computation and beside one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from espalier.optim.base import Owned, StateKinds
from espalier.shard.offload.layout import BUFFERS, CHUNK, Extent
from espalier.shard.offload.optimizer import OffloadedGroup, lay_out
from espalier.shard.offload.state_file import Job, TransferMeter, job_bytes, job_views


class HostStates:
    """Where the states of a device wait. Has state: what was copied. See `optimizer.StateFolder`."""

    def __init__(self, device: torch.device, chunk: int = CHUNK) -> None:
        self._device, self._chunk, self.meter = device, chunk, TransferMeter("host")

    def group(self, optimizer: torch.optim.Optimizer, owned: Sequence[Owned], kinds: StateKinds) -> OffloadedGroup:
        """See `optim.base.MakeGroup`."""
        found = lay_out(owned, len(kinds.shaped), self._chunk if kinds.batches is None else None)
        return OffloadedGroup(optimizer, owned, kinds, HostMemory(found, self._device, self.meter))


class HostMemory:
    """Extents in pinned memory, all zeros at first; see `state_file.States`. Has state: the memory and the streams."""

    def __init__(self, extents: Sequence[Extent], device: torch.device, meter: TransferMeter) -> None:
        self.extents, self._device, self._meter = list(extents), device, meter
        cuda = device.type == "cuda"
        self._memory = torch.zeros(sum(extent.bytes for extent in extents), dtype=torch.uint8, pin_memory=cuda)
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if cuda else None

    def walk(self, jobs: Sequence[Job]) -> Iterator[list[Tensor]]:
        """See `States.walk`; what is given lies on the device."""
        room = max((job_bytes(job) for job in jobs), default=0)
        buffers = [torch.empty(room, dtype=torch.uint8, device=self._device) for _ in range(min(BUFFERS, len(jobs)))]
        views = [job_views(job, buffers[number % BUFFERS]) for number, job in enumerate(jobs)]
        ahead = self._copy(0, jobs[0], views[0]) if jobs else _nothing
        for number, (job, view) in enumerate(zip(jobs, views, strict=True)):
            ahead()
            if number + 1 < len(jobs):
                ahead = self._copy(0, jobs[number + 1], views[number + 1])
            yield view
            self._copy(1, job, view)
        if self._streams is not None:
            self._streams[1].synchronize()

    def _copy(self, way: int, job: Job, views: Sequence[Tensor]) -> Callable[[], None]:
        """Begins to copy to the device (0) or back (1). What is returned makes computation wait for it."""
        if way == 0:
            self._meter.read_bytes += job_bytes(job)
        else:
            self._meter.written_bytes += job_bytes(job)
        with self._beside(way):
            for extent, view in zip(job, views, strict=True):
                host = self._memory[extent.offset : extent.offset + extent.bytes].view_as(view)
                (view if way == 0 else host).copy_(host if way == 0 else view, non_blocking=True)
        if self._streams is None:
            return _nothing
        stream = self._streams[way]
        return lambda: torch.cuda.current_stream(self._device).wait_stream(stream)

    def _beside(self, way: int) -> AbstractContextManager[Any]:
        """A stream that goes on when what was computed is there, and a buffer that is read into was copied back."""
        if self._streams is None:
            return nullcontext()
        self._streams[way].wait_stream(torch.cuda.current_stream(self._device))
        if way == 0:
            self._streams[way].wait_stream(self._streams[1])
        return torch.cuda.stream(self._streams[way])

    def row(self, extent: Extent, row: int, change: bool = False) -> Tensor:
        """See `States.row`."""
        first = extent.offset + row * extent.row_bytes
        return self._memory[first : first + extent.row_bytes]


def _nothing() -> None:
    return None
