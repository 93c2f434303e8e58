"""Members as processes that tests may kill."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from member import life

import store_process
from espalier.launch.ranks.store_server import ServerProcess, serve

FORK = multiprocessing.get_context("fork")


class Member:
    """A member as a process that was forked. Has state: what it said."""

    def __init__(self, *args: Any) -> None:
        reader, writer = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=life, args=(*args, writer.send), daemon=True)
        self.process.start()
        writer.close()
        self.reader, self.said = reader, [""]

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
    with crew_and_store(count, method, rounds, pause) as (members, _):
        yield members


@contextmanager
def crew_and_store(
    count: int, method: str, rounds: int, pause: float = 0.01
) -> Iterator[tuple[list[Member], ServerProcess]]:
    """The same, and the store where they meet."""
    store = serve()
    members = [Member(store.port, (number, count), method, rounds, pause) for number in range(count)]
    try:
        yield members, store
    finally:
        store_process.end(store)
        for one in members:
            one.process.kill()
            one.process.join()
            one.reader.close()
