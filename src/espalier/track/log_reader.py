"""Run log read from its end, in bounded memory: what a later attempt did anew counts, what it replaced does not.

Every step, and every `run` event, is a barrier to what stands before it in the log: of the steps there, only those with
a lower number count. Read backwards, a line's fate is known when it is met. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, compress
from math import inf
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from espalier.track import events
from espalier.track.events import Event
from espalier.track.goodput import Segment

Array = NDArray[Any]

SCALARS = ("time", *events.step_fields("whole", "number"))
TABLES = events.step_fields("numbers")
"""Fields of a step that are a number, and that are numbers by name."""
_STEP = (b'{"event":"step"', b'{"event": "step"')
SPENT = ("seconds", "exposed", "waited")
_ENDS = ("run", "recovered", "end")


@dataclass
class LogSpan:
    """Consecutive events of one attempt.

    Attributes:
        steps, lines: its steps, and the line of each.
        others: other events, each with the number of the steps that stand before it.
        end: the event after them that begins, ends or interrupts an attempt; empty: none does.
        values: of each of SCALARS float64 [steps], NaN where a step lacks one.
        counts: [steps] bool, whether no later attempt did the step anew.
    """

    steps: list[Any] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    others: list[tuple[int, Event]] = field(default_factory=list)
    end: Event = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)
    counts: Array = field(default_factory=lambda: np.empty(0, bool))

    def events(self) -> Iterator[Event]:
        """The other events and the `end`, the last first."""
        yield from [self.end] * bool(self.end)
        yield from (event for _, event in reversed(self.others))

    def counted(self, newest: int | None = None) -> Iterator[Event]:
        """The steps that count, or the `newest` of them, with all their fields, the last first."""
        for index in np.flatnonzero(self.counts)[::-1][:newest]:
            event, _ = events.parsed(self.lines[index])
            yield event or {}

    def columns(self) -> dict[str, Array]:
        """Of the steps that count, float64 [steps]: SCALARS, and what is in TABLES as `bytes.gradients`."""
        columns = {name: values[self.counts] for name, values in self.values.items()}
        steps = list(compress(self.steps, self.counts))
        for name in TABLES:
            tables = list(map(attrgetter(name), steps))
            for key in dict.fromkeys(chain.from_iterable(filter(None, tables))):
                values = [np.nan if table is None else table.get(key, np.nan) for table in tables]
                columns[f"{name}.{key}"] = np.array(values, np.float64)
        return columns


class LogReader:
    """Reads the blocks of a log, the last first (`events.blocks`). Has state: how far it is.

    Attributes:
        segments: what the time went into, the latest first; complete when all spans have been read.
    """

    def __init__(self, blocks: Iterable[list[bytes]]) -> None:
        self.blocks = blocks
        self.segments = [Segment()]
        self._barriers: list[tuple[float, Segment | None]] = []  # ascending, the nearest in the log last
        self._lines, self._misfits, self._first = 0, 0, (0, "")

    def spans(self) -> Iterator[LogSpan]:
        """The spans, the last of the log first. Of the events in `others` only those that count are left."""
        for lines in self.blocks:
            for span in reversed(self._decoded(lines)):
                self._sort_out(span)
                yield span
            self._lines += len(lines)

    def left_out(self) -> list[Event]:
        """An incident that counts the lines that are no events, once all has been read; none where all are."""
        after, reason = self._first
        return events.left_out(events.NAME, self._misfits, self._lines - after, reason)

    def _decoded(self, lines: list[bytes]) -> list[LogSpan]:
        spans = [LogSpan()]
        misfits: list[tuple[int, str]] = []
        for number, line in enumerate(lines):
            span = spans[-1]
            if line.startswith(_STEP):
                try:
                    span.steps.append(events.decode_step(line))
                    span.lines.append(line)
                    continue
                except (msgspec.DecodeError, UnicodeDecodeError):
                    pass  # a number that is not finite, or a line of somebody else
            torn = not self._lines and number == len(lines) - 1
            event, reason = events.parsed(line)
            if event is None:
                if line and not (torn and reason == events.NO_EVENT):
                    misfits.append((self._lines + len(lines) - number - 1, reason))
            elif event["event"] == "step":
                span.steps.append(events.as_step(event))
                span.lines.append(line)
            elif event["event"] in _ENDS or (event["event"] == "incident" and "attempt" in event):
                span.end = event
                spans.append(LogSpan())
            else:
                span.others.append((len(span.steps), event))
        self._misfits += len(misfits)
        self._first = [*misfits, self._first][0]
        return spans

    def _sort_out(self, span: LogSpan) -> None:
        """Which events of the span count, by those after it; takes its seconds."""
        if span.end:
            self.segments.append(Segment(span.end))
            if span.end["event"] == "run" and span.end.get("step") is not None:
                self._bar(span.end["step"] + 1, self.segments[-1])
        span.values = {name: _column(name, span.steps) for name in SCALARS}
        steps = span.values["step"]
        bounds = np.array([bound for bound, _ in self._barriers])
        later = np.minimum.accumulate(np.append(steps, inf)[::-1])[::-1]
        nearest = np.searchsorted(bounds, steps, side="right")
        once = steps < later[1:]
        span.counts = once & (nearest == 0)
        self._book(span, np.where(once, nearest, 0))
        frontier = bounds[0] if len(bounds) else inf
        span.others = [
            (before, event)
            for before, event in span.others
            if event["event"] not in events.BY_STEP or event["step"] < min(frontier, later[before])
        ]
        if span.steps:
            self._bar(float(later[0]), None)

    def _bar(self, step: float, segment: Segment | None) -> None:
        """From here on to the front, steps from `step` on do not count; `segment` ends where they were lost."""
        while self._barriers and self._barriers[-1][0] >= step:
            self._barriers.pop()
        self._barriers.append((step, segment))

    def _book(self, span: LogSpan, lost_at: Array) -> None:
        """The seconds of a span. `lost_at`: for each step 0, or which barrier it was lost at, from 1."""
        columns = {name: np.nan_to_num(span.values[name]) for name in ("time", *SPENT)}
        segment = self.segments[-1]
        segment.add_others(span.others, has_steps=bool(span.steps))
        if span.steps:
            segment.first = columns["time"][0] - columns["seconds"][0]
            segment.last = max(segment.last, float(columns["time"].max()))
        for name in SPENT:
            segment.spent[name] += float(columns[name][span.counts].sum())
        for index in np.unique(lost_at[lost_at > 0]):
            loser = self._barriers[index - 1][1]
            if loser is not None:
                loser.lost_steps += int((lost_at == index).sum())
                loser.lost_seconds += float(columns["seconds"][lost_at == index].sum())


def _column(name: str, steps: list[Any]) -> Array:
    values = list(map(attrgetter(name), steps))
    if None in values[:1] and values.count(None) == len(values):
        return np.full(len(values), np.nan)
    return np.array(values, np.float64)
