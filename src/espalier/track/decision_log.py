"""Decision log: what a run decides from measurements, on all ranks alike, and so that it can be replayed. No torch.

How long CO2's rounds are, how Sylvie's rows cross and which edges TorchGT leaves out follow signals: each is a
`Controller`, whose `Decisions` go into the run's log and are taken from there for steps that are made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from espalier.track import events


class Recorded(NamedTuple):
    """The values of one rule in a log: from which step on, and which; `until` which step the log goes."""

    values: tuple[tuple[int, int], ...] = ()
    until: int = 0

    def at(self, step: int) -> int | None:
        """The value after `step` steps; None: the log does not know."""
        known = [value for begun, value in self.values if begun <= step]
        return known[-1] if known and step <= self.until else None


class Controller(Protocol):
    """Values that follow signals: what was heard takes effect at the next turn (a round, or a step)."""

    @property
    def values(self) -> Mapping[str, int]:
        """By rule, as plans and logs name it."""

    def heard(self, signals: Iterable[float]) -> Self:
        """With the signals of all who decide together."""

    def turned(self, recorded: Mapping[str, int]) -> Self:
        """What holds from now on. What was `recorded` counts more than what was heard."""


Decided = Callable[[str, int, int], None]
"""Told a rule, after how many steps it has another value, and which."""


class Decisions:
    """What a controller decides, in the log and as the log says. Has state.

    Attributes:
        now: the controller; signal: what it hears, for people.
        logs: of other runs, which count where this run's own log does not know.
        tell: where decisions go.
        replayed: called when a log is to be followed.
    """

    def __init__(self, now: Controller, signal: str, logs: Sequence[str | Path] = ()) -> None:
        self.now, self.signal, self.logs = now, signal, tuple(logs)
        self.recorded: Mapping[str, Sequence[Recorded]] = {}
        self.tell: Decided = lambda rule, step, value: None
        self.replayed: Callable[[], None] = lambda: None

    def heard(self, signals: Iterable[float]) -> None:
        self.now = self.now.heard(signals)

    def turn(self, step: int) -> None:
        """What was decided holds after `step` steps. All ranks call it alike."""
        before = dict(self.now.values)
        known: dict[str, int] = {}
        for name, logs in self.recorded.items():
            values = (log.at(step) for log in logs)
            if (value := next((value for value in values if value is not None), None)) is not None:
                known[name] = value
        self.now = self.now.turned(known)
        for name, value in self.now.values.items():
            if value != before[name]:
                self.tell(name, step, value)

    def replay(self, recorded: Mapping[str, Sequence[Recorded]]) -> None:
        """Decides as the first of `recorded` that knows the step says, by rule, beyond them as heard. All ranks call it
        alike, after the state was restored."""
        self.recorded = recorded
        self.replayed()


def recorded(log: str | Path, name: str) -> Recorded:
    """What `log`, a run log or a run folder, says of the rule `name`. Of a step that came twice, as the run was taken
    up again, the later counts. Raises UserError when there is no such file."""
    path = Path(log)
    values: dict[int, int] = {}
    until = 0
    for event in events.read(path / events.NAME if path.is_dir() else path):
        if event["event"] == "rule" and event["name"] == name:
            values[int(event["step"])] = int(event["value"])
        elif event["event"] == "step":
            until = max(until, int(event["step"]))
    return Recorded(tuple(sorted(values.items())), until)
