"""Speed of the loss: what the tuners of Sylvie (bits, late rows) and of TorchGT (edges that are left out) follow.

Both papers take the average f of losses, f <- 0.9 f + 0.1 loss, and compare how far it moved in the last five steps,
over the seconds of a step. Deviations: no clock is read, so that the log of a run says why; all of a window equal
decides nothing, where either rule would hold; a decision begins a window anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import numpy as np

from espalier.checkpoint.base import StateDict

WINDOW = 5
"""Steps whose speeds are compared."""
FIRST = 9
"""Steps before the first decision; the loss falls fast in these whatever is done."""
KEPT = 0.9
"""Weight of the past in the average of losses."""


class LossSpeed:
    """What the losses of a run say of its progress. Has state."""

    def __init__(self) -> None:
        self.steps = 0
        self.average = 0.0
        self.speeds = [0.0][:0]

    def heard(self, loss: float) -> int:
        """Of the next step. -1: the average has moved less from step to step in a window (never more); 1: more (never
        less); 0: neither, or it is too early."""
        before = self.average
        self.average = KEPT * before + (1 - KEPT) * loss if self.steps else loss
        self.steps += 1
        self.speeds = [*self.speeds[-WINDOW + 1 :], abs(self.average - before)]
        if self.steps <= FIRST or len(self.speeds) < WINDOW:
            return 0
        changes = np.diff(self.speeds)
        direction = int((changes >= 0).all()) - int((changes <= 0).all())
        if direction:
            self.speeds = []
        return direction

    def state_dict(self) -> StateDict:
        """All that decisions follow from."""
        return vars(self).copy()

    def load_state_dict(self, state: StateDict) -> None:
        """Takes back what `state_dict` gave; of a checkpoint without it, nothing."""
        vars(self).update({name: state[name] for name in vars(self) if name in state})


class LossTuner:
    """A `track.decision_log.Controller` that follows the speed of the loss. Has state: `coming`, the direction of the
    next turn."""

    def __init__(self) -> None:
        self.coming = 0
        self.speed = LossSpeed()

    def heard(self, signals: Iterable[float]) -> Self:
        """The loss of a step, over all ranks."""
        for loss in signals:
            self.coming = self.speed.heard(loss)
        return self

    def state_dict(self) -> StateDict:
        """All that decisions follow from."""
        return {"coming": self.coming, **self.speed.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        """Takes back what `state_dict` gave; of a checkpoint without it, nothing."""
        self.coming = state.get("coming", 0)
        self.speed.load_state_dict(state)
