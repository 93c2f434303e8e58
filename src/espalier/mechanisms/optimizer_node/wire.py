"""Frames between workers, aggregators and optimizer nodes: TCP, authentication, sequence numbers, resends, deadlines.

A `FrameLink` carries frames in order in both directions and survives the connection under it: where that is cut, the
side that dialed dials again, and both resend from what the other has. Each opening proves on both sides that the other
knows the token of the run (HMAC-SHA-256 over both challenges, as in launch/hosts/store_gate.py) and speaks the same
version. What follows is not encrypted; header and payload carry checksums, and a frame that does not match is resent.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache
from importlib import metadata
from typing import Any

import xxhash

from espalier.plan.axes.flow_control import Pacing, ReceiveWindow, SendWindow
from espalier.recipe import serialization
from espalier.recipe.errors import DISTRIBUTION, EspalierError, PeerLost, RunFailed, UserError, from_words, words_of

VERSION = 1
"""Of the wire format. Both ends must have the same."""
_MAGIC = b"espluwu\0"
_CHALLENGE = struct.Struct("<8sI32s")
_LENGTH = struct.Struct("<I")
_PROOF = 32  # bytes of a SHA-256
_LARGEST = 1 << 20  # bytes of a greeting
_HEADER = struct.Struct("<BBIQIQIqQ")
"""FrameKind, width, layer, step, chunk, sequence number, bytes of the payload, count, the payload's checksum."""
HEADER = _HEADER.size + 8
RAW = 5
"""In place of the width of integers: the payload is float32 as it is."""
_SLICE = 1 << 18
_FIRST = 1 << 12  # bytes of a payload in one packet with the header
_WAKE = 1 << 17
_OPENING = 5.0
_FRAMES = 2
"""So many frames, or one of more than `_SLICE` bytes, are told at once, before the next heartbeat is due: the sender
waits for that with its few buffers."""
_SILENT = 4
"""Heartbeats without a word after which a peer is told to be unheard."""

Address = tuple[str, int]
Greeting = dict[str, Any]
Arrived = Callable[[], None]
"""Is called when a frame has arrived at the other side."""


@dataclass(frozen=True)
class Times:
    """Seconds of the protocol.

    Attributes:
        heartbeat: between two heartbeats.
        resend: a frame is resent where Ack has not advanced for so long.
        silence: a connection on which nothing is heard for so long is closed and dialed again.
        patience: a peer that cannot be reached for so long is given up.
        answer: a worker waits so long for what the node owes it, which other workers may delay.
        unheard: is called again and again while a peer is not heard.
        link: bytes/s that the plan knows of the link between, each way (`pacing.Pacing`); 0: nothing.
    """

    heartbeat: float = 0.05
    resend: float = 1.0
    silence: float = 10.0
    patience: float = 60.0
    answer: float = 600.0
    unheard: Callable[[], object] = float
    link: float = 0.0

    def to(self, addresses: Sequence[Address]) -> Times:
        """Those of a peer at the first of `addresses`. Behind it are its standbys: they go on where it was silent."""
        return replace(self, patience=self.silence) if len(addresses) > 1 else self


@dataclass(frozen=True)
class Frame:
    """One message. `width`: bytes of a value in the payload; `count`: a number that goes with it."""

    kind: int
    layer: int = 0
    step: int = 0
    chunk: int = 0
    width: int = 0
    count: int = 0
    payload: memoryview = field(default_factory=lambda: memoryview(b""))

    @property
    def content(self) -> Any:
        """What was `packed` into the payload."""
        return serialization.loads(self.payload)


def packed(content: Any) -> memoryview:
    """The payload with plain values."""
    return memoryview(serialization.dumps(content))


class FrameKind(IntEnum):
    """What a frame is."""

    HEARTBEAT = 0
    EXPONENTS = 1
    """Up: the largest exponents of a layer's gradient, and how many workers they are of. Down: those of all workers."""
    GRADIENT = 2
    PULL = 3
    PARAMETERS = 4
    TOTALS = 5
    """Up: what a worker adds at the end of a step. Down: the sums, and the norms of the gradients."""
    MOVE = 6
    LEAVE = 7
    ERROR = 8
    STATE = 9
    """From a node to its standby: an entry of its state, or (width 0) the end of them."""


class Peer:
    """The other side of a session, and what is done with its frames, in the reading threads of its
    links. Has state: the links, `control` and `push`."""

    def __init__(self) -> None:
        self.links: dict[str, FrameLink] = {}

    def buffer(self, frame: Frame, size: int) -> memoryview:
        """Memory for the payload of `size` bytes that comes with `frame`."""
        return memoryview(bytearray(size))

    def deliver(self, frame: Frame) -> None:
        """`frame` is here whole, once, in the order in which it was sent."""

    def lost(self, error: EspalierError) -> None:
        """A link has ended."""

    def close(self) -> None:
        """Ends both links at once."""
        for link in self.links.values():
            link.close()


class FrameLink:
    """Frames in order, in both directions, over one connection after another. Has state; safe among threads.

    Args:
        names: of this side and of the other, for messages.
        receiver: takes what arrives.
        times: see there.
        dial: opens a connection (again): the socket, and the number that the other side expects. None: the other side
            dials, and `attach` is called.
        first: numbers of the first frame in either direction, out and in.

    Attributes:
        room: frames that may always come beyond those that have arrived. None: those that `grant` allows.
        error: why it has ended.
    """

    def __init__(
        self,
        names: tuple[str, str],
        receiver: Peer,
        times: Times,
        dial: Callable[[FrameLink], tuple[socket.socket, int]] | None = None,
        *,
        first: tuple[int, int],
    ) -> None:
        self.me, self.peer = names
        self.receiver = receiver
        self.times = times
        self._dial = dial
        self.sending = SendWindow(first[0])
        self.receiving = ReceiveWindow(first[1])
        self.room: int | None = 64
        self.error: EspalierError | None = None
        self.bytes_sent = self.bytes_received = 0
        self._unacknowledged: deque[tuple[int, Frame, Arrived | None]] = deque()
        self._changed = threading.Condition()
        self._one_reader = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._socket: socket.socket | None = None
        self._pacing = Pacing(times.link)
        self._gap = False
        self._announced = (-1, -1)
        self._since = self._advanced = self._heard_at = time.monotonic()
        self._next_beat = 0.0

    def start(self) -> FrameLink:
        """Begins to send."""
        self._begin(f"{self.me} to {self.peer}", self._write)
        return self

    def _begin(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        self._threads[name] = threading.Thread(target=work, args=arguments, name=name, daemon=True)
        self._threads[name].start()

    def join(self) -> None:
        """Returns when its threads have ended, after `close`: one inside torch would abort a process that ends."""
        for thread in list(self._threads.values()):
            thread.join(self.times.silence)

    # What others call

    def send(self, frame: Frame, done: Arrived | None = None, *, wait: float | None = None) -> int:
        """Sends `frame` as soon as the other side has room for it, and returns its sequence number. The payload must
        stay as it is until `done` is called: the frame has arrived."""
        with self._changed:
            allowed = self.times.patience if wait is None else wait
            what = f"room for a frame (sequence number {self.sending.following}, Credit {{}})"
            self._wait(lambda: self.sending.following < self.sending.credit, what, allowed)
            return self.post(frame, done)

    def post(self, frame: Frame, done: Arrived | None = None) -> int:
        """As `send`, without waiting: the frame is kept until there is room."""
        with self._changed:
            if self.error is not None:
                raise self.error
            number = self.sending.add()
            self._unacknowledged.append((number, frame, done))
            self._changed.notify_all()
            return number

    def grant(self, credit: int) -> None:
        """The other side may send all frames below `credit`."""
        with self._changed:
            self.receiving.grant(credit)
            self._changed.notify_all()

    def attach(self, connection: socket.socket, expected: int) -> None:
        """Goes on over `connection`; the other side expects number `expected`."""
        connection.settimeout(self.times.silence)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            old = self._socket
            self._socket = connection
            done = self._heard(expected, 0)
            self.sending.resend()
            self._announced = (-1, -1)
            self._since = time.monotonic()
            self._changed.notify_all()
        hang_up(old)
        for call in done:
            call()
        self._begin(f"{self.me} from {self.peer}", self._read, connection)

    def close(self, error: EspalierError | None = None) -> None:
        """Ends it, for both sides."""
        with self._changed:
            self.error = self.error or error or RunFailed(f"{self.me} has closed its connection to {self.peer}.")
            old = self._socket
            self._socket = None
            self._unacknowledged.clear()
            self._changed.notify_all()
        hang_up(old)

    def drained(self, wait: float | None = None) -> None:
        """Waits until all that was sent has arrived."""
        with self._changed:
            what = f"the arrival of frames up to {self.sending.following} (Ack {self.sending.acked})"
            self._wait(lambda: self.sending.acked == self.sending.following, what, wait or self.times.patience)

    def _wait(self, ready: Callable[[], bool], what: str, seconds: float) -> None:
        if not self._changed.wait_for(lambda: ready() or self.error is not None, seconds):
            raise late(self.me, f"{self.peer}: {what.format(self.sending.credit)}", seconds)
        if not ready() and self.error is not None:
            raise self.error

    @property
    def connected(self) -> bool:
        """Whether there is a connection under it now."""
        return self._socket is not None

    # Threads

    def _write(self) -> None:
        while self.error is None:
            with self._changed:
                connection = self._socket
            if connection is None or time.monotonic() > self._heard_at + _SILENT * self.times.heartbeat:
                self.times.unheard()
            if connection is None:
                self._connect()
                continue
            outgoing: list[tuple[Frame, int]] = []
            with self._changed:
                self._rest()
                if self._socket is not connection or self.error is not None:
                    continue
                if (beat := self._beat()) is not None:
                    outgoing.append((beat, 0))
                if self.sending.sendable():
                    if self.sending.cursor == self.sending.acked:  # nothing was outstanding
                        self._advanced = time.monotonic()
                    number, frame, _ = self._unacknowledged[self.sending.cursor - self._unacknowledged[0][0]]
                    outgoing.append((frame, number))
                    self.sending.cursor += 1
            try:
                for frame, number in outgoing:
                    self._put(connection, frame, number)
            except OSError:
                self._broken(connection)

    def _rest(self) -> None:
        """Waits until there is something to send, at most until the next heartbeat. Also notices lost frames."""
        now = time.monotonic()
        outstanding = self.sending.acked < self.sending.cursor
        if outstanding and now - self._advanced > self.times.resend:
            self.sending.resend()
            self._advanced = now
        if not self.sending.sendable() and not self._due(now):
            self._changed.wait(max(self._next_beat - now, 0.001))

    def _due(self, now: float) -> bool:
        window = self.receiving
        many = window.expected - self._announced[0] >= _FRAMES
        return now >= self._next_beat or self._gap or many or (self.room is None and window.credit > self._announced[1])

    def _beat(self) -> Frame | None:
        now = time.monotonic()
        window = self.receiving
        if self.room is not None:
            window.grant(window.expected + self.room)
        if not self._due(now):
            return None
        gap = self._gap
        self._gap = False
        self._announced = (window.expected, window.credit)
        self._next_beat = now + self.times.heartbeat
        return Frame(FrameKind.HEARTBEAT, step=window.expected, count=window.credit, width=int(gap))

    def _put(self, connection: socket.socket, frame: Frame, number: int) -> None:
        payload = frame.payload
        sum_ = xxhash.xxh3_64_intdigest(payload) if payload.nbytes else 0
        place = frame.kind, frame.width, frame.layer, frame.step, frame.chunk
        head = _HEADER.pack(*place, number, payload.nbytes, frame.count, sum_)
        head += xxhash.xxh3_64_digest(head)
        if payload.nbytes > _SLICE:
            self._pacing.sends(connection, number)
        connection.sendall(head + payload[:_FIRST])
        sent = _FIRST
        while sent < payload.nbytes:  # the timeout of a socket is then that of a slice's beginning
            sent += connection.send(payload[sent : sent + _SLICE])
        self.bytes_sent += len(head) + payload.nbytes

    def _read(self, connection: socket.socket) -> None:
        try:
            with self._one_reader:
                while self._socket is connection:
                    self._receive(connection)
        except OSError:
            self._broken(connection)
        except EspalierError as error:
            self.fail(error)

    def _receive(self, connection: socket.socket) -> None:
        head = _exactly(connection, bytearray(HEADER))
        if xxhash.xxh3_64_digest(head[:-8]) != head[-8:]:
            raise OSError("a damaged header")  # what follows cannot be told apart: over a new connection
        kind, width, layer, step, chunk, number, size, count, sum_ = _HEADER.unpack(head[:-8])
        self.bytes_received += HEADER + size
        self._heard_at = time.monotonic()
        if kind == FrameKind.HEARTBEAT:
            self._heartbeat(step, count, bool(width))
            return
        frame = Frame(kind, layer, step, chunk, width, count)
        accepted = self.receiving.accepts(number)
        if accepted:
            memory = self.receiver.buffer(frame, size) if size else frame.payload
            _exactly(connection, memory)
        else:
            _drain(connection, size)
        if not accepted or (size and xxhash.xxh3_64_intdigest(memory) != sum_):
            with self._changed:
                self._gap = number >= self.receiving.expected
                self._changed.notify_all()
            return
        self.receiver.deliver(replace(frame, payload=memory))
        with self._changed:
            self.receiving.arrived()
            if size > _SLICE:
                self._announced = (-1, -1)  # is told at once
            if self._due(time.monotonic()):
                self._changed.notify_all()

    def _heartbeat(self, ack: int, credit: int, gap: bool) -> None:
        with self._changed:
            done = self._heard(ack, credit)
            if gap and self.sending.cursor > self.sending.acked:
                self.sending.resend()
            self._changed.notify_all()
        for call in done:
            call()

    def _heard(self, ack: int, credit: int) -> list[Arrived]:
        """Takes what the other side told. Returns what is to be called, without the lock, as frames have arrived."""
        done = []
        if self.sending.heard(ack, credit):
            self._advanced = time.monotonic()
            while self._unacknowledged and self._unacknowledged[0][0] < self.sending.acked:
                number, frame, call = self._unacknowledged.popleft()
                if frame.payload.nbytes > _SLICE:
                    self._pacing.arrived(number, frame.payload.nbytes)
                done.append(call)
        return [call for call in done if call is not None]

    def _broken(self, connection: socket.socket) -> None:
        with self._changed:
            if self._socket is connection:
                self._socket = None
                self._since = time.monotonic()
            self._changed.notify_all()
        hang_up(connection)

    def _connect(self) -> None:
        """One attempt to reach the other side, or some waiting for it."""
        if time.monotonic() - self._since > self.times.patience:
            self.fail(unreachable(self.me, self.peer, self.times.patience))
            return
        try:
            if self._dial is not None:
                self.attach(*self._dial(self))
                return
        except OSError:
            pass
        except EspalierError as error:
            self.fail(error)
            return
        with self._changed:
            if self._socket is None and self.error is None:
                self._changed.wait(min(self.times.heartbeat * 4, 1.0))

    def fail(self, error: EspalierError) -> None:
        """Ends it because of `error`."""
        if self.error is None:
            self.close(error)
            self.receiver.lost(error)


def late(who: str, what: str, seconds: float) -> PeerLost:
    """The error for a wait that took too long."""
    return PeerLost(
        f"{who} has waited {seconds:g} s for {what}.",
        why="the other side answers heartbeats, and one that it needs does not come",
        do="look for a worker that has stopped, or a disk of the node that is slow or full",
    )


def unreachable(who: str, peer: str, seconds: float) -> PeerLost:
    """The error for a peer that is gone."""
    return PeerLost(
        f"{who} could not reach {peer} for {seconds:g} s.",
        why="its process has ended or stopped, or the network between is cut",
        do="start it again on the same files and address, or give the run a standby",
    )


def hang_up(connection: socket.socket | None) -> None:
    """Ends a connection, if there is one."""
    if connection is not None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def _exactly(connection: socket.socket, memory: bytearray | memoryview) -> Any:
    view = memoryview(memory)
    at = 0
    while at < view.nbytes:
        if view.nbytes > _SLICE:  # woken for each slice, not for each packet
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(_WAKE, view.nbytes - at))
        count = connection.recv_into(view[at:])
        if not count:
            raise ConnectionResetError("the other side has hung up")
        at += count
    if view.nbytes > _SLICE:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    return memory


def _drain(connection: socket.socket, size: int) -> None:
    scratch = memoryview(bytearray(min(size, _SLICE)))
    for at in range(0, size, _SLICE):
        _exactly(connection, scratch[: size - at])


# The opening of a connection


def dial(address: Address, token: str, greeting: Greeting, seconds: float) -> tuple[socket.socket, Greeting]:
    """A connection to `address` on which both sides have proved themselves, and what the other side answers.

    `seconds`: each step of it may take so long.

    Raises:
        OSError: nobody answers there.
        UserError: it speaks another version, knows another token, or refuses this side for another reason.
    """
    connection = socket.create_connection(address, min(seconds, _OPENING))
    place = f"{address[0]}:{address[1]}"
    try:
        magic, version, challenge = _CHALLENGE.unpack(_exactly(connection, bytearray(_CHALLENGE.size)))
        if magic != _MAGIC:
            raise UserError(f"What listens at {place} is no optimizer node.", do="another address or port")
        nonce = secrets.token_bytes(32)
        connection.sendall(_CHALLENGE.pack(_MAGIC, VERSION, nonce))
        if version != VERSION:
            theirs = f"version {version} of the protocol, this process version {VERSION}"
            raise _versions(f"The optimizer node at {place} speaks {theirs}.")
        _say(connection, _sealed(token, "visitor", challenge + nonce, greeting | {"espalier": release()}))
        answer = _hear(connection)
        if not answer:
            raise UserError(
                f"The optimizer node at {place} refuses this process.",
                why="it was started with another token",
                do="give nodes and workers of one run the same token",
            )
        reply = _opened(token, "node", nonce + challenge, answer)
        if reply is None:
            raise UserError(f"What listens at {place} does not know the token of this run.", do="check the address")
        if "error" in reply:
            raise from_words(reply["error"])
    except BaseException:
        hang_up(connection)
        raise
    return connection, reply


def admit(connection: socket.socket, token: str, answer: Callable[[Greeting], Greeting]) -> Greeting | None:
    """The greeting of who has dialed, answered by `answer`; None where he does not know the token, or speaks another
    version: then he was told so. What `answer` raises is raised on the other side."""
    connection.settimeout(_OPENING)
    challenge = secrets.token_bytes(32)
    connection.sendall(_CHALLENGE.pack(_MAGIC, VERSION, challenge))
    magic, version, other = _CHALLENGE.unpack(_exactly(connection, bytearray(_CHALLENGE.size)))
    if (magic, version) != (_MAGIC, VERSION):
        return None
    greeting = _opened(token, "visitor", challenge + other, _hear(connection))
    if greeting is None:
        _say(connection, b"")
        return None
    try:
        if (theirs := greeting.get("espalier", "an older version")) != release():
            raise _versions(f"This process runs espalier {theirs}, the optimizer node espalier {release()}.")
        reply = answer(greeting)
    except EspalierError as error:
        reply = {"error": words_of(error)}
    _say(connection, _sealed(token, "node", other + challenge, reply))
    return None if "error" in reply else greeting | {"reply": reply}


@cache
def release() -> str:
    """The version of this package."""
    return metadata.version(DISTRIBUTION)


def _versions(what: str) -> UserError:
    return UserError(what, do="install the same version of espalier on all machines of the run")


def _sealed(token: str, who: str, challenges: bytes, content: Greeting) -> bytes:
    """`content`, behind a proof that this side knows the token."""
    text = serialization.dumps(content)
    return _proof(token, who, challenges + text) + text


def _opened(token: str, who: str, challenges: bytes, sealed: bytes) -> Greeting | None:
    """What the other side has sealed; None: it does not know the token."""
    proof = sealed[:_PROOF]
    text = sealed[_PROOF:]
    known = hmac.compare_digest(proof, _proof(token, who, challenges + text))
    return serialization.loads(text) if known else None


def _proof(token: str, who: str, text: bytes) -> bytes:
    return hmac.digest(token.encode(), f"luwu {who}".encode() + b"\0" + text, "sha256")


def _say(connection: socket.socket, text: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(text)) + text)


def _hear(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(connection, bytearray(_LENGTH.size)))
    if length > _LARGEST:
        raise OSError("a greeting that is too long")
    return bytes(_exactly(connection, bytearray(length)))
