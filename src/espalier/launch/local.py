"""Starts the ranks on this machine, once, and watches them. A rank that dies ends the run at once, with its cause.

Ranks are forked from this process (`rank_process`), which has torch imported already, so they start in milliseconds. A
run that is to go on after a failure is `supervisor`'s.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from espalier.errors import EspalierError, Interrupted, PeerLost
from espalier.launch import rank_process as ranks
from espalier.launch.base import Entrypoint, RankSpec
from espalier.launch.rank_process import Child

GRACE_SECONDS = 3.0
"""How long the other ranks may take to end by themselves once one has died."""


class Signals:
    """Who is told of Ctrl-C and its like. Has state: the children there are now, and the signals that came."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.seen: list[int] = []

    def pass_on(self, number: int, frame: FrameType | None = None) -> None:
        """The first signal asks the ranks to save and stop; the second ends them at once."""
        self.seen.append(number)
        for child in self.children:
            if child.status is None:
                os.kill(child.pid, signal.SIGINT if len(self.seen) == 1 else signal.SIGKILL)

    def ask(self) -> None:
        """Asks the ranks to save and stop although nobody outside did."""
        for child in self.children:
            if child.status is None:
                os.kill(child.pid, signal.SIGINT)

    def add(self, child: Child) -> None:
        """One more child, which hears of what came before it."""
        self.children.append(child)
        if self.seen:
            os.kill(child.pid, signal.SIGINT)


@contextmanager
def passing_on_signals() -> Iterator[Signals]:
    """Passes Ctrl-C (unless it is ignored, as under `nohup … &`), SIGTERM and Slurm's SIGUSR1 on to the children."""
    signals = Signals()
    numbers = [signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, signals.pass_on) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(task: Entrypoint, places: Sequence[RankSpec]) -> list[Any]:
    """Runs `task` in one process per place; returns what each returned, in order.

    Raises the error of the rank that failed first (`RunFailed`, or the `EspalierError` it raised itself), and
    `Interrupted` when stopped by Ctrl-C or SIGTERM.
    """
    with passing_on_signals() as signals:
        failed = None
        try:
            for child in ranks.start(task, places):
                signals.add(child)
            failed = next((one for one in ranks.endings(signals.children, 1.0) if one and one.failed), None)
        finally:
            end(signals.children)
    if failed is not None:
        raise cause(failed, signals.children, bool(signals.seen))
    return [child.returned for child in signals.children]


def end(children: Sequence[Child], grace: float = GRACE_SECONDS) -> None:
    """Leaves no child behind: once one has failed, a grace period of `grace` seconds, then SIGKILL for all."""
    deadline = time.monotonic() + grace
    failed = any(child.failed for child in children)
    while failed and time.monotonic() < deadline and any(child.status is None for child in children):
        for child in children:
            if child.status is None:
                child.reap(block=False)
        time.sleep(0.02)
    for child in children:
        child.kill()
    for child in children:
        child.close()


def cause(first: Child, children: Sequence[Child], interrupted: bool) -> EspalierError:
    """The error to show: a rank's own before one that merely lost a peer."""
    killed = [child for child in children if child.status is not None and child.status < 0]
    raised = [child.error for child in (first, *children) if child.error is not None]
    own = [error for error in raised if not isinstance(error, PeerLost)]
    if own:
        return own[0]
    if interrupted:
        return Interrupted("Stopped before the state could be saved.")
    dead = first if first in killed or not killed else killed[0]
    if raised and dead.status is not None and dead.status >= 0:
        return raised[0]
    return ranks.died(dead)
