"""Waves of tasks in plans: a plan of several tasks runs their parts side by side, and is planned again as they run.

After Spindle (arXiv 2409.03365), whose planner runs again when tasks come or go; here also when a rank is lost or stays
slow. Parameters move as a checkpoint is taken up under other waves. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from espalier.machine.cluster import Cluster
from espalier.mechanisms.task_waves import wave_plan as task_waves
from espalier.mechanisms.task_waves.state import TaskWavesState
from espalier.plan import base as plans
from espalier.plan.ask import Ask, PlanDecision
from espalier.plan.base import Plan
from espalier.plan.calibration import Calibration
from espalier.plan.choice import PlanChoice
from espalier.plan.decide import decide
from espalier.plan.measured_cluster import Speeds, seats
from espalier.plan.request import Request
from espalier.recipe import EveryStep, units


class TaskWavesChoice(PlanChoice):
    """Waves over all ranks, where there are several."""

    def alone(self, ask: Ask) -> PlanDecision | None:
        """Waves, with the optimizer step of one rank that runs all parts."""
        request, cluster = ask.request, ask.cluster
        if task_waves.ranks_of(request, cluster) == 1:
            return None
        one_rank = decide(*task_waves.alone(request, cluster), ask.calibration)
        plan = task_waves.with_waves(one_rank.plan, request, cluster)
        return replace(one_rank, cluster=cluster, plan=plan, fits=True)

    def part(self, plan: Plan) -> str:
        """How many waves."""
        return f"{len(plan.state(TaskWavesState).waves)} waves"

    @property
    def replanner(self) -> TaskWavesChoice:
        """The solver of waves."""
        return self

    def seconds(self, request: Request, cluster: Cluster, plan: Plan, speeds: Speeds) -> float:
        """See `Replanner.seconds`. Of one rank that runs all parts too."""
        request = request.changed(precision=plan.precision)
        devices = task_waves.devices_of(request, cluster, seats(cluster, plan), speeds.slower)
        return task_waves.seconds(plan, request, task_waves.first_seat(cluster), devices)

    def planned_work(self, request: Request, cluster: Cluster, plan: Plan) -> tuple[float, ...]:
        work = [0.0] * len(plan.ranks)
        for part in plan.state(TaskWavesState).slices:
            for rank in part.ranks:
                work[rank] += part.seconds
        return tuple(work)

    def plan_on(self, request: Request, cluster: Cluster, plan: Plan, remaining: Sequence[int], speeds: Speeds) -> Plan:
        pin = request.pin.changed(ranks=len(remaining), threads=plan.ranks[0].threads)
        asked = request.changed(precision=plan.precision, sync=EveryStep(), pin=pin)
        places = seats(cluster, plan)
        alone = decide(*task_waves.alone(asked, cluster), Calibration(factors=request.factors)).plan
        there = [(places[rank], speeds.slower[rank]) for rank in remaining]
        made = task_waves.with_waves(alone, asked, cluster, seats=there)
        if TaskWavesState.name not in made.choices:  # one rank runs all parts
            only = made.ranks[0].changed(device=plan.ranks[remaining[0]].device, node=plan.ranks[remaining[0]].node)
            made = made.changed(ranks=(only,), runners_up=())
        return plans.check(made, request.profile.global_batch, "the new plan")

    def describe(self, plan: Plan) -> str:
        waves = units.plural(len(plan.state(TaskWavesState).waves), "wave")
        return f"{waves} of the tasks' parts" if plan.choices else "all parts of the tasks"


CHOICE = TaskWavesChoice()
