"""Follower: the supervisor of a host that does not lead. It forks, watches and ends its ranks as the leader says, and
reports on them.

It decides one thing alone: a leader that is not heard for too long is given up, and no rank is left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from espalier.checkpoint import shared_memory
from espalier.launch.hosts import host_check
from espalier.launch.hosts.host_map import HostMap
from espalier.launch.hosts.supervisor_protocol import Command, ControlLink, End, Report, aged
from espalier.launch.ranks import postmortem, rank_process
from espalier.launch.ranks.agent import Attempt, LocalAgent
from espalier.launch.ranks.rank_process import Child
from espalier.launch.ranks.supervisor import RestartOptions, served
from espalier.recipe.errors import HostLost
from espalier.train.failure import Failure, RestartBudget
from espalier.train.heartbeat import Pulses
from espalier.train.rank_spec import RankSpec

_POLL = 0.05
"""Seconds between two looks at the ranks' ends."""
_GONE_BEATS = 3.0
"""Heartbeats after which a leader whose address refuses connections is gone."""


class Follower:
    """One host's ranks, led from elsewhere. Has state: the attempt, its ranks, and what was reported."""

    def __init__(
        self,
        places: Sequence[RankSpec],
        team: HostMap,
        care: RestartOptions,
        agent: LocalAgent,
        link: type[ControlLink] = ControlLink,
    ) -> None:
        self.places = places
        self.team = team
        self.care = care
        self.agent = agent
        self.seats = places
        """Those it began with: a host may lose all of its ranks, and have them again."""
        self.signals = agent.signals
        self.clock = agent.clock
        self.attempt = 0
        self.pulses = Pulses(len(places), care.heartbeat)
        self.stacks: dict[int, str] | None = None
        self.test: tuple[int, Child | None] = (0, None)
        """The number of the last test of hosts, and who does this one's part while it lasts."""
        self.exchange = link(team.line, Command)
        self.budget = RestartBudget(care.restarts)
        self._reported = self._looked = 0.0
        self._ends = 0
        self._revived: list[tuple[int, int, str]] = []
        self._shape = ""

    def run(self) -> list[Any] | None:
        """Obeys until the leader says that the run is over; what the ranks returned, None where they have not."""
        self.exchange.begin(Report(life=self.team.line.life))
        try:
            while not (order := self._order()).over:
                self._obey(order)
                self._reap()
                self._report()
                self._mind_the_leader()
                self.exchange.wait(_POLL)
            children = self.agent.children
            if not self.places:
                return []
            well = bool(children) and all(child.status is not None and not child.failed for child in children)
            return [child.returned for child in children] if well else None
        finally:
            self.agent.end(0.0)
            self._test(0)
            self.exchange.tell(Report(self.attempt, left=True, life=self.team.line.life))
            self.exchange.close()

    def _order(self) -> Command:
        """What holds for this supervisor. Raises HostLost where another has taken its place."""
        line = self.team.line
        order = self.exchange.said(0) or Command()
        if order.supersedes(line.host, line.life):
            raise HostLost(f"Another supervisor has taken the place of this one on host {self.team.names[line.host]}.")
        return order.to(line.host, line.life)

    def _obey(self, order: Command) -> None:
        if order.attempt != self.attempt or (not order.run and self.agent.children):
            stays = order.replaced is not None and order.attempt == self.attempt + 1 and self.agent.children
            if not stays:
                self.agent.end(0.0)
                self.agent.children.clear()
            self.stacks = None
            self._reported = 0.0
            if order.run:
                self._start(order)
            self.attempt = order.attempt
        self._test(order.testing)
        if order.stacks and self.stacks is None:
            self.stacks = self.agent.stack_dumps()
            postmortem.write(self.stacks)
            self._reported = 0.0

    def _test(self, number: int) -> None:
        """Takes part in that test of hosts, or in none."""
        before, process = self.test
        if number != before:
            if process is not None:
                process.close()
            self.test = number, host_check.takes_part(self.team, number) if number else None

    def _start(self, order: Command) -> None:
        """The ranks of another attempt, those that stay among them."""
        if order.shape != self._shape:
            self._take(order.shape)
        if not self.places:
            return
        stays = bool(self.agent.children)
        if not stays:
            self.pulses = Pulses(len(self.places), self.care.heartbeat)
        self.pulses.begin(self.clock.monotonic())
        attempt = Attempt.of(order.attempt - 1, self.places, self.pulses, order.between_failures, order.later)
        self._revived.clear()
        if stays:
            self.agent.replace(attempt, order.replaced or ())
        else:
            self.agent.start(attempt)

    def _take(self, encoded: str) -> None:
        """The next attempt is of another shape, of which this host may have no rank."""
        assert self.care.heard is not None, "who lets shapes be told makes them"
        self._shape, shape = encoded, self.care.heard(encoded)
        self.agent.take(shape)
        self.team = self.team.shaped(shape)
        if not shape.copies:
            shared_memory.clear(place.refuge for place in self.seats if place.refuge is not None)
        places = self.team.places(shape)
        seats = zip(self.team.own, self.seats, strict=False)
        self.places = [replace(places[rank], stacks=seat.stacks, refuge=seat.refuge) for rank, seat in seats]

    def _reap(self) -> None:
        self.agent.reap()
        for child in [
            member for member in self.agent.children if member.place.when_killed == "restart" and member.failed
        ]:
            sign = self.pulses.read()[child.place.local_rank]
            failure = Failure("killed", child.place.rank, "It was killed.", step=sign.step)
            if served(child, sign) and not self.signals.seen and self.budget.decide(failure).restart:
                self._revived.append((child.place.rank, sign.step, rank_process.died(child).what))
                self._reported = 0.0
                self.agent.revive(child)
        ended = sum(child.status is not None for child in self.agent.children)
        if ended != self._ends:
            self._ends = ended
            self._reported = 0.0

    def _report(self) -> None:
        """Four times a heartbeat, and at once when something has changed."""
        now = self.clock.monotonic()
        if now - self._reported < self.care.heartbeat / 4:
            return
        self._reported = now
        self.exchange.tell(
            Report(
                attempt=self.attempt,
                living=bool(self.agent.children),
                signs=tuple(aged(sign, now) for sign in self.pulses.read()) if self.agent.children else (),
                vitals=tuple(self.agent.vitals()),
                ends=tuple(End.of(child) for child in self.agent.children if child.status is not None),
                revived=tuple(self._revived),
                stacks=self.stacks,
                asked=bool(self.signals.seen),
                life=self.team.line.life,
            )
        )

    def _mind_the_leader(self) -> None:
        now = self.clock.monotonic()
        if now - self._looked > 2 * self.care.heartbeat + 1.0:
            self.exchange.excuse()  # this process itself did not look
        self._looked = now
        refused = self.exchange.refused_since
        age = self.exchange.age(0)
        gone = refused is not None and now - refused >= _GONE_BEATS * self.care.heartbeat
        if gone or age >= self.team.absence:
            raise HostLost(
                f"Host {self.team.names[0]}, which leads the run, was not heard for {age:.0f} s.",
                why="its supervisor has ended" if gone else "its link is cut, or it or its supervisor has stopped",
                do="run the same command to resume",
            )
