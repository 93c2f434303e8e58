"""What need not be priced: devices that others stand for, parts of a cluster that cannot be fast enough. No torch.

Both are exact: the search finds the same plan with them as without.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from espalier.cluster import Device
from espalier.cost import WHOLE
from espalier.plan import speed
from espalier.plan.layouts import Layouts
from espalier.plan.network import Fleet, Kind
from espalier.plan.request import Request
from espalier.plan.seconds import compute
from espalier.plan.step import Step

MUON = ("bf16", "fp32")
"""Precisions that Muon's own products may take, whatever the model's."""


def weakest(request: Request, on: Fleet) -> Fleet:
    """The fleet with only those kinds of device that can be the slowest or the fullest of equal shares: a kind goes
    where another is in nothing better, since neither seconds nor bytes grow with a better device."""
    kept = [
        kind
        for index, kind in enumerate(on.kinds)
        if not any(
            _worse(request, other, kind) and not (at > index and _worse(request, kind, other))
            for at, other in enumerate(on.kinds)
            if at != index
        )
    ]
    return replace(on, kinds=tuple(kept))


def _worse(request: Request, one: Kind, other: Kind) -> bool:
    """Whether `one` is in nothing better than `other`; False where that cannot be told."""
    devices = one.table.device, other.table.device
    if any(device.kind != "cuda" or device.rates or device.copies or not device.peak for device in devices):
        return False
    return one.setting == other.setting and all(
        here <= there for here, there in zip(*(_abilities(request, device) for device in devices), strict=True)
    )


def _abilities(request: Request, device: Device) -> tuple[float, ...]:
    """Everything of a catalogue's device that seconds and bytes depend on, more being better."""
    peak = speed.peak(device, request.precision)
    rates = [peak * speed.share(device, what) for what in ("product", "attention")]
    if request.optimizer == "muon":
        rates += [device.flops.get(name, 0.0) * speed.share(device, "product") for name in MUON]
    return (*rates, device.memory_bandwidth, -speed.issue_seconds(device), device.memory, -float(device.runtime))


def least_seconds(request: Request, on: Fleet) -> tuple[float, float]:
    """Seconds that no plan on this fleet can beat with equal shares, and with shares by speed: the model's products and
    attention at the rates that its devices sustain, forward and backward once. Processors: not known, 0."""
    if not on.cuda:
        return 0.0, 0.0
    each = [_sample(request, on, kind) for kind in on.kinds]
    together = sum(kind.ranks / taken for kind, taken in zip(on.kinds, each, strict=True))
    return request.global_batch * max(each) / on.ranks, request.global_batch / together


def _sample(request: Request, on: Fleet, kind: Kind) -> float:
    """Seconds of one sample on one device of this kind, products without their start; a probed device at its peak."""
    device = kind.table.device
    if device.rates:
        return request.model_flops / request.global_batch / speed.peak(device, request.precision)
    dense = replace(request.anatomy(1, "none", request.precision, WHOLE).whole, moved=0.0)
    factors = msgspec.structs.replace(on.factors, startup=0.0)
    one = compute(Step(request, replace(on, factors=factors), kind, Layouts()), dense)
    return float(one.forward + one.backward)
