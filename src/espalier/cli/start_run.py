"""Starts a run, or goes on with one: opens its data and folder, finds its checkpoints, and plans it."""

from __future__ import annotations

import argparse
import os
import platform
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch

from espalier.checkpoint import run_identity
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.checkpoint.storage import open_place
from espalier.cli import printing, run_data, run_plan, run_trust
from espalier.cli.resolve_recipe import machines, parameters, resolve
from espalier.cli.run_owner import owner_of
from espalier.machine import cluster as clusters
from espalier.machine import resource_limits
from espalier.machine.cluster import Cluster
from espalier.parallel.workload import PackStart, Workload
from espalier.plan import base as plans
from espalier.plan import checkpoint_cost, device_model
from espalier.plan.base import Plan
from espalier.plan.collective_time import used
from espalier.plan.request import AUTO
from espalier.recipe import Constant, Recipe, cache_dir, graphs, model_kinds, process_environment, recipe_file
from espalier.recipe.base import Derivation
from espalier.recipe.errors import DISTRIBUTION, UserError
from espalier.recipe.graphs import Batches
from espalier.recipe.terminal import line
from espalier.track import events
from espalier.track.progress import waiting
from espalier.train import phases, version_check, workload_registry
from espalier.train import rank_spec as launch
from espalier.train import run_folder as runs
from espalier.train.rank_setup import RankSetup
from espalier.train.run_folder import RunFolder
from espalier.train.workload_registry import Resolved
from espalier.train.workload_row import Freezes, Packs


@dataclass(frozen=True)
class RunStart:
    """A run about to start: what was decided, and where it goes."""

    resolved: Resolved
    workload: Workload
    cluster: Cluster
    plan: Plan
    parameters: int
    folder: RunFolder
    quiet: bool
    opened: Workload | None = None
    """With all its phases, where `workload` is that of one."""
    new: bool = False
    """Whether nothing of the run was there before: no step was made, and nothing is left to take up."""
    finished: bool = False
    """Whether its last step is saved already, and its last figures are written."""

    def pack(self, node: int = 0, waits: bool = False) -> None:
        """Packs the batches of the ranks on a machine, or opens what is packed. The recipe has a [store]. `waits`: each
        of them does, and they wait for one another."""
        recipe = self.resolved.recipe
        plan = self.plan
        row = workload_registry.row(recipe)
        if not isinstance(row, Packs):
            return
        places = (place for place in launch.places(plan) if plan.ranks[place.rank].node == node)
        shards = [RankSetup(recipe, plan, self.workload, place).shard for place in places]
        near = getattr(plan.choices.get("disk_batches"), "device", 0)
        with waiting("Packing the features") as progress:
            row.pack(self.workload, shards, PackStart(progress, waits, near))

    def setting(self, place: launch.RankSpec) -> RankSetup:
        """What the rank at `place` needs to know, and what the run's first event says of it."""
        recipe = self.resolved.recipe
        derivations = self.resolved.derivations
        if recipe.store is not None:
            self.pack(self.plan.ranks[place.rank].node, waits=True)
        kernel = os.uname()
        identity = run_identity.read(self.folder.path)  # where this rank sees the run's folder
        about = {
            "name": recipe.name,
            "run": None if identity is None else msgspec.to_builtins(identity.run),
            "forked": None if identity is None else msgspec.to_builtins(identity.forked),
            "workload": type(self.workload).__name__.removesuffix("Workload").lower(),
            "parameters": self.parameters,
            "ranks": len(self.plan.ranks),
            "threads": self.plan.ranks[0].threads,
            "versions": {
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "espalier": version(DISTRIBUTION),
            },
            "host": {
                "name": socket.gethostname(),
                # As `platform.platform` has it, which may run a program to learn it.
                "system": f"{kernel.sysname}-{kernel.release}-{kernel.machine}-with-{''.join(platform.libc_ver())}",
                "processor": resource_limits.processor(),
                **process_environment.allocation(place.device),
            },
            "data": self.workload.fingerprint(),
            "recipe_folder": str(self.resolved.folder),
            "seal": run_trust.seal_code(recipe, run_trust.Origin(self.resolved.folder, self.folder.preprocessing)),
            "notes": list(self.workload.notes()),
            "derivations": [
                {"key": derivation.key, "value": derivation.value, "why": derivation.reason}
                for derivation in derivations
            ],
        }
        peak = sum(device_model.peak(device, self.plan.precision) for device in used(self.cluster, self.plan))
        return RankSetup(recipe, self.plan, self.workload, place, self.folder.path, about=about, flops_per_second=peak)

    def identity(self) -> dict[str, str]:
        """What all ranks must have in common."""
        recipe = cache_dir.hashed(recipe_file.to_table(self.resolved.recipe))
        return version_check.identity(recipe=recipe, data=self.workload.fingerprint())


# --- starting it -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunInputs:
    """A recipe whose data is open, and where its run is to go; nothing is decided or written yet."""

    resolved: Resolved
    workload: Workload
    path: Path
    before: Recipe | None
    """The recipe of the run that is taken up again."""
    quiet: bool
    launched: bool = False
    """Another launcher has started the ranks, which all train."""
    batches: Batches | None = None
    """What its steps train on, where the recipe leaves that open and the run has begun."""


def open_inputs(resolved: Resolved, run: str | None, quiet: bool, writes: bool = True) -> RunInputs:
    """Opens the data of a recipe.

    Args:
        resolved: the recipe.
        run: as `--run` says.
        quiet: nothing is printed.
        writes: this process decides on the run and writes its folder.

    Raises UserError when that folder holds another run.
    """
    path = runs.path_of(resolved.recipe, run)
    before = None
    batches = None
    if writes:
        runs.refuse_links(path)
        existing = RunFolder(path)
        if existing.exists():
            recipe = resolved.recipe
            if graphs.is_open(recipe) and existing.plan.exists():
                batches = run_plan.batches_of(plans.read(existing.plan))
            if batches is not None:
                recipe = graphs.with_batches(recipe, batches)
            if existing.is_begun():
                runs.refuse_other_meaning(existing, recipe)
            before = existing.read()
    workload = workload_registry.open_workload(resolved, waiting)
    return RunInputs(resolved, workload, path, before, quiet, batches=batches)


def of_command(arguments: argparse.Namespace) -> RunStart:
    """The run of a command line, on this machine."""
    resolved = resolve(arguments.recipe, arguments.overrides, arguments.trust, arguments.run)
    inputs = open_inputs(resolved, arguments.run, arguments.json)
    return start_run(inputs, lambda: machines(resolved.recipe))


def start_run(
    inputs: RunInputs,
    machines: Callable[[], Cluster],
    world: int | None = None,
    nodes: Sequence[int] | None = None,
) -> RunStart:
    """Plans the run, opens its folder, and writes there what it starts with.

    Args:
        inputs: its recipe and data.
        machines: measures them, or reads the file that names them.
        world: the number of ranks, where they are there already.
        nodes: the machine that each of these is on.
    """
    recipe = inputs.resolved.recipe
    open_place(recipe.checkpoint.target or inputs.path)  # an unknown scheme is refused before anything is written
    cluster = machines()
    folder = runs.lock_folder(inputs.path)
    try:
        owner = owner_of(folder, recipe, inputs.workload.fingerprint())
        saved, recipe = owner.saved, owner.recipe
        inputs = replace(inputs, resolved=replace(inputs.resolved, recipe=recipe))
        data = run_data.data_of(folder, recipe, inputs.workload)
        chosen, why = inputs.batches, ""
        if chosen is None and graphs.is_open(recipe):
            choose = partial(run_plan.choose, cluster=cluster, world=world)
            trials = partial(run_plan.trials_of, cluster=cluster, world=world)
            chosen, why = run_plan.batches(inputs.resolved, inputs.workload, choose, trials)
        resolved, workload = run_plan.with_batches(inputs.resolved, inputs.workload, chosen)
        inputs, recipe = replace(inputs, workload=workload), resolved.recipe
        workload = _enter(workload, recipe, saved, world)
        plan = _planned(folder, resolved, workload, cluster, world)
        plan = run_plan.with_chosen(plan, chosen, why)
        if inputs.launched:
            _refuse_roles(plan)
        if nodes is not None:
            plan = _on_hosts(nodes, plan, cluster)
        checkpoint_cost.refuse_full(plan, recipe.checkpoint, folder.checkpoints)
        entries = saved.entries()
        steps = recipe.train.steps or 0
        end = events.last(folder.events, "end") or {}
        is_saved = bool(entries) and not entries[-1].why and entries[-1].step >= steps
        finished = is_saved and end.get("reason") == "finished" and (end.get("steps") or 0) >= steps
        begins = not finished or inputs.before is None
        if begins:
            owner.keep(folder)
    except BaseException:
        folder.discard_if_empty()
        folder.release()
        raise
    if recipe.train.precision == AUTO:
        by_plan = Derivation("train.precision", plan.precision, run_plan.PRECISION)
        resolved = replace(resolved, derivations=[*resolved.derivations, by_plan])
    if begins:
        row = workload_registry.row(recipe)
        freeze = partial(row.freeze, inputs.workload) if isinstance(row, Freezes) else None
        data.keep(folder, freeze, workload.notes())
        folder.write(recipe, cluster, plan)
        if not inputs.quiet:
            stretched = _stretched(inputs.before, recipe) if inputs.before else []
            for note in [*owner.notes, *workload.notes(), *data.notes, *stretched]:
                line(f"note: {note}")
            printing.plan(plan, resolved.derivations, recipe.train.steps, model_kinds.of(recipe.model).unit)
    new = inputs.before is None and not entries
    return RunStart(
        resolved, workload, cluster, plan, parameters(recipe, workload), folder,
        inputs.quiet, inputs.workload, new, finished,
    )  # fmt: skip


def _planned(folder: RunFolder, resolved: Resolved, workload: Workload, cluster: Cluster, world: int | None) -> Plan:
    """The plan in the folder (perhaps edited), while recipe, machines and phase ask for the same;
    else a new one."""
    plan = None
    if folder.exists() and folder.plan.exists() and folder.cluster.exists():
        starts = [event["step"] for event in events.logged(folder.events) if event["event"] == "phase"]
        if not starts or starts[-1] == workload.phases()[0].start:
            plan = plans.check(plans.read(folder.plan), workload.global_batch, str(folder.plan))
            before, now = (
                (recipe.plan, recipe.train.compile, recipe.tasks, recipe.towers)
                for recipe in (folder.read(), resolved.recipe)
            )
            if before != now or folder.cluster.read_text() != clusters.dumps(cluster):
                plan = None
    if plan is None or (world is not None and len(plan.ranks) != world):
        plan = run_plan.choose(resolved, workload, cluster, world)
    run_plan.refuse_elsewhere(plan, world)
    return plan


def _on_hosts(nodes: Sequence[int], plan: Plan, cluster: Cluster) -> Plan:
    """The plan with its ranks on the machines where they are, if those are the cluster's and ranks cannot be numbered
    as the plan has them (`numbering`)."""
    from espalier.launch.ranks import rank_assignment

    nodes_of = [rank.node for rank in plan.trainer_ranks]
    if cluster.machines != len(set(nodes)) or rank_assignment.follows(nodes, nodes_of):
        return plan
    ranks = [rank.changed(node=node) for rank, node in zip(plan.ranks, nodes, strict=False)]
    return plan.changed(ranks=(*ranks, *plan.ranks[len(nodes) :]))


def _enter(workload: Workload, recipe: Recipe, saved: Checkpoints, world: int | None) -> Workload:
    """The workload of the phase that the run is in, by its checkpoints. Raises UserError where it has several and ranks
    are there."""
    if world is not None and len(workload.phases()) > 1:
        raise UserError(
            f"The run has {len(workload.phases())} phases, and its ranks were started already.",
            why="each phase is planned anew, and may want other ranks",
            do="espalier train on one machine",
        )
    return phases.enter(recipe, workload, saved)


def _refuse_roles(plan: Plan) -> None:
    """Raises UserError where the plan has processes that serve the ranks which another launcher has started."""
    roles = sorted({rank.role for rank in plan.ranks} - {"trainer"})
    if roles:
        raise UserError(
            f"The plan has processes with the role {' and '.join(roles)}, and another launcher has started the ranks.",
            why="what torchrun, srun and mpiexec start are ranks that train; only espalier train starts the others",
            do="espalier train without a launcher (--hosts a,b,c over several machines), or plan.pin.offload=none",
        )


def _stretched(before: Recipe, recipe: Recipe) -> list[str]:
    """Says what growing the steps of a run does to its learning rate."""
    if before.train.steps == recipe.train.steps or isinstance(recipe.train.schedule, Constant):
        return []
    return [
        f"the schedule is stretched from {before.train.steps} to {recipe.train.steps} steps, so the learning rate "
        'rises again before it falls; train.schedule.kind = "constant" extends smoothly'
    ]
