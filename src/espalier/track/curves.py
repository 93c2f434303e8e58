"""Curves of a run in bounded memory: of every column a few numbers for each of at most a thousand stretches of steps.

The least and the greatest of a stretch are kept beside its mean, so that a spike of one step stays visible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

STRETCHES = 1000
_UNKNOWN, _ZEROS = partial(np.full, STRETCHES, np.nan), partial(np.zeros, STRETCHES)


@dataclass
class StepCurve:
    """A column of numbers by stretches of steps, [STRETCHES] float64 each. Has state: what was added so far.

    Attributes:
        least, greatest, sample: of a stretch the least and the greatest number, and that of one row; NaN without any.
        totals, counts: their sum, and how many they are.
        last: the last finite number; None: there is none.
    """

    least: Array = field(default_factory=_UNKNOWN)
    greatest: Array = field(default_factory=_UNKNOWN)
    sample: Array = field(default_factory=_UNKNOWN)
    totals: Array = field(default_factory=_ZEROS)
    counts: Array = field(default_factory=_ZEROS)
    last: float | None = None

    def add(self, at: Array, starts: Array, column: Array) -> None:
        """Rows before those added so far, of which those from `starts` on are of the stretches `at`."""
        finite = np.isfinite(column)
        if self.last is None and finite.any():
            self.last = float(column[finite][-1])
        values = np.where(finite, column, np.nan)
        self.least[at] = np.fmin(self.least[at], np.fmin.reduceat(values, starts))
        self.greatest[at] = np.fmax(self.greatest[at], np.fmax.reduceat(values, starts))
        self.sample[at] = values[starts]
        self.totals[at] += np.add.reduceat(np.where(finite, column, 0.0), starts)
        self.counts[at] += np.add.reduceat(finite, starts, dtype=np.float64)

    @property
    def means(self) -> Array:
        """NaN for a stretch without a number."""
        return np.divide(self.totals, self.counts, out=self.least.copy(), where=self.counts > 0)

    @property
    def total(self) -> float:
        """The sum of the column; 0 without a number."""
        return float(self.totals.sum())

    @property
    def average(self) -> float:
        """The mean of the column; NaN without a number."""
        return self.total / float(self.counts.sum()) if self.last is not None else np.nan

    @property
    def lowest(self) -> float:
        """The least number; NaN without one."""
        return float(np.fmin.reduce(self.least))

    @property
    def peak(self) -> float:
        """The greatest number; 0 without one."""
        return float(np.fmax.reduce(self.greatest, initial=0.0))


class Curves(dict[str, StepCurve]):
    """Columns over steps, by name; one that is not there has no number. Has state: what was added so far.

    Rows are added from the last to the first: the greatest step decides how long a stretch is.
    """

    length = 0

    def add(self, steps: Array, columns: Mapping[str, Array]) -> None:
        """Rows at ascending `steps`, int64 [rows]; `columns` float64 [rows], not finite: none."""
        if not len(steps):
            return
        self.length = self.length or int(steps[-1]) // STRETCHES + 1
        stretches = np.minimum(steps // self.length, STRETCHES - 1)
        starts = np.flatnonzero(np.diff(stretches, prepend=-1))
        for name, given in columns.items():
            column = np.asarray(given, np.float64)  # an integer of somebody else's may be beyond 64 bits
            if name in self or np.isfinite(column).any():
                self.setdefault(name, StepCurve()).add(stretches[starts], starts, column)

    def __missing__(self, name: str) -> StepCurve:
        return StepCurve()


def median(*curves: StepCurve) -> float:
    """Of the products of the columns, of one row a stretch; NaN without a number."""
    values = np.prod([curve.sample for curve in curves], axis=0)
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else np.nan
