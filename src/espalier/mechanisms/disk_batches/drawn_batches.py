"""Whole graph or drawn batches, where a recipe leaves that open (`graph.fanout = "auto"`): what is assumed to reach an
accuracy in the fewer seconds. No torch.

A step on the whole graph, on one rank or over parts, is a pass; of drawn batches, whose seeds ranks share, many steps
are. Both do as many passes, so the recipe's steps are multiplied. How much is learned is a matter of steps: see
`STEPS_TO_ACCURACY`.
"""

from __future__ import annotations

from collections.abc import Callable

from espalier.mechanisms.disk_batches.state import DiskBatchesState
from espalier.plan.base import Plan
from espalier.recipe import Recipe, units
from espalier.recipe.graphs import Batches

STEPS_TO_ACCURACY = 61, 96
"""Steps of the whole graph, and of drawn batches of 1,024 nodes, until 96.2 % of the held-out nodes of a planted graph
of 200,000 are right, each with the best of three learning rates (bench/sylvie.py, one run). Of other graphs the ratio
is assumed to be the same, but no more passes in drawn batches than over the whole graph."""


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
    of_batches = min(STEPS_TO_ACCURACY[1], STEPS_TO_ACCURACY[0] * drawn.steps)
    spent = STEPS_TO_ACCURACY[0] * of_whole, of_batches * of_drawn
    assumed = (
        f"to an accuracy {units.show_seconds(spent[0])} and {units.show_seconds(spent[1])}, assumed "
        f"{STEPS_TO_ACCURACY[0]} steps of the whole graph or {of_batches} of drawn batches"
    )
    asked = f"graph.fanout={list(drawn.fanout)} train.batch_tokens={drawn.batch_tokens}"
    ranks = [units.plural(len(plan.trainers), "rank") for plan in plans]
    graph = f"on the whole graph (graph.fanout=[]) {units.show_seconds(of_whole)} on {ranks[0]}"
    others = f"in drawn batches ({asked}) {units.show_seconds(many)} on {ranks[1]}"
    if spent[0] <= spent[1]:
        taken, chosen = whole, "the whole graph in each step"
    else:
        taken = drawn
        chosen = f"drawn ones; the recipe's {recipe.train.steps:,} steps are passes, of {drawn.steps:,} each"
    return taken, f"Batches: {chosen}. A pass over the nodes takes {graph}, {others}; {assumed}; {by}."


def told(plan: Plan, chosen: Batches, why: str) -> Plan:
    """The plan with what was chosen."""
    return plan.with_state(DiskBatchesState(batches=chosen)).changed(why=(*([why] if why else []), *plan.why))
