"""Unequal pipelines in plans: instead of equal ones where devices differ, and planned again as they run. No torch.

After FlashFlex (arXiv 2409.01143), whose search plans a run again with each rank as a device of its own, slowed by what
was measured. The pipelines that are left take over the micro-batches of what was lost; layers move where that is
faster, as a checkpoint is taken up under any cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

from espalier.machine.cluster import Cluster
from espalier.mechanisms.unequal_pipelines import pipeline_search as flashflex
from espalier.mechanisms.unequal_pipelines import unequal_plan as unequal
from espalier.mechanisms.unequal_pipelines.cost import EngineCosts, slots
from espalier.mechanisms.unequal_pipelines.pipeline_solver import Group, SolvedPipeline
from espalier.plan import pins
from espalier.plan.ask import Ask, PlanDecision
from espalier.plan.base import Plan
from espalier.plan.calibration import own_stack
from espalier.plan.choice import PlanChoice
from espalier.plan.measured_cluster import Speeds, measured, seats
from espalier.plan.replan import check_sharing, seated
from espalier.plan.request import Request
from espalier.recipe import EveryStep, Pin, Recompute, units
from espalier.recipe.errors import UserError


def _costs(request: Request, cluster: Cluster, plan: Plan, remaining: Sequence[int], speeds: Speeds) -> EngineCosts:
    """What stages of the plan's kind cost on the places of the ranks `remaining`, each of which is a class."""
    places = seats(cluster, plan)
    there = measured(
        cluster, [plan.ranks[rank] for rank in remaining], speeds.of(remaining), [places[rank] for rank in remaining]
    )
    asked = request.changed(precision=plan.precision, sync=EveryStep())
    return EngineCosts(asked, there, plan.micro_batch, (1,), plan.recompute)


def _pipelines(plan: Plan, costs: EngineCosts) -> list[SolvedPipeline]:
    """The plan's own, on ranks that are classes."""
    made = []
    for stages in plan.pipelines.values():
        order = [Group(stage.ranks[0]) for stage in stages]
        layers = [last - first for first, last in (stage.layers for stage in stages)]
        start, stop = plan.ranks[stages[0].ranks[0]].share
        pipeline = flashflex.pipeline_of(order, layers, flashflex.stage_rates(order, costs), costs)
        made.append(replace(pipeline, micro_batches=-(-(stop - start) // plan.micro_batch)))
    return made


def _spread(ask: Ask, cluster: Cluster) -> float:
    """How far a step on all devices may be from what is predicted."""
    return ask.calibration.on(cluster, len(cluster.devices()), own_stack(cluster)).spread


class UnequalPipelinesChoice(PlanChoice):
    """Pipelines of unequal depth, where devices differ and these are faster, or the only ones that fit; or those of a
    file."""

    def candidates(self, ask: Ask, best: PlanDecision) -> Iterator[PlanDecision]:
        """The fastest unequal pipelines; pinned ones that are not possible leave a sentence."""
        request = replace(best.request, factors=ask.calibration.factors, ep=0)  # each rank has all experts
        cluster = best.cluster
        asked = request.pin.pipelines or "unless slower"
        if asked not in ("unless slower", "equal", "unequal"):
            from espalier.mechanisms.unequal_pipelines import flashflex_json

            layout = flashflex_json.layout(flashflex_json.read(asked), request, cluster, asked)
            plan = unequal.plan_of(*layout, _spread(ask, cluster))
            why = (f"The pipelines are those of {asked}.", *plan.why)
            yield replace(best, plan=plan.changed(why=why), fits=True)
            return
        wanted, why_not = asked == "unequal", unequal.asked(request, cluster)
        pipelines = None if why_not else unequal.best(request, cluster)
        if pipelines is None:
            if wanted and best.fits:
                sentence = f"Unequal pipelines are not possible here: {why_not or 'none of them fits'}."
                yield best.changed(why=(sentence, *best.plan.why))
            return
        plan = unequal.plan_of(*pipelines, _spread(ask, cluster))
        refused = None if request.refuses is None else request.refuses(plan)
        equal = best.plan.predicted.step_seconds if best.fits and best.plan.predicted is not None else None
        slower = equal is not None and pipelines[1].seconds * unequal.FASTER > equal
        if slower and not wanted:
            return
        if refused is not None:
            taken, why_not = units.show_seconds(pipelines[1].seconds), f"{refused.reason}; {refused.instead}"
            sentence = f"Unequal pipelines would take {taken} a step, but are not possible: {why_not}."
            if best.fits:
                yield best.changed(why=(*best.plan.why, sentence))
            return
        compared = f"With the best equal layout a step takes {units.show_seconds(equal)}." if equal is not None else ""
        why = (*plan.why[:1], *((compared,) if compared else ()), *plan.why[1:], *request.profile.remarks)
        yield replace(best, plan=plan.changed(why=why), fits=True)

    def cures(self, request: Request, cluster: Cluster) -> Iterable[str]:
        """The pin, where the recipe keeps unequal pipelines out and they would fit."""
        asked = request.changed(pin=Pin(pipelines="unequal"))
        if cluster.same_speed or not unequal.asked(request, cluster) or unequal.asked(asked, cluster):
            return
        if (made := unequal.best(asked, cluster)) is not None:
            others = [name for name, _ in pins.given(request.pin) if name != "pipelines"]
            out = f" and leave {', '.join(f'plan.pin.{name}' for name in others)} out" if others else ""
            yield f'plan.pin.pipelines="unequal"{out} ({units.show_seconds(made[1].seconds)} a step)'

    @property
    def replanner(self) -> UnequalPipelinesChoice:
        """FlashFlex's search."""
        return self

    def seconds(self, request: Request, cluster: Cluster, plan: Plan, speeds: Speeds) -> float:
        costs = _costs(request, cluster, plan, range(len(plan.ranks)), speeds)
        made = _pipelines(plan, costs)
        return costs.step(max(pipeline.seconds for pipeline in made), costs.sync(made))

    def planned_work(self, request: Request, cluster: Cluster, plan: Plan) -> tuple[float, ...]:
        costs = _costs(request, cluster, plan, range(len(plan.ranks)), Speeds((1.0,) * len(plan.ranks)))
        planned = [0.0] * len(plan.ranks)
        for pipeline in _pipelines(plan, costs):
            for slot, (group, layers, _) in slots([pipeline]):
                each = layers * costs.layer(group) + costs.extra(group, slot)
                planned[group.kind] += pipeline.micro_batches * each
        return tuple(planned)

    def plan_on(self, request: Request, cluster: Cluster, plan: Plan, remaining: Sequence[int], speeds: Speeds) -> Plan:
        check_sharing(request, plan, remaining)
        there = _costs(request, cluster, plan, remaining, speeds).cluster
        ranks = [plan.ranks[rank] for rank in remaining]
        free = Pin(pipelines="unequal", ranks=len(remaining), threads=ranks[0].threads, schedule=request.pin.schedule)
        same = free.changed(micro_batch=plan.micro_batch, recompute=cast("Recompute", plan.recompute))
        asked = request.changed(precision=plan.precision, sync=EveryStep())
        for pin in (same, free):
            made = unequal.best(asked.changed(pin=pin), there)
            if made is not None:
                return seated(unequal.plan_of(*made), ranks, request.profile.global_batch)
        raise UserError(
            f"{units.plural(len(remaining), 'rank')} cannot hold this run: "
            "no pipeline of them has room for its layers.",
            do="mend the place that was lost and run the same command, or a smaller model or micro-batch",
        )

    def describe(self, plan: Plan) -> str:
        parts = []
        for stages in plan.pipelines.values():
            start, stop = plan.ranks[stages[0].ranks[0]].share
            parts.append(
                f"{' + '.join(str(stage.layers[1] - stage.layers[0]) for stage in stages)} layers for {stop - start}"
            )
        return f"{', '.join(parts)} samples each step"


CHOICE = UnequalPipelinesChoice()
