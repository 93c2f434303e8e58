"""Rank assignment: maps started processes to the ranks of a plan. Launchers number processes as they please; plans name
machines."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence


def numbered(hosts: Sequence[str], nodes: Sequence[int]) -> list[int]:
    """The process that becomes each rank, by its number when it was started. Pure, so the same on all of them.

    Processes of one host follow one another, hosts in the plan's order where it knows them: machine m is the m-th host
    that comes up, as `espalier probe` numbers them. A process 0 that would not be rank 0, which keeps the run's log,
    leaves all as they were started.

    Args:
        hosts: of each process, any names.
        nodes: the machine of each of the plan's ranks, as many.
    """
    names = list(dict.fromkeys(hosts))
    waiting = {name: deque(index for index, host in enumerate(hosts) if host == name) for name in names}
    known = follows([names.index(host) for host in hosts], nodes)
    order = [names[node] for node in nodes] if known else sorted(hosts, key=names.index)
    numbers = [waiting[name].popleft() for name in order]
    return numbers if numbers[0] == 0 else list(range(len(hosts)))


def follows(machines: Sequence[int], nodes: Sequence[int]) -> bool:
    """Whether processes on `machines` can become the ranks of a plan whose ranks sit on `nodes`."""
    return Counter(machines) == Counter(nodes) and machines[0] == nodes[0]
