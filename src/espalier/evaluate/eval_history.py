"""What a run log says of evaluations, read on as it grows: which are done, how long they took, how the run stands."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from espalier.recipe import serialization
from espalier.track.events import Event


class ResultKey(NamedTuple):
    """One task of one checkpoint: the seal of its manifest, the task's name, a hash of what is asked."""

    checkpoint: str
    task: str
    content: str


class EvalHistory:
    """The evaluations in the run log at `path`. Has state: how far it was read.

    Attributes:
        ended: how the run ended (`finished` …); empty while it goes on.
        saved: steps whose checkpoint was committed.
        said: what incidents say.
        figures: the metrics of each evaluation.
        done: evaluations whose figures are all in the log, or that failed.
        seconds: for each record of a task, by its name, when it was last evaluated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ended = ""
        self._offset = 0
        self.saved: set[int] = set()
        self.notes: set[str] = set()
        self.figures: dict[ResultKey, set[str]] = {}
        self.done: set[ResultKey] = set()
        self.seconds: dict[str, float] = {}
        self.update()

    def update(self) -> None:
        """Reads whole lines that are new. A log that is not there has nothing new."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                fresh = file.read()
        except FileNotFoundError:
            return
        whole = fresh.rfind(b"\n") + 1  # a torn last line may still become whole, or be cut off
        self._offset += whole
        for line in fresh[:whole].splitlines():
            try:
                self._take(serialization.from_json(line))
            except (msgspec.DecodeError, ArithmeticError, KeyError, TypeError, ValueError):
                continue  # not an event, or not of ours

    def _take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "run":
            self.ended = ""
        elif kind == "end":
            self.ended = str(event.get("reason", "finished"))
        elif kind == "checkpoint":
            self.saved.add(int(event.get("step", 0)))
        elif kind == "incident":
            self.notes.add(str(event.get("what", "")))
            if event.get("kind") == "eval":
                self.done.add(_key(event))
        elif kind == "eval":
            key = _key(event)
            figures = self.figures.setdefault(key, set())
            figures.add(str(event.get("metric", "")))
            if len(figures) >= int(event.get("figures", 1)):
                self.done.add(key)
            self.seconds[key.task] = float(event["seconds"]) / int(event["records"])


def _key(event: Event) -> ResultKey:
    return ResultKey(*(str(event.get(name, "")) for name in ResultKey._fields))
