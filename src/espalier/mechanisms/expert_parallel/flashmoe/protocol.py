"""Protocol: which tile may run when, and when a pass has ended. Knows no tensors; `layer` does what it says.

A rank has ended a pass when it has heard of every source, has run every tile of every source, and has every answer to
its own. There is no barrier: a rank goes on while others are at work, and what it sends in the next pass waits at its
receiver. Messages of two ranks with one tag keep their order, so nothing needs a number of its own (FlashMoE's flags
carry one: arXiv 2506.04667, appendix).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple


class Task(NamedTuple):
    """Tile `number` of those that `source` sends."""

    source: int
    number: int


class Pass:
    """One pass (forward or backward) on one rank. Has state: what has come, run and been answered.

    Args:
        me: this rank; sent: tiles for each of the others; own: tiles of its own tokens for its own experts.
    """

    def __init__(self, me: int, sent: Mapping[int, int], local_tiles: int) -> None:
        self.unheard = set(sent)
        self.unanswered = {Task(peer, number) for peer, count in sent.items() for number in range(count)}
        self._own = deque(Task(me, number) for number in range(local_tiles))
        self._ready: deque[Task] = deque()
        self._coming: dict[int, deque[tuple[Task, bool]]] = {}
        self._arrived: set[Task] = set()
        self._running = local_tiles
        self._referring: set[int] = set()

    def heard(self, source: int, fresh: list[bool], references: bool) -> None:
        """`source` has said what it sends: which of its tiles bring rows of their own, and whether there is a message
        with references, which comes before them."""
        assert source in self.unheard, f"rank {source} was heard twice in a pass"
        self.unheard.remove(source)
        self._coming[source] = deque((Task(source, number), is_new) for number, is_new in enumerate(fresh))
        self._running += len(fresh)
        if references:
            self._referring.add(source)
        self._advance(source)

    def referred(self, source: int) -> None:
        """The references of `source` have come."""
        self._referring.remove(source)
        self._advance(source)

    def arrived(self, task: Task) -> None:
        """The fresh rows of a tile have come."""
        self._arrived.add(task)
        self._advance(task.source)

    def _advance(self, source: int) -> None:
        """Tiles of a source become ready in their order, as later ones may refer to rows of earlier ones."""
        coming = self._coming[source]
        while source not in self._referring and coming and (not coming[0][1] or coming[0][0] in self._arrived):
            self._ready.append(coming.popleft()[0])

    def take(self) -> Task | None:
        """The next tile to run: others wait for theirs, so these come first. None: nothing is ready."""
        if self._ready:
            return self._ready.popleft()
        return self._own.popleft() if self._own else None

    def ran(self) -> None:
        """A tile that was taken has been run."""
        self._running -= 1

    def answered(self, task: Task) -> None:
        """The answer of the rank `task.source` to the tile with that number has come."""
        self.unanswered.remove(task)

    @property
    def done(self) -> bool:
        """Whether nothing is to come any more."""
        return not (self.unheard or self.unanswered or self._running)
