"""What the run log says of evaluation so far, read on as it grows: what is done, and how the run stands."""

from __future__ import annotations

from pathlib import Path

import msgspec

from espalier import encoding
from espalier.track.events import Event


class History:
    """The part of a run log that concerns us. Has state: how far it was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ended = ""
        """How the run ended (`finished` …); empty while it goes on."""
        self.saved: set[int] = set()
        """Steps whose checkpoint was committed."""
        self.said: set[str] = set()
        """What incidents say."""
        self._offset = 0
        self._figures: dict[tuple[str, str, str], set[str]] = {}
        self._done: set[tuple[str, str, str]] = set()
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
            self._take(line)

    def done(self, seal: str, task: str, content: str) -> bool:
        """Whether that task of that checkpoint has been done."""
        return (seal, task, content) in self._done

    def has(self, seal: str, task: str, content: str, metric: str) -> bool:
        """Whether that figure stands in the log."""
        return metric in self._figures.get((seal, task, content), ())

    def mark(self, seal: str, task: str, content: str) -> None:
        """That task of that checkpoint is done, all its figures in the log."""
        self._done.add((seal, task, content))

    def _take(self, line: bytes) -> None:
        try:
            event: Event = encoding.from_json(line)
            self._hear(event, event["event"])
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            return  # not an event, or not of ours

    def _hear(self, event: Event, kind: str) -> None:
        if kind == "run":
            self.ended = ""
        elif kind == "end":
            self.ended = str(event.get("reason", "finished"))
        elif kind == "checkpoint":
            self.saved.add(int(event.get("step", 0)))
        elif kind == "incident":
            self.said.add(str(event.get("what", "")))
        self._evaluated(event)

    def _evaluated(self, event: Event) -> None:
        key = (str(event.get("checkpoint", "")), str(event.get("task", "")), str(event.get("content", "")))
        if event["event"] == "eval":
            self._figures.setdefault(key, set()).add(str(event.get("metric", "")))
            if len(self._figures[key]) >= int(event.get("figures", 1)):
                self._done.add(key)
        elif event["event"] == "incident" and event.get("kind") == "eval":
            self._done.add(key)
