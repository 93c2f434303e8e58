"""Machine order: the order in which rings through the machines cross slow links least. Pure; no torch.

Sites are what faster links hold together. A ring through every machine must enter and leave each site once; it does
no more exactly when the machines of a site follow one another, for sites of every level at once. Joining machines over
their fastest links first (single linkage, as Kruskal's algorithm does) gives such an order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

APART = 1.5
"""Bandwidths are of one level unless the next faster is this much faster: measurements differ by chance (the ratio at
which `machine.link` takes transfers for two routes)."""

Table = Sequence[Sequence[float]]
"""Bytes/s from machine to machine, both ways alike; the diagonal means nothing."""


def ring(bandwidth: Table) -> tuple[int, ...]:
    """The machines in an order that crosses from site to site least; machine 0 first, else as near to their own order
    as that allows (equal links change nothing)."""
    sites = [[machine] for machine in range(len(bandwidth))]
    steps = _levels(bandwidth)
    fastest_first = sorted(combinations(range(len(bandwidth)), 2), key=lambda pair: -steps[bandwidth[pair[0]][pair[1]]])
    for a, b in fastest_first:
        if sites[a] is not sites[b]:
            first, second = sorted((sites[a], sites[b]))
            joined = [*first, *second]
            for machine in joined:
                sites[machine] = joined
    return tuple(sites[0]) if sites else ()


def crossings(bandwidth: Table, order: Sequence[int]) -> int:
    """How often a ring in this order goes over links of the slowest level."""
    steps = _levels(bandwidth)
    if len(order) < 2 or max(steps.values()) == 0:
        return 0
    return sum(steps[bandwidth[a][b]] == 0 for a, b in pairwise([*order, order[0]]))


def _levels(bandwidth: Table) -> dict[float, int]:
    """The level of each bandwidth there is between two machines, 0 the slowest."""
    levels: dict[float, int] = {}
    before, at = 0.0, -1
    for value in sorted({bandwidth[a][b] for a, b in combinations(range(len(bandwidth)), 2)}):
        at += at < 0 or value > APART * before
        levels[value], before = at, value
    return levels
