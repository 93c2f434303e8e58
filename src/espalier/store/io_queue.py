"""I/O queue: reads and writes of files in the background, bounded, reads before writes; io_uring where there is one.

A write waits while reads wait, except that every `TURN`-th transfer may be a write, so that writes always go on. At
most a quarter of the threads write at once, so reads find a thread. Many small reads (`read_runs`) go through one ring
of io_uring per thread, or where there is none through more threads.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

import espalier.store.io_uring as uring
from espalier.recipe.resource import Resource
from espalier.store.direct_io import DirectFile, File, flat_bytes

DEPTH = 64
"""Transfers of a kind that wait, before a caller has to wait for room."""
THREADS = 32
"""At most; threads start when there is something to do."""
RING_THREADS = 8
"""At most, where each has a ring."""
PIECE = 4 << 20
"""Longer transfers are cut into pieces of so many bytes, which different threads may do."""
TURN = 16
_PATIENCE = 30.0
"""Seconds that leaving the process waits for the transfers under way."""


class _Transfer:
    """One caller's read or write; its future ends with the last of its pieces."""

    def __init__(self, count: int) -> None:
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()
        self._left = count
        self._error = None
        self._lock = threading.Lock()

    _error: BaseException | None

    def end(self, error: BaseException | None) -> None:
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left:
                return
        if self._error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(self._error)


@dataclass(frozen=True)
class _Piece:
    transfer: _Transfer
    writes: bool
    run: Callable[[], None]


class IoQueue(Resource):
    """Threads that read and write files for their callers. Holds threads until it is closed; a forked process has its
    own.

    Args:
        depth: pieces of a kind (reads, writes) that may wait; a caller beyond waits for room.
        threads: transfers that run at once, at most.
        ring: use io_uring for many small reads; by default where the kernel has it.
    """

    def __init__(self, depth: int = DEPTH, threads: int | None = None, ring: bool | None = None) -> None:
        self.ring = uring.available() if ring is None else ring
        self._most = threads or (RING_THREADS if self.ring else THREADS)
        self._depth = depth
        self._closed = False
        self._turn = 0
        self._writers = max(1, self._most // 4)
        self._begin()
        _hear_of_forks()
        _queues.add(self)

    def _begin(self) -> None:
        self._writing = self._idle = 0
        self._reads: deque[_Piece] = deque()
        self._writes: deque[_Piece] = deque()
        self._lock = threading.Lock()
        self._work_waits, self._room = threading.Condition(self._lock), threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []

    def read(self, file: File, offset: int, buffer: Tensor, needed: int | None = None) -> Future[None]:
        """Fills `buffer` from `offset`; see `File.read_into`. The caller leaves the buffer alone until the end."""
        needed = buffer.nbytes if needed is None else needed

        def run(part: DirectFile, place: int, piece: Tensor, at: int) -> None:
            part.read_into(piece, place, max(0, min(piece.nbytes, needed - at)))

        return self._start(self._reads, run, list(_pieces(file, offset, buffer)))

    def write(self, file: File, offset: int, buffer: Tensor) -> Future[None]:
        """Writes `buffer` at `offset`; see `File.write_from`. The caller leaves the buffer alone until the end."""

        def run(part: DirectFile, place: int, piece: Tensor, at: int) -> None:
            part.write_from(piece, place)

        return self._start(self._writes, run, list(_pieces(file, offset, buffer)))

    def read_runs(self, file: File, runs: NDArray[np.int64], buffer: Tensor, end: int) -> Future[None]:
        """Many reads: `runs` [n, 3] say where each begins in the file, its bytes, and where it goes in `buffer`.

        All are multiples of the page. Bytes of the file at `end` and beyond need not be there.
        """
        pieces = []
        for part, part_runs in file.split_runs(runs):
            each = max(uring.DEPTH, -(-len(part_runs) // 2)) if self.ring else max(1, -(-len(part_runs) // self._most))
            pieces += [(part, part_runs[at : at + each], buffer, end) for at in range(0, len(part_runs), each)]
        return self._start(self._reads, partial(_read_runs, self.ring), pieces)

    def _start(self, waiting: deque[_Piece], run: Callable[..., None], pieces: list[tuple[Any, ...]]) -> Future[None]:
        transfer = _Transfer(max(1, len(pieces)))
        if not pieces:
            transfer.end(None)
        for piece in pieces:
            self._put(waiting, _Piece(transfer, waiting is self._writes, partial(run, *piece)))
        return transfer.future

    def _put(self, waiting: deque[_Piece], piece: _Piece) -> None:
        with self._lock:
            assert not self._closed, "the queue is closed"
            self._room.wait_for(lambda: len(waiting) < self._depth)
            waiting.append(piece)
            if self._idle < len(self._reads) + len(self._writes) and len(self._threads) < self._most:
                self._threads.append(threading.Thread(target=self._work, name="espalier-io", daemon=True))
                self._threads[-1].start()
            self._work_waits.notify()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
                self._work_waits.wait_for(lambda: self._ready() or self._closed)
                self._idle -= 1
                piece = self._next()
                if piece is None:
                    return
                self._room.notify_all()
            try:
                piece.run()
            except BaseException as error:  # the caller's to see
                piece.transfer.end(error)
            else:
                piece.transfer.end(None)
            if piece.writes:
                with self._lock:
                    self._writing -= 1
                    self._work_waits.notify()
            del piece  # its buffer is the caller's again

    def _ready(self) -> bool:
        return bool(self._reads or (self._writes and self._writing < self._writers))

    def _next(self) -> _Piece | None:
        """A read; a write where no read waits or it is a write's turn. None: the queue is closed and empty."""
        self._turn = (self._turn + 1) % TURN
        may_write = self._writes and (self._writing < self._writers or self._closed)
        if self._reads and (self._turn or not may_write):
            return self._reads.popleft()
        if may_write:
            self._writing += 1
            return self._writes.popleft()
        return None

    def leave(self, until: float) -> None:
        """Begins no transfer any more, and waits, until then, for those under way: a thread that ends with the
        interpreter, in torch, aborts it."""
        with self._lock:
            self._closed = True
            self._reads.clear()
            self._writes.clear()
            self._work_waits.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Returns when all transfers have ended."""
        with self._lock:
            self._closed = True
            self._work_waits.notify_all()
        for thread in self._threads:
            thread.join()


def _pieces(file: File, offset: int, buffer: Tensor) -> Iterator[tuple[DirectFile, int, Tensor, int]]:
    """(file on one disk, offset there, piece of the buffer, where in the buffer it begins)."""
    flat = flat_bytes(buffer)
    begin = 0
    for part, place, count in file.parts(offset, buffer.nbytes):
        for at in range(0, count, PIECE):
            size = min(PIECE, count - at)
            yield part, place + at, flat[begin + at : begin + at + size], begin + at
        begin += count


def _read_runs(ring: bool, file: DirectFile, runs: NDArray[np.int64], buffer: Tensor, end: int) -> None:
    from espalier.store.read_kernels import pread_runs

    missed = np.empty(len(runs), np.int64)
    ring_of_thread = _own_ring() if ring else None
    if ring_of_thread is not None:
        count = ring_of_thread.read(file.fd, buffer.data_ptr(), runs, missed)
    else:
        count = pread_runs(file.fd, buffer.data_ptr(), runs, missed)
    flat = flat_bytes(buffer)
    for offset, size, place in runs[missed[:count]].tolist():  # cut short, refused, or at the end of the file
        file.read_into(flat[place : place + size], offset, max(0, min(size, end - offset)))


_threads = threading.local()
_queues: weakref.WeakSet[IoQueue] = weakref.WeakSet()


def _forked() -> None:
    """In a forked process, which has none of the threads."""
    _threads.__dict__.clear()
    for queue in _queues:
        queue._begin()


@atexit.register
def leave_all() -> None:
    """Ends the threads of all queues of this process that nobody has closed."""
    until = time.monotonic() + _PATIENCE
    for queue in list(_queues):
        queue.leave(until)


@cache
def _hear_of_forks() -> None:
    os.register_at_fork(after_in_child=_forked)


def _own_ring() -> uring.Ring | None:
    """This thread's ring; None where the kernel gives no more of them."""
    if not hasattr(_threads, "ring"):
        try:
            _threads.ring = uring.Ring()
        except OSError:
            return None
    thread_ring: uring.Ring = _threads.ring
    return thread_ring
