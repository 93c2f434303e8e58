"""Evaluation worker pool: tasks in parts, the longest first, scored by processes that are replaced when they die.

After Acme (arXiv 2403.07648): datasets are split by how long they took before, and the longest parts go first. List
scheduling in that order ends within 4/3 of the best (Graham, SIAM J. Appl. Math. 17, 1969), and short parts, split from
long tasks, fill what is left.

Each worker is a `ProcessPoolExecutor` of one process, not one executor for all: a broken pool does not say which of its
processes died at what. Workers are forked by a fork server that has run nothing on several threads, so that neither
torch nor numba hangs in them.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import forkserver, resource_tracker
from statistics import fmean
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import psutil
import torch
from torch import nn

from espalier.evaluate.shared_model import Source, attach
from espalier.evaluate.tasks import EvaluationTask, means
from espalier.parallel.workload import Sums
from espalier.recipe.errors import RunFailed
from espalier.recipe.resource import Resource

T = TypeVar("T")

TICK = 0.5
"""Seconds within which `Workers.evaluate` gives a sign of life."""

SILENT = 120.0
"""Seconds without a moment of processor time after which a worker counts as hung."""

TRIES = 3
"""Workers a part may end before it is given up."""

PARTS = 4
"""For each worker, at least, where tasks can be split: the last ones to end are short then."""


@dataclass(frozen=True)
class Opened:
    """What a worker evaluates: tasks by name, and `build`, which makes the model with any weights on the CPU."""

    tasks: Mapping[str, EvaluationTask]
    build: Callable[[], nn.Module]


class RecordRange(NamedTuple):
    """Records `[start, stop)` of a task."""

    task: str
    start: int
    stop: int


class Scored(NamedTuple):
    """A part's result: sums of each record, in order. `seconds`: of its processor. `why`: what went wrong."""

    sums: Sequence[Sums]
    seconds: float
    why: str = ""


class Result(NamedTuple):
    """What came of one task. `seconds`: of all workers together. `why`: what went wrong, empty when nothing did."""

    task: str
    figures: Mapping[str, float]
    records: int
    seconds: float
    why: str = ""


class Workers(Resource):
    """Worker processes, until the end of its `with` block. Has state: the processes.

    Args:
        open_: what a worker calls first. It is pickled, so a function of a module or a `partial` of one.
        devices: of each worker in turn.
        silent: see `SILENT`.

    Raises RunFailed when a worker cannot start.
    """

    def __init__(
        self, open_: Callable[[], Opened], count: int, devices: Sequence[torch.device], silent: float = SILENT
    ) -> None:
        self._open = open_
        self._devices = devices
        self._silent = silent
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, getattr(open_, "func", open_).__module__])
        resource_tracker.ensure_running()  # beforehand, since that sets the mask of signals too
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for us, who end the workers
        others = psutil.Process().children()
        forkserver.ensure_running()
        server = [
            process for process in psutil.Process().children() if process not in others
        ]  # none, if it was running before
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._workers: list[_Worker] = []
        try:
            self._workers += (self._start(number) for number in range(count))
            for worker in self._workers:
                worker.submit(os.getpid).result()
        except BrokenExecutor:
            self.close()
            raise RunFailed("An evaluation worker ended while it opened its data.", do="see its error above") from None
        except BaseException:
            for process in server:  # it may be about to fork one more
                process.kill()
            self.close()
            raise

    def close(self) -> None:
        """Ends all workers."""
        for worker in self._workers:
            worker.end()

    def __len__(self) -> int:
        return len(self._workers)

    def evaluate(self, model: Source, parts: Sequence[RecordRange]) -> Iterator[tuple[RecordRange, Scored] | None]:
        """Each part with its result when it is there, and None at every tick; parts are begun in their order.

        A part whose worker dies or hangs is done again by another one. After a part that failed, those of its task
        that have not begun are left out.
        """
        waiting = deque(parts)
        deaths = Counter[RecordRange]()
        running: dict[Future[Scored], tuple[int, RecordRange]] = {}
        while waiting or running:
            busy = {number for number, _ in running.values()}
            for number in [number for number in range(len(self)) if number not in busy][: len(waiting)]:
                part = waiting.popleft()
                running[self._workers[number].submit(_evaluate, part, model)] = number, part
            for future in wait(running, TICK, FIRST_COMPLETED).done:
                number, part = running.pop(future)
                if isinstance(future.exception(), BrokenExecutor):
                    self._workers[number].end()
                    self._workers[number] = self._start(number)
                    deaths[part] += 1
                    if deaths[part] < TRIES:
                        waiting.appendleft(part)
                        continue
                    scored = Scored([], 0.0, f"it ended {TRIES} workers")
                else:
                    scored = future.result()
                if scored.why:
                    waiting = deque(scored for scored in waiting if scored.task != part.task)
                yield part, scored
            for number, _ in running.values():
                self._workers[number].end_if_silent(self._silent)
            yield None

    def _start(self, number: int) -> _Worker:
        device = self._devices[number % len(self._devices)]
        return _Worker(ProcessPoolExecutor(1, self._context, _begin, (self._open, device)))


class _Worker:
    """One worker. Has state: its process, and when that was last seen to use its processor."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        others = multiprocessing.active_children()
        self._pool = pool
        with _no_main_program():
            self._pool.submit(os.getpid)  # the first call starts the process
        started = set(multiprocessing.active_children()) - set(others)
        self._process = next(iter(started), None)  # None: it has died already, as its futures say
        self._used = -1.0
        self._since = time.monotonic()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Has it call that; when it is dead, a future that has failed."""
        self._used = -1.0
        self._since = time.monotonic()
        try:
            return self._pool.submit(call, *arguments)
        except BrokenExecutor as error:  # it died while it had nothing to do
            failed: Future[T] = Future()
            failed.set_exception(error)
            return failed

    def end_if_silent(self, seconds: float) -> None:
        """Kills it when it and its children have used no processor time for so long: it was stopped, or waits."""
        if self._process is None:
            return
        try:
            process = psutil.Process(self._process.pid)
            used = sum(sum(child.cpu_times()[:2]) for child in [process, *process.children(recursive=True)])
        except psutil.Error:
            return  # it died: its future says so
        if used != self._used:
            self._used = used
            self._since = time.monotonic()
        elif time.monotonic() - self._since > seconds:
            self._process.kill()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._pool.shutdown(cancel_futures=True)


@contextmanager
def _no_main_program() -> Iterator[None]:
    """Inside, a process that is started does not run the caller's main program again. A script without
    `if __name__ == "__main__"` would start workers of its own there, without end."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# --- one checkpoint --------------------------------------------------------------------------------------------------


def split(tasks: Sequence[EvaluationTask], seconds: Mapping[str, float], workers: int) -> list[RecordRange]:
    """Tasks in parts of at most 1 / (PARTS * workers) of all expected seconds, the longest first.

    `seconds`: for each record of a task, by its name, as measured before; others are taken to be like these.
    """
    usual = fmean(seconds.values()) if seconds else 1.0
    each = {task.name: max(seconds.get(task.name, usual), 1e-9) for task in tasks}
    longest = sum(task.records * each[task.name] for task in tasks) / (PARTS * workers)
    parts = []
    for task in tasks:
        count = min(task.records, math.ceil(task.records * each[task.name] / longest))
        ends = [task.records * at // count for at in range(count + 1)]
        parts += [RecordRange(task.name, start, stop) for start, stop in pairwise(ends)]
    return sorted(parts, key=lambda part: -(part.stop - part.start) * each[part.task])


def evaluate(
    workers: Workers, model: Source, tasks: Sequence[EvaluationTask], seconds: Mapping[str, float]
) -> Iterator[Result | float]:
    """Each task's result when it is there, and at every tick which share of the records is done.

    `seconds`: see `split`.
    """
    by_name = {task.name: task for task in tasks}
    failed = set[str]()
    sums: dict[str, dict[int, Sequence[Sums]]] = {name: {} for name in by_name}
    took = dict.fromkeys(by_name, 0.0)
    records = sum(task.records for task in tasks)
    done = 0
    for scored in workers.evaluate(model, split(tasks, seconds, len(workers))):
        if scored is None:
            yield done / records
            continue
        part, scores = scored
        task = by_name[part.task]
        sums_by_start = sums[part.task]
        done += part.stop - part.start
        took[task.name] += scores.seconds
        sums_by_start[part.start] = scores.sums
        if task.name in failed:
            continue
        if scores.why:
            failed.add(task.name)
            yield Result(task.name, {}, task.records, took[task.name], scores.why)
        elif sum(map(len, sums_by_start.values())) == task.records:
            figures = task.summary(
                means([record for start in sorted(sums_by_start) for record in sums_by_start[start]])
            )
            why = "" if figures else "nothing of it has weight"
            yield Result(task.name, figures, task.records, took[task.name], why)


# --- in the worker ---------------------------------------------------------------------------------------------------


class _Own:
    """What this process has, when it is a worker. Has state: the model that it mapped last."""

    opened: Opened
    device: torch.device
    model: nn.Module
    version = 0


def _begin(open_: Callable[[], Opened], device: torch.device) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.setsid()
    torch.set_num_threads(1)
    _Own.opened = open_()
    _Own.device = device
    _Own.model = _Own.opened.build()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _evaluate(part: RecordRange, source: Source) -> Scored:
    """A part's sums. What its task raises comes back as text."""
    clock = time.process_time if _Own.device.type == "cpu" else time.perf_counter
    began = clock()
    try:
        if _Own.version != source.version:
            _Own.model = attach(_Own.model, source, _Own.device)
            _Own.version = source.version
        task = _Own.opened.tasks[part.task]
        with torch.no_grad():
            sums = [_plain(task.evaluate(_Own.model, record)) for record in range(part.start, part.stop)]
    except Exception as error:
        words = [type(error).__name__, *(line.strip() for line in str(error).strip().splitlines()[-1:])]
        return Scored([], clock() - began, ": ".join(words))
    return Scored(sums, clock() - began)


def _plain(sums: Sums) -> Sums:
    """Scalars of NumPy and torch as numbers."""
    return {str(name): (float(total), float(weight)) for name, (total, weight) in sums.items()}
