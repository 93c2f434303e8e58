"""`espalier eval RUN --watch` and `--task`: checkpoints evaluated on many tasks, by processes of low priority."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import torch

from espalier.cli.open_run import DataChoice, SavedRun
from espalier.evaluate import low_priority
from espalier.evaluate.checkpoint_watcher import CheckpointWatcher, Update
from espalier.evaluate.lm_eval_harness import HarnessTask
from espalier.evaluate.multiple_choice import MultipleChoice
from espalier.evaluate.tasks import EvaluationTask, HeldOut
from espalier.evaluate.worker_pool import Opened, Workers
from espalier.kernels import accelerator
from espalier.language.tokenizer import Tokenizer
from espalier.parallel.workload import Phase, Workload
from espalier.recipe.errors import UserError
from espalier.recipe.terminal import say, say_progress
from espalier.recipe.units import plural, show_seconds
from espalier.track.progress import Waiting
from espalier.train import phases, workload_registry
from espalier.train.build import DTYPES
from espalier.train.workload_row import Row, Tokenizes

HARNESS = "lm-eval:"
"""Begins the name of a task of EleutherAI's lm-evaluation-harness."""


def run(arguments: argparse.Namespace) -> int:
    """Prints each task's figures as they come; 1 when a task or a checkpoint failed."""
    count = _workers(arguments.workers)
    opened = SavedRun.find(arguments.run, arguments.trust, DataChoice(evaluates=True))
    saved = opened.checkpoints()
    workload = phases.held(opened.open_workload(), saved)
    chosen = _tasks_of(arguments, workload, opened)
    open_ = partial(open_in_worker, arguments, workload.phases()[0])
    # Counted by the driver's library, without touching a GPU: the workers do.
    devices = [accelerator.of_rank(index) for index in range(max(1, accelerator.count()))]
    by_name = {task.name: task for task in chosen}
    dtype = DTYPES[opened.recipe.train.precision]
    with CheckpointWatcher(opened.folder.path, saved, dtype, by_name) as watcher:
        if not arguments.json:
            each = ", ".join(f"{task.name} ({plural(task.records, 'record')})" for task in chosen)
            say_progress(f"Evaluating {each} with {plural(count, 'worker')}.")
        with Workers(open_, count, devices) as workers:
            if arguments.beside:
                low_priority.step_back()
            return _show(watcher.run(workers, once=not arguments.watch), arguments.json)


def open_in_worker(arguments: argparse.Namespace, phase: Phase) -> Opened:
    """What a worker process needs of the run; beside training the process then steps back."""
    # The first process has said what is not used.
    opened = SavedRun.find(arguments.run, arguments.trust, DataChoice(evaluates=True), silent=True)
    workload = opened.open_workload().at(phase)
    chosen = _tasks_of(arguments, workload, opened)
    if arguments.beside:
        low_priority.step_back()
    build = partial(workload.build, torch.device("cpu"), DTYPES[opened.recipe.train.precision])
    return Opened({task.name: task for task in chosen}, build)


def _tasks_of(arguments: argparse.Namespace, workload: Workload, opened: SavedRun) -> list[EvaluationTask]:
    row = workload_registry.row(opened.recipe)
    return tasks(workload, row, arguments.task, arguments.run, arguments.include)


def tasks(
    workload: Workload, row: Row, asked: Iterable[str], run: str, include: str | None = None
) -> list[EvaluationTask]:
    """The run's own held-out data, then what `--task` names; `include`: a folder of tasks for lm-eval. Raises
    UserError."""
    known: list[EvaluationTask] = [HeldOut(workload)] if workload.validation_samples() else []
    for text in asked:
        if not isinstance(row, Tokenizes):
            raise UserError(
                f"--task {text} asks a language model.", why=f"the run in {run} trains none", do="leave it out"
            )
        known.append(_task(text, row.tokenizer(workload), include))
        if known[-1].name in {task.name for task in known[:-1]}:
            raise UserError(f"--task {text}: there is a task {known[-1].name!r} already.", do="give it another name")
    if not known:
        raise UserError(
            f"The run in {run} has no held-out data, and no task is given.",
            do="--task NAME=FILE, or data.validation = 0.01 in a new run",
        )
    return known


def _task(text: str, tokenizer: Tokenizer, include: str | None) -> EvaluationTask:
    if text.startswith(HARNESS):
        return HarnessTask(text.removeprefix(HARNESS), tokenizer, include)
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UserError(f"--task {text} is not NAME=FILE.", do="--task facts=facts.jsonl, or --task lm-eval:TASK")
    task = MultipleChoice(name, Path(path), tokenizer)
    for note in task.notes:
        say(f"{path}: {note}", file=sys.stderr)
    return task


def _workers(given: int | None) -> int:
    if given is not None and given < 1:
        raise UserError(f"--workers {given} is not possible.", do="1 or more")
    return given or len(os.sched_getaffinity(0))


def _show(updates: Iterator[Update], as_json: bool) -> int:
    """Progress of each checkpoint on standard error once it takes two seconds; results on standard output."""
    code = 0
    for step, updates_of_step in groupby(updates, attrgetter("step")):
        with Waiting(f"Evaluating step {step}", total=100, out=sys.stderr) as bar:
            for update in updates_of_step:
                code |= update.bad
                _tell(update, as_json)
                if update.share:
                    bar.advance(round(100 * update.share) - bar.done)
    return code


def _tell(update: Update, as_json: bool) -> None:
    if update.text:
        say_progress(update.text)
    if update.result is None:
        return
    task, figures, records, seconds, why = update.result
    if as_json:
        failed = {"failed": why} if why else {}
        row = {"step": update.step, "task": task, **figures, "records": records, "seconds": round(seconds, 3), **failed}
        print(json.dumps(row), flush=True)
    elif why:
        say_progress(f"step {update.step} · {task} failed: {why}")
    else:
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in figures.items())
        say(f"step {update.step} · {task}: {shown} · {records:,} records, {show_seconds(seconds)}", flush=True)
