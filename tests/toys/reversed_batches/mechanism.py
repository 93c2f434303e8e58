"""A toy schedule: micro-batches from the last to the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from espalier.parallel.schedule import Loss
from espalier.parallel.workload import Outcome
from espalier.plan.compose import Claim
from espalier.train.mechanism import Mechanism
from espalier.train.whole_model import CLAIM, WholeModel, WholeSchedule


class Reversed(WholeSchedule):
    def run(self, model: nn.Module, batches: Sequence[Any], loss: Loss) -> Outcome:
        return super().run(model, list(reversed(batches)), loss)


class ReversedMechanism(WholeModel):
    claim = Claim("reversed_batches", "stages", CLAIM.needs)
    schedule = Reversed


def choose(recipe: Any, plan: Any) -> Mechanism:
    return ReversedMechanism()


def choose_planned(recipe: Any, plan: Any) -> Mechanism | None:
    return ReversedMechanism() if "reversed_batches" in plan.choices else None
