"""Scripted failures: at rank r, step s, a process is killed, stopped, raises or hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Fault:
    """What happens at `step` of `rank`.

    `kill` ends the process with SIGKILL, `stop` freezes it with SIGSTOP, `raise` raises RuntimeError,
    `hang` sleeps for an hour.
    """

    rank: int
    step: int
    do: Literal["kill", "stop", "raise", "hang"]


def strike(faults: Iterable[Fault], rank: int, step: int) -> None:
    """Carries out those of `faults` that are due now. Call it in the step loop of a function run by `forks`.

    >>> script = [Fault(rank=1, step=3, do="raise")]
    >>> strike(script, rank=0, step=3)
    >>> strike(script, rank=1, step=3)
    Traceback (most recent call last):
    RuntimeError: scripted failure at rank 1, step 3
    """
    for fault in faults:
        if (fault.rank, fault.step) == (rank, step):
            _do(fault)


def _do(fault: Fault) -> None:
    if fault.do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.do == "hang":
        time.sleep(3600)
    else:
        raise RuntimeError(f"scripted failure at rank {fault.rank}, step {fault.step}")
