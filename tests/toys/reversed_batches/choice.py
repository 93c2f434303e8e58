"""The toy schedule in plans. Row: `TABLE["reversed_batches"] = ChoiceRow("reversed_batches.choice", ...)`."""

from __future__ import annotations

from collections.abc import Iterable

from reversed_batches.state import ReversedBatchesState

from espalier.plan.ask import Ask, PlanDecision
from espalier.plan.base import Plan
from espalier.plan.choice import PlanChoice

EACH = 1e-3
"""Seconds that a micro-batch out of order costs, as if measured."""


class ReversedBatchesChoice(PlanChoice):
    """Micro-batches from the last to the first, where a rank has several."""

    def finish(self, best: PlanDecision, ask: Ask) -> Plan:
        """The plan with the schedule and its cost."""
        plan, batches = best.plan, best.plan.layout.accumulate
        if batches == 1 or plan.predicted is None:
            return plan
        predicted = plan.predicted.longer("reversed", EACH * batches)
        return plan.with_state(ReversedBatchesState(batches=batches)).changed(predicted=predicted)

    def words(self, best: PlanDecision, ask: Ask) -> Iterable[str]:
        """What it does."""
        if (batches := best.plan.state(ReversedBatchesState).batches) > 1:
            yield f"{batches} micro-batches run from the last to the first."


CHOICE = ReversedBatchesChoice()
