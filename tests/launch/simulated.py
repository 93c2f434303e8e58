"""Supervisors, agents and ranks in simulated time: policy and protocol are the product's own.

Each supervisor is a thread, and one runs at a time: where it sleeps or waits, the one that wakes first goes on, at that
moment of simulated time. So a schedule of faults gives the same run each time, and an hour of it takes seconds. A
supervisor can be killed at any line, as by SIGKILL: nothing that it does afterwards has any effect, and its ranks die.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from espalier.launch.hosts.supervisor_protocol import Meeting
from espalier.launch.ranks.agent import Attempt, LocalAgent, Signals
from espalier.launch.ranks.rank_process import Child
from espalier.launch.resilience.hang_detector import Vital
from espalier.recipe.errors import EspalierError, Interrupted, PeerLost, RunFailed, UserError
from espalier.train.heartbeat import Sign
from espalier.train.rank_spec import RankSpec

STARTS, STEP, NOTICES, CALLED = 0.4, 0.25, 0.2, 5.0
"""Seconds until a rank is ready; of a step; until a rank notices that another is gone; in which it is called."""
SAVES = 4  # steps between two checkpoints
CARRIES = 0.05  # seconds of a message between hosts
LONGEST = 4000.0  # simulated seconds after which a run does not end
LINES = {"supervisor.py", "leader.py", "follower.py", "agent.py"}


class Killed(BaseException):
    """A supervisor met its SIGKILL, or is dead already."""


@dataclass(frozen=True)
class Fault:
    """What happens to a rank when the run has done so many steps: `kill`, `raise`, `user`, `hang`, `stop`, `exit` as if
    all were well, or `terminate`, after which all ranks save and end."""

    step: int
    rank: int
    what: str


@dataclass
class Rank:
    """One simulated process."""

    spec: RankSpec
    attempt: int
    ready: float
    moved: float
    step: int
    resumed: int
    first: float = 0.0
    cpu: float = 0.0
    hangs: bool = False
    stopped: bool = False
    alone: float = 0.0  # since when another is gone
    asked: float = 0.0
    status: int | None = None
    well: bool = False
    error: EspalierError | None = None
    raised: str = ""
    beat: float = 0.0

    def ends(self, status: int, error: EspalierError | None = None, raised: str = "") -> None:
        if self.status is None:
            self.status, self.error, self.raised = status, error, raised

    @property
    def doing(self) -> str:
        if self.status is not None:
            return "leaving"
        if self.alone:
            return "standing"
        return "stepping" if self.first else "starting"


class SimulatedChild(Child):
    """A rank as its agent sees it."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank.spec, pid=-1, pidfd=-1, pipe=-1)
        self.rank = rank

    failed = property(lambda self: self.status is not None and not self.rank.well)
    returned = property(lambda self: self.rank.step)
    error = property(lambda self: self.rank.error if self.status is not None else None)
    raised = property(lambda self: self.rank.raised if self.status is not None else "")

    def receive(self) -> bool:
        return True

    def reap(self, block: bool = True) -> None:
        self.status = self.rank.status

    def signal(self, number: int) -> None:
        if self.rank.status is None:
            if number == signal.SIGKILL:
                self.rank.ends(-signal.SIGKILL)
            else:
                self.rank.asked = self.rank.asked or 1.0

    def close(self) -> None:
        self.kill()
        self.reap()


@dataclass
class Actor:
    """One supervisor in a thread of its own."""

    name: str
    life: Callable[[Actor], Any]
    wakes: float = 0.0
    dead: float | None = None
    over: bool = False
    outcome: Any = None
    left: bool = False
    kill_at: int = -1
    """The number of the line at which it is killed."""
    lines: list[tuple[str, int]] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)
    turn: threading.Event = field(default_factory=threading.Event)


class World:
    """Simulated time, ranks, and supervisors. `stays`: ranks that are left wait to be called."""

    def __init__(self, world: int, steps: int, faults: Sequence[Fault] = (), stays: bool = False) -> None:
        self.world, self.steps, self.stays = world, steps, stays
        self.faults = list(faults)
        self.now, self.saved = 100.0, 0
        self.actors: list[Actor] = []
        self.board: dict[int, tuple[float, bytes, Actor]] = {}
        self.ranks: list[Rank] = []
        self.met: list[Fault] = []
        self.starts: list[tuple[float, int]] = []
        self.begun: set[tuple[int, int]] = set()
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.done = threading.Event()

    # --- time --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until all supervisors are gone."""
        while self._next():
            pass
        assert not any(actor.left for actor in self.actors), "a supervisor ended by itself and left ranks behind"

    def _next(self) -> bool:
        living = [one for one in self.actors if not one.over]
        if not living and not self.later:
            return False
        actor = min(living, key=lambda one: one.wakes, default=None)
        due = min(self.later, key=lambda one: one[0], default=None)
        if due is not None and (actor is None or due[0] <= actor.wakes):
            self._advance(due[0])
            self.later.remove(due)
            due[1]()
            return True
        assert actor is not None
        self._advance(actor.wakes)
        assert self.now < LONGEST, "the run does not end"
        self.done.clear()
        actor.turn.set()
        self.done.wait()
        return True

    def act(self, name: str, life: Callable[[Actor], Any], kill_at: int = -1) -> Actor:
        """Another supervisor, from now on."""
        actor = Actor(name, life, wakes=self.now, kill_at=kill_at)
        self.actors.append(actor)
        threading.Thread(target=self._live, args=(actor,), daemon=True).start()
        return actor

    def _live(self, actor: Actor) -> None:
        actor.turn.wait()
        actor.turn.clear()
        if actor.kill_at != -1:
            sys.settrace(lambda frame, event, argument: self._traced(actor, frame))
        try:
            actor.outcome = actor.life(actor)
        except BaseException as error:  # what ends it is what a test asks for
            actor.outcome = error
        finally:
            sys.settrace(None)
            actor.over = True
            actor.left = actor.dead is None and any(one.status is None for one in actor.ranks)
            self.kill(actor)
            self.done.set()

    def _traced(self, actor: Actor, frame: Any) -> Any:
        file = Path(frame.f_code.co_filename)
        if file.parent.parent.name != "launch" or file.name not in LINES:
            return None

        def line(frame: Any, event: str, argument: Any) -> Any:
            if event == "line" and actor.dead is None:
                actor.lines.append((file.name, frame.f_lineno))
                if len(actor.lines) - 1 == actor.kill_at:
                    self.kill(actor)
                    raise Killed
            return line

        return line

    def kill(self, actor: Actor) -> None:
        """SIGKILL: its ranks die with it, and nothing that it does has any effect."""
        if actor.dead is None:
            actor.dead = self.now
            for rank in actor.ranks:
                rank.ends(-signal.SIGKILL)

    def sleep(self, actor: Actor, seconds: float) -> None:
        self.alive(actor)
        actor.wakes = self.now + max(seconds, 1e-3)
        self.done.set()
        actor.turn.wait()
        actor.turn.clear()
        self.alive(actor)

    def alive(self, actor: Actor) -> None:
        if actor.dead is not None:
            raise Killed

    # --- ranks -------------------------------------------------------------------------------------------------------

    def begin(self, actor: Actor, spec: RankSpec, step: int) -> Rank:
        """A new rank. No other of another attempt may live, but those that stay."""
        self.alive(actor)
        others = {one.attempt for one in self.ranks if one.status is None} - {spec.attempt}
        assert self.stays or not others, f"attempt {spec.attempt} starts while ranks of {others} live"
        assert (spec.attempt, spec.rank) not in self.begun, f"rank {spec.rank} starts twice in attempt {spec.attempt}"
        self.begun.add((spec.attempt, spec.rank))
        rank = Rank(spec, spec.attempt, self.now + STARTS, self.now, step, step)
        self.ranks.append(rank)
        actor.ranks.append(rank)
        self.starts.append((self.now, spec.rank))
        return rank

    def _advance(self, to: float) -> None:
        while self.now < to:
            self.now = min(to, self.now + STEP / 2)
            for attempt in {one.attempt for one in self.ranks if one.status is None}:
                self._move([one for one in self.ranks if one.attempt == attempt])

    def _move(self, group: Sequence[Rank]) -> None:
        living = [one for one in group if one.status is None]
        for one in living:
            if not one.stopped:
                one.beat = self.now
        broken = any(one.status is not None and not one.well for one in group)
        for one in living:
            if broken and not (one.hangs or one.stopped):
                self._lost(one)
            elif one.asked and not one.hangs and not one.stopped:
                self.saved = max(self.saved, one.step)
                one.ends(130, Interrupted("Stopped; the state is saved."))
        living = [one for one in living if one.status is None]
        whole = len(living) == self.world and all(self.now >= one.ready for one in living)
        if not whole or any(one.hangs or one.stopped or one.alone for one in living):
            return
        if self.now - max(one.moved for one in living) < STEP and any(one.first for one in living):
            return
        self._step(living)

    def _step(self, living: Sequence[Rank]) -> None:
        step = max(one.step for one in living)
        due = next((one for one in self.faults if one.step == step), None)
        if due is not None:
            self.faults.remove(due)
            self.met.append(due)
            self._strike(next(one for one in living if one.spec.rank == due.rank), due, living)
            return
        for one in living:
            if step < self.steps:
                one.step, one.moved, one.cpu = step + 1, self.now, one.cpu + STEP
                one.first = one.first or self.now
            if one.step == self.steps:
                one.well = True
                one.ends(0)
        if (step + 1) % SAVES == 0:
            self.saved = step + 1

    def _lost(self, one: Rank) -> None:
        one.alone = one.alone or self.now
        wait = NOTICES + (CALLED if self.stays else 0.0)
        if self.now - one.alone >= wait:
            one.ends(1, PeerLost("Another rank is gone."))

    def _strike(self, one: Rank, fault: Fault, living: Sequence[Rank]) -> None:
        if fault.what == "kill":
            one.ends(-signal.SIGKILL)
        elif fault.what == "exit":
            one.ends(0)
        elif fault.what == "terminate":
            one.asked, self.saved = self.now, one.step
            for each in living:
                each.ends(130, Interrupted("Stopped; the state is saved."))
        elif fault.what == "raise":
            one.ends(1, RunFailed(f"Rank {one.spec.rank} failed: RuntimeError: at step {fault.step}"), "RuntimeError")
        elif fault.what == "user":
            one.ends(2, UserError("data.path names no file.", do="correct it"))
        one.hangs, one.stopped = fault.what == "hang", fault.what == "stop"

    def sign(self, one: Rank) -> Sign:
        return Sign(
            one.beat, one.moved, one.doing, STEP if one.first else 0.0, one.step, one.resumed, one.first, one.asked
        )  # type: ignore[arg-type]


class SimulatedAgent(LocalAgent):
    """The ranks of one host. Also the clock of its supervisor."""

    def __init__(self, world: World, actor: Actor, signals: Signals | None = None) -> None:
        super().__init__(lambda place: None, signals or Signals(), clock=self)
        self.world, self.actor = world, actor
        self.pulses: Any = None

    def monotonic(self) -> float:
        self.world.alive(self.actor)
        self._show()
        return self.world.now

    def sleep(self, seconds: float) -> None:
        self.world.sleep(self.actor, seconds)
        self._show()

    def _show(self) -> None:
        for index, child in enumerate(self.children if self.pulses is not None else ()):
            if child.rank.beat:
                self.pulses.show(index, self.world.sign(child.rank))

    def start(self, attempt: Attempt) -> None:
        self.children.clear()
        self.pulses = attempt.pulses
        for spec in attempt.specs:
            # One that comes to others that stay takes up what they hold.
            held = max((one.step for one in self.world.ranks if one.status is None), default=self.world.saved)
            step = held if attempt.later or self.world.stays else self.world.saved
            self.signals.add(SimulatedChild(self.world.begin(self.actor, spec, step)))

    def _replace(self, attempt: Attempt, gone: Sequence[int]) -> None:
        self.world.alive(self.actor)
        for child in self.children:
            if child.place.rank in gone:
                child.close()
        held = max((one.step for one in self.world.ranks if one.status is None), default=self.world.saved)
        for index, spec in enumerate(attempt.specs):
            rank = self.children[index].rank
            if spec.rank in gone:
                self.children[index] = SimulatedChild(self.world.begin(self.actor, spec, held))
            elif rank.status is None:
                now = self.world.now
                rank.spec, rank.attempt, rank.ready, rank.moved = spec, spec.attempt, now + STARTS, now
                rank.first = rank.alone = 0.0
                rank.resumed = rank.step
                self.children[index].place = spec

    def endings(self, every: float, children: Sequence[Child] | None = None) -> Iterator[Child | None]:
        children = self.children if children is None else children
        while any(child.status is None for child in children):
            for child in [one for one in children if one.status is None]:
                child.reap(block=False)
                if child.status is not None:
                    yield child
            self.sleep(min(every, 0.1))
            yield None

    def end(self, grace: float = 3.0) -> None:
        self.world.alive(self.actor)
        super().end(grace)

    def vitals(self) -> list[Vital]:
        self.world.alive(self.actor)
        return [Vital(one.rank.cpu, "T" if one.rank.stopped else "S") for one in self.children]

    def stack_dumps(self) -> dict[int, str]:
        return {}


class SimulatedLink:
    """A supervisor's end of the control link, on a board of simulated messages."""

    def __init__(self, world: World, actor: Actor, line: Meeting, kind: type, news: Any = lambda host, said: None):
        self.world, self.actor, self.line, self.kind, self.news = world, actor, line, kind, news
        self.others = [0] if line.host else list(range(1, line.hosts))
        self.read: dict[int, bytes] = {}
        self.values: dict[int, Any] = {}
        self.since = dict.fromkeys(self.others, world.now)

    def begin(self, message: Any) -> SimulatedLink:
        self.tell(message)
        return self

    def tell(self, message: Any) -> None:
        self.world.alive(self.actor)
        self.world.board[self.line.host] = (self.world.now + CARRIES, msgspec.json.encode(message), self.actor)

    def _carry(self) -> None:
        for host in self.others:
            at, data, _ = self.world.board.get(host, (math.inf, b"", self.actor))
            if at <= self.world.now and data != self.read.get(host):
                self.read[host] = data
                self.values[host] = msgspec.json.decode(data, type=self.kind)
                self.news(host, self.values[host])

    def said(self, host: int) -> Any:
        self._carry()
        return self.values.get(host)

    def age(self, host: int) -> float:
        _, _, actor = self.world.board.get(host, (0.0, b"", None))
        if actor is None:
            return self.world.now - self.since[host]
        return 0.0 if actor.dead is None else self.world.now - max(actor.dead, self.since[host])

    def excuse(self) -> None:
        self.since = dict.fromkeys(self.others, self.world.now)

    @property
    def refused_since(self) -> float | None:
        _, _, actor = self.world.board.get(0, (0.0, b"", None))
        return actor.dead if actor is not None else None

    def wait(self, seconds: float) -> None:
        self.world.sleep(self.actor, seconds)
        self._carry()

    def close(self, seconds: float = 1.0) -> None:
        self.world.alive(self.actor)


def specs(count: int) -> list[RankSpec]:
    return [replace(RankSpec(rank=rank, world=count), port=1) for rank in range(count)]
