"""Startup of a command: when it was entered, and the stages before the first step with their seconds. No torch.

Every clock of a run, on the terminal, in its log and on its page, counts from that moment.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from espalier.recipe.terminal import say
from espalier.recipe.units import show_seconds

SHOWN = 0.2
"""Seconds from which a stage is shown."""


@dataclass
class Startup:
    """Has state: the stages so far. Ranks that are forked take it along.

    Attributes:
        entered: unix seconds; since: when the stage before this one ended.
        stages: (what, its seconds, seconds from `entered` to its end) of each that is shown; None: they are over, or
            this is no run.
    """

    entered: float
    since: float
    stages: list[tuple[str, float, float]] | None = None

    def ended(self, what: str, out: TextIO | None = None) -> None:
        """The stage `what` ends, which followed the one before; it is shown on `out`, by default standard error."""
        now = time.time()
        took, self.since = now - self.since, now
        if self.stages is not None and took >= SHOWN:
            self.stages.append((what, took, now - self.entered))
            text = f"{show_seconds(now - self.entered):>8}  {what}: {show_seconds(took)}"
            say(text, file=out or sys.stderr, flush=True)


def process_began() -> float:
    """Unix seconds when this process was begun, from Linux's /proc; elsewhere this moment."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.time()


STARTUP = Startup(time.time(), time.time())
"""Of this process's command."""
