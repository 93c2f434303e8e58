"""Which trial is whose, and which records are done: each record's result is taken exactly once, whoever dies.

A worker leases a trial. What it hands in counts; what it held when it died goes back to the queue, and what it
wrote but did not hand in is never looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from espalier.resilience.acme.evaluate.trials import Piece, Trial

DEATHS = 3
"""Workers a piece may cost before its task is given up."""


class Leases:
    """Trials of one checkpoint. Has state: those that wait (in order), those under way, the records that are done.

    Args:
        records: how many records each task has.
        trials: the first cut, in the order in which they are to be taken.
    """

    def __init__(self, records: Mapping[str, int], trials: Iterable[Trial]) -> None:
        self.records = dict(records)
        self.waiting: list[Trial] = list(trials)
        self.held: dict[int, Trial] = {}
        self.failed: dict[str, str] = {}
        self._done: dict[str, list[Piece]] = {task: [] for task in records}

    @property
    def open(self) -> bool:
        """Whether anything waits or is under way."""
        return bool(self.waiting or self.held)

    def take(self, worker: int) -> Trial | None:
        """Leases the next trial to `worker`; None when none waits."""
        assert worker not in self.held, f"worker {worker} has a trial already"
        if not self.waiting:
            return None
        self.held[worker] = self.waiting.pop(0)
        return self.held[worker]

    def give_back(self, worker: int, pieces: Sequence[Piece]) -> None:
        """`worker` will not do `pieces`, which end its lease: they wait again, first in the queue."""
        self.held[worker] = _without(self.held[worker], pieces)
        self.waiting[:0] = [(piece,) for piece in self._wanted(pieces)]

    def finish(self, worker: int, pieces: Sequence[Piece]) -> list[Piece]:
        """`worker` handed in `pieces`; what else it held waits again. Returns the pieces that count (not those of a
        task given up meanwhile)."""
        rest = _without(self.held.pop(worker), pieces)
        self.waiting[:0] = [(piece,) for piece in self._wanted(rest)]
        counted = self._wanted(pieces)
        for piece in counted:
            overlapping = [one for one in self._done[piece.task] if one.start < piece.stop and piece.start < one.stop]
            assert not overlapping, f"{piece} was done before: {overlapping}"
            self._done[piece.task].append(piece)
        return counted

    def lose(self, worker: int) -> list[str]:
        """`worker` died: what it held waits again, each piece by itself so that the guilty one is found. Returns the
        tasks that are given up for it."""
        again = [piece._replace(deaths=piece.deaths + 1) for piece in self.held.pop(worker, ())]
        guilty = [piece.task for piece in again if piece.deaths >= DEATHS and piece.task not in self.failed]
        for task in guilty:
            self.fail(task, f"it ended {DEATHS} workers")
        self.waiting[:0] = [(piece,) for piece in self._wanted(again)]
        return guilty

    def fail(self, task: str, why: str) -> None:
        """Gives `task` up: its pieces leave the queue, and what is handed in of it no longer counts."""
        self.failed[task] = why
        self.waiting = [kept for trial in self.waiting if (kept := tuple(self._wanted(trial)))]

    def renew(self, trials: Iterable[Trial]) -> None:
        """Takes `trials`, another cut of all that waits, in place of it."""
        trials = list(trials)
        assert sorted(_records(trials)) == sorted(_records(self.waiting)), "a cut lost a record"
        self.waiting = trials

    def complete(self, task: str) -> bool:
        """Whether every record of `task` is done."""
        return sum(piece.records for piece in self._done[task]) == self.records[task]

    def _wanted(self, pieces: Iterable[Piece]) -> list[Piece]:
        return [piece for piece in pieces if piece.task not in self.failed]


def _records(trials: Iterable[Trial]) -> list[tuple[str, int]]:
    return [(piece.task, record) for trial in trials for piece in trial for record in range(piece.start, piece.stop)]


def _without(trial: Trial, pieces: Sequence[Piece]) -> Trial:
    """What of `trial` is not in `pieces`."""
    left: list[Piece] = []
    for piece in trial:
        cuts = sorted((one.start, one.stop) for one in pieces if one.task == piece.task)
        at = piece.start
        for start, stop in cuts:
            if stop <= piece.start or start >= piece.stop:
                continue
            if start > at:
                left.append(piece._replace(start=at, stop=start))
            at = max(at, stop)
        if at < piece.stop:
            left.append(piece._replace(start=at))
    return tuple(left)
