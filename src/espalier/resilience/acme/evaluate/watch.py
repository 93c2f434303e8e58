"""Evaluates a run's checkpoints as they are committed, each task of each checkpoint once, until the run is finished.

Beside training, never in it: committed checkpoints are hard-linked as soon as they are seen (training may then delete
them), checked against their manifest, and evaluated oldest first by processes of the lowest priority. What was done
stands in the run log, so that a watch begun again goes on where it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from espalier.checkpoint import manifest
from espalier.checkpoint.place import Place, folder_name, open_place, step_of
from espalier.checkpoint.sharded import Checkpoints
from espalier.errors import EspalierError, RunFailed, UserError
from espalier.resilience.acme.evaluate import shared
from espalier.resilience.acme.evaluate.crew import Crew, Setup
from espalier.resilience.acme.evaluate.evaluator import Evaluation, Result
from espalier.resilience.acme.evaluate.history import History
from espalier.resilience.acme.evaluate.priors import Priors
from espalier.track import events
from espalier.units import show_size

POLL = 0.5
"""Seconds between two looks for a new checkpoint."""

PATIENCE = 15.0
"""Seconds a run folder may be gone (a network share that is mounted anew) before the watch ends."""


LONG = 512 * 2**20
"""Bytes of a checkpoint whose reading takes more than about two seconds."""


@dataclass(frozen=True)
class Where:
    """A run's places.

    Attributes:
        run: its folder; log: its events.jsonl.
        checkpoints: folder or URL of its checkpoints.
        folder: what the evaluation keeps: links, raw outputs, priors.
        dtype: of the model's floating tensors.
        trust: see `Checkpoints.trust`.
    """

    run: Path
    log: Path
    checkpoints: str
    folder: Path
    dtype: torch.dtype
    trust: bool = False


class Told(NamedTuple):
    """What the watch has to say: a result with its step, a sentence, the `share` done of the checkpoint under way.
    `bad`: something was left out."""

    step: int
    text: str = ""
    bad: bool = False
    result: Result | None = None
    share: float = 0.0


@dataclass(frozen=True)
class _Found:
    step: int
    seal: str
    bytes: int
    wanted: tuple[str, ...]


class Watch:
    """One run under watch. Has state: the lock on its `eval` folder, what was seen.

    Raises UserError when another process watches this run.
    """

    def __init__(self, where: Where, setup: Setup, patience: float = PATIENCE) -> None:
        self.where, self.setup, self.patience = where, setup, patience
        self.history = History(where.log)
        self._content = {name: task.content for name, task in setup.tasks.items()}
        where.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(where.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UserError(
                f"{where.run} is being evaluated by another process.", do="wait for it, or end it"
            ) from None
        shutil.rmtree(setup.folder, ignore_errors=True)
        setup.folder.mkdir(parents=True)
        self.priors = Priors(where.folder / "priors.json")
        self._place = open_place(where.checkpoints)
        self._held = open_place(where.folder / "held")
        self._skipped: set[tuple[str, str]] = set()
        self._looked, self._holding = 0.0, True
        self._seen = set(self.history.saved)

    def close(self) -> None:
        """Gives the lock back and deletes raw outputs."""
        shutil.rmtree(self.setup.folder, ignore_errors=True)
        os.close(self._lock)

    def run(self, once: bool = False) -> Generator[Told, None, None]:
        """Evaluates until the run is finished and nothing is left; `once`: the newest good checkpoint only.

        Raises RunFailed when the run folder is gone, UserError when `once` finds no checkpoint.
        """
        self._holding = not once
        try:
            with Crew(self.setup) as crew:
                yield from self._once(crew) if once else self._all(crew)
        except (OSError, UserError) as error:
            if self.where.run.is_dir():
                raise
            raise self._gone() from error
        finally:
            self.close()

    def _once(self, crew: Crew) -> Iterator[Told]:
        while True:
            found = self._found()
            if not found:
                raise UserError(
                    f"The run in {self.where.run} has no checkpoint that can be evaluated.",
                    why=f"looked in {self.where.checkpoints}",
                    do="let it train on, or wait for one with --watch",
                )
            skipped = len(self._skipped)
            yield from self._evaluate(crew, found[-1])
            if len(self._skipped) == skipped:
                return

    def _all(self, crew: Crew) -> Iterator[Told]:
        said = ""
        while True:
            yield from self._wait_for_folder()
            self.history.update()
            found = self._found()
            yield from self._missed()
            if found:
                said = ""
                yield from self._evaluate(crew, found[0])
                continue
            if self.history.ended == "finished":
                return
            if self._waiting_for() != said:
                said = self._waiting_for()
                yield Told(0, said)
            time.sleep(POLL)

    def _missed(self) -> Iterator[Told]:
        """Says which checkpoints were committed since the watch began, and deleted before it could take them."""
        there = {step_of(name) for place in (self._place, self._held) for name in place.names()}
        missed, self._seen = self.history.saved - self._seen - there, self._seen | self.history.saved
        for step in sorted(missed):
            yield Told(
                step, self._skip(step, "training deleted it before it was seen; set checkpoint.keep higher"), bad=True
            )

    def _waiting_for(self) -> str:
        if self.history.ended:
            return f"The run was {self.history.ended}; waiting for it to go on (Ctrl-C ends the watch)."
        return "Waiting for the next checkpoint." if self.history.saved else "Waiting for the first checkpoint."

    def _wait_for_folder(self) -> Iterator[Told]:
        began = time.monotonic()
        if not self.where.log.exists():
            yield Told(0, f"The run folder {self.where.run} is not there now; waiting {self.patience:.0f} s for it.")
        while not self.where.log.exists():
            if time.monotonic() - began > self.patience:
                raise self._gone()
            time.sleep(POLL)

    def _gone(self) -> RunFailed:
        return RunFailed(f"The run folder {self.where.run} is gone.", do="bring it back; the same command goes on")

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def _found(self) -> list[_Found]:
        """Checkpoints with something left to do, oldest first."""
        if self._holding:
            self._hold()
        found = []
        for step in sorted({step_of(name) or 0 for place in (self._place, self._held) for name in place.names()}):
            seal, size = self._seal(step)
            wanted = [
                name
                for name, content in self._content.items()
                if not (self._holding and self.history.done(seal, name, content))
            ]
            if seal and wanted and (folder_name(step), seal) not in self._skipped:
                found.append(_Found(step, seal, size, tuple(wanted)))
            elif self._holding:
                self._let_go(step)
        return found

    def _hold(self) -> None:
        """Links what is new into our own folder, where training does not delete it."""
        self._looked = time.monotonic()
        root, held = getattr(self._place, "root", None), getattr(self._held, "root", None)
        if not (isinstance(root, Path) and isinstance(held, Path)):
            return
        for name in self._place.names():
            seal = _sealed(self._place, name)
            if seal is None or seal == _sealed(self._held, name) or (name, seal.seal) in self._skipped:
                continue
            if all(self.history.done(seal.seal, task, content) for task, content in self._content.items()):
                continue
            with contextlib.suppress(OSError):  # it went meanwhile, or cannot be linked: it is read where it is
                _link(root / name, held / name)

    def _seal(self, step: int) -> _Sealed:
        """Of the manifest of checkpoint `step`: the run's own, else that of our link."""
        name = folder_name(step)
        return _sealed(self._place, name) or _sealed(self._held, name) or _Sealed("", 0)

    def _let_go(self, step: int) -> None:
        root = getattr(self._held, "root", None)
        if isinstance(root, Path):
            shutil.rmtree(root / folder_name(step), ignore_errors=True)

    # --- one checkpoint ------------------------------------------------------------------------------------------

    def _evaluate(self, crew: Crew, found: _Found) -> Iterator[Told]:
        if found.bytes > LONG:
            yield Told(found.step, f"Reading and checking step {found.step} ({show_size(found.bytes)}).")
        try:
            model = self._load(found)
        except EspalierError as error:
            self._skipped.add((folder_name(found.step), found.seal))
            yield Told(found.step, self._skip(found.step, error.why or error.what), bad=True)
            return
        evaluation = Evaluation(crew, model, list(found.wanted), self.priors)
        try:
            for result in evaluation.run():
                if self._holding and time.monotonic() - self._looked > POLL:
                    self._hold()
                if result is not None:
                    self._record(found, result)
                bad = result is not None and bool(result.why)
                yield Told(found.step, bad=bad, result=result, share=evaluation.share)
        finally:
            model.close()
            if self.where.folder.is_dir():
                self.priors.save()

    def _load(self, found: _Found) -> shared.SharedModel:
        name = folder_name(found.step)
        held = _sealed(self._held, name) == (found.seal, found.bytes)
        target = getattr(self._held, "root", "") if held else self.where.checkpoints
        checkpoints = Checkpoints(target)
        checkpoints.trust = self.where.trust
        return shared.load(checkpoints, found.step, self.where.dtype)

    def _skip(self, step: int, why: str) -> str:
        what = f"checkpoint {folder_name(step)} was not evaluated: {why}"
        if what not in self.history.said:
            events.append(self.where.log, "incident", kind="checkpoint", what=what, step=step, action="left it out")
        return what[0].upper() + what[1:]

    def _record(self, found: _Found, result: Result) -> None:
        """Into the run log; a task that failed is an incident, and counts as done."""
        seal, task, content = found.seal, result.task, self._content[result.task]
        key = {"step": found.step, "task": task, "checkpoint": seal, "content": content}
        for metric, value in result.figures.items():
            if not self.history.has(seal, task, content, metric):
                cost = {"figures": len(result.figures), "records": result.records, "seconds": result.seconds}
                events.append(self.where.log, "eval", **key, metric=metric, value=value, **cost)
        if result.why:
            what = f"task {result.task} of checkpoint {folder_name(found.step)} failed: {result.why}"
            events.append(self.where.log, "incident", kind="eval", what=what, action="left it out", **key)
        self.history.mark(seal, task, content)


class _Sealed(NamedTuple):
    seal: str
    bytes: int


def _sealed(place: Place, name: str) -> _Sealed | None:
    """The seal of a checkpoint's manifest; of a damaged one, the hash of what is there; None when nothing is."""
    try:
        with place.open(name, manifest.NAME) as file:
            text = file.read()
    except OSError:
        return None
    try:
        content = manifest.loads(text)
    except manifest.Bad:
        return _Sealed(f"damaged-{xxhash.xxh3_64_hexdigest(text)}", 0)
    return _Sealed(content.seal, content.bytes)


def _link(source: Path, target: Path) -> None:
    """Hard-links all files of a checkpoint, all of them or none."""
    unfinished = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        for file in source.rglob("*"):
            if file.is_file():
                (unfinished / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
                os.link(file, unfinished / file.relative_to(source))
        if not (unfinished / manifest.NAME).is_file():
            raise FileNotFoundError(source)
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
