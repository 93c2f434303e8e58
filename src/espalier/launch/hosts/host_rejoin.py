"""Restarts the supervisor of a lost host while the supervisors of the other hosts wait. No torch.

After Acme (arXiv 2403.07648), section 6.1, where a failed node is replaced and the whole job starts again. Where we
deviate: only what was lost is started. The other hosts' supervisors live on, with PyTorch loaded and the copies of the
state in memory, and the new one is told where they meet. Which attempt is the next is theirs to say
(`launch.hosts.leader`). A host that boots may lack its network, its name or its disks for a while: whatever a try
comes to, there is another, until the time is over. Only what is there and differs ends the run at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from espalier.launch.hosts.host_agent import PATIENCE, Told
from espalier.launch.hosts.host_errors import resume, unanswered
from espalier.launch.hosts.remote_process import Far, compare
from espalier.machine.network_interface import TRY_SECONDS
from espalier.recipe.errors import EspalierError, HostLost, PeerLost, RunFailed, UserError

PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each try, and the last before every further one: a process that was killed is there at once, a machine
that boots is not asked more often than a few times a minute."""


class HostCrowd(Protocol):
    """The processes on all hosts, see `ssh.Crowd`."""

    all: list[Far]
    patience: float
    message: Told

    def again(self, rank: int) -> Far:
        """Another process in place of one that has ended."""

    def seat(self, far: Far) -> Told:
        """What a process is told of its place."""


class _NotYet(Exception):
    """A try came to nothing; another may."""

    def __init__(self, error: EspalierError) -> None:
        self.error = error
        super().__init__(error.what)


@dataclass
class Lost:
    """One host that is to come back. Has state: what was tried.

    Attributes:
        first: how it was lost; last: what the newest try came to.
        since: when (seconds of `time.monotonic`).
        tries: goes on by one look.
        over: why there will be no other try.
    """

    first: EspalierError
    since: float
    tries: Iterator[None]
    last: EspalierError | None = None
    over: EspalierError | None = None


class Returning:
    """The hosts that were lost and are to come back. Has state: those, and how often each was started.

    Args:
        crowd: the processes on all hosts, the first of which leads and is never brought back.
        absence: seconds that the others wait for a host; 0: none is brought back.
        say: takes lines for people.
    """

    def __init__(
        self, crowd: HostCrowd, absence: float = 0.0, say: Callable[[Sequence[str]], None] = lambda lines: None
    ) -> None:
        self._crowd = crowd
        self._absence = absence
        self._say = say
        self._lost: dict[int, Lost] = {}
        self._lives: dict[int, int] = {}
        self._tried: dict[int, int] = {}
        self._back: dict[int, float] = {}
        self._left: set[int] = set()

    def told(self, number: int, kind: str) -> None:
        """The others go on `without` that host, for which nobody waits then, and may come back at any time; or with it
        `again`."""
        (self._left.add if kind == "without" else self._left.discard)(number)

    def awaits(self, far: Far) -> bool:
        """Whether `far` stands for a host that was lost: what becomes of it is said here."""
        return any(self._crowd.all[number] is far for number in self._left.union(self._lost))

    def over(self) -> list[EspalierError]:
        """Why hosts will not come back, of those that will not."""
        led = not isinstance(self._crowd.all[0].error, HostLost)
        waited = {number: lost for number, lost in self._lost.items() if number not in self._left}
        errors = [lost.over or (None if led else self._given_up(number)) for number, lost in waited.items()]
        return [error for error in errors if error is not None]

    def look(self, stopping: bool) -> None:
        """Notices hosts that were lost, and goes on with their return. `stopping`: the run is, nobody is started."""
        if stopping or not self._absence:
            return
        now = time.monotonic()
        for number, far in enumerate(self._crowd.all):
            out = number in self._left and far.code is not None and far.error is not None
            if number and number not in self._lost and far.joined and (far.silent or out):
                self._goes(number, far, now)
        for number, lost in list(self._lost.items()):
            if lost.over is not None:
                continue
            try:
                next(lost.tries)
            except StopIteration:
                self._comes(number, now)
            except UserError as error:
                lost.over = error
            else:
                late = now - lost.since >= self._absence and number not in self._left
                lost.over = self._given_up(number) if late else None

    def _goes(self, number: int, far: Far, now: float) -> None:
        assert far.error is not None
        if now - self._back.get(number, -math.inf) >= self._absence:
            self._tried[number] = 0  # it had come to stay
        self._lost[number] = Lost(far.error, now, self._tries(number))
        waits = f"the other hosts wait, {self._absence:.0f} s at most"
        others = "the other hosts go on without it" if number in self._left else waits
        self._say([f"incident: {far.error.what} -> start it again; {others}"])

    def _comes(self, number: int, now: float) -> None:
        lost = self._lost.pop(number)
        self._back[number] = now
        goes_on = "it has ranks again where that pays" if number in self._left else "the run goes on with it"
        self._say([f"Host {self._name(number)} is back after {now - lost.since:.1f} s; {goes_on}."])

    def _given_up(self, number: int) -> RunFailed:
        lost = self._lost[number]
        tries = f"{self._tried[number]} tr{'y' if self._tried[number] == 1 else 'ies'} to start it again"
        last = f", the last of which: {lost.last.what}" if lost.last is not None else ""
        why = f" ({lost.last.why})" if lost.last is not None and lost.last.why else ""
        return RunFailed(
            f"Host {self._name(number)} was lost and did not come back within {self._absence:.0f} s.",
            why=f"{lost.first.what} There were {tries}{last}{why}",
            do=resume([far.host for far in self._crowd.all], [self._crowd.all[host].host for host in self._lost]),
        )

    def _name(self, number: int) -> str:
        return self._crowd.all[number].host.name

    # --- one try after the other -------------------------------------------------------------------------------------

    def _tries(self, number: int) -> Iterator[None]:
        """Raises UserError where the host runs other code or has other data than the others."""
        while True:
            yield from _pause(PAUSES[min(self._tried[number], len(PAUSES) - 1)])
            self._tried[number] += 1
            try:
                yield from self._admitted(number)
                return
            except _NotYet as failed:
                self._lost[number].last = failed.error

    def _admitted(self, number: int) -> Generator[None, None, None]:
        """Starts a process and brings it to where the others are, as `Crowd.gather` and `Crowd.prepare` do all."""
        crowd = self._crowd
        self._lives[number] = self._lives.get(number, 0) + 1
        try:
            far = crowd.again(number)
        except UserError as error:  # the command could not be started
            raise _NotYet(error) from None
        answer = yield from _answer(far, ("hello",), crowd.patience)
        far.rank = number
        compare(crowd.all, [(far, answer["identity"])])
        far.tell({**far.reached, **crowd.seat(far)})
        answer = yield from _answer(far, ("reached", "lost"), TRY_SECONDS + crowd.patience)
        if answer["is"] == "lost":
            raise _NotYet(PeerLost(f"Host {far.host.name} does not reach the first host, {crowd.all[0].host.name}."))
        far.tell({**crowd.message, "life": self._lives[number]})
        answer = yield from _answer(far, ("ready",), PATIENCE)
        compare(crowd.all, [(far, answer["identity"])])
        far.tell({"is": "go"})
        while not far.joined:
            _check(far)
            yield


def _answer(far: Far, kinds: Sequence[str], seconds: float) -> Generator[None, None, Told]:
    """What `far` answers within so long."""
    deadline = time.monotonic() + seconds
    while not far.answered(kinds):
        _check(far)
        if time.monotonic() >= deadline:
            raise _NotYet(unanswered(far.host, far.argv, seconds, far.last))
        yield
    return far.messages.pop(0)


def _check(far: Far) -> None:
    if far.error is not None:
        raise _NotYet(far.error)


def _pause(seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
