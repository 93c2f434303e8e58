"""Finished run: tells that nothing is left to do, without the torch and the data that a run takes which goes on."""

from __future__ import annotations

import argparse
import json
import os
from contextlib import suppress
from pathlib import Path

from espalier.checkpoint import manifest
from espalier.checkpoint.storage import Folder, read_manifest
from espalier.launch.launchers.detect_launcher import LAUNCHERS
from espalier.recipe import Recipe, recipe_file
from espalier.recipe.terminal import say
from espalier.track import events
from espalier.train import run_folder as runs
from espalier.train.run_folder import RunFolder


def is_launched() -> bool:
    """Whether another launcher has started this process."""
    return any(name in os.environ for _, names in LAUNCHERS for name in names)


def answered(arguments: argparse.Namespace) -> bool:
    """Whether the run of a command line is finished, which is then said. False also where that is not plain without
    its data: then `start_run` looks."""
    if is_launched():
        return False  # ranks meet also where nothing is left to do
    recipe = recipe_file.load(arguments.recipe, arguments.overrides)
    folder = RunFolder(runs.path_of(recipe, arguments.run))
    steps = recipe.train.steps
    if steps is None or not (folder.exists() and _is_of(folder.read(), recipe) and _has_made(folder, steps)):
        return False
    tell(folder.path, steps, arguments.json)
    return True


def tell(path: Path, steps: int, as_json: bool) -> None:
    """Says that the run in `path` has made all its steps."""
    if as_json:
        from espalier.cli import printing
        from espalier.track.run_tables import RunTables

        print(json.dumps({"run": str(path), "finished": True, **printing.results(RunTables.read(path))}))
    else:
        say(f"{path} is finished ({steps} of {steps} steps). To train further: train.steps={2 * steps}")


def _is_of(before: Recipe, recipe: Recipe) -> bool:
    """Whether `recipe` says of the run `before` nothing else than that does, nor needs what can change outside it."""
    if hasattr(recipe.model, "build") or recipe.tasks or recipe.checkpoint.target or before.checkpoint.target:
        return False
    options, asked = (recipe_file.meaning(runs.located(each)) for each in (before, recipe))
    return all(value in ("auto", options.get(key)) for key, value in asked.items())


def _has_made(folder: RunFolder, steps: int) -> bool:
    """Whether so many steps were made, no more were asked for, and the last is saved."""
    end = events.last(folder.events, "end") or {}
    checkpoints = Folder(folder.checkpoints)
    newest = checkpoints.names()[-1:]
    if end.get("reason") != "finished" or end.get("steps") != steps or folder.read().train.steps != steps:
        return False
    with suppress(manifest.Bad, OSError):
        return all(read_manifest(checkpoints, name).step >= steps for name in newest) and bool(newest)
    return False
