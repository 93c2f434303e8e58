"""Resolves a recipe: what it leaves open, the machines it is for, and what the planner is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch.distributed as dist

from espalier.cli import run_trust
from espalier.comm import plain_collectives
from espalier.machine import cluster as clusters
from espalier.machine import probe
from espalier.machine.cluster import Cluster
from espalier.parallel.workload import Workload
from espalier.plan.request import Request
from espalier.recipe import Recipe
from espalier.recipe.cache_dir import free_bytes
from espalier.recipe.terminal import say_progress
from espalier.track.progress import waiting
from espalier.track.startup import STARTUP
from espalier.train import request_from_recipe, workload_registry
from espalier.train.rank_spec import RankSpec
from espalier.train.run_folder import RunFolder, path_of
from espalier.train.workload_registry import Resolved


def resolve(path: str | Path, overrides: Sequence[str], trust: bool = False, run: str | None = None) -> Resolved:
    """Reads a recipe and derives what it leaves open. `trust`: who made the run that is taken up again is trusted;
    `run`: its folder, where that is not the recipe's."""
    recipe = run_trust.load(path, overrides, trust)
    existing = RunFolder(path_of(recipe, run))
    frozen = existing.kept() if existing.exists() else None
    return workload_registry.settle(recipe, Path(path).absolute().parent, waiting, frozen, trust)


def machines(recipe: Recipe, cluster: str | None = None) -> Cluster:
    """The cluster file that was named, else this machine (probed once, then from the cache)."""
    named = cluster or recipe.plan.cluster
    if named is not None:
        return clusters.read(named)
    measured = probe.ready(say=say_progress)
    STARTUP.ended("Measuring this machine")
    return measured


def machines_of(channel: dist.ProcessGroup | None, place: RankSpec, recipe: Recipe) -> Cluster:
    """The machines of all ranks of `channel`: the cluster file that the first rank reads, else what they measure
    together, once. Every rank calls it and gets the same value."""
    if channel is None:
        return machines(recipe)
    from espalier.comm import multihost_probe

    key = multihost_probe.key(channel)
    known = None
    if place.rank == 0:
        cluster = clusters.read(recipe.plan.cluster) if recipe.plan.cluster else multihost_probe.stored_cluster(key)
        known = clusters.dumps(cluster) if cluster is not None else None
        if cluster is None:
            say_progress("Measuring the hosts and the links between them (once).")
    known = plain_collectives.broadcast(known, channel)
    if known is not None:
        return clusters.loads(known)
    measured = multihost_probe.probe_ranks(channel, place.local_rank, lambda: probe.ready(say=say_progress))
    multihost_probe.keep(measured, key)
    return measured


def say_notes(workload: Workload) -> None:
    """What is to be known of the data of a workload, on standard error."""
    for note in workload.notes():
        say_progress(f"note: {note}")


def parameters(recipe: Recipe, workload: Workload) -> int:
    """How many parameters the recipe's model has."""
    return workload_registry.row(recipe).profile(recipe, lambda: workload).parameters


def request(resolved: Resolved, ranks: int | None = None, workload: Workload | None = None) -> Request:
    """What the planner is asked; allocates nothing and opens data only where the model depends on it, and then says
    what of it is not used."""

    @cache
    def opened() -> Workload:
        workload = workload_registry.open_workload(resolved, waiting)
        say_notes(workload)
        return workload

    asked = request_from_recipe.of_recipe(resolved.recipe, lambda: workload or opened())
    if ranks is not None:
        asked = asked.changed(pin=asked.pin.changed(ranks=ranks))
    free = None
    path = path_of(resolved.recipe, None).absolute()
    if not resolved.recipe.plan.cluster:
        size = free_bytes(path)
        step = max(1, (1 << size.bit_length()) // 8)  # what other programs write seldom changes a plan
        free = float(size // step * step)
    return replace(asked, free=free)
