"""Opens a finished or running run: its tables and its trained model, for prediction, evaluation and export.

`espalier.open("runs/x")` is `open_run`. Imports torch only where a model is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.cli import run_data, run_trust
from espalier.recipe import Recipe
from espalier.recipe.errors import UserError
from espalier.recipe.import_function import KEPT_CODE, unchanged_sources
from espalier.recipe.terminal import say_progress
from espalier.track import events
from espalier.track.run_tables import RunTables, Table
from espalier.train import run_folder as runs
from espalier.train.run_folder import RunFolder

if TYPE_CHECKING:
    import torch
    from torch import nn

    from espalier.checkpoint.save_and_restore import Checkpoints
    from espalier.parallel.workload import Workload
    from espalier.train.workload_registry import Resolved


class OpenRun(RunTables):
    """What a run folder holds, its trained model included. Made by `open_run`."""

    def model(self, *, trust: bool = False) -> Any:
        """The `nn.Module` of the newest good checkpoint, in evaluation mode, on a GPU where there is one.

        It needs nothing but the folder. `trust`: whether code of somebody else's run may run. Raises UserError where
        there is no checkpoint yet.
        """
        return SavedRun.find(self.folder, trust).trained().model

    def tokenizer(self, *, trust: bool = False) -> Any:
        """The `language.tokenizer.Tokenizer` that a language model was trained with. `trust`: as in `model`.

        Raises UserError for a run of another kind.
        """
        from espalier.train import workload_registry
        from espalier.train.workload_row import Tokenizes

        run = SavedRun.find(self.folder, trust)
        row = workload_registry.row(run.recipe)
        if not isinstance(row, Tokenizes):
            raise UserError(f"The run in {self.folder} has no tokenizer.", why="it trains no language model")
        return row.tokenizer(run.open_workload())

    def predict(
        self, text: str | None = None, *, data: str | None = None, trust: bool = False, **sampling: Any
    ) -> Table:
        """What `espalier predict RUN [text] --out FILE` writes, as a table.

        Args:
            text: names nodes, links or graphs (None: all of them), or is a prompt.
            data: the path of other data, of a graph.
            trust: whether code of somebody else's run may run.
            sampling: fields of `train.workload_row.Sampling`, such as `tokens`; `top_k` also of links.

        Returns:
            NumPy arrays by the names of columns: float64, int64, or text.

        Raises:
            UserError: where there is no checkpoint yet, and where `text` means nothing.
        """
        import numpy as np

        from espalier.train.workload_registry import row
        from espalier.train.workload_row import Predicts, Sampling

        trained = SavedRun.find(self.folder, trust, DataChoice(predicts=True, path=data)).trained()
        kind = row(trained.recipe)
        if not isinstance(kind, Predicts):
            raise no_inputs(self.folder)
        rows = list(kind.rows(trained.workload, trained.model, text, Sampling(**sampling)))
        return {name: np.array([answer[name] for answer in rows]) for name in (rows or [{}])[0]}


def no_inputs(folder: str | Path) -> UserError:
    """Of a run of a module, whose inputs only its author knows."""
    return UserError(
        f"The run in {folder} holds a module of your own.",
        why="the inputs of the module are not known",
        do=f"in Python: espalier.open({str(folder)!r}).model(), which is your nn.Module",
    )


def open_run(folder: str | Path) -> OpenRun:
    """The run in `folder`. Raises UserError when there is no such folder, or no run in it."""
    return OpenRun.read(folder)


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


# --- a run as its folder keeps it ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode, what it was trained on, and after how many steps it was saved.

    `skipped`: newer checkpoints that are damaged, each with the reason.
    """

    folder: RunFolder
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
            say_progress(f"espalier: {what}")


@dataclass(frozen=True)
class SavedRun:
    """A run as its folder keeps it, to be used on this machine.

    Attributes:
        folder: the run folder, which may have been copied here.
        recipe: that of the run, with the places that may be used.
        trust: who made the run is trusted, see `cli.run_trust`.
        data: what of its data it is opened with.
    """

    folder: RunFolder
    recipe: Recipe
    trust: bool = False
    data: DataChoice = NOTHING

    @classmethod
    def find(
        cls, path: str | Path, trust: bool = False, data: DataChoice = NOTHING, *, silent: bool = False
    ) -> SavedRun:
        """The run in `path`. Which of its places are not used is said, unless `silent`.

        Where `checkpoint.target` is not there, checkpoints are those in the folder. Where
        `store.path` is not there, rows of features wait in the cache, and what optimizer nodes
        hold is in the folder. Raises UserError where there is no run.
        """
        folder = runs.find(path)
        use = run_trust.usable(folder, folder.read(), trust)
        recipe = use.recipe if silent else use.announced()
        target = recipe.checkpoint.target
        store = recipe.store
        if target is not None and "://" not in target and not os.path.exists(target) and folder.checkpoints.exists():
            recipe = recipe.changed(checkpoint=recipe.checkpoint.changed(target=None))
        if store is not None and store.path is not None:
            paths = (store.path,) if isinstance(store.path, str) else store.path
            if not all(map(os.path.exists, paths)):
                recipe = recipe.changed(store=store.changed(path=None))
        return cls(folder, recipe, trust, data)

    def checkpoints(self) -> Checkpoints:
        """The saved states."""
        from espalier.train import phases

        return phases.checkpoints(self.recipe, self.folder)

    def trained(self, device: torch.device | None = None) -> Trained:
        """The newest good checkpoint, on `device` (None: the first accelerator, if there is one).

        Raises UserError when there is none.
        """
        from espalier.kernels import accelerator
        from espalier.train import phases, workload_registry
        from espalier.train.build import DTYPES
        from espalier.train.workload_row import LoadsPacked

        folder = self.folder
        recipe = self.recipe
        workload = self.open_workload()
        device = device or accelerator.of_rank(0)
        if not folder.checkpoints.exists():
            model = workload.build(device, DTYPES[recipe.train.precision])
            row = workload_registry.row(recipe)
            if isinstance(row, LoadsPacked) and row.load_packed(model, folder.path):
                return Trained(folder, recipe, workload, model.eval(), recipe.train.steps or 0)
        saved = self.checkpoints()
        workload = phases.held(workload, saved)
        model = workload.build(device, DTYPES[recipe.train.precision])
        loaded = saved.load({"model": model})
        if saved.doubt:
            say_progress(f"note: {saved.doubt}")
        if loaded is None:
            raise UserError(
                f"The run in {folder.path} has no checkpoint yet.",
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

    def open_workload(self) -> Workload:
        """The run's workload, with all its phases, as its folder keeps it. Raises UserError."""
        from espalier.cli.resolve_recipe import say_notes
        from espalier.track.progress import waiting
        from espalier.train import workload_registry

        folder = self.folder
        recipe = self.recipe
        data = self.data
        resolved = self.resolve()
        try:
            workload = workload_registry.open_workload(resolved, waiting)
        except UserError as error:
            if resolved.frozen is None or data.path is not None or _suffices(recipe, resolved.frozen):
                raise
            why_not = f"{folder.path} keeps of its data what the model needs; whole it keeps graphs of up to 1 GiB"
            why, do = ([text] if text else [] for text in (error.why, error.do))
            moved = "--data PATH (eval, predict), where the data is now"
            raise UserError(error.what, why="; ".join([*why, why_not]), do="; or ".join([moved, *do])) from None
        if resolved.frozen is None and data.path is None:
            run_data.refuse_changed(folder, recipe, workload)
        if data.path is not None:
            say_notes(workload)
        return workload

    def resolve(self) -> Resolved:
        """The recipe of the run, with the folder of the recipe file that it was begun from.

        Raises UserError where opening its workload would run the code of somebody who is not
        trusted (`run_trust`).
        """
        from espalier.train.workload_registry import Resolved

        folder = self.folder
        recipe = self.recipe
        trust = self.trust
        data = self.data
        frozen = folder.kept()
        reads = data.reads(recipe, frozen)
        starts = [event for event in events.logged(folder.events) if event["event"] == "run"]
        last = starts[-1] if starts else {}
        origin = Path(last["recipe_folder"]) if last.get("recipe_folder") else None
        source = run_trust.Origin(origin, frozen, reads)
        run_trust.refuse_code(recipe, source, str(last.get("seal", "")), str(folder.path), trust)
        if reads and data.path is None:
            run_trust.refuse_hub(folder, recipe, trust)
        place = origin if frozen is None or unchanged_sources(frozen, origin) else frozen / KEPT_CODE
        if data.path is not None:
            recipe = _with_data(recipe, data.path)
        return Resolved(recipe, folder=place, trust=trust, frozen=frozen, reads=reads)


def load_trained(path: str | Path, trust: bool = False, data: DataChoice = NOTHING) -> Trained:
    """The trained model of the run in `path`, for a process of its own: it computes on all cores."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return SavedRun.find(path, trust, data).trained()


def _with_data(recipe: Recipe, path: str) -> Recipe:
    if not recipe.data:
        raise UserError(
            f"--data {path} names no data of this run.",
            why="the function that model.build names reads it",
            do="leave --data out, or give that function another file in model.arguments of a new run",
        )
    data = recipe.data[0].changed(path=path)
    graph = recipe.graph
    if graph is not None and graph.halo is not None:  # `parts` is of the nodes of the run's own graph
        graph = graph.changed(halo=graph.halo.changed(parts=""))
    return recipe.changed(data=(data,), graph=graph)
