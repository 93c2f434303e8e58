"""Real Gloo ranks on one CPU, forked from the warm parent: about 0.4 s for two to eight ranks."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import TCPStore

from espalier import comm
from espalier.comm import store_client
from espalier.recipe.errors import UserError

GRACE = 8.0  # seconds the other ranks have to end once one has failed


@dataclass(frozen=True)
class Died:
    """The outcome of a rank that ended without a result: the signal that ended it, or its exit code."""

    signal: int
    code: int = 0


def forks(n: int, function: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Any]:
    """Runs `function(channel, *args)` on `n` forked ranks and returns their results in order of rank.

    `channel` is the Channel of the default group, so DTensor, FSDP2 and pipelining work inside. Call
    `torch.set_num_threads(1)` before; import and once use in the parent whatever is slow to start.

    Args:
        n: number of ranks.
        function: called in each rank; its result travels back by pickle.
        args: the rest of its arguments; nothing is copied, the child is a fork.
        timeout: seconds, for all of it; also the deadline of every collective inside.

    Raises:
        UserError: the parent uses more than one thread (OpenMP in a forked child would hang).
        TimeoutError: some rank did not end; says where each was.
        Exception: the first exception of a rank, as it was, with the traceback of the rank as a note.

    >>> import torch; torch.set_num_threads(1)
    >>> forks(2, lambda channel: channel.rank() * 10)
    [0, 10]
    """
    run, results = _outcomes(n, function, args, timeout)
    for rank, result in enumerate(results):
        if isinstance(result, Died):
            raise ChildProcessError(f"rank {rank} of {n} ended without a result ({result})")
    if run.failed:
        raise results[run.failed[0]]
    return results


def outcomes(n: int, function: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Any]:
    """Like `forks`, but a rank that raised gives its exception as its result, and one that was killed gives `Died`."""
    return _outcomes(n, function, args, timeout)[1]


def _outcomes(n: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> tuple[_Run, list[Any]]:
    if torch.get_num_threads() > 1:
        raise UserError(
            f"forks needs a parent of one thread, and torch uses {torch.get_num_threads()}.",
            why="OpenMP's threads do not survive a fork: the first parallel operation in a child would hang",
            do="call torch.set_num_threads(1) before anything else in the test",
        )
    run = _Run(n, timeout)
    try:
        run.start(function, args)
        return run, run.collect()
    finally:
        run.end()


class _Run:
    """The children of one call. Has state."""

    def __init__(self, n: int, timeout: float) -> None:
        self.n = n
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.store: TCPStore | None = None
        self.pids: list[int] = []
        self.pipes: list[Connection] = []
        self.failed: list[int] = []  # in order of time
        self.hold_read, self.hold_write = os.pipe()
        self.port_read, self.port_write = os.pipe()
        self.traces = tempfile.TemporaryDirectory(prefix="espalier-forks-")

    def start(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        for rank in range(self.n):
            ours, theirs = Pipe(duplex=False)
            with warnings.catch_warnings():
                # Python 3.12 warns when the process has threads. None of them is ours: see below.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                self._child(rank, theirs, function, args)
            theirs.close()
            self.pids.append(pid)
            self.pipes.append(ours)
        # Only now: a fork while the store's thread looks up an address would leave the child with a held lock.
        self.store = store_client.serve()
        os.write(self.port_write, self.store.port.to_bytes(4, "big") * self.n)

    def collect(self) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < self.n:
            waiting = {self.pipes[rank]: rank for rank in range(self.n) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, self.deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(self._where(sorted(waiting.values())))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                result = self._receive(waiting[pipe], pipe)
                results[waiting[pipe]] = result
                if isinstance(result, Exception | Died):
                    self.deadline = min(self.deadline, time.monotonic() + max(GRACE, self.timeout / 2))
        return [results[rank] for rank in range(self.n)]

    def end(self) -> None:
        for descriptor in (self.hold_write, self.hold_read, self.port_write, self.port_read):
            os.close(descriptor)
        for pid in self.pids:
            if pid:
                _kill(pid)
        for pipe in self.pipes:
            pipe.close()
        self.traces.cleanup()
        self.store = None  # ends its thread now, not when some traceback is forgotten

    def _receive(self, rank: int, pipe: Connection) -> Any:
        try:
            result, note = pickle.loads(pipe.recv_bytes())
        except EOFError:
            _, status = os.waitpid(self.pids[rank], 0)
            self.pids[rank] = 0
            code = os.waitstatus_to_exitcode(status)
            return Died(signal=-code) if code < 0 else Died(signal=0, code=code)
        if isinstance(result, Exception):
            result.__notes__ = [note]
            self.failed.append(rank)
        return result

    def _where(self, late: list[int]) -> str:
        for rank in late:
            os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.3)
        lines = [f"{len(late)} of {self.n} ranks did not end in time ({self.timeout:g} s)."]
        for rank in late:
            trace = (Path(self.traces.name) / str(rank)).read_text()
            trace = "\n".join(
                takewhile(lambda line: __file__ not in line, trace.splitlines())
            )  # above: who called forks
            lines.append(f"rank {rank} was at:\n{trace or '  (it did not answer: stopped?)'}")
        return "\n".join(lines)

    def _child(self, rank: int, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> NoReturn:
        code = 1
        # What the parent left behind must not be collected here: stores and groups would wait for threads that only
        # the parent has.
        gc.freeze()
        try:
            os.close(self.hold_write)
            os.close(self.port_write)
            trace = (Path(self.traces.name) / str(rank)).open("w")
            faulthandler.register(signal.SIGUSR1, file=trace, all_threads=False)
            result = self._result(rank, function, args)
            pipe.send_bytes(_pickled(result))
            if not isinstance(result, Exception):
                os.read(self.hold_read, 1)  # until all have ended: closing a socket early could cut a peer off
                code = 0
        finally:
            os._exit(code)

    def _result(self, rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            port = os.read(self.port_read, 4)
            if not port:
                raise EOFError("the parent gave up before all ranks were forked")
            store = store_client.connect("127.0.0.1", int.from_bytes(port, "big"), self.timeout)
            channel = comm.connect(store, rank, self.n, timeout=self.timeout)
            return function(channel, *args)
        except Exception as error:
            error.add_note(f"raised in rank {rank}:\n{traceback.format_exc()}")
            return error


def _pickled(result: Any) -> bytes:
    """(`result`, traceback), or the error that says why it cannot travel."""
    try:
        if not isinstance(result, Exception):
            return pickle.dumps((result, ""))
        data = pickle.dumps((result, result.__notes__[-1]))
        pickle.loads(data)  # some exceptions pickle and do not unpickle
        return data
    except Exception as error:
        if isinstance(result, Exception):
            return pickle.dumps((RuntimeError(f"{type(result).__name__}: {result}"), result.__notes__[-1]))
        return pickle.dumps((TypeError(f"the result of a rank cannot travel back: {error}"), ""))


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
