"""Where the time of a run went, and goodput: what failures cost it, by cause. Computed from the run log; no torch.

After Acme (arXiv 2403.07648), section 5, which counts failures and the GPU time they cost by reason. Goodput is the
time of the steps that count as a share of the time somebody wanted the run to go on: from a `run` event to the `end` or
the last event before somebody had to begin it anew.
The first begins when its command was entered. What lies between two such times is nobody's loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from espalier.track.events import Event

UNATTENDED = "supervisor"
"""The kind of a stop that nobody was left to write down."""


@dataclass(frozen=True)
class FailureCost:
    """What one kind of failure cost.

    Attributes:
        kind, category, reason: as in the incidents; the last two are empty where nobody diagnosed it.
        count: how often; recovered: how often the run went on by itself.
        down: seconds from failures to the next steps; again: seconds of the steps that had to be done again.
        steps: how many those were.
    """

    kind: str
    count: int = 0
    recovered: int = 0
    down: float = 0.0
    again: float = 0.0
    steps: int = 0
    category: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Account:
    """All of a run. Seconds.

    Attributes:
        wall: while somebody wanted it to go on; useful: of the steps that count; again: of steps done again.
        exposed, waited: of `useful`, waits for communication and for batches, on the rank that writes the run log.
        validating; saving: while training stood still for a checkpoint.
        recovering: from the last event before a failure to the begin of the next step.
        failures: how many; causes: the dearest first.
    """

    wall: float = 0.0
    useful: float = 0.0
    exposed: float = 0.0
    waited: float = 0.0
    validating: float = 0.0
    saving: float = 0.0
    recovering: float = 0.0
    again: float = 0.0
    failures: int = 0
    causes: tuple[FailureCost, ...] = ()

    @property
    def goodput(self) -> float:
        """Share of the wall time spent in steps that count."""
        return self.useful / self.wall if self.wall else 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what they were spent on. They sum to `wall`; `starting and other` is what nothing else names:
        the start, the first plan, samples, the end."""
        known = {
            "computing": self.useful - self.exposed - self.waited,
            "waiting for communication": self.exposed,
            "waiting for batches": self.waited,
            "validating": self.validating,
            "saving": self.saving,
            "steps done again": self.again,
            "recovering": self.recovering,
        }
        return {**known, "starting and other": self.wall - sum(known.values())}

    @property
    def between_failures(self) -> float:
        """Mean seconds between failures; infinite without any."""
        return self.wall / self.failures if self.failures else float("inf")


@dataclass
class Segment:
    """The events between two that begin, end or interrupt an attempt. Times are seconds since 1970.

    Attributes:
        end: the event after them: run, incident, recovered or end; one without a name where the log ends.
        first: when its first step began; None: it has none. last: the time of its last event.
        before_first: seconds of the validations before its first step.
        spent: seconds by what on: `seconds`, `exposed` and `waited` of the steps that count, validating and saving.
        lost_steps, lost_seconds: of the steps, here and earlier, that the run in `end` had to do again.
    """

    end: Event = field(default_factory=lambda: {"event": ""})
    first: float | None = None
    last: float = 0.0
    before_first: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    lost_steps: int = 0
    lost_seconds: float = 0.0

    @property
    def time(self) -> float:
        """Of `end`; 0 where it is not known."""
        return self.end.get("time") or 0.0

    def add_others(self, events: Sequence[tuple[int, Event]], has_steps: bool) -> None:
        """Events that are no steps and stand before those added so far; each with how many steps precede it, where the
        part of the log that they are from `has_steps`."""
        if has_steps:
            self.before_first = 0.0
        for steps_before, event in events:
            self.last = max(self.last, event.get("time") or 0.0)
            if event["event"] == "validation":
                seconds = event.get("seconds") or 0.0
                self.spent["validating"] += seconds
                self.before_first += 0.0 if steps_before else seconds
            elif event["event"] == "checkpoint":
                self.spent["saving"] += event.get("blocked") or 0.0


_Key = tuple[str, str, str]
"""Kind, category and reason."""
_NOBODYS: _Key = (UNATTENDED, "", "")


class GoodputMeter:
    """Goes through segments of a log, in its order. Has state: what has happened so far."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self._wall, self._last, self._recovering = 0.0, 0.0, 0.0
        self._began: float | None = None
        self._lost_since: float | None = None
        """The time of the last event before a failure after which no step was made yet, and the validations since."""
        self._causes: dict[_Key, FailureCost] = {}
        self._failed: _Key | None = None
        """The failure that the run has not got over."""
        self._until: int | None = None
        """The last step of the phase that began last."""
        self._spent: dict[str, float] = defaultdict(float)
        for segment in segments:
            self._take(segment)

    def _take(self, segment: Segment) -> None:
        for name, seconds in segment.spent.items():
            self._spent[name] += seconds
        if self._lost_since is not None:
            self._lost_since += segment.before_first
        if segment.first is not None:
            self._goes_on(segment.first)
        self._last = max(self._last, segment.last)
        event = segment.end
        if event["event"] == "run":
            self._begins(segment)
        elif event["event"] == "incident":
            self._failed = _key(event)
            self._book(self._failed, count=1)
            self._lost_since = self._last if self._lost_since is None else self._lost_since
        elif event["event"] == "recovered":
            self._book(_key(event), recovered=1, down=(event.get("seconds") or 0.0))
            self._failed = None
        self._last = max(self._last, segment.time)
        if event["event"] == "end":
            self._close()

    def account(self) -> Account:
        """Of all of them."""
        causes = self._causes.values()
        spent = self._spent
        return Account(
            wall=self._wall + (self._last - self._began if self._began is not None else 0.0),
            useful=spent["seconds"],
            **{name: spent[name] for name in ("exposed", "waited", "validating", "saving")},
            recovering=self._recovering,
            again=sum(cause.again for cause in causes),
            failures=sum(cause.count for cause in causes),
            causes=tuple(sorted(causes, key=lambda cause: (-(cause.down + cause.again), cause.kind, cause.reason))),
        )

    def _begins(self, segment: Segment) -> None:
        event = segment.end
        phase_over = self._until == (event.get("step") or 0)
        self._until = event.get("until")
        if self._began is not None and not self._failed and not phase_over:
            # The last attempt neither ended nor failed by any record: nobody was left to write it.
            self._failed = _NOBODYS
            self._book(_NOBODYS, count=1)
            self._close()
        if self._failed:
            self._book(self._failed, steps=segment.lost_steps, again=segment.lost_seconds)
        if self._failed == _NOBODYS:
            self._failed = None
        if self._began is None:
            self._began = event.get("entered") or segment.time

    def _book(self, key: _Key, **more: float) -> None:
        """Adds to what failures of this cause cost."""
        kind, category, reason = key
        cause = self._causes.get(key) or FailureCost(kind, category=category, reason=reason)
        sums: dict[str, Any] = {name: getattr(cause, name) + value for name, value in more.items()}
        self._causes[key] = replace(cause, **sums)

    def _goes_on(self, now: float) -> None:
        """At `now` a step began: a failure before it is over."""
        if self._lost_since is not None:
            self._recovering += max(0.0, now - self._lost_since)
            self._lost_since = None

    def _close(self) -> None:
        self._goes_on(self._last)
        if self._began is not None:
            self._wall += self._last - self._began
        self._began, self._failed = None, None if self._failed != _NOBODYS else self._failed


def _key(event: Event) -> _Key:
    return str(event.get("kind", "unknown")), str(event.get("category") or ""), str(event.get("reason") or "")
