"""The run log as TensorBoard scalars (`[track]` extra): live beside the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from espalier.errors import missing_extra
from espalier.track.events import Event

_KINDS = {"step": "train", "validation": "validation", "checkpoint": "checkpoint"}
_QUIET = ("event", "time", "step")


class TensorBoard:
    """Writes events as scalars into `folder`, step by step. Has state: an open event file.

    Raises UserError when tensorboard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise missing_extra("tensorboard", "track", "track.tensorboard = true") from None
        self._writer = EventFileWriter(str(folder))

    def event(self, event: Event) -> None:
        """Takes one event of the run log; those without a step or numbers leave no trace."""
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = list(scalars(event))
        if not values:
            return
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values])
        self._writer.add_event(Record(wall_time=event.get("time") or time.time(), step=event["step"], summary=summary))

    def close(self) -> None:
        """Writes out what is buffered."""
        self._writer.close()


def scalars(event: Event) -> Iterator[tuple[str, float]]:
    """(name, value) of the numbers in an event of a step, a validation or a checkpoint."""
    kind = _KINDS.get(event["event"])
    if kind is None or event.get("step") is None:
        return
    for key, value in event.items():
        if key in _QUIET:
            continue
        if isinstance(value, dict):
            yield from ((f"{kind}/{key}/{name}", float(item)) for name, item in value.items() if _number(item))
        elif _number(value):
            yield f"{kind}/{key}", float(value)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
