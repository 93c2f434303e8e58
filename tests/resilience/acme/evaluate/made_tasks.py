"""Made-up tasks for the tests of evaluation: what they do to their worker is told by the record."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from espalier.resilience.acme.evaluate.crew import Crew, Setup
from espalier.resilience.acme.evaluate.evaluator import Evaluation, Result
from espalier.resilience.acme.evaluate.packing import Pool
from espalier.resilience.acme.evaluate.priors import Priors
from espalier.resilience.acme.evaluate.shared import SharedModel


def nothing(record: int) -> None:
    """Does no harm."""


@dataclass
class Made:
    """`records` records; `act` and `act_scoring` run in the worker before each. `seen` gets a line for each record."""

    name: str
    records: int
    seen: Path
    act: Callable[[int], None] = nothing
    act_scoring: Callable[[int], None] = nothing
    content: str = "made"
    pids: set[str] = field(default_factory=set)

    def infer(self, model: nn.Module, record: int) -> Any:
        self.act(record)
        self._note("infer", record)
        with torch.no_grad():
            return [record, float(model(torch.tensor([float(record) / 7])))]

    def score(self, raw: Any) -> dict[str, tuple[float, float]]:
        record, value = raw
        self.act_scoring(record)
        self._note("score", record)
        return {"value": (value, 1.0), "odd": (float(record % 2), 1.0)}

    def summary(self, means: Any) -> Any:
        return means

    def _note(self, what: str, record: int) -> None:
        with self.seen.open("a") as file:
            file.write(f"{what} {self.name} {record} {os.getpid()}\n")

    def lines(self, what: str) -> list[list[str]]:
        """(record, pid) of each time a record was begun."""
        words = [line.split() for line in self.seen.read_text().splitlines()]
        return [one[2:] for one in words if one[:2] == [what, self.name]]


def once(flag: Path, at: int, act: Callable[[], None]) -> Callable[[int], None]:
    """Acts at record `at`, in whichever process comes first, never again."""

    def do(record: int) -> None:
        if record == at:
            try:
                flag.touch(exist_ok=False)
            except FileExistsError:
                return
            act()

    return do


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def slow(seconds: float) -> Callable[[int], None]:
    return lambda record: time.sleep(seconds)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(1, 1)


TWO = Pool(2, 1)


def evaluated(folder: Path, tasks: list[Made], pool: Pool = TWO, deaths: list[int] | None = None) -> dict[str, Result]:
    """What comes of `tasks`, by name; `deaths` gets how many workers were replaced."""
    raw = folder / "raw"
    raw.mkdir(exist_ok=True)
    setup = Setup({task.name: task for task in tasks}, model, pool, [torch.device("cpu")], raw)
    shared = SharedModel(model().state_dict(), torch.float32)
    with Crew(setup) as crew:
        evaluation = Evaluation(crew, shared, list(setup.tasks), Priors(folder / "priors.json"))
        found = [result for result in evaluation.run() if result is not None]
        if deaths is not None:
            deaths.append(crew.deaths)
    shared.close()
    assert len(found) == len({result.task for result in found})
    return {result.task: result for result in found}
