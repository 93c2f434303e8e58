"""Every port with a password, and what strangers do there: they reach nothing, and keep nobody out."""

from __future__ import annotations

import os
import resource
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import made
import pytest
from nodes import FAST, job, node

from espalier.cli import chat_server
from espalier.launch.hosts import store_gate
from espalier.machine.network_interface import MeetingSocket
from espalier.mechanisms.optimizer_node import wire
from espalier.mechanisms.optimizer_node.aggregator import Aggregator
from espalier.track.live_report import Live
from espalier.train.workload_row import Sampling, Writer

TOKEN, GUESSED = "0123456789abcdef", "f" * 16
WRITER = Writer(lambda asked: [1], lambda *_: iter(()), 99)
LINGER = struct.pack("ii", 1, 0)
"""Of a connection that is reset when it is closed."""


class Port(Protocol):
    """Where something listens that asks for a password."""

    address: tuple[str, int]
    secret: bytes
    """What those alone hear who know it."""
    challenges: bool
    """Whether each answer is good once."""
    oversized: bytes
    """Begins a message that is far too long."""

    def opening(self, line: socket.socket, token: str) -> bytes:
        """What one who has `token` says first."""


class Gate:
    """In front of a store."""

    secret, challenges, oversized = b"and to you", True, b""

    def __init__(self, opened: ExitStack) -> None:
        door, store = (opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024)) for _ in range(2))
        self.address, port = door.getsockname(), store.getsockname()[1]
        for work in (lambda: store_gate.guard(door, port, TOKEN), lambda: self._answer(store)):
            threading.Thread(target=work, daemon=True).start()

    def _answer(self, store: socket.socket) -> None:
        with suppress(OSError):
            while True:
                with store.accept()[0] as visitor:
                    visitor.sendall(self.secret)

    def opening(self, line: socket.socket, token: str) -> bytes:
        challenge, nonce = line.recv(32, socket.MSG_WAITALL), secrets.token_bytes(32)
        return nonce + store_gate.code(token, "gate: visitor", challenge + nonce)


class Wire:
    """Of an optimizer node, or an aggregator before one."""

    secret, challenges = b"incarnation", True
    oversized = wire._CHALLENGE.pack(wire._MAGIC, wire.VERSION, bytes(32)) + b"\xff" * 4

    def __init__(self, opened: ExitStack, aggregates: bool) -> None:
        _, self.address = opened.enter_context(node(job()))
        if aggregates:
            door = socket.create_server(("127.0.0.1", 0))
            aggregator = Aggregator(job(), ([self.address], TOKEN), door, 0, FAST).start()
            opened.callback(aggregator.close)
            self.address = door.getsockname()

    def opening(self, line: socket.socket, token: str) -> bytes:
        challenge = line.recv(wire._CHALLENGE.size, socket.MSG_WAITALL)[-32:]
        nonce, greeting = secrets.token_bytes(32), {"ask": "status", "espalier": wire.release()}
        text = wire._sealed(token, "visitor", challenge + nonce, greeting)
        return wire._CHALLENGE.pack(wire._MAGIC, wire.VERSION, nonce) + wire._LENGTH.pack(len(text)) + text


class Report:
    """`report --serve`."""

    secret, challenges, oversized = b"<script>", False, b"GET /" + b"x" * (1 << 17)

    def __init__(self, opened: ExitStack, folder: Path) -> None:
        server = opened.enter_context(Live(made.make(folder, 2)))
        self.address, self.path = server.server_address, server.path
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        opened.callback(server.shutdown)

    def opening(self, line: socket.socket, token: str) -> bytes:
        path = self.path if token == TOKEN else f"/{token}/"
        return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n".encode()


class Chat:
    """`predict --serve`."""

    secret, challenges = b"a model", False
    oversized = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n"

    def __init__(self, opened: ExitStack) -> None:
        uvicorn = pytest.importorskip("uvicorn")
        app = chat_server.private(chat_server.application("a model", WRITER, Sampling()), f"/{TOKEN}")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", http=chat_server.protocol()))
        door = opened.enter_context(chat_server.listening(0))
        self.address = door.getsockname()
        thread = threading.Thread(target=server.run, args=([door],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        opened.callback(thread.join)
        opened.callback(setattr, server, "should_exit", True)

    def opening(self, line: socket.socket, token: str) -> bytes:
        return f"GET /{token}/v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()


PORTS: dict[str, Callable[[ExitStack, Path], Port]] = {
    "gate of the store": lambda opened, folder: Gate(opened),
    "optimizer node": lambda opened, folder: Wire(opened, False),
    "aggregator": lambda opened, folder: Wire(opened, True),
    "live report": Report,
    "chat": lambda opened, folder: Chat(opened),
}


@pytest.fixture(params=PORTS, scope="module")
def port(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Port]:
    with ExitStack() as opened:
        yield PORTS[request.param](opened, tmp_path_factory.mktemp("run"))


def visit(port: Port) -> socket.socket:
    return socket.create_connection(port.address, 20.0)


def heard(line: socket.socket, seconds: float) -> bytes:
    """All that comes within so many seconds, or until the other side hangs up."""
    data, until = b"", time.monotonic() + seconds
    with suppress(OSError):
        while (rest := until - time.monotonic()) > 0:
            line.settimeout(rest)
            if not (part := line.recv(1 << 16)):
                break
            data += part
    return data


def serves(port: Port, tries: int = 10) -> bool:
    """Whether one who knows the password is served. Of thousands at once the oldest are sent away, this one too; then
    it comes again, as the programs do."""
    for _ in range(tries):
        with suppress(OSError), visit(port) as line:
            line.sendall(port.opening(line, TOKEN))
            data = b""
            while port.secret not in data and (part := line.recv(1 << 16)):
                data += part
            if port.secret in data:
                return True
    return False


Lines = list[socket.socket]


def knows_another_token(port: Port, lines: Lines) -> None:
    lines.append(visit(port))
    lines[0].sendall(port.opening(lines[0], GUESSED))


def repeats_an_answer_that_was_right(port: Port, lines: Lines) -> None:
    with visit(port) as line:
        answer = port.opening(line, TOKEN)
        line.sendall(answer)
        assert port.secret in heard(line, 5.0), "it was right then"
    lines.append(visit(port))
    lines[0].sendall(answer)


def drips_a_byte_at_a_time(port: Port, lines: Lines) -> None:
    lines.append(visit(port))
    for byte in port.opening(lines[0], GUESSED)[:5]:
        lines[0].sendall(bytes([byte]))
        time.sleep(0.05)


def sends_too_much(port: Port, lines: Lines) -> None:
    lines.append(visit(port))
    lines[0].settimeout(2.0)
    with suppress(OSError):
        lines[0].sendall(port.oversized)
        for _ in range(64):
            lines[0].sendall(bytes(1 << 16))


def brings_noise(port: Port, lines: Lines) -> None:
    for size in (1, 76, 80, 5000):
        lines.append(visit(port))
        with suppress(OSError):
            lines[-1].sendall(os.urandom(size))


def hangs_up_at_once(port: Port, lines: Lines) -> None:
    for _ in range(50):
        with visit(port) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)


def is_silent_two_hundred_times(port: Port, lines: Lines) -> None:
    lines.extend(visit(port) for _ in range(200))


def is_silent_ten_thousand_times(port: Port, lines: Lines) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 16_000:
        pytest.skip("this machine allows no 16,000 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for _ in range(10_000):
        with suppress(OSError):
            lines.append(visit(port))


STRANGERS: tuple[Callable[[Port, Lines], None], ...] = (
    knows_another_token,
    repeats_an_answer_that_was_right,
    drips_a_byte_at_a_time,
    sends_too_much,
    brings_noise,
    hangs_up_at_once,
    is_silent_two_hundred_times,
)


@contextmanager
def visited(port: Port, stranger: Callable[[Port, Lines], None]) -> Iterator[Lines]:
    lines: Lines = []
    try:
        stranger(port, lines)
        yield lines
    finally:
        for line in lines:
            line.close()


@pytest.mark.parametrize("stranger", [*STRANGERS, pytest.param(is_silent_ten_thousand_times, marks=pytest.mark.slow)])
def test_a_stranger_hears_nothing_and_keeps_nobody_out(
    port: Port, stranger: Callable[[Port, Lines], None], slowness: float
) -> None:
    if stranger is repeats_an_answer_that_was_right and not port.challenges:
        pytest.skip("the address is the password here: who repeats it knows it")
    threads = threading.active_count()
    with visited(port, stranger) as lines:
        assert serves(port)
        until = time.monotonic() + 3.0 * slowness  # before those that are silent are sent away
        while threading.active_count() > threads + 120:
            assert time.monotonic() < until, "each stranger has taken a thread"
            time.sleep(0.01)
        assert all(port.secret not in heard(line, 0.3) for line in lines[:4])
    assert serves(port)


@pytest.mark.parametrize("name", ["guessed.example", "127.0.0.1.guessed.example", ""])
@pytest.mark.parametrize("kind", ["live report", "chat"])
def test_a_page_that_points_its_own_name_here_reads_nothing(kind: str, name: str, tmp_path: Path) -> None:
    with ExitStack() as opened:
        port = PORTS[kind](opened, tmp_path)
        with visit(port) as line:
            line.sendall(port.opening(line, TOKEN).replace(b"Host: 127.0.0.1", b"Host: " + name.encode()))
            assert port.secret not in heard(line, 3.0)


def test_strangers_at_the_first_hosts_port_before_its_store_is_there_keep_nobody_out() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener, ExitStack() as opened:
        meeting, done = MeetingSocket(listener), threading.Event()
        thread = threading.Thread(target=meeting.answer, args=(done.is_set,))
        thread.start()
        for _ in range(20):
            line = opened.enter_context(socket.create_connection(("127.0.0.1", meeting.port), 10.0))
            with suppress(OSError):
                line.sendall(os.urandom(1000))
        with socket.create_connection(("127.0.0.1", meeting.port), 10.0) as line:
            assert line.recv(100) == meeting.word.encode()
        done.set()
        thread.join(20.0)
        assert not thread.is_alive()
