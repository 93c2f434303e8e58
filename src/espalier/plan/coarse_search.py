"""Coarse search: on many ranks, the cuts whose layouts are worth a price of their own. No torch.

A cut is all of a layout but the factors by which its states are split, of which thousands of ranks have hundreds. Every
cut is priced with the factors that count most (one rank, a machine, all ranks) and with states as one length each; only
the best cuts are then priced with all factors, unit by unit. Up to `EXHAUSTIVE` ranks nothing is left out.
"""

from __future__ import annotations

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
PRECISE = 0.01
"""Share of a peak by which states as one length may be more than unit by unit: some values are kept in fewer bytes."""
OF_EACH = 2
"""Of each algorithm and recomputation at least, to say what they lose."""
CUT = tuple(name for name in space.ARRAYS if name not in ("params", "grads", "optimizer"))


def cuts(request: Request, on: Fleet, batches: Iterable[Layouts]) -> tuple[list[Layouts], int]:
    """The best cuts among layouts with few factors, the fastest first, then those that lack the fewest bytes; and how
    many layouts these were."""
    plain, priced = one_length(request), 0
    ranked: dict[Layouts, tuple[float, float]] = {}
    of_each: set[Layouts] = set()
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
        best = batch.each(list(first.values()))
        of_each |= set(best[:OF_EACH])
        ranked |= dict(zip(best, ((seconds[index], over[index]) for index in first.values()), strict=True))
    by_seconds = sorted(ranked, key=ranked.__getitem__)
    return [*by_seconds[:CUTS], *(cut for cut in by_seconds[CUTS:] if cut in of_each)], priced


def refined(chosen: Iterable[Layouts], per_node: int, limits: Limits) -> Iterator[Layouts]:
    """All layouts of the chosen cuts, one batch for each algorithm, recomputation and placement."""
    alike: dict[tuple[str, ...], list[Layouts]] = {}
    for cut in chosen:
        alike.setdefault((cut.algorithm, cut.recompute, cut.placement), []).append(cut)
    for members in alike.values():
        yield space.with_factors(members, per_node, limits)


def fitting(request: Request, on: Fleet, batch: Layouts) -> Layouts:
    """Those of a batch that may fit, and where none does those that may lack the fewest bytes: units of many experts
    take long to work out, and their padding only adds to the bytes."""
    if "expert_parallel" not in request.profile.facts:
        return batch
    peak, over = fullness(one_length(request), on, batch)
    least = over - PRECISE * peak
    if np.all(least > 0):
        nearest = batch.at(np.argsort(least, kind="stable")[:CUTS])
        return batch.at(np.flatnonzero(least <= np.min(fullness(request, on, nearest)[1])))
    return batch.at(np.flatnonzero(least <= 0))


def one_length(request: Request) -> Request:
    """The request with states that count as one length: seconds and bytes without the padding of units."""
    facts: Mapping[str, Any] = request.profile.facts
    if "expert_parallel" in facts:
        facts = {**facts, "expert_parallel": request.experts._replace(tensors=None)}
    return request.changed(sizes=(), facts=facts)
