"""`espalier eval RUN --watch` and `--task`: many tasks over few processes of low priority, beside training."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from espalier import phases, workloads
from espalier import run as runs
from espalier.config import Recipe
from espalier.errors import UserError
from espalier.language.tokenizer import Tokenizer
from espalier.mechanisms import DTYPES
from espalier.resilience.acme import background
from espalier.resilience.acme.evaluate.choices import MultipleChoice
from espalier.resilience.acme.evaluate.crew import Setup
from espalier.resilience.acme.evaluate.harness import HarnessTask
from espalier.resilience.acme.evaluate.packing import Pool
from espalier.resilience.acme.evaluate.tasks import HeldOut, Task
from espalier.resilience.acme.evaluate.watch import Told, Watch, Where
from espalier.rows import Row
from espalier.terminal import say
from espalier.track.progress import Waiting
from espalier.units import show_seconds
from espalier.verbs import ready
from espalier.verbs import trained as opened
from espalier.workload import Workload

HARNESS = "lm-eval:"
"""Begins the name of a task of EleutherAI's lm-evaluation-harness."""

SCORERS = 2
"""Inference workers for each metric worker: of Acme's HumanEval trial half is inference and 19 % metric, so that one
metric worker keeps up with 2.6."""


def run(arguments: argparse.Namespace) -> int:
    """Prints each task's figures as they come; 1 when a task or a checkpoint failed."""
    background.step_back()
    torch.set_num_threads(1)  # workers are forked from here
    folder = runs.find(arguments.run)
    recipe = folder.read()
    workload = ready.open_workload(opened.resolved(folder, recipe, arguments.trust))
    workload = phases.held(workload, phases.checkpoints(recipe, str(folder.checkpoints)))
    found = tasks(workload, workloads.row(recipe), arguments.task, arguments.run)
    setup = _setup(workload, recipe, found, folder.path, _workers(arguments.workers))
    where = Where(
        run=folder.path,
        log=folder.events,
        checkpoints=recipe.checkpoint.target or str(folder.checkpoints),
        folder=folder.path / "eval",
        dtype=DTYPES[recipe.train.precision],
        trust=arguments.trust,
    )
    if not arguments.json:
        each = ", ".join(f"{task.name} ({task.records:,} record{'s' * (task.records != 1)})" for task in found)
        ready.say(f"Evaluating {each} with {setup.pool.inference} worker{'s' * (setup.pool.inference != 1)}.")
    with closing(Watch(where, setup).run(once=not arguments.watch)) as told:
        return _show(told, arguments.json)


def tasks(workload: Workload, row: Row, asked: Iterable[str], run: str) -> list[Task]:
    """The run's own held-out data, then what `--task` names. Raises UserError."""
    found: list[Task] = [HeldOut(workload)] if workload.validation_samples() else []
    for text in asked:
        if row.tokenizer is None:
            raise UserError(
                f"--task {text} asks a language model.", why=f"the run in {run} trains none", do="leave it out"
            )
        found.append(_task(text, row.tokenizer(workload)))
        if found[-1].name in {task.name for task in found[:-1]}:
            raise UserError(f"--task {text}: there is a task {found[-1].name!r} already.", do="give it another name")
    if not found:
        raise UserError(
            f"The run in {run} holds nothing out, and no task is given.",
            do="--task NAME=FILE, or data.validation = 0.01 in a new run",
        )
    return found


def _task(text: str, tokenizer: Tokenizer) -> Task:
    if text.startswith(HARNESS):
        return HarnessTask(text.removeprefix(HARNESS), tokenizer)
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UserError(f"--task {text} is not NAME=FILE.", do="--task facts=facts.jsonl, or --task lm-eval:TASK")
    return MultipleChoice(name, Path(path), tokenizer)


def _workers(given: int | None) -> int:
    if given is not None and given < 1:
        raise UserError(f"--workers {given} is not possible.", do="1 or more")
    return given or len(os.sched_getaffinity(0))


def _setup(workload: Workload, recipe: Recipe, found: list[Task], folder: Path, workers: int) -> Setup:
    # Counted by the driver's library, without touching a GPU: the workers do, after they are forked.
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]
    return Setup(
        tasks={task.name: task for task in found},
        build=partial(workload.build, torch.device("cpu"), DTYPES[recipe.train.precision]),
        pool=Pool(workers, -(-workers // SCORERS)),
        devices=devices,
        folder=folder / "eval" / "raw",
    )


def _show(told: Iterable[Told], as_json: bool) -> int:
    """Progress of each checkpoint on standard error once it takes two seconds; results on standard output."""
    code, step, bar = 0, -1, None
    try:
        for one in told:
            if one.step != step or bar is None:
                if bar is not None:
                    bar.close()
                step, bar = one.step, Waiting(f"Evaluating step {one.step}", total=100, out=sys.stderr)
            code |= one.bad
            _tell(one, as_json)
            if one.share:
                bar.advance(round(100 * one.share) - bar.done)
    finally:
        if bar is not None:
            bar.close()
    return code


def _tell(one: Told, as_json: bool) -> None:
    if one.text:
        ready.say(one.text)
    if one.result is None:
        return
    task, figures, records, seconds, why = one.result
    if as_json:
        failed = {"failed": why} if why else {}
        row = {"step": one.step, "task": task, **figures, "records": records, "seconds": round(seconds, 3), **failed}
        print(json.dumps(row), flush=True)
    elif why:
        ready.say(f"step {one.step} · {task} failed: {why}")
    else:
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in figures.items())
        say(f"step {one.step} · {task}: {shown} · {records:,} records, {show_seconds(seconds)}", flush=True)
