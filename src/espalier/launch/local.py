"""Starts the ranks on this machine and watches them. A rank that dies ends the run at once, with its cause.

Ranks are forked from this process, which has torch imported already, so they start in milliseconds. Forking is safe
only while this process has run nothing on several threads and has not touched a GPU: callers set one thread before any
tensor operation, and probing happens in children. Ranks live in process groups of their own: Ctrl-C reaches this
process, which passes it on, so that each rank hears it exactly once.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from espalier.errors import EspalierError, Interrupted, PeerLost, RunFailed
from espalier.launch.base import Place, Task

_GRACE_SECONDS = 3.0
"""How long the other ranks may take to end by themselves once one has died."""

_PR_SET_PDEATHSIG = 1  # prctl(2): the kernel kills a rank whose launcher is gone


@dataclass
class _Child:
    place: Place
    pid: int
    pidfd: int
    pipe: int
    received: bytes = b""
    status: int | None = None


def run(task: Task, places: Sequence[Place]) -> list[Any]:
    """Runs `task` in one process per place; returns what each returned, in order.

    Raises the error of the rank that failed first (`RunFailed`, or the `EspalierError` it raised itself), and
    `Interrupted` when stopped by Ctrl-C or SIGTERM.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with _listening() as listener:
        seated = _seat(places, listener)
        children = [_fork(task, place) for place in seated]
    try:
        with _passing_on_signals(children) as interrupted:
            failed = _watch(children)
    finally:
        _end(children)
    if failed is not None:
        raise _cause(failed, children, bool(interrupted))
    return [pickle.loads(child.received)[1] for child in children]


# --- starting ----------------------------------------------------------------------------------------------------


@contextmanager
def _listening() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        yield listener


def _seat(places: Sequence[Place], listener: socket.socket) -> list[Place]:
    """Gives every place the store's address; the first one serves it."""
    port = listener.getsockname()[1]
    seated = [replace(place, host="127.0.0.1", port=port) for place in places]
    if len(seated) > 1:
        seated[0] = replace(seated[0], serves=True, listen_fd=listener.fileno())
    return seated


def _fork(task: Task, place: Place) -> _Child:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        os.set_blocking(reader, False)
        return _Child(place, pid, os.pidfd_open(pid), reader)
    os.close(reader)
    code = 1
    try:
        code = _live(task, place, writer)
    finally:
        # Not sys.exit: the parent's exit handlers and buffers are not this process's to run.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _live(task: Task, place: Place, writer: int) -> int:
    """The life of one rank: join its process group, run, send back what came of it. Returns the exit code."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if place.log is not None:
        _redirect(place)
    outcome: tuple[str, Any]
    code = 0
    try:
        outcome = ("returned", task(place))
    except EspalierError as error:
        outcome, code = ("raised", error), error.exit_code
    except KeyboardInterrupt:
        outcome, code = ("raised", Interrupted("Stopped before the first step.")), 130
    except BaseException as error:
        sys.stderr.write(traceback.format_exc())
        outcome, code = ("raised", explained(error, place)), 1
    with os.fdopen(writer, "wb") as pipe:
        pickle.dump(outcome, pipe)
    return code


def _redirect(place: Place) -> None:
    assert place.log is not None
    place.log.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if place.rank != 0:
        os.dup2(log, 1)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    os.close(log)


def explained(error: BaseException, place: Place) -> RunFailed:
    """What a person needs of an unexpected `error` in the rank at `place`: its kind, words and place."""
    text = "".join(traceback.format_exception(error))
    return RunFailed(f"Rank {place.rank} failed: {type(error).__name__}: {error}", why=_where(text, place))


def _where(text: str, place: Place) -> str:
    frames = [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]
    return (frames[-1] if frames else "") + (f"; the whole trace is in {place.log}" if place.log else "")


# --- watching ----------------------------------------------------------------------------------------------------


def _watch(children: list[_Child]) -> _Child | None:
    """Waits for all children; returns the first that failed, as soon as it has (None when all ended well)."""
    poller = select.poll()
    by_fd: dict[int, _Child] = {}
    for child in children:
        by_fd[child.pidfd] = by_fd[child.pipe] = child
        poller.register(child.pidfd, select.POLLIN)
        poller.register(child.pipe, select.POLLIN)
    while any(child.status is None for child in children):
        for fd, _ in poller.poll(1000):
            child = by_fd[fd]
            if fd == child.pipe:
                if not _receive(child):
                    poller.unregister(fd)
                continue
            poller.unregister(fd)
            _reap(child)
            if child.status != 0:
                return child
    return None


def _receive(child: _Child) -> bool:
    try:
        data = os.read(child.pipe, 1 << 20)
    except BlockingIOError:
        return True
    child.received += data
    return bool(data)


def _reap(child: _Child, block: bool = True) -> None:
    pid, status = os.waitpid(child.pid, 0 if block else os.WNOHANG)
    if pid:
        child.status = os.waitstatus_to_exitcode(status)
        while _receive_all(child):
            pass


def _receive_all(child: _Child) -> bool:
    try:
        data = os.read(child.pipe, 1 << 20)
    except BlockingIOError:
        return False
    child.received += data
    return bool(data)


def _end(children: list[_Child]) -> None:
    """Leaves no child behind: a grace period, then SIGKILL."""
    deadline = time.monotonic() + _GRACE_SECONDS
    failed = any(child.status not in (0, None) for child in children)
    while failed and time.monotonic() < deadline and any(child.status is None for child in children):
        for child in children:
            if child.status is None:
                _reap(child, block=False)
        time.sleep(0.02)
    for child in children:
        if child.status is None:
            os.kill(child.pid, signal.SIGKILL)
            _reap(child)
        os.close(child.pidfd)
        os.close(child.pipe)


def _cause(first: _Child, children: list[_Child], interrupted: bool) -> EspalierError:
    """The error to show: a rank's own before one that merely lost a peer."""
    killed = [child for child in children if child.status is not None and child.status < 0]
    raised = [error for child in (first, *children) if (error := _raised(child)) is not None]
    own = [error for error in raised if not isinstance(error, PeerLost)]
    if own:
        return own[0]
    if interrupted:
        return Interrupted("Stopped before the state could be saved.")
    dead = first if first in killed or not killed else killed[0]
    if raised and dead.status is not None and dead.status >= 0:
        return raised[0]
    return _died(dead)


def _raised(child: _Child) -> EspalierError | None:
    if not child.received:
        return None
    kind, value = pickle.loads(child.received)
    return value if kind == "raised" else None


def _died(child: _Child) -> RunFailed:
    status = child.status or 0
    if status < 0:
        name = signal.Signals(-status).name
        why = "the system was probably out of memory" if name == "SIGKILL" else f"the process got {name}"
        what = f"Rank {child.place.rank} was killed ({name})."
    else:
        what, why = f"Rank {child.place.rank} ended with exit code {status}.", ""
    tail = _tail(child.place.log)
    return RunFailed(what, why=why + (f"; its last words: {tail}" if tail else ""), do="run the same command to resume")


def _tail(log: Path | None) -> str:
    if log is None or not log.exists():
        return ""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


@contextmanager
def _passing_on_signals(children: list[_Child]) -> Iterator[list[int]]:
    """The first Ctrl-C or SIGTERM asks the ranks to save and stop; the second ends them at once."""
    seen: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        for child in children:
            if child.status is None:
                os.kill(child.pid, signal.SIGINT if len(seen) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
