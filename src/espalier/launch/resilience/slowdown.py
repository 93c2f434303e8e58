"""Lasting slowdown: decides whether a device or a link stays slower than planned, from several comparisons in a row.
Pure, no torch.

`straggler` names a slow rank early, for people; here is what a new plan may be made of: the same finding in a stated
number of comparisons one after the other, and the medians of what was measured in them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.launch.resilience.straggler import LEAST, leveled, slow_ranks

STAYS = 6
"""Comparisons one after the other in which the same must be found."""
LINK = 2.0
"""A link is slow when even the rank that waits least waits this many times what was planned."""
SHARE = 0.25
"""And when that wait is this part of a step: what is less cannot be won."""


@dataclass(frozen=True)
class Evidence:
    """What stayed so. Medians over the comparisons, in seconds a step.

    Attributes:
        busy: by rank, without its waits; step: of the slowest; wait: of the rank that waits least.
        slow: ranks that hold the others up; link: whether exchanges take longer than planned.
    """

    busy: tuple[float, ...]
    step: float
    wait: float
    slow: tuple[int, ...]
    link: bool


class Slowness:
    """Has state: the comparisons since something else was found.

    Args:
        planned: seconds a step that the plan lets ranks wait for exchanges; None: not known, links are not judged.
        work: of each rank, as planned (`straggler.leveled`).
    """

    def __init__(self, planned: float | None = None, work: Sequence[float] = ()) -> None:
        self._planned = planned
        self._work = work
        self._row: list[Evidence] = []

    def take(self, usual: Sequence[float], waited: Sequence[float]) -> Evidence | None:
        """One comparison: seconds of a step, and of waiting in it, by rank. What has stayed so, each time that it has;
        then it is counted anew."""
        look = self._look(usual, waited)
        self._row.append(look)
        slow = set(look.slow).intersection(*(comparison.slow for comparison in self._row))
        link = all(comparison.link for comparison in self._row)
        if not slow and not link:
            self._row = [look] if look.slow or look.link else []
            return None
        if len(self._row) < STAYS:
            return None
        row = self._row
        self._row = []
        seconds = tuple(statistics.median(comparison.busy[rank] for comparison in row) for rank in range(len(usual)))
        step, wait = (statistics.median(getattr(comparison, name) for comparison in row) for name in ("step", "wait"))
        return Evidence(seconds, step, wait, tuple(sorted(slow)), link)

    def _look(self, usual: Sequence[float], waited: Sequence[float]) -> Evidence:
        seconds = tuple(max(0.0, step - wait) for step, wait in zip(usual, waited, strict=True))
        step = max(usual)
        wait = min(waited)
        slow = tuple(sorted(slow_ranks(leveled(seconds, self._work))))
        link = self._planned is not None and wait >= max(LINK * self._planned, SHARE * step, LEAST)
        return Evidence(seconds, step, wait, slow, link)
