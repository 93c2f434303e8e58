"""How long tasks took before: seconds per record of inference and of metric, an exponential average, kept in a file.

After Acme's table of prior run times (arXiv 2403.07648). Inference on the CPU is counted in processor seconds, so that
a worker that had to wait for training does not look like a task that got slower.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from espalier import encoding

WEIGHT = 0.3
"""Of the newest measurement; three to four measurements make up most of the average."""

GUESS = 0.02
"""Seconds per record of a task nobody has seen: a first trial that is wrong is cut while it runs."""

WRONG = 2.0
"""A prior that is off by more than this factor is followed by a new cut of what is left (Acme's 2x)."""


class Prior(msgspec.Struct, frozen=True):
    """Seconds per record, and from how many trials they are known (0: a guess)."""

    inference: float = GUESS
    metric: float = 0.0
    trials: int = 0

    def updated(self, inference: float | None = None, metric: float | None = None) -> Prior:
        """With one more trial's measured seconds per record of a stage; the first one replaces the guess."""
        if metric is not None:
            known = self.metric > 0.0
            return msgspec.structs.replace(
                self, metric=self.metric + (WEIGHT if known else 1.0) * (metric - self.metric)
            )
        assert inference is not None
        weight = WEIGHT if self.trials else 1.0
        return msgspec.structs.replace(
            self, inference=self.inference + weight * (inference - self.inference), trials=self.trials + 1
        )

    def wrong(self, inference: float) -> bool:
        """Whether measured seconds per record are more than `WRONG` times off."""
        return not self.inference / WRONG <= inference <= self.inference * WRONG


class Priors:
    """Priors by task, in a JSON file. Has state: what was measured since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._table: dict[str, Prior] = {}
        # A file that is missing or damaged costs a worse first cut, nothing else.
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._table = encoding.from_json(path.read_bytes(), dict[str, Prior])

    def of(self, task: str) -> Prior:
        """What is known of `task`; a guess when nothing is."""
        return self._table.get(task, Prior())

    def learn(self, task: str, inference: float | None = None, metric: float | None = None) -> None:
        """Takes one trial's measured seconds per record of `task`, of one stage."""
        self._table[task] = self.of(task).updated(inference, metric)

    def save(self) -> None:
        """Writes the file whole or not at all."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(self._table), indent=1))
        os.replace(temporary, self.path)
