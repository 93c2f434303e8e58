"""Host check: tests all hosts for a faulty one before a restart, if ranks lost their peers for no known cause.

The rule and its all-gathers are `ops.faulty_host_search`'s. Each supervisor takes part by a process that it forks as
it forks ranks, and ends: nothing of a test stays in it. After Acme (arXiv 2403.07648), section 6.1.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from espalier.launch.hosts import supervisor_protocol
from espalier.launch.hosts.host_map import HostMap
from espalier.launch.ranks import rank_process as ranks
from espalier.launch.ranks.agent import Signals
from espalier.launch.ranks.rank_process import Child
from espalier.ops import faulty_host_search as search
from espalier.ops.faulty_host_search import Located
from espalier.train.rank_spec import RankSpec

SECONDS = 5.0
"""How long the all-gathers of one wave may take."""
_TOLD = 2.0
"""Seconds in which every host hears of a test, and what came of it arrives."""
_POLL = 0.02


def takes_part(team: HostMap, number: int) -> Child:
    """A process that does this host's part of test `number` of the run, until it is ended."""
    return ranks.fork(lambda place: search.follow(_store(place), place.rank, SECONDS), _place(team, number))


def hosts(team: HostMap, number: int, signals: Signals) -> Located | None:
    """Tests all hosts of `team`, whose other supervisors were told to take part in test `number`. None where somebody
    asked to stop meanwhile, or the test itself failed."""

    def lead(place: RankSpec) -> tuple[Any, ...]:
        return dataclasses.astuple(search.lead(_store(place), range(place.world), SECONDS + _TOLD))

    children = [takes_part(team, number), ranks.fork(lead, _place(team, number))]
    try:
        while children[1].status is None and not signals.seen:
            children[1].reap(block=False)
            time.sleep(_POLL)
        return Located(*children[1].returned) if children[1].status == 0 else None
    finally:
        for child in children:
            child.close()


def said(located: Located | None, names: Sequence[str]) -> tuple[str, list[int]]:
    """What a test has shown, in words, and the hosts that it concerns; `names`: of all hosts."""
    if located is None:
        return "", []
    if len(located.faulty) == len(names):
        return "No host passed when each was tested alone.", []
    if located.faulty:
        single = len(located.faulty) == 1
        who = " and ".join(names[host] for host in located.faulty)
        return f"Host{'' if single else 's'} {who} failed when hosts were tested two by two.", list(located.faulty)
    if located.links:
        links = "; ".join(" and ".join(names[host] for host in link) for link in located.links)
        return f"Hosts {links} failed together when they were tested, and passed with others or alone.", []
    return "", []


def _place(team: HostMap, number: int) -> RankSpec:
    line = team.line
    job = f"-{line.topic}-test"
    return RankSpec(rank=line.host, world=line.hosts, attempt=number, job=job, host=line.address, port=line.port)


def _store(place: RankSpec) -> object:
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(place.keys, supervisor_protocol.opened(place.host, place.port))
