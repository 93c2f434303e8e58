"""Precision of a run: what each device computes fast, and which of these makes the fastest plan. No torch.

A recipe that leaves `train.precision` open gets the fastest plan of all precisions that some device of the cluster
computes fast. A device that lacks a precision is left out of its plans, so that one old card does not slow the others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from espalier import units
from espalier.cluster import Cluster, Device
from espalier.plan import collective_time, device_model
from espalier.plan.base import Plan
from espalier.plan.collective_time import gpus
from espalier.plan.estimate import slowest
from espalier.plan.request import AUTO, Request
from espalier.plan.search import Found

FASTER = 1.25
"""So many times as fast as fp32 (or TF32) a device must multiply in 16 bits for these to be worth their rounding."""
WORTH_SAYING = 1.1
"""A precision that is at most this much faster than the one that was set is not told."""


def candidates(request: Request, cluster: Cluster) -> tuple[str, ...]:
    """The precisions that a plan may have, the first of equals first."""
    if request.precision != AUTO:
        return (request.precision,)
    there = "cuda" if gpus(cluster) else "cpu"
    each = [fast(table.device) for table in cluster.nodes if table.device.kind == there]
    if there == "cpu" and each.count(each[0]) < len(each):
        return ("fp32",)
    return tuple(name for name in device_model.PRECISIONS if any(name in known for known in each))


def fast(device: Device) -> tuple[str, ...]:
    """The precisions in which a device trains a model of fp32 weights fast. Of processors only measured ones count: the
    catalogue's rates hold for none in particular."""
    rates = device.flops
    if device.kind == "cpu":
        measured = any(rate.precision == "bf16" for rate in device.rates)
        return ("bf16", "fp32") if measured and _rate(device, "bf16") > FASTER * _rate(device, "fp32") else ("fp32",)
    exact = "tf32" if _rate(device, "tf32") > FASTER * _rate(device, "fp32") else "fp32"
    low = [name for name in ("bf16", "fp16") if _rate(device, name) > FASTER * _rate(device, exact)]
    if len(low) == 2 and rates["fp16"] <= FASTER * rates["bf16"]:
        low = ["bf16"]  # as fast, with a range that needs no loss scaling
    return (*low, exact)


def _rate(device: Device, precision: str) -> float:
    return device.flops.get(precision, 0.0)


# --- what a plan says of it ----------------------------------------------------------------------------------------


def reasons(plan: Plan, request: Request, cluster: Cluster, others: dict[str, Found]) -> list[str]:
    """Why a plan has its precision, which was not set, and what the devices that it leaves out would cost.

    Args:
        plan: that was taken; `request` has its precision.
        others: what was found in other precisions.
    """
    said, name = [_rates(plan, cluster)], request.precision
    lacking = [place.table.device for place in cluster.devices() if not device_model.has(place.table.device, name)]
    if lacking and gpus(cluster):
        counted = Counter(device.name for device in lacking)
        told = " and ".join(f"{count} x {kind}" for kind, count in counted.items())
        said.append(
            f"{told} {'is' if len(lacking) == 1 else 'are'} left out: no {name} there{_with_all(plan, others)}."
        )
    return said


def _rates(plan: Plan, cluster: Cluster) -> str:
    """The rates that decide, of the slowest device used."""
    name, used = plan.precision, collective_time.used(cluster, plan)
    device = min(used, key=lambda one: _rate(one, name))
    if device.kind == "cpu" and name == "fp32":
        measured = [one for one in device.rates if one.precision == "bf16"]
        beside = f" (bf16 has {_times(device, 'bf16', name)} its rate here)" if measured else ""
        return f"fp32, as processors compute it fast{beside}."
    if name == "fp32":
        return f"fp32: {device.name} multiplies nothing narrower much faster."
    scaled = ", with a scaled loss" if name == "fp16" else ""
    tf32 = f" and {_times(device, name, 'tf32')} TF32's" if name == "bf16" and _rate(device, "tf32") else ""
    return f"{name}{scaled}: {_times(device, name, 'fp32')} fp32's rate{tf32} on {device.name}."


def _times(device: Device, name: str, other: str) -> str:
    return f"{_rate(device, name) / _rate(device, other):.2g}x"


def _with_all(plan: Plan, others: dict[str, Found]) -> str:
    """What the fastest plan takes that uses every device, in a precision that all have."""
    there = {
        name: option
        for name, found in others.items()
        if (option := found.best(lambda one: one.layout.world == len(one.cluster.devices()))) is not None
    }
    if not there or plan.predicted is None:
        return ""
    name, best = min(there.items(), key=lambda item: item[1].seconds)
    times = best.seconds / plan.predicted.step_seconds
    return f"; with all, in {name}, a step takes {units.show_seconds(best.seconds)}, {times:.2g} times as long"


def narrower(request: Request, found: Found) -> list[str]:
    """How much faster the same layout would be in the fastest precision of its devices, where another was set."""
    option = found.best()
    if option is None or request.precision == "fp64" or not gpus(option.cluster):
        return []
    layout, devices = option.layout, collective_time.devices(option.cluster, int(option.layout.world)).values()
    name = min((fast(device)[0] for device in devices), key=device_model.PRECISIONS.index)
    if name == request.precision or not all(device_model.has(device, name) for device in devices):
        return []
    on = collective_time.fleet(option.cluster, int(layout.world), layout.threads)
    here, there = (float(slowest(one, replace(on, factors=one.factors), layout)) for one in (
        request, replace(request, precision=name)
    ))  # fmt: skip
    if here <= WORTH_SAYING * there:
        return []
    return [f"{request.precision} was set: in {name} this layout is {here / there:.2g} times as fast."]
