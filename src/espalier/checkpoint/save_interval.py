"""Save interval: when the next checkpoint is due, by Young's formula (`young_daly`) over the measured cost of saves. No
torch.

A save costs what training stands still for it, and what the steps beside its writing take longer than the others. Where
we deviate from the formula: never more often than a save takes to be written; and where validations are not rarer than
half of the period, a save follows the first one after that, so that it bears a validation loss.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from espalier.checkpoint import young_daly

if TYPE_CHECKING:
    from espalier.checkpoint.save_and_restore import Checkpoints

FIRST = 10
"""Steps until the first save, where no plan says better."""
REMEMBERED = 5
"""Saves whose cost counts, by the median: the first one maps its pages, a later one may meet a busy disk."""
_KEPT = 0.8
"""How much of the usual step's time stays at each new one."""

Mean = Callable[[Sequence[float]], list[float]]
"""Each value's mean over all ranks."""


class SaveInterval(NamedTuple):
    """How often to save, and from what that follows. Seconds, except `steps`.

    Attributes:
        steps: between two saves.
        cost: of a save; written: from its begin to its end on the disk; step: of each step.
        between_failures: as assumed and seen.
    """

    steps: int
    cost: float
    written: float
    step: float
    between_failures: float

    def __str__(self) -> str:
        best = young_daly.optimal(self.cost, self.between_failures)
        return (
            f"every {self.steps} steps: sqrt(2 s M) = {best:.3g} s with s = {self.cost:.3g} s for a save and M = "
            f"{self.between_failures:.3g} s between failures; it is written in {self.written:.3g} s; a step takes "
            f"{self.step:.3g} s"
        )


def choose(cost: float, written: float, step: float, between: float) -> SaveInterval:
    """How often to save what costs `cost` seconds and is written in `written`, with steps of `step` seconds."""
    period = max(young_daly.optimal(cost, between), written)
    return SaveInterval(max(1, round(period / step)) if step > 0 else 1, cost, written, step, between)


class RunBeginning(NamedTuple):
    """What is known when a run begins or goes on.

    Attributes:
        steps: until the first save, with one failure each `expected` seconds; step: those done already.
        saved: those of the newest save; a run that fails before each next one would never get there if it counted anew.
        between: seconds between failures, as known now; failures: how many there were.
    """

    steps: int
    step: int
    saved: int = 0
    between: float = young_daly.ASSUMED
    failures: int = 0
    expected: float = young_daly.ASSUMED


class Pace:
    """When the next save is due. Has state: what steps and saves took. All ranks hold the same answer.

    Args:
        writing: the store that is saved to.
        begin: from where.
        mean: called after the same steps on all ranks.
        tell: called with the steps between saves and their reason when these are first known, and whenever they change
            to half or double.
    """

    def __init__(self, writing: Checkpoints, begin: RunBeginning, mean: Mean, tell: Callable[[int, str], None]) -> None:
        self._writing, self._begin, self._mean, self._tell = writing, begin, mean, tell
        self._began = time.monotonic()
        self._steps = max(1, round(begin.steps * (begin.between / begin.expected) ** 0.5))
        self._step = begin.step
        self._saved = begin.saved
        self._usual = self._blocked = self._beside = 0.0
        self._busy = False
        self._costs: list[float] = []

    def clock(self, step: int, seconds: float) -> None:
        """The steps up to `step` took so long. Called after each."""
        count = step - self._step
        self._step = step
        busy = self._busy
        self._busy = self._writing.busy
        if count <= 0:
            return
        if busy or self._busy:
            self._beside += seconds - count * self._usual if self._usual else 0.0
        else:
            self._usual = _KEPT * self._usual + (1 - _KEPT) * seconds / count if self._usual else seconds / count

    def due(self, step: int, validated: bool) -> bool:
        """Whether to save after `step` steps; `validated`: their validation loss is known."""
        since = step - self._saved
        return since >= self._steps or (validated and 2 * since >= self._steps)

    def saved(self, step: int, stood: float) -> None:
        """A save of `step` has begun, for which training stood still so long. All ranks call it."""
        between = self._begin.between + (time.monotonic() - self._began) / (1 + self._begin.failures)
        cost = self._blocked + max(0.0, self._beside)
        cost, usual, wrote, between = self._mean([cost, self._usual, self._writing.wrote, between])
        if cost and usual:
            self._costs = [*self._costs, cost][-REMEMBERED:]
            interval = choose(statistics.median(self._costs), wrote, usual, between)
            if len(self._costs) == 1 or not 0.5 <= interval.steps / self._steps <= 2.0:
                self._tell(interval.steps, f"a checkpoint {interval}")
                self._steps = interval.steps
        self._saved, self._blocked, self._beside, self._busy = step, stood, 0.0, True
