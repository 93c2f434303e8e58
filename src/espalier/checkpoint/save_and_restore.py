"""Checkpoints of any number of ranks: written behind training's back, whole or not at all, read by any other number.

The files have the format of `torch.distributed.checkpoint`, which reads and writes them too. That package is not
imported: it takes more than half as long as torch. Besides there are the CPU copy with kept buffers, the exchange
between ranks (so that an error on one is an error on all), checksums, the manifest, and the rename.

Loading runs nothing that a checkpoint holds (`reader`).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from espalier.checkpoint import manifest, run_identity, state_tree
from espalier.checkpoint.base import StatefulParts
from espalier.checkpoint.coordination import Coordinator
from espalier.checkpoint.divergence_check import Alike
from espalier.checkpoint.run_identity import RunIdentity, RunStamp
from espalier.checkpoint.storage import Folder, folder_name, open_place, read_manifest, step_of
from espalier.checkpoint.stored_slice import StoredSlice
from espalier.checkpoint.writer import Write, WriteJob
from espalier.recipe import units
from espalier.recipe.errors import RESUME, EspalierError, RunFailed, UserError

if TYPE_CHECKING:
    import torch.distributed as dist


NICE = 15
"""Of the writing thread: a weight of 36 where training has 1024 (Linux, `sched_prio_to_weight`), so it takes at most
3.4 % of a core that training wants whole, and all of one that is idle."""


_Skipped = list[tuple[str, str]]
"""Checkpoints that could not be used, each with the reason."""


class Loaded(NamedTuple):
    """What `load` restored."""

    step: int
    meta: dict[str, Any]
    skipped: _Skipped
    """Newer checkpoints that could not be used, each with the reason."""
    absent: list[str]
    """Parts that the checkpoint does not have; they were left as they are."""


class CheckpointInfo(NamedTuple):
    """One checkpoint there is. `why` says what is wrong with its manifest, or that it is another run's; else empty."""

    step: int
    loss: float | None
    bytes: int
    path: str
    why: str = ""
    meta: Mapping[str, Any] = {}
    run: RunStamp | None = None
    """Which run wrote it, where its manifest says that."""


class Checkpoints:
    """The checkpoints at `target` (a folder or an fsspec URL). Has state: staging buffers and one save in flight.

    Args:
        target: folder on storage all ranks share, or a URL.
        keep: how many of the newest stay (at least 1).
        keep_best: whether the one of lowest validation loss stays as well.
        group: a Gloo process group used for nothing else, over the ranks that save; None for one rank. Its timeout
            must be longer than writing one rank's share takes.
        on_event: called as `on_event(name, **fields)` on rank 0 (`Log.write` fits), also from the writing thread.
    """

    def __init__(
        self,
        target: str | Path,
        *,
        keep: int = 2,
        keep_best: bool = True,
        group: dist.ProcessGroup | None = None,
        on_event: Callable[..., Any] | None = None,
    ) -> None:
        if keep < 1:
            raise UserError(f"checkpoint.keep = {keep} keeps nothing to resume from.", do="checkpoint.keep=1")
        self.place = open_place(target)
        self.keep = keep
        self.keep_best = keep_best
        self.team = Coordinator(group)
        self._event = on_event if on_event is not None and self.team.rank == 0 else _ignore
        self.hold: int | None = None
        """While set, the newest checkpoint of at most so many steps stays too."""
        self.alike: Alike | None = None
        """Asked before anything is kept whether all ranks hold the same, where they should."""
        self._stage = state_tree.StagingBuffers()
        # One thread for all saves: starting one waits until it runs, which on busy cores takes longer than a copy.
        self._writer = ThreadPoolExecutor(1, "checkpoint", _step_back)
        self._writing: tuple[str, Future[None]] | None = None
        self._failure: EspalierError | None = None
        self.run: RunIdentity | None = None
        """Whose checkpoints these are: those of another run are neither loaded, counted nor deleted."""
        self.doubt = ""
        """What is to be said of whose checkpoint the last `load` took, see `run_identity.doubt`."""
        self.rate = math.inf
        """Bytes/s that this rank writes at most."""
        self.waits = False
        """Whether every save waits until it is written, since there is no room for a copy of the state."""
        self.wrote = 0.0
        """Seconds that the last save took to be written, on this rank."""

    @property
    def doing(self) -> Literal["saving", "storing"]:
        """What a rank does that waits for it, as its signs of life say it: in a folder or across a network."""
        return "saving" if isinstance(self.place, Folder) else "storing"

    @property
    def busy(self) -> bool:
        return self._writing is not None and not self._writing[1].done()

    def save(
        self,
        step: int,
        parts: StatefulParts,
        meta: dict[str, Any],
        loss: float | None = None,
        wait: bool = False,
    ) -> float:
        """Saves `parts` as checkpoint `step` in the background; returns the seconds training stood still.

        All ranks call it. Plain tensors and values must be the same on all ranks (they are written once); sharded
        ones are DTensors; what differs by rank goes into a part whose name does too. `meta` is JSON. Waits for an
        earlier save first, and raises its error if it failed: UserError for a full disk or an unwritable folder; what
        `alike` raises, where ranks do not hold the same, of which nothing is kept.
        With `wait`, where this object `waits`, or where some tensors are not in memory, returns when the checkpoint is
        on the disk; no tensor in this memory is copied then.
        """
        began = time.monotonic()
        self.wait()
        tensors, skeletons = state_tree.flatten(parts)
        wait = wait or self.waits or any(isinstance(tensor, StoredSlice) for tensor in tensors.values())
        state = {**self._stage.copy(tensors, changing=not wait), **skeletons}
        loss = None if loss is None or not math.isfinite(loss) else loss
        job = WriteJob(step, state, dict(meta), loss, self.rate, self.run)
        if wait:  # in this thread, whose priority is that of training
            self._run(job, began, None)
            self.wait()
        else:
            written = self._writer.submit(self._run, job, began, time.monotonic())
            self._writing = (f"checkpoint-{step}", written)
        return time.monotonic() - began

    def wait(self, timeout: float = 1800.0) -> None:
        """Waits until no save is in flight; raises what went wrong with the last one. `timeout` in seconds."""
        if self._writing is not None:
            name, written = self._writing
            try:
                written.result(timeout)
            except TimeoutError:
                raise RunFailed(
                    f"Rank {self.team.rank} waited {timeout:.0f} s for {name} to be written.",
                    do="look at the disk or network that checkpoint.target names",
                ) from None
            self._writing = None
        if self._failure is not None:
            failure = self._failure
            self._failure = None
            raise failure

    def close(self) -> None:
        """Same as `wait`."""
        self.wait()

    def abandon(self) -> None:
        """Ends the writing thread once it has failed or written all: a later save may bear the same name."""
        self._writer.shutdown(cancel_futures=True)

    def entries(self) -> list[CheckpointInfo]:
        """The checkpoints there are, oldest first, by their manifests (files are not checked)."""
        return [self._entry(name) for name in self.place.names()]

    def newest(self) -> int:
        """The newest step there is by its manifest (files are not checked); -1 without any. All ranks call it."""
        self.wait()
        return self.team.agree(
            "listing checkpoints",
            lambda: None,
            lambda _: [max((entry.step for entry in self.entries() if not entry.why), default=-1)] * self.team.world,
        )

    def forget(self, after: int) -> None:
        """Deletes the checkpoints of more than `after` steps. All ranks call it."""

        def removed(_: list[None]) -> list[None]:
            for name in self.place.names():
                if (step_of(name) or 0) > after and not run_identity.is_foreign(self.run, self._entry(name).run):
                    self._remove(name)
            return [None] * self.team.world

        self.wait()
        self.team.agree("removing checkpoints", lambda: None, removed)

    def load(self, parts: StatefulParts, step: int | None = None, most: int | None = None) -> Loaded | None:
        """Restores `parts` from the newest good checkpoint (of at most `most` steps), or from that of `step`; None when
        there is none at all.

        All ranks call it and take the same one. Every file is checked first (each by one rank); a damaged checkpoint
        is reported as an incident and the one before it is taken. Sharded tensors must be in the parts' state as
        DTensors, at any number of ranks; a plain tensor the part does not have yet is made.

        Raises UserError when no checkpoint is good, when `step` is not there or damaged, when the one to take is of
        another run, or when a part refuses.
        """
        self.wait()
        candidates = self.team.agree(
            "listing checkpoints", lambda: None, lambda _: [self._wanted(step, most)] * self.team.world
        )
        skipped: _Skipped = []
        for name in candidates:
            reasons = self.team.agree(
                "checking a checkpoint", partial(self._damage, name), lambda each: [each] * len(each)
            )
            why = next(filter(None, reasons), "")
            if why:
                skipped.append((name, why))
                continue
            self._report(skipped, name)
            return self._take(name, parts, skipped)
        if skipped:
            raise UserError(
                f"No checkpoint at {self.place.path('')} can be used.",
                why="; ".join(f"{name}: {why}" for name, why in skipped),
                do="restore the folder from a backup, or start a new run with --run FOLDER",
            )
        return None

    def _take(self, name: str, parts: StatefulParts, skipped: _Skipped) -> Loaded:
        from espalier.checkpoint.reader import restore

        content = read_manifest(self.place, name)
        read = partial(restore, self.place, name, content.files, parts)
        absent = self.team.agree("restoring", read, lambda each: each)
        self.doubt = run_identity.doubt(self.run, content.stamp, self.place.path(name))
        return Loaded(content.step, content.meta, skipped, absent)

    def _wanted(self, step: int | None, most: int | None) -> list[str]:
        names = self.place.names()
        if step is None:
            return [name for name in names[::-1] if most is None or (step_of(name) or 0) <= most]
        if folder_name(step) not in names:
            there = ", ".join(str(step_of(name)) for name in names) or "none"
            raise UserError(f"No checkpoint of step {step} at {self.place.path('')}.", why=f"there: {there}")
        return [folder_name(step)]

    def _damage(self, name: str) -> str:
        """What is wrong with this rank's share of `name`'s files; empty when nothing is. Raises UserError where it is
        another run's."""
        try:
            content = read_manifest(self.place, name)
            self.refuse_foreign(name, content)
            for file in sorted(content.files)[self.team.rank :: self.team.world]:
                with self.place.open(name, file) as opened:
                    if manifest.digest(opened) != content.files[file]:
                        return f"{file} is damaged (its checksum does not match)"
        except manifest.Bad as bad:
            return str(bad)
        except OSError as error:
            return f"a file is missing or unreadable ({error})"
        return ""

    def refuse_foreign(self, name: str, content: manifest.Manifest) -> None:
        """Raises UserError where checkpoint `name`, whose manifest is `content`, is another run's."""
        run_identity.refuse_foreign(self.run, content.stamp, self.place.path(name))

    def _entry(self, name: str) -> CheckpointInfo:
        path = self.place.path(name)
        try:
            content = read_manifest(self.place, name)
        except (manifest.Bad, OSError) as error:
            return CheckpointInfo(step_of(name) or 0, None, 0, path, str(error))
        entry = CheckpointInfo(content.step, content.loss, content.bytes, path, "", content.meta, content.stamp)
        foreign = run_identity.is_foreign(self.run, entry.run)
        return entry._replace(why=f"it belongs to {entry.run}") if foreign else entry

    def _report(self, skipped: _Skipped, taken: str) -> None:
        for name, why in skipped:
            what = f"checkpoint {name} is unusable: {why}"
            lost = (step_of(name) or 0) - (step_of(taken) or 0)
            action = f"took {taken}; {units.plural(lost, 'step')} {'is' if lost == 1 else 'are'} lost and made again"
            self._event("incident", kind="checkpoint", what=what, rank=0, step=step_of(name), action=action)

    def _run(self, job: WriteJob, asked: float, copied: float | None) -> None:
        """Writes what was `asked` for at that time; training went on when it was `copied`, or waits (None)."""
        began = time.monotonic()
        name = folder_name(job.step)
        try:
            if self.alike is not None:
                self.alike.agreed(
                    self.team, {key: value for key, value in job.state.items() if not isinstance(value, bytes)}
                )
            written = Write(self.place, self.team, job).run()
            took = time.monotonic() - began
            path = self.place.path(name)
            self.wrote = took
            blocked = (time.monotonic() if copied is None else copied) - asked
            rate = written.bytes / max(written.seconds, 1e-9)
            figures = {"seconds": took, "blocked": blocked, "bytes": written.bytes, "rate": rate, "path": path}
            self._event("checkpoint", step=job.step, **figures)
            self._prune(name)
        except EspalierError as error:
            self._failure = error
        except Exception as error:
            what = f"The checkpoint of step {job.step} was not written: {type(error).__name__}: {error}"
            self._failure = RunFailed(what, do=RESUME)

    def _prune(self, newest: str) -> None:
        """Deletes what `keep` and `keep_best` do not hold, and steps after `newest`: an abandoned attempt's.

        A checkpoint whose manifest cannot be read does not count as one kept, and goes when it is older than those. One
        of another run does not count and stays.
        """
        if self.team.rank != 0:
            return
        entries = {name: self._entry(name) for name in self.place.names()}
        names = [name for name, entry in entries.items() if not run_identity.is_foreign(self.run, entry.run)]
        ours = {name: entries[name] for name in names[: names.index(newest) + 1]}
        good = [name for name, entry in ours.items() if not entry.why]
        kept_names = {name for name in ours if name >= min(good[-self.keep :], default=newest)}
        if self.hold is not None:
            kept_names.add(max((name for name in good if (step_of(name) or 0) <= self.hold), default=newest))
        losses = {name: entry.loss for name, entry in ours.items() if entry.loss is not None}
        if self.keep_best and losses:
            kept_names.add(min(losses, key=losses.__getitem__))
        for name in names:
            if name not in kept_names:
                self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            self.place.remove(name)
        except OSError as error:
            what = f"the old checkpoint {name} could not be deleted: {error}"
            self._event("incident", kind="checkpoint", what=what, rank=0, step=step_of(name), action="left it")


def _step_back() -> None:
    """The thread that calls this leaves the cores to training."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError, AttributeError):  # not every system has it, for every thread
        os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))


def _ignore(event: str, **fields: Any) -> None:
    """Where events go when nobody listens."""
