"""Whole graph or drawn batches, where a recipe leaves that open (`graph.fanout = "auto"`): what passes over the
training nodes in the fewer seconds. No torch.

A step on the whole graph, on one rank or over parts, is a pass; of drawn batches, whose seeds ranks share, many steps
are. Both do as many passes, so the recipe's steps are multiplied; what is learned in a pass is not weighed.
"""

from __future__ import annotations

from collections.abc import Callable

from espalier.mechanisms.disk_batches.state import DiskBatchesState
from espalier.plan.base import Plan
from espalier.recipe import Recipe, units
from espalier.recipe.graphs import Batches


def choose(
    recipe: Recipe,
    drawn: Batches | None,
    planned: Callable[[Batches], Plan],
    tried: Callable[[Batches, Plan], float | None],
) -> tuple[Batches, str]:
    """What steps of `recipe` train on, and why.

    Args:
        drawn: batches to weigh the whole graph against; None: the network cannot be trained on them.
        planned: the plan of the recipe with such batches.
        tried: seconds of a step of these batches and their plan, in a trial; None: there is none, and estimates count.
    """
    whole = Batches()
    if drawn is None:
        return whole, "Batches: the whole graph in each step: this network, or this graph, has no others."
    plans = planned(whole), planned(drawn)
    measured = [tried(batches, plan) for batches, plan in zip((whole, drawn), plans, strict=True)]
    of_whole, of_drawn = measured if None not in measured else (plan.step_seconds for plan in plans)
    assert of_whole is not None
    assert of_drawn is not None
    many = drawn.steps * of_drawn
    by = "measured" if None not in measured else "by estimate"
    asked = f"graph.fanout={list(drawn.fanout)} train.batch_tokens={drawn.batch_tokens}"
    ranks = [units.plural(len(plan.trainers), "rank") for plan in plans]
    graph = f"on the whole graph {units.show_seconds(of_whole)} on {ranks[0]}"
    others = f"in drawn batches ({asked}) {units.show_seconds(many)} on {ranks[1]}"
    if of_whole <= many:
        return whole, f"Batches: the whole graph in each step. A pass over the nodes takes {graph}, {others}; {by}."
    steps = f"the recipe's {recipe.train.steps:,} steps are passes, of {drawn.steps:,} each"
    return (
        drawn,
        f"Batches: drawn ones; {steps}. A pass over the nodes takes {others}, {graph} (graph.fanout=[]); {by}.",
    )


def told(plan: Plan, chosen: Batches, why: str) -> Plan:
    """The plan with what was chosen."""
    return plan.with_state(DiskBatchesState(batches=chosen)).changed(why=(*([why] if why else []), *plan.why))
