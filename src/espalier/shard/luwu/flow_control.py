"""Ack and Credit flow control: which sequence numbers a sender may send, resends, and a receiver accepts. No I/O.

Every endpoint tells from time to time {Ack = next sequence number expected, Credit = first one it cannot accept}. A
sender never sends beyond Credit; if Ack has not advanced for a set time with frames outstanding, or the receiver says
that a number is missing, it resends from Ack. Where many send to one or one to many, the element-wise minimum of all
that they tell takes the place of one (section 3 of LuWu, arXiv 2409.00918).
"""

from __future__ import annotations

from collections.abc import Hashable


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

    def __init__(self, first: int = 0, room: int = 0) -> None:
        self.expected, self.credit = first, first + room

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


class MinimumTable:
    """What several endpoints told, and its minimum. Has state.

    >>> table = MinimumTable()
    >>> table.add("a", 0), table.add("b", 0)
    (None, None)
    >>> table.heard("a", 7), table.minimum(), table.heard("b", 3), table.minimum()
    (None, 0, None, 3)
    """

    def __init__(self) -> None:
        self.told: dict[Hashable, int] = {}
        self._least = 0

    def add(self, member: Hashable, first: int) -> None:
        """From now on `member` counts."""
        self.told[member] = first

    def heard(self, member: Hashable, number: int) -> None:
        """All below `number` has come from (or to) `member`."""
        self.told[member] = max(self.told[member], number)

    def remove(self, member: Hashable) -> None:
        """From now on it does not count."""
        self.told.pop(member, None)

    def minimum(self) -> int:
        """What has come from all; where there is nobody, what had come from all before."""
        self._least = max(self._least, min(self.told.values(), default=self._least))
        return self._least
