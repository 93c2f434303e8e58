"""A toy schedule: micro-batches from the last to the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reversed_batches.options import ReversedBatchesOptions
from torch import nn

from espalier.parallel.schedule import Loss
from espalier.parallel.workload import Outcome
from espalier.plan.compose import Claim
from espalier.train.mechanism import Build, Mechanism
from espalier.train.whole_model import CLAIM, WholeModel, WholeSchedule


class Reversed(WholeSchedule):
    keep = 0

    def run(self, model: nn.Module, batches: Sequence[Any], loss: Loss) -> Outcome:
        return super().run(model, [*batches[: self.keep], *reversed(batches[self.keep :])], loss)


class ReversedMechanism(WholeModel):
    claim = Claim("reversed_batches", "stages", CLAIM.needs)
    schedule = Reversed

    def __init__(self, options: ReversedBatchesOptions) -> None:
        self.options = options

    def wrap(self, context: Build) -> None:
        super().wrap(context)
        assert isinstance(context.schedule, Reversed)
        context.schedule.keep = self.options.keep


def choose(recipe: Any, plan: Any) -> Mechanism | None:
    options = recipe.options(ReversedBatchesOptions)
    return None if options is None else ReversedMechanism(options)


def choose_planned(recipe: Any, plan: Any) -> Mechanism | None:
    return choose(recipe, plan) if "reversed_batches" in plan.choices else None
