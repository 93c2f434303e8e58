"""Overlap: collectives that follow one another, unit by unit, while the processor computes. Has no thread of its own.

A chain is what one unit exchanges: first along one axis of the mesh, then along the next. Ranks match collectives of a
group by the order in which they are launched, so chains move in step: a chain begins its next stage only after every
chain before it has. That order is the same on all ranks whatever the timing, and while the first stage of one chain
crosses the machine, the second stage of another crosses the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Stage = Callable[[], Any]
"""Launches one collective and returns its Work, or does something local and returns None."""


class Chain:
    """One unit's stages, with their buffers until they have begun. Has state: how many of them have ended, and the one
    under way."""

    __slots__ = ("_next", "_work", "count", "ended")

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._next = [*reversed(stages)]
        self.count = len(stages)
        self.ended = 0
        self._work: Any = None

    @property
    def complete(self) -> bool:
        """Nothing is left to do."""
        return self.ended >= self.count

    def launch(self) -> None:
        """Begins the next stage, if there is one."""
        if self._next:
            self._work = self._next.pop()()

    def arrived(self) -> bool:
        """Whether the stage under way would end at once."""
        return self._work is None or self._work.is_completed()

    def end_stage(self) -> None:
        """Waits for the stage under way and launches what follows."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self.ended += 1
        self.launch()


class Exchanges:
    """Chains under way, in the order in which they began on every rank. Has state."""

    def __init__(self) -> None:
        self._chains: list[Chain] = []

    def begin(self, stages: Sequence[Stage]) -> Chain:
        """Launches the first stage of a new chain."""
        self.advance()
        chain = Chain(stages)
        self._chains.append(chain)
        chain.launch()
        return chain

    def advance(self) -> None:
        """Moves on whatever can be moved on without waiting."""
        if not self._chains:
            return
        ceiling: float = float("inf")
        for chain in self._chains:
            while not chain.complete and chain.ended < ceiling and chain.arrived():
                chain.end_stage()
            if not chain.complete:
                ceiling = min(ceiling, chain.ended)
        self._forget()

    def finish(self, chain: Chain | None = None, stages: int | None = None) -> None:
        """Waits until `chain` (default: every chain) has ended so many of its `stages` (default: all); of chains before
        it only as far as its turn asks."""
        if chain is not None and chain.ended >= (wanted := chain.count if stages is None else stages):
            return
        upto = self._chains if chain is None else self._chains[: self._chains.index(chain) + 1]
        while left := [stage_sum for stage_sum in upto if not stage_sum.complete]:
            stage = min(stage_sum.ended for stage_sum in left)
            foremost = next(stage_sum for stage_sum in left if stage_sum.ended == stage)
            if chain is not None and chain.ended + 1 == chain.count:
                foremost = chain  # it has nothing more to launch, so it is in nobody's way
            foremost.end_stage()
            if chain is not None and chain.ended >= wanted:
                break
        self._forget()

    def _forget(self) -> None:
        while self._chains and self._chains[0].complete:
            self._chains.pop(0)
