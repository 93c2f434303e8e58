"""Re-planning of waves: the same tasks on fewer ranks, or at the speeds they showed. No torch.

After Spindle (arXiv 2409.03365), whose planner runs again when tasks come or go; here also when a rank is lost or stays
slow. Parameters move as a checkpoint is taken up under other waves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from espalier.machine.cluster import Cluster
from espalier.mechanisms.task_waves import task_waves
from espalier.mechanisms.unequal_pipelines import replan_pipelines
from espalier.plan import base as plans
from espalier.plan.base import Plan
from espalier.plan.calibrate import Calibration
from espalier.plan.decide import decide
from espalier.plan.measured_cluster import Speeds
from espalier.plan.request import Request
from espalier.recipe import EveryStep, units


def seconds(request: Request, cluster: Cluster, plan: Plan, found: Speeds) -> float:
    """Of a step of `plan` as it is, by the cost model at the speeds `found`. Of one rank that runs all parts too."""
    request = replace(request, precision=plan.precision)
    seats = replan_pipelines.seats(cluster, plan)
    devices = task_waves.devices_of(request, cluster, seats, found.slower)
    return task_waves.seconds(plan, request, task_waves.first_seat(cluster), devices)


def planned_work(plan: Plan) -> tuple[float, ...]:
    """Seconds that each rank computes in a step, as planned."""
    found = [0.0] * len(plan.ranks)
    for one in (one for wave in plan.waves for one in wave):
        for rank in one.ranks:
            found[rank] += one.end - one.begin + one.back[1] - one.back[0]
    return tuple(found)


def plan_on(request: Request, cluster: Cluster, plan: Plan, kept: Sequence[int], found: Speeds) -> Plan:
    """The fastest waves of all the ranks `kept` of `plan`, at the speeds `found` of all its ranks.

    Raises UserError where no waves of them fit into memory.
    """
    pin = request.pin.changed(ranks=len(kept), threads=plan.ranks[0].threads)
    asked = replace(request, precision=plan.precision, sync=EveryStep(), pin=pin)
    seats = replan_pipelines.seats(cluster, plan)
    alone = decide(*task_waves.alone(asked, cluster), Calibration(factors=request.factors)).plan
    there = [(seats[rank], found.slower[rank]) for rank in kept]
    made = task_waves.with_waves(alone, asked, cluster, seats=there)
    if not made.waves:  # one rank runs all parts
        only = made.ranks[0].changed(device=plan.ranks[kept[0]].device, node=plan.ranks[kept[0]].node)
        made = made.changed(ranks=(only,), runners_up=())
    return plans.check(made, request.global_batch, "the new plan")


def told(plan: Plan) -> str:
    """Its waves in a few words."""
    return f"{units.plural(len(plan.waves), 'wave')} of the tasks' parts" if plan.waves else "all parts of the tasks"
