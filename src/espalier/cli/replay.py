"""`espalier replay RUN --step N`: makes a step of a run again, from the newest checkpoint before it, and compares bits.

A step is a function of recipe, plan, data and state. Where the same step gives other bits, something else had a part in
it: another library or processor, a race, or hardware that computes wrongly, which nothing else shows (Dixit et al.,
"Silent Data Corruptions at Scale", arXiv 2102.11245).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from espalier.checkpoint import run_identity
from espalier.checkpoint.storage import folder_name
from espalier.cli import train
from espalier.cli.open_run import DataChoice, SavedRun
from espalier.cli.start_run import RunInputs, start_run
from espalier.launch.ranks import supervisor
from espalier.machine import cluster as clusters
from espalier.plan import base as plans
from espalier.recipe import Recipe
from espalier.recipe.cache_dir import writing
from espalier.recipe.errors import Interrupted, UserError
from espalier.recipe.terminal import say
from espalier.track import events
from espalier.track.events import Event
from espalier.track.progress import waiting
from espalier.train import rank_spec as launch
from espalier.train import run_folder as runs
from espalier.train import skip_list, workload_registry
from espalier.train.phases import checkpoints
from espalier.train.run_folder import RunFolder

COMPARED = ("loss", "gradient_norm")
"""Fields of a step that are compared bit for bit."""
_KEPT = ("data.json", run_identity.NAME, skip_list.NAME)
_Rows = dict[int, Event]


def run(arguments: argparse.Namespace) -> int:
    """Prints whether the step has the same bits again: then the exit code is 0, else 1."""
    torch.set_num_threads(1)  # ranks are forked from here
    folder = runs.find(arguments.run)
    before, begun = _recorded(folder)
    step = arguments.step
    if step not in before:
        made = f"its run log has steps {min(before)} to {max(before)}" if before else "it has made none yet"
        raise UserError(f"The run in {folder.path} has no step {step}.", why=made, do="--step with one of those")
    recipe = SavedRun.find(folder.path, arguments.trust).recipe
    first = max(
        (entry.step for entry in checkpoints(recipe, folder).entries() if not entry.why and entry.step < step),
        default=0,
    )
    with writing(folder.path), TemporaryDirectory(dir=folder.path, prefix=".replay-") as made:
        again, now = _again(folder, RunFolder(Path(made)), recipe, first, arguments)
    shown = [number for number in sorted(again) if first < number <= step and number in before]
    differing = [number for number in shown if _bits(before[number]) != _bits(again[number])]
    others = _others(begun[step], now)
    if arguments.json:
        steps = [{"step": number, "recorded": _bits(before[number]), "again": _bits(again[number])} for number in shown]
        summary = {"same": not differing, "from": first, "steps": steps, "differs": others}
        print(json.dumps({"run": str(folder.path), "step": step, **summary}))
    else:
        _tell(
            folder.path,
            first,
            {number: (before[number], again[number]) for number in (differing[:1] or [step])},
            others,
        )
    return int(bool(differing))


def _recorded(folder: RunFolder) -> tuple[_Rows, _Rows]:
    """The steps that count in a run log, and the `run` event of the attempt that made each."""
    steps = _Rows()
    begun = _Rows()
    latest = Event()
    for event in events.logged(folder.events):
        if event["event"] == "run":
            latest = event
        elif event["event"] == "step":
            steps[event["step"]] = event
            begun[event["step"]] = latest
    return steps, begun


def _again(
    folder: RunFolder, made: RunFolder, recipe: Recipe, first: int, arguments: argparse.Namespace
) -> tuple[_Rows, Event]:
    """Steps `first + 1` to the one asked for, made in the folder `made`, and the `run` event of these."""
    plan = plans.read(folder.plan)
    if any(rank.role != "trainer" for rank in plan.ranks):
        raise UserError(
            f"No step of the run in {folder.path} can be made again.",
            why="its optimizer nodes keep the state of the last step only",
            do="plan.pin.offload=none in a new run",
        )
    _fill(folder, made, recipe, plan, first)
    recipe = made.read()
    resolved = SavedRun(folder, recipe, arguments.trust, DataChoice(trains=True)).resolve()
    workload = workload_registry.open_workload(resolved, waiting)
    inputs = RunInputs(resolved, workload, made.path, recipe, quiet=True)
    job = start_run(inputs, lambda: clusters.read(folder.cluster))
    try:
        for part in train.phased(replace(job, quiet=arguments.json)):
            places = launch.places(part.plan, made.logs)
            supervisor.run(train.life(part, True, arguments.step), places, train.care_of(part))
    except Interrupted:
        if max(_recorded(made)[0], default=0) < arguments.step:
            raise  # by Ctrl-C
    finally:
        job.folder.release()
    steps, begun = _recorded(made)
    return steps, begun[arguments.step]


def _fill(folder: RunFolder, made: RunFolder, recipe: Recipe, plan: plans.Plan, first: int) -> None:
    """Makes `made` a run folder that stands after `first` steps, as `folder` once did."""
    if first:
        source = Path(recipe.checkpoint.target or folder.checkpoints)
        if not source.is_dir():
            raise UserError(
                f"The checkpoints of the run in {folder.path} are in {source}, which is no folder of this machine.",
                do=f"copy {folder_name(first)} from there to {folder.checkpoints}, and replay a copy of the run",
            )
        shutil.copytree(source / folder_name(first), made.checkpoints / folder_name(first), copy_function=_link)
    for name in _KEPT:
        if (folder.path / name).exists():
            shutil.copy(folder.path / name, made.path / name)
    never = recipe.train.steps or 0
    alone = recipe.changed(
        checkpoint=recipe.checkpoint.changed(target=None, every=never),
        track=type(recipe.track)(),
        train=recipe.train.changed(validate_every=never),
        faults=recipe.faults.changed(restarts=0, memory=0),
    )
    made.write(alone, clusters.read(folder.cluster), plan)


def _link(source: str, target: str) -> None:
    """The same file under another name, where the file system can; nothing is written into it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def _bits(row: Mapping[str, Any]) -> list[str]:
    """What is compared of a step; text, as NaN equals itself."""
    return [repr(row.get(name)) for name in COMPARED]


def _others(before: Event, now: Event) -> list[str]:
    """What was not the same when the step was made first, in words."""
    changes = []
    for table in ("versions", "host"):
        old = before.get(table) or {}
        new = now.get(table) or {}
        changes += [f"{key} was {old[key]}, is {new.get(key)}" for key in old if old[key] != new.get(key)]
    old, new = ([run.get(key) for key in ("ranks", "threads")] for run in (before, now))
    return changes + ([f"{old[0]} ranks of {old[1]} threads were, {new[0]} of {new[1]} are"] if old != new else [])


def _tell(path: Path, first: int, rows: Mapping[int, tuple[Event, Event]], others: list[str]) -> None:
    since = f"the checkpoint of step {first}" if first else "the beginning"
    ((step, (before, again)),) = rows.items()
    then, now = (", ".join(f"{n.replace('_', ' ')} {run.get(n)}" for n in COMPARED) for run in (before, again))
    if then == now:
        say(f"Step {step}, made again from {since}, has the same bits: {now}.")
        return
    say(f"Step {step}, made again from {since}, is not the same.\n  recorded  {then}\n  again     {now}")
    nothing = "nothing else that the run log knows: replay it once more, then on another machine (silent corruption?)"
    say(f"  differs   {'; '.join(others) or nothing}")
