"""Authentication gate in front of the rendezvous store, and the relay that passes it from other hosts. No torch.

A TCPStore asks nobody who he is. So on several hosts it listens on loopback alone, and the port that other hosts know
is a gate's: who comes there has to prove that he knows the random token of the run before one byte of his reaches the
store. On each other host a relay listens on loopback, proves it for whoever connects there, and passes bytes on.

The gate sends a challenge; the visitor answers with one of his own and an HMAC (RFC 2104, SHA-256) under the token over
who he is and both challenges; the gate answers likewise, so that a visitor knows the gate too. All have a fixed length.
What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import NoReturn

SECONDS = 5.0
"""How long a visitor may take to prove that he knows the token."""
STRANGERS = 256
"""How many may be at it at once; one more, and the one that came first has to go."""
_OPENING = 30.0
"""How long the gate may take to begin: its port listens before its store does (seconds)."""
_SIZE = 32  # of a challenge, and of a SHA-256
_STACK = 1 << 18  # bytes; a connection has two threads
_CHUNK = 1 << 16


def guard(door: socket.socket, store: int, token: str) -> NoReturn:
    """Lets those who know `token` from `door`, which listens, to the port `store` of loopback."""
    strangers = _Strangers()

    def receive(visitor: socket.socket) -> None:
        strangers.add(visitor)
        try:
            known = _admits(visitor, token)
        finally:
            strangers.remove(visitor)
        if known:
            with socket.create_connection(("127.0.0.1", store), SECONDS) as line:
                _relay(visitor, line)

    _each(door, receive)


def forward(door: socket.socket, gate: tuple[str, int], token: str) -> NoReturn:
    """Passes those who come to `door`, which listens on loopback, through the gate at that address."""

    def receive(visitor: socket.socket) -> None:
        with socket.create_connection(gate, SECONDS) as line:
            if _enters(line, token):
                _relay(visitor, line)

    _each(door, receive)


class _Strangers:
    """Visitors that have not proved anything yet. Has state: those, the oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._there: dict[socket.socket, None] = {}

    def add(self, visitor: socket.socket) -> None:
        """Another one, in place of the oldest where there are too many."""
        with self._lock:
            self._there[visitor] = None
            if len(self._there) > STRANGERS:
                oldest = next(iter(self._there))
                del self._there[oldest]
                _hang_up(oldest)

    def remove(self, visitor: socket.socket) -> None:
        """Of that one it is known now."""
        with self._lock:
            self._there.pop(visitor, None)


def _admits(visitor: socket.socket, token: str) -> bool:
    """Whether `visitor` knows the token; then he is shown that this side does."""
    challenge = secrets.token_bytes(_SIZE)
    visitor.settimeout(SECONDS)
    visitor.sendall(challenge)
    answer = _exactly(visitor, 2 * _SIZE, SECONDS)
    both = challenge + answer[:_SIZE]
    if not hmac.compare_digest(answer[_SIZE:], _proof(token, "visitor", both)):
        return False
    visitor.sendall(_proof(token, "gate", both))
    return True


def _enters(line: socket.socket, token: str) -> bool:
    """Proves to the gate at the other end of `line` that this side knows the token; whether the gate does."""
    challenge = _exactly(line, _SIZE, _OPENING)
    own = secrets.token_bytes(_SIZE)
    line.sendall(own + _proof(token, "visitor", challenge + own))
    return hmac.compare_digest(_exactly(line, _SIZE, SECONDS), _proof(token, "gate", challenge + own))


def _proof(token: str, who: str, challenges: bytes) -> bytes:
    return hmac.digest(token.encode(), f"gate: {who}".encode() + b"\0" + challenges, "sha256")


def _exactly(line: socket.socket, size: int, seconds: float) -> bytes:
    """The next `size` bytes. Raises OSError where they do not come within so long."""
    deadline, found = time.monotonic() + seconds, b""
    while len(found) < size:
        line.settimeout(max(1e-3, deadline - time.monotonic()))
        part = line.recv(size - len(found))
        if not part or time.monotonic() > deadline:
            raise ConnectionError("it ended before its time")
        found += part
    return found


def _each(door: socket.socket, receive: Callable[[socket.socket], None]) -> NoReturn:
    """Calls `receive` with whoever comes, each in a thread of his own, and hangs up after it."""

    def meet(visitor: socket.socket) -> None:
        with contextlib.suppress(OSError), visitor:
            receive(visitor)

    threading.stack_size(_STACK)
    door.settimeout(None)
    while True:
        try:
            visitor, _ = door.accept()
        except OSError:  # he went away, or there are no descriptors left for now
            time.sleep(0.05)
            continue
        try:
            threading.Thread(target=meet, args=(visitor,), daemon=True).start()
        except RuntimeError:  # no room for another thread
            visitor.close()


def _relay(one: socket.socket, other: socket.socket) -> None:
    """Passes bytes on in both directions until both have ended."""
    for line in (one, other):
        line.settimeout(None)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = threading.Thread(target=_pass_on, args=(other, one), daemon=True)
    back.start()
    _pass_on(one, other)
    back.join()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(_CHUNK):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        _hang_up(source)
        _hang_up(sink)


def _hang_up(line: socket.socket) -> None:
    """Ends a connection, also under a thread that waits for it."""
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
