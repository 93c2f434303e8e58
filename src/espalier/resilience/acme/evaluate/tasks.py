"""What can be asked of a checkpoint: a Task gives raw outputs record by record, and scores them later, elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from espalier.workload import Shard, Workload

WINDOWS = 16
"""Held-out samples in one record: as many as `espalier eval` gives the model at once."""

Sums = Mapping[str, tuple[float, float]]
"""Metric to (sum, weight)."""


class Task(Protocol):
    """One task. The model knows nothing of it; `score` knows nothing of the model."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def records(self) -> int:
        """How many records it has; at least one."""
        ...

    @property
    def content(self) -> str:
        """A hash of what is asked: another one is another task."""
        ...

    def infer(self, model: nn.Module, record: int) -> Any:
        """The model's raw output for one record: what JSON has, nothing else."""
        ...

    def score(self, raw: Any) -> Sums:
        """Metrics of one record's raw output, as sums and weights."""
        ...

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Figures people read, from the quotients of all records' sums."""
        ...


class HeldOut:
    """The run's own held-out data with the workload's own evaluation. What is evaluated whole is one record."""

    name = "held-out"

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._samples = workload.validation_samples()
        self._record = max(1, self._samples) if workload.whole_evaluation else WINDOWS

    @property
    def records(self) -> int:
        """Micro-batches of `WINDOWS` samples."""
        return -(-self._samples // self._record)

    @property
    def content(self) -> str:
        """The data's fingerprint and how much of it is held out."""
        return f"{self._workload.fingerprint()}-{self._samples}"

    def infer(self, model: nn.Module, record: int) -> Any:
        """The workload's sums of one micro-batch."""
        start = record * self._record
        shard = Shard(start, min(self._samples, start + self._record), self._record)
        return {name: list(pair) for name, pair in self._workload.evaluate(model, shard).items()}

    def score(self, raw: Any) -> Sums:
        """The sums themselves: nothing is left to compute."""
        return {name: (total, weight) for name, (total, weight) in raw.items()}

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """As `espalier eval` prints them."""
        return self._workload.summary(means)
