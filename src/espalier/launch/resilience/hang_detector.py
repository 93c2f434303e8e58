"""Hang detector: finds ranks that live but make no progress, from heartbeats and CPU time, never from a collective's
timeout. Pure.

After Acme (arXiv 2403.07648), where jobs that hung silently until somebody looked cost most hours. Where we deviate:
the published monitor calls a job stuck when a step took longer than a fixed time. Here a run hangs when **no rank does
anything at all** (no CPU time, nothing running or waiting for a disk) and no step was made for a few heartbeats, so a
hang of a run of fast steps is found in seconds, while one that compiles or starves on a busy machine is left alone.
A run that computes is never a hang: Gloo's waits sleep, so CPU time is work. Only where ranks wait on GPUs, which takes
CPU time too, is a run that is busy and makes no step judged against its own usual steps, generously.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from espalier.train.heartbeat import Doing, Sign

BEATS = 2.5
"""Heartbeats without a step after which idle ranks hang; looking twice a beat, that is found within three."""
_STEPS = 5.0
"""Nor does an idle run hang before this many times its usual step: it may wait for its data."""
_STARTING, _DISK, _DATA, _NETWORK = 30.0, 30.0, 60.0, 7200.0
"""Seconds of idleness while joining and building, and until two steps are known; while saving in a folder, whose file
system may be a process of its own; while waiting for data, which may come from afar; and while saving across a network,
of whose progress the system tells nothing."""
_BUSY_STEPS, _BUSY_LEAST, _BUSY_MOST = 20.0, 60.0, 7200.0
"""On GPUs a busy run hangs after this many times its usual step, and at least so many seconds; in all that makes no
steps, and until two are known, after two hours."""
_IDLE, _IDLE_IO = 0.03, 65536.0
"""CPU seconds, and bytes read and written, a second below which a process does nothing: heartbeats take less than
0.005, records of a few ranks some kilobytes."""
_ALLOWED: dict[Doing, float] = {
    "starting": _STARTING, "standing": _STARTING, "stepping": _STARTING, "validating": _STARTING, "saving": _DISK,
    "elsewhere": _DATA, "storing": _NETWORK, "leaving": math.inf,
}  # fmt: skip
_TICK = 0.011  # CPU time is counted in steps of 10 ms


@dataclass(frozen=True)
class Vital:
    """What the system says of one rank's process.

    Attributes:
        cpu: CPU seconds used so far by all its threads.
        io: bytes its system calls have read and written.
        state: `T` stopped, `R` at least one thread runs or could, `D` one waits for a disk, `S` all sleep.
    """

    cpu: float
    state: Literal["T", "R", "D", "S"]
    io: int = 0


@dataclass(frozen=True)
class Stall:
    """A rank or run that does not go on. `rank` is -1 where it may be any."""

    kind: Literal["hang", "stopped"]
    rank: int
    why: str


class Watcher:
    """Looks at all ranks again and again. Has state: what it saw before.

    Args:
        heartbeat: seconds between two beats of a rank.
        patience: factor of every limit; grows where a verdict has proved wrong.
        spins: ranks take CPU time while they wait for others, as on GPUs.
    """

    def __init__(self, heartbeat: float, patience: float = 1.0, spins: bool = False) -> None:
        self.heartbeat = heartbeat
        self.patience = patience
        self.spins = spins
        self._looked = 0.0
        self._since = 0.0
        self._before: dict[int, tuple[float, Vital]] = {}
        self._active: dict[int, float] = {}
        self._running: set[int] = set()
        self._stopped: dict[int, float] = {}

    def look(self, now: float, signs: Sequence[Sign], vitals: Sequence[Vital]) -> Stall | None:
        """What is wrong at `now` (seconds of the ranks' clock), if anything is."""
        if now - self._looked > 2 * self.heartbeat + 1.0:
            # The first look, or this process itself was stopped: what the others did meanwhile is not known.
            self._since = now
            self._before.clear()
            self._active.clear()
            self._stopped.clear()
        self._looked = now
        for rank, vital in enumerate(vitals):
            self._note(now, rank, vital)
        return self._frozen(now, signs) or self._hanging(now, signs)

    def _note(self, now: float, rank: int, vital: Vital) -> None:
        when, before = self._before.get(rank, (now, vital))
        self._before[rank] = (now, vital)
        # A thread that runs just now may be one that beats: only one that is met so again works, starves or waits.
        again = vital.state in "RD" and rank in self._running
        computes = vital.cpu - before.cpu > _IDLE * (now - when) + _TICK
        if computes or again or vital.io - before.io > _IDLE_IO * (now - when):
            self._active[rank] = now
        (self._running.add if vital.state in "RD" else self._running.discard)(rank)
        if vital.state == "T":
            self._stopped.setdefault(rank, now)
        else:
            self._stopped.pop(rank, None)

    def _frozen(self, now: float, signs: Sequence[Sign]) -> Stall | None:
        for rank, since in self._stopped.items():
            if now - since >= self.heartbeat and now - signs[rank].beat >= self.heartbeat:
                age = now - signs[rank].beat
                return Stall("stopped", rank, f"it was stopped by a signal; its last heartbeat is {age:.1f} s old")
        return None

    def _hanging(self, now: float, signs: Sequence[Sign]) -> Stall | None:
        staying = [sign for sign in signs if sign.doing != "leaving"]
        if not staying:
            return None
        moved = max(self._since, *(sign.moved for sign in signs))
        idle = now - max([self._since, *self._active.values()])
        age = now - moved
        if min(age, idle) >= self._allowed(staying, idle=True):
            return Stall("hang", -1, f"no step for {age:.1f} s, and no rank does anything")
        if age >= self._allowed(staying, idle=False):
            usual = max(sign.usual for sign in staying)
            known = f", while one usually takes {usual:.1f} s" if usual else ", and no usual one is known"
            return Stall("hang", -1, f"no step for {age:.0f} s{known}")
        return None

    def _allowed(self, signs: Sequence[Sign], idle: bool) -> float:
        """Seconds without a step: the most that any rank may take for what it does."""
        if not (idle or self.spins):
            return math.inf
        return self.patience * max(self._limit(sign, idle) for sign in signs)

    def _limit(self, sign: Sign, idle: bool) -> float:
        steps = sign.doing in ("stepping", "validating") and sign.usual > 0
        if not idle:
            busy = _BUSY_STEPS * sign.usual if steps and sign.doing == "stepping" else _BUSY_MOST
            return max(_BUSY_LEAST, busy)
        return max(BEATS * self.heartbeat, _STEPS * sign.usual if steps else _ALLOWED[sign.doing])
