"""How many steps a round has, where that follows measured waits: one number for all ranks of all replicas. No torch.

After a round each rank measures what length would have hidden its flights, and the ranks of a replica take the largest
of their wishes. That goes with the replica's next flight; who has used a flight knows the largest wish of all, and the
first round that begins after that is so long. So a length is known to all before any rank begins a round of it. What
was decided is in the run's log, and a run that is given the log decides the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from espalier.mechanisms.local_rounds.cost import MARGIN
from espalier.recipe.errors import UserError

NAME = "sync.steps"
"""Of the rule, in a plan and in the log."""
EXPOSED = 0.02
"""Share of a round that may be spent waiting before rounds become longer."""
SLACK = 0.5
"""Rounds become shorter when a flight takes less than this share of one."""
STAY = 2
"""Rounds for which a length stays that rounds have become longer to, the first time; each time twice as many. Without
that, where a flight and what delays it fit into two steps and not into one, lengths would swing for ever."""


@dataclass(frozen=True)
class Rounds:
    """How long a replica's rounds are.

    Attributes:
        steps: local steps of the fastest replica.
        pace: this replica's steps for each of the fastest, above 0, at most 1.
        weight: of one of its steps in a mean, such as its samples.
        adapt: whether `steps` follows the measured waits.
    """

    steps: int
    pace: float = 1.0
    weight: float = 1.0
    adapt: bool = False

    @property
    def own_steps(self) -> int:
        """Local steps of this replica in a round."""
        return max(1, round(self.pace * self.steps))

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"sync.steps = {self.steps}.", why="a round has at least one step", do="sync.steps=1")
        if not 0 < self.pace <= 1:
            raise UserError(f"pace = {self.pace}.", why="the fastest replica has 1, others less")


class Length(NamedTuple):
    """The lengths that one rank knows of, in steps of the fastest replica: a `track.decision_log.Controller`.

    Attributes:
        steps: of this round.
        adapt: whether rounds follow the measured waits.
        wish: of this replica, after its last round; 0: none.
        coming: of the next round, if that is known to be another; else 0.
        stays: rounds before they may become shorter; stay: as many when they next become longer.
    """

    steps: int
    adapt: bool = False
    wish: float = 0.0
    coming: int = 0
    stays: int = 0
    stay: int = STAY

    def wished(self, seconds: float, waited: float, flown: float) -> float:
        """What this rank by itself asks for, after `seconds` with `waited` of them for flights of `flown` seconds."""
        step = max(1e-9, (seconds - waited) / self.steps)
        fits = -(-MARGIN * flown // step)
        if waited > EXPOSED * seconds:
            return max(self.steps + 1, fits)
        if 0 < flown < SLACK * self.steps * step and not self.stays:
            return max(1.0, fits)
        return float(self.steps)

    @property
    def values(self) -> dict[str, int]:
        return {NAME: self.steps}

    def heard(self, signals: Iterable[float]) -> Length:
        """With the wishes of all members, as a flight brought them."""
        wish = max(signals)
        return self._replace(coming=int(wish)) if self.adapt and wish else self

    def turned(self, recorded: Mapping[str, int]) -> Length:
        """The next round begins. What was `recorded` of it counts more than what was measured now."""
        steps = recorded.get(NAME) or self.coming or self.steps
        if steps > self.steps:
            return self._replace(steps=steps, coming=0, stays=self.stay, stay=2 * self.stay)
        return self._replace(steps=steps, coming=0, stays=max(0, self.stays - 1))
