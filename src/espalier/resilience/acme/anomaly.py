"""Has the loss gone wrong, and for good? After Acme (arXiv 2403.07648), section 6.1. Pure, no torch.

The published monitor compares each loss with the one before (a ratio of 1.5, every 300 s). Where we deviate: a loss is
abnormal when it is not finite or above median + 8 MAD of the last 128 healthy ones; three abnormal steps in a row open
an anomaly, one or two are a blip; and an anomaly may heal by itself for a while before it is called one. A plateau is
no anomaly: it asks for another learning rate, which is not for a supervisor to choose.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

WINDOW, DEVIATIONS, IN_A_ROW = 128, 8.0, 3
_LEAST = 16
"""Healthy losses before any is judged."""
_FLOOR = 0.01
"""The MAD counts as at least this share of the median: a loss that hardly varies may rise by 8 %."""


@dataclass(frozen=True)
class Verdict:
    """The loss rose at step `first` and was abnormal up to `last` (both counted from 1): `loss` above `limit`."""

    first: int
    last: int
    loss: float
    limit: float

    def __str__(self) -> str:
        return f"the loss was abnormal from step {self.first} to {self.last}: {self.loss:.4g}, above {self.limit:.4g}"


class Losses:
    """Takes the loss of each step. Has state: healthy losses, and what is abnormal now.

    Args:
        patience: steps that an anomaly may take to heal by itself.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._healthy: deque[float] = deque(maxlen=WINDOW)
        self._first = 0
        self._row = 0

    @property
    def since(self) -> int | None:
        """The first step of what may become an anomaly; None while all is well."""
        return self._first or None

    def limit(self) -> float:
        """Above it a loss is abnormal; infinite while too few are known."""
        if len(self._healthy) < _LEAST:
            return math.inf
        middle = statistics.median(self._healthy)
        spread = statistics.median(abs(value - middle) for value in self._healthy)
        return middle + DEVIATIONS * max(spread, _FLOOR * abs(middle))

    def take(self, step: int, loss: float) -> Verdict | None:
        """The verdict after `step`, once an anomaly did not heal."""
        limit = self.limit()
        if math.isfinite(loss) and loss <= limit:
            self._healthy.append(loss)
            self._first = self._row = 0
            return None
        self._first, self._row = self._first or step, self._row + 1
        if self._row < IN_A_ROW + self.patience:
            return None
        verdict = Verdict(self._first, step, loss, limit)
        self._first = self._row = 0
        return verdict
