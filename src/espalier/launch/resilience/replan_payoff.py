"""Payoff of a re-plan: the rest of the run under the old and the new plan, and what the switch costs. Pure, no torch.

After Unicron (arXiv 2401.00134), which chooses how to reconfigure by what it costs. Where we deviate: the step under
the new plan is the measured one times the ratio that the cost model gives both plans at the measured speeds, so that
what the model is wrong by for both falls out.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

MARGIN = 0.1
"""A switch must save this part of the time that is left: less is within what a prediction is wrong by."""
MOST = 4
"""Switches in the life of one supervisor."""
REST = 10.0
"""A switch must have been paid for this many times in seconds before the next: at most so often."""
NEWS = 1.25
"""Speeds that differ by less than this factor are no new evidence."""


@dataclass(frozen=True)
class Payoff:
    """What staying and going on otherwise would take (seconds of the rest, the switch's `cost` among `go`).

    `step`: seconds of a step now, and `then` by prediction; `left`: steps.
    """

    step: float
    then: float
    left: int
    cost: float

    @property
    def stay(self) -> float:
        """Seconds of the rest as it is."""
        return self.left * self.step

    @property
    def go(self) -> float:
        """Seconds of the switch and of the rest after it."""
        return self.left * self.then + self.cost

    @property
    def gain(self) -> float:
        """Seconds that the switch saves; negative: it loses."""
        return self.stay - self.go

    @property
    def worth(self) -> bool:
        """Whether it saves enough."""
        return self.gain > MARGIN * self.stay

    def __str__(self) -> str:
        return (
            f"the {self.left:,} steps left would take {self.stay:.3g} s at {self.step:.3g} s a step, and "
            f"{self.go:.3g} s at {self.then:.3g} s a step with {self.cost:.3g} s for the switch: "
            f"{self.gain:+.3g} s saved"
        )


def weigh(step: float, ratio: float, left: int, cost: float) -> Payoff:
    """Of `left` steps of `step` measured seconds that would take `ratio` times as long after a switch of `cost` s."""
    return Payoff(step, step * ratio, max(0, left), max(0.0, cost))


def news(before: Sequence[float], now: Sequence[float]) -> bool:
    """Whether ranks show something else `now` (seconds a step, by rank) than `before`."""
    return len(before) != len(now) or any(map(_differ, before, now))


class Turns:
    """How often a run may change its shape. Has state: the switches there were, and what was known when each shape was
    left."""

    def __init__(self) -> None:
        self._count = 0
        self._last: tuple[float, float] | None = None
        self._left: dict[Hashable, Mapping[int, float]] = {}

    def allowed(self, now: float, shape: Hashable, speeds: Mapping[int, float]) -> bool:
        """Whether the run may take `shape` at `now` (seconds), places having shown `speeds` (how many times as long as
        the others). Not so often, and not back to one that was left, unless places show something else by now."""
        if self._count >= MOST:
            return False
        if self._last is not None and now - self._last[0] < REST * self._last[1]:
            return False
        before = self._left.get(shape)
        return before is None or any(_differ(speeds.get(seat, 1.0), value) for seat, value in before.items())

    def took(self, now: float, cost: float, left: Hashable, speeds: Mapping[int, float]) -> None:
        """A switch away from the shape `left` at `now`, for an expected `cost` (seconds)."""
        self._count += 1
        self._last = (now, cost)
        self._left[left] = dict(speeds)


def _differ(first: float, other: float) -> bool:
    return max(first, other) >= NEWS * min(first, other) and first != other
