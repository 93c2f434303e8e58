"""Rank setup: what one rank needs to know to train, its place in the mesh and its share of every batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from espalier.parallel.mesh import Mesh, of_plan
from espalier.parallel.workload import Shard, Workload
from espalier.plan.base import Plan
from espalier.recipe import Recipe
from espalier.train import rank_spec as launch


@dataclass
class RankSetup:
    """The run's recipe and plan, the rank's own place, and where things go."""

    recipe: Recipe
    plan: Plan
    workload: Workload
    place: launch.RankSpec
    folder: Path | None = None
    """None: nothing is written (a trial, a test)."""
    emit: Callable[..., Any] = field(default=lambda event, **fields: None)
    stop_after: int | None = None
    """Ends the run after this step as if it had been interrupted."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the run's first event says of it besides the step it starts from."""
    flops_per_second: float = 0.0
    """Peak (or best measured) of all devices together, for MFU."""
    new: bool = False
    """Whether all ranks know that there is no state to take up, and need not look for one."""

    @property
    def device(self) -> torch.device:
        return torch.device(self.place.device)

    @cached_property
    def mesh(self) -> Mesh:
        """How the plan's ranks stand to one another."""
        return of_plan(self.plan)

    @property
    def shard(self) -> Shard:
        """This rank's part of every global batch, in as many micro-batches as on every rank where that matters."""
        start, stop = self.plan.ranks[self.place.rank].share
        slot = self.mesh.sequence_part(self.place.rank)
        return Shard(start, stop, self.plan.micro_batch, *slot, rounds=self.plan.rounds)
