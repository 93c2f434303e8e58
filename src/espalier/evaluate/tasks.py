"""Evaluation tasks: the Task Protocol, and the run's held-out data as a task.

A task has records, the smallest pieces that are evaluated apart (a question, a batch of held-out text). Each gives sums
and weights, so the figures do not depend on how the records were divided among workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any, Protocol

from torch import nn

from espalier.parallel.workload import Shard, Sums, Workload

WINDOWS = 16
"""Held-out samples in one record: as many as `espalier eval` gives the model at once."""


class EvaluationTask(Protocol):
    """One task of an evaluation."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def records(self) -> int:
        """How many records it has; at least one."""

    @property
    def content(self) -> str:
        """A hash of what is asked: another one is another task."""

    def evaluate(self, model: Any, record: int) -> Sums:
        """The metrics of one record."""

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Figures people read, from the `means` over all records."""


def means(sums: Sequence[Sums]) -> dict[str, float]:
    """Quotients of the records' sums and weights, added exactly. A metric without weight is left out."""
    averages = {}
    for name in dict.fromkeys(name for name_sums in sums for name in name_sums):
        total, weight = (fsum(record[name][part] for record in sums if name in record) for part in (0, 1))
        if weight:
            averages[name] = total / weight
    return averages


class HeldOut:
    """The run's held-out data, by the workload's own evaluation. What is evaluated whole (a graph) is one record."""

    name = "held-out"

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._samples = workload.validation_samples()
        self._record = max(1, self._samples) if workload.whole_evaluation else WINDOWS
        self.records = -(-self._samples // self._record)

    @property
    def content(self) -> str:
        """The data's fingerprint and how much of it is held out."""
        return f"{self._workload.fingerprint()}-{self._samples}"

    def evaluate(self, model: nn.Module, record: int) -> Sums:
        start = record * self._record
        return self._workload.evaluate(model, Shard(start, min(self._samples, start + self._record), self._record))

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """As `espalier eval` prints them."""
        return self._workload.summary(means)
