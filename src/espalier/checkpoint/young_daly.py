"""Young's formula for the checkpoint interval (doi 10.1145/361147.361115), as Daly has it to first order. Pure, no
torch.

With a stall of s seconds for each save and M seconds between failures, a period T wastes s / T + T / (2 M) of the time;
that is least for T = sqrt(2 s M). Where we deviate: M is not known when a run begins, so it starts from what the
plan expects of its machines (`plan.checkpoint_cost.between_failures`). The first failure puts one in an hour in its
place, since a fault that is not the machines' comes back sooner; every failure and every hour without one correct that.
And a save that costs less than a hundredth of the time anyway is made more often than that.
"""

from __future__ import annotations

import math
from typing import NamedTuple

ASSUMED = 3600.0
"""Seconds between failures where no plan says better, and what counts as seen before the first one."""
FREE = 0.01
"""Share of the time that saving may always take."""


class Interval(NamedTuple):
    """How often to save, and from what that follows. Seconds, except `steps`.

    Attributes:
        steps: between two saves; period: their time.
        stall: for each save; step: for each step; between_failures: as assumed and seen.
        optimal: sqrt(2 s M).
    """

    steps: int
    period: float
    stall: float
    step: float
    between_failures: float
    optimal: float

    def __str__(self) -> str:
        return (
            f"every {self.steps} steps: sqrt(2 s M) = {self.optimal:.3g} s with s = {self.stall:.3g} s for a save and "
            f"M = {self.between_failures:.3g} s between failures; no more than {FREE:.0%} of the time asks for "
            f"{self.stall / FREE:.3g} s; a step takes {self.step:.3g} s"
        )


def between_failures(seconds: float, failures: int, expected: float = ASSUMED) -> float:
    """M after `seconds` of a run with so many failures, where `expected` was it at the begin."""
    return ((min(expected, ASSUMED) if failures else expected) + seconds) / (1 + failures)


def optimal(stall: float, between: float) -> float:
    """The period (seconds) that wastes least: Young's formula."""
    return math.sqrt(2 * stall * between)


def interval(stall: float, step: float, between: float) -> Interval:
    """How often to save what stops a run with steps of `step` seconds for `stall` seconds."""
    best = optimal(stall, between)
    count = max(1, math.floor(min(best, stall / FREE) / step)) if step > 0 else 1
    return Interval(count, count * step, stall, step, between, best)
