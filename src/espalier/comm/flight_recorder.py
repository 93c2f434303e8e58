"""Flight recorder: each rank records its last collectives and publishes its position, so that a failure names who waits
for whom.

A publisher thread writes the record to the Store about once a second over a connection of its own, so it is never
behind a collective. When a wait fails, the reporting rank reads the others' records and names who is missing.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from espalier.comm import store_client
from espalier.recipe.errors import PeerLost
from espalier.recipe.units import show_seconds, show_size

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

KEPT = 16  # collectives remembered per rank
BEAT = 1.0  # seconds between two published records
_LOOK = 0.02  # seconds
_COMPUTES = 0.1  # CPU seconds a second from which a rank computes; publishing takes a hundredth
LEAVE = 30.0  # seconds that a rank that leaves waits for its last record to be written
SILENCE = 2.5  # beats after which a rank whose record stands still counts as dead or stopped


class RecordedCollective:
    """One collective this rank entered. `expected` are the global ranks that must enter it too.

    `key` says what it is numbered in: its group, or for a message its group, direction and tag.
    """

    __slots__ = ("done", "expected", "group", "key", "kind", "number", "operation", "size", "started", "stream")

    def __init__(self, group: str, operation: str, kind: str, size: float, expected: Sequence[int]) -> None:
        self.group, self.operation, self.kind, self.size = group, operation, kind, size
        self.expected = expected
        self.key = group
        self.number = 0
        self.started = time.monotonic()
        self.done = False
        self.stream = False  # ordered on a device's stream, where a wait does not block this process

    def __str__(self) -> str:
        group = f" of group {self.group}" if self.group else ""
        return f"{self.operation} #{self.number}{group} ({self.kind}, {show_size(self.size)})"


class FlightRecorder:
    """The record of one rank. Has state: counts per group, the last collectives, the phase, a publisher thread."""

    def __init__(self, store: Store, rank: int, others: Sequence[int] = ()) -> None:
        self.rank = rank
        self._others = [other for other in others if other != rank]
        self.longest: timedelta | None = None
        """While another rank computes, waits go on past their deadline for at most so long."""
        self._looked = time.monotonic()
        self._used = time.process_time()
        self._computed = time.monotonic()
        self.phase = "start"
        self._store: Store = store_client.clone(store)
        self._counts: dict[str, int] = {}
        self._last: deque[RecordedCollective] = deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self._beat = 0
        self._state = "running"
        self._wake = threading.Event()
        self._stopped = False
        self.known = threading.Event()
        """Set once somebody else knows who is missing: then the others are not asked."""
        self._publish()
        self._thread = threading.Thread(target=self._run, name="espalier-watch", daemon=True)
        self._thread.start()

    def enter(self, entry: RecordedCollective) -> None:
        """Books `entry` as begun and numbers it within its key."""
        with self._lock:
            entry.number = self._counts[entry.key] = self._counts.get(entry.key, 0) + 1
            self._last.append(entry)

    def close(self) -> None:
        """Tells the others that this rank left on purpose, and ends the publisher. A thread that is still in C++ when
        the interpreter ends aborts the process, so a rank that leaves waits for it; one that failed is in a hurry."""
        self._stopped, leaves = True, self._state == "running"
        if leaves:
            self._state = "left"
        self._wake.set()
        self._thread.join(timeout=LEAVE if leaves else 2 * BEAT)

    def reach(self, timeout: timedelta) -> timedelta:
        """The longest that a wait with a deadline of `timeout` may take."""
        return max(timeout, self.longest or timeout)

    def computes(self) -> bool:
        """Whether another rank of the run uses CPU time, and waits go on for that: it is slow, not gone. Waits of Gloo
        use none. Not only the awaited ranks count: these may wait for others in turn."""
        if self.longest is None or self.known.is_set():
            return False
        seen = _Reading(self._store, self._others).result(self.known)
        fresh = (record for rank, record in seen.records.items() if rank not in seen.silent)
        return any(record["idle"] < SILENCE * BEAT for record in fresh if record["state"] == "running")

    def failure(self, entry: RecordedCollective, cause: str) -> PeerLost:
        """The error of a wait on `entry` that ended with `cause`: names this rank, the phase and who is missing."""
        waited = time.monotonic() - entry.started
        self._state = "failed"
        self._wake.set()
        others = [rank for rank in entry.expected if rank != self.rank]
        seen = _Reading(self._store, others).result(self.known)
        what = (
            f"Rank {self.rank} waited {show_seconds(waited)} in phase '{self.phase}' for {entry}: "
            f"{_verdict(entry, others, seen)}"
        )
        lines = [f"rank {self.rank}: {self._describe(self._record())}"]
        lines += [f"rank {rank}: {self._describe(seen.records.get(rank))}" for rank in others[:KEPT]]
        reason = cause.strip().partition("\n")[0].partition(" This is typically")[0] or "no reason given"
        return PeerLost(
            what,
            why="\n       ".join([reason, *lines]),
            do="look at the log of the missing rank; if it was only slow, raise comm.timeout",
        )

    def _record(self) -> dict[str, Any]:
        now = time.monotonic()
        with self._lock:
            last = [
                f"{entry}{'' if entry.done else ' waiting ' + show_seconds(now - entry.started)}"
                for entry in self._last
            ]
            counts = dict(self._counts)
        return {
            "beat": self._beat, "phase": self.phase, "state": self._state, "idle": now - self._computed,
            "counts": counts, "last": last,
        }  # fmt: skip

    def _publish(self) -> None:
        self._beat += 1
        now = time.monotonic()
        used = time.process_time()
        if now - self._looked >= BEAT / 2:
            if used - self._used > _COMPUTES * (now - self._looked):
                self._computed = now
            self._looked = now
            self._used = used
        self._store.set(_key(self.rank), json.dumps(self._record()))

    def _run(self) -> None:
        while True:
            self._wake.wait(BEAT)
            self._wake.clear()
            try:
                self._publish()
            except RuntimeError:
                return  # the store's host is gone; whoever waits for it reports that
            if self._stopped:
                return

    @staticmethod
    def _describe(record: dict[str, Any] | None) -> str:
        if record is None:
            return "no record (the store does not answer)"
        last = "; ".join(record["last"][-4:]) or "none yet"
        return f"{record['state']} in phase '{record['phase']}', last collectives: {last}"


class _Reading:
    """The others' records, read in a thread so that a dead store cannot hold up the message."""

    def __init__(self, store: Store, ranks: Sequence[int]) -> None:
        self.records: dict[int, dict[str, Any]] = {}
        self.silent: set[int] = set(ranks)
        self.answered = False
        self._store = store
        self._ranks = ranks

    def result(self, known: threading.Event) -> _Reading:
        """Reads until every rank showed a sign of life, the silence is long enough to mean something, or it is
        `known`."""
        reader = threading.Thread(target=self._read, name="espalier-watch-reading", daemon=True)
        reader.start()
        until = time.monotonic() + (SILENCE + 1) * BEAT
        while reader.is_alive() and time.monotonic() < until and not known.is_set():
            reader.join(timeout=_LOOK)
        return self

    def _read(self) -> None:
        first: dict[int, int] = {}
        until = time.monotonic() + SILENCE * BEAT
        try:
            while self.silent and time.monotonic() < until:
                for rank in self._ranks:
                    if not self._store.check([_key(rank)]):
                        continue
                    record = json.loads(self._store.get(_key(rank)))
                    self.records[rank] = record
                    if record["beat"] != first.setdefault(rank, record["beat"]) or record["state"] != "running":
                        self.silent.discard(rank)
                self.answered = True
                time.sleep(BEAT / 5)
        except RuntimeError:
            self.answered = False


def _key(rank: int) -> str:
    return f"watch/{rank}"


def _verdict(entry: RecordedCollective, others: Sequence[int], seen: _Reading) -> str:
    if not seen.answered:
        return "the store does not answer, so its host is probably dead; it cannot be said who else is missing."
    absent = [r for r in others if seen.records.get(r, {}).get("counts", {}).get(entry.key, 0) < entry.number]
    silent = sorted(seen.silent)
    state = {rank: seen.records.get(rank, {}).get("state") for rank in others}
    left = [rank for rank in absent if state[rank] == "left"]
    failed = [rank for rank in others if state[rank] == "failed"]
    parts = []
    if absent:
        parts.append(f"{_ranks(absent)} not entered it")
    if silent:
        parts.append(f"{_ranks(silent)} given no sign of life for {SILENCE * BEAT:g} s (dead or stopped)")
    if left:
        parts.append(f"{_ranks(left)} left the run")
    if failed and not absent:
        parts.append(f"{_ranks(failed)} failed before")
    if not parts:
        parts.append("every rank has entered it and is alive, so the link is stuck or too slow")
    return "; ".join(parts) + "."


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown} have"
