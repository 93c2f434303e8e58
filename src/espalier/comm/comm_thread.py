"""Communication thread: runs a group's compressed collectives in the order in which they were launched.

Collectives that have several phases must not start the next from a callback: callbacks run in different orders on
different ranks, and Gloo matches by order. Here the order is that of the launches, on every rank.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work

if TYPE_CHECKING:
    from torch.futures import Future

_DEFAULT = timedelta(0)
_PATIENCE = 2.0
"""Seconds that leaving waits for the job under way: a thread that ends with the interpreter, in torch, aborts it."""


class QueuedWork(Work):
    """The Work of one job of a `CommThread`. Has state: its outcome."""

    def __init__(self, job: Callable[[], Any]) -> None:
        super().__init__()
        self._job: Callable[[], Any] | None = job
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._futures: list[Any] = []

    def run(self, broken: BaseException | None) -> BaseException | None:
        """Does the job, unless the lane is `broken`. Returns the error."""
        try:
            if broken is not None:
                raise broken
            assert self._job is not None
            self._job()
        except BaseException as error:
            self._error = error
        self._job = None
        with self._lock:
            self._ended.set()
            waiting = self._futures
            self._futures = []
        for future in waiting:
            self._settle(future)
        return self._error

    def wait(self, timeout: timedelta = _DEFAULT) -> bool:
        """Returns when the job is done. Raises its error, or RuntimeError at the deadline."""
        if not self._ended.wait(timeout.total_seconds() if timeout else None):
            raise RuntimeError("Timed out waiting for an encoded collective")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether a wait would return at once."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it ended without error."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> Any:
        """The job's error, if any."""
        return self._error

    def result(self) -> list[Any]:
        """Nothing: results are where the caller asked for them."""
        self.wait()
        return []

    def get_future(self) -> Future[Any]:
        """Done, with an empty list, when the job is; it fails with the job's error."""
        future: Future[Any] = torch.futures.Future()
        with self._lock:
            if not self._ended.is_set():
                self._futures.append(future)
                return future
        self._settle(future)
        return future

    def _settle(self, future: Any) -> None:
        if self._error is None:
            future.set_result([])
        else:
            future.set_exception(self._error)


class CommThread:
    """Runs jobs one after the other. Has state: its thread, which begins with the first job and ends with `close`.

    Attributes:
        patience: seconds that leaving the process waits for the job under way.
    """

    def __init__(self, name: str) -> None:
        self.patience = _PATIENCE
        self._name = name
        self._jobs: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._broken: BaseException | None = None
        _LANES.add(self)

    def put(self, job: Callable[[], Any]) -> QueuedWork:
        """The Work of `job`, which runs after all that were put before. After an error no later one runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        task = QueuedWork(job)
        self._jobs.put(task)
        return task

    def close(self) -> None:
        """Ends the thread once its jobs are done."""
        if self._thread is not None:
            self._jobs.put(None)

    def join(self) -> None:
        """Waits a little for the thread's end, unless this is that thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self.patience)

    def _run(self) -> None:
        while (task := self._jobs.get()) is not None:
            self._broken = task.run(self._broken)
            del task


_LANES: weakref.WeakSet[CommThread] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Ends the threads of all lanes of this process."""
    lanes = list(_LANES)
    for lane in lanes:
        lane.close()
    for lane in lanes:
        lane.join()
