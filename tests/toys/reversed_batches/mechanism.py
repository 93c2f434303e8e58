"""A toy schedule: micro-batches from the last to the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from espalier.compose import Claim
from espalier.mechanism import Mechanism
from espalier.stages.base import Loss
from espalier.stages.whole import CLAIM, Whole, WholeModel
from espalier.workload import Outcome


class Reversed(Whole):
    def run(self, model: nn.Module, batches: Sequence[Any], loss: Loss) -> Outcome:
        return super().run(model, list(reversed(batches)), loss)


class ReversedMechanism(WholeModel):
    claim = Claim("reversed_batches", "stages", CLAIM.needs)
    schedule = Reversed


def choose(recipe: Any, plan: Any) -> Mechanism:
    return ReversedMechanism()
