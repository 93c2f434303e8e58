"""State file: extents of optimizer states on disk, read ahead and written behind by a queue, each row with a checksum.

The file is scratch space of one process: it has no name once it is open, and checkpoints hold what it held.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from espalier.plan.axes.offload_layout import AHEAD, BUFFERS, StateExtent
from espalier.recipe.cache_dir import writing
from espalier.recipe.errors import RESUME, RunFailed
from espalier.store.direct_io import DirectFile, aligned, checksum, flat_bytes
from espalier.store.io_queue import IoQueue

Done = Callable[[], None]
"""Returns when it is done, or has computation wait for it."""
ExtentJob = Sequence[StateExtent]
"""Extents that are computed together."""


class TransferMeter:
    """What a tier has moved since it was last read: bytes, and seconds in which computation waited. Has state."""

    def __init__(self, tier: Literal["host", "disk"]) -> None:
        self.tier = tier
        self.read_bytes = self.written_bytes = 0
        self.stalled = 0.0

    def read(self) -> dict[str, dict[str, float]]:
        """What was counted, by tier; counting begins anew."""
        counts = {"read": self.read_bytes, "written": self.written_bytes, "stalled": self.stalled}
        self.read_bytes = self.written_bytes = 0
        self.stalled = 0.0
        return {self.tier: counts}


def wait_for(done: Callable[[], object], meter: TransferMeter) -> None:
    """Returns when `done` does; computation waits meanwhile."""
    begun = time.perf_counter()
    done()
    meter.stalled += time.perf_counter() - begun


class States(Protocol):
    """Extents that wait somewhere, all zeros at first."""

    extents: list[StateExtent]

    def walk(self, jobs: Sequence[ExtentJob]) -> Iterator[list[Tensor]]:
        """The extents of each job, uint8 [rows, row bytes] to be changed in place; then they are put back."""

    def row(self, extent: StateExtent, row: int, change: bool = False) -> Tensor:
        """uint8 [row bytes] in host memory: one row, valid until another one is asked for. `change`: it is put back."""

    def fetch(self, extent: StateExtent, row: int, out: Tensor) -> Done:
        """Begins to read the used bytes of a row; computation may use them once what is returned was called."""

    def store(self, extent: StateExtent, row: int, values: Tensor) -> Done:
        """Begins to write the used bytes of a row; `values` may be changed once what is returned was called."""

    def settle(self) -> None:
        """What `row` gave to be changed is there."""


class DiskTier(NamedTuple):
    """How this process reaches its disk. `hashing`: threads in which checksums are computed beside the step;
    `resident`: bytes of a file's extents that stay in memory."""

    queue: IoQueue
    meter: TransferMeter
    hashing: Executor
    resident: int = 0


class StateFile:
    """One file of extents, all zeros at first. Has state: the file, checksums, and buffers.

    Args:
        path: of the file, which loses its name.
        extents: what lies in it.
        names: of each extent's first parameter, for errors.
        tier: what transfers go through, and are counted by.
        fixed_rows: rows at the beginning of each extent that steps only read.
    """

    def __init__(
        self,
        path: Path,
        extents: Sequence[StateExtent],
        names: Sequence[str],
        tier: DiskTier,
        fixed_rows: int = 0,
    ) -> None:
        self.extents = list(extents)
        self.path = path
        self._first = fixed_rows
        self._resident = {
            extent.offset: aligned(extent.bytes).view(extent.rows, extent.row_bytes)
            for extent in spread(extents, tier.resident)
        }
        self._queue, self._meter, self._hashing = tier[:3]
        self._names = {extent.offset: name for extent, name in zip(extents, names, strict=True)}
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        away = self._away(extents)
        self._begins = dict(
            zip(
                (extent.offset for extent in away),
                accumulate((extent.bytes for extent in away), initial=0),
                strict=False,
            )
        )
        self._file = DirectFile(path, "create", job_bytes(away))
        path.unlink()
        self._sums: dict[int, int] = {}
        self._buffers: list[Tensor] = []
        self._row: tuple[StateExtent, int, Tensor] | None = None
        self._changed = False

    @property
    def resident_bytes(self) -> int:
        """Of extents that stay in memory."""
        return sum(values.nbytes for values in self._resident.values())

    def _away(self, job: ExtentJob) -> ExtentJob:
        """The extents that are not in memory."""
        return tuple(extent for extent in job if extent.offset not in self._resident)

    # --- extents, in a ring ------------------------------------------------------------------------------------------

    def walk(self, jobs: Sequence[ExtentJob]) -> Iterator[list[Tensor]]:
        self.settle()
        away = [self._away(job) for job in jobs]
        moving = [job for job in away if job]
        room = max((job_bytes(job) for job in moving), default=0)
        ring: list[tuple[Tensor, list[Future[None]]]] = [
            (buffer, []) for buffer in self._buffers if buffer.nbytes >= room
        ]
        count = min(BUFFERS, len(moving))
        ring += [(aligned(room), []) for _ in range(count - len(ring))]
        coming: deque[tuple[list[Tensor], list[Future[None]]]] = deque()
        turn = begun = 0
        for job, moved in zip(jobs, away, strict=True):
            if not moved:
                yield [self._resident[extent.offset] for extent in job]
                continue
            for number, next_job in enumerate(moving[begun : turn + AHEAD + 1], begun):
                at = number % count
                begun = number + 1
                self._wait(ring[at][1])
                views = job_views(next_job, ring[at][0])
                coming.append((views, self._read(next_job, views)))
            views, reads = coming.popleft()
            self._wait(reads)
            by_offset = {extent.offset: values for extent, values in zip(moved, views, strict=True)}
            yield [
                by_offset[extent.offset] if extent.offset in by_offset else self._resident[extent.offset]
                for extent in job
            ]
            at = turn % count
            turn = turn + 1
            ring[at] = ring[at][0], self._write(moved, views)
        for _, writes in ring:
            self._wait(writes)
        self._buffers = [buffer for buffer, _ in ring]

    def _read(self, job: ExtentJob, views: Sequence[Tensor]) -> list[Future[None]]:
        self._meter.read_bytes += job_bytes(job)
        pending = [
            self._queue.read(self._file, self._place(extent), view.view(-1))
            for extent, view in zip(job, views, strict=True)
        ]
        return [self._hashing.submit(self._check, job, views, pending)]

    def _write(self, job: ExtentJob, views: Sequence[Tensor]) -> list[Future[None]]:
        self._meter.written_bytes += job_bytes(job, self._first)
        pending = [
            self._queue.write(self._file, self._place(extent, self._first), view[self._first :].view(-1))
            for extent, view in zip(job, views, strict=True)
        ]
        return [*pending, self._hashing.submit(self._sum, job, views)]

    def _sum(self, job: ExtentJob, views: Sequence[Tensor]) -> None:
        for extent, view in zip(job, views, strict=True):
            for row in range(self._first, extent.rows):
                self._sums[self._place(extent, row)] = checksum(view[row, : extent.used])

    def _check(self, job: ExtentJob, views: Sequence[Tensor], pending: Sequence[Future[None]]) -> None:
        """Compares what has arrived with its checksums."""
        for future in pending:
            future.result()
        for extent, view in zip(job, views, strict=True):
            for row in range(extent.rows):
                self._verify(extent, row, view[row, : extent.used], self._sums.get(self._place(extent, row)))

    def _verify(self, extent: StateExtent, row: int, values: Tensor, written: int | None) -> None:
        """Raises RunFailed where the checksum of `values` is not that of what was `written`."""
        if written is not None and checksum(values) != written:
            place = self._place(extent, row)
            raise RunFailed(
                f"What was offloaded of {self._names[extent.offset]!r} in {self.path} is not what was written there "
                f"(bytes {place} to {place + extent.row_bytes}).",
                why="its checksum does not match: the disk or the memory has lost bits",
                do=f"check the disk, then {RESUME}",
            )

    def _wait(self, pending: Sequence[Future[None]]) -> None:
        for future in pending:
            wait_for(future.result, self._meter)

    # --- parts of rows, in the background ----------------------------------------------------------------------------

    def fetch(self, extent: StateExtent, row: int, out: Tensor) -> Done:
        if (resident := self._resident.get(extent.offset)) is not None:
            flat_bytes(out).copy_(resident[row, : out.nbytes])
            return nothing
        self._meter.read_bytes += out.nbytes
        place = self._place(extent, row)
        written = self._sums.get(place)
        pending = self._queue.read(self._file, place, out)

        def arrived() -> None:
            self._wait([pending])
            self._verify(extent, row, out, written)

        return arrived

    def store(self, extent: StateExtent, row: int, values: Tensor) -> Done:
        if (resident := self._resident.get(extent.offset)) is not None:
            resident[row, : values.nbytes].copy_(flat_bytes(values))
            return nothing
        self._meter.written_bytes += values.nbytes
        place = self._place(extent, row)
        self._sums[place] = checksum(values)
        pending = self._queue.write(self._file, place, values)
        return lambda: self._wait([pending])

    # --- single rows, for checkpoints --------------------------------------------------------------------------------

    def row(self, extent: StateExtent, row: int, change: bool = False) -> Tensor:
        if (resident := self._resident.get(extent.offset)) is not None:
            return resident[row]
        if self._row is None or self._row[:2] != (extent, row):
            self.settle()
            values = aligned(extent.row_bytes)
            place = self._place(extent, row)
            self._file.read_into(values, place)
            self._verify(extent, row, values[: extent.used], self._sums.get(place))
            self._row = extent, row, values
        self._changed |= change
        return self._row[2]

    def settle(self) -> None:
        if self._row is not None and self._changed:
            extent, row, values = self._row
            place = self._place(extent, row)
            self._sums[place] = checksum(values[: extent.used])
            self._file.write_from(values, place)
        self._row = None
        self._changed = False

    def _place(self, extent: StateExtent, row: int = 0) -> int:
        """The byte of the file where a row begins."""
        return self._begins[extent.offset] + row * extent.row_bytes


def nothing() -> None:
    """Of what is done at once."""


def spread(extents: Sequence[StateExtent], size: int) -> list[StateExtent]:
    """Extents of at most `size` bytes together, evenly among all: what moves them is at work while others are read."""
    total = job_bytes(extents)
    seen = 0
    taken = 0
    chosen = []
    for extent in extents:
        seen += extent.bytes
        if taken + extent.bytes <= min(size, -(-size * seen // total)):
            chosen.append(extent)
            taken += extent.bytes
    return chosen


def job_bytes(job: ExtentJob, first: int = 0) -> int:
    """Of all its extents, from their row `first` on."""
    return sum(extent.bytes - first * extent.row_bytes for extent in job)


def job_views(job: ExtentJob, buffer: Tensor) -> list[Tensor]:
    """Its extents in a buffer: uint8 [rows, row bytes]."""
    parts = torch.split(buffer[: job_bytes(job)], [extent.bytes for extent in job])
    return [part.view(extent.rows, extent.row_bytes) for part, extent in zip(parts, job, strict=True)]
