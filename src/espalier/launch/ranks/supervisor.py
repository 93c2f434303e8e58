"""Supervisor of the ranks of one machine: restarts a rank that dies, hangs or is stopped in place if the others can
stay (`ranks_to_replace`), else ends all ranks and starts a new attempt from the newest good state. After Acme (arXiv
2403.07648), section 6.1.

Where we deviate: there are no idle spare processes. This process has torch imported and forks the ranks, so it is the
warm spare of every rank itself. Each attempt has keys of its own, so no key of a dead one can be found. Policy and
detection are `resilience`'s; here they are carried out.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from espalier.checkpoint import shared_memory, young_daly
from espalier.checkpoint.shared_memory import SharedMemory
from espalier.launch.ranks import agent as agents
from espalier.launch.ranks import postmortem
from espalier.launch.ranks import rank_process as ranks
from espalier.launch.ranks.agent import Agent, Attempt, LocalAgent, WallClock
from espalier.launch.ranks.postmortem import Ended
from espalier.launch.ranks.rank_process import Child
from espalier.launch.ranks.resize import Reshaping, Resizer, RunShape
from espalier.launch.resilience.hang_detector import Stall, Watcher
from espalier.launch.resilience.straggler import Stragglers
from espalier.recipe.errors import Diverged, EspalierError, HostLost, Interrupted, RunFailed, UserError
from espalier.train.failure import KINDS, Failure, RestartBudget, RestartDecision, kind_of
from espalier.train.heartbeat import Pulses, Sign
from espalier.train.rank_spec import Entrypoint, RankSpec

if TYPE_CHECKING:
    from espalier.launch.resilience.restart_advice import Ruling

_HEARING_SECONDS = 1.0
"""How long to wait for the cause when a rank only knows that it lost another."""
_LOOKS = 2  # at every rank, between two heartbeats
_COMPARED = 10  # looks between two comparisons of the ranks
AGAIN_ALONE = "start it again, the others stay"
_OF_ONE = frozenset({"killed", "exit", "exception", "stopped", "hang"})
"""Kinds of failure that are one rank's, and leave the others as they were."""


@dataclass(frozen=True)
class RestartOptions:
    """How a run is looked after.

    Attributes:
        restarts: see `train.failure.RestartBudget`.
        heartbeat: seconds between two signs of life of a rank.
        memory: bytes that copies of the state may take in this machine's memory; 0: there are none, None: a quarter of
            what is free once the run has begun.
        tell: called as `tell(event, **fields)` with incidents and recoveries, as the run log has them.
        stays: why ranks that are left after a failure may stay as they are: all hold the same state (`alike`), or
            replicas agree by `rounds` and a host is lost. Empty: they may not.
        continues: whether the run goes on with another phase after these ranks; a signal that they are too late to hear
            then ends it.
        shapes: who plans the run anew where a place is lost or stays slow; None: it keeps its ranks.
        heard: makes the shape that the first of several hosts tells (`RunShape.encoded`).
        leaves: whether `shapes` plans without a host that does not come back.
        expected: seconds between two failures, before there was one.
        salvage: saves the newest of the copies in memory that a run on several hosts leaves behind; None: nothing does.
    """

    restarts: int | None = None
    heartbeat: float = 1.0
    memory: int | None = 0
    tell: Callable[..., Any] = field(default=lambda event, **fields: None)
    shapes: Resizer | None = None
    stays: Literal["", "alike", "rounds"] = ""
    continues: bool = False
    heard: Callable[[str], RunShape] | None = None
    leaves: bool = False
    expected: float = young_daly.ASSUMED
    salvage: Callable[[Sequence[SharedMemory]], None] | None = None


def run(task: Entrypoint, places: Sequence[RankSpec], care: RestartOptions) -> list[Any]:
    """Runs `task` in one process per place until all have returned, starting them again after what can be survived;
    what each returned, in order.

    Raises the error that ended the run: `UserError` or `RunFailed` of the first rank that failed where another attempt
    is not worth while, `Interrupted` when stopped by Ctrl-C, SIGTERM or SIGUSR1.
    """
    with agents.passing_on_signals() as signals:
        slots = shared_memory.slots(len(places))
        refuges = shared_memory.build(len(places), care.memory, slots) if care.memory != 0 else []
        copies: Sequence[SharedMemory | None] = refuges or [None] * len(places)
        places = [replace(place, refuge=refuge) for place, refuge in zip(places, copies, strict=True)]
        try:
            returned = Supervisor(places, care, LocalAgent(task, signals)).run()
        finally:
            shared_memory.release(refuges)
        if care.continues and signals.seen:  # it came too late for the ranks to hear of it
            raise Interrupted(
                "Stopped between two phases; the state is saved.", do="run the same command again to go on"
            )
        return returned


class Supervisor:
    """One supervised run: decides when an attempt is over and what follows. Has state: the attempt's signs of life, and
    what was spent on restarts.

    Args:
        places: of the ranks.
        care: see `RestartOptions`.
        agent: who starts, watches and ends the ranks.
        clock: see `agent.WallClock`.
    """

    def __init__(self, places: Sequence[RankSpec], care: RestartOptions, agent: Agent, clock: WallClock = time) -> None:
        self.places = places
        self.care = care
        self.agent = agent
        self.clock = clock
        self.signals = agent.signals
        self.began = clock.monotonic()
        self.budget = RestartBudget(care.restarts)
        self.reshaping = Reshaping(care.shapes, care.tell)
        self.next: RunShape | None = None
        self.spins = any(place.device.startswith("cuda") for place in places)  # waits of NCCL take CPU time
        self.attempt = 0
        self.patience = 1.0
        self.hung_at = -1
        self.trouble: Ended | None = None
        """What the run has not made good yet."""

    def run(self) -> list[Any]:
        """See the function."""
        while True:
            try:
                return self._attempts()
            except HostLost as error:
                self._leave_out(self.agent.lost(), error)

    def _leave_out(self, lost: Sequence[int], error: HostLost) -> None:
        """The run goes on without these ranks. Raises the error where it cannot."""
        shapes = self.care.shapes
        if shapes is None or not (self.care.leaves and lost) or self.signals.seen:
            raise error
        try:
            shape = shapes.without(lost)
        except UserError as refusal:
            why = f"the others cannot go on without it: {refusal.what}"
            raise HostLost(error.what, why=why, do=error.do) from None
        failure = Failure("lost", lost[0], error.what, error.why, self._step())
        self._tell(failure, f"the others go on without it: {shape.says}")
        at = self._moved()
        self.trouble = Ended(failure, error, min(at, self.trouble.at) if self.trouble else at)
        self.attempt += 1
        self._take(shape)

    def _attempts(self) -> list[Any]:
        self.agent.start(self._begin())
        while True:
            gone = []
            try:
                ended = self._watch()
                if ended is None:
                    self._recovered(finished=True)
                    return ranks.results(self.agent.children)
                ended, again = self._first_thought(ended)
                gone = self._gone(ended) if again else []
                if gone:
                    decision = self._decide(ended, gone)
                    if self._stay(decision):
                        self.agent.replace(self._begin(self.pulses), gone)
                        continue
            except BaseException:
                self.agent.end(0.0)
                raise
            children = list(self.agent.children)
            self.agent.end(0.0 if again else agents.GRACE_SECONDS)
            if not gone:
                decision = self._decide(ended)
            if not decision.restart:
                raise self._last(ended, children, decision)
            self._rest(decision.wait)
            if self.next is not None:
                self._take(self.next)
            self.agent.start(self._begin())

    def _gone(self, ended: Ended) -> list[int]:
        """Which ranks have to be replaced where the others stay; none: all begin anew. Replicas that agree by rounds
        stay where the copies of a lost one are lost with its host; from copies all make the same bits again."""
        stays = self.care.stays == "alike" or (self.care.stays == "rounds" and ended.failure.kind == "lost")
        failure = self.agent.told_to_stay(ended) if stays else None
        return ranks_to_replace(failure, self.agent.children, self.pulses.read()) if failure is not None else []

    def _begin(self, pulses: Pulses | None = None) -> Attempt:
        """A new attempt, of which nothing is known yet. `pulses`: of ranks that stay."""
        now = self.clock.monotonic()
        self.pulses = pulses or Pulses(len(self.places), self.care.heartbeat)
        self.pulses.begin(now)
        self.logs = {place.rank: (place.log, postmortem.size(place.log)) for place in self.places}
        between = young_daly.between_failures(now - self.began, self.attempt, self.care.expected)
        later = pulses is not None and self.care.stays == "rounds"
        return Attempt.of(self.attempt, self.places, self.pulses, between, later)

    def _watch(self) -> Ended | None:
        """Waits until all have ended well (None) or one has not, or none goes on."""
        self.watcher = Watcher(self.care.heartbeat, self.patience, self.spins)
        self.reshaping.begin(self.clock.monotonic(), self.places)
        self.stragglers = Stragglers(self.reshaping.work)
        every = self.care.heartbeat / _LOOKS
        looked = 0.0
        looks = 0
        for child in self.agent.endings(every):
            if child is not None and child.failed and self._goes_on(child):
                continue
            if child is not None and child.failed:
                self._recovered(finished=False)
                return self._death(child)
            now = self.clock.monotonic()
            if child is None and now - looked >= every:
                looked = now
                looks += 1
                self._recovered(finished=False)
                if looks % _COMPARED == 0 and self.agent.current:
                    self._compare(now)
                finding = self._look(now)
                if finding is not None:
                    return self._stuck(finding)
        return None

    def _goes_on(self, child: Child) -> bool:
        """Whether the others go on as they are although this one was killed: it is started again alone, or left."""
        failure = self._failure(child)
        if self.signals.seen or not served(child, self.pulses.read()[child.place.rank]):
            return False
        if child.place.when_killed == "restart":
            decision = self.budget.decide(failure)
            if not decision.restart or decision.wait:
                return False
            action = decision.action(AGAIN_ALONE)
            self.agent.revive(child)
        else:
            others = (
                other for other in self.agent.children if other is not child and other.place.when_killed == "leave"
            )
            if all(other.status is not None for other in others):
                return False
            action = "the others go on: its standby serves, or it was one"
        self._tell(failure, action)
        return True

    def _tell(self, failure: Failure, action: str, **fields: object) -> None:
        """Of a failure, and what is done about it."""
        self.care.tell(
            "incident",
            kind=failure.kind,
            what=failure.what,
            why=failure.why,
            rank=failure.rank,
            step=failure.step,
            attempt=self.attempt,
            action=action,
            **fields,
        )

    def _look(self, now: float) -> Stall | None:
        known = self.agent.current
        current = self.agent.listen(now)
        if self.agent.current and not known:
            self.watcher = Watcher(self.care.heartbeat, self.patience, self.spins)
        return self.watcher.look(now, self.pulses.read(), self.agent.vitals()) if current else None

    def _compare(self, now: float) -> None:
        """Names ranks that hold the others up, and asks all to save and end where another plan pays."""
        signs = [sign for sign, place in zip(self.pulses.read(), self.places, strict=True) if place.role == "trainer"]
        if not all(sign.usual for sign in signs):
            return
        from espalier.launch.resilience import restart_advice

        restart_advice.ready()  # a tenth of a second, while nothing waits for it
        back = self.agent.back()
        if back and not self.signals.seen and self.reshaping.joined(now, signs, back) is not None:
            self.signals.ask()
            return
        if len(signs) < 2:
            return
        for rank, score in self.stragglers.look([max(0.0, sign.usual - sign.waited) for sign in signs]):
            self.care.tell(
                "incident",
                kind="slow",
                what=f"Rank {rank} holds the others up: its own part of a step takes {score:.1f} times theirs.",
                rank=rank,
                step=signs[rank].step,
                action="watched; the run is planned anew if it stays so and that pays" if self.care.shapes else "none",
            )
        if not self.signals.seen and self.reshaping.compared(now, signs) is not None:
            self.signals.ask()

    def _step(self) -> int:
        return max(sign.step for sign in self.pulses.read())

    def _moved(self) -> float:
        """When a rank moved last."""
        return max(sign.moved for sign in self.pulses.read())

    def _death(self, first: Child) -> Ended:
        """Waits a little for the cause where `first` does not know it."""
        at = self.clock.monotonic()
        children = self.agent.children
        deadline = at + _HEARING_SECONDS
        while (known := postmortem.cause(first, children)) is None and self.clock.monotonic() < deadline:
            for child in (other for other in children if other.status is None):
                child.reap(block=False)
            self.clock.sleep(0.01)
        cause = known or first
        turn = self.reshaping.turn
        if turn is not None and isinstance(cause.error, Interrupted):
            what = f"Ranks were ended to go on as {turn.shape.says}."
            failure = Failure("replanned", -1, what, turn.why, step=self._step())
            return Ended(failure, cause.error, turn.at)
        failure = self._failure(cause)
        at = min(at, self._moved()) if failure.kind == "lost" else at
        return self.agent.located(Ended(failure, cause.error or ranks.died(cause), at))

    def _failure(self, child: Child) -> Failure:
        error = child.error
        step = self._step()
        rank = child.place.rank
        if error is None:
            what = ranks.died(child)
            return Failure("exit" if (child.status or 0) >= 0 else "killed", rank, what.what, what.why, step)
        if isinstance(error, Interrupted):
            asked = [(sign.asked, rank) for rank, sign in enumerate(self.pulses.read()) if sign.asked]
            rank = min(asked, default=(0.0, rank))[1]
            return Failure("signal", rank, f"Somebody asked rank {rank} to stop, not the run.", "", step)
        if child.raised:
            return Failure(
                kind_of(child.raised, max(step, self.budget.furthest)), rank, error.what, error.why, step, child.raised
            )
        rank = -1 if isinstance(error, Diverged) else rank
        return Failure(KINDS.get(type(error), "exception"), rank, error.what, error.why, step)

    def _stuck(self, finding: Stall) -> Ended:
        """Of ranks that do not go on. They write down where they are before they are ended."""
        rank = finding.rank
        why = finding.why
        if finding.kind == "stopped":
            what = f"Rank {rank} was stopped (SIGSTOP)."
        else:
            from espalier.launch.resilience import stack_dump

            culprit = stack_dump.culprit(self.agent.stack_dumps())
            rank = culprit.rank if culprit else -1
            what = f"Rank {rank} hangs." if culprit else "The run hangs."
            why += f"; it is at {culprit.where}" if culprit else ""
            logs = next((child.place.log for child in self.agent.children if child.place.log is not None), None)
            why += f"; where each rank was is in {logs.parent}" if logs else ""
        error = RunFailed(what, why=why, do="run the same command to resume")
        at = self._moved()
        return self.agent.located(Ended(Failure(finding.kind, rank, what, why, self._step()), error, at))

    def _first_thought(self, ended: Ended) -> tuple[Ended, bool]:
        """Whether the ranks can be released at once to start again; only where not, the diagnosis comes first."""
        if self.signals.seen:
            return ended, False
        if self.budget.permits(ended.failure):
            return ended, True
        ruling = self._examined(ended.failure)
        return replace(ended, ruling=ruling), self.budget.permits(_named(ended.failure, ruling))

    def _stay(self, decision: RestartDecision) -> bool:
        return decision.restart and not decision.wait and self.next is None

    def _decide(self, ended: Ended, gone: Sequence[int] = ()) -> RestartDecision:
        if self.signals.seen:
            return RestartDecision(False, 0.0, "the run was asked to stop")
        ended = self.agent.examined(ended)
        failure = ended.failure
        ruling = ended.ruling or self._examined(failure)
        failure = _named(failure, ruling)
        ended = replace(ended, failure=failure)
        decision, self.next, fields = self._answer(failure)
        again = "start again from the newest good state"
        if gone and self._stay(decision):
            again = f"replace {' and '.join(f'rank {rank}' for rank in gone)}, the others stay"
        self._tell(
            failure,
            decision.action(again),
            **fields,
            category=ruling.category,
            reason=ruling.reason,
            calls_for=ruling.action,
            suspect=ruling.suspect,
            root=ruling.root,
        )
        if failure.kind == "hang":
            self.patience = 2 * self.patience if failure.step <= self.hung_at else 1.0
            self.hung_at = max(self.hung_at, failure.step)
        self.trouble = replace(ended, at=min(ended.at, self.trouble.at)) if self.trouble else ended
        self.attempt += 1
        return decision

    def _answer(self, failure: Failure) -> tuple[RestartDecision, RunShape | None, dict[str, float]]:
        """What to do after `failure`, as which shape (None: the same), and what that is about in numbers."""
        turn = self.reshaping.turn
        if failure.kind == "replanned" and turn is not None:
            return RestartDecision(True, 0.0, str(turn.verdict)), turn.shape, turn.figures
        return *self.reshaping.after(failure, self.budget.decide(failure)), {}

    def _take(self, shape: RunShape) -> None:
        """The next attempt is of this shape. Copies in memory go on where they serve it."""
        before = self.places
        self.next = None
        if not shape.copies:
            shared_memory.clear(place.refuge for place in before if place.refuge is not None)
        places = self.agent.take(shape)
        self.places = [
            replace(place, seat=before[rank].seat, refuge=before[rank].refuge, stacks=before[rank].stacks)
            if rank >= 0
            else place
            for place, rank in zip(places, shape.previous_ranks, strict=True)
        ]
        self.budget = RestartBudget(self.care.restarts)
        self.reshaping.took(shape)

    def _examined(self, failure: Failure) -> Ruling:
        """What the failed rank's error, and what it wrote in this attempt, say of starting again."""
        from espalier.launch.resilience import restart_advice

        if failure.kind == "replanned":
            return restart_advice.NOTHING
        ruling = restart_advice.of(failure, *self.logs.get(failure.rank, (None, 0)), nccl=self.spins)
        host = self.agent.host(failure.rank) if ruling.suspect == socket.gethostname() and failure.rank >= 0 else ""
        return replace(ruling, suspect=host) if host else ruling

    def _last(self, ended: Ended, children: Sequence[Child], decision: RestartDecision) -> EspalierError:
        """The error that ends the run."""
        if self.signals.seen:
            return postmortem.error(next((child for child in children if child.failed), children[0]), children, True)
        if self.attempt <= 1 or isinstance(ended.error, UserError):
            return ended.error
        error = decision.last(ended.error)
        blamed = self.reshaping.blamed
        if blamed is not None and (host := self.agent.host(blamed)):  # on one machine the run went on without it
            do = f"repair {host}, or go on without it: the same command with the other hosts in --hosts, and a machine "
            error = type(error)(error.what, why=error.why, do=f"{do}fewer in plan.cluster, if that is given")
        return error

    def _recovered(self, finished: bool) -> None:
        """Tells how long the last trouble took, once every rank has made a step since."""
        trouble = self.trouble
        signs = self.pulses.read()
        if trouble is None or not (finished or all(sign.first for sign in signs)):
            return
        self.trouble = None
        resumed = signs[0].resumed
        self.care.tell(
            "recovered",
            kind=trouble.failure.kind,
            category=trouble.failure.category,
            reason=trouble.failure.reason,
            rank=trouble.failure.rank,
            step=resumed,
            attempt=self.attempt,
            seconds=max((sign.first for sign in signs if sign.first), default=self.clock.monotonic()) - trouble.at,
            lost_steps=max(0, trouble.failure.step - resumed),
            source="memory" if signs[0].memory else "disk" if resumed else "the beginning",
        )

    def _rest(self, seconds: float) -> None:
        """Waits before the next attempt, unless somebody asks to stop."""
        deadline = self.clock.monotonic() + seconds
        while self.clock.monotonic() < deadline and not self.signals.seen:
            self.clock.sleep(0.05)
        if self.signals.seen:
            raise Interrupted("Stopped between two attempts; checkpoints made so far are kept.")


def _named(failure: Failure, ruling: Ruling) -> Failure:
    return replace(failure, category=ruling.category, reason=ruling.reason, ground=ruling.ground)


def served(child: Child, sign: Sign) -> bool:
    """Whether it is a process that served the others, and was killed without a word."""
    return bool(child.place.when_killed) and child.failed and child.error is None and sign.first > 0


def ranks_to_replace(failure: Failure, children: Sequence[Child], signs: Sequence[Sign]) -> list[int]:
    """Which ranks have to be replaced for the others to go on in place; none: these cannot, and all begin anew.

    Where every rank holds the whole state, one that is left has lost nothing, and who takes the place of the dead is
    sent what the others hold (`checkpoint.in_memory`). Replicas that agree by rounds go on among themselves while a
    host is away, and let the new one in at the end of a round.

    Args:
        failure: what ended the attempt.
        children, signs: of each rank.
    """
    if failure.kind not in _OF_ONE or failure.rank < 0:
        return []
    numbers = sorted({failure.rank, *(child.place.rank for child in children if child.status is not None)})
    left = [child.place.rank for child in children if child.place.rank not in numbers]
    if not left or any(child.status is not None and not child.failed for child in children):
        return []  # what has done its part does not come back
    return numbers if all(_ready(signs[rank]) for rank in left) else []


def _ready(sign: Sign) -> bool:
    """Whether a rank can be called: it has made a step in this attempt, or waits for a call. Not while it still meets
    the others, for which it would wait in vain."""
    return sign.doing == "standing" or (sign.first > 0 and sign.doing not in ("starting", "leaving"))
