"""Input check: what can be said of a command line before torch is imported. Imports no torch."""

from __future__ import annotations

import argparse
import glob
import os
import sys
from pathlib import Path

from espalier.cli import answer_table, finished_run
from espalier.machine import cluster as clusters
from espalier.recipe import data_path, defaults, foreign_files, graphs, model_kinds, recipe_file
from espalier.recipe.errors import UserError
from espalier.train import run_folder as runs


def check(arguments: argparse.Namespace) -> None:
    """Raises UserError for a recipe, a cluster file, a run folder or a path of data that cannot be used."""
    launchers = [name for name in ("hosts", "slurm", "kubernetes", "ray") if getattr(arguments, name, None) is not None]
    if len(launchers) > 1:
        first, second = launchers[:2]
        raise UserError(f"--{first} and --{second} were both given.", do="give one: each chooses the hosts")
    elsewhere = any(getattr(arguments, name, None) for name in ("hosts", "slurm", "ray"))  # where the data may lie
    if getattr(arguments, "recipe", None) is not None and getattr(arguments, "score", None) is None:
        recipe = recipe_file.load(arguments.recipe, arguments.overrides)
        forked = getattr(arguments, "source", None) is not None
        if graphs.has_all_splits(recipe) and (launchers or forked or finished_run.is_launched()):
            raise UserError(
                'graph.split = "all" is not possible with --hosts, --from or a launcher of ranks.',
                why="the splits are trained one after the other on this machine, each as a run of its own",
                do="for each split: graph.split=0 --run runs/NAME/split-0, and so on; then espalier report runs/NAME",
            )
        if getattr(recipe.model, "initial", None) is None:  # else the weights say the sizes
            defaults.resolve(recipe)
        named = getattr(arguments, "cluster", None) or recipe.plan.cluster
        if named is not None:
            clusters.read(named)
        known = model_kinds.of(recipe.model).data
        if known and arguments.verb == "train" and not elsewhere:
            for data in recipe.data:
                if _is_missing(data.path):
                    raise data_path.missing(data.path, known)
    elif arguments.verb in ("eval", "predict", "replay", "export", "report"):
        _check_runs(arguments)
        _check_inputs(arguments)


def _check_runs(arguments: argparse.Namespace) -> None:
    """Raises UserError where a folder holds no run."""
    _check_order(arguments)
    for run in [arguments.run] if arguments.verb != "report" else arguments.runs:
        runs.find((runs.splits_in(run) or [run])[0])


def _check_order(arguments: argparse.Namespace) -> None:
    """Raises UserError where the run stands behind the input."""
    second = getattr(arguments, "input", None)
    if second and runs.RunFolder(Path(second)).exists():
        raise UserError(f"{second} is a run, which comes first.", do=f"espalier predict {second} {arguments.run!r}")


def _check_inputs(arguments: argparse.Namespace) -> None:
    """What is given beside a run."""
    given = getattr(arguments, "data", None)
    if given is not None and _is_missing(given):
        raise data_path.missing(given, key="--data")
    if arguments.verb == "predict":
        answer_table.check(arguments)
        if arguments.input not in (None, "-"):
            prompt(arguments.input)


def _is_missing(path: str) -> bool:
    """Whether nothing is at `path`, where that can only be a path: no kind of source, no pattern. A graph may be one of
    several in a folder: ind.NAME.graph."""
    if not path.strip() or ":" in path or glob.has_magic(path):
        return False
    place = Path(path).expanduser()
    return not place.exists() and not any(place.parent.glob(f"*.{glob.escape(place.name)}.*"))


def train_command(arguments: argparse.Namespace, run: str | None) -> list[str]:
    """`espalier train` as `arguments` ask for it, for a job that somebody else starts; `run`: the run's folder."""
    words = [*(["--run", run] if run else []), *["--trust"] * arguments.trust, *["--json"] * arguments.json]
    return [sys.executable, "-m", "espalier", "train", arguments.recipe, *arguments.overrides, *words]


def prompt(text: str) -> str:
    """The input of `predict`, of which `@FILE` is the text of a file. Raises UserError where that cannot be read."""
    if not text.startswith("@"):
        return os.fsencode(text).decode("utf-8", "replace")  # the shell may pass bytes that are not UTF-8
    if text == "@":
        raise UserError("The input @ names no file.", do="@FILE, such as @prompt.txt")
    return foreign_files.read_text(Path(text[1:]), "check the path")
