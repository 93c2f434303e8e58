"""Coarse search: on many ranks, the cuts whose layouts are worth a price of their own. No torch.

A cut is all of a layout but the factors by which its states are split, of which thousands of ranks have hundreds. Every
cut is priced with the factors that count most (one rank, a machine, all ranks) and with states as one length each; only
the best cuts are then priced with all factors, unit by unit. Up to `EXHAUSTIVE` ranks nothing is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from espalier.plan import layouts as space
from espalier.plan.collective_time import Fleet
from espalier.plan.layout_estimate import fullness, slowest
from espalier.plan.layouts import Layouts, Limits
from espalier.plan.request import Request

EXHAUSTIVE = 64
"""Ranks up to which every layout is priced."""
CUTS = 96
"""Cuts of a part of the cluster that are priced in full."""
LOSES = 1.25
"""So many times as long as a known plan, a part of the cluster loses also with the best factors."""
OF_EACH = 2
"""Of each algorithm and recomputation at least, to say what they lose."""
CUT = tuple(name for name in space.ARRAYS if name not in ("params", "grads", "optimizer"))


def cuts(
    request: Request, on: Fleet, batches: Iterable[Layouts], against: float = math.inf
) -> tuple[list[Layouts], int]:
    """The best cuts among layouts with few factors, the fastest first, then those that lack the fewest bytes; and how
    many layouts these were. Only the best where all clearly lose `against` a step of so many seconds."""
    plain, priced = one_length(request), 0
    ranked: list[tuple[float, float, bool, Layouts, int]] = []
    for batch in batches:
        priced += len(batch)
        over = fullness(plain, on, batch)[1]
        seconds, fits = np.full(len(batch), np.inf), np.flatnonzero(over <= 0)
        if len(fits):
            seconds[fits] = slowest(plain, on, batch.at(fits))
        order = np.lexsort((over, seconds))[: 4 * CUTS]
        columns = [np.broadcast_to(getattr(batch, name), len(batch))[order].tolist() for name in CUT]
        first: dict[tuple[Any, ...], int] = {}
        for index, *cut in zip(order.tolist(), *columns, strict=True):
            first.setdefault(tuple(cut), index)
        ranked += [(seconds[index], over[index], at < OF_EACH, batch, index) for at, index in enumerate(first.values())]
    ranked.sort(key=lambda row: row[:2])
    if ranked and ranked[0][0] > LOSES * against:
        del ranked[1:]
    chosen = [*ranked[:CUTS], *(row for row in ranked[CUTS:] if row[2])]
    return [batch.at(index) for *_, batch, index in chosen], priced


def refined(chosen: Iterable[Layouts], per_node: int, limits: Limits) -> Iterator[Layouts]:
    """All layouts of the chosen cuts, one batch for each algorithm, recomputation and placement."""
    alike: dict[tuple[str, ...], list[Layouts]] = {}
    for cut in chosen:
        alike.setdefault((cut.algorithm, cut.recompute, cut.placement), []).append(cut)
    for members in alike.values():
        yield space.with_factors(members, per_node, limits)


def one_length(request: Request) -> Request:
    """The request with states that count as one length: seconds and bytes without the padding of units."""
    facts: Mapping[str, Any] = request.profile.facts
    if "expert_parallel" in facts:
        facts = {**facts, "expert_parallel": request.experts._replace(tensors=None)}
    return request.changed(sizes=(), facts=facts)
