"""Opens a finished or running run: its tables and its trained model, for prediction, evaluation and export.

`espalier.open("runs/x")` is `open_run`. Imports torch only where a model is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.cli import run_data, run_trust
from espalier.recipe import Recipe
from espalier.recipe.errors import UserError
from espalier.recipe.import_function import KEPT_CODE, unchanged_sources
from espalier.recipe.terminal import say
from espalier.track import events, run_tables
from espalier.train import run_folder as runs

if TYPE_CHECKING:
    import torch
    from torch import nn

    from espalier.cli.prepare import Resolved
    from espalier.parallel.workload import Workload


class OpenRun(run_tables.RunTables):
    """What a run folder holds, its trained model included. Made by `open_run`."""

    def model(self, *, trust: bool = False) -> Any:
        """The `nn.Module` of the newest good checkpoint, in evaluation mode, on a GPU where there is one.

        It needs nothing but the folder. `trust`: whether code of somebody else's run may run. Raises UserError where
        there is no checkpoint yet.
        """
        return trained(self.folder, trust).model


def open_run(folder: str | Path) -> OpenRun:
    """The run in `folder`. Raises UserError when there is no such folder, or no run in it."""
    return OpenRun(*run_tables.run_files(folder))


@dataclass(frozen=True)
class DataChoice:
    """What of its data a run is opened with where its folder does not keep that: nothing; what evaluation needs
    (`evaluates`), or predictions (`predicts`); all of it (`trains`); or the data at `path`, in place of its own."""

    evaluates: bool = False
    predicts: bool = False
    trains: bool = False
    path: str | None = None

    def reads(self, recipe: Recipe, frozen: Path | None) -> bool:
        """Whether the data itself is read. `frozen`: what the run has frozen of it."""
        if self.trains or self.path is not None or frozen is None:
            return True
        needed = self.evaluates or self.predicts or "quant" in recipe.mechanisms  # widths are of all nodes
        return needed and not _suffices(recipe, frozen, self.evaluates)


def _suffices(recipe: Recipe, frozen: Path, evaluation: bool = False) -> bool:
    from espalier.train import workload_registry
    from espalier.train.workload_row import Freezes

    row = workload_registry.row(recipe)
    return isinstance(row, Freezes) and row.suffices(frozen, evaluation)


NOTHING = DataChoice()


# --- the trained model --------------------------------------------------------------------------------------------


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
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return trained(path, trust, data)


def trained(
    path: str | Path, trust: bool = False, data: DataChoice = NOTHING, device: torch.device | None = None
) -> Trained:
    """The newest good checkpoint of the run in `path`, on `device` (None: the first accelerator, if there is one).
    `trust`: who made the run is trusted, see `Checkpoints.trust`.

    Raises UserError when there is none.
    """
    from espalier.kernels import accelerator
    from espalier.train import phases, workload_registry
    from espalier.train.build import DTYPES
    from espalier.train.workload_row import LoadsPacked

    folder = runs.find(path)
    recipe = located_here(folder, trust).announced()
    workload = open_workload(folder, recipe, trust, data)
    device = device or accelerator.of_rank(0)
    if not folder.checkpoints.exists():
        model = workload.build(device, DTYPES[recipe.train.precision])
        row = workload_registry.row(recipe)
        if isinstance(row, LoadsPacked) and row.load_packed(model, folder.path):
            return Trained(folder, recipe, workload, model.eval(), recipe.train.steps or 0)
    saved = phases.checkpoints(recipe, folder)
    saved.trust = trust
    workload = phases.held(workload, saved)
    model = workload.build(device, DTYPES[recipe.train.precision])
    loaded = saved.load({"model": model})
    if saved.doubt:
        say(f"note: {saved.doubt}", file=sys.stderr, flush=True)
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
        from espalier.plan import base as plans

        step = role.load_into(model, workload, recipe, plans.read(folder.plan), folder.path)
    return Trained(folder, recipe, workload, model.eval(), step, loaded.skipped)


def located_here(folder: runs.RunFolder, trust: bool) -> run_trust.Use:
    """The recipe of the run with the places that may be used, as on a machine to which its folder was copied: where
    `checkpoint.target` is not there, checkpoints are those in the folder; where `store.path` is not there, rows of
    features wait in the cache, and what optimizer nodes hold is in the folder."""
    recipe, note = run_trust.usable(folder, folder.read(), trust)
    target, store = recipe.checkpoint.target, recipe.store
    if target is not None and "://" not in target and not os.path.exists(target) and folder.checkpoints.exists():
        recipe = recipe.changed(checkpoint=recipe.checkpoint.changed(target=None))
    if store is not None and store.path is not None:
        paths = (store.path,) if isinstance(store.path, str) else store.path
        if not all(map(os.path.exists, paths)):
            recipe = recipe.changed(store=store.changed(path=None))
    return run_trust.Use(recipe, note)


def open_workload(folder: runs.RunFolder, recipe: Recipe, trust: bool, data: DataChoice = NOTHING) -> Workload:
    """The run's workload, with all its phases, as its folder keeps it. Raises UserError."""
    from espalier.cli import prepare

    run = resolved(folder, recipe, trust, data)
    try:
        workload = prepare.open_workload(run)
    except UserError as error:
        if run.frozen is None or data.path is not None or _suffices(recipe, run.frozen):
            raise
        why_not = f"{folder.path} keeps of its data what the model needs; whole it keeps graphs of up to 1 GiB"
        why, do = ([text] if text else [] for text in (error.why, error.do))
        moved = "--data PATH (eval, predict), where the data is now"
        raise UserError(error.what, why="; ".join([*why, why_not]), do="; or ".join([moved, *do])) from None
    if run.frozen is None and data.path is None:
        run_data.refuse_changed(folder, recipe, workload)
    if data.path is not None:
        prepare.say_notes(workload)
    return workload


# --- the data ------------------------------------------------------------------------------------------------------


def resolved(folder: runs.RunFolder, recipe: Recipe, trust: bool = False, data: DataChoice = NOTHING) -> Resolved:
    """The recipe of the run in `folder`, with the folder of the recipe file that it was begun from.

    Raises UserError where opening its workload would run the code of somebody who is not trusted (`run_trust`).
    """
    from espalier.train.workload_registry import Resolved

    frozen = folder.kept()
    reads = data.reads(recipe, frozen)
    begun = [event for event in events.read(folder.events) if event["event"] == "run"] if folder.events.exists() else []
    last = begun[-1] if begun else {}
    origin = Path(last["recipe_folder"]) if last.get("recipe_folder") else None
    source = run_trust.Origin(origin, frozen, reads)
    run_trust.refuse_code(recipe, source, str(last.get("seal", "")), str(folder.path), trust)
    if reads and data.path is None:
        run_trust.refuse_hub(folder, recipe, trust)
    place = origin if frozen is None or unchanged_sources(frozen, origin) else frozen / KEPT_CODE
    if data.path is not None:
        recipe = _with_data(recipe, data.path)
    return Resolved(recipe, folder=place, trust=trust, frozen=frozen, reads=reads)


def _with_data(recipe: Recipe, path: str) -> Recipe:
    if not recipe.data:
        raise UserError(
            f"--data {path} names no data of this run.",
            why="the function that model.build names reads it",
            do="leave --data out, or give that function another file in model.arguments of a new run",
        )
    data, graph = recipe.data[0].changed(path=path), recipe.graph
    if graph is not None and graph.halo is not None:  # `parts` is of the nodes of the run's own graph
        graph = graph.changed(halo=graph.halo.changed(parts=""))
    return recipe.changed(data=(data,), graph=graph)
