"""Low priority for evaluation: niceness, the idle class of disk access, and the scheduler's weight of the session.

Nice 19 has 15 of the 1024 parts of an ordinary process (sched(7)): where training wants all of a core it keeps 98.6 %.
At that weight imports would take minutes beside a busy run, so evaluation starts at nice 10 (110 parts beside 1024) and
steps back once its data is open. An evaluation that runs alone has the priority of any program.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

import psutil

from espalier.evaluate.eval_history import EvalHistory
from espalier.track import events

STARTING, LOWEST = 10, 19
"""Niceness while libraries are imported and data is opened, and from then on."""

TRIES = 50
"""To lower a session, where many processes do so at once."""


def step_back(niceness: int = LOWEST) -> None:
    """Lowers this process to `niceness`, and its session too where it leads one (with automatic grouping, niceness
    counts only within a session). What the system does not have is left out."""
    niceness = max(niceness, os.getpriority(os.PRIO_PROCESS, 0))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    with contextlib.suppress(OSError, AttributeError, psutil.Error):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    for _ in range(TRIES if os.getsid(0) == os.getpid() else 0):
        try:
            Path("/proc/self/autogroup").write_text(str(niceness))
        except BlockingIOError:  # the kernel lets one session in 0.1 s have another weight
            time.sleep(random.uniform(0.1, 0.2))
        except OSError:
            return
        else:
            return


def is_beside_training(run: Path, waits: bool = False) -> bool:
    """Whether a process of this machine trains the run in the folder `run`; with `waits`, also whether one may begin
    to, as the run is not finished."""
    try:
        lock = (run / ".lock").stat().st_ino
        trains = f":{lock} 0 EOF" in Path("/proc/locks").read_text()
    except OSError:
        trains = False
    return trains or (waits and EvalHistory(run / events.NAME).ended != "finished")
