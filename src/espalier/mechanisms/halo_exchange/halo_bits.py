"""Bits of halo rows by layer, direction and pair of machines: the least error that links carry while ranks compute.

The variance of a value of b bits is (range / (2^b - 1))^2 / 4 at most. All rows begin with 1 bit; then, while links
have time, those rows get more (2, 4, 8) whose error shrinks most for a second of their link. That objective is AdaQP's
(arXiv 2306.01381), which solves it while training; here the plan decides, from links. Errors count by how many layers'
gradients they reach. No torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from espalier.kernels.row_widths import LEVELS

WHOLE = 32
Key = tuple[int, bool]
"""A layer, and whether gradients of its rows cross (backward)."""


class Links(NamedTuple):
    """What rows cross: `nodes` [ranks], the machine of each rank; `bandwidth` [ranks, ranks], bytes/s."""

    nodes: Any
    bandwidth: Any

    @property
    def far(self) -> Any:
        """bool [ranks, ranks], of ranks of different machines, which share their machine's link."""
        return self.nodes[:, None] != self.nodes[None]

    def seconds(self, sent: Any) -> float:
        """Of the busiest link, in or out, where ranks send one another bytes `sent` [ranks, ranks]."""
        return max((float(times.max()) for times in self.busy(np.asarray(sent, float))), default=0.0)

    def busy(self, sent: Any) -> tuple[Any, ...]:
        """Seconds out of and into each machine, then each rank for those inside its machine."""
        times = sent / self.bandwidth
        machines = np.arange(self.nodes.max() + 1)[:, None] == self.nodes
        between = times * self.far
        inside = times * ~self.far
        return machines @ between.sum(1), machines @ between.sum(0), inside.sum(1), inside.sum(0)


class _Block(NamedTuple):
    """Rows of one crossing from one machine to another, or inside one."""

    key: Key
    mask: Any
    weight: float


def weight(key: Key, layers: int) -> float:
    """Share of the layers' gradients that an error in these rows reaches: all forward, those below backward."""
    layer, backward = key
    return layer / layers if backward else 1.0


def allotted(
    counts: Mapping[Key, Any], sent: Callable[[Key, int], Any], links: Links, seconds: float
) -> dict[Key, Any]:
    """int [ranks, ranks] by crossing: the bits of the rows that rank i sends rank j.

    Args:
        counts: rows [ranks, ranks] of each crossing; sent: their bytes with so many bits.
        seconds: that the busiest link may take for all crossings together. Where 1 bit takes longer, it is 1 bit.
    """
    ranks = len(links.nodes)
    layers = 1 + max((layer for layer, _ in counts), default=0)
    allotment = {key: np.ones((ranks, ranks), int) for key in counts}
    at = {key: {bits: np.asarray(sent(key, bits), float) for bits in (*LEVELS, WHOLE)} for key in counts}
    busy = links.busy(sum((at[key][1] for key in counts), np.zeros((ranks, ranks))))
    heap: list[tuple[float, int, int]] = []
    blocks = [_Block(key, mask, weight(key, layers)) for key in counts for mask in _masks(counts[key], links)]

    def offer(number: int, level: int) -> None:
        if level + 1 < len(LEVELS):
            block, (low, high) = blocks[number], LEVELS[level : level + 2]
            gain = block.weight * counts[block.key][block.mask].sum() * (_error(low) - _error(high))
            more = links.seconds((at[block.key][high] - at[block.key][low]) * block.mask)
            heapq.heappush(heap, (-gain / max(more, 1e-30), number, level))

    for number in range(len(blocks)):
        offer(number, 0)
    while heap:
        _, number, level = heapq.heappop(heap)
        key, mask, _ = blocks[number]
        more = links.busy((at[key][LEVELS[level + 1]] - at[key][LEVELS[level]]) * mask)
        if all((times + other)[other > 0].max(initial=0.0) <= seconds for times, other in zip(busy, more, strict=True)):
            busy = tuple(times + other for times, other in zip(busy, more, strict=True))
            allotment[key][mask] = LEVELS[level + 1]
            offer(number, level + 1)
    return _whole(allotment, at, links, seconds)


def _whole(
    allotment: dict[Key, Any], at: Mapping[Key, Mapping[int, Any]], links: Links, seconds: float
) -> dict[Key, Any]:
    """With values as they are in crossings for which there is time: all rows of a crossing then are (rows as they are
    and rows of few bits have no message in common)."""

    def total(bits: Mapping[Key, Any]) -> Any:
        return sum(chosen_bytes(at[key], pair_bits) for key, pair_bits in bits.items())

    for key in sorted(allotment, reverse=True, key=lambda crossing: weight(crossing, 1 + max(allotment)[0])):
        tried = {**allotment, key: np.full_like(allotment[key], WHOLE)}
        if links.seconds(total(tried)) <= seconds:
            allotment = tried
    return allotment


def chosen_bytes(sent: Mapping[int, Any], bits: Any) -> Any:
    """Of bytes [ranks, ranks] by bits, those of the `bits` [ranks, ranks]."""
    return sum(np.where(bits == level, sent[level], 0.0) for level in sent)


def _masks(rows: Any, links: Links) -> list[Any]:
    """bool [ranks, ranks] of each pair of machines between which there are rows."""
    pairs = links.nodes[:, None] * (links.nodes.max() + 1) + links.nodes[None]
    return [(pairs == pair) & (rows > 0) for pair in np.unique(pairs[rows > 0])]


def _error(bits: int) -> float:
    return float((1 << bits) - 1) ** -2
