"""Members that die, fall silent or are slow, as processes: the others go on as one, and nobody waits without end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from member import life
from torch._C._distributed_c10d import HashStore, TCPStore

from espalier.comm.codecs import codec
from espalier.sync.members import Crew, Members

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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        port = listener.getsockname()[1]
        members = [Member(port, (member, count), method, rounds, pause) for member in range(count)]
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    try:
        yield members
    finally:
        for one in members:
            one.send(signal.SIGCONT) if one.process.is_alive() else None
            one.process.kill()
            one.process.join()
            one.reader.close()
        del store


@pytest.mark.parametrize(
    "method", ["co2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("diloco", "streaming_diloco"))]
)
def test_one_of_four_is_killed_and_the_rest_finish_as_one(method: str) -> None:
    with crew(4, method, 40) as members:
        members[2].reach("round 6")
        members[2].send(signal.SIGKILL)
        said = [members[index].last() for index in (0, 1, 3)]
    assert len({line.split()[0] for line in said}) == 1, "the survivors' parameters are the same bits"
    assert all("lost (2,) left (0, 1, 3)" in line for line in said)


def test_all_but_one_are_killed_and_it_finishes_alone() -> None:
    with crew(3, "co2", 30) as members:
        members[1].reach("round 4")
        members[0].send(signal.SIGKILL)
        members[1].reach("round 12")
        members[2].send(signal.SIGKILL)
        said = members[1].last()
    assert "lost (0,) left (1, 2)" in said
    assert "lost (2,) left (1,)" in said


def test_a_member_that_stands_still_is_given_up_and_told_so() -> None:
    with crew(3, "co2", 30, pause=0.005) as members:
        members[0].reach("round 5")
        members[1].send(signal.SIGSTOP)
        said = [members[index].last() for index in (0, 2)]
        assert said[0].split()[0] == said[1].split()[0]
        members[1].send(signal.SIGCONT)
        assert "Replica 1" in members[1].last(code=7)


def test_without_faults_all_are_one() -> None:
    with crew(3, "co2", 12, pause=0.0) as members:
        said = {one.last() for one in members}
    assert len(said) == 1


def test_numbers_are_shared_as_they_are() -> None:
    store, found = HashStore(), [{}, {}, {}]

    def one(member: int) -> None:
        members = Members(Crew(store, member, (0, 1, 2), timeout=10.0), codec("int4"))
        for turn in range(3):
            told = torch.tensor([member + 0.125, float(turn), 1e300], dtype=torch.float64)
            found[member] = {who: row.tolist() for who, row in members.share(told).items()}
        members.close()

    threads = [threading.Thread(target=one, args=(member,)) for member in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [{who: [who + 0.125, 2.0, 1e300] for who in range(3)}] * 3
