"""Serves the store where ranks meet, in a process of its own: it outlives every rank, and who forks ranks has none of
its threads, whose locks a fork would catch and never free.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Iterator

from espalier import tcpstore

_PR_SET_PDEATHSIG = 1  # prctl(2)


class Served:
    """A store that is served from now on, to the end of the process that asked for it at the latest. Has state: the
    process.

    Args:
        address: of this host, as others reach it.
        descriptor: of a socket that listens; -1: one is opened at a free port.
    """

    def __init__(self, address: str = "127.0.0.1", descriptor: int = -1) -> None:
        if descriptor < 0:
            with socket.create_server((address, 0), backlog=1024) as listener:
                self.port = listener.getsockname()[1]
                self.pid = _fork(address, self.port, listener.fileno())
            return
        with socket.socket(fileno=descriptor) as listener:
            self.port = listener.getsockname()[1]
            self.pid = _fork(address, self.port, descriptor)

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@contextlib.contextmanager
def served(wanted: bool) -> Iterator[int]:
    """The port on this machine where a store is served inside; 0 where none is `wanted`."""
    if not wanted:
        yield 0
        return
    one = Served()
    try:
        yield one.port
    finally:
        one.close()


def _fork(address: str, port: int, descriptor: int) -> int:
    asker = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)  # Ctrl-C is for who asked
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() == asker:
            _serve(address, port, descriptor)
    finally:
        os._exit(1)


def _serve(address: str, port: int, descriptor: int) -> None:
    kept = tcpstore.connect(address, port, 60.0, is_master=True, master_listen_fd=descriptor)
    tcpstore.ask_nobody()
    while kept:
        signal.pause()
