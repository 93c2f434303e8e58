"""The workers of an evaluation: forked once, replaced when they die, given work and listened to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import torch
from torch import nn

from espalier.resilience.acme.background import Process
from espalier.resilience.acme.evaluate import workers
from espalier.resilience.acme.evaluate.packing import Pool
from espalier.resilience.acme.evaluate.tasks import Task

ASLEEP = 120.0
"""Seconds a worker with a trial may sleep without a moment of processor time before it counts as hung."""

LOOK_EVERY = 1.0
"""Seconds between two looks at the workers' state."""


@dataclass(frozen=True)
class Setup:
    """What is evaluated, by how many, and where raw outputs may lie.

    Attributes:
        tasks: by name. Inherited by the workers, never sent.
        build: the model with any weights, on the CPU.
        pool: how many workers of each stage.
        devices: where inference runs; workers take turns.
        folder: for raw outputs; it is emptied.
    """

    tasks: Mapping[str, Task]
    build: Callable[[], nn.Module]
    pool: Pool
    devices: Sequence[torch.device]
    folder: Path


class Crew:
    """Inference workers are numbered from 0, metric workers after them. Has state: the processes."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.inference = range(setup.pool.inference)
        self.metric = range(setup.pool.inference, sum(setup.pool))
        self.deaths = 0
        self._processes: dict[int, Process] = {}
        self._looked = 0.0
        self._used: dict[int, tuple[float, float]] = {}
        for worker in (*self.inference, *self.metric):
            self._start(worker)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.end()

    def send(self, worker: int, message: workers.Order) -> None:
        """To `worker`; if it is dead, `heard` will say so."""
        self._used.pop(worker, None)
        with contextlib.suppress(OSError):
            workers.tell(self._processes[worker].pipe, message)

    def heard(self, seconds: float) -> Iterator[tuple[int, workers.Word | None]]:
        """(worker, message) of all that comes within `seconds`; the message of one that died is None, and another
        process has its place already."""
        by_pipe = {process.pipe: worker for worker, process in self._processes.items()}
        for pipe in wait(list(by_pipe), seconds):
            worker = by_pipe[pipe]  # type: ignore[index]
            try:
                yield worker, workers.heard(self._processes[worker].pipe)
            except (EOFError, OSError):
                self._replace(worker)
                yield worker, None

    def hung(self, busy: Sequence[int]) -> Iterator[int]:
        """Those of the `busy` that were stopped or sleep for good; they are replaced."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY:
            return
        self._looked = now
        for worker in busy:
            if self._processes[worker].stopped() or self._asleep(worker, now):
                self._replace(worker)
                yield worker

    def _asleep(self, worker: int, now: float) -> bool:
        try:
            process = psutil.Process(self._processes[worker].pid)
            used = sum(process.cpu_times()[:4])
            sleeping = process.status() == psutil.STATUS_SLEEPING and not process.children()
        except psutil.Error:
            return False  # it died: the pipe will say so
        before, since = self._used.get(worker, (-1.0, now))
        if used > before or not sleeping:
            self._used[worker] = (used, now)
            return False
        return now - since > ASLEEP

    def _start(self, worker: int) -> None:
        setup = self.setup
        if worker in self.inference:
            device = setup.devices[worker % len(setup.devices)]
            self._processes[worker] = Process(partial(workers.infer, setup.tasks, setup.build, device))
        else:
            self._processes[worker] = Process(partial(workers.score, setup.tasks))

    def _replace(self, worker: int) -> None:
        self.deaths += 1
        self._used.pop(worker, None)
        self._processes[worker].end()
        self._start(worker)
