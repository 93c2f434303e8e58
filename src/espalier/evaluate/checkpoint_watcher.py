"""Watches a run and evaluates its checkpoints as they are committed: `espalier eval --watch`.

Nothing of it runs in the training processes. New checkpoints are hard-linked as soon as they are seen, since training
may delete them, checked against their manifest, and evaluated oldest first. Figures go into the run log, so a watch
that is begun again goes on where it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from espalier.checkpoint import manifest
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.checkpoint.storage import Folder, Storage, folder_name, step_of
from espalier.evaluate.eval_history import EvalHistory, ResultKey
from espalier.evaluate.shared_model import SharedModel
from espalier.evaluate.tasks import EvaluationTask
from espalier.evaluate.worker_pool import Result, Workers, evaluate
from espalier.recipe.errors import EspalierError, RunFailed, UserError
from espalier.recipe.resource import Resource
from espalier.track import events

POLL = 0.5
"""Seconds between two looks for a new checkpoint."""


class Update(NamedTuple):
    """What there is to say of the checkpoint of `step`: a sentence, a result, the share that is done. `bad`: something
    was left out."""

    step: int
    text: str = ""
    bad: bool = False
    result: Result | None = None
    share: float = 0.0


class _Pending(NamedTuple):
    """A checkpoint with tasks left to do, and where it is read."""

    step: int
    seal: str
    source: Checkpoints
    tasks: tuple[str, ...]


class CheckpointWatcher(Resource):
    """One run, watched until the end of the `with` block. Has state: the lock on its `eval` folder, what was seen.

    Args:
        run: its folder; saved: its checkpoints; dtype: of the model's floating tensors.
        tasks: by name.

    Raises UserError when another process evaluates this run.
    """

    def __init__(self, run: Path, saved: Checkpoints, dtype: torch.dtype, tasks: Mapping[str, EvaluationTask]) -> None:
        self.path = run
        self.dtype = dtype
        self.tasks = tasks
        self.log = run / events.NAME
        folder = run / "eval"
        self.history = EvalHistory(self.log)
        folder.mkdir(exist_ok=True)
        self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UserError(f"{run} is being evaluated by another process.", do="wait for it, or end it") from None
        self._saved = saved
        self._held = Checkpoints(folder / "held")
        self._held.run = saved.run
        self._content = {name: task.content for name, task in tasks.items()}
        self._skipped: set[tuple[int, str]] = set()
        self._seen = set(self.history.saved)

    def close(self) -> None:
        """Lets others evaluate the run."""
        os.close(self._lock)

    def run(self, workers: Workers, once: bool = False) -> Iterator[Update]:
        """Evaluates until the run is finished and nothing is left; `once`: the newest good checkpoint only.

        Raises RunFailed when the run folder is gone, UserError when `once` finds no checkpoint.
        """
        try:
            yield from self._newest(workers) if once else self._all(workers)
        except (OSError, UserError) as error:
            if self.log.exists():
                raise
            what = f"The run folder {self.path} is gone."
            raise RunFailed(what, do="bring it back; the same command goes on") from error

    def _newest(self, workers: Workers) -> Iterator[Update]:
        while pending := self._pending(again=True):
            yield from self._evaluate(workers, pending[-1])
            if (pending[-1].step, pending[-1].seal) not in self._skipped:
                return
        raise UserError(
            f"The run in {self.path} has no checkpoint that can be evaluated.",
            why=f"looked in {self._saved.place.path('')}",
            do="let it train longer, or wait for one with --watch",
        )

    def _all(self, workers: Workers) -> Iterator[Update]:
        last_words = ""
        while True:
            self.history.update()
            self._hold()
            pending = self._pending()
            yield from self._missed()
            if pending:
                last_words = ""
                looked = time.monotonic()
                for update in self._evaluate(workers, pending[0]):
                    if time.monotonic() - looked > POLL:
                        self._hold()
                        looked = time.monotonic()
                    yield update
            elif self.history.ended == "finished":
                return
            else:
                if self._waiting_for() != last_words:
                    last_words = self._waiting_for()
                    yield Update(0, last_words)
                time.sleep(POLL)

    def _waiting_for(self) -> str:
        if not self.log.exists():
            raise FileNotFoundError(self.log)
        if self.history.ended:
            return f"The run was {self.history.ended}; waiting for it to go on (Ctrl-C ends the watch)."
        return "Waiting for the next checkpoint." if self.history.saved else "Waiting for the first checkpoint."

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _pending(self, again: bool = False) -> list[_Pending]:
        """Checkpoints with something left to do, oldest first; links of others go. `again`: all tasks are to do."""
        pending = {}
        for source in (self._saved, self._held):
            for name in source.place.names():
                step = step_of(name) or 0
                seal = _seal(source.place, name)
                left = tuple(task for task in self.tasks if again or self._key(seal, task) not in self.history.done)
                if seal and left and (step, seal) not in self._skipped:
                    pending[name] = _Pending(step, seal, source, left)
                elif source is self._held and not again:
                    with contextlib.suppress(OSError):
                        source.place.remove(name)
        return sorted(pending.values(), key=lambda checkpoint: checkpoint.step)

    def _hold(self) -> None:
        """Links new checkpoints into our own folder. What cannot be linked is read where it is."""
        saved = self._saved.place
        held_place = self._held.place
        if not isinstance(saved, Folder):
            return
        for name in saved.names():
            seal = _seal(saved, name)
            done = all(self._key(seal, task) in self.history.done for task in self.tasks)
            if seal and not done and (step_of(name), seal) not in self._skipped and seal != _seal(held_place, name):
                with contextlib.suppress(OSError):
                    _link(Path(saved.path(name)), Path(held_place.path(name)))

    def _missed(self) -> Iterator[Update]:
        """Says which checkpoints were committed since the watch began, and deleted before it could take them."""
        there = {step_of(name) for source in (self._saved, self._held) for name in source.place.names()}
        missed = self.history.saved - self._seen - there
        self._seen |= self.history.saved
        for step in sorted(missed):
            yield self._left_out(step, "training deleted it before it was seen; set checkpoint.keep higher")

    def _left_out(self, step: int, why: str) -> Update:
        what = f"checkpoint {folder_name(step)} was not evaluated: {why}"
        if what not in self.history.notes:
            events.append(self.log, "incident", kind="checkpoint", what=what, step=step, action="left it out")
        return Update(step, what[0].upper() + what[1:], bad=True)

    # --- one checkpoint ----------------------------------------------------------------------------------------------

    def _evaluate(self, workers: Workers, pending: _Pending) -> Iterator[Update]:
        try:
            model = SharedModel(pending.source, pending.step, self.dtype)
        except EspalierError as error:
            self._skipped.add((pending.step, pending.seal))
            yield self._left_out(pending.step, error.why or error.what)
            return
        tasks = [self.tasks[name] for name in pending.tasks]
        share = 0.0
        try:
            for update in evaluate(workers, model.source, tasks, self.history.seconds):
                if isinstance(update, float):
                    share = update
                    yield Update(pending.step, share=share)
                else:
                    self._record(pending, update)
                    yield Update(pending.step, bad=bool(update.why), result=update, share=share)
        finally:
            model.close()

    def _record(self, pending: _Pending, result: Result) -> None:
        """Into the run log; a task that failed is an incident, and counts as done."""
        key = self._key(pending.seal, result.task)
        about = {"step": pending.step, **key._asdict()}
        cost = {"figures": len(result.figures), "records": result.records, "seconds": result.seconds}
        for metric, value in result.figures.items():
            if metric not in self.history.figures.get(key, ()):
                events.append(self.log, "eval", **about, metric=metric, value=value, **cost)
        if result.why:
            what = f"task {result.task} of checkpoint {folder_name(pending.step)} failed: {result.why}"
            events.append(self.log, "incident", kind="eval", what=what, action="left it out", **about)
        self.history.done.add(key)

    def _key(self, seal: str, task: str) -> ResultKey:
        return ResultKey(seal, task, self._content[task])


def _seal(place: Storage, name: str) -> str:
    """The seal of a checkpoint's manifest; of a damaged one, the hash of what is there; empty where nothing is."""
    try:
        with place.open(name, manifest.NAME) as file:
            text = file.read()
        return manifest.loads(text).seal
    except OSError:
        return ""
    except manifest.Bad:
        return f"damaged-{xxhash.xxh3_64_hexdigest(text)}"


def _link(source: Path, target: Path) -> None:
    """Hard-links all files of a checkpoint, all of them or none."""
    unfinished = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        shutil.copytree(source, unfinished, copy_function=os.link)
        if not (unfinished / manifest.NAME).is_file():
            raise FileNotFoundError(source)
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
