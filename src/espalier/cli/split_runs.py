"""Split runs: `graph.split = "all"` trains on each split of the data's masks in turn, each a run in a folder of its
own (`RUN/split-3`), and reports the mean and the deviation of their figures. The same command again goes on."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from espalier.cli import finished_run
from espalier.cli.open_run import OpenRun
from espalier.recipe import graphs
from espalier.recipe.errors import UserError
from espalier.recipe.terminal import line, rows, say
from espalier.recipe.units import plural
from espalier.track import run_comparison
from espalier.track.run_tables import Table
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
    """Trains on every split with `train`, the first with its plan and progress shown, then prints the mean and the
    deviation; exit code. A finished split is not trained again."""
    from espalier.cli import resolve_recipe

    resolved = resolve_recipe.resolve(arguments.recipe, arguments.overrides, arguments.trust)
    recipe = resolved.recipe
    folder = runs.path_of(recipe, arguments.run)
    splits = count(resolved)
    target = recipe.checkpoint.target
    if not arguments.json:
        say(f"{plural(splits, 'split')} are trained in turn, each in {folder}/split-NUMBER.")
    for number in range(splits):
        place = folder / f"split-{number}"
        changes = [f"graph.split={number}", *([f"checkpoint.target={target}/split-{number}"] if target else [])]
        part = argparse.Namespace(**vars(arguments))
        part.overrides, part.run = [*arguments.overrides, *changes], str(place)
        part.json = arguments.json or number > 0
        STARTUP.entered = STARTUP.since = time.time()
        with contextlib.redirect_stdout(io.StringIO()) if part.json else contextlib.nullcontext():
            code = 0 if finished_run.answered(part) else train(part)
        if code:
            return code
        if not arguments.json:
            value, name = run_comparison.headline(run_comparison.summary(place))
            line(f"split {number} ({number + 1} of {splits}): {value}, {name}")
    _finish(folder, arguments.json)
    return 0


def _finish(folder: Path, as_json: bool) -> None:
    splits = SplitRuns.read(folder)
    summaries = splits.summaries
    page = run_comparison.write(summaries, folder)
    if as_json:
        table = {name: column.tolist() for name, column in splits.table.items()}
        figures = {"mean": splits.mean, "deviation": splits.deviation, "splits": table}
        print(json.dumps({"run": str(folder), "report": str(page), **figures}))
        return
    rows(("figure", f"mean ± standard deviation of {len(summaries)} splits"), run_comparison.spread(summaries))
    say(f"  report    {page}")


@dataclass(frozen=True)
class SplitRuns:
    """The runs of `graph.split = "all"`, each an `OpenRun`, by their numbers. Made by `espalier.open_splits`."""

    runs: tuple[OpenRun, ...]

    @classmethod
    def read(cls, folder: str | Path) -> SplitRuns:
        """Those in `folder`. Raises UserError where there are none."""
        places = runs.splits_in(folder)
        if not places:
            raise UserError(f"There are no runs of splits in {folder}.", do='espalier train RECIPE graph.split="all"')
        return cls(tuple(map(OpenRun.read, places)))

    @property
    def summaries(self) -> list[run_comparison.Summary]:
        """Of each run."""
        return [run_comparison.summary(run.folder) for run in self.runs]

    @property
    def table(self) -> Table:
        """float64 [splits] of each figure of the last validations: `validation_accuracy`, `test_accuracy` …"""
        return run_comparison.held_out(self.summaries)

    @property
    def mean(self) -> dict[str, float]:
        """Of each figure, over the splits."""
        return {name: float(column.mean()) for name, column in self.table.items()}

    @property
    def deviation(self) -> dict[str, float]:
        """The sample standard deviation of each figure, over the splits."""
        return {name: float(column.std(ddof=1)) for name, column in self.table.items()}


def open_splits(folder: str | Path) -> SplitRuns:
    """The runs of `graph.split = "all"` in `folder`. Raises UserError where there are none."""
    return SplitRuns.read(folder)
