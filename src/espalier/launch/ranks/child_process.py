"""Fork: a child process in a process group of its own, which the kernel kills when this process ends."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # prctl(2)


def fork(live: Callable[[], int | None], name: bytes = b"") -> int:
    """Starts a child that runs `live`, and nothing of this process after it; its process ID.

    Ctrl-C in the terminal does not reach it; signals have their default actions. Forking is safe only while this
    process has run nothing on several threads and has not touched a GPU.

    Args:
        live: what it does; its result is the exit code (None: 0).
        name: as `ps -o comm` shows it; empty: this process's.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        gc.freeze()  # groups that the parent has left behind would be taken apart here, where their threads are not
        os.setpgid(0, 0)
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if name:
            libc.prctl(_PR_SET_NAME, name)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() == parent:  # else it ended before the lines above
            code = live() or 0
    finally:
        # Not sys.exit: the parent's exit handlers and buffers are not this process's to run.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
