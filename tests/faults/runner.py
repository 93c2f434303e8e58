"""Runs a row of the fault matrix: a command whose processes are struck, given again where a signal ended it, and what
is left of it compared with the undisturbed run."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matrix import BASES, COMMON, LAUNCHER, MOMENTS, PROMISED, Row, Strike, Subject

from espalier.checkpoint.storage import Folder
from espalier.cli import main as cli
from espalier.cli import run_plan
from espalier.comm.channel import Channel
from espalier.launch.resilience import restart_advice
from espalier.mechanisms.optimizer_node.client import Client
from espalier.recipe import cache_dir
from espalier.track import page
from espalier.train import worker
from espalier.train.trainer import Trainer

MACHINE = """
[[nodes]]
device = "cpu"
cores = 2
memory = "8GiB"
disks = [{ path = "/", read = 1e9, write = 1e9, iops = 1e4 }]
"""
UNFINISHED = (".tmp", ".part", ".partial", cache_dir.BEFORE)
QUIET = 10.0
"""Seconds that an undisturbed run and its export take at most where nothing else runs."""
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2): who outlives its parent becomes a child of this process

# --- in the processes of a run ----------------------------------------------------------------------------------------


class Armed:
    """What happens in the processes of one command. Has state: the rank that this process is, its trainer, and
    whether it validates."""

    def __init__(self, strikes: Sequence[Strike], folder: Path) -> None:
        self.strikes = {strike.moment: strike for strike in strikes}
        self.folder, self.launcher = folder, os.getpid()
        self.rank, self.trainer, self.validates = LAUNCHER, None, False

    def at(self, moment: str) -> None:
        """Strikes, once, if this process or rank is meant."""
        strike = self.strikes.get(moment)
        if strike is None or self.rank != max(strike.target, 0 if moment != "exporting" else LAUNCHER):
            return
        if self.trainer is not None and self.trainer.step + 1 < MOMENTS[moment]:
            return
        try:
            (self.folder / moment).touch(exist_ok=False)
        except FileExistsError:
            return
        target = self.launcher if strike.target == LAUNCHER else os.getpid()
        if strike.signal.lasts is not None:
            subprocess.Popen(["sh", "-c", f"sleep {strike.signal.lasts}; kill -CONT {target}"], start_new_session=True)
        os.kill(target, strike.signal.number)

    def before(self, owner: Any, method: str, moment: str, due: Callable[[], bool] = lambda: True) -> None:
        """Calls of the method are that moment."""
        plain = getattr(owner, method)

        @functools.wraps(plain)
        def struck(*arguments: Any, **options: Any) -> Any:
            if due():
                self.at(moment)
            self.validates = self.validates or moment == "validation"
            try:
                return plain(*arguments, **options)
            finally:
                self.validates = self.validates and moment != "validation"

        setattr(owner, method, struck)

    def training(self) -> bool:
        """Whether there is a trainer in this process, and it does not validate."""
        return self.trainer is not None and not self.validates

    def end(self) -> list[Any]:
        """In place of the sample at the end, which takes as long as the steps of so short a run."""
        self.at("end")
        return []

    def begin(self, plan: Callable[[Any], Any] | None) -> None:
        """Arms this process and those that it forks."""
        if plan is not None:
            run_plan.choose = lambda resolved, *_, **__: plan(resolved.recipe)  # type: ignore[assignment]
        train, made = worker.train, Trainer.__init__

        def trains(setting: Any, identity: Any, programs: Any = None) -> Any:
            self.rank = setting.place.rank
            return train(setting, identity, programs)

        def init(trainer: Trainer, *arguments: Any, **options: Any) -> None:
            made(trainer, *arguments, **options)
            self.trainer = trainer
            self.before(trainer.workload, "batches", "reading")
            self.before(trainer.built.agreement, "step", "step")
            self.before(trainer.workload, "evaluate", "validation")
            self.before(trainer.built.optimizer, "step", "optimizer step")

        worker.train, Trainer.__init__ = trains, init  # type: ignore[method-assign]
        for owner, method in ((Channel, "_end"), (Client, "encode")):
            self.before(owner, method, "exchange", self.training)
        self.before(Folder, "publish", "saving")
        self.before(Trainer, "_step", "first step")
        Trainer.sample = self.end  # type: ignore[assignment, method-assign]
        fill = cache_dir.replace_folder

        def replace_folder(target: Path, inner: Callable[[Path], None]) -> None:
            def filled(folder: Path) -> None:
                inner(folder)
                self.at("exporting")

            fill(target, filled)

        cache_dir.replace_folder = replace_folder


def warm() -> None:
    """Loads, once, what every command would load in its own fork."""
    for name in ("torch._dynamo", "espalier.track.report", "espalier.cli.export", "espalier.cli.start_run"):
        importlib.import_module(name)
    restart_advice.ready()
    page.environment().get_template("track/report.html.j2")


# --- commands ---------------------------------------------------------------------------------------------------------


def command(folder: Path, arguments: Sequence[str], armed: Armed, plan: Callable[[Any], Any] | None) -> int:
    """Runs `espalier ARGUMENTS` in `folder`, in a fork of this process that is armed; its exit code, or minus the
    signal that ended it."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.chdir(folder)
            tempfile.tempdir = str(folder / "tmp")
            os.environ.update(XDG_CACHE_HOME=str(folder / "cache"), COLUMNS="100", TMPDIR=tempfile.tempdir)
            output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for number in (1, 2):
                os.dup2(output, number)
            sys.stdin = open(os.devnull)  # noqa: SIM115 (for as long as the process lives)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            armed.launcher = os.getpid()
            armed.begin(plan)
            code = cli.main([*arguments])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@dataclass(frozen=True)
class Ended:
    """What there is after a run and its export: digest of the exported weights, losses and figures by step, seconds of
    each recovery, the most seconds between an event of the log and the next, where ranks do not begin in between, and
    how many times longer than on a quiet machine it all took.
    """

    weights: str
    losses: dict[int, float]
    validated: dict[int, Any]
    recoveries: tuple[float, ...]
    silence: float
    slowness: float


def wait_until_free(lock: Path) -> None:
    """Ranks outlive the command for a moment, and hold the run's lock until they end."""
    until = time.monotonic() + PROMISED
    while lock.exists():
        with lock.open("rb+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                assert time.monotonic() < until, f"{lock} is still held"
                time.sleep(0.02)
            else:
                return


def ran(subject: Subject, folder: Path, strikes: Sequence[Strike] = ()) -> Ended:
    """Trains and exports in `folder`, giving each command again as often as a strike may have ended it.

    Raises AssertionError with what the command wrote where it ends in another way.
    """
    warm()
    for name in ("struck", "tmp"):
        (folder / name).mkdir(parents=True)
    _write_inputs(subject, folder)
    keys = {**COMMON, **subject.keys}
    train = ["train", "recipe.toml", "--run", "run", *(f"{key}={json.dumps(keys[key])}" for key in keys)]
    begun = time.monotonic()
    for arguments, moments in ((train, {*MOMENTS} - {"exporting"}), (["export", "run", "--to", "safetensors"], None)):
        due = [strike for strike in strikes if moments is None or strike.moment in moments]
        ending = [strike for strike in due if strike.target == LAUNCHER and strike.signal.lasts is None]
        codes = [command(folder, arguments, Armed(due, folder / "struck"), subject.plan)]
        while codes[-1] and len(codes) <= len(ending):
            wait_until_free(folder / "run" / ".lock")
            codes.append(command(folder, arguments, Armed(due, folder / "struck"), subject.plan))
        assert codes[-1] == 0, f"{arguments[0]} ended with {codes}:\n{_output(folder)}"
    assert "Traceback" not in _output(folder), _output(folder)
    missing = [strike.name for strike in strikes if not (folder / "struck" / strike.moment).exists()]
    assert not missing, f"did not happen: {missing}\n{_output(folder)}"
    return _ended(folder, max(1.0, (time.monotonic() - begun) / QUIET))


def _write_inputs(subject: Subject, folder: Path) -> None:
    (folder / "machine.toml").write_text(MACHINE)
    (folder / "recipe.toml").write_text(BASES[subject.base])
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(9):
        lines = (f"{number} plus {term} is {number + term}\n" for term in range(80))
        (corpus / f"{number}.txt").write_text("".join(lines))


def _output(folder: Path) -> str:
    logs = sorted((folder / "run" / "logs").glob("*.log"))
    return "\n".join(path.read_text(errors="replace")[-4000:] for path in (folder / "output.txt", *logs))


def _ended(folder: Path, slowness: float) -> Ended:
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    exported = folder / "run" / "export-safetensors" / "model.safetensors"
    timed = ("event", "time", "seconds", "step")
    figures = [event for event in events if event["event"] == "validation"]
    return Ended(
        hashlib.sha256(exported.read_bytes()).hexdigest(),
        {event["step"]: event["loss"] for event in events if event["event"] == "step"},
        {event["step"]: {key: event[key] for key in event if key not in timed} for event in figures},
        tuple(event["seconds"] for event in events if event["event"] == "recovered"),
        max(new["time"] - old["time"] for old, new in itertools.pairwise(events) if new["event"] != "run"),
        slowness,
    )


# --- what is left -----------------------------------------------------------------------------------------------------


@contextmanager
def leaving_nothing(folder: Path, seconds: float = 10.0) -> Iterator[None]:
    """Fails where a process that began inside is there `seconds` after the end, or a temporary file in `folder`.
    Segments of memory are anonymous files, and ports are sockets: both end with the processes that hold them."""
    before = _children()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
        left = _reaped(before, seconds)
        assert not left, f"processes are left: {left}"
        files = [str(path) for path in (folder / "tmp").rglob("*")]
        files += [str(path) for path in (folder / "run").rglob("*") if path.name.endswith(UNFINISHED)]
        assert not files, f"files are left: {files}"
    finally:
        for pid in _children() - before:
            os.kill(pid, signal.SIGKILL)
        _reaped(before, seconds)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _children() -> set[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in lists for pid in path.read_text().split()}


def _reaped(before: set[int], seconds: float) -> list[str]:
    """Waits for children that were not there `before`; the command lines of those that stay."""
    until = time.monotonic() + seconds
    while (left := _children() - before) and time.monotonic() < until:
        for pid in left:
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
    return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in left]


# --- the law ----------------------------------------------------------------------------------------------------------


def check(row: Row, ended: Ended, whole: Ended) -> None:
    """What is promised of every row: the same bits, every step and figure in the log, and no longer wait."""
    assert ended.losses == whole.losses, f"{row.name}: losses differ from those of the undisturbed run"
    assert ended.validated == whole.validated, f"{row.name}: figures differ from those of the undisturbed run"
    assert ended.weights == whole.weights, f"{row.name}: weights differ from those of the undisturbed run"
    promised = PROMISED * whole.slowness
    assert max(ended.recoveries, default=0.0) < promised, f"{row.name}: a recovery took longer than is promised"
    assert ended.silence < promised, f"{row.name}: the log was silent for longer than is promised"
