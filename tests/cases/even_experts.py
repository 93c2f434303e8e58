"""Experts spread evenly over ranks."""

from __future__ import annotations

import itertools

from espalier.parallel.expert_map import ExpertMap


def spread_evenly(experts: int, ranks: int) -> ExpertMap:
    """Consecutive experts on each rank; where ranks do not divide them, the first ranks hold one more."""
    few, over = divmod(experts, ranks)
    ends = [rank * few + min(rank, over) for rank in range(ranks + 1)]
    return ExpertMap(tuple(tuple(range(first, last)) for first, last in itertools.pairwise(ends)))
