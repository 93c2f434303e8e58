"""Loads a run's trained model from its newest good checkpoint into this process."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from torch import nn

from espalier import phases
from espalier import run as runs
from espalier.config import Recipe
from espalier.errors import UserError
from espalier.mechanisms import DTYPES
from espalier.plan import base as plans
from espalier.verbs import prepare, run_data
from espalier.workload import Workload


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode, what it was trained on, and after how many steps it was saved."""

    folder: runs.RunFolder
    recipe: Recipe
    workload: Workload
    model: nn.Module
    step: int


@dataclass(frozen=True)
class DataChoice:
    """What of its data a run is opened with beside what its folder keeps: nothing; what evaluation needs (`evaluates`);
    or the data at `path`, in place of its own."""

    evaluates: bool = False
    path: str | None = None


def open_trained(path: str | Path, trust: bool = False, data: DataChoice = DataChoice()) -> Trained:
    """As `trained`, in a process of its own, which computes on all cores."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return trained(path, trust, data)


def trained(path: str | Path, trust: bool = False, data: DataChoice = DataChoice()) -> Trained:
    """The newest good checkpoint of the run in `path`. `trust`: who made the run is trusted, see `Checkpoints.trust`.

    Raises UserError when there is none.
    """
    folder = runs.find(path)
    recipe = folder.read()
    workload = open_workload(folder, recipe, trust, data)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    saved = phases.checkpoints(recipe, str(folder.checkpoints))
    saved.trust = trust
    workload = phases.held(workload, saved)
    model = workload.build(device, DTYPES[recipe.train.precision])
    loaded = saved.load({"model": model})
    if loaded is None:
        raise UserError(
            f"The run in {path} has no checkpoint yet.",
            why=f"looked in {recipe.checkpoint.target or folder.checkpoints}",
            do="let it train longer, or set checkpoint.every lower",
        )
    step = int(loaded.meta["step"])
    if "model" in loaded.absent:  # it is with the run's optimizer nodes
        from espalier.shard.luwu import role

        step = role.load_into(model, workload, recipe, plans.read(folder.plan), folder.path)
    return Trained(folder, recipe, workload, model.eval(), step)


def open_workload(folder: runs.RunFolder, recipe: Recipe, trust: bool, data: DataChoice) -> Workload:
    """The run's workload, with all its phases, as its folder keeps it. Raises UserError."""
    if data.path is not None:
        recipe = _with_data(recipe, data.path)
    found = run_data.resolved(folder, recipe, trust)
    reads = data.path is not None or found.kept is None or (data.evaluates and found.reads)
    workload = prepare.open_workload(replace(found, reads=reads))
    if found.kept is None and data.path is None:
        run_data.refuse_changed(folder, recipe, workload)
    return workload


def _with_data(recipe: Recipe, path: str) -> Recipe:
    if not recipe.data:
        raise UserError(
            f"--data {path} names no data of this run.",
            why="the function that model.build names reads it",
            do="leave --data out, or give that function another file in model.arguments of a new run",
        )
    return msgspec.structs.replace(recipe, data=(msgspec.structs.replace(recipe.data[0], path=path),))
