"""Made-up tasks for the tests of evaluation: what they do to their worker is told by the record."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.evaluate.shared_model import SharedModel, Source
from espalier.evaluate.worker_pool import SILENT, Opened, Result, Workers, evaluate

CPU = [torch.device("cpu")]


def nothing(record: int) -> None:
    """Does no harm."""


@dataclass(frozen=True)
class Made:
    """`records` records; `act` runs in the worker before each. `seen` gets a line for each record and its process."""

    name: str
    records: int
    seen: Path | None = None
    act: Callable[[int], None] = nothing
    content: str = "made"

    def evaluate(self, model: nn.Module, record: int) -> Any:
        if self.seen is not None:
            with self.seen.open("a") as file:
                file.write(f"{self.name} {record} {os.getpid()}\n")
        self.act(record)
        return {"value": (model(torch.tensor([float(record) / 7]))[0], 1), "odd": (float(record % 2), 1.0)}

    def summary(self, means: Any) -> Any:
        return means

    def lines(self) -> list[tuple[int, int]]:
        """(record, pid) of each time a record was begun."""
        assert self.seen is not None
        words = [line.split() for line in self.seen.read_text().splitlines()] if self.seen.exists() else []
        return [(int(record), int(pid)) for name, record, pid in words if name == self.name]


def once(flag: Path, at: int, act: Callable[[], None]) -> Callable[[int], None]:
    """Acts at record `at`, in whichever process comes first, never again."""
    return partial(_once, flag, at, act)


def _once(flag: Path, at: int, act: Callable[[], None], record: int) -> None:
    if record == at:
        with contextlib.suppress(FileExistsError):
            flag.touch(exist_ok=False)
            act()


def always(at: int, act: Callable[[], None]) -> Callable[[int], None]:
    """Acts at record `at`."""
    return partial(_always, at, act)


def _always(at: int, act: Callable[[], None], record: int) -> None:
    if record == at:
        act()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    class Own(Exception):
        """Of no module that another process could import."""

    raise Own("first\nno such prompt")


def slow(seconds: float) -> Callable[[int], None]:
    return partial(_slow, seconds)


def _slow(seconds: float, record: int) -> None:
    time.sleep(seconds)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(1, 1)


def opened(tasks: Sequence[Made]) -> Opened:
    """What a worker opens; at the priority of the tests, since beside busy ones the lowest there is would wait."""
    return Opened({task.name: task for task in tasks}, model)


def workers(tasks: Sequence[Made], count: int = 2, silent: float = SILENT) -> Workers:
    return Workers(partial(opened, tasks), count, CPU, silent)


@contextlib.contextmanager
def shared(folder: Path) -> Iterator[Source]:
    """The model of a checkpoint in `folder`."""
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(1, {"model": model()}, {"step": 1}, wait=True)
    made = SharedModel(checkpoints, 1, torch.float32)
    try:
        yield made.source
    finally:
        made.close()


def evaluated(folder: Path, tasks: Sequence[Made], count: int = 2, silent: float = SILENT) -> dict[str, Result]:
    """What comes of `tasks`, by name."""
    with shared(folder) as source, workers(tasks, count, silent) as pool:
        found = [one for one in evaluate(pool, source, tasks, {}) if isinstance(one, Result)]
    assert len(found) == len({result.task for result in found})
    return {result.task: result for result in found}
