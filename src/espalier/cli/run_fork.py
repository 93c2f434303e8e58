"""Run fork: `espalier train RECIPE --from RUN` begins another run with the newest checkpoint of the run in RUN.

The new run's folder gets that checkpoint, and what the run keeps of its data, so that the weights mean the same. Both
runs say it: `run.json` of the new one, and an event in the log of the other. The new run's recipe may change what a run
that is resumed may not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from espalier.checkpoint import forks, run_identity
from espalier.checkpoint.run_identity import Fork, RunStamp
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.cli.open_run import SavedRun
from espalier.launch.hosts import hosts
from espalier.plan import base as plans
from espalier.recipe import recipe_file
from espalier.recipe.cache_dir import unwritable
from espalier.recipe.errors import UserError
from espalier.track import events
from espalier.train import run_folder as runs
from espalier.train.run_folder import RunFolder


def fork(arguments: argparse.Namespace) -> None:
    """Makes the folder of the new run, unless the same command has made it before: then the run goes on.

    Raises UserError where it holds another run, or the run in `--from` has nothing to begin with.
    """
    source = runs.find(arguments.source)
    path = runs.path_of(recipe_file.load(arguments.recipe, arguments.overrides), arguments.run)
    away = arguments.kubernetes or (arguments.hosts and not hosts.here_first(hosts.parse(arguments.hosts))[1])
    if away:
        raise UserError("--from was given, and the run is kept on another machine.", do="fork the run there")
    parent = run_identity.read(source.path)
    if parent is None:
        raise UserError(
            f"{source.path} has no {run_identity.NAME}: an earlier version began it.",
            do=f"espalier train its recipe --run {source.path} once more, which names it",
        )
    if path.exists():
        _refuse_other(path, parent.run)
        return
    if source.plan.exists() and plans.read(source.plan).optimizer_nodes:
        raise UserError(
            f"The state of {source.path} is with its optimizer nodes, and cannot be forked.",
            do=f"espalier export {source.path}, and model.initial = that folder",
        )
    saved = SavedRun.find(source.path, arguments.trust).checkpoints()
    stamp = run_identity.new(path.name, socket.gethostname(), parent.run.meaning).run
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as made:
            folder = RunFolder(Path(made, "run"))
            folder.path.mkdir()
            step = forks.copy_newest(saved, Checkpoints(folder.checkpoints), stamp)
            identity = run_identity.RunIdentity(stamp, (stamp.meaning,), forked=Fork(parent.run, step))
            folder.identity.write_bytes(msgspec.json.encode(identity))
            folder.write_recipe(source.read())
            for file in filter(Path.exists, (source.data, source.preprocessing)):
                copy = shutil.copytree if file.is_dir() else shutil.copyfile
                copy(file, folder.path / file.name)
            os.rename(folder.path, path)
    except OSError as error:
        if not path.exists():
            raise unwritable(path, error) from error
        _refuse_other(path, parent.run)  # another rank of the same command has made it
        return
    events.write(source.events, "fork", step=step, run=msgspec.to_builtins(stamp), folder=str(path.absolute()))


def _refuse_other(path: Path, parent: RunStamp) -> None:
    """Raises UserError where the run in `path` is no fork of `parent`."""
    identity = run_identity.read(path)
    if identity is None or identity.forked is None or identity.forked.run.id != parent.id:
        raise UserError(
            f"{path} exists, and is no fork of {parent}.",
            do="--run FOLDER for another folder, or leave --from out to go on with what is there",
        )
