"""One checkpoint's evaluation: trials handed out longest first, halves of running ones given to who is idle, raw
outputs scored elsewhere, each task's figures as soon as its last record is scored.

After Acme (arXiv 2403.07648), "decoupled evaluation": inference workers never wait for metrics; metric workers take the
longest waiting first; trials whose prior is wrong by more than 2x lead to a new cut of what waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import fsum
from typing import NamedTuple

from espalier.resilience.acme.evaluate import packing, trials
from espalier.resilience.acme.evaluate.crew import Crew
from espalier.resilience.acme.evaluate.leases import DEATHS, Leases
from espalier.resilience.acme.evaluate.priors import Prior, Priors
from espalier.resilience.acme.evaluate.shared import SharedModel
from espalier.resilience.acme.evaluate.tasks import Sums
from espalier.resilience.acme.evaluate.trials import Piece, Trial
from espalier.resilience.acme.evaluate.workers import At, Done, Given, Infer, Score, Scored, Share, Word, Wrong

TICK = 0.5
"""Seconds within which `run` gives a sign of life."""


class Result(NamedTuple):
    """What came of one task. `why` says what went wrong; empty when nothing did."""

    task: str
    figures: Mapping[str, float]
    records: int
    seconds: float
    """Of inference and metrics together, all workers."""
    why: str = ""


class Evaluation:
    """One checkpoint under way. Has state: who does what, what is done.

    Args:
        crew: the workers.
        model: the model in memory.
        wanted: names of the tasks to do.
        priors: how long they should take; learns how long they took.
    """

    def __init__(self, crew: Crew, model: SharedModel, wanted: list[str], priors: Priors) -> None:
        self.crew, self.model, self.priors = crew, model, priors
        self.tasks = {name: crew.setup.tasks[name] for name in wanted}
        records = {name: task.records for name, task in self.tasks.items()}
        self.leases = Leases(records, self._cut([Piece(name, 0, count) for name, count in records.items()]))
        self._busy: set[int] = set()
        self._asked: set[int] = set()
        self._waiting: list[Score] = []
        self._scoring: dict[int, Score] = {}
        self._sums: dict[str, dict[int, Sums]] = {name: {} for name in wanted}
        self._seconds = dict.fromkeys(wanted, 0.0)
        self._told: set[str] = set()
        self._files: dict[int, str] = {}
        self._raw = 0

    @property
    def share(self) -> float:
        """Of the expected seconds, how much is scored."""
        seconds = {name: self.priors.of(name).inference for name in self.tasks}
        whole = sum(task.records * seconds[name] for name, task in self.tasks.items())
        return sum(len(done) * seconds[name] for name, done in self._sums.items()) / whole if whole else 1.0

    def run(self) -> Iterator[Result | None]:
        """Each task's result when it is there, and None at every tick."""
        while self.leases.open or self._waiting or self._scoring:
            self._hand_out()
            for worker, message in self.crew.heard(TICK):
                self._hear(worker, message)
            for worker in self.crew.hung([*self._busy, *self._scoring]):
                self._hear(worker, None)
            yield from self._fresh()
            yield None
        yield from self._fresh()

    # --- giving work ---------------------------------------------------------------------------------------------

    def _cut(self, pieces: list[Piece]) -> list[Trial]:
        pool, priors = self.crew.setup.pool, self._table()
        found = trials.cut(pieces, priors, pool.inference)
        expected = [trials.times(trial, priors) for trial in found]
        return [found[at] for at in packing.order(expected, pool)]

    def _table(self) -> dict[str, Prior]:
        return {name: self.priors.of(name) for name in self.tasks}

    def _hand_out(self) -> None:
        for worker in self.crew.inference:
            if worker in self._busy:
                continue
            trial = self.leases.take(worker)
            if trial is None:
                self._ask_for_half()
                continue
            self._raw += 1
            self._busy.add(worker)
            self._files[worker] = str(self.crew.setup.folder / f"{self._raw}.raw")
            self.crew.send(worker, Infer(trial, self.model.path, self.model.version, self._files[worker]))
        priors = self._table()
        for worker in self.crew.metric:
            if self._waiting and worker not in self._scoring:
                self._waiting.sort(key=lambda one: one.piece.records * priors[one.piece.task].metric)
                self._scoring[worker] = self._waiting.pop()
                self.crew.send(worker, self._scoring[worker])

    def _ask_for_half(self) -> None:
        """Somebody is idle: the worker with the longest trial is asked for half of what is left of it."""
        priors = self._table()
        lengths = {
            worker: trials.times(trial, priors).inference
            for worker, trial in self.leases.held.items()
            if worker not in self._asked and sum(piece.records for piece in trial) > 1
        }
        if lengths and not self._asked:
            worker = max(lengths, key=lengths.__getitem__)
            self._asked.add(worker)
            self.crew.send(worker, Share())

    # --- hearing of it -------------------------------------------------------------------------------------------

    def _hear(self, worker: int, message: Word | None) -> None:
        match message:
            case None:
                self._lost(worker)
            case At(task, records, seconds):
                if self.priors.of(task).wrong(seconds / records):
                    self._learn({task: seconds / records})
            case Given(pieces):
                self._asked.discard(worker)
                if pieces:
                    self.leases.give_back(worker, pieces)
            case Done(pieces, seconds):
                self._done(worker, pieces, seconds)
            case Scored(piece, sums, seconds):
                self._scored(worker, piece, sums, seconds)
            case Wrong(task, what):
                self._wrong(worker, task, what)

    def _done(self, worker: int, pieces: Trial, seconds: Mapping[str, float]) -> None:
        records: dict[str, int] = {}
        for piece in pieces:
            records[piece.task] = records.get(piece.task, 0) + piece.records
        raw = self._free(worker)
        self._waiting += [Score(piece, raw) for piece in self.leases.finish(worker, pieces)]
        for task, took in seconds.items():
            self._seconds[task] += took
        self._learn({task: took / records[task] for task, took in seconds.items()})

    def _learn(self, measured: Mapping[str, float]) -> None:
        """Takes measured seconds per record; after a prior that was wrong, what waits is cut anew."""
        again = False
        for task, seconds in measured.items():
            again |= self.priors.of(task).wrong(seconds)
            self.priors.learn(task, inference=max(seconds, 1e-9))
        if again:
            self.leases.renew(self._cut([piece for trial in self.leases.waiting for piece in trial]))

    def _scored(self, worker: int, piece: Piece, sums: list[Sums], seconds: float) -> None:
        del self._scoring[worker]
        if piece.task in self.leases.failed:
            return
        known = self._sums[piece.task]
        assert not known.keys() & range(piece.start, piece.stop), f"{piece} was scored before"
        known.update(zip(range(piece.start, piece.stop), sums, strict=True))
        self._seconds[piece.task] += seconds
        self.priors.learn(piece.task, metric=seconds / piece.records)

    def _wrong(self, worker: int, task: str, what: str) -> None:
        self._fail(task, what.strip().splitlines()[-1])
        if worker in self._scoring:
            del self._scoring[worker]
        else:
            self._free(worker)
            self.leases.finish(worker, ())

    def _lost(self, worker: int) -> None:
        if worker in self._scoring:
            score = self._scoring.pop(worker)
            piece = score.piece._replace(deaths=score.piece.deaths + 1)
            if piece.deaths < DEATHS:
                self._waiting.append(Score(piece, score.raw))
            else:
                self._fail(piece.task, f"its metric ended {DEATHS} workers")
        elif worker in self._busy:
            self._free(worker)
            for task in self.leases.lose(worker):
                self._drop(task)

    def _fail(self, task: str, why: str) -> None:
        if task not in self.leases.failed:
            self.leases.fail(task, why)
            self._drop(task)

    def _drop(self, task: str) -> None:
        self._waiting = [score for score in self._waiting if score.piece.task != task]

    def _free(self, worker: int) -> str:
        """`worker` is idle again; the file it wrote to."""
        self._busy.discard(worker)
        self._asked.discard(worker)
        return self._files.pop(worker)

    # --- results -------------------------------------------------------------------------------------------------

    def _fresh(self) -> Iterator[Result]:
        for name, task in self.tasks.items():
            if name in self._told:
                continue
            sums = self._sums[name]
            if name in self.leases.failed:
                self._told.add(name)
                yield Result(name, {}, task.records, self._seconds[name], self.leases.failed[name])
            elif len(sums) == task.records:
                self._told.add(name)
                figures = task.summary(joined([sums[record] for record in range(task.records)]))
                why = "" if figures else "nothing of it has weight"
                yield Result(name, figures, task.records, self._seconds[name], why)


def joined(sums: list[Sums]) -> dict[str, float]:
    """Quotients of the records' sums and weights, added exactly: the same however the records were cut into trials."""
    names = dict.fromkeys(name for one in sums for name in one)
    found = {}
    for name in names:
        total, weight = (fsum(one[name][part] for one in sums if name in one) for part in (0, 1))
        if weight:
            found[name] = total / weight
    return found
