"""Host memory: what does not fit on a GPU waits in pinned memory, and is copied to it and back extent by extent.

Copies in and out have a stream each, so that they run beside computation and beside one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from espalier.kernels import accelerator
from espalier.mechanisms.offload.optimizer import StateFolder
from espalier.mechanisms.offload.state_file import Done, ExtentJob, StateFile, TransferMeter, job_bytes, job_views
from espalier.optim.base import Owned
from espalier.plan.axes.offload_layout import BUFFERS, CHUNK, StateExtent


class HostStates(StateFolder):
    """Where the states of a device wait. Has state: what was copied. See `optimizer.StateFolder`."""

    def __init__(self, device: torch.device, chunk: int = CHUNK, streams: Streams | None = None) -> None:
        self.device, self.chunk, self.meter, self._streams = device, chunk, TransferMeter("host"), streams

    def file(self, owned: Sequence[Owned], laid_out: Sequence[StateExtent], fixed_rows: int = 0) -> HostMemory:
        """Memory for extents of `owned`; `fixed_rows`: rows that steps only read."""
        return HostMemory(laid_out, self.device, self.meter, self._streams, fixed_rows)


class HostWeights:
    """Weights that steps only read, in pinned memory: see `store.base.WeightStore`. Has state: what was
    copied."""

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self.meter = TransferMeter("host")
        self._pinned = accelerator.is_on(device)
        self._streams = streams or streams_of(device)

    def keep(self, values: Tensor) -> Tensor:
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pinned).copy_(values)

    def fetch(self, waiting: Tensor, out: Tensor) -> Done:
        self.meter.read_bytes += out.nbytes
        with self._streams.beside(0):
            out.copy_(waiting, non_blocking=True)
        return self._streams.mark()

    def after_copies(self) -> AbstractContextManager[Any]:
        return self._streams.beside(0)


class Streams:
    """What orders copies (0: to the device, 1: back) beside computation. Here they happen in the order of the program,
    as on a processor."""

    def beside(self, way: int) -> AbstractContextManager[Any]:
        """Surrounds a copy, which begins when what was computed is there; one to the device also waits until its buffer
        was copied back."""
        return nullcontext()

    def wait(self, way: int) -> None:
        """Computation waits for the copies begun so far."""

    def mark(self) -> Done:
        """What has computation wait for the copies to the device begun so far, and for none begun later."""
        return lambda: None

    def finish(self) -> None:
        """Returns when everything was copied back."""


class CudaStreams(Streams):
    """A stream for each way. Has state: CUDA's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [accelerator.stream(device) for _ in range(2)]

    def beside(self, way: int) -> AbstractContextManager[Any]:
        self._streams[way].wait_stream(accelerator.current_stream(self._device))
        if way == 0:
            self._streams[way].wait_stream(self._streams[1])
        return self._streams[way]

    def wait(self, way: int) -> None:
        accelerator.current_stream(self._device).wait_stream(self._streams[way])

    def mark(self) -> Done:
        event = self._streams[0].record_event()
        return lambda: accelerator.current_stream(self._device).wait_event(event)

    def finish(self) -> None:
        self._streams[1].synchronize()


def streams_of(device: torch.device) -> Streams:
    """Of a GPU two, else none."""
    return CudaStreams(device) if accelerator.is_on(device) else Streams()


class HostMemory:
    """Extents in pinned memory, all zeros at first; see `state_file.States`. Has state: the memory and the streams."""

    def __init__(
        self,
        extents: Sequence[StateExtent],
        device: torch.device,
        meter: TransferMeter,
        streams: Streams | None = None,
        fixed_rows: int = 0,
    ) -> None:
        self.extents, self._device, self._meter, self._first = list(extents), device, meter, fixed_rows
        size = job_bytes(extents)
        self._memory = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._streams = streams or streams_of(device)

    def walk(self, jobs: Sequence[ExtentJob]) -> Iterator[list[Tensor]]:
        """See `States.walk`; what is given lies on the device."""
        views = device_views(jobs, self._device)
        for number, (job, view) in enumerate(zip(jobs, views, strict=True)):
            if number == 0:
                self._copy(0, job, view)
            self._streams.wait(0)
            if number + 1 < len(jobs):
                self._copy(0, jobs[number + 1], views[number + 1])
            yield view
            self._copy(1, job, view)
        self._streams.finish()

    def _copy(self, way: int, job: ExtentJob, views: Sequence[Tensor]) -> None:
        """Begins to copy to the device (0), or back (1) what steps change."""
        if way == 0:
            self._meter.read_bytes += job_bytes(job)
        else:
            self._meter.written_bytes += job_bytes(job, self._first)
        with self._streams.beside(way):
            for extent, view in zip(job, views, strict=True):
                host = self._memory[extent.offset : extent.offset + extent.bytes].view_as(view)
                if way == 0:
                    view.copy_(host, non_blocking=True)
                else:
                    host[self._first :].copy_(view[self._first :], non_blocking=True)

    def _row(self, extent: StateExtent, row: int) -> Tensor:
        first = extent.offset + row * extent.row_bytes
        return self._memory[first : first + extent.row_bytes]

    def row(self, extent: StateExtent, row: int, change: bool = False) -> Tensor:
        self._streams.finish()
        return self._row(extent, row)

    def fetch(self, extent: StateExtent, row: int, out: Tensor) -> Done:
        self._meter.read_bytes += out.nbytes
        with self._streams.beside(0):
            out.copy_(self._row(extent, row)[: out.nbytes].view(out.dtype), non_blocking=True)
        return partial(self._streams.wait, 0)

    def store(self, extent: StateExtent, row: int, values: Tensor) -> Done:
        self._meter.written_bytes += values.nbytes
        with self._streams.beside(1):
            self._row(extent, row)[: values.nbytes].view(values.dtype).copy_(values, non_blocking=True)
        return partial(self._streams.wait, 1)

    def settle(self) -> None:
        """See `States.settle`."""


class DeviceFile:
    """Extents on disk whose states a device moves: each is copied to it after it was read, and back before it is
    written. See `state_file.States`. Has state: the file's."""

    def __init__(self, file: StateFile, device: torch.device, streams: Streams | None = None) -> None:
        self.extents = file.extents
        self.row = file.row
        self.settle = file.settle
        self._file = file
        self._device = device
        self._streams = streams or streams_of(device)

    def walk(self, jobs: Sequence[ExtentJob]) -> Iterator[list[Tensor]]:
        """See `States.walk`; what is given lies on the device. The file reads ahead and writes behind meanwhile."""
        buffers = device_views(jobs, self._device)
        for views, given in zip(self._file.walk(jobs), buffers, strict=True):
            with self._streams.beside(0):
                for view, buffer in zip(views, given, strict=True):
                    buffer.copy_(view, non_blocking=True)
            self._streams.wait(0)
            yield given
            with self._streams.beside(1):
                for view, buffer in zip(views, given, strict=True):
                    view.copy_(buffer, non_blocking=True)
            self._streams.finish()

    def fetch(self, extent: StateExtent, row: int, out: Tensor) -> Done:
        """See `States.fetch`: it is copied when it was read."""
        host = self._host(out)
        arrived = self._file.fetch(extent, row, host)

        def there() -> None:
            arrived()
            with self._streams.beside(0):
                out.copy_(host, non_blocking=True)
            self._streams.wait(0)

        return there

    def store(self, extent: StateExtent, row: int, values: Tensor) -> Done:
        """See `States.store`: it is written when it was copied."""
        host = self._host(values)
        with self._streams.beside(1):
            host.copy_(values, non_blocking=True)
        self._streams.finish()
        return self._file.store(extent, row, host)

    def _host(self, like: Tensor) -> Tensor:
        """[elements] in pinned memory, which is kept until copies from it have ended."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._device.type == "cuda")


def device_views(jobs: Sequence[ExtentJob], device: torch.device) -> list[list[Tensor]]:
    """The extents of each job in one of a few buffers on the device."""
    room = max((job_bytes(job) for job in jobs), default=0)
    buffers = [torch.empty(room, dtype=torch.uint8, device=device) for _ in range(min(BUFFERS, len(jobs)))]
    return [job_views(job, buffers[number % BUFFERS]) for number, job in enumerate(jobs)]
