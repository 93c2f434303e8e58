"""Where the time of a run went, and goodput: what failures cost it, by cause. Computed from the run log; no torch.

After Acme (arXiv 2403.07648), section 5, which counts failures and the GPU time they cost by reason. Goodput is the
time of the steps that count as a share of the time somebody wanted the run to go on: from a `run` event to the `end` or
the last event before somebody had to begin it anew. What lies between two such times is nobody's loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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
        down: from failures to the ends of next steps; failures: how many; causes: the dearest first.
    """

    wall: float = 0.0
    useful: float = 0.0
    exposed: float = 0.0
    waited: float = 0.0
    validating: float = 0.0
    saving: float = 0.0
    recovering: float = 0.0
    again: float = 0.0
    down: float = 0.0
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


class _StepSeconds(NamedTuple):
    """Seconds of a step, and of these the waits for communication and for batches."""

    seconds: float
    exposed: float
    waited: float


_Key = tuple[str, str, str]
"""Kind, category and reason."""
_NOBODYS: _Key = (UNATTENDED, "", "")


@dataclass
class GoodputMeter:
    """Takes events one after the other. Has state: what has happened so far."""

    _wall: float = 0.0
    _began: float | None = None
    _last: float = 0.0
    _done: dict[int, _StepSeconds] = field(default_factory=dict)
    _validating: float = 0.0
    _saving: float = 0.0
    _recovering: float = 0.0
    _lost_since: float | None = None
    """The time of the last event before a failure after which no step was made yet, and the validations since."""
    _causes: dict[_Key, FailureCost] = field(default_factory=dict)
    _failed: _Key | None = None
    """The failure that the run has not got over."""
    _until: int | None = None
    """The last step of the phase that began last."""

    def take(self, event: Event) -> None:
        """One more event of the run log, in its order."""
        kind, now = event["event"], event.get("time") or 0.0
        if kind == "run":
            self._begins(event, now)
        elif kind == "step":
            self._goes_on(now - (event.get("seconds") or 0.0))
            self._done[event["step"]] = _StepSeconds(*(event.get(name) or 0.0 for name in _StepSeconds._fields))
        elif kind == "validation":
            self._validating += (seconds := (event.get("seconds") or 0.0))
            if self._lost_since is not None:
                self._lost_since += seconds
        elif kind == "checkpoint":
            self._saving += event.get("blocked") or 0.0
        elif kind == "incident" and "attempt" in event:
            self._failed = _key(event)
            self._book(self._failed, count=1)
            self._lost_since = self._last if self._lost_since is None else self._lost_since
        elif kind == "recovered":
            self._book(_key(event), recovered=1, down=(event.get("seconds") or 0.0))
            self._failed = None
        self._last = max(self._last, now)
        if kind == "end":
            self._close()

    def account(self) -> Account:
        wall = self._wall + (self._last - self._began if self._began is not None else 0.0)
        causes = self._causes.values()
        return Account(
            wall=wall,
            useful=sum(step.seconds for step in self._done.values()),
            exposed=sum(step.exposed for step in self._done.values()),
            waited=sum(step.waited for step in self._done.values()),
            validating=self._validating,
            saving=self._saving,
            recovering=self._recovering,
            again=sum(cause.again for cause in causes),
            down=sum(cause.down for cause in causes),
            failures=sum(cause.count for cause in causes),
            causes=tuple(sorted(causes, key=lambda cause: (-(cause.down + cause.again), cause.kind, cause.reason))),
        )

    def _begins(self, event: Event, now: float) -> None:
        phase_over = self._until == (event.get("step") or 0)
        self._until = event.get("until")
        if self._began is not None and not self._failed and not phase_over:
            # The last attempt neither ended nor failed by any record: nobody was left to write it.
            self._failed = _NOBODYS
            self._book(_NOBODYS, count=1)
            self._close()
        again = [step for step in self._done if step > (event.get("step") or 0)]
        seconds = sum(self._done.pop(step).seconds for step in again)
        if self._failed:
            self._book(self._failed, steps=len(again), again=seconds)
        if self._failed == _NOBODYS:
            self._failed = None
        if self._began is None:
            self._began = now

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


def account(events: Iterable[Event]) -> Account:
    """What the failures in a run log cost."""
    ledger = GoodputMeter()
    for event in events:
        ledger.take(event)
    return ledger.account()
