"""Leader: supervises a run on several hosts. One supervisor per host, with torch loaded, forks that host's ranks; the
first one leads. After Acme (arXiv 2403.07648), section 6.1.

The leader's policy is `supervisor`'s, over the signs of life of all hosts: it decides when an attempt is over and
whether another is worth while, the others do it (`follower`). A new attempt needs no new connection and no import, and
begins only once the ranks of the last one are gone on every host, with keys of its own. A host that is not heard is
waited for: while its link is cut nothing is concluded from the silence of its ranks. Where its supervisor died another
may take its place (`host_rejoin`): then its ranks are known to be gone, and the next attempt is of all hosts again.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from espalier.checkpoint import shared_memory, young_daly
from espalier.errors import HostLost, Interrupted, PeerLost
from espalier.launch import follower, host_check, in_place_restart, local, postmortem, remote_rank, supervisor
from espalier.launch import rank_process as ranks
from espalier.launch.base import Entrypoint, RankSpec
from espalier.launch.host_map import HostMap
from espalier.launch.process_stats import GONE, vital
from espalier.launch.rank_process import Child
from espalier.launch.remote_rank import Distant
from espalier.launch.supervisor import Ended, RestartOptions, Supervisor
from espalier.launch.supervisor_protocol import Command, ControlLink, End, Report, dated
from espalier.resilience.acme import restart_advice
from espalier.resilience.acme.restart_advice import Ruling
from espalier.resilience.base import Decision, Failure
from espalier.resilience.hang_detector import Stall, Vital, Watcher

BEATS = 3.0
"""Heartbeats of silence after which a host is said not to be heard."""
STACKS_SECONDS = 1.5
"""How long other hosts may take to send where their ranks are."""
ASKED_SECONDS = 1.0
"""How long another host may have been asked to stop before this one takes it for the run's: what was said to all hosts
comes here too, and a second word would end the ranks before they have saved."""
_POLL = 0.02  # seconds


def run(task: Entrypoint, team: HostMap, care: RestartOptions, threads: int = 1) -> list[Any] | None:
    """Runs `task` on all ranks of `team`, those of this host here, starting all again after what can be survived.

    Every host's supervisor calls it with the same task. What the ranks of this host returned; None where this one does
    not lead and the run came to no good end, whose error the leader raises.

    Raises as `supervisor.run` does, on the host that leads; `HostLost` naming a host that was not heard for too long.
    """
    supervisor.warm()
    places = [team.place(rank, threads) for rank in range(len(team.hosts))]
    own = team.own
    with local.passing_on_signals() as signals:
        files = [os.memfd_create(f"espalier-stacks-{rank}") for rank in own]
        refuges = shared_memory.build(len(own), care.memory, 2 * shared_memory.SLOTS) if care.memory != 0 else []
        for index, rank in enumerate(own):
            places[rank] = replace(places[rank], stacks=files[index], refuge=refuges[index] if refuges else None)
        try:
            if team.line.host:
                return follower.Follower(task, [places[rank] for rank in own], team, care, signals).run()
            return Leader(task, places, team, care, signals).lead()
        finally:
            shared_memory.release(refuges)
            for file in files:
                os.close(file)


class Leader(Supervisor):
    """The supervisor that decides for all hosts. Has state: what each other host said last, and who is not heard."""

    def __init__(
        self, task: Entrypoint, places: Sequence[RankSpec], team: HostMap, care: RestartOptions, signals: local.Signals
    ) -> None:
        super().__init__(task, [(replace(place, refuge=None), place.refuge) for place in places], care, signals)
        self.team, self.distant = team, dict[int, Distant]()
        self.others = list(range(1, team.line.hosts))
        self.away: dict[int, float] = {}
        """Hosts that are not heard, and since when (seconds of `time.monotonic`)."""
        self.lost: dict[int, float] = {}
        """Hosts whose supervisor of this attempt is gone and another is there, and when the former was last heard."""
        self.lives = [0] * team.line.hosts
        """Which supervisor of each host it is that is there, and `meant` of the present attempt."""
        self.meant = tuple(self.lives)
        self.heard: dict[int, float] = {}
        self.ordered = 0
        """The attempt that all hosts were last told of."""
        self.quiet_until = self.listened = self.asked = 0.0
        self.exchange = ControlLink(team.line, Report, self._news)

    def lead(self) -> list[Any]:
        """Runs all attempts; what the ranks of this host returned."""
        self.exchange.begin(Command())
        try:
            returned = self.run()
            return [returned[rank] for rank in self.team.own]
        finally:
            self._tell(over=True)
            self._leave()
            self.exchange.close()

    def _tell(self, **what: Any) -> None:
        """Gives an order for the present attempt."""
        self.exchange.tell(Command(self.ordered, lives=self.meant, **what))

    def _leave(self) -> None:
        """Lets the others hear that the run is over, those that are heard."""
        deadline = time.monotonic() + 2 * self.care.heartbeat
        while time.monotonic() < deadline:
            if all(host in self.away or _left(self.exchange.said(host)) for host in self.others):
                return
            self.exchange.wait(_POLL)

    # --- what comes from the others (in the exchange's thread) -------------------------------------------------------

    def _news(self, host: int, said: Report) -> None:
        if said.attempt != self.ordered or said.life != self.meant[host]:
            return
        now = time.monotonic()
        for rank, sign in zip(self._on(host), said.signs, strict=False):
            self.pulses.show(rank, dated(sign, now))
        for end in said.ends:
            if (one := self.distant.get(end.rank)) is not None:
                one.hear(end)

    def _on(self, host: int) -> list[int]:
        return [rank for rank, its in enumerate(self.team.hosts) if its == host]

    # --- one attempt -------------------------------------------------------------------------------------------------

    def _start(self) -> list[Child]:
        self._until_idle()
        if self.away and self.signals.seen:
            raise Interrupted("Stopped while a host was waited for; the newest checkpoint is kept.")
        self._counts_on_all()
        places = self._begin()
        own = self.team.own
        self.distant = {place.rank: remote_rank.expected(place) for place in places if place.rank not in own}
        between = young_daly.between_failures(time.monotonic() - self.began, self.attempt)
        self._tell(run=True, between_failures=between)
        children: list[Child] = []
        try:
            for place in places:
                children.append(self.distant.get(place.rank) or ranks.fork(self.task, place))
                if place.rank in own:
                    self.signals.add(children[-1])
        except BaseException:
            self._end(children, 0.0)
            raise
        return children

    def _counts_on_all(self) -> None:
        """The next attempt is of the supervisors that are there."""
        self.ordered, self.meant = self.attempt + 1, tuple(self.lives)
        self.lost.clear()

    def _gone(self, ended: Ended, children: Sequence[Child]) -> list[int]:
        if self.away:
            return []  # who is not heard does not hear
        for one in self.distant.values():
            one.reap()
        # To the others it is as if its ranks were killed: its supervisor, another one, starts them.
        of_host = bool(self.lost) and ended.failure.kind == "lost"
        return super()._gone(
            replace(ended, failure=replace(ended.failure, kind="killed")) if of_host else ended, children
        )

    def _replace(self, children: Sequence[Child], gone: Sequence[int]) -> list[Child]:
        self._counts_on_all()
        places = self._begin(self.pulses)
        between = young_daly.between_failures(time.monotonic() - self.began, self.attempt)
        later = self.care.stays == "rounds"
        self._tell(run=True, replaced=tuple(gone), later=later, between_failures=between)
        own = [index for index, child in enumerate(children) if not isinstance(child, Distant)]
        mine, seats = [children[index] for index in own], [places[index] for index in own]
        here = in_place_restart.summoned(self.task, mine, seats, gone, later)
        after = list(children)
        for index, child in zip(own, here, strict=True):
            after[index] = child
            self.signals.add(child)
        for rank, one in self.distant.items():
            one.place = places[rank]
            if rank in gone:
                one.close()
                after[rank] = self.distant[rank] = remote_rank.expected(places[rank])
        return after

    def _watch(self, children: Sequence[Child]) -> Ended | None:
        ended = super()._watch(children)
        for host in [] if ended else list(self.away):
            if self.exchange.age(host) < self.care.heartbeat:  # its ranks' good end is the first that is heard of it
                self._comes(host, time.monotonic())
        return ended

    def _end(self, children: Sequence[Child], grace: float) -> None:
        """Ends the attempt on all hosts, and waits until it is."""
        deadline = time.monotonic() + grace
        local.end([child for child in children if not isinstance(child, Distant)], grace)
        while time.monotonic() < deadline and any(one.told is None for one in self.distant.values()):
            time.sleep(_POLL)
        self._tell()
        try:
            self._until_idle()
        finally:
            for one in self.distant.values():
                one.close()
            self.distant = {}

    def _until_idle(self) -> None:
        """Waits until the ranks of the last attempt are gone everywhere. Raises HostLost naming a host that is silent
        for too long. Once the run is asked to stop, nobody waits for a host that is not heard."""
        while not all(self._idle(host) for host in self.others) and len(self.signals.seen) < 2:
            self._listen(time.monotonic())
            self.exchange.wait(_POLL)

    def _idle(self, host: int) -> bool:
        if host in self.away and self.signals.seen:
            return True
        said = self.exchange.said(host)
        there = said is not None and said.life == self.lives[host]
        return there and said.attempt == self.ordered and not said.living

    # --- looking -----------------------------------------------------------------------------------------------------

    def _look(self, now: float, children: Sequence[Child]) -> Stall | None:
        self._listen(now)
        late = any(self.exchange.age(host) >= self.care.heartbeat for host in self.others)
        if late or self.away or now < self.quiet_until:
            return None  # what is not known of ranks elsewhere is no idleness
        return self.watcher.look(now, self.pulses.read(), [self._vital(child) for child in children])

    def _vital(self, child: Child) -> Vital:
        if child.status is not None:
            return GONE
        if not isinstance(child, Distant):
            return vital(child.pid)
        said = self.exchange.said(self.team.hosts[child.place.rank])
        current = said is not None and said.attempt == self.ordered and said.vitals
        return said.vitals[child.place.local_rank] if current else GONE

    def _compare(self, now: float) -> None:
        if not self.away:  # else what is known of some ranks is old
            super()._compare(now)

    def _listen(self, now: float) -> None:
        """Notices hosts that are not heard, are heard again, or were asked to stop."""
        if now - self.listened > 2 * self.care.heartbeat + 1.0:
            self.exchange.excuse()  # this process itself did not listen
        self.listened = now
        for host in self.others:
            age, said = self.exchange.age(host), self.exchange.said(host)
            self._mind(host, said, now - age)
            if said is not None and said.asked and not self.signals.seen:
                self.asked = self.asked or now
                if now - self.asked >= ASKED_SECONDS:
                    self.signals.pass_on(signal.SIGINT)
            if age >= self.team.absence:
                raise self._lost(host, age)
            if age >= BEATS * self.care.heartbeat and host not in self.away:
                self._goes(host, now, age)
            elif age < self.care.heartbeat and host in self.away:
                self._comes(host, now)

    def _mind(self, host: int, said: Report | None, heard: float) -> None:
        """Notices another supervisor in place of one whose ranks ended with it."""
        if said is not None and said.life > self.lives[host]:
            self.lives[host] = said.life
            self.lost[host] = self.away.pop(host, self.heard.get(host, heard))
        self.heard[host] = heard
        for one in [self.distant[rank] for rank in self._on(host) if host in self.lost and rank in self.distant]:
            one.hear(End(one.place.rank, -signal.SIGKILL, well=False))

    def _lost(self, host: int, age: float) -> HostLost:
        return HostLost(
            f"Host {self.team.names[host]} was not heard for {age:.0f} s.",
            why="its link is cut, or it or its supervisor has stopped",
            do="run the same command to resume; comm.timeout is how long a host may be silent",
        )

    def _goes(self, host: int, now: float, age: float) -> None:
        self.away[host] = now - age
        self.care.tell(
            "incident",
            kind="lost",
            what=f"Host {self.team.names[host]} has not been heard for {age:.1f} s.",
            why="its link is cut, or it or its supervisor has stopped",
            rank=self._on(host)[0],
            step=self._step() if self.ordered else 0,
            attempt=self.attempt,
            action=f"wait for it, {self.team.absence:.0f} s in all",
        )

    def _comes(self, host: int, now: float) -> None:
        """Its ranks may take as long again to notice: TCP tries again ever more seldom (RFC 6298, section 5.5)."""
        seconds = now - self.away.pop(host)
        self.quiet_until = max(self.quiet_until, now + seconds)
        self.watcher = Watcher(self.care.heartbeat, self.patience, self.spins)
        if self.trouble is not None or not self.distant:
            return  # another attempt follows, and says when the run goes on
        self.care.tell(
            "recovered",
            kind="lost",
            rank=self._on(host)[0],
            step=self._step(),
            attempt=self.attempt,
            seconds=seconds,
            lost_steps=0,
            source="place",
        )

    def _dumps(self, children: Sequence[Child]) -> dict[int, str]:
        """Where the ranks of all hosts are; also in what this host writes."""
        self._tell(run=True, stacks=True)
        found = postmortem.dumps([child for child in children if not isinstance(child, Distant)])
        follower.write(found)
        deadline = time.monotonic() + STACKS_SECONDS
        told: dict[int, dict[int, str]] = {}
        while len(told) < len(self.others) and time.monotonic() < deadline:
            self.exchange.wait(_POLL)
            said = {host: self.exchange.said(host) for host in self.others}
            told = {host: one.stacks for host, one in said.items() if one is not None and one.stacks is not None}
        for stacks in told.values():
            found.update(stacks)
        return found

    # --- saying where ------------------------------------------------------------------------------------------------

    def _death(self, first: Child, children: Sequence[Child]) -> Ended:
        ended = super()._death(first, children)
        self._listen(time.monotonic())
        found = self._of_host(ended)
        return found if found is not ended else self._placed(ended)

    def _decide(self, ended: Ended, gone: Sequence[int] = ()) -> Decision:
        found = self._of_host(ended)  # some are known to be lost only when they are back
        nobodys = found.failure.kind == "lost" and found.found is None
        tests = nobodys and self.others and not (self.away or self.signals.seen)
        return super()._decide(self._tested(found) if tests else found, gone)

    def _tested(self, ended: Ended) -> Ended:
        """With what a test of the hosts says, where ranks only know that they lost others. No rank lives then."""
        number, failure = self.attempt + 1, ended.failure
        self._tell(testing=number)
        what, hosts = host_check.said(host_check.hosts(self.team, number, self.signals), self.team.names)
        self._tell()
        if not what:
            return ended
        suspect = " and ".join(self.team.names[host] for host in hosts)
        found = restart_advice.named("Node Failure" if hosts else "Network Error", suspect)
        rank = self._on(hosts[0])[0] if hosts else -1
        failure = replace(failure, rank=rank, what=what, why=failure.what)
        return Ended(failure, PeerLost(what, why=failure.why, do=ended.error.do), ended.at, found)

    def _of_host(self, ended: Ended) -> Ended:
        """Of a host that was lost, where ranks only know that they lost others, or it was its own ranks that ended."""
        failure, absent = ended.failure, {**self.lost, **self.away}
        own = failure.rank >= 0 and self.team.hosts[failure.rank] in self.lost
        if not absent or not (own or failure.kind == "lost") or failure.what.startswith("Host "):
            return ended
        host = self.team.hosts[failure.rank] if own else next(iter(absent))
        since = absent[host]
        what = f"Host {self.team.names[host]} was not heard for {time.monotonic() - since:.1f} s."
        why = "its supervisor ended, and another is there" if host in self.lost else ended.error.what
        error = PeerLost(what, why=why, do=ended.error.do)
        failure = replace(failure, kind="lost", rank=self._on(host)[0], what=what, why=why)
        return Ended(failure, error, min(since, ended.at), restart_advice.named("Node Failure", self.team.names[host]))

    def _stuck(self, finding: Stall, children: Sequence[Child]) -> Ended:
        return self._placed(super()._stuck(finding, children))

    def _examined(self, failure: Failure) -> Ruling:
        found = super()._examined(failure)
        if found.suspect != socket.gethostname() or failure.rank < 0:
            return found
        return replace(found, suspect=self.team.names[self.team.hosts[failure.rank]])

    def _placed(self, ended: Ended) -> Ended:
        """With the host, where the rank is known."""
        failure, error = ended.failure, ended.error
        if failure.rank < 0 or isinstance(error, Interrupted):
            return ended
        host = self.team.names[self.team.hosts[failure.rank]]
        what = f"On host {host}: {failure.what}"
        placed = type(error)(f"On host {host}: {error.what}", why=error.why, do=error.do)
        return Ended(replace(failure, what=what), placed, ended.at)


def _left(said: Report | None) -> bool:
    return said is not None and said.left
