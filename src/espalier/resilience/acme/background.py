"""Processes that live off what others leave: nice 19, the idle class of disk access, a session of the least weight.

Nice 19 has 15 of the 1024 parts of an ordinary process (sched(7)): where training wants all of a core it keeps 98.6 %.
SCHED_IDLE would leave it 99.7 %, but then a watch beside a busy run would take hours to import its libraries; at nice
19 that still takes minutes, so a watch starts at nice 10 (110 parts beside 1024) and steps back once it can work. Each
worker is a session of its own, since with automatic grouping niceness counts only within a session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1  # prctl(2): the kernel kills a worker whose evaluator is gone


STARTING, LOWEST = 10, 19
"""Niceness of a watch while it imports its libraries, and from then on."""


def step_back(niceness: int = LOWEST) -> None:
    """Gives this process the lowest priority there is, or that; what the system does not have is left out."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError, AttributeError, psutil.Error):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


def _lower_session() -> None:
    """The same for this process's session, which must be its own; without automatic grouping there is nothing to do."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")


class Process:
    """A forked process and the pipe to it. Has state: whether it lives.

    Forking is safe only while this process has run nothing on several threads and has not touched a GPU.
    """

    def __init__(self, live: Callable[[Connection], None]) -> None:
        self.pipe, theirs = Pipe()
        """To its copy and nobody else. What goes through it is bytes, never a pickle."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _live(live, theirs, parent)
        theirs.close()
        self._ended = False

    def stopped(self) -> bool:
        """Whether somebody stopped it (SIGSTOP), so that it will answer nobody."""
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def end(self) -> int:
        """Kills it, unless it has ended by itself; its exit status, negative for a signal."""
        if self._ended:
            return 0
        self._ended = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.pipe.close()
        return os.waitstatus_to_exitcode(status)


def _live(live: Callable[[Connection], None], pipe: Connection, parent: int) -> None:
    """The whole life of the forked process; does not return."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before the kernel knew what to do then
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        step_back()
        _lower_session()
        live(pipe)
        code = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the evaluator is gone
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # Not sys.exit: the parent's exit handlers and buffers are not this process's to run.
        os._exit(code)
