"""The plan of a run: decided by `plan.decide`, with trials of real steps in real ranks on a processor."""

from __future__ import annotations

import torch

from espalier import cluster as clusters
from espalier.errors import UserError
from espalier.plan import base as plans
from espalier.plan.decide import decide
from espalier.plan.trials import Trials
from espalier.verbs import ready
from espalier.workload import Workload

TRIAL_SECONDS = 0.6
"""How long each candidate runs in each round, warm-up not counted."""


def choose(
    resolved: ready.Resolved, workload: Workload, cluster: clusters.Cluster, world: int | None = None
) -> plans.Plan:
    """The plan for this recipe on these machines; with `world`, for exactly that many ranks. Raises UserError."""
    pinned = resolved.recipe.plan.pin.ranks
    if world is not None and pinned not in (None, world):
        raise UserError(
            f"plan.pin.ranks = {pinned}, but {world} ranks were started.",
            do=f"start {pinned} ranks, or leave plan.pin.ranks out",
        )

    def run(plan: plans.Plan) -> float:
        return _seconds(plan, resolved, workload)

    phase = workload.phases()[0].start
    trials = Trials(resolved.recipe, cluster, run, phase) if world is None else None
    request = ready.request(resolved, world, workload)
    return decide(request, cluster, ready.calibration(resolved.recipe), trials).taken


def _seconds(plan: plans.Plan, resolved: ready.Resolved, workload: Workload) -> float:
    """Seconds per step of `plan`, from real steps in real ranks. What it takes is loaded here: `plan` does without."""
    from espalier import rank, trainer
    from espalier.launch import base as launch
    from espalier.launch import local

    def task(place: launch.Place) -> float:
        return rank.trial(trainer.Setting(resolved.recipe, plan, workload, place), TRIAL_SECONDS)

    return max(local.run(task, launch.places(plan)))


def refuse_elsewhere(plan: plans.Plan, world: int | None) -> None:
    """Raises UserError when this machine has not what `plan` needs. With `world`, its ranks are started by others."""
    if not plan.executable:
        raise UserError(
            f"`train` cannot run this plan: {plan.missing}.", do="espalier plan answers for it all the same"
        )
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = {rank.device for rank in plan.ranks if rank.device.startswith("cuda")}
    elsewhere = max(rank.node for rank in plan.ranks) if world is None else 0
    if elsewhere or (world is None and len(wanted) > here) or (wanted and not here):
        raise UserError(
            f"The plan is for other machines: {elsewhere + 1} with {len(wanted)} GPUs each; this one has {here}.",
            do="leave plan.cluster out to train here, or start the ranks there with torchrun",
        )
