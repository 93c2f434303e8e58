"""Has the loss, or the gradient, gone wrong, and for good? After Acme (arXiv 2403.07648), section 6.1. Pure, no torch.

The published monitor compares each loss with the one before (a ratio of 1.5, every 300 s). Where we deviate: a loss is
abnormal when it is not finite or above median + 8 MAD of the last 128 healthy ones; three abnormal steps in a row open
an anomaly, one or two are a blip; and an anomaly may heal by itself for a while before it is called one. Gradient norms
are judged alike, but scatter more and rise where a model learns something new: they have to treble, and a rise in which
the loss got better by more than its scatter is none. A loss that stays where it is is `plateau`'s.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

WINDOW = 128
DEVIATIONS = 8.0
IN_A_ROW = 3
_LEAST = 16
"""Healthy losses before any is judged."""
_FLOOR, _NORM_FLOOR = 0.01, 0.25
"""The MAD counts as at least this share of the median: a loss that hardly varies may rise by 8 %, a norm to three times
what it was."""


@dataclass(frozen=True)
class Verdict:
    """`what` rose at step `first` and was abnormal up to `last` (both counted from 1): `value` above `limit`."""

    first: int
    last: int
    value: float
    limit: float
    what: str = "loss"

    def __str__(self) -> str:
        words = f"the {self.what} was abnormal from step {self.first} to {self.last}"
        return f"{words}: {self.value:.4g}, above {self.limit:.4g}"


class Losses:
    """Takes the loss of each step. Has state: healthy losses, and what is abnormal now.

    Args:
        patience: steps that an anomaly may take to heal by itself.
        floor: see `_FLOOR`; what: the name of what is taken, if it is no loss.
    """

    def __init__(self, patience: int, floor: float = _FLOOR, what: str = "loss") -> None:
        self.patience = patience
        self.floor = floor
        self.what = what
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
        return middle + DEVIATIONS * max(spread, self.floor * abs(middle))

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
        verdict = Verdict(self._first, step, loss, limit, self.what)
        self._first = self._row = 0
        return verdict


class Course:
    """Takes loss and gradient norm of each step. Has state: both histories, and the losses while norms are abnormal.

    Args:
        patience: see `Losses`.
    """

    def __init__(self, patience: int) -> None:
        self.losses = Losses(patience)
        self._patience = patience
        self._norms = self._no_norms()
        self._before: deque[float] = deque(maxlen=_LEAST)
        self._meanwhile: list[float] = []

    @property
    def since(self) -> int | None:
        """The first step of what may become an anomaly; None while all is well."""
        return min(filter(None, (self.losses.since, self._norms.since)), default=None)

    def take(self, step: int, loss: float, norm: float) -> Verdict | None:
        """The verdict after `step`, once an anomaly did not heal: of the loss, else of the norm."""
        verdict = self.losses.take(step, loss)
        rose = self._norms.take(step, norm)
        if self._norms.since is None and rose is None:
            self._before.append(loss)
            self._meanwhile.clear()
        else:
            self._meanwhile.append(loss)
        if rose is not None:
            middle = statistics.median(self._before)
            scatter = statistics.median(abs(value - middle) for value in self._before)
            better = statistics.median(self._meanwhile) < middle - scatter
            self._meanwhile.clear()
            if better:  # steeper ground, on which the model learns: what is usual there is learnt anew
                self._norms = self._no_norms()
                rose = None
        return verdict or rose

    def _no_norms(self) -> Losses:
        return Losses(self._patience, _NORM_FLOOR, "gradient norm")
