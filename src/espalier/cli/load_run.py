"""Loads a run's trained model from its newest good checkpoint into this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from espalier.cli import prepare, run_data, run_places
from espalier.cli.run_data import NOTHING, DataChoice
from espalier.kernels import accelerator
from espalier.parallel.workload import Workload
from espalier.plan import base as plans
from espalier.recipe import Recipe
from espalier.recipe.errors import UserError
from espalier.recipe.terminal import say
from espalier.train import phases, workload_registry
from espalier.train import run_folder as runs
from espalier.train.build import DTYPES


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode, what it was trained on, and after how many steps it was saved.

    `skipped`: newer checkpoints that are damaged, each with the reason.
    """

    folder: runs.RunFolder
    recipe: Recipe
    workload: Workload
    model: nn.Module
    step: int
    skipped: Sequence[tuple[str, str]] = ()

    @property
    def checkpoint(self) -> dict[str, Any]:
        """What was read, for `--json`."""
        newer = [{"checkpoint": name, "why": reason} for name, reason in self.skipped]
        return {"step": self.step, **({"skipped": newer} if newer else {})}

    def say_skipped(self, silent: bool = False) -> None:
        """Tells people, unless `silent`, of newer checkpoints that were not read."""
        for name, reason in () if silent else self.skipped:
            what = f"read the checkpoint of step {self.step}: {name} is newer, but cannot be used ({reason})"
            say(f"espalier: {what}", file=sys.stderr, flush=True)


def open_trained(path: str | Path, trust: bool = False, data: DataChoice = NOTHING) -> Trained:
    """As `trained`, in a process of its own, which computes on all cores."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return trained(path, trust, data)


def trained(
    path: str | Path, trust: bool = False, data: DataChoice = NOTHING, device: torch.device | None = None
) -> Trained:
    """The newest good checkpoint of the run in `path`, on `device` (None: the first accelerator, if there is one).
    `trust`: who made the run is trusted, see `Checkpoints.trust`.

    Raises UserError when there is none.
    """
    folder = runs.find(path)
    recipe = located_here(folder, trust).said()
    workload = open_workload(folder, recipe, trust, data)
    device = device or accelerator.of_rank(0)
    if not folder.checkpoints.exists():
        model = workload.build(device, DTYPES[recipe.train.precision])
        if workload_registry.row(recipe).packed(model, folder.path):
            return Trained(folder, recipe, workload, model.eval(), recipe.train.steps or 0)
    saved = phases.checkpoints(recipe, folder)
    saved.trust = trust
    workload = phases.held(workload, saved)
    model = workload.build(device, DTYPES[recipe.train.precision])
    loaded = saved.load({"model": model})
    if saved.doubt:
        prepare.say(f"note: {saved.doubt}")
    if loaded is None:
        raise UserError(
            f"The run in {path} has no checkpoint yet.",
            why=f"looked in {recipe.checkpoint.target or folder.checkpoints}",
            do="let it train longer, or set checkpoint.every lower"
            if recipe.checkpoint.target is None
            else f"bring that folder back (checkpoint.target), or copy it to {folder.checkpoints}",
        )
    step = int(loaded.meta["step"])
    if "model" in loaded.absent:  # it is with the run's optimizer nodes
        from espalier.mechanisms.optimizer_node import role

        step = role.load_into(model, workload, recipe, plans.read(folder.plan), folder.path)
    return Trained(folder, recipe, workload, model.eval(), step, loaded.skipped)


def located_here(folder: runs.RunFolder, trust: bool) -> run_places.Use:
    """The recipe of the run with the places that may be used, as on a machine to which its folder was copied: where
    `checkpoint.target` is not there, checkpoints are those in the folder; where `store.path` is not there, rows of
    features wait in the cache, and what optimizer nodes hold is in the folder."""
    recipe, note = run_places.usable(folder, folder.read(), trust)
    target, store = recipe.checkpoint.target, recipe.store
    if target is not None and "://" not in target and not os.path.exists(target) and folder.checkpoints.exists():
        recipe = recipe.changed(checkpoint=recipe.checkpoint.changed(target=None))
    if store is not None and store.path is not None:
        paths = (store.path,) if isinstance(store.path, str) else store.path
        if not all(map(os.path.exists, paths)):
            recipe = recipe.changed(store=store.changed(path=None))
    return run_places.Use(recipe, note)


def open_workload(folder: runs.RunFolder, recipe: Recipe, trust: bool, data: DataChoice) -> Workload:
    """The run's workload, with all its phases, as its folder keeps it. Raises UserError."""
    found = run_data.resolved(folder, recipe, trust, data)
    try:
        workload = prepare.open_workload(found)
    except UserError as error:
        if found.kept is None or data.path is not None or not workload_registry.row(recipe).lacks(found.kept):
            raise
        kept = f"{folder.path} keeps of its data what the model needs; whole it keeps graphs of up to 1 GiB"
        why, do = ([one] if one else [] for one in (error.why, error.do))
        moved = "--data PATH (eval, predict), where the data is now"
        raise UserError(error.what, why="; ".join([*why, kept]), do="; or ".join([moved, *do])) from None
    if found.kept is None and data.path is None:
        run_data.refuse_changed(folder, recipe, workload)
    if data.path is not None:
        prepare.say_notes(workload)
    return workload
