"""Rank process: a forked rank, its messages and its exit. Results and exceptions come back through a pipe.

Forking is safe only while this process has run nothing on several threads and has not touched a GPU: callers set one
thread before any tensor operation, and probing happens in children. Ranks live in process groups of their own: Ctrl-C
reaches this process, which passes it on, so that each rank hears it exactly once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from espalier.comm import store_client
from espalier.launch.ranks import child_process as forks
from espalier.machine import resource_limits
from espalier.recipe import errors, serialization
from espalier.recipe.errors import EspalierError, Interrupted, RunFailed, UserError
from espalier.train import rejoin_signal
from espalier.train.rank_spec import Entrypoint, RankSpec
from espalier.train.rejoin_signal import Recall

OOM_KILLS = resource_limits.oom_kills()
STACKS = signal.SIGUSR2
"""Makes a rank write where each of its threads is to its log, whatever it is doing."""


@dataclass
class Child:
    """One rank seen from its launcher. Has state: what it sent, and how it ended."""

    place: RankSpec
    pid: int
    pidfd: int
    pipe: int
    received: bytes = b""
    status: int | None = None
    """None while it lives; negative: the signal that ended it."""
    calls: int = -1
    """Where it is called (`recall`)."""

    @property
    def failed(self) -> bool:
        """Whether it ended without having done its part, also where it left by `os._exit(0)`."""
        return self.status is not None and (self.status != 0 or not self.received)

    @property
    def returned(self) -> Any:
        """What its task returned."""
        return self._told[1] if self._told is not None else None

    @property
    def error(self) -> EspalierError | None:
        """What it raised, if it could tell."""
        return None if self._told is None or self._told[0] == "returned" else errors.from_words(self._told[1])

    @property
    def raised(self) -> str:
        """The type's name where it raised what is not an EspalierError."""
        return self._told[2] if self._told is not None and self._told[0] == "crashed" else ""

    @property
    def _told(self) -> tuple[Any, ...] | None:
        try:
            return serialization.loads(self.received, f"What rank {self.place.rank} said") if self.received else None
        except UserError:  # killed while it was telling
            return None

    def receive(self) -> bool:
        """Takes in what it sends; False at the end of that."""
        try:
            data = os.read(self.pipe, 1 << 20)
        except BlockingIOError:
            return True
        self.received += data
        return bool(data)

    def reap(self, block: bool = True) -> None:
        """Learns how it ended, if it has (`block`: waits for that), and what it sent last."""
        pid, status = os.waitpid(self.pid, 0 if block else os.WNOHANG)
        if pid:
            self.status = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(BlockingIOError):  # a process that it started may hold the other end
                while data := os.read(self.pipe, 1 << 20):
                    self.received += data

    def signal(self, number: int) -> None:
        """Sends it that signal, if it lives."""
        if self.status is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once, if it lives, also where it is stopped."""
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Ends it if need be and gives back what it took here."""
        if self.status is None:
            self.kill()
            self.reap()
        os.close(self.pidfd)
        os.close(self.pipe)
        os.close(self.calls)


@contextmanager
def meeting(specs: Sequence[RankSpec], server: int) -> Iterator[Sequence[RankSpec]]:
    """`specs` with the store at which the ranks meet: as they say, or one at a free port of this machine that the rank
    of spec number `server` serves."""
    if specs[0].port or len(specs) == 1:
        yield specs
        return
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        host, port = listener.getsockname()
        met = [replace(spec, host=host, port=port) for spec in specs]
        met[server] = replace(met[server], serves=True, listen_fd=listener.fileno())
        yield met


def fork(task: Entrypoint, place: RankSpec) -> Child:
    """One process at `place`, which says where its store is."""
    reader, writer = os.pipe()
    heard, calls = os.pipe()

    spec = replace(place, recall=Recall(heard))
    pid = forks.fork(partial(_live, task, spec, writer, (reader, calls)))
    os.close(writer)
    os.close(heard)
    os.set_blocking(reader, False)
    return Child(place, pid, os.pidfd_open(pid), reader, calls=calls)


def _live(task: Entrypoint, place: RankSpec, writer: int, parents: Sequence[int]) -> int:
    """The life of one rank: join its process group, run, send back what came of it. Returns the exit code. `parents`:
    descriptors that are the parent's alone."""
    for descriptor in parents:
        os.close(descriptor)
    store_client.own_process()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if place.log is not None:
        _redirect(place.log, place.rank)
    faulthandler.register(STACKS, file=2 if place.stacks < 0 else place.stacks, all_threads=True)
    place.pulse.beat()
    place.recall.listen()
    code = 0
    try:
        message = serialization.dumps(("returned", staying(task, place)), f"what rank {place.rank} gives back")
    except EspalierError as error:
        message = serialization.dumps(("raised", errors.words_of(error)))
        code = error.exit_code
    except KeyboardInterrupt:
        message = serialization.dumps(("raised", errors.words_of(Interrupted("Stopped before the first step."))))
        code = 130
    except BaseException as error:
        sys.stderr.write(traceback.format_exc())
        words = errors.words_of(explained(error, place))
        message = serialization.dumps(("crashed", words, type(error).__name__))
        code = 1
    place.pulse.leaves()
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(message)
    return code


def staying(task: Entrypoint, place: RankSpec) -> Any:
    """What `task` returns, begun anew at another place in this process whenever this rank lost others and is called."""
    while True:
        try:
            return task(place)
        except Exception as error:
            if not rejoin_signal.is_loss(error):
                raise
            place.pulse.stands()
            call = place.recall.answer()
            if call is None:
                raise
        place.pulse.starts()
        gc.collect()  # the groups of the attempt that is over, before there are others
        refuge = place.refuge and replace(place.refuge, between_failures=call.between_failures)
        place = replace(
            place, attempt=call.attempt, host=call.host, port=call.port, serves=False, listen_fd=-1, patience=0.0,
            refuge=refuge,
        )  # fmt: skip


def _redirect(path: Path, rank: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if rank != 0:
        os.dup2(log, 1)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    os.close(log)


_LOST = ("DistNetworkError", "DistStoreError")
"""Errors of c10d where another process has ended; a trace in C++ follows their first line."""


def explained(error: BaseException, place: RankSpec) -> RunFailed:
    """What a person needs of an unexpected `error` in the rank at `place`: its kind, words and place."""
    text = "".join(traceback.format_exception(error))
    kind = type(error).__name__
    reason = (str(error).strip() or "no message").splitlines()[0] if kind in _LOST else error
    do = "look at the log of the rank that ended first, in most cases rank 0's" if kind in _LOST else ""
    return RunFailed(f"Rank {place.rank} failed: {kind}: {reason}", why=_where(text, place), do=do)


def _where(text: str, place: RankSpec) -> str:
    frames = [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]
    return (frames[-1] if frames else "") + (f"; the whole trace is in {place.log}" if place.log else "")


def endings(children: Sequence[Child], every: float) -> Iterator[Child | None]:
    """Each child as it ends, until all have; and None in between, at least every `every` seconds. `children` may change
    in between: a process that takes the place of another is watched from then on."""
    poller = select.poll()
    by_fd = {}
    watched: dict[int, Child] = {}
    while any(child.status is None for child in children):
        for index, child in enumerate(children):  # one may have taken the place of another
            if watched.get(index) is not child:
                watched[index] = child
                for fd in (child.pidfd, child.pipe):
                    by_fd[fd] = child
                    poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll(round(1000 * every)):
            ready_child = by_fd.get(fd)
            if ready_child is None or (fd == ready_child.pipe and ready_child.receive()):
                continue
            ended = fd == ready_child.pidfd
            for descriptor in (ready_child.pidfd, ready_child.pipe) if ended else (fd,):
                if by_fd.pop(descriptor, None) is not None:
                    poller.unregister(descriptor)
            if ended:
                ready_child.reap()
                yield ready_child
        yield None


def results(children: Sequence[Child]) -> list[Any]:
    """What each returned, all of which have; gives back what they took here."""
    returned = [child.returned for child in children]
    for child in children:
        child.close()
    return returned


def died(child: Child) -> RunFailed:
    """The error of a rank that ended and could tell nothing."""
    what, why = ended(f"Rank {child.place.rank}", child.status or 0)
    tail = _tail(child.place.log)
    words = filter(None, (why, f"its last words: {tail}" if tail else ""))
    return RunFailed(what, why="; ".join(words), do="run the same command to resume")


def ended(who: str, status: int) -> tuple[str, str]:
    """What became of a process that told nothing, and why; `status` as of `Child`."""
    if status >= 0:
        return f"{who} ended with exit code {status}.", "" if status else "it left before its work was done"
    name = signal.Signals(-status).name
    return f"{who} was killed ({name}).", _killer() if name == "SIGKILL" else f"the process got {name}"


def _killer() -> str:
    """Who may have killed a process, by the kernel's count since this program began."""
    now = resource_limits.oom_kills()
    if now is None or OOM_KILLS is None:
        return "the system was probably out of memory"
    if now > OOM_KILLS:
        return "the system was out of memory: the kernel killed a process"
    return "somebody else killed it: the kernel has killed nothing for want of memory"


def _tail(log: Path | None) -> str:
    if log is None or not log.exists():
        return ""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""
