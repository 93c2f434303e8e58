"""The plain planner: the same on every device. Data parallel, everything replicated, gradients exchanged every step.

It decides the number of ranks and their threads, the micro-batch, and whether activations are recomputed. On a
processor every divisor of its cores is a number of ranks; on GPUs each device is one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from espalier.cluster import Cluster
from espalier.plan import memory, network, reasons
from espalier.plan.base import Plan, Rank, Stage, Unit, exchanges
from espalier.plan.estimate import estimate, grid, scaled
from espalier.plan.layouts import MODES, Layouts
from espalier.plan.reasons import Choice, key
from espalier.plan.request import Request
from espalier.plan.seats import gpus, seats, shares

name = "uniform"

NEAR = 1.02
"""Of micro-batches whose estimates differ by no more than this, the largest is taken that needs at most `memory.ROOMY`
of the memory, since every further pass adds to all gradients once more; else the smallest, which holds least."""

TRIED = 1.05
"""Of trials that differ by no more than this, the one with most ranks is taken: processes wait for each other once a
step, threads at every operation, so that a core that is busy elsewhere hurts them more."""

Measured = Mapping[tuple[int, int], float]
"""(ranks, threads) -> seconds of a step in a trial."""


def plan(request: Request, cluster: Cluster, measured: Measured | None = None) -> Plan:
    """The best plan; of those with a `measured` trial the fastest measured. Raises UserError when nothing fits."""
    found = candidates(request, cluster)
    tried = [one for one in found if key(one) in (measured or {})]
    if not measured or not tried:
        return _with_runners_up(found, {})
    fastest = min(measured[key(one)] for one in tried)
    best = max((one for one in tried if measured[key(one)] <= TRIED * fastest), key=lambda one: len(one.ranks))
    assert best.predicted is not None
    took = measured[key(best)]
    why = (reasons.tried(tried, measured), *best.why)
    best = msgspec.structs.replace(best, predicted=scaled(best.predicted, took), why=why)
    return _with_runners_up([best, *(one for one in found if key(one) != key(best))], measured)


def candidates(request: Request, cluster: Cluster) -> list[Plan]:
    """One plan for each possible (ranks, threads), the best first. Raises UserError when none fits in memory."""
    choices = _choices(request, cluster)
    found = [_plan(request, cluster, chosen, note) for chosen, note in choices if chosen.fits]
    if not found:
        raise reasons.too_large(request, cluster, [chosen for chosen, _ in choices])
    every = max(len(one.ranks) for one in found)
    on_gpus = found[0].ranks[0].device != "cpu"
    # On GPUs the plain planner uses all of them; fewer are only shown beside it.
    return sorted(found, key=lambda one: (on_gpus and len(one.ranks) != every, reasons.seconds(one), len(one.ranks)))


def closest(request: Request, cluster: Cluster) -> Plan:
    """The plan that lacks the fewest bytes when none fits: not executable, `missing` says what it lacks."""
    choices = _choices(request, cluster)
    predicted, nearest = reasons.closest(request, cluster, [chosen for chosen, _ in choices])
    note = next(note for chosen, note in choices if chosen is nearest)
    made = _plan(request, cluster, nearest, note)
    return msgspec.structs.replace(made, executable=False, missing=reasons.missing(predicted))


def _choices(request: Request, cluster: Cluster) -> list[tuple[Choice, str]]:
    """The best of each possible (ranks, threads), whether it fits or not, with a remark."""
    reasons.check(request, cluster)
    choices = [
        (_choose(request, cluster, ranks, threads), note)
        for ranks, threads, note in _divisions(request, cluster)
        if (request.pin.micro_batch or 1) <= -(-request.global_batch // ranks)
        and request.redundancy <= ranks <= (request.max_devices or ranks)
    ]
    if not choices:
        raise reasons.too_coarse(request)
    return choices


# --- ranks and threads -------------------------------------------------------------------------------------------


def _divisions(request: Request, cluster: Cluster) -> list[tuple[int, int, str]]:
    """(ranks, threads, remark) to consider."""
    if gpus(cluster):
        return _gpu_divisions(request, cluster)
    places, pin = cluster.devices(), request.pin
    cores = min(max(1, place.table.cores) for place in places)
    if pin.ranks is not None:
        threads = pin.threads or max(1, cores // -(-pin.ranks // len(places)))
        return [(pin.ranks, threads, reasons.asked_for(pin.ranks))]
    found = []
    for each in (d for d in range(1, cores + 1) if cores % d == 0):
        ranks = each * len(places)
        if ranks <= request.global_batch or (each == 1 and len(places) == 1):
            found.append((ranks, pin.threads or cores // each, ""))
    if not found:
        note = f"Only {request.global_batch} of {len(places)} machines have work: one sample each."
        found = [(request.global_batch, pin.threads or cores, note)]
    return found


def _gpu_divisions(request: Request, cluster: Cluster) -> list[tuple[int, int, str]]:
    there, pin = gpus(cluster), request.pin
    places = [place for place in cluster.devices() if place.table.device.kind == "cuda"]
    cores = min(place.table.cores // place.table.devices for place in places)
    threads = pin.threads or max(1, cores)
    if pin.ranks is not None:
        return [(pin.ranks, threads, reasons.asked_for(pin.ranks))]
    every = min(there, request.global_batch)
    note = ""
    if every < there:
        note = f"Only {every} of {there} GPUs have work: the global batch has {request.global_batch} samples."
    one_node = sum(place.node == places[0].node for place in places)
    fewer = sorted({1, one_node} - {every})
    return [(every, threads, note), *((ranks, threads, "") for ranks in fewer if ranks < every)]


# --- micro-batch and recomputation -------------------------------------------------------------------------------


def _choose(request: Request, cluster: Cluster, ranks: int, threads: int) -> Choice:
    """The fastest micro-batch that fits (see `NEAR`), with the least recomputation that lets one fit."""
    sizes = _sizes(request, ranks)
    asked = request.pin.recompute or request.recompute
    on = replace(network.fleet(cluster, ranks, threads), factors=request.factors)
    without = 0.0
    for mode in (asked,) if asked else MODES:
        priced = grid(request, on, Layouts(dp=ranks, micro_batch=sizes, recompute=mode, threads=threads))
        fits = np.flatnonzero(priced.over <= 0)
        if not len(fits):
            without = without or float(np.min(priced.over))
            continue
        order = sorted(fits, key=lambda i: (float(priced.seconds[i]), int(sizes[i])))
        near = [i for i in order if priced.seconds[i] <= NEAR * priced.seconds[order[0]]]
        roomy = [i for i in near if priced.peak[i] <= memory.ROOMY * (priced.peak[i] - priced.over[i])]
        first = max(roomy, key=lambda i: int(sizes[i])) if roomy else min(near, key=lambda i: int(sizes[i]))
        order = [first, *(i for i in order if i != first)]
        best = Layouts(dp=ranks, micro_batch=int(sizes[first]), recompute=mode, threads=threads)
        others = tuple(replace(best, micro_batch=int(sizes[i])) for i in order[1:3])
        return Choice(best, True, others, without, bool(roomy))
    least = Layouts(dp=ranks, micro_batch=int(sizes[0]), recompute=asked or MODES[-1], threads=threads)
    return Choice(least, False)


def _sizes(request: Request, ranks: int) -> Any:
    """Micro-batches to consider, ascending: powers of two up to a rank's share, and the share itself."""
    share = -(-request.global_batch // ranks)
    if request.pin.micro_batch is not None:
        return np.array([request.pin.micro_batch])
    if request.pin.accumulate is not None:
        return np.array([-(-share // request.pin.accumulate)])
    powers = [2**k for k in range(share.bit_length()) if 2**k <= share]
    return np.array(sorted({*powers, share}))


# --- the plan ----------------------------------------------------------------------------------------------------


def _plan(request: Request, cluster: Cluster, chosen: Choice, note: str) -> Plan:
    layout = chosen.layout
    predicted = estimate(request, cluster, layout)
    cuts = shares(request.global_batch, layout.dp)
    ranks = tuple(
        Rank(
            device="cpu" if place.table.device.kind == "cpu" else f"cuda:{place.slot}",
            node=place.node,
            threads=layout.threads,
            share=share,
        )
        for place, share in zip(seats(cluster, layout.dp), cuts, strict=True)
    )
    most = max(stop - start for start, stop in cuts)
    accumulate = -(-most // int(layout.micro_batch))
    stage = Stage(ranks=tuple(range(len(ranks))), layers=(0, request.layers), micro_batches=accumulate)
    made = Plan(
        planner=name,
        ranks=ranks,
        units=(Unit(),),
        stages=(stage,),
        exchanges=exchanges(request.crossings) if len(ranks) > 1 else (),
        micro_batch=int(layout.micro_batch),
        recompute=layout.recompute,
        precision=request.precision,
        compile=request.compile,
        predicted=predicted,
    )
    others = [estimate(request, cluster, other) for other in chosen.others]
    runners = tuple(
        reasons.other_size(made, int(other.micro_batch), priced)
        for other, priced in zip(chosen.others, others, strict=True)
    )
    why = reasons.why(request, cluster, chosen, made)
    return msgspec.structs.replace(made, why=(note, *why) if note else why, runners_up=runners)


def _with_runners_up(found: list[Plan], measured: Measured) -> Plan:
    """The first plan, the others beside it with what each loses."""
    best = found[0]
    others = tuple(reasons.other(best, one, measured) for one in found[1:])
    return msgspec.structs.replace(best, runners_up=(*others, *best.runners_up))
