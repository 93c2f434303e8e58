"""What a worker does: inference writes raw outputs to a file and goes on; metrics are made from it, elsewhere.

Messages to the evaluator: `At`, `Given`, `Done`, `Scored`, `Wrong`. Messages from it: `Infer`, `SHARE`, `Score`.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from espalier.resilience.acme.evaluate import shared
from espalier.resilience.acme.evaluate.tasks import Sums, Task
from espalier.resilience.acme.evaluate.trials import Piece, Trial
from espalier.resilience.acme.evaluate.trials import shared as halves

SHARE = "share"
"""To an inference worker: give away half of what is left of your trial."""

SPEAK_EVERY = 0.25
"""Seconds between two `At` of a worker, at least."""


class Infer(NamedTuple):
    """Do `trial` with the model in the memory file at `model`, which is another one where `version` is; write raw
    outputs to `raw`."""

    trial: Trial
    model: str
    version: int
    raw: str


class Score(NamedTuple):
    """Compute the metrics of `piece` from the file `raw`."""

    piece: Piece
    raw: str


class At(NamedTuple):
    """`records` of `task` took `seconds` since the last word."""

    task: str
    records: int
    seconds: float


class Given(NamedTuple):
    """These pieces of the trial at hand will not be done."""

    pieces: Trial


class Done(NamedTuple):
    """The trial's raw outputs are in the file; seconds by task."""

    pieces: Trial
    seconds: Mapping[str, float]


class Scored(NamedTuple):
    """Sums of each record, in order."""

    piece: Piece
    sums: list[Sums]
    seconds: float


class Wrong(NamedTuple):
    """The task's own code raised."""

    task: str
    what: str


def infer(tasks: Mapping[str, Task], build: Callable[[], nn.Module], device: torch.device, pipe: Connection) -> None:
    """The life of an inference worker; ends when the pipe does."""
    torch.set_num_threads(1)
    model, version = build(), 0
    with torch.no_grad():
        while True:
            order = pipe.recv()
            if order == SHARE:
                continue  # it crossed our last answer
            if order.version != version:
                model, version = shared.attach(model, order.model, device), order.version
            _Trial(tasks, model, order, pipe).run()


class _Trial:
    """One trial under way. Has state: what is left, what is done."""

    def __init__(self, tasks: Mapping[str, Task], model: nn.Module, order: Infer, pipe: Connection) -> None:
        self.tasks, self.model, self.order, self.pipe = tasks, model, order, pipe
        self.left = list(order.trial)
        self.done: list[Piece] = []
        self.seconds: dict[str, float] = {}
        self._clock = time.perf_counter if next(model.parameters()).is_cuda else time.process_time
        self._task, self._fresh, self._since = "", (0, 0.0), time.monotonic()

    def run(self) -> None:
        """Does the trial, record by record, and answers."""
        temporary = f"{self.order.raw}.tmp"
        with open(temporary, "wb") as file:
            while self.left:
                piece = self.left.pop(0)
                if not self._record(piece, file):
                    return
                rest = piece._replace(start=piece.start + 1)
                self._add(piece._replace(stop=rest.start))
                self.left[:0] = [rest] if rest.records else []
                self._share()
        os.replace(temporary, self.order.raw)
        self.pipe.send(Done(tuple(self.done), self.seconds))

    def _record(self, piece: Piece, file: Any) -> bool:
        began = self._clock()
        try:
            raw = self.tasks[piece.task].infer(self.model, piece.start)
        except Exception:
            self.pipe.send(Wrong(piece.task, traceback.format_exc(limit=-3)))
            return False
        file.write(msgspec.json.encode([piece.task, piece.start, raw]) + b"\n")
        took = self._clock() - began
        self.seconds[piece.task] = self.seconds.get(piece.task, 0.0) + took
        if piece.task != self._task:
            self._task, self._fresh = piece.task, (0, 0.0)
        self._fresh = (self._fresh[0] + 1, self._fresh[1] + took)
        if time.monotonic() - self._since > SPEAK_EVERY:
            self.pipe.send(At(piece.task, *self._fresh))
            self._fresh, self._since = (0, 0.0), time.monotonic()
        return True

    def _add(self, record: Piece) -> None:
        last = self.done[-1] if self.done else None
        if last and (last.task, last.stop) == (record.task, record.start):
            self.done[-1] = last._replace(stop=record.stop)
        else:
            self.done.append(record)

    def _share(self) -> None:
        while self.pipe.poll():
            assert self.pipe.recv() == SHARE
            kept, given = halves(self.left)
            self.left = list(kept)
            self.pipe.send(Given(given))


def score(tasks: Mapping[str, Task], pipe: Connection) -> None:
    """The life of a metric worker; ends when the pipe does."""
    torch.set_num_threads(1)
    while True:
        order: Score = pipe.recv()
        began = time.perf_counter()
        try:
            sums = [tasks[order.piece.task].score(raw) for raw in _read(order)]
        except Exception:
            pipe.send(Wrong(order.piece.task, traceback.format_exc(limit=-3)))
            continue
        pipe.send(Scored(order.piece, sums, time.perf_counter() - began))


def _read(order: Score) -> list[Any]:
    """Raw outputs of the piece's records, in order."""
    piece = order.piece
    found: dict[int, Any] = {}
    with Path(order.raw).open("rb") as file:
        for line in file:
            task, record, raw = msgspec.json.decode(line)
            if task == piece.task and piece.start <= record < piece.stop:
                found[record] = raw
    assert len(found) == piece.records, f"{order.raw} lacks records of {piece}"
    return [found[record] for record in range(piece.start, piece.stop)]
