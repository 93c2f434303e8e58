"""Halo exchange in plans: the rows of a cut graph that cross, fewer ranks where these are faster, and what other ways
of batching would take. No torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from espalier.graph.sampling.batch_strategy import WholeGraph
from espalier.mechanisms.halo_exchange import halo_plan as planned
from espalier.plan import trials
from espalier.plan.ask import Ask, PlanDecision
from espalier.plan.base import Plan
from espalier.plan.choice import PlanChoice
from espalier.plan.decide import decide
from espalier.plan.layout_decision import best_layout
from espalier.plan.request import Request
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from espalier.graph.workload import GraphWorkload


class HaloChoice(PlanChoice):
    """What a graph that is cut over ranks, or could be, adds to a plan."""

    def divided(self, request: Request) -> str:
        """Of a graph that is cut, its nodes."""
        return "" if _whole_graph(request) is not None else "training nodes of the graph"

    def finish(self, best: PlanDecision, ask: Ask) -> Plan:
        """The plan with the rows that cross; of one rank instead of several where that is faster than their exchange,
        in trials where both can be tried."""
        request, plan, whole_graph = ask.request, best.plan, _whole_graph(ask.request)
        if whole_graph is not None:
            only_rank = len(plan.trainers) == ask.cluster.machines == 1
            if plan.replicas or only_rank:
                return plan
            return planned.with_whole_graph(plan, _instead_of_whole(whole_graph, ask))
        if not best.fits:
            return plan
        halos, pinned = request.profile.facts["halo_exchange"], request.pin.ranks
        most = halos.most_ranks
        if most is not None and len(plan.trainers) > most and pinned is None:
            plan = _on_ranks(most, ask).plan
        plan = _beside_batches(plan, ask)
        several = planned.with_halos(plan, halos, ask.cluster)
        if len(plan.trainers) == 1 or pinned is not None or request.recipe.sync.by_rounds:
            return several
        try:
            alone = _on_ranks(1, ask)
        except UserError:  # of machines that are named each has a rank
            return several
        return _faster(alone.plan, several, ask) if alone.fits else several


def _on_ranks(count: int, ask: Ask) -> PlanDecision:
    return _estimated(ask.changed(pin=ask.request.pin.changed(ranks=count)))


def _estimated(ask: Ask) -> PlanDecision:
    return best_layout(replace(ask, trials=None))


def _faster(alone: Plan, several: Plan, ask: Ask) -> Plan:
    """The plan of one rank, or that of several."""
    both = [alone, several]
    measured = ask.trials(both) if ask.trials is not None else {}
    tried = (trials.sentence(both, measured),) if measured else ()
    one_rank, more = (measured.get(trials.key(plan), plan.step_seconds) for plan in both)
    if one_rank >= more:
        return several.changed(why=(*tried, *several.why))
    alone = _beside_batches(alone.changed(why=(*tried, *alone.why)), ask)
    return planned.with_halos(alone, ask.request.profile.facts["halo_exchange"], ask.cluster, instead_of=several)


def _whole_graph(request: Request) -> WholeGraph | None:
    """What could be cut; None: it is."""
    fact = request.profile.facts["halo_exchange"]
    return fact if isinstance(fact, WholeGraph) else None


def _instead_of_whole(whole_graph: WholeGraph, ask: Ask) -> list[tuple[str, Plan, int]]:
    """See `planned.with_whole_graph`, by estimates."""
    whole = whole_graph.cut()
    if whole is None:
        return []
    ask = ask.changed(facts={**ask.request.profile.facts, "halo_exchange": whole.halos()}, anatomy=whole.anatomy)
    try:
        parts = decide(ask.request, ask.cluster, ask.calibration)
    except UserError:  # more ranks are asked for than there are nodes
        return []
    others = [("[graph.halo]", parts.plan, 1)] if parts.fits else []
    if (drawn := _batches(ask)) is not None:
        option, steps = planned.batches_of(drawn[0])
        others.append((option, drawn[1], steps))
    return others


def _beside_batches(plan: Plan, ask: Ask) -> Plan:
    """The plan with a sentence on drawn batches, where a network could train on them instead."""
    drawn = _batches(ask)
    return plan if drawn is None else planned.beside_batches(plan, drawn[1], drawn[0])


def _batches(ask: Ask) -> tuple[GraphWorkload, Plan] | None:
    """Drawn batches that a network over parts could train on instead, and their plan."""
    sampled = getattr(ask.request.profile.facts["halo_exchange"], "sampled", None)
    if sampled is None:
        return None
    drawn, pin = sampled(), ask.request.pin.changed(micro_batch=None)
    facts, anatomy = dict(ask.request.profile.facts), drawn.anatomy
    facts.pop("halo_exchange")
    decision = _estimated(ask.changed(facts=facts, anatomy=anatomy, global_batch=drawn.global_batch, pin=pin))
    return (drawn, decision.plan) if decision.fits else None


CHOICE = HaloChoice()
