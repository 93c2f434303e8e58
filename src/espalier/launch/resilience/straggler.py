"""Stragglers: finds the ranks that delay the others, by step time minus the time of waiting. Pure, no torch.

After MegaScale (arXiv 2402.15627), section 5, which finds stragglers by comparing ranks' own compute times. Where we
deviate: a plan may give ranks unlike work (stages of unequal pipelines, slices of waves), by which their times are
divided first; and one factor for all.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

FACTOR = 1.5
"""A rank is slow when its own time is this many times the (lower) median's."""
LEAST = 0.005
"""Seconds by which it must be slower: less than that is nobody's wait."""
LOOKS = 3
"""Times in a row that it must be so."""


LIGHTEST = 0.25
"""Of the most work of a rank: less counts as this, since what a step takes besides would look like slowness."""


def leveled(seconds: Sequence[float], work: Sequence[float]) -> Sequence[float]:
    """Each rank's own seconds a step as if it had as much work as the one that has most. `work`: of each rank, as
    planned, in any unit; empty: all have as much."""
    most = max(work, default=0.0)
    if most <= 0:
        return seconds
    return [value / max(planned / most, LIGHTEST) for value, planned in zip(seconds, work, strict=True)]


def scores(seconds: Sequence[float]) -> list[float]:
    """Each rank's own seconds a step as a multiple of the lower median; 1 where nothing is known."""
    middle = statistics.median_low(seconds)
    return [value / middle if middle > 0 else 1.0 for value in seconds]


def slow_ranks(seconds: Sequence[float]) -> frozenset[int]:
    """The ranks whose own seconds a step are much above the lower median's."""
    middle = statistics.median_low(seconds)
    return frozenset(rank for rank, value in enumerate(seconds) if value >= FACTOR * middle and value - middle >= LEAST)


class Stragglers:
    """Looks now and then. Has state: how often each rank was slow in a row, and who was named already. `work`: as
    `leveled` has it."""

    def __init__(self, work: Sequence[float] = ()) -> None:
        self._work = work
        self._row: dict[int, int] = {}
        self._named: set[int] = set()

    def look(self, seconds: Sequence[float]) -> list[tuple[int, float]]:
        """Ranks that are found slow now, each once, with their score. `seconds`: of a step without waits, by rank."""
        seconds = leveled(seconds, self._work)
        stragglers = []
        delaying = slow_ranks(seconds)
        for rank, score in enumerate(scores(seconds)):
            self._row[rank] = self._row.get(rank, 0) + 1 if rank in delaying and score > 1 else 0
            if self._row[rank] >= LOOKS and rank not in self._named:
                self._named.add(rank)
                stragglers.append((rank, score))
        return stragglers
