"""Split runs: `graph.split = "all"` trains on each split of the data's masks in turn, each a run in a folder of its
own (`RUN/split-3`), and reports the mean and the deviation of their figures. The same command again goes on."""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from espalier.cli import finished_run
from espalier.recipe import graphs
from espalier.recipe.errors import UserError
from espalier.recipe.terminal import say_progress
from espalier.track import run_comparison
from espalier.track.startup import STARTUP
from espalier.train import run_folder as runs

if TYPE_CHECKING:
    from espalier.train.workload_registry import Resolved


def count(resolved: Resolved) -> int:
    """How many runs a recipe asks for: one, or one for each split, and then the graph is read."""
    if not graphs.has_all_splits(resolved.recipe):
        return 1
    from espalier.track.progress import waiting
    from espalier.train import workload_registry

    return len(cast("Any", workload_registry.open_workload(resolved, waiting)).graph.splits)


def run(arguments: argparse.Namespace, train: Callable[[argparse.Namespace], int]) -> int:
    """Trains on every split with `train`, the first with its plan and progress shown, then compares them; exit code. A
    finished split is not trained again."""
    from espalier.cli import report, resolve_recipe

    resolved = resolve_recipe.resolve(arguments.recipe, arguments.overrides, arguments.trust)
    folder = runs.path_of(resolved.recipe, arguments.run)
    target = resolved.recipe.checkpoint.target
    splits = count(resolved)
    for number in range(splits):
        say_progress(f"Split {number + 1} of {splits}, in {folder}/split-{number}.")
        changes = [f"graph.split={number}", *([f"checkpoint.target={target}/split-{number}"] if target else [])]
        part = argparse.Namespace(**vars(arguments))
        part.overrides, part.run = [*arguments.overrides, *changes], f"{folder}/split-{number}"
        part.json = arguments.json or number > 0
        STARTUP.entered = STARTUP.since = time.time()
        with contextlib.redirect_stdout(io.StringIO()) if part.json else contextlib.nullcontext():
            code = 0 if finished_run.answered(part) else train(part)
        if code:
            return code
    return report.run(argparse.Namespace(runs=[str(folder)], trace=None, serve=False, json=arguments.json))


def open_splits(folder: str | Path) -> dict[str, run_comparison.Repeated]:
    """The figures of the runs of `graph.split = "all"` in `folder`, at their last validations.

    Returns:
        By name, such as `test_accuracy`: `values` (of each split), `mean` and `deviation` (sample standard deviation).

    Raises:
        UserError: there are no such runs in `folder`.
    """
    places = runs.splits_in(folder)
    if not places:
        raise UserError(f"There are no runs of splits in {folder}.", do='espalier train RECIPE graph.split="all"')
    return run_comparison.repeated([run_comparison.summary(place) for place in places])
