"""Decision log: what a run decided from measurements, so that it can be replayed. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from espalier.track import events


class Recorded(NamedTuple):
    """The values of one rule in a log: from which step on, and which; `until` which step the log goes."""

    values: tuple[tuple[int, int], ...] = ()
    until: int = 0

    def at(self, step: int) -> int | None:
        """The value after `step` steps; None: the log does not know."""
        known = [value for begun, value in self.values if begun <= step]
        return known[-1] if known and step <= self.until else None


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
