"""Ack and Credit flow control: which sequence numbers a sender sends, resends, and a receiver accepts; and how fast.

Every endpoint tells from time to time {Ack = next sequence number expected, Credit = first one it cannot accept}. A
sender never sends beyond Credit; if Ack has not advanced for a set time with frames outstanding, or the receiver says
that a number is missing, it resends from Ack. Where many send to one or one to many, the element-wise minimum of all
that they tell takes the place of one (section 3 of LuWu, arXiv 2409.00918).

Pacing: a link sends a little slower than it could, so that no queue forms before it. Two TCP streams that cross in
opposite directions fill and empty each other's queues in turn, as the acknowledgements of one wait behind the data of
the other ("data pendulum": Heusse, Merritt, Brown, Duda, CoNEXT Student Workshop 2011). Short of the link's rate there
is no queue for them to wait in. The kernel paces (`SO_MAX_PACING_RATE`, Linux).
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress

SO_MAX_PACING_RATE = 47
SHARE = 0.89
"""Of the rate that the plan knows: headers take 4 % of it, and what is left keeps queues short (docs/benchmarks.md)."""
PROBE = 16
"""Every so many frames one is sent as fast as it goes."""
FASTER = 2.0
"""A link on which that one took less than this part of its time is faster than the plan knows, and paced no more."""
_FREE = (1 << 64) - 1


class SendWindow:
    """The numbers of a sender. Has state.

    Attributes:
        acked: every number below has arrived. cursor: the next to be sent. following: the next new one. credit: the
            first that may not be sent yet.
    """

    def __init__(self, first: int = 0) -> None:
        self.acked = self.cursor = self.following = self.credit = first

    def add(self) -> int:
        """A new frame's number."""
        self.following += 1
        return self.following - 1

    def sendable(self) -> bool:
        """Whether the frame at `cursor` exists and may be sent."""
        return self.cursor < min(self.following, self.credit)

    def heard(self, ack: int, credit: int) -> bool:
        """What the receiver told, in any order and any number of times; whether `acked` has advanced."""
        self.credit = max(self.credit, credit)
        advanced = self.acked < ack <= self.following
        if advanced:
            self.acked = ack
            self.cursor = max(self.cursor, ack)
        return advanced

    def resend(self) -> None:
        """Frames from Ack on have to be sent again."""
        self.cursor = self.acked


class ReceiveWindow:
    """The numbers of a receiver. Has state.

    Attributes:
        expected: the Ack it tells. credit: the Credit it tells; it never shrinks.
    """

    def __init__(self, first: int = 0) -> None:
        self.expected = self.credit = first

    def accepts(self, number: int) -> bool:
        """Whether this is the next one. One beyond Credit is a breach of the protocol."""
        assert number < self.credit, (number, self.credit)
        return number == self.expected

    def arrived(self) -> None:
        """The next one is here."""
        self.expected += 1

    def grant(self, credit: int) -> None:
        """There is room for all below `credit`."""
        self.credit = max(self.credit, credit)


class Pacing:
    """How fast one direction of a link sends. Has state: what the link has shown.

    Args:
        rate: bytes/s that the plan knows of the link; 0: nothing, and nothing is paced.

    Attributes:
        rate: at which frames are sent; 0: as fast as it goes.
    """

    def __init__(self, rate: float) -> None:
        self.rate = SHARE * rate
        self._frames, self._arrived = 0, 0.0
        self._probe = (-1, 0.0)
        self._set: tuple[socket.socket | None, float] = (None, 0.0)

    def sends(self, connection: socket.socket, number: int) -> None:
        """The large frame `number` is sent next."""
        if not self.rate and self._set[0] is None:
            return
        self._frames += 1
        probe = bool(self.rate) and self._frames % PROBE == 0
        if probe:
            self._probe = number, time.monotonic()
        rate = 0.0 if probe else self.rate
        if self._set != (connection, rate):
            with suppress(OSError):  # another system: nothing is paced
                value = struct.pack("Q", int(rate) or _FREE)
                connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, value)
            self._set = connection, rate

    def arrived(self, number: int, size: int) -> None:
        """The large frame `number` of `size` bytes has arrived."""
        now = time.monotonic()
        probed, begun = self._probe
        if number == probed and size > FASTER * self.rate * (now - max(begun, self._arrived)):
            self.rate = 0.0
        self._arrived = now
