"""Quantizers of a network that ranks train together: rows are rounded by the rank that owns them, before they cross."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from espalier.mechanisms.few_bits.quantization import begin_over_ranks, equipped
from espalier.plan.compose import Claim
from espalier.train.mechanism import Build, Mechanism

if TYPE_CHECKING:
    from espalier.graph.run import GraphRun
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe

CLAIM = Claim("quantization", question="aggregate", needs={"rows of the graph cross"}, alone=False)
"""Rows are rounded before they cross."""


class RoundedParts(Mechanism):
    """Tells quantizers which rows this rank has."""

    claim = CLAIM

    def wrap(self, context: Build) -> None:
        """Steps of a network whose graph is in parts begin now, by all of them together."""
        run = cast("GraphRun", context.workload)
        model = context.model
        assert model is not None
        part = run.batching.part
        equipped(model).over_ranks(part.rows)
        if run.graph.partition is not None and model.training:  # one that is evaluated has its steps
            begin_over_ranks(model, part.features, part.exact, part.group)


def choose(recipe: Recipe, plan: Plan) -> Mechanism:
    """Where the recipe has `[quant]` and rows cross."""
    return RoundedParts()
