"""One decision for one question: the plan of a request on a cluster, whoever asks. Starts no rank.

`espalier plan`, `espalier train`, `make_plan` and planning anew while a run goes on all end here. What a plan may do
besides laying a model over ranks is asked of the table in `plan.choice`, in its order.
"""

from __future__ import annotations

import math
from dataclasses import replace

from espalier.machine.cluster import Cluster
from espalier.plan import checkpoint_cost, choice, plan_summary, search_budget
from espalier.plan.ask import Ask, PlanDecision, Trials
from espalier.plan.calibration import DATASHEET, Calibration
from espalier.plan.collective_time import gpus
from espalier.plan.layout_decision import best_layout
from espalier.plan.request import Request

UNTRIED = "Nothing was run on several GPUs yet: layout, seconds and bytes are estimates."
"""Of a plan for several GPUs, until steps of several ranks were measured."""


def decide(
    request: Request,
    cluster: Cluster,
    calibration: Calibration = DATASHEET,
    trials: Trials | None = None,
    below: float = math.inf,
) -> PlanDecision:
    """The plan of `request` on `cluster`: the best of all candidates, with what every choice adds to it.

    Args:
        calibration, trials, below: see `Ask`.

    Raises:
        UserError: pins that cannot be met. (That nothing fits is said by `PlanDecision.taken`.)
    """
    with search_budget.started(request.recipe.plan.seconds) as budget:
        decision = _decided(Ask(request, cluster, calibration, trials, below))
    if budget is None or not (words := budget.words()):
        return decision
    return replace(decision, plan=decision.plan.changed(why=(*decision.plan.why, *words)), cut_off=True)


def _decided(ask: Ask) -> PlanDecision:
    request = ask.request
    cluster = ask.cluster
    choices = choice.asked(request, cluster)
    best = next((alone for each in choices if (alone := each.alone(ask)) is not None), None) or best_layout(ask)
    if best.finished:
        return best
    for each in choices:
        for candidate in each.candidates(ask, best):
            best = candidate
    for each in choices:
        best = replace(best, plan=each.finish(best, ask))
    there = best.cluster if best.plan.replicas else cluster
    plan = best.plan
    if best.fits:
        plan = checkpoint_cost.paced(plan, request.recipe.checkpoint, there)
        plan = checkpoint_cost.with_staging(plan, cluster)
        plan = checkpoint_cost.with_copies(plan, request.recipe.faults.memory, cluster)
    sentences = plan_summary.sentences(plan, there)
    measured = not gpus(there) or len(plan.trainers) < 2 or ask.calibration.ranks > 1
    words = (sentence for each in choices for sentence in each.words(best, ask))
    return replace(
        best, plan=plan.changed(why=(*sentences, *[UNTRIED] * (not measured), *plan.why, *words)), finished=True
    )
