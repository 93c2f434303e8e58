"""Curves of a run in bounded memory: of every column a few numbers for each of at most a thousand stretches of steps.

The least and the greatest of a stretch are kept beside its mean, so that a spike of one step stays visible.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

STRETCHES = 1000


class Curves:
    """Columns over steps, by name. Has state: what was added so far.

    Rows are added from the last to the first: the greatest step decides how long a stretch is.

    Attributes:
        last: the last finite value of each column.
    """

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        self._length = 0
        self._columns: dict[str, tuple[Array, Array]] = {}  # least, greatest, sample; total, count

    def add(self, steps: Array, columns: Mapping[str, Array]) -> None:
        """Rows at ascending `steps`, int64 [rows]; `columns` float64 [rows], not finite: none."""
        if not len(steps):
            return
        self._length = self._length or int(steps[-1]) // STRETCHES + 1
        stretches = np.minimum(steps // self._length, STRETCHES - 1)
        starts = np.flatnonzero(np.diff(stretches, prepend=-1))
        at = stretches[starts]
        for name, column in columns.items():
            if name not in self._columns:
                self._columns[name] = np.full((3, STRETCHES), np.nan), np.zeros((2, STRETCHES))
            (least, greatest, sample), (total, count) = self._columns[name]
            finite = np.isfinite(column)
            if name not in self.last and finite.any():
                self.last[name] = float(column[finite][-1])
            values = np.where(finite, column, np.nan)
            least[at] = np.fmin(least[at], np.fmin.reduceat(values, starts))
            greatest[at] = np.fmax(greatest[at], np.fmax.reduceat(values, starts))
            sample[at] = values[starts]
            total[at] += np.add.reduceat(np.where(finite, column, 0.0), starts)
            count[at] += np.add.reduceat(finite, starts, dtype=np.float64)

    def __contains__(self, name: str) -> bool:
        """Whether the column has a number."""
        return name in self.last

    def names(self, prefix: str = "") -> list[str]:
        """The columns that have a number and begin with `prefix`."""
        return [name for name in self.last if name.startswith(prefix)]

    def least(self, name: str) -> Array:
        """[STRETCHES] float64, NaN where there is none; likewise below."""
        return self._of(name)[0][0]

    def greatest(self, name: str) -> Array:
        return self._of(name)[0][1]

    def sample(self, name: str) -> Array:
        """Of one row of each stretch."""
        return self._of(name)[0][2]

    def mean(self, name: str) -> Array:
        total, count = self._of(name)[1]
        return np.divide(total, count, out=np.full(STRETCHES, np.nan), where=count > 0)

    def total(self, name: str) -> float:
        """The sum of the column; 0 without a number."""
        return float(self._of(name)[1][0].sum())

    def average(self, name: str) -> float:
        """The mean of the column; NaN without a number."""
        return self.total(name) / float(self._of(name)[1][1].sum()) if name in self else np.nan

    def median(self, *names: str) -> float:
        """Of the products of the columns, of one row a stretch; NaN without a number."""
        values = np.prod([self.sample(name) for name in names], axis=0)
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else np.nan

    def lowest(self, name: str) -> float:
        """The least number; NaN without one."""
        return float(np.fmin.reduce(self.least(name)))

    def peak(self, name: str) -> float:
        """The greatest number; 0 without one."""
        return float(np.fmax.reduce(self.greatest(name), initial=0.0))

    def _of(self, name: str) -> tuple[Array, Array]:
        return self._columns.get(name, (np.full((3, STRETCHES), np.nan), np.zeros((2, STRETCHES))))
