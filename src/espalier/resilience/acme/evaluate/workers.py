"""What a worker does: inference writes raw outputs to a file and goes on; metrics are made from it, elsewhere.

Messages to the evaluator are a `Word`, messages from it an `Order`: msgpack of these types and nothing else.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from espalier.resilience.acme.evaluate import shared
from espalier.resilience.acme.evaluate.tasks import Sums, Task
from espalier.resilience.acme.evaluate.trials import Piece, Trial
from espalier.resilience.acme.evaluate.trials import shared as halves

SPEAK_EVERY = 0.25
"""Seconds between two `At` of a worker, at least."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What goes through a pipe."""


class Share(_Message, frozen=True):
    """Give away half of what is left of your trial."""


class Infer(_Message, frozen=True):
    """Do `trial` with the model in the memory file at `model`, which is another one where `version` is; write raw
    outputs to `raw`."""

    trial: Trial
    model: str
    version: int
    raw: str


class Score(_Message, frozen=True):
    """Compute the metrics of `piece` from the file `raw`."""

    piece: Piece
    raw: str


class At(_Message, frozen=True):
    """`records` of `task` took `seconds` since the last word."""

    task: str
    records: int
    seconds: float


class Given(_Message, frozen=True):
    """These pieces of the trial at hand will not be done."""

    pieces: Trial


class Done(_Message, frozen=True):
    """The trial's raw outputs are in the file; seconds by task."""

    pieces: Trial
    seconds: Mapping[str, float]


class Scored(_Message, frozen=True):
    """Sums of each record, in order."""

    piece: Piece
    sums: list[Sums]
    seconds: float


class Wrong(_Message, frozen=True):
    """The task's own code raised."""

    task: str
    what: str


Order = Infer | Share | Score
Word = At | Given | Done | Scored | Wrong


def _plain(value: Any) -> Any:
    """A task's code may count in NumPy's or torch's scalars."""
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"a sum is of type {type(value).__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_WORDS: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)


def tell(pipe: Connection, message: Order | Word) -> None:
    """Sends `message`."""
    pipe.send_bytes(_ENCODER.encode(message))


def heard(pipe: Connection) -> Word:
    """What a worker says next. Raises EOFError when it has ended, OSError for what is no word of a worker."""
    try:
        return _WORDS.decode(pipe.recv_bytes())
    except msgspec.DecodeError as error:
        raise OSError(f"a worker said what is no word: {error}") from None


def _ordered(pipe: Connection) -> Order:
    return _ORDERS.decode(pipe.recv_bytes())


def infer(tasks: Mapping[str, Task], build: Callable[[], nn.Module], device: torch.device, pipe: Connection) -> None:
    """The life of an inference worker; ends when the pipe does."""
    torch.set_num_threads(1)
    model, version = build(), 0
    with torch.no_grad():
        while True:
            order = _ordered(pipe)
            if not isinstance(order, Infer):
                continue  # a `Share` that crossed our last answer
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
        tell(self.pipe, Done(tuple(self.done), self.seconds))

    def _record(self, piece: Piece, file: Any) -> bool:
        began = self._clock()
        try:
            raw = self.tasks[piece.task].infer(self.model, piece.start)
        except Exception:
            tell(self.pipe, Wrong(piece.task, traceback.format_exc(limit=-3)))
            return False
        file.write(msgspec.json.encode([piece.task, piece.start, raw]) + b"\n")
        took = self._clock() - began
        self.seconds[piece.task] = self.seconds.get(piece.task, 0.0) + took
        if piece.task != self._task:
            self._task, self._fresh = piece.task, (0, 0.0)
        self._fresh = (self._fresh[0] + 1, self._fresh[1] + took)
        if time.monotonic() - self._since > SPEAK_EVERY:
            tell(self.pipe, At(piece.task, *self._fresh))
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
            assert isinstance(_ordered(self.pipe), Share)
            kept, given = halves(self.left)
            self.left = list(kept)
            tell(self.pipe, Given(given))


def score(tasks: Mapping[str, Task], pipe: Connection) -> None:
    """The life of a metric worker; ends when the pipe does."""
    torch.set_num_threads(1)
    while True:
        order = _ordered(pipe)
        assert isinstance(order, Score)
        began = time.perf_counter()
        try:
            sums = [tasks[order.piece.task].score(raw) for raw in _read(order)]
            said = _ENCODER.encode(Scored(order.piece, sums, time.perf_counter() - began))
        except Exception:
            said = _ENCODER.encode(Wrong(order.piece.task, traceback.format_exc(limit=-3)))
        pipe.send_bytes(said)


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
