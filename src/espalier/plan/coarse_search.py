"""Coarse search: what is worth a price of its own. No torch.

Of devices those kinds that can be the slowest or the fullest; of parts of a cluster those whose lower bound does not
exceed what is known; on many ranks, cuts.

A cut is all of a layout but the factors by which its states are split, of which thousands of ranks have hundreds. Every
cut is priced with the factors that count most (one rank, a machine, all ranks) and with states as one length each; only
the best cuts are then priced with all factors, unit by unit. Up to `EXHAUSTIVE` ranks nothing is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from espalier.machine.cluster import Device
from espalier.plan import device_model
from espalier.plan import layouts as space
from espalier.plan.base import RESIDENT
from espalier.plan.collective_time import DeviceGroup, Fleet
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.layout_estimate import fullness, slowest
from espalier.plan.layouts import Layouts, Limits
from espalier.plan.request import Request
from espalier.plan.step_time import compute
from espalier.recipe.cost import WHOLE

EXHAUSTIVE = 64
"""Ranks up to which every layout is priced."""
CUTS = 96
"""Cuts of a part of the cluster that are priced in full."""
LOSES = 1.25
"""So many times as long as a known plan, a part of the cluster loses also with the best factors."""
OF_EACH = 2
"""Of each algorithm and recomputation at least, to say what they lose."""
MUON = ("bf16", "fp32")
"""Precisions that Muon's own products may take, whatever the model's."""
CUT = tuple(name for name in space.ARRAYS if name not in ("params", "grads", "optimizer"))


def cuts(
    request: Request, on: Fleet, batches: Iterable[Layouts], against: float = math.inf
) -> tuple[list[Layouts], int]:
    """The best cuts among layouts with few factors, the fastest first, then those that lack the fewest bytes; and how
    many layouts these were. Only the best where all clearly lose `against` a step of so many seconds; where devices
    differ, also those that may have shares by speed."""
    plain = one_length(request)
    weak = weakest(request, on)
    priced = 0
    ranked: list[tuple[float, float, bool, Layouts, int]] = []
    for batch in batches:
        priced += len(batch)
        over = fullness(plain, weak, batch)[1]
        seconds = np.full(len(batch), np.inf)
        fits = np.flatnonzero(over <= 0)
        if len(fits):
            seconds[fits] = slowest(plain, weak, batch.at(fits))
        by_speed = shares_by_speed(batch, on)
        order = np.lexsort((over, seconds))
        order = order[(np.arange(len(order)) < 4 * CUTS) | by_speed[order]]
        columns = [np.broadcast_to(getattr(batch, name), len(batch))[order].tolist() for name in CUT]
        first: dict[tuple[Any, ...], int] = {}
        for index, *cut in zip(order.tolist(), *columns, strict=True):
            first.setdefault(tuple(cut), index)
        ranked += [
            (seconds[index], over[index], at < OF_EACH or bool(by_speed[index]), batch, index)
            for at, index in enumerate(first.values())
        ]
    ranked.sort(key=lambda row: row[:2])
    if ranked and len(on.kinds) == 1 and ranked[0][0] > LOSES * against:
        del ranked[1:]
    chosen = [*ranked[:CUTS], *(row for row in ranked[CUTS:] if row[2])]
    return [batch.at(index) for *_, batch, index in chosen], priced


def shares_by_speed(layouts: Layouts, on: Fleet) -> Any:
    """Boolean [layouts]: those that are also priced with shares by speed. Where devices differ, equal shares say little
    of them."""
    whole = (layouts.pp == 1) & (layouts.algorithm == "data")
    return (len(on.kinds) > 1) & (whole | (in_one_ring(layouts, on.ranks) & (layouts.algorithm == "isp")))


def in_one_ring(layouts: Layouts, ranks: int) -> Any:
    """Boolean [layouts]: those in which all ranks share each sequence along the context."""
    return np.broadcast_to(layouts.cp == ranks, len(layouts)) & (len(layouts) > 0)


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


# --- bounds ------------------------------------------------------------------------------------------------------


def weakest(request: Request, on: Fleet) -> Fleet:
    """The fleet with only those kinds of device that can be the slowest or the fullest of equal shares: a kind goes
    where another is in nothing better, since neither seconds nor bytes grow with a better device."""
    if request.offload != RESIDENT:  # machines, too, are then fuller or slower
        return on
    kinds = [
        kind
        for index, kind in enumerate(on.kinds)
        if not any(
            _worse(request, other, kind) and not (at > index and _worse(request, kind, other))
            for at, other in enumerate(on.kinds)
            if at != index
        )
    ]
    return replace(on, kinds=tuple(kinds))


def _worse(request: Request, kind: DeviceGroup, other: DeviceGroup) -> bool:
    """Whether `kind` is in nothing better than `other`; False where that cannot be told."""
    devices = kind.table.device, other.table.device
    if any(device.kind != "cuda" or device.rates or device.copies or not device.peak for device in devices):
        return False
    return kind.setting == other.setting and all(
        value <= better for value, better in zip(*(_abilities(request, device) for device in devices), strict=True)
    )


def _abilities(request: Request, device: Device) -> tuple[float, ...]:
    """Everything of a catalogue's device that seconds and bytes depend on, more being better."""
    peak = device_model.peak(device, request.precision)
    rates = [peak * device_model.share(device, what, request.precision) for what in ("product", "attention")]
    if request.muon:
        rates += [device.flops.get(name, 0.0) * device_model.share(device, "product", name) for name in MUON]
    rates += [device.flops.get("fp32", 0.0), -device.multiprocessors, device.memory_bandwidth]
    return (*rates, -device_model.issue_seconds(device), device.memory, -float(device.runtime))


def least_seconds(request: Request, on: Fleet) -> tuple[float, float]:
    """Seconds that no plan on this fleet can beat with equal shares, and with shares by speed: the model's products and
    attention at the rates that its GPUs sustain, forward and backward once."""
    each = [_sample(request, on, kind) for kind in on.kinds]
    together = sum(kind.ranks / taken for kind, taken in zip(on.kinds, each, strict=True))
    return request.profile.global_batch * max(each) / on.ranks, request.profile.global_batch / together


def _sample(request: Request, on: Fleet, kind: DeviceGroup) -> float:
    """Seconds of one sample on one device of this kind, products as large as can be; a probed device at its peak."""
    device = kind.table.device
    batch = request.profile.global_batch
    if device.rates:
        return request.model_flops / batch / device_model.peak(device, request.precision)
    dense = replace(request.profile.anatomy(batch, "none", request.precision, WHOLE).whole, moved=0.0)
    dense_pass = compute(CostInputs(request, on, kind, Layouts()), dense)
    return float(dense_pass.forward + dense_pass.backward) / batch
