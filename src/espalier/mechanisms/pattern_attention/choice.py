"""Attention along a graph's edges in plans: the rule by which training steps leave edges out."""

from __future__ import annotations

from espalier.mechanisms.pattern_attention.edge_dropping import FIRST, LEVEL_RULE, LEVELS, SIGNAL, bound
from espalier.plan.ask import Ask, PlanDecision
from espalier.plan.base import AdaptiveRule, Plan
from espalier.plan.choice import PlanChoice


class ReformationChoice(PlanChoice):
    """Edges that a graph transformer leaves out, where its recipe lets some go."""

    def finish(self, best: PlanDecision, ask: Ask) -> Plan:
        """The plan with the rule."""
        if bound(ask.request.recipe) is None:
            return best.plan
        rule = AdaptiveRule(name=LEVEL_RULE, start=FIRST, low=0, high=LEVELS - 1, signal=SIGNAL)
        return best.plan.changed(rules=(*best.plan.rules, rule))


CHOICE = ReformationChoice()
