"""Protocol between the supervisors of one run, over the c10d store that the first of them serves.

The first says what is to be done (`Command`), each other one how its ranks are (`Report`). A call to a store cannot be
interrupted and blocks while the link is cut, so a thread makes them: nobody else waits for the store, everybody sees
what came last and how old that is. Times travel as ages: clocks of hosts are never compared.
"""

from __future__ import annotations

import dataclasses
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from espalier.comm import rendezvous_wait, store_client
from espalier.comm.rendezvous_wait import Deadline
from espalier.launch.hosts.message_auth import seal, unseal
from espalier.launch.ranks.rank_process import Child
from espalier.launch.resilience.hang_detector import Vital
from espalier.recipe import errors
from espalier.recipe.errors import EspalierError
from espalier.train.heartbeat import Sign

_PAUSE = 0.05
"""Seconds between two looks at the store: what a host learns late by, and 20 small requests a second."""
_TRY_SECONDS = 2.0
"""How long one attempt to reach the store again may take."""
_AGAIN_SECONDS = 0.5  # between two of them
_OPENING = 60.0
"""How long the store may take to answer for the first time: its port listens before it does (seconds)."""
_HEAD = struct.Struct("<8sqq")
"""Who speaks (a random number of each `ControlLink`), when by its clock, and how much it said before."""
_TIMES = ("beat", "moved", "first", "asked")  # of a Sign


@dataclass(frozen=True)
class Command:
    """What the first supervisor wants of all.

    Attributes:
        attempt: its number, from 1; 0: none yet.
        run: whether its ranks are to run, else to be ended.
        over: the run is; its supervisors may leave.
        stacks: every rank is to write where it is.
        replaced: ranks that are to be started anew while the others stay; None: all are started.
        later: those that stay come at the end of a round.
        testing: the number of the test (`host_check`) that is under way, from 1; 0: none is.
        between_failures: seconds, as `checkpoint.shared_memory` wants them.
        lives: of each host, which of its supervisors (`MeetingPoint.life`) is meant; empty: whoever is there.
        shape: `RunShape.encoded` of what runs now; empty: what all began with.
    """

    attempt: int = 0
    run: bool = False
    over: bool = False
    stacks: bool = False
    replaced: tuple[int, ...] | None = None
    later: bool = False
    testing: int = 0
    between_failures: float = 0.0
    lives: tuple[int, ...] = ()
    shape: str = ""

    def to(self, host: int, life: int) -> Command:
        """As that supervisor is to take it: what was meant for one before it, whose ranks ended with it, is not to be
        run."""
        meant = self.lives[host] if self.lives else life
        return self if meant == life else dataclasses.replace(self, run=False, replaced=None)

    def supersedes(self, host: int, life: int) -> bool:
        """Whether another supervisor has taken the place of that one."""
        return bool(self.lives) and self.lives[host] > life


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit status, whether its work was done, and the error it raised, if it could tell."""

    rank: int
    status: int
    well: bool
    error: tuple[str, str, str, str] | None = None
    raised: str = ""

    @classmethod
    def of(cls, child: Child) -> End:
        """Of a child that has ended."""
        error = child.error
        words = None if error is None else errors.words_of(error)
        return cls(child.place.rank, child.status or 0, not child.failed, words, child.raised)

    def rebuilt(self) -> EspalierError | None:
        """The error, here."""
        if self.error is None:
            return None
        return errors.from_words(self.error)


@dataclass(frozen=True)
class Report:
    """How the ranks of one host are.

    Attributes:
        attempt: the one they belong to; 0: none was started.
        living: whether any of them may still live.
        signs: what each showed, by its number on the host; times are ages in seconds (-1: never).
        vitals: what the system says of each.
        ends: of those that have ended.
        revived: rank, step and what became of each that was killed in this attempt and started again alone.
        stacks: where each was, by rank, once that was asked.
        asked: whether somebody asked this supervisor to stop.
        left: whether it will say no more.
        life: which supervisor of its host says so.
    """

    attempt: int = 0
    living: bool = False
    signs: tuple[Sign, ...] = ()
    vitals: tuple[Vital, ...] = ()
    ends: tuple[End, ...] = ()
    revived: tuple[tuple[int, int, str], ...] = ()
    stacks: dict[int, str] | None = None
    asked: bool = False
    left: bool = False
    life: int = 0


def aged(sign: Sign, now: float) -> Sign:
    """`sign` with ages for times, as it travels."""
    times: dict[str, Any] = {name: now - value if (value := getattr(sign, name)) else -1.0 for name in _TIMES}
    return dataclasses.replace(sign, **times)


def dated(sign: Sign, now: float) -> Sign:
    """`sign` with times of the clock here, `now` being when it came."""
    times: dict[str, Any] = {name: now - value if (value := getattr(sign, name)) >= 0 else 0.0 for name in _TIMES}
    return dataclasses.replace(sign, **times)


@dataclass(frozen=True)
class MeetingPoint:
    """Where the supervisors of a run meet.

    Attributes:
        host: this one's number; 0 serves the store and leads. hosts: how many there are.
        address, port: where the store is for processes of this host.
        topic: what the keys begin with, one for each thing that they do together.
        heartbeat: seconds; a host says four times as often that it lives.
        life: how often a supervisor of this host was started before.
        token: the run's, which strangers do not know.
        gate: where the first host listens, if not at that address.
    """

    host: int
    hosts: int
    address: str
    port: int
    topic: str
    heartbeat: float = 1.0
    life: int = 0
    token: str = field(default="", repr=False)
    gate: tuple[str, int] | None = None


class ControlLink:
    """One supervisor's end. Has state: a thread, what it last carried here, and when that came.

    Args:
        line: where.
        kind: of what comes here, `Report` or `Command`.
        news: called in the thread with the host and what it said, whenever that is new.
    """

    def __init__(
        self, line: MeetingPoint, kind: type, news: Callable[[int, Any], None] = lambda host, message: None
    ) -> None:
        self._line = line
        self._news = news
        self._coder = msgspec.json.Encoder()
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)
        self._others = [0] if line.host else list(range(1, line.hosts))
        self._own = b""
        self._count = 0
        self._carried = -1
        self._name = secrets.token_bytes(8)
        self._last: dict[int, bytes] = {}
        self._past: dict[int, set[bytes]] = {host: set() for host in self._others}
        self._said: dict[int, Any] = {}
        self._at = dict.fromkeys(self._others, time.monotonic())
        self._store: Any = None
        self._closed = False
        self._wake = threading.Event()
        self._came = threading.Event()
        self._lock = threading.Lock()
        self.refused_since: float | None = None
        """Since when nobody listens where the first host did (seconds of `time.monotonic`)."""
        self._thread = threading.Thread(target=self._live, name="exchange", daemon=True)

    def begin(self, message: Any) -> ControlLink:
        """Says `message` first, and lives until `close`."""
        self.tell(message)
        self._thread.start()
        return self

    def tell(self, message: Any) -> None:
        """Says what holds from now on."""
        with self._lock:
            self._own = self._coder.encode(message)
            self._count += 1
        self._wake.set()

    def said(self, host: int) -> Any:
        """What `host` said last; None while it has said nothing."""
        return self._said.get(host)

    def age(self, host: int) -> float:
        """Seconds since `host` was heard, or since the beginning."""
        return time.monotonic() - self._at[host]

    def excuse(self) -> None:
        """Nobody is silent until now: this process itself was not listening."""
        self._at = dict.fromkeys(self._others, time.monotonic())

    def wait(self, seconds: float) -> None:
        """Until something new was said, at most so long."""
        self._came.wait(seconds)
        self._came.clear()

    def close(self, seconds: float = 1.0) -> None:
        """Ends the thread, once the last words have been carried or `seconds` have passed."""
        deadline = time.monotonic() + seconds
        while self._carried < self._count and time.monotonic() < deadline:
            time.sleep(_PAUSE / 5)
        self._closed = True
        self._wake.set()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        while not self._closed:
            try:
                if self._store is None:
                    self._store = self._connect()
                self._carry(self._store)
            except (RuntimeError, OSError):  # c10d's own errors are RuntimeErrors
                self._store = None
                time.sleep(_AGAIN_SECONDS)
                continue
            self._wake.wait(_PAUSE)
            self._wake.clear()

    def _carry(self, store: Any) -> None:
        with self._lock:
            count = self._count
            message = self._own
        beat = int(time.monotonic() / (self._line.heartbeat / 4))
        key = self._key(self._line.host)
        store.set(key, seal(self._line.token, key, _HEAD.pack(self._name, beat, count) + message))
        self._carried = count
        if not self._others:
            return
        for host, data in zip(self._others, store.multi_get([self._key(other) for other in self._others]), strict=True):
            received = unseal(self._line.token, self._key(host), data)
            before = self._last.get(host, b"")
            if received is None or not self._follows(host, before, received):
                continue
            self._last[host] = received
            if received[_HEAD.size :] != before[_HEAD.size :]:
                self._said[host] = self._decoder.decode(received[_HEAD.size :])
                self._news(host, self._said[host])
                self._came.set()
            self._at[host] = time.monotonic()  # last: who looks at what was heard knows what it was

    def _follows(self, host: int, before: bytes, message: bytes) -> bool:
        """Whether `message` comes after what `host` said `before`, rather than being that again, or older words."""
        name, *at = _HEAD.unpack_from(message)
        if not before:
            return True
        old, *when = _HEAD.unpack_from(before)
        if name == old:
            return at > when
        if name in self._past[host]:
            return False  # of one that does not know yet that its place was taken
        self._past[host].add(old)
        return True

    def _connect(self) -> Any:
        try:
            first = self._line.gate or (self._line.address, self._line.port)
            socket.create_connection(first, _TRY_SECONDS).close()
        except ConnectionRefusedError:
            self.refused_since = self.refused_since or time.monotonic()
            raise
        self.refused_since = None
        store = _client(self._line.address, self._line.port, _TRY_SECONDS)
        if self._line.host == 0:
            for host in self._others:  # who asks for a key that is not there waits for it
                if not store.check([self._key(host)]):
                    store.set(self._key(host), b"")
        return store

    def _key(self, host: int) -> str:
        return f"espalier/{self._line.topic}/supervisor/{host}"


def opened(address: str, port: int, seconds: float = _OPENING, awaited: str = "the first host") -> Any:
    """A connection of its own to the store at that address, which `awaited` serves. Raises PeerLost where it does not
    answer within `seconds`."""
    deadline = Deadline(seconds, "This process")
    return rendezvous_wait.reached((address, port), "", awaited, deadline, partial(_client, address, port))


def _client(address: str, port: int, seconds: float) -> Any:
    """The same at the first attempt. Raises OSError, and what torch raises."""
    from datetime import timedelta

    rendezvous_wait.greet(address, port, seconds)
    store = store_client.connect(address, port, _TRY_SECONDS)
    store.set_timeout(timedelta(hours=1))  # others judge by what comes, not by what an interrupted request says
    return store
