"""Members as processes that tests may kill."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from member import life

from espalier import tcpstore

FORK = multiprocessing.get_context("fork")


class Member:
    """A member as a process that was forked. Has state: what it said."""

    def __init__(self, *args: Any, returns: bool = False) -> None:
        self.args = args
        reader, writer = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=life, args=(*args, returns, writer.send), daemon=True)
        self.process.start()
        writer.close()
        self.reader, self.said = reader, [""]

    def again(self) -> Member:
        """A new process in the place of this one, which was ended: it comes back."""
        return Member(*self.args, returns=True)

    def reach(self, line: str) -> None:
        """Returns when it says `line`."""
        while not self.said[-1].startswith(line):
            assert self.reader.poll(60), f"never said {line!r}"
            self.said.append(self.reader.recv())

    def last(self, code: int = 0) -> str:
        """What it says last, before it ends with `code`."""
        with contextlib.suppress(EOFError):
            while self.reader.poll(60):
                self.said.append(self.reader.recv())
        self.process.join(30)
        assert self.process.exitcode == code, self.said[-1]
        return self.said[-1]

    def send(self, number: int) -> None:
        """A signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def crew(count: int, method: str, rounds: int, pause: float = 0.01) -> Iterator[list[Member]]:
    """Members as processes; ended when the block is left."""
    members: list[Member] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        port = listener.getsockname()[1]
        for number in range(count):
            members.append(Member(port, (number, count), method, rounds, pause))
        store = tcpstore.connect("127.0.0.1", port, 30.0, is_master=True, master_listen_fd=listener.detach())
    try:
        yield members
    finally:
        for one in members:
            one.send(signal.SIGCONT) if one.process.is_alive() else None
            one.process.kill()
            one.process.join()
            one.reader.close()
        del store


@contextmanager
def crew_of_a_served_store(count: int, method: str, rounds: int) -> Iterator[tuple[list[Member], Any]]:
    """Members whose store is a process of its own, which is given too; ended when the block is left."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        server = FORK.Process(target=_serve, args=(listener,), daemon=True)
        server.start()
        port = listener.getsockname()[1]
    members = [Member(port, (number, count), method, rounds, 0.01) for number in range(count)]
    try:
        yield members, server
    finally:
        for process in (server, *(one.process for one in members)):
            process.kill()
            process.join()
        for one in members:
            one.reader.close()


def _serve(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    store = tcpstore.connect("127.0.0.1", port, 30.0, is_master=True, master_listen_fd=listener.detach())
    signal.pause()
    del store
