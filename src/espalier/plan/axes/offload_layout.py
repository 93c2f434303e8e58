"""Layout of offloaded states: extents of a few MiB, each with a row for every kind of state. No torch.

Pieces of a parameter begin at multiples of a cache line's elements, as the tasks of torch's fused AdamW do: a parameter
that is moved piece by piece is vectorised as the whole is, so its bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

PAGE = 4096
LINE = 64
"""Bytes of a cache line."""
CHUNK = 16 * 2**20
"""Bytes of an extent at most, where parameters may be moved piece by piece."""
AHEAD = 2
"""Extents that are read at once: a disk would be idle while the checksums of the only one are compared."""
BUFFERS = AHEAD + 2
"""Extents in memory: those read ahead, one computed, one written behind."""


class StatePiece(NamedTuple):
    """Elements `[start, stop)` of parameter `number`, which begin at element `at` of each row of their extent."""

    number: int
    start: int
    stop: int
    at: int


class StateExtent(NamedTuple):
    """What is read and written at once: `rows` rows from byte `offset` of the file on, of which `used` bytes count."""

    pieces: tuple[StatePiece, ...]
    offset: int
    rows: int
    used: int

    @property
    def row_bytes(self) -> int:
        """From one row to the next: whole pages."""
        return -(-self.used // PAGE) * PAGE

    @property
    def bytes(self) -> int:
        """Of all rows."""
        return self.rows * self.row_bytes


class Elements(NamedTuple):
    """Parameters of one dtype: (number, elements) of each, and bytes of an element."""

    sizes: Sequence[tuple[int, int]]
    itemsize: int


def extents(given: Elements, rows: int, chunk: int | None = CHUNK, offset: int = 0) -> list[StateExtent]:
    """The extents of parameters, one after the other from byte `offset` on. `chunk`: bytes of an extent at most; None:
    each parameter has an extent of its own."""
    state_extents: list[StateExtent] = []
    limit = None if chunk is None else max(PAGE, chunk // rows // PAGE * PAGE) // given.itemsize
    for pieces in _alone(given) if limit is None else _filled(given, limit):
        last = pieces[-1]
        end = (last.at + last.stop - last.start) * given.itemsize
        state_extents.append(StateExtent(tuple(pieces), offset, rows, end))
        offset += state_extents[-1].bytes
    return state_extents


def _alone(given: Elements) -> Iterator[list[StatePiece]]:
    for number, count in given.sizes:
        if count:
            yield [StatePiece(number, 0, count, 0)]


def _filled(given: Elements, limit: int) -> Iterator[list[StatePiece]]:
    """Pieces that fill rows of at most `limit` elements, without gaps."""
    line = LINE // given.itemsize
    pieces: list[StatePiece] = []
    at = 0
    for number, count in given.sizes:
        start = 0
        while start < count:
            length = count - start
            if length > limit - at:
                length = (limit - at) // line * line
            if length:
                pieces.append(StatePiece(number, start, start + length, at))
                start = start + length
                at = at + length
            if start < count:
                yield pieces
                pieces = []
                at = 0
    if pieces:
        yield pieces
