"""The plan that a run begins or goes on with: the one in its folder while it still holds, else a new one.

A new one is decided by `plan.decide`, with trials of real steps in real ranks on a processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.cli import measurements, prepare
from espalier.kernels import accelerator
from espalier.machine import cluster as clusters
from espalier.machine.probe import BUSY
from espalier.parallel.workload import Workload
from espalier.plan import base as plans
from espalier.plan import decision_cache
from espalier.recipe import Recipe, graphs
from espalier.recipe.errors import UserError
from espalier.recipe.graphs import Batches
from espalier.recipe.units import show_seconds
from espalier.track import events
from espalier.train import phases, version_check
from espalier.train import run_folder as runs
from espalier.train.rank_setup import RankSetup

if TYPE_CHECKING:
    from espalier.plan.trials import Trials

LONG_STEP = 5.0
"""Of a predicted step, above which it is said that one is tried: a trial takes several."""
TRIAL_SECONDS = 0.6
"""How long each candidate runs in each round, warm-up not counted."""


def entered(workload: Workload, recipe: Recipe, saved: Checkpoints, world: int | None) -> Workload:
    """The workload of the phase that the run is in, by its checkpoints. Raises UserError where it has several and ranks
    are there."""
    if world is not None and len(workload.phases()) > 1:
        raise UserError(
            f"The run has {len(workload.phases())} phases, and its ranks were started already.",
            why="each phase is planned anew, and may want other ranks",
            do="espalier train on one machine",
        )
    return phases.enter(recipe, workload, saved)


def planned(
    folder: runs.RunFolder,
    resolved: prepare.Resolved,
    workload: Workload,
    cluster: clusters.Cluster,
    world: int | None,
) -> plans.Plan:
    """The plan that the folder has, while it still holds; else a new one."""
    plan = _resumed_plan(folder, resolved, cluster, workload)
    if plan is None or (world is not None and len(plan.ranks) != world):
        plan = choose(resolved, workload, cluster, world)
    refuse_elsewhere(plan, world)
    return plan


def batches(
    resolved: prepare.Resolved,
    workload: Workload,
    planned: Callable[[prepare.Resolved, Workload], plans.Plan],
    trials: Callable[[prepare.Resolved, Workload], Trials | None],
) -> tuple[Batches, str]:
    """What steps train on, and why, of a recipe that leaves it open and was opened with the whole graph (`workload`).
    `planned`, `trials`: the plan of a recipe that does not, and what steps of it take here."""
    opened = cache(partial(with_batches, resolved, workload))

    def tried(chosen: Batches, plan: plans.Plan) -> float | None:
        from espalier.plan.trials import key

        steps = trials(*opened(chosen))
        return None if steps is None else steps.of([plan]).get(key(plan))

    from espalier.mechanisms.disk_batches import drawn_batches

    drawn = cast("Any", workload).drawn()
    return drawn_batches.choose(resolved.recipe, drawn, lambda chosen: planned(*opened(chosen)), tried)


def with_batches(
    resolved: prepare.Resolved, workload: Workload, chosen: Batches | None
) -> tuple[prepare.Resolved, Workload]:
    """The recipe and its workload as `chosen`, of a recipe that leaves it open."""
    if chosen is None or not graphs.is_open(resolved.recipe):
        return resolved, workload
    resolved = replace(resolved, recipe=graphs.with_batches(resolved.recipe, chosen))
    return resolved, prepare.open_workload(resolved) if chosen.fanout else workload


def with_chosen(plan: plans.Plan, chosen: Batches | None, why: str = "") -> plans.Plan:
    """The plan with what steps train on, and why; where the recipe says it, the plan says nothing of it."""
    if chosen is None:
        return plan.changed(choices={name: state for name, state in plan.choices.items() if name != "disk_batches"})
    from espalier.mechanisms.disk_batches import drawn_batches

    return drawn_batches.told(plan, chosen, why)


def on_hosts(nodes: Sequence[int], plan: plans.Plan, cluster: clusters.Cluster) -> plans.Plan:
    """The plan with its ranks on the machines where they are, if those are the cluster's and ranks cannot be numbered
    as the plan has them (`numbering`)."""
    from espalier.launch.ranks import rank_assignment

    nodes_of = [rank.node for rank in plan.trainer_ranks]
    if cluster.machines != len(set(nodes)) or rank_assignment.follows(nodes, nodes_of):
        return plan
    ranks = [rank.changed(node=node) for rank, node in zip(plan.ranks, nodes, strict=False)]
    return plan.changed(ranks=(*ranks, *plan.ranks[len(nodes) :]))


def _resumed_plan(
    folder: runs.RunFolder, resolved: prepare.Resolved, cluster: clusters.Cluster, workload: Workload
) -> plans.Plan | None:
    """The plan already in the run folder (perhaps edited), while recipe and machines still ask for the same."""
    if not folder.exists() or not folder.plan.exists() or not folder.cluster.exists():
        return None
    logged = events.read(folder.events) if folder.events.exists() else ()
    begun = [event["step"] for event in logged if event["event"] == "phase"]
    if begun and begun[-1] != workload.phases()[0].start:  # the plan is of another phase
        return None
    before, asked = (
        (recipe.plan, recipe.train.compile, recipe.tasks, recipe.towers) for recipe in (folder.read(), resolved.recipe)
    )
    plan = plans.check(plans.read(folder.plan), workload.global_batch, str(folder.plan))
    same_machines = folder.cluster.read_text() == clusters.dumps(cluster)
    return plan if before == asked and same_machines else None


def choose(
    resolved: prepare.Resolved, workload: Workload, cluster: clusters.Cluster, world: int | None = None
) -> plans.Plan:
    """The plan for this recipe on these machines; with `world`, for exactly that many ranks. Raises UserError."""
    pinned = resolved.recipe.plan.pin.ranks
    if world is not None and pinned not in (None, world):
        raise UserError(
            f"plan.pin.ranks = {pinned}, but {world} ranks were started.",
            do=f"start {pinned} ranks, or leave plan.pin.ranks out",
        )

    trials = trials_of(resolved, workload, cluster, world)
    request, calibration = prepare.request(resolved, world, workload), measurements.calibration(resolved.recipe)
    code = f"{version_check.code()} torch {torch.__version__}"
    key = partial(decision_cache.key, request, cluster, calibration, code)
    again = trials is not None and trials.doubtful()
    plan = None if again else decision_cache.read(key(None if trials is None else trials.known()))
    if plan is None:
        from espalier.plan.decide import decide

        plan = decide(request, cluster, calibration, trials).taken
        if trials is not None and trials.load > BUSY:
            what = f"other programs used {trials.load:.1f} cores while steps were tried"
            prepare.say(f"Note: {what}: they are tried again when these have ended.")
        # Trials that ran decide the same for whoever asks next.
        decision_cache.keep(key(None if trials is None else trials.known()), plan)
    return plan


def trials_of(
    resolved: prepare.Resolved, workload: Workload, cluster: clusters.Cluster, world: int | None = None
) -> Trials | None:
    """Trials of real steps in real ranks of this machine; None where ranks are there already, or none are wanted."""

    def run(plan: plans.Plan) -> float:
        foreseen = 0.0 if plan.predicted is None else plan.predicted.step_seconds
        if foreseen > LONG_STEP:
            prepare.say(f"trying steps of {show_seconds(foreseen)} with {key(plan)}")
        return _seconds(plan, resolved, workload)

    if world is not None or not resolved.recipe.plan.trial:
        return None
    from espalier.plan.trials import Trials, key

    return Trials(resolved.recipe, cluster, run, workload.phases()[0].start, _here)


def _here(plan: plans.Plan) -> bool:
    """Whether this machine has what the plan needs. Ranks on GPUs are tried as those on processors are: a step ends
    when its loss was read, so that the clock needs no synchronization."""
    wanted = {rank.device for rank in plan.ranks if rank.device != "cpu"}
    return all(rank.node == 0 for rank in plan.ranks) and len(wanted) <= (accelerator.count() if wanted else 0)


def _seconds(plan: plans.Plan, resolved: prepare.Resolved, workload: Workload) -> float:
    """Seconds per step of `plan`, from real steps in real ranks. What it takes is loaded here: `plan` does without."""
    from espalier.launch.ranks import agent
    from espalier.train import rank_spec as launch
    from espalier.train import worker

    def task(place: launch.RankSpec) -> float:
        return worker.trial(RankSetup(resolved.recipe, plan, workload, place), TRIAL_SECONDS)

    return max(agent.run(task, launch.places(plan)))


def refuse_elsewhere(plan: plans.Plan, world: int | None) -> None:
    """Raises UserError when this machine has not what `plan` needs. With `world`, its ranks are started by others."""
    gpus = accelerator.count()
    wanted = {rank.device for rank in plan.ranks if rank.device != "cpu"}
    elsewhere = max(rank.node for rank in plan.ranks) if world is None else 0
    if elsewhere or (world is None and len(wanted) > gpus) or (wanted and not gpus):
        raise UserError(
            f"The plan is for other machines: {elsewhere + 1} with {len(wanted)} GPUs each; this one has {gpus}.",
            do="leave plan.cluster out to train here, or start the ranks there with torchrun",
        )


def refuse_roles(plan: plans.Plan) -> None:
    """Raises UserError where the plan has processes that serve the ranks which another launcher has started."""
    roles = sorted({rank.role for rank in plan.ranks} - {"trainer"})
    if roles:
        raise UserError(
            f"The plan has processes with the role {' and '.join(roles)}, and another launcher has started the ranks.",
            why="what torchrun, srun and mpiexec start are ranks that train; only espalier train starts the others",
            do="espalier train without a launcher (--hosts a,b,c over several machines), or plan.pin.offload=none",
        )
