"""Whole graph or drawn batches, where a recipe leaves that open (`graph.fanout = "auto"`): what passes over the
training nodes in the fewer seconds. No torch.

A step on the whole graph, on one rank or over parts, is a pass; of drawn batches, whose seeds ranks share, many steps
are. Both do as many passes, so the recipe's steps are multiplied; what is learned in a pass is not weighed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from espalier.mechanisms.disk_batches.state import DiskBatchesState
from espalier.plan.base import Plan
from espalier.recipe import units
from espalier.recipe.graphs import Batches, with_batches


def _nothing(recipe: Any, plan: Plan) -> float | None:
    return None


def choose(
    recipe: Any,
    drawn: Batches | None,
    planned: Callable[[Any], Plan],
    tried: Callable[[Any, Plan], float | None] = _nothing,
) -> tuple[Batches, str]:
    """What steps train on, and why.

    Args:
        drawn: batches to weigh the whole graph against; None: the network cannot be trained on them.
        planned: the plan of a recipe in which nothing is open.
        tried: seconds of a step of such a recipe and its plan, in a trial; None: there is none, and estimates count.
    """
    if drawn is None:
        return Batches(), "Batches: the whole graph in each step: this network, or this graph, has no others."
    both = [with_batches(recipe, batches) for batches in (Batches(), drawn)]
    whole, other = map(planned, both)
    measured = [tried(asked, plan) for asked, plan in zip(both, (whole, other), strict=True)]
    whole_seconds, each = measured if None not in measured else (whole.step_seconds, other.step_seconds)
    assert whole_seconds is not None
    assert each is not None
    many, by = drawn.steps * each, "measured" if None not in measured else "by estimate"
    asked = f"graph.fanout={list(drawn.fanout)} train.batch_tokens={drawn.batch_tokens}"
    on_graph = f"on the whole graph {units.show_seconds(whole_seconds)} on {units.plural(len(whole.trainers), 'rank')}"
    there = f"in drawn batches ({asked}) {units.show_seconds(many)} on {units.plural(len(other.trainers), 'rank')}"
    if whole_seconds <= many:
        return (
            Batches(),
            f"Batches: the whole graph in each step. A pass over the nodes takes {on_graph}, {there}; {by}.",
        )
    steps = f"the recipe's {recipe.train.steps:,} steps are passes, of {drawn.steps:,} each"
    return (
        drawn,
        f"Batches: drawn ones; {steps}. A pass over the nodes takes {there}, {on_graph} (graph.fanout=[]); {by}.",
    )


def told(plan: Plan, chosen: Batches, why: str) -> Plan:
    """The plan with what was chosen."""
    return plan.with_state(DiskBatchesState(batches=chosen)).changed(why=(*([why] if why else []), *plan.why))
