"""Host map: the hosts of a run whose supervisors work together, and the ranks on each host. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from espalier.launch.hosts.supervisor_protocol import MeetingPoint
from espalier.launch.ranks.resize import RunShape
from espalier.train.rank_spec import RankSpec, when_killed


@dataclass(frozen=True)
class HostMap:
    """The hosts of a run.

    Attributes:
        line: where their supervisors meet, and which of them this is.
        names: of the hosts, as the user knows them.
        hosts: of each rank, the number of its host.
        absence: seconds that a host may be silent for before the run is given up.
        roles: of each rank; empty: all train.
    """

    line: MeetingPoint
    names: tuple[str, ...]
    hosts: tuple[int, ...]
    absence: float = 60.0
    roles: tuple[str, ...] = ()

    @property
    def own(self) -> list[int]:
        """The ranks on this host."""
        return [rank for rank, host in enumerate(self.hosts) if host == self.line.host]

    def shaped(self, shape: RunShape) -> HostMap:
        """The same hosts with the ranks of that shape."""
        return replace(self, hosts=shape.hosts, roles=tuple(place.role for place in shape.places))

    def places(self, shape: RunShape) -> list[RankSpec]:
        """Of all ranks of that shape, which is the team's."""
        return [self.place(rank, place.threads) for rank, place in enumerate(shape.places)]

    def place(self, rank: int, threads: int = 1) -> RankSpec:
        """Of a rank: where its store is, and keys that no other part of the run has."""
        local = self.hosts[:rank].count(self.hosts[rank])
        return RankSpec(
            role=self.roles[rank] if self.roles else "trainer",
            when_killed=when_killed(self.roles, rank) if self.roles else "",
            rank=rank,
            world=len(self.hosts),
            local_rank=local,
            seat=local,
            threads=threads,
            job=f"-{self.line.topic}",
            host=self.line.address,
            port=self.line.port,
        )
