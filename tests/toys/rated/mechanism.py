"""A toy agreement: the plain one at a multiple of the learning rate."""

from __future__ import annotations

from typing import Any

from espalier.parallel.agreement import AgreedStep
from espalier.parallel.workload import Outcome
from espalier.plan.compose import Claim
from espalier.train.every_step import CLAIM, StepAgreement, agreement
from espalier.train.mechanism import Build, Mechanism


class Rated(StepAgreement):
    factor = 0.5

    def step(self, outcome: Outcome, learning_rate: float, stop: bool) -> AgreedStep:
        return super().step(outcome, self.factor * learning_rate, stop)


class RatedMechanism(Mechanism):
    claim = Claim("rated", "sync", CLAIM.needs, CLAIM.changes, CLAIM.forbids, CLAIM.after)

    def wrap(self, context: Build) -> None:
        plain = agreement(context)
        context.agreement = Rated(plain.sharding, plain.optimizer, plain.totals, plain.clip)


def choose(recipe: Any, plan: Any) -> Mechanism:
    return RatedMechanism()
