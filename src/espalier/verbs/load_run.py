"""Loads a run's trained model from its newest good checkpoint into this process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from espalier import phases
from espalier import run as runs
from espalier.config import Recipe
from espalier.errors import UserError
from espalier.mechanisms import DTYPES
from espalier.track import events
from espalier.verbs import prepare, run_seal
from espalier.workload import Workload


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode, what it was trained on, and after how many steps it was saved."""

    folder: runs.RunFolder
    recipe: Recipe
    workload: Workload
    model: nn.Module
    step: int


def open_trained(path: str, trust: bool = False) -> Trained:
    """The newest good checkpoint of the run in `path`. `trust`: who made the run is trusted, see `Checkpoints.trust`.

    Raises UserError when there is none.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    folder = runs.find(path)
    recipe = folder.read()
    workload = prepare.open_workload(resolved(folder, recipe, trust))
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
    return Trained(folder, recipe, workload, model.eval(), int(loaded.meta["step"]))


def resolved(folder: runs.RunFolder, recipe: Recipe, trust: bool = False) -> prepare.Resolved:
    """The recipe of the run in `folder`, with the folder of the recipe file that it was begun from.

    Raises UserError where opening its workload would run the code of somebody who is not trusted (`run_seal`).
    """
    begun = [event for event in events.read(folder.events) if event["event"] == "run"] if folder.events.exists() else []
    last = begun[-1] if begun else {}
    origin = Path(last["recipe_folder"]) if last.get("recipe_folder") else None
    run_seal.check(recipe, origin, str(last.get("seal", "")), str(folder.path), trust)
    return prepare.Resolved(recipe, folder=origin, trust=trust)
