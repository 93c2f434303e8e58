"""RCM++ in plain Python over sets of neighbours: what sparse/rcmpp must equal, node for node.

After Hou, Liu and Zhu, arXiv 2409.04171; the walk is George and Liu's (ACM TOMS 5(3), 1979).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

LISTED = 8
SLIGHT = 16
STRIDE = 0x9E3779B1


class Traversal(NamedTuple):
    """A component in Cuthill-McKee order, and its levels: nodes at distance 0, 1, 2 … of the first."""

    order: list[int]
    levels: list[list[int]]

    @property
    def width(self) -> int:
        """Nodes of the widest level."""
        return max(len(level) for level in self.levels)


def neighbours(indptr: Iterable[Any], indices: Sequence[Any]) -> list[set[int]]:
    """Each node's neighbours in A + Aᵀ, itself left out."""
    offsets = [int(one) for one in indptr]
    found: list[set[int]] = [set() for _ in offsets[1:]]
    for node, (begin, stop) in enumerate(pairwise(offsets)):
        for other in map(int, indices[begin:stop]):
            if other != node:
                found[node].add(other)
                found[other].add(node)
    return found


def order(rows: list[set[int]], finder: str = "bi-criteria", restarts: int = 1, trials: int = 0) -> list[int]:
    """The reverse Cuthill-McKee order of all components (new to old)."""
    found: list[int] = []
    seen: set[int] = set()
    small = finder == "bi-criteria" and restarts == 1 and trials > 0
    degrees = np.array([len(row) for row in rows], np.int32)
    for root in np.argsort(degrees).tolist() if small else np.argsort(degrees, stable=True).tolist():
        if root not in seen:
            part = narrower(rows, root) if small else component(rows, root, finder, restarts, trials)
            seen.update(part)
            found += part
    return found[::-1]


def rank(rows: list[set[int]], node: int) -> tuple[int, int]:
    """What ties are decided by: the smaller degree, then the smaller id."""
    return len(rows[node]), node


def traverse(rows: list[set[int]], root: int) -> Traversal:
    """Cuthill-McKee from `root`: each node in turn is followed by its neighbours not yet there, by rank."""
    found, distance = [root], {root: 0}
    for node in found:  # grows while it is read: it is the queue
        for other in sorted(rows[node] - distance.keys(), key=lambda one: rank(rows, one)):
            distance[other] = distance[node] + 1
            found.append(other)
    levels: list[list[int]] = [[] for _ in range(distance[found[-1]] + 1)]
    for node in found:
        levels[distance[node]].append(node)
    return Traversal(found, levels)


def walk(rows: list[set[int]], start: int, finder: str) -> Iterator[Traversal]:
    """From a node to the least in rank of its last level, until no more levels are found or one node is in each."""
    depth = 0
    while True:
        found = traverse(rows, start)
        yield found
        if found.width == 1 or len(found.levels) <= depth + (depth // SLIGHT if finder == "bi-criteria" else 0):
            return
        depth, start = len(found.levels), remote(rows, found)[0]


def remote(rows: list[set[int]], found: Traversal) -> list[int]:
    """The last level's few nodes of least rank."""
    return sorted(found.levels[-1], key=lambda node: rank(rows, node))[:LISTED]


def narrower(rows: list[set[int]], root: int) -> list[int]:
    """The order from `root`, or from a node far from it if its bandwidth is smaller."""
    near = traverse(rows, root)
    far = traverse(rows, remote(rows, near)[0])
    return min((near.order, far.order), key=lambda found: reach(rows, found)[0])


def component(rows: list[set[int]], root: int, finder: str, restarts: int, trials: int) -> list[int]:
    """The Cuthill-McKee order of the component of `root`, its node of least rank."""
    if finder == "mind" or not rows[root]:
        return traverse(rows, root).order
    kept, best, start = Traversal([], []), float("inf"), root
    for number in range(1, restarts + 1):
        visited = list(walk(rows, start, finder))
        if visited[-1].width == 1:  # a path from its end: there is no narrower order
            return visited[-1].order
        for found in visited if finder == "bi-criteria" else visited[-1:]:
            points = score(rows, found, finder, trials)
            if points < best or (points == best and finder == "bi-criteria"):  # on equal terms the more remote one
                kept, best = found, points
        start = kept.order[number * STRIDE % len(kept.order)]
    last, before = visited[-1], visited[-2]
    for start in [*remote(rows, last), *remote(rows, before)][:trials]:
        found = traverse(rows, start)
        if (points := score(rows, found, finder, trials)) < best:
            kept, best = found, points
    return kept.order


def score(rows: list[set[int]], found: Traversal, finder: str, trials: int) -> float:
    """What is made least."""
    if finder == "george-liu":
        return -len(found.levels)
    if not trials:
        return found.width
    bandwidth, profile = reach(rows, found.order)
    return float(bandwidth) * float(profile)


def reach(rows: list[set[int]], found: list[int]) -> tuple[int, int]:
    """Bandwidth and profile of the reverse of `found`."""
    place = {node: at for at, node in enumerate(found)}
    further = [max([at, *(place[other] for other in rows[node])]) - at for node, at in place.items()]
    return max(further), sum(further)
