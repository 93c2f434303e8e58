"""Elastic agent: forks, watches and ends the ranks of one host, on the commands of a supervisor (local or remote).

Ranks are forked from this process (`rank_process`), which has torch imported already, so they start in milliseconds.
Whether an attempt is over and another is worth while is the supervisor's to say (`supervisor`); `run` is for what is
started once and ends with the first rank that dies.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Protocol

from espalier.launch.ranks import postmortem
from espalier.launch.ranks import rank_process as ranks
from espalier.launch.ranks.postmortem import Ended
from espalier.launch.ranks.process_stats import GONE, vital
from espalier.launch.ranks.rank_process import Child
from espalier.launch.ranks.resize import RunShape
from espalier.launch.resilience.hang_detector import Vital
from espalier.train import rejoin_signal
from espalier.train.failure import Failure
from espalier.train.heartbeat import Pulses
from espalier.train.rank_spec import Entrypoint, RankSpec
from espalier.train.rejoin_signal import Call
from espalier.train.signal_handling import handling

GRACE_SECONDS = 3.0
"""How long the other ranks may take to end by themselves once one has died."""
PATIENCE = 3600.0
"""Seconds in which ranks that were left come to the end of a round."""


class WallClock(Protocol):
    """Time as supervisors and agents see it: the `time` module, or simulated."""

    def monotonic(self) -> float:
        """Seconds since some moment."""

    def sleep(self, seconds: float, /) -> None:
        """Returns after so many seconds."""


class Signals:
    """Passes Ctrl-C and its like on to ranks. Has state: the ranks there are now, and the signals that came."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.seen: list[int] = []

    def pass_on(self, number: int, frame: FrameType | None = None) -> None:
        """The first signal asks the ranks to save and stop; the second ends them at once."""
        self.seen.append(number)
        for child in self.children:
            child.signal(signal.SIGINT if len(self.seen) == 1 else signal.SIGKILL)

    def ask(self) -> None:
        """Asks the ranks to save and stop although nobody outside did."""
        for child in self.children:
            child.signal(signal.SIGINT)

    def add(self, child: Child) -> None:
        """One more rank, which hears of what came before it."""
        self.children.append(child)
        if self.seen:
            child.signal(signal.SIGINT)


@contextmanager
def passing_on_signals() -> Iterator[Signals]:
    """Passes Ctrl-C, SIGTERM and Slurm's SIGUSR1 on to the ranks."""
    signals = Signals()
    with handling(signals.pass_on, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        yield signals


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks of a run.

    Attributes:
        number: from 0.
        specs: of the ranks, in order.
        pulses: where they show their signs of life.
        between_failures: seconds, as `checkpoint.shared_memory` has them.
        later: ranks that stay come at the end of a round; the new ones wait for them.
    """

    number: int
    specs: Sequence[RankSpec]
    pulses: Pulses
    between_failures: float = 0.0
    later: bool = False

    @classmethod
    def of(
        cls, number: int, places: Sequence[RankSpec], pulses: Pulses, between: float = 0.0, later: bool = False
    ) -> Attempt:
        """The start `number` of the ranks at `places`, of which nothing is known yet."""
        specs = [
            replace(
                place,
                attempt=place.attempt + number,
                pulse=pulses.of(index),
                refuge=place.refuge and replace(place.refuge, between_failures=between),
                patience=PATIENCE if later else 0.0,
            )
            for index, place in enumerate(places)
        ]
        return cls(number, specs, pulses, between, later)


class Agent(Protocol):
    """What a supervisor asks of the processes of its ranks: `LocalAgent` on one host, `leader.HostAgents` on several.

    Attributes:
        signals: who passes Ctrl-C on.
    """

    signals: Signals

    @property
    def children(self) -> list[Child]:
        """The ranks of this attempt, in order."""

    @property
    def current(self) -> bool:
        """Whether what is known of all ranks is of now: what ranks of this host show lies in its memory."""
        return True

    def start(self, attempt: Attempt) -> None:
        """Starts all ranks of `attempt`."""

    def take(self, shape: RunShape) -> Sequence[RankSpec]:
        """The next attempt is of `shape`; its places."""

    def replace(self, attempt: Attempt, gone: Sequence[int]) -> None:
        """Starts the ranks `gone` anew; the others are told to rejoin, in the processes that they are."""

    def revive(self, gone: Child) -> None:
        """Starts alone what serves the others, where it was killed and `when_killed` says so."""

    def end(self, grace: float) -> None:
        """Ends all ranks, those that end by themselves within `grace` seconds of a failure excepted."""

    def endings(self, every: float) -> Iterator[Child | None]:
        """Each rank as it ends, until all have; and None in between, at least every `every` seconds."""

    def listen(self, now: float) -> bool:
        """Learns how ranks are; whether the hang detector may judge by it."""
        return True

    def vitals(self) -> list[Vital]:
        """What the system says of each rank's process."""

    def stack_dumps(self) -> dict[int, str]:
        """Where the threads of each living rank are."""

    def lost(self) -> list[int]:
        """The ranks of hosts that were not heard for too long."""
        return []

    def back(self) -> Mapping[int, str]:
        """Number and name of each host that was left out and could have ranks again."""
        return {}

    def located(self, ended: Ended) -> Ended:
        """With the host that is at fault, where there are several and it is known."""
        return ended

    def examined(self, ended: Ended) -> Ended:
        """With what this agent can find out once no rank of the attempt is waited for."""
        return ended

    def told_to_stay(self, ended: Ended) -> Failure | None:
        """The failure as the ranks that are left see it; None where not all of them can be told to stay."""
        return ended.failure

    def host(self, rank: int) -> str:
        """The name of the rank's host, as users know it; empty for this one."""
        return ""


class LocalAgent(Agent):
    """The ranks of this host. Has state: them.

    Args:
        task: what each runs.
        signals: who passes Ctrl-C on.
        clock: see `WallClock`.
    """

    def __init__(self, task: Entrypoint, signals: Signals, clock: WallClock = time) -> None:
        self.task = task
        self.signals = signals
        self.clock = clock

    @property
    def children(self) -> list[Child]:
        return self.signals.children

    def start(self, attempt: Attempt) -> None:
        """See `Agent.start`. Ranks meet where their specs say, or at a store that the first of them serves."""
        self.children.clear()
        try:
            with ranks.meeting(attempt.specs, 0) as specs:
                for spec in specs:
                    self.signals.add(ranks.fork(self.task, spec))
        except BaseException:
            self.end(0.0)
            raise

    def take(self, shape: RunShape) -> Sequence[RankSpec]:
        self.task = shape.task
        return shape.places

    def replace(self, attempt: Attempt, gone: Sequence[int]) -> None:
        """See `Agent.replace`. Ranks meet where their specs say, or at a store that the first of the new ones
        serves."""
        with ranks.meeting(attempt.specs, gone[0]) as specs:
            self._replace(replace(attempt, specs=specs), gone)

    def _replace(self, attempt: Attempt, gone: Sequence[int]) -> None:
        before = [child for child in self.children if child.place.rank in gone]
        for child in before:
            child.kill()
        after = [
            ranks.fork(self.task, spec) if spec.rank in gone else replace(child, place=spec)
            for child, spec in zip(self.children, attempt.specs, strict=True)
        ]
        for child in after:
            if child.place.rank not in gone:
                spec = child.place
                call = Call(spec.attempt, spec.host, spec.port, tuple(gone), attempt.later, attempt.between_failures)
                rejoin_signal.tell(child.calls, call)
        self.children.clear()
        for child in after:
            self.signals.add(child)
        for child in before:
            child.close()  # last: one that waits for a disk is gone only when that has answered

    def revive(self, gone: Child) -> None:
        after = ranks.fork(self.task, replace(gone.place, alone=True))
        self.children[self.children.index(gone)] = after
        if self.signals.seen:
            after.signal(signal.SIGINT)
        gone.close()

    def end(self, grace: float = GRACE_SECONDS) -> None:
        """Leaves no rank behind: once one has failed, a grace period of `grace` seconds, then SIGKILL for all."""
        deadline = self.clock.monotonic() + grace
        failed = any(child.failed for child in self.children)
        while failed and self.clock.monotonic() < deadline and any(child.status is None for child in self.children):
            self.reap()
            self.clock.sleep(0.02)
        for child in self.children:
            child.kill()
        for child in self.children:
            child.close()

    def reap(self) -> None:
        """Learns which ranks have ended."""
        for child in self.children:
            if child.status is None:
                child.receive()
                child.reap(block=False)

    def endings(self, every: float, children: Sequence[Child] | None = None) -> Iterator[Child | None]:
        """See `Agent.endings`. `children`: with ranks elsewhere."""
        return ranks.endings(self.children if children is None else children, every)

    def vitals(self) -> list[Vital]:
        return [vital(child.pid) if child.status is None else GONE for child in self.children]

    def stack_dumps(self) -> dict[int, str]:
        return postmortem.dumps(self.children)


def run(task: Entrypoint, places: Sequence[RankSpec]) -> list[Any]:
    """Runs `task` once in one process per place; returns what each returned, in order.

    Raises the error of the rank that failed first (`RunFailed`, or the `EspalierError` it raised itself), and
    `Interrupted` when stopped by Ctrl-C or SIGTERM.
    """
    with passing_on_signals() as signals:
        agent = LocalAgent(task, signals)
        failed = None
        agent.start(Attempt(0, places, Pulses(len(places), 1.0)))
        try:
            failed = next((child for child in agent.endings(1.0) if child and child.failed), None)
        finally:
            agent.end()
    if failed is not None:
        raise postmortem.error(failed, signals.children, bool(signals.seen))
    return [child.returned for child in signals.children]
