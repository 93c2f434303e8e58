"""A gate before a store: who knows the token of the run gets through, and of nobody else does a byte reach it."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

import pytest
from abroad import TOKEN, Abroad
from struck import recipe_of, same

from espalier.comm import store_client
from espalier.launch.hosts import store_gate, supervisor_protocol
from espalier.launch.ranks.store_server import near, relay
from espalier.train.rank_spec import RankSpec
from many_ranks.faults import Fault
from store_process import end


class Guarded:
    """A gate before what takes the store's place and keeps what reaches it. Has state: that."""

    def __init__(self) -> None:
        self.door, self.store = (socket.create_server(("127.0.0.1", 0), backlog=512) for _ in range(2))
        self.came: list[bytes] = []
        for live in (lambda: store_gate.guard(self.door, self.store.getsockname()[1], TOKEN), self._keep):
            threading.Thread(target=live, daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        """Of the gate."""
        host, port = self.door.getsockname()
        return host, port

    def visit(self) -> socket.socket:
        """A connection to the gate."""
        return socket.create_connection(self.address, 10.0)

    def admits(self) -> bool:
        """Whether one who knows the token reaches the store, and is alone there."""
        before, way = len(self.came), relay(*self.address, TOKEN)
        try:
            with socket.create_connection(("127.0.0.1", way.port), 10.0) as one:
                one.sendall(b"good morning")
                one.shutdown(socket.SHUT_WR)
                return one.recv(100) == b"and to you" and self.came[before:] == [b"good morning"]
        finally:
            end(way)

    def _keep(self) -> None:
        while True:
            with self.store.accept()[0] as one:
                self.came.append(one.recv(100))
                one.sendall(b"and to you")


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Guarded:
    monkeypatch.setattr(store_gate, "SECONDS", 1.0)
    return Guarded()


def proved(line: socket.socket, token: str, who: str = "visitor") -> bytes:
    """An answer to the challenge that comes on `line`."""
    challenge, own = line.recv(32, socket.MSG_WAITALL), secrets.token_bytes(32)
    return own + store_gate.code(token, f"gate: {who}", challenge + own)


def chatters(guarded: Guarded, line: socket.socket) -> None:
    line.sendall(os.urandom(1000))


def knows_another_token(guarded: Guarded, line: socket.socket) -> None:
    line.sendall(proved(line, "of another run"))


def answers_as_the_gate_would(guarded: Guarded, line: socket.socket) -> None:
    line.sendall(proved(line, TOKEN, "gate"))


def says_again_what_was_right(guarded: Guarded, line: socket.socket) -> None:
    with guarded.visit() as before:
        answer = proved(before, TOKEN)
        before.sendall(answer)
        assert len(before.recv(32, socket.MSG_WAITALL)) == 32, "it was right then"
    while not guarded.came:
        time.sleep(0.01)
    guarded.came.clear()
    line.sendall(answer)


def sends_one_byte(guarded: Guarded, line: socket.socket) -> None:
    line.sendall(b"x")


def is_silent(guarded: Guarded, line: socket.socket) -> None:
    return


@pytest.mark.parametrize(
    "does",
    [
        chatters,
        knows_another_token,
        answers_as_the_gate_would,
        says_again_what_was_right,
        sends_one_byte,
        is_silent,
    ],
)
def test_a_stranger_is_turned_away_soon_and_reaches_nothing(
    guarded: Guarded, does: Callable[[Guarded, socket.socket], None]
) -> None:
    with guarded.visit() as line:
        does(guarded, line)
        heard, begun = b"", time.monotonic()
        try:
            while part := line.recv(100):
                heard += part
        except ConnectionResetError:
            pass
        assert time.monotonic() - begun < 30, "a visitor's own patience is longer"
        assert len(heard) <= 32, "its challenge at most"
    assert guarded.came == []
    assert guarded.admits()


def test_who_is_slow_has_no_more_time_than_who_is_silent(guarded: Guarded) -> None:
    def ended_between(least: int, seconds: float) -> bool:
        """Whether the line ended after more than so many bytes (64 would be an answer), and within `seconds`."""
        begun = time.monotonic()
        with guarded.visit() as line:
            early = any(ended_after_a_byte(line) for _ in range(least))
            assert early or any(ended_after_a_byte(line) for _ in range(30))
        return not early and time.monotonic() - begun < seconds

    assert any(ended_between(2, 6.0) for _ in range(3)), "tried again where this machine was busy"
    assert guarded.came == []


def ended_after_a_byte(line: socket.socket) -> bool:
    try:
        line.sendall(b"x")
    except ConnectionError:
        return True
    time.sleep(0.2)
    return False


def test_many_silent_strangers_keep_nobody_out(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_gate, "SECONDS", 90.0)
    monkeypatch.setattr(store_gate, "STRANGERS", 16)
    lines = [guarded.visit() for _ in range(50)]
    begun = time.monotonic()
    assert guarded.admits()
    assert time.monotonic() - begun < 60
    left = 0
    for line in lines:
        line.settimeout(0.05)
        try:
            left += line.recv(33, socket.MSG_WAITALL) == b""
        except TimeoutError:
            left += 1
        line.close()
    assert left <= 16, "those that came first had to go"


def test_nothing_is_said_to_a_gate_that_does_not_know_the_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as false:
        way = relay("127.0.0.1", false.getsockname()[1], TOKEN)
        with socket.create_connection(("127.0.0.1", way.port), 10.0) as one:
            one.sendall(b"the parameters")
            line, _ = false.accept()
            with line:
                line.sendall(os.urandom(32))
                line.settimeout(10.0)
                assert len(line.recv(64, socket.MSG_WAITALL)) == 64
                line.sendall(os.urandom(32))
                assert line.recv(100) == b""
        end(way)


def test_the_store_is_on_loopback_alone_and_the_gate_where_others_come() -> None:
    with socket.create_server(("", 0)) as listener:
        port, descriptor = listener.getsockname()[1], os.dup(listener.fileno())
    first = near(RankSpec(0, 2, host="127.0.0.2", port=port, serves=True, listen_fd=descriptor), TOKEN)
    other = near(RankSpec(1, 2, host="127.0.0.2", port=port), TOKEN)
    assert (first.serves, first.host, other.host) == (False, "127.0.0.1", "127.0.0.1")
    assert len({first.port, other.port, port}) == 3
    for place in (first, other):
        with socket.socket() as one:
            assert one.connect_ex(("127.0.0.2", place.port)) != 0
    here, there = (supervisor_protocol.opened("127.0.0.1", place.port) for place in (first, other))
    here.set("key", "value" * 100_000)
    assert there.get("key") == b"value" * 100_000
    there.set("back", "again")
    assert here.get("back") == b"again"
    with pytest.raises(RuntimeError):
        store_client.connect("127.0.0.2", port, 2.0)


@pytest.mark.slow
def test_a_run_goes_on_while_strangers_come_and_recovers_as_ever(corpus, unbroken, tmp_path) -> None:
    run = Abroad(recipe_of(corpus), 2, tmp_path / "run", (Fault(1, 6, "kill"),), memory=1 << 26).start()
    run.reaches(2)
    lines = [socket.create_connection(("127.0.0.1", run.port), 10.0) for _ in range(20)]
    for line in lines[:10]:
        line.sendall(os.urandom(1000))
    with pytest.raises(RuntimeError):
        store_client.connect("127.0.0.1", run.port, 1.0).list_keys()
    run.finish()
    assert same(run, unbroken(2)), run.said()
    assert [event["kind"] for event in run.all("recovered") if event["kind"] != "lost"] == ["killed"]
    for line in lines:
        line.close()
