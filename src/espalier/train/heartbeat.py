"""Heartbeats: each rank writes its step and the time to shared memory; its launcher reads them.

Nothing is sent and nobody is waited for, so signs of life do not depend on any collective or its timeout, and a rank
that was killed in the middle of anything leaves them readable. Times are `time.monotonic`, the same in all processes of
a machine. No torch.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any, Literal, get_args

Doing = Literal["starting", "stepping", "validating", "elsewhere", "saving", "storing", "leaving", "standing"]
"""elsewhere: it waits for data · validating: and sampling · saving: and restoring, in a folder · storing: the same
across a network."""
_DOING: tuple[Doing, ...] = get_args(Doing)
_BEAT, _MOVED, _DOES, _USUAL, _STEP, _RESUMED, _FIRST, _ASKED, _MEMORY, _WAITED = range(10)  # as in `Sign`
_TIMES = (_BEAT, _MOVED, _USUAL, _FIRST, _ASKED, _WAITED)
_CELLS = 16  # of 8 bytes: cache lines of its own for each rank

_KEPT = 0.9
"""How much of the usual step stays at each new one: it is a mean over about ten."""


@dataclass(frozen=True)
class Sign:
    """What one rank showed last. Times in seconds of `time.monotonic`, 0 for never.

    Attributes:
        beat: when its thread last beat; moved: when it last made a step or changed what it does.
        doing: what it does; usual: seconds of its recent steps on average, the first left out.
        step: steps done; resumed: steps done when it began; first: when its first step was done.
        asked: when it was asked to stop; memory: whether it began from a copy in memory.
        waited: seconds of a usual step that it waits for others.
    """

    beat: float
    moved: float
    doing: Doing
    usual: float
    step: int
    resumed: int
    first: float
    asked: float
    memory: bool = False
    waited: float = 0.0


class Pulse:
    """One rank's signs of life. Has state: its cells, and a thread that beats.

    Args:
        cells: numbers of eight bytes that the launcher reads too.
        every: seconds between two beats; 0: it does not beat.
    """

    def __init__(self, cells: memoryview, every: float) -> None:
        self._cells = cells
        self._every = every

    def beat(self) -> None:
        """Begins to beat, from a thread, to the end of the process."""
        self._cells[_BEAT] = self._cells[_MOVED] = time.monotonic_ns()
        if self._every:
            threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(self._every)
            self._cells[_BEAT] = time.monotonic_ns()

    def stands(self) -> None:
        """This rank has lost another, and waits to begin anew with all of them."""
        _begin(self._cells, "standing", time.monotonic_ns())

    def reconnects(self) -> None:
        """A peer of this rank is not heard, and waited for under a deadline of its own: that is no hang."""
        self._cells[_MOVED] = time.monotonic_ns()

    def starts(self) -> None:
        """This rank begins anew."""
        _begin(self._cells, "starting", time.monotonic_ns())

    def leaves(self) -> None:
        """This rank has done its part; it waits for nobody any more."""
        self._cells[_DOES] = _DOING.index("leaving")

    def begins(self, step: int, memory: bool = False) -> None:
        """The state of `step` steps was taken up, from a copy in memory or from the disk."""
        self._cells[_MEMORY] = memory
        self._cells[_STEP] = self._cells[_RESUMED] = step
        self._cells[_MOVED] = time.monotonic_ns()

    def stepped(self, step: int, waited: float = 0.0) -> None:
        """The run has done `step` steps; in the last one this rank waited for others for `waited` seconds."""
        now = time.monotonic_ns()
        cells = self._cells
        if cells[_FIRST]:
            known = cells[_USUAL] > 0
            for cell, took in ((_USUAL, now - cells[_MOVED]), (_WAITED, round(1e9 * waited))):
                cells[cell] = round(_KEPT * cells[cell] + (1 - _KEPT) * took) if known else took
        else:
            cells[_FIRST] = now
        cells[_STEP], cells[_DOES], cells[_MOVED] = step, _DOING.index("stepping"), now

    @contextlib.contextmanager
    def elsewhere(self, doing: Doing = "elsewhere") -> Iterator[None]:
        """What is done inside (waiting for data, where nothing else is said) makes no steps."""
        before = self._cells[_DOES]
        self._cells[_DOES], self._cells[_MOVED] = _DOING.index(doing), time.monotonic_ns()
        yield
        self._cells[_DOES], self._cells[_MOVED] = before, time.monotonic_ns()

    def asked(self) -> None:
        """Somebody asked this rank to stop."""
        if not self._cells[_ASKED]:
            self._cells[_ASKED] = time.monotonic_ns()


SILENT = Pulse(memoryview(bytearray(8 * _CELLS)).cast("q"), 0.0)
"""Of ranks that nobody watches."""


class Pulses:
    """The signs of life of all ranks of one attempt, of which a host may have none. Has state: the shared memory. Made
    before the ranks are forked."""

    def __init__(self, world: int, every: float) -> None:
        self._every = every
        self._memory = mmap.mmap(-1, 8 * _CELLS * max(1, world))
        cells = memoryview(self._memory).cast("q")
        self._ranks = [cells[rank * _CELLS : (rank + 1) * _CELLS] for rank in range(world)]

    def of(self, rank: int) -> Pulse:
        """The part that `rank` writes."""
        return Pulse(self._ranks[rank], self._every)

    def read(self) -> list[Sign]:
        """What each rank showed last."""
        return [Sign(*itertools.starmap(_shown, enumerate(cells[: _WAITED + 1]))) for cells in self._ranks]

    def begin(self, now: float) -> None:
        """An attempt does at `now`, of ranks that are new and of ranks that stay."""
        for cells in self._ranks:
            _begin(cells, "starting", round(1e9 * now))

    def show(self, rank: int, sign: Sign) -> None:
        """What `rank` showed elsewhere, its times by the clock here."""
        cells = self._ranks[rank]
        for cell, value in enumerate(astuple(sign)):
            cells[cell] = round(1e9 * value) if cell in _TIMES else value if cell != _DOES else _DOING.index(value)


def _shown(cell: int, number: int) -> Any:
    """What a cell says, as `Sign` has it."""
    if cell == _DOES:
        return _DOING[number]
    return number / 1e9 if cell in _TIMES else bool(number) if cell == _MEMORY else number


def _begin(cells: memoryview, doing: Doing, now: int) -> None:
    """Nothing is known of an attempt that starts, except how far the run was."""
    for cell in (_FIRST, _USUAL, _WAITED, _ASKED):
        cells[cell] = 0
    cells[_DOES] = _DOING.index(doing)
    cells[_MOVED] = cells[_BEAT] = now
