"""Scripted failures: at rank r, step s, a process is killed, stopped, raises or hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Fault:
    """What happens at `step` of `rank`.

    `kill` ends the process with SIGKILL, `terminate` sends it SIGTERM, `stop` freezes it with SIGSTOP, `raise` raises
    RuntimeError, `hang` sleeps for an hour, `burn` computes for `seconds`, `exit` leaves at once as if all were well.
    """

    rank: int
    step: int
    do: Literal["kill", "terminate", "stop", "raise", "hang", "burn", "exit"]
    seconds: float = 8.0


def strike(faults: Iterable[Fault], rank: int, step: int, once: Path | None = None) -> None:
    """Carries out those of `faults` that are due now. Call it in the step loop of a function run by `forks`.

    With a folder `once`, each is carried out only once, however often the run is taken up again.

    >>> script = [Fault(rank=1, step=3, do="raise")]
    >>> strike(script, rank=0, step=3)
    >>> strike(script, rank=1, step=3)
    Traceback (most recent call last):
    RuntimeError: scripted failure at rank 1, step 3
    """
    for fault in faults:
        if (fault.rank, fault.step) == (rank, step) and _first(fault, once):
            _do(fault)


def _first(fault: Fault, once: Path | None) -> bool:
    if once is None:
        return True
    try:
        (once / f"{fault.do}-{fault.rank}-{fault.step}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _do(fault: Fault) -> None:
    if fault.do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.do == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault.do == "exit":
        os._exit(0)
    elif fault.do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.do == "hang":
        time.sleep(3600)
    elif fault.do == "burn":
        until = time.monotonic() + fault.seconds
        while time.monotonic() < until:
            pass
    else:
        raise RuntimeError(f"scripted failure at rank {fault.rank}, step {fault.step}")
