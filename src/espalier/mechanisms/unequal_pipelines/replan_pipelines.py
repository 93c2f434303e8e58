"""Re-planning of unequal pipelines: the same run on fewer ranks, or at the speeds they showed. No torch.

After FlashFlex (arXiv 2409.01143), whose search plans it again with each rank as a device of its own, slowed by what
was measured. The pipelines that are left take over the micro-batches of what was lost; layers move where that is
faster, as a checkpoint is taken up under any cut.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from espalier.machine.cluster import Cluster, Place
from espalier.mechanisms.unequal_pipelines import flashflex, unequal
from espalier.mechanisms.unequal_pipelines.pipeline_solver import Group, Slot, SolvedPipeline
from espalier.plan import base as plans
from espalier.plan.base import Plan
from espalier.plan.measured_cluster import Speeds, equalised, measured
from espalier.plan.request import Request
from espalier.recipe import EveryStep, Pin, Recompute, units
from espalier.recipe.errors import UserError


def pipelined(plan: Plan) -> bool:
    """Whether its ranks stand in pipelines that were planned for unlike devices."""
    return plan.planner == "flashflex"


def seats(cluster: Cluster, plan: Plan) -> list[Place]:
    """Where each rank of a plan sits. Of several processors in one machine the fastest, in the cluster's order."""
    found: list[Place] = []
    taken: set[int] = set()
    every = cluster.devices()
    for rank in plan.ranks:
        kind, _, slot = rank.device.partition(":")
        fitting = [one for one in every if one.node == rank.node and one.table.device.kind == kind]
        if kind == "cuda":
            fitting = [one for one in fitting if one.slot == int(slot)]
        else:
            beside = sum(other.node == rank.node and other.device == "cpu" for other in plan.ranks)
            fastest = sorted(fitting, key=lambda one: -max(one.table.device.flops.values()))[:beside]
            fitting = [one for one in fitting if one in fastest and one.rank not in taken] or fitting
        if not fitting:
            raise UserError(
                f"The cluster has no device {rank.device} on machine {rank.node}.", do="delete cluster.toml"
            )
        found.append(fitting[0])
        taken.add(fitting[0].rank)
    return found


def _costs(request: Request, cluster: Cluster, plan: Plan, kept: Sequence[int], found: Speeds) -> unequal.EngineCosts:
    """What stages of the plan's kind cost on the places of the ranks `kept`, each of which is a class."""
    places = seats(cluster, plan)
    there = measured(cluster, [plan.ranks[rank] for rank in kept], found.of(kept), [places[rank] for rank in kept])
    asked = replace(request, precision=plan.precision, sync=EveryStep())
    return unequal.EngineCosts(asked, there, plan.micro_batch, (1,), plan.recompute)


def _pipelines(plan: Plan, costs: unequal.EngineCosts) -> list[SolvedPipeline]:
    """The plan's own, on ranks that are classes."""
    made = []
    for number in sorted({one.pipeline for one in plan.stages}):
        stages = sorted((one for one in plan.stages if one.pipeline == number), key=lambda one: one.layers)
        order = [Group(one.ranks[0]) for one in stages]
        layers = [last - first for first, last in (one.layers for one in stages)]
        start, stop = plan.ranks[stages[0].ranks[0]].share
        one = flashflex.pipeline_of(order, layers, flashflex.stage_rates(order, costs), costs)
        made.append(replace(one, micro_batches=-(-(stop - start) // plan.micro_batch)))
    return made


def seconds(request: Request, cluster: Cluster, plan: Plan, found: Speeds) -> float:
    """Of a step of `plan` as it is, by the cost model at the speeds `found`."""
    costs = _costs(request, cluster, plan, range(len(plan.ranks)), found)
    made = _pipelines(plan, costs)
    return costs.step(max(one.seconds for one in made), costs.sync(made))


def planned_work(request: Request, cluster: Cluster, plan: Plan) -> tuple[float, ...]:
    """Seconds that the plan lets each rank compute in a step."""
    costs = _costs(request, cluster, plan, range(len(plan.ranks)), Speeds((1.0,) * len(plan.ranks)))
    planned = [0.0] * len(plan.ranks)
    for one in _pipelines(plan, costs):
        for number, (group, layers, _) in enumerate(one.stages):
            each = layers * costs.layer(group) + costs.extra(group, Slot(number, len(one.stages)))
            planned[group.kind] += one.micro_batches * each
    return tuple(planned)


def relative(own: Sequence[float], planned: Sequence[float]) -> Speeds:
    """Of ranks that compute `own` seconds a step: over what the plan lets each compute, which differs, and over the
    rank in the middle. A rank without work counts as equal."""
    ratios = [taken / expected if expected > 0 else 0.0 for taken, expected in zip(own, planned, strict=True)]
    middle = statistics.median_low([one for one in ratios if one > 0] or [0.0])
    return Speeds(tuple(equalised(one / middle) if one > 0 and middle > 0 else 1.0 for one in ratios))


def plan_on(request: Request, cluster: Cluster, plan: Plan, kept: Sequence[int], found: Speeds) -> Plan:
    """The fastest pipelines of all the ranks `kept` of `plan`, at the speeds `found` of all its ranks.

    Raises UserError where they cannot hold the run.
    """
    there = _costs(request, cluster, plan, kept, found).cluster
    ranks = [plan.ranks[rank] for rank in kept]
    free = Pin(pipelines="unequal", ranks=len(kept), threads=ranks[0].threads, schedule=request.pin.schedule)
    same = free.changed(micro_batch=plan.micro_batch, recompute=cast("Recompute", plan.recompute))
    asked = replace(request, precision=plan.precision, sync=EveryStep())
    for pin in (same, free):
        made = unequal.best(replace(asked, pin=pin, recompute=pin.recompute or request.recompute), there)
        if made is not None:
            new = unequal.plan_of(*made)
            seated = tuple(
                one.changed(device=old.device, node=old.node, threads=old.threads)
                for one, old in zip(new.ranks, ranks, strict=True)
            )
            return plans.check(new.changed(ranks=seated), request.global_batch, "the new plan")
    raise UserError(
        f"{units.plural(len(kept), 'rank')} cannot hold this run: no pipeline of them has room for its layers.",
        do="mend the place that was lost and run the same command, or a smaller model or micro-batch",
    )


def told(plan: Plan) -> str:
    """Its pipelines in a few words."""
    said = []
    for number in sorted({one.pipeline for one in plan.stages}):
        stages = sorted((one for one in plan.stages if one.pipeline == number), key=lambda one: one.layers)
        start, stop = plan.ranks[stages[0].ranks[0]].share
        said.append(f"{' + '.join(str(one.layers[1] - one.layers[0]) for one in stages)} layers for {stop - start}")
    return f"{', '.join(said)} samples each step"
