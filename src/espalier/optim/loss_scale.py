"""Dynamic loss scaling: fp16 training with a loss that is scaled up, so that small gradients do not become zero.

After Micikevicius et al., "Mixed precision training" (arXiv 1710.03740), with the constants of `torch.amp.GradScaler`.
It deviates in one way: whether a gradient overflowed is read off the norm of the summed gradient, which all ranks that
hold the model know to the same bits, so that no rank leaves a step out alone and no further exchange is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from espalier.optim.base import StateDict

START = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
"""Powers of two: scaling changes no bit of a gradient that is in range."""
INTERVAL = 2000
"""Steps without overflow after which the factor grows."""
LEAST = 1.0
"""At this factor an overflow is the model's own: the run ends as in other precisions."""


class LossScale:
    """The factor of the loss. Stateful.

    Attributes:
        factor: of the loss, and so of all gradients until they are applied.
        healthy: steps since it last changed; skipped: steps that were left out in all.
    """

    def __init__(self) -> None:
        self.factor = START
        self.healthy = 0
        self.skipped = 0

    def after(self, finite: bool) -> bool:
        """Takes whether the gradient of a step is finite. Returns whether the step is left out for the next to go on
        with a smaller factor."""
        if finite:
            self.healthy += 1
            if self.healthy == INTERVAL:
                self.factor = self.factor * GROWTH
                self.healthy = 0
            return False
        if self.factor <= LEAST:
            return False
        self.factor = self.factor * BACKOFF
        self.healthy = 0
        self.skipped += 1
        return True

    def state_dict(self) -> StateDict:
        return {"factor": self.factor, "healthy": self.healthy, "skipped": self.skipped}

    def load_state_dict(self, state: StateDict) -> None:
        self.factor = float(state["factor"])
        self.healthy = int(state["healthy"])
        self.skipped = int(state["skipped"])
