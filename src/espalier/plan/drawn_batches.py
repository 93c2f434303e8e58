"""Whole graph or drawn batches, where a recipe leaves that open (`graph.fanout = "auto"`): what passes over the
training nodes in the fewer seconds. No torch.

A step on the whole graph, on one rank or over parts, is a pass; of drawn batches, whose seeds ranks share, many steps
are. Both do as many passes, so the recipe's steps are multiplied; what is learned in a pass is not weighed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from espalier import units
from espalier.config.graphs import Batches, with_batches
from espalier.plan.base import Plan
from espalier.plan.halo_exchange import seconds


def is_open(recipe: Any) -> bool:
    """Whether the plan is to choose."""
    return recipe.graph is not None and recipe.graph.fanout == "auto"


def choose(recipe: Any, drawn: Batches | None, planned: Callable[[Any], Plan]) -> tuple[Batches, str]:
    """What steps train on, and why.

    Args:
        drawn: batches to weigh the whole graph against; None: the network cannot be trained on them.
        planned: the plan of a recipe in which nothing is open.
    """
    if drawn is None:
        return Batches(), "Batches: the whole graph in each step: this network, or this graph, has no others."
    whole, other = planned(with_batches(recipe, Batches())), planned(with_batches(recipe, drawn))
    one, many = seconds(whole), drawn.steps * seconds(other)
    asked = f"graph.fanout={list(drawn.fanout)} train.batch_tokens={drawn.batch_tokens}"
    here = f"on the whole graph {units.show_seconds(one)} on {units.plural(len(whole.trainers), 'rank')}"
    there = f"in drawn batches ({asked}) {units.show_seconds(many)} on {units.plural(len(other.trainers), 'rank')}"
    if one <= many:
        return Batches(), f"Batches: the whole graph in each step. A pass over the nodes takes {here}, {there}."
    steps = f"the recipe's {recipe.train.steps:,} steps are passes, of {drawn.steps:,} each"
    return drawn, f"Batches: drawn ones; {steps}. A pass over the nodes takes {there}, {here} (graph.fanout=[])."


def told(plan: Plan, chosen: Batches | None, why: str = "") -> Plan:
    """The plan with what was chosen."""
    return msgspec.structs.replace(plan, batches=chosen, why=(*([why] if why else []), *plan.why))
