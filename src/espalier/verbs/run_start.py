"""Run start: what was decided of a run that is about to begin or go on, and where it goes."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from importlib.metadata import version

import msgspec
import torch

from espalier import cache_dir, workload_registry
from espalier import cluster as clusters
from espalier import run as runs
from espalier.checkpoint import run_identity
from espalier.config import model_kinds, recipe_file
from espalier.hardware import resource_limits
from espalier.launch import base as launch
from espalier.launch import version_check
from espalier.plan import base as plans
from espalier.plan import device_model
from espalier.plan.collective_time import used
from espalier.rank_setup import RankSetup
from espalier.verbs import prepare as ready
from espalier.verbs import run_seal
from espalier.workload import PackStart, Workload


def _system() -> str:
    """`Linux-6.1.0-x86_64-with-glibc2.36`. `platform.platform` may run a program for the same."""
    system = os.uname()
    return f"{system.sysname}-{system.release}-{system.machine}-with-{''.join(platform.libc_ver())}"


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
    """Whether its last step is saved already."""

    @property
    def whole(self) -> Workload:
        """The workload with all its phases."""
        return self.opened or self.workload

    def pack(self, node: int = 0, waits: bool = False) -> None:
        """Packs the batches of the ranks on a machine, or opens what is packed. The recipe has a [store]. `waits`: each
        of them does, and they wait for one another."""
        recipe, plan = self.resolved.recipe, self.plan
        if "store" not in model_kinds.of(recipe.model).sections:
            return
        places = (one for one in launch.places(plan) if plan.ranks[one.rank].node == node)
        shards = [RankSetup(recipe, plan, self.workload, place).shard for place in places]
        with ready.waiting("Packing the features") as progress:
            workload_registry.row(recipe).pack(self.workload, shards, PackStart(progress, waits))

    def setting(self, place: launch.RankSpec) -> RankSetup:
        """What the rank at `place` needs to know, and what the run's first event says of it."""
        recipe, derivations = self.resolved.recipe, self.resolved.derivations
        if recipe.store is not None:
            self.pack(self.plan.ranks[place.rank].node, waits=True)
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
                "system": _system(),
                "processor": resource_limits.processor(),
            },
            "data": self.workload.fingerprint(),
            "recipe_folder": str(self.resolved.folder),
            "seal": run_seal.seal(recipe, run_seal.Origin(self.resolved.folder, self.folder.preprocessing)),
            "notes": list(self.workload.notes()),
            "derivations": [{"key": one.key, "value": one.value, "why": one.reason} for one in derivations],
        }
        peak = sum(device_model.peak(one, self.plan.precision) for one in used(self.cluster, self.plan))
        return RankSetup(
            recipe, self.plan, self.workload, place, self.folder.path, about=about, flops_per_second=peak,
            trust=self.resolved.trust,
        )  # fmt: skip

    def identity(self) -> dict[str, str]:
        """What all ranks must have in common."""
        recipe = cache_dir.hashed(recipe_file.to_table(self.resolved.recipe))
        return version_check.identity(recipe=recipe, data=self.workload.fingerprint())
