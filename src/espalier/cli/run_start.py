"""Run start: what was decided of a run that is about to begin or go on, where it goes, and which checkpoints are its
own."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import msgspec
import torch

from espalier.checkpoint import run_identity
from espalier.checkpoint.run_identity import RunIdentity, RunStamp
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.checkpoint.storage import Folder
from espalier.cli import prepare as ready
from espalier.cli import run_trust
from espalier.machine import cluster as clusters
from espalier.machine import resource_limits
from espalier.parallel.workload import PackStart, Workload
from espalier.plan import base as plans
from espalier.plan import device_model
from espalier.plan.collective_time import used
from espalier.recipe import Recipe, cache_dir, recipe_file
from espalier.train import rank_spec as launch
from espalier.train import run_folder as runs
from espalier.train import version_check, workload_registry
from espalier.train.rank_setup import RankSetup
from espalier.train.workload_row import Packs


@dataclass(frozen=True)
class RunStart:
    """A run about to start: what was decided, and where it goes."""

    resolved: ready.Resolved
    workload: Workload
    cluster: clusters.Cluster
    plan: plans.Plan
    parameters: int
    folder: runs.RunFolder
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
        recipe, plan = self.resolved.recipe, self.plan
        row = workload_registry.row(recipe)
        if not isinstance(row, Packs):
            return
        places = (place for place in launch.places(plan) if plan.ranks[place.rank].node == node)
        shards = [RankSetup(recipe, plan, self.workload, place).shard for place in places]
        with ready.waiting("Packing the features") as progress:
            row.pack(self.workload, shards, PackStart(progress, waits))

    def setting(self, place: launch.RankSpec) -> RankSetup:
        """What the rank at `place` needs to know, and what the run's first event says of it."""
        recipe, derivations = self.resolved.recipe, self.resolved.derivations
        if recipe.store is not None:
            self.pack(self.plan.ranks[place.rank].node, waits=True)
        kernel = os.uname()
        identity = run_identity.read(self.folder.path)  # where this rank sees the run's folder
        about = {
            "name": recipe.name,
            "run": None if identity is None else msgspec.to_builtins(identity.run),
            "workload": type(self.workload).__name__.removesuffix("Workload").lower(),
            "parameters": self.parameters,
            "ranks": len(self.plan.ranks),
            "threads": self.plan.ranks[0].threads,
            "versions": {
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "espalier": version("espalier"),
            },
            "host": {
                "name": socket.gethostname(),
                # As `platform.platform` has it, which may run a program to learn it.
                "system": f"{kernel.sysname}-{kernel.release}-{kernel.machine}-with-{''.join(platform.libc_ver())}",
                "processor": resource_limits.processor(),
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
        return RankSetup(
            recipe, self.plan, self.workload, place, self.folder.path, about=about, flops_per_second=peak,
            trust=self.resolved.trust,
        )  # fmt: skip

    def identity(self) -> dict[str, str]:
        """What all ranks must have in common."""
        recipe = cache_dir.hashed(recipe_file.to_table(self.resolved.recipe))
        return version_check.identity(recipe=recipe, data=self.workload.fingerprint())


# --- whose checkpoints they are --------------------------------------------------------------------------------------


def meaning(recipe: Recipe, data: str) -> str:
    """A digest of what a run means. `data`: its fingerprint, which stands for the paths."""
    options = recipe_file.meaning(recipe)
    paths = [key for key in options if key.startswith("data.") and key.endswith(".path")]
    return cache_dir.hashed([{key: options[key] for key in options.keys() - {*paths}}, data])


@dataclass(frozen=True)
class Owner:
    """The identity of a run that starts, and what is to be said of it."""

    identity: RunIdentity
    saved: Checkpoints
    notes: Sequence[str] = ()
    new: bool = False
    """Whether it was drawn now."""

    def keep(self, folder: runs.RunFolder, recipe: Recipe) -> None:
        """Writes the identity into the run folder, and beside checkpoints that are elsewhere, and locks their
        folder. Raises UserError where another run was first there, or another process writes there."""
        identity = self.identity
        if recipe.checkpoint.target is not None:
            path = self.saved.place.path(run_identity.OWNER)
            content = self.saved.place.claim(msgspec.json.encode(identity.run))
            first = run_identity.loads(content, RunStamp, path)
            if self.new and first.meaning == identity.run.meaning:
                identity = run_identity.taken_up(first)
            run_identity.refuse_foreign(identity, first, path)
            if isinstance(self.saved.place, Folder) and self.saved.place.root != folder.path.absolute():
                folder.lock(self.saved.place.root, "checkpoint.target", "name another checkpoint.target")
        sealed = msgspec.structs.replace(identity, seal=run_trust.seal_places(recipe))
        cache_dir.replace(folder.identity, msgspec.json.format(msgspec.json.encode(sealed)).decode())


def owner_of(folder: runs.RunFolder, recipe: Recipe, data: str, saved: Checkpoints) -> Owner:
    """Who the checkpoints of a run belong to that starts or goes on; `data`: the fingerprint of its data.

    A run without a folder that means the same as the run of the newest checkpoint goes on as that one: its folder was
    lost, and its checkpoints are elsewhere. Raises UserError where a checkpoint is of another run.
    """
    digest, entries, before = meaning(recipe, data), saved.entries(), run_identity.read(folder.path)
    stamps = [entry.run for entry in entries if entry.run is not None]
    if before is not None:
        owner = Owner(before.now_means(digest), saved)
    elif not stamps or stamps[-1].meaning != digest:
        owner = Owner(run_identity.new(folder.path.name, socket.gethostname(), digest), saved, new=True)
    else:
        same = f"is of {stamps[-1]}, with the same recipe, seed and data: the run goes on as that one"
        owner = Owner(run_identity.taken_up(*stamps), saved, [f"{entries[-1].path} {same}"])
    for entry in entries:
        run_identity.refuse_foreign(owner.identity, entry.run, entry.path)
    nameless = [entry.path for entry in entries if entry.run is None and not entry.why][-1:]
    return replace(owner, notes=[*owner.notes, *(run_identity.doubt(owner.identity, None, path) for path in nameless)])
