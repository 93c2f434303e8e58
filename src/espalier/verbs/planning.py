"""The plan that a run begins or goes on with: the one in its folder while it still holds, else a new one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from espalier import cluster as clusters
from espalier import phases
from espalier import run as runs
from espalier.config import Recipe
from espalier.errors import UserError
from espalier.launch import numbering
from espalier.plan import base as plans
from espalier.track import events
from espalier.verbs import choose, ready
from espalier.workload import Workload


def entered(workload: Workload, recipe: Recipe, folder: runs.RunFolder, world: int | None) -> Workload:
    """The workload of the phase that the run is in. Raises UserError where it has several and ranks are there."""
    if len(workload.phases()) > 1 and world is not None:
        raise UserError(
            f"The run has {len(workload.phases())} phases, and its ranks were started already.",
            why="each phase is planned anew, and may want other ranks",
            do="espalier train on one machine",
        )
    return phases.enter(recipe, workload, phases.checkpoints(recipe, str(folder.checkpoints)))


def planned(
    folder: runs.RunFolder,
    resolved: ready.Resolved,
    workload: Workload,
    cluster: clusters.Cluster,
    world: int | None,
) -> plans.Plan:
    """The plan that the folder has, while it still holds; else a new one."""
    plan = _resumed_plan(folder, resolved, cluster, workload)
    if plan is None or (world is not None and len(plan.ranks) != world):
        plan = choose.choose(resolved, workload, cluster, world)
    choose.refuse_elsewhere(plan, world)
    return plan


def on_hosts(nodes: Sequence[int] | None, plan: plans.Plan, cluster: clusters.Cluster) -> plans.Plan:
    """The plan with its ranks on the machines where they are, if those are the cluster's and ranks cannot be numbered
    as the plan has them (`numbering`)."""
    nodes_of = [one.node for one in plan.ranks]
    if nodes is None or cluster.machines != len(set(nodes)) or numbering.follows(nodes, nodes_of):
        return plan
    ranks = (msgspec.structs.replace(one, node=node) for one, node in zip(plan.ranks, nodes, strict=True))
    return msgspec.structs.replace(plan, ranks=tuple(ranks))


def _phase_begun(folder: runs.RunFolder) -> int | None:
    """The first step of the phase that the run's plan is of, where it has several."""
    begun = [event["step"] for event in events.read(folder.events) if event["event"] == "phase"]
    return begun[-1] if begun else None


def _resumed_plan(
    folder: runs.RunFolder, resolved: ready.Resolved, cluster: clusters.Cluster, workload: Workload
) -> plans.Plan | None:
    """The plan already in the run folder (perhaps edited), while recipe and machines still ask for the same."""
    if not folder.exists() or not folder.plan.exists() or not folder.cluster.exists():
        return None
    samples = workload.global_batch
    if folder.events.exists() and _phase_begun(folder) not in (None, workload.phases()[0].start):
        return None
    before = folder.read()
    plan = plans.check(plans.read(folder.plan), samples, str(folder.plan))
    same_recipe = before.plan == resolved.recipe.plan and before.train.compile == resolved.recipe.train.compile
    same_machines = folder.cluster.read_text() == clusters.dumps(cluster)
    return plan if same_recipe and same_machines else None
