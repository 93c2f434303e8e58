"""Precision in plans: of all that the devices compute fast, the one whose plan is fastest. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from espalier.plan import precision, refusals, search, trials
from espalier.plan.ask import Ask, PlanDecision
from espalier.plan.choice import PlanChoice
from espalier.plan.collective_time import gpus
from espalier.plan.decide import decide
from espalier.plan.layout_decision import with_trials
from espalier.plan.request import AUTO
from espalier.recipe import units
from espalier.recipe.errors import UserError


class PrecisionChoice(PlanChoice):
    """Decides what the recipe leaves open."""

    def alone(self, ask: Ask) -> PlanDecision | None:
        """The decision for each precision that could be fastest, and the fastest of these."""
        if ask.request.precision != AUTO:
            return None
        return _fastest(ask) if gpus(ask.cluster) else _measured(ask)

    def words(self, best: PlanDecision, ask: Ask) -> Iterable[str]:
        """How much faster another precision would be."""
        return precision.faster(ask.request, best.search_result) if gpus(ask.cluster) else ()


def _decided(ask: Ask) -> PlanDecision:
    return decide(ask.request, ask.cluster, ask.calibration, ask.trials, ask.below)


def _fastest(ask: Ask) -> PlanDecision:
    """The fastest decision of those for each precision that could be fastest; where devices differ, also for one that
    all have, to say what leaving some out gains. Raises UserError where none can be made."""
    made: list[PlanDecision] = []
    refusal: UserError | None = None
    for name in precision.candidates(ask.cluster):
        asked = ask.changed(precision=name)
        best = min(map(_rank, made), default=(True, 0.0))
        known = ask.cluster.same_speed or any(
            precision.with_all(decision.search_result) is not None for decision in made
        )
        possible = search.fastest_possible
        if not best[0] and known and possible(asked.request, ask.cluster, ask.calibration) >= best[1]:
            continue
        try:
            made.append(_decided(replace(asked, below=math.inf if best[0] or not ask.cluster.same_speed else best[1])))
        except UserError as error:
            refusal = refusal or error
    if not made and refusal is not None:
        raise refusal
    best_of = min(made, key=_rank)
    others = {decision.request.precision: decision.search_result for decision in made if decision is not best_of}
    rates, *left_out = precision.reasons(best_of.plan, ask.cluster, others)
    unfit = next((decision for decision in made if best_of.fits and not decision.fits), None)
    cause = rates if unfit is None else _remedy(best_of, unfit)
    return best_of.changed(why=(*best_of.plan.why, cause, *left_out))


def _remedy(taken: PlanDecision, unfit: PlanDecision) -> str:
    """Why a plan has not the first precision that people would use, and the cheapest change after which it would."""
    nearest = unfit.search_result.closest
    sentence = f"{taken.request.precision}: no layout in {unfit.request.precision} fits"
    if nearest is None:
        return f"{sentence}."
    cure = refusals.cures(unfit.request, unfit.cluster, nearest)[0]
    return f"{sentence}: {units.show_size(nearest.over)} are missing. Cheapest change: {cure}."


def _measured(ask: Ask) -> PlanDecision:
    """On processors: fp32, or bf16 where trials of the same ranks and micro-batch say that it is faster."""
    remarks = (*ask.request.profile.remarks, precision.ON_PROCESSORS)
    decision = _decided(ask.changed(precision="fp32", remarks=remarks))
    exact = decision.plan
    if ask.trials is None or not (decision.fits and precision.worth_trying(ask.cluster)) or exact.replicas:
        return decision
    alike = {"ranks": len(exact.ranks), "threads": exact.ranks[0].threads, "micro_batch": exact.micro_batch}
    pin = ask.request.pin.changed(**alike, recompute=exact.recompute)
    try:
        low = decide(ask.request.changed(precision="bf16", pin=pin), ask.cluster, ask.calibration)
    except UserError:
        return decision
    same = low.fits and low.plan.layout.changed(precision="fp32") == exact.layout
    measured = ask.trials([exact, low.plan]) if same else {}
    if not measured or measured[trials.key(exact)] < precision.FASTER * measured[trials.key(low.plan)]:
        return decision
    return replace(low, plan=with_trials(low.plan, [low.plan, exact], measured))


def _rank(decision: PlanDecision) -> tuple[bool, float]:
    """What fits, then what is fastest; of what does not, the first: the precision that people would use."""
    return not decision.fits, decision.plan.step_seconds if decision.fits else 0.0


CHOICE = PrecisionChoice()
