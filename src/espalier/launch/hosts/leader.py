"""Leader: supervises a run on several hosts. One supervisor per host, with torch loaded, forks that host's ranks; the
first one leads. After Acme (arXiv 2403.07648), section 6.1.

The leader's policy is `supervisor`'s, over the signs of life of all hosts: it decides when an attempt is over and
whether another is worth while, the others do it (`follower`). A new attempt needs no new connection and no import, and
begins only once the ranks of the last one are gone on every host, with keys of its own. A host that is not heard is
waited for: while its link is cut nothing is concluded from the silence of its ranks. Where its supervisor died another
may take its place (`host_rejoin`): then its ranks are known to be gone, and the next attempt is of all hosts again. A
run that can be planned without it (`RestartOptions.leaves`) waits for `PATIENCE` of that time, and may give it ranks
again once it is heard (`HostAgents.back`).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from espalier.checkpoint import shared_memory
from espalier.launch.hosts import follower, host_check
from espalier.launch.hosts.host_map import HostMap
from espalier.launch.hosts.supervisor_protocol import Command, ControlLink, End, Report, dated
from espalier.launch.ranks import postmortem
from espalier.launch.ranks.agent import Attempt, LocalAgent, passing_on_signals
from espalier.launch.ranks.postmortem import Ended
from espalier.launch.ranks.process_stats import GONE
from espalier.launch.ranks.rank_process import Child
from espalier.launch.ranks.resize import RunShape
from espalier.launch.ranks.supervisor import AGAIN_ALONE, RestartOptions, Supervisor
from espalier.launch.resilience import restart_advice
from espalier.launch.resilience.hang_detector import Vital
from espalier.recipe.errors import EspalierError, HostLost, Interrupted, PeerLost
from espalier.train.failure import Failure
from espalier.train.heartbeat import Pulses
from espalier.train.rank_spec import Entrypoint, RankSpec

BEATS = 3.0
"""Heartbeats of silence after which a host is said not to be heard."""
STACKS_SECONDS = 1.5
"""How long other hosts may take to send where their ranks are."""
ASKED_SECONDS = 1.0
"""How long another host may have been asked to stop before this one takes it for the run's: what was said to all hosts
comes here too, and a second word would end the ranks before they have saved."""
PATIENCE = 0.5
"""Of the time that a host may be silent for, how long a run waits that can be planned without it."""
_POLL = 0.02  # seconds


def run(task: Entrypoint, team: HostMap, care: RestartOptions, threads: int = 1) -> list[Any] | None:
    """Runs `task` on all ranks of `team`, those of this host here, starting all again after what can be survived.

    Every host's supervisor calls it with the same task. What the ranks of this host returned; None where this one does
    not lead and the run came to no good end, whose error the leader raises.

    Raises as `supervisor.run` does, on the host that leads; `HostLost` naming a host that was not heard for too long.
    """
    places = [team.place(rank, threads) for rank in range(len(team.hosts))]
    local_ranks = team.own
    with passing_on_signals() as signals:
        files = [os.memfd_create(f"espalier-stacks-{rank}") for rank in local_ranks]
        refuges = (
            shared_memory.build(len(local_ranks), care.memory, 2 * shared_memory.SLOTS) if care.memory != 0 else []
        )
        for index, rank in enumerate(local_ranks):
            places[rank] = replace(places[rank], stacks=files[index], refuge=refuges[index] if refuges else None)
        agent = LocalAgent(task, signals)
        try:
            if team.line.host:
                return follower.Follower([places[rank] for rank in local_ranks], team, care, agent).run()
            return lead(places, team, care, agent)
        except EspalierError:
            if care.salvage is not None:
                care.salvage(refuges)
            raise
        finally:
            shared_memory.release(refuges)
            for file in files:
                os.close(file)


def lead(
    places: Sequence[RankSpec],
    team: HostMap,
    care: RestartOptions,
    local_agent: LocalAgent,
    link: type[ControlLink] = ControlLink,
) -> list[Any]:
    """Runs all attempts of the run as the first host; what the ranks of this host returned. `link`: to the others."""
    hosts = HostAgents(local_agent, team, care, link)
    with hosts.listening():
        returned = Supervisor(places, care, hosts, local_agent.clock).run()
        return [returned[rank] for rank in hosts.team.own]


@dataclass
class Distant(Child):
    """Proxy for a rank on another host: its status comes from that host's supervisor, and `kill` does nothing.

    Has state: how it ended, as told by the thread that hears of it.
    """

    ending: End | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False

    def hear(self, end: End) -> None:
        """It ended; whoever polls for it wakes. Called in the thread that hears of it."""
        with self.lock:
            if self.ending is None and not self.closed:
                self.ending = end
                os.eventfd_write(self.pidfd, 1)

    @property
    def failed(self) -> bool:
        """Whether it ended without having done its part."""
        return self.status is not None and self.ending is not None and not self.ending.well

    @property
    def returned(self) -> Any:
        """Nothing: what it returned stays on its host."""
        return None

    @property
    def error(self) -> EspalierError | None:
        """What it raised, if it could tell."""
        return self.ending.rebuilt() if self.ending is not None else None

    @property
    def raised(self) -> str:
        """The type's name where it raised what is not an EspalierError."""
        return self.ending.raised if self.ending is not None else ""

    def reap(self, block: bool = True) -> None:
        """Learns how it ended, if that was told."""
        if self.ending is not None:
            self.status = self.ending.status

    def kill(self) -> None:
        """Its own supervisor does that."""

    def close(self) -> None:
        """Gives back what it took here."""
        with self.lock:
            self.closed = True
            os.close(self.pidfd)
            os.close(self.pipe)


def expected(place: RankSpec) -> Distant:
    """The rank at `place`, of which nothing was heard yet."""
    reader, writer = os.pipe()
    os.close(writer)
    os.set_blocking(reader, False)
    return Distant(place, -1, os.eventfd(0), reader)


class HostAgents:
    """The agents of all hosts as one: this host's, and the others over the control link. Has state: what each other
    host said last, and who is not heard.

    Args:
        here: the agent of this host.
        team: the hosts; care: see `supervisor.run`.
        link: what carries commands to the other hosts.
    """

    def __init__(self, local_agent: LocalAgent, team: HostMap, care: RestartOptions, link: type[ControlLink]) -> None:
        self.local_agent = local_agent
        self.team = team
        self.care = care
        self.signals = local_agent.signals
        self.clock = local_agent.clock
        self.distant = dict[int, Distant]()
        self.children: list[Child] = []
        self.attempt = Attempt(0, (), Pulses(len(team.hosts), care.heartbeat))
        self.others = list(range(1, team.line.hosts))
        self.patience = team.absence * (PATIENCE if care.leaves else 1.0)
        self.away: dict[int, float] = {}
        """Hosts that are not heard, and since when (seconds of the clock)."""
        self.replaced: dict[int, float] = {}
        """Hosts whose supervisor of this attempt is gone and another is there, and when the former was last heard."""
        self.out: dict[int, int] = {}
        """Hosts that have no rank any more, and the last of their supervisors (see `lives`) that is given none: -1 of a
        host that was lost, as it may be the same one once it is heard again."""
        self.revived: dict[int, int] = {}
        """Of each host, how many ranks that were started again alone have been told."""
        self.lives = [0] * team.line.hosts
        """Which supervisor of each host it is that is there, and `meant` of the present attempt."""
        self.meant = tuple(self.lives)
        self.heard: dict[int, float] = {}
        self.ordered = 0
        """The attempt that all hosts were last told of."""
        self.shape = ""
        """See `Command.shape`."""
        self.over = True
        """Whether the attempt is over, and another may follow."""
        self.quiet_until = self.listened = self.asked = 0.0
        self.exchange = link(team.line, Report, self._news)

    def take(self, shape: RunShape) -> Sequence[RankSpec]:
        """See `Agent.take`. A host whose ranks are all left out stays, and is waited for no more."""
        self.local_agent.take(shape)
        self.shape = shape.encoded
        out = {host: -1 if host in self.away else self.lives[host] for host in self._needed}
        self.out = {host: life for host, life in {**self.out, **out}.items() if host not in shape.hosts}
        self.team = self.team.shaped(shape)
        self.away = {host: since for host, since in self.away.items() if host in shape.hosts}
        return self.team.places(shape)

    @property
    def _needed(self) -> list[int]:
        """Other hosts that have ranks."""
        return [host for host in self.others if host in self.team.hosts]

    @property
    def current(self) -> bool:
        """Whether all hosts are heard."""
        return not self.away

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Commands the other hosts inside; afterwards the run is over for them."""
        self.exchange.begin(Command())
        try:
            yield
        finally:
            self._tell(over=True)
            self._leave()
            self.exchange.close()

    def host(self, rank: int) -> str:
        """The name of the rank's host."""
        return self.team.names[self.team.hosts[rank]]

    def _tell(self, **what: Any) -> None:
        """Gives an order for the present attempt."""
        self.exchange.tell(Command(self.ordered, lives=self.meant, shape=self.shape, **what))

    def _leave(self) -> None:
        """Lets the others hear that the run is over, those that are heard."""
        deadline = self.clock.monotonic() + 2 * self.care.heartbeat
        while self.clock.monotonic() < deadline:
            if all(host in self.away or getattr(self.exchange.said(host), "left", False) for host in self.others):
                return
            self.exchange.wait(_POLL)

    # --- what comes from the others (in the exchange's thread) -------------------------------------------------------

    def _news(self, host: int, report: Report) -> None:
        if report.attempt != self.ordered or report.life != self.meant[host]:
            return
        now = self.clock.monotonic()
        for rank, sign in zip(self._on(host), report.signs, strict=False):
            self.attempt.pulses.show(rank, dated(sign, now))
        for end in report.ends:
            if (child := self.distant.get(end.rank)) is not None:
                child.hear(end)

    def _on(self, host: int) -> list[int]:
        return [rank for rank, of_rank in enumerate(self.team.hosts) if of_rank == host]

    # --- one attempt -------------------------------------------------------------------------------------------------

    def start(self, attempt: Attempt) -> None:
        """See `Agent.start`. Waits until the ranks of the last attempt are gone on every host."""
        self._until_idle()
        if self.away and self.signals.seen:
            raise Interrupted("Stopped while a host was waited for; checkpoints made so far are kept.")
        self._counts_on_all(attempt)
        self.distant = {spec.rank: expected(spec) for spec in attempt.specs if spec.rank not in self.team.own}
        self._tell(run=True, between_failures=attempt.between_failures)
        try:
            self.local_agent.start(self._part(attempt))
        except BaseException:
            self.end(0.0)
            raise
        self._gather()

    def replace(self, attempt: Attempt, gone: Sequence[int]) -> None:
        self._counts_on_all(attempt)
        self._tell(
            run=True,
            replaced=tuple(gone),
            later=attempt.later,
            between_failures=attempt.between_failures,
        )
        self.local_agent.replace(self._part(attempt), gone)
        for rank, child in self.distant.items():
            child.place = attempt.specs[rank]
            if rank in gone:
                child.close()
                self.distant[rank] = expected(child.place)
        self._gather()

    def revive(self, gone: Child) -> None:
        """See `Agent.revive`. On another host its own supervisor has done so (`Follower`)."""
        if gone in self.local_agent.children:
            at = self.children.index(gone)
            self.local_agent.revive(gone)
            self.children[at] = self.local_agent.children[self.team.own.index(gone.place.rank)]

    def _part(self, attempt: Attempt) -> Attempt:
        """This host's part of it."""
        return replace(attempt, specs=[attempt.specs[rank] for rank in self.team.own])

    def _gather(self) -> None:
        """The ranks of all hosts, in order."""
        local = {child.place.rank: child for child in self.local_agent.children}
        self.children = [child for _, child in sorted({**local, **self.distant}.items())]

    def _counts_on_all(self, attempt: Attempt) -> None:
        """The next attempt is of the supervisors that are there."""
        self.attempt = attempt
        self.over = False
        self.ordered, self.meant = attempt.number + 1, tuple(self.lives)
        self.replaced.clear()
        self.revived.clear()

    def told_to_stay(self, ended: Ended) -> Failure | None:
        """See `Agent`. To the others a lost host is as if its ranks were killed: its supervisor, another one, starts
        them. A host that is not heard does not hear."""
        if self.away:
            return None
        for child in self.distant.values():
            child.reap()
        of_host = bool(self.replaced) and ended.failure.kind == "lost"
        return replace(ended.failure, kind="killed") if of_host else ended.failure

    def endings(self, every: float) -> Iterator[Child | None]:
        yield from self.local_agent.endings(every, self.children)
        for host in list(self.away):
            if self.exchange.age(host) < self.care.heartbeat:  # its ranks' good end is the first that is heard of it
                self._comes(host, self.clock.monotonic())

    def end(self, grace: float) -> None:
        """Ends the attempt on all hosts, and waits until it is."""
        self.over = True
        deadline = self.clock.monotonic() + grace
        self.local_agent.end(grace)
        while self.clock.monotonic() < deadline and any(child.ending is None for child in self.distant.values()):
            self.clock.sleep(_POLL)
        self._tell()
        try:
            self._until_idle()
        finally:
            for child in self.distant.values():
                child.close()
            self.distant = {}

    def _until_idle(self) -> None:
        """Waits until the ranks of the last attempt are gone everywhere. Raises HostLost naming a host that is silent
        for too long. Once the run is asked to stop, nobody waits for a host that is not heard."""
        while not all(map(self._idle, self._needed)) and len(self.signals.seen) < 2:
            self._listen(self.clock.monotonic())
            self.exchange.wait(_POLL)

    def _idle(self, host: int) -> bool:
        if host in self.away and self.signals.seen:
            return True
        report = self.exchange.said(host)
        there = report is not None and report.life == self.lives[host]
        return there and report.attempt == self.ordered and not report.living

    # --- looking -----------------------------------------------------------------------------------------------------

    def listen(self, now: float) -> bool:
        """See `Agent.listen`: what is not known of ranks elsewhere is no idleness."""
        self._listen(now)
        late = any(self.exchange.age(host) >= self.care.heartbeat for host in self._needed)
        return not (late or self.away or now < self.quiet_until)

    def vitals(self) -> list[Vital]:
        local = dict(zip(self.team.own, self.local_agent.vitals(), strict=True))
        return [local[rank] if rank in local else self._vital(child) for rank, child in enumerate(self.children)]

    def _vital(self, child: Child) -> Vital:
        report = self.exchange.said(self.team.hosts[child.place.rank])
        current = child.status is None and report is not None and report.attempt == self.ordered and report.vitals
        return report.vitals[child.place.local_rank] if current else GONE

    def _listen(self, now: float) -> None:
        """Notices hosts that are not heard, are heard again, or were asked to stop."""
        if now - self.listened > 2 * self.care.heartbeat + 1.0:
            self.exchange.excuse()  # this process itself did not listen
        self.listened = now
        for host in self._needed:
            age = self.exchange.age(host)
            report = self.exchange.said(host)
            self._mind(host, report, now - age)
            self._tell_revived(host, report)
            if report is not None and report.asked and not self.signals.seen:
                self.asked = self.asked or now
                if now - self.asked >= ASKED_SECONDS:
                    self.signals.pass_on(signal.SIGINT)
            if age >= self.patience:
                raise self._lost(host, age)
            if age >= BEATS * self.care.heartbeat and host not in self.away:
                self._goes(host, now, age)
            elif age < self.care.heartbeat and host in self.away:
                self._comes(host, now)

    def _mind(self, host: int, report: Report | None, heard: float) -> None:
        """Notices another supervisor in place of one whose ranks ended with it."""
        if report is not None and report.life > self.lives[host]:
            self.lives[host] = report.life
            self.replaced[host] = self.away.pop(host, self.heard.get(host, heard))
        self.heard[host] = heard
        for child in [self.distant[rank] for rank in self._on(host) if host in self.replaced and rank in self.distant]:
            child.hear(End(child.place.rank, -signal.SIGKILL, well=False))

    def _tell_revived(self, host: int, report: Report | None) -> None:
        """Ranks that serve, were killed there and started again alone by the host's supervisor."""
        if report is None or report.attempt != self.ordered:
            return
        for rank, step, what in report.revived[self.revived.get(host, 0) :]:
            fields = {"rank": rank, "step": step, "attempt": self.attempt.number, "action": AGAIN_ALONE}
            self.care.tell("incident", kind="killed", what=f"On host {self.team.names[host]}: {what}", why="", **fields)
        self.revived[host] = len(report.revived)

    def _lost(self, host: int, age: float) -> HostLost:
        return HostLost(
            f"Host {self.team.names[host]} was not heard for {age:.0f} s.",
            why="its link is cut, or it or its supervisor has stopped",
            do="resume with --hosts of those that are left, or run the same command once it is back; comm.timeout is "
            "how long a host may be silent",
        )

    def lost(self) -> list[int]:
        return [rank for host in self.away for rank in self._on(host)]

    def back(self) -> dict[int, str]:
        """See `Agent.back`: those whose supervisors say so, with no rank of theirs left from before."""
        names = {}
        for host, former in self.out.items():
            report = self.exchange.said(host)
            if report is None or report.left or self.exchange.age(host) >= self.care.heartbeat:
                continue
            self.lives[host] = max(self.lives[host], report.life)
            if report.life > former and report.attempt == self.ordered and not report.living:
                names[host] = self.team.names[host]
        return names

    def _goes(self, host: int, now: float, age: float) -> None:
        self.away[host] = now - age
        self.care.tell(
            "incident",
            kind="lost",
            what=f"Host {self.team.names[host]} has not been heard for {age:.1f} s.",
            why="its link is cut, or it or its supervisor has stopped",
            rank=self._on(host)[0],
            step=self._step() if self.ordered else 0,
            attempt=self.attempt.number,
            action=f"wait for it, {self.patience:.0f} s in all",
        )

    def _comes(self, host: int, now: float) -> None:
        """Its ranks may take as long again to notice: TCP tries again ever more seldom (RFC 6298, section 5.5)."""
        seconds = now - self.away.pop(host)
        self.quiet_until = max(self.quiet_until, now + seconds)
        started = not self.attempt.number or all(sign.first for sign in self.attempt.pulses.read())
        if self.over or not self.distant or not started:
            return  # the supervisor says when the run goes on
        self.care.tell(
            "recovered",
            kind="lost",
            rank=self._on(host)[0],
            step=self._step(),
            attempt=self.attempt.number,
            seconds=seconds,
            lost_steps=0,
            source="place",
        )

    def _step(self) -> int:
        return max(sign.step for sign in self.attempt.pulses.read())

    def stack_dumps(self) -> dict[int, str]:
        """Where the ranks of all hosts are; also in what this host writes."""
        self._tell(run=True, stacks=True)
        dumps = self.local_agent.stack_dumps()
        postmortem.write(dumps)
        deadline = self.clock.monotonic() + STACKS_SECONDS
        remote: dict[int, dict[int, str]] = {}
        while len(remote) < len(self._needed) and self.clock.monotonic() < deadline:
            self.exchange.wait(_POLL)
            reports = {host: self.exchange.said(host) for host in self._needed}
            remote = {
                host: report.stacks
                for host, report in reports.items()
                if report is not None and report.stacks is not None
            }
        for stacks in remote.values():
            dumps.update(stacks)
        return dumps

    # --- saying where ------------------------------------------------------------------------------------------------

    def located(self, ended: Ended) -> Ended:
        self.over = True
        self._listen(self.clock.monotonic())
        located = self._of_host(ended)
        return located if located is not ended else self._placed(ended)

    def examined(self, ended: Ended) -> Ended:
        """See `Agent.examined`: where ranks only know that they lost others, hosts are tested."""
        located = self._of_host(ended)  # some are known to be lost only when they are back
        nobodys = located.failure.kind == "lost" and located.ruling is None
        tests = nobodys and self.others and not (self.away or self.signals.seen)
        return self._tested(located) if tests else located

    def _tested(self, ended: Ended) -> Ended:
        """With what a test of the hosts says. No rank lives then."""
        number = self.attempt.number + 1
        failure = ended.failure
        self._tell(testing=number)
        what, hosts = host_check.said(host_check.hosts(self.team, number, self.signals), self.team.names)
        self._tell()
        if not what:
            return ended
        suspect = " and ".join(self.team.names[host] for host in hosts)
        ruling = restart_advice.named("Node Failure" if hosts else "Network Error", suspect)
        rank = self._on(hosts[0])[0] if hosts else -1
        failure = replace(failure, rank=rank, what=what, why=failure.what)
        return Ended(failure, PeerLost(what, why=failure.why, do=ended.error.do), ended.at, ruling)

    def _of_host(self, ended: Ended) -> Ended:
        """Of a host that was lost, where ranks only know that they lost others, or it was its own ranks that ended."""
        failure = ended.failure
        absent = {**self.replaced, **self.away}
        of_lost_host = failure.rank >= 0 and self.team.hosts[failure.rank] in self.replaced
        if not absent or not (of_lost_host or failure.kind == "lost") or failure.what.startswith("Host "):
            return ended
        host = self.team.hosts[failure.rank] if of_lost_host else next(iter(absent))
        since = absent[host]
        what = f"Host {self.team.names[host]} was not heard for {self.clock.monotonic() - since:.1f} s."
        why = "its supervisor ended, and another is there" if host in self.replaced else ended.error.what
        error = PeerLost(what, why=why, do=ended.error.do)
        failure = replace(failure, kind="lost", rank=self._on(host)[0], what=what, why=why)
        return Ended(failure, error, min(since, ended.at), restart_advice.named("Node Failure", self.team.names[host]))

    def _placed(self, ended: Ended) -> Ended:
        """With the host, where the rank is known."""
        failure = ended.failure
        error = ended.error
        if failure.rank < 0 or isinstance(error, Interrupted):
            return ended
        host = self.host(failure.rank)
        placed = type(error)(f"On host {host}: {error.what}", why=error.why, do=error.do)
        return Ended(replace(failure, what=f"On host {host}: {failure.what}"), placed, ended.at)
