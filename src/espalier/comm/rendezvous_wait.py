"""Waits for other processes of a run, from the first connection on.

A `Deadline` asks in a thread of its own, so that it also ends where a name server, a host or a port says nothing. If
the wait lasts, its first line says who is waited for, where and until when; at its end one error names who is missing.

torch's client of a store looks names up without a limit, goes on after its timeout where a port accepts and says
nothing, and prints what it meets. So it is used once a store answers here (`greet`).
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from espalier.recipe.errors import EspalierError, PeerLost
from espalier.recipe.terminal import say_progress
from espalier.recipe.units import show_seconds

QUIET = 1.0
"""Seconds after which a wait says its first line; a quarter of its own, where that is less."""
TRY_SECONDS = 3.0
"""How long one attempt to reach an address may take."""
LOOKUP_SECONDS = 10.0
"""How long name servers may take where an answer is not needed."""
_GRACE = 0.5  # what an attempt that is under way at the deadline may still take
_PAUSES = 0.005, 0.1  # seconds between two looks: the first ones, and the longest
_EACH = 0.01  # seconds after which each absent rank is looked for, times their number
_MOST_NAMED = 8
_SHORTEST = 0.01
_HELLO = struct.pack("=BIB", 0, 0x3C85F7CE, 13)
"""What a client of a TCPStore sends first: VALIDATE and its number, then PING, and a number that comes back (torch
2.13, torch/csrc/distributed/c10d/TCPStore.cpp)."""

T = TypeVar("T")


class Deadline:
    """The end of a wait of one process for others. Has state: when that is.

    Args:
        seconds: how long it waits, from now on.
        waiter: who waits, for messages: `Rank 1`.
    """

    def __init__(self, seconds: float, waiter: str) -> None:
        self.seconds = seconds
        self.waiter = waiter
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left; 0: it is over."""
        return max(0.0, self._end - time.monotonic())

    @property
    def waited(self) -> str:
        """Who has waited, and how long, for messages."""
        return f"{self.waiter} waited {show_seconds(self.seconds)}"

    @property
    def quiet(self) -> float:
        """Seconds after which the first line is said."""
        return min(QUIET, self.seconds / 4)

    def first_line(self, awaited: str) -> str:
        """Who waits for whom and where (`awaited`), until when."""
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + self.left))
        return f"{self.waiter} waits for {awaited} until {until}, {show_seconds(self.seconds)} in all."

    def poll(self, look: Callable[[], T | None], awaited: Callable[[], str], late: Callable[[], EspalierError]) -> T:
        """What `look` returns once that is not None.

        Args:
            look: called again and again in a thread of its own, which is left to itself if it hangs.
            awaited: who is waited for and where, for the first line.
            late: the error at the deadline.

        Raises what `look` and `late` say, and PeerLost where the store that `look` asks is lost.
        """
        answer: Future[T | None] = Future()

        def ask() -> None:
            try:
                pause, longest = _PAUSES
                while (value := look()) is None and self.left:
                    time.sleep(pause)
                    pause = min(2 * pause, longest)
                answer.set_result(value)
            except RuntimeError as error:  # c10d's own errors
                lost = f"{self.waiter} waited for {awaited()}, and the store was lost."
                why = f"the process that served it has ended ({reason(error)})"
                answer.set_exception(PeerLost(lost, why=why, do="look at its log: it is rank 0's, or its launcher's"))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="wait", daemon=True).start()
        try:
            if not wait([answer], self.quiet).done and self.left:
                say_progress(self.first_line(awaited()))
            wait([answer], self.left + _GRACE)
        finally:
            if not answer.done():  # a thread that is in a store when the interpreter ends would bring it down
                self._end = 0.0
                wait([answer], _GRACE)
        value = answer.result() if answer.done() else None
        if value is None:
            raise late()
        return value


def known_addresses(host: str, kind: int = socket.SOCK_STREAM) -> list[Any]:
    """What `socket.getaddrinfo` says of a host; nothing where it has no address, and where no name server answers
    within `LOOKUP_SECONDS`."""

    def look() -> list[Any]:
        try:
            return socket.getaddrinfo(host, None, type=kind)
        except (OSError, UnicodeError):
            return []

    limit = Deadline(LOOKUP_SECONDS, "This machine")
    try:
        return limit.poll(look, lambda: f"a name server to say where {host} is", lambda: PeerLost(limit.waited))
    except PeerLost:
        return []


def greet(host: str, port: int, seconds: float) -> None:
    """Returns if a PyTorch store answers there; each step of that may take `seconds`. Raises OSError."""
    nonce = struct.pack("=I", secrets.randbits(32))
    with socket.create_connection((host, port), max(seconds, _SHORTEST)) as line:
        try:
            line.sendall(_HELLO + nonce)
            answer = line.recv(len(nonce))
        except TimeoutError:
            raise OSError("what listens there says nothing") from None
        except OSError:
            answer = b""
    if answer != nonce:
        raise OSError("what listens there is no PyTorch store")


def reason(error: Exception) -> str:
    """Why an address was not reached, in words."""
    if isinstance(error, socket.gaierror):
        return f"the name has no address ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return "connections are refused, nobody listens there"
    if isinstance(error, TimeoutError):
        return "nothing answers there"
    return (getattr(error, "strerror", None) or str(error)).strip().splitlines()[0]


def reached(
    address: tuple[str, int], source: str, awaited: str, deadline: Deadline, connect: Callable[[float], T]
) -> T:
    """What `connect` returns once it does not fail: a client of the PyTorch store at `address` (host, port).

    Args:
        source: the variable or option that the address came from; empty: nobody gave it.
        awaited: who serves the store, for messages: `rank 0`.
        connect: makes the client after it has greeted the store (`greet`), within so many seconds.

    Raises PeerLost at the deadline: the address, where it came from and why it was not reached.
    """
    where = f"{address[0]}:{address[1]}"
    given = f" ({source})" if source else ""
    last = "no name server answers, or not that host"

    def look() -> T | None:
        nonlocal last
        try:
            return connect(min(deadline.left, TRY_SECONDS))
        except (OSError, UnicodeError, RuntimeError) as error:  # c10d's own errors are RuntimeErrors
            last = reason(error)
            return None

    def late() -> PeerLost:
        return PeerLost(
            f"{where} is not reached{given}.",
            why=f"{deadline.waited} for {awaited}: {last}",
            do=f"look at the log of {awaited}; check {source or 'the address'}, and firewalls between the hosts; "
            "comm.timeout is how long others are waited for",
        )

    return deadline.poll(look, lambda: f"{awaited} at {where}{given}", late)


def present(store: Any, keys: Sequence[str], where: str, deadline: Deadline) -> None:
    """Returns once a torch Store has all `keys`. Rank r sets the r-th of them.

    Args:
        where: where the store is, for messages; empty: unknown.

    Raises PeerLost at the deadline, naming the ranks that did not come.
    """
    at = f" at {where}" if where else ""
    absent = list(range(len(keys)))
    looked = time.monotonic()

    def look() -> bool | None:
        nonlocal looked
        while absent and store.check([keys[absent[0]]]):
            absent.pop(0)
        if absent and (time.monotonic() - looked > _EACH * len(absent) or deadline.left < _GRACE):
            absent[:] = [rank for rank in absent if not store.check([keys[rank]])]
            looked = time.monotonic()
        return None if absent else True

    def late() -> PeerLost:
        who = named(absent)
        return PeerLost(
            f"{who[:1].upper()}{who[1:]} did not come.",
            why=f"{deadline.waited} for all {len(keys)} ranks{at}",
            do=f"look at the logs of {who}; check that they are started, and reach that address; "
            "comm.timeout is how long others are waited for",
        )

    deadline.poll(look, lambda: f"{named(absent)} of {len(keys)}{at}", late)


def named(ranks: Sequence[int]) -> str:
    """Ranks in words: `rank 3`, `ranks 1 and 3`."""
    if not ranks:
        return "others"
    shown = [str(rank) for rank in ranks[:_MOST_NAMED]]
    if len(ranks) > _MOST_NAMED:
        shown.append(f"{len(ranks) - _MOST_NAMED} others")
    words = " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
    return f"rank{'s' * (len(ranks) > 1)} {words}"
