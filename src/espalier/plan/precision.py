"""Precision of a run: what each GPU computes fast, and what a plan says of it. No torch.

A recipe that leaves `train.precision` open gets the fastest plan of all precisions that some GPU of the cluster
computes fast (`decide`). A device that lacks a precision is left out of its plans, so that one old card does not slow
the others. Processors train in fp32, unless trials of real steps are faster in bf16.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

from espalier.machine.cluster import Cluster, Device
from espalier.plan import collective_time, device_model
from espalier.plan.base import Plan
from espalier.plan.layout_estimate import price
from espalier.plan.request import Request
from espalier.plan.search import SearchResult
from espalier.recipe import units

FASTER = 1.25
"""So many times as fast as fp32 (or TF32) a device must multiply in 16 bits for these to be worth their rounding."""
WORTH_SAYING = 1.1
"""A precision that is at most this much faster than a plan's own is not told."""
ON_PROCESSORS = "fp32: on processors bf16 is taken only where steps in it were measured and are faster."


def candidates(cluster: Cluster) -> tuple[str, ...]:
    """The precisions that a plan on GPUs may have, the first of equals first."""
    known = {name for table in cluster.nodes if table.device.kind == "cuda" for name in fast(table.device)}
    return tuple(name for name in device_model.PRECISIONS if name in known)


def fast(device: Device) -> tuple[str, ...]:
    """The precisions in which a device trains a model of fp32 weights fast, the fastest first."""
    if device.kind == "cpu":
        return ("fp32",)
    exact = "tf32" if _rate(device, "tf32") > FASTER * _rate(device, "fp32") else "fp32"
    low = [name for name in ("bf16", "fp16") if _rate(device, name) > FASTER * _rate(device, exact)]
    if len(low) == 2 and _rate(device, "fp16") <= FASTER * _rate(device, "bf16"):
        low = ["bf16"]  # as fast, with a range that needs no loss scaling
    return (*low, exact)


def machines(cluster: Cluster, name: str) -> Cluster:
    """The machines that have a precision, where they come first and so keep their numbers; else all of them."""
    having = tuple(itertools.takewhile(lambda table: _rate(table.device, name) > 0, cluster.nodes))
    alike = any(_rate(table.device, name) for table in cluster.nodes[len(having) :])
    if cluster.pairs or alike or not having or any(table.name for table in cluster.nodes):
        return cluster
    return cluster.changed(nodes=having)


def worth_trying(cluster: Cluster) -> bool:
    """Whether processors multiply so much faster in bf16, as probed, that steps may be."""
    return all(_rate(table.device, "bf16") > FASTER * _rate(table.device, "fp32") for table in cluster.nodes)


def _rate(device: Device, precision: str) -> float:
    return device.flops.get(precision, 0.0)


# --- what a plan says of it ----------------------------------------------------------------------------------------


def reasons(plan: Plan, cluster: Cluster, others: dict[str, SearchResult]) -> list[str]:
    """Why a plan has its precision, which was not set, and what the devices that it leaves out would cost.

    `others`: what was found in other precisions.
    """
    name = plan.precision
    sentences = [_rates(name, min(collective_time.used(cluster, plan), key=lambda device: _rate(device, name)))]
    lacking = Counter(place.table.device.name for place in cluster.devices() if not _rate(place.table.device, name))
    if lacking:
        listed = " and ".join(f"{count} x {kind}" for kind, count in lacking.items())
        many = "is" if lacking.total() == 1 else "are"
        sentences.append(f"{listed} {many} left out: no {name} there{_time_with_all(plan, others)}.")
    return sentences


def _rates(name: str, device: Device) -> str:
    """The rates that decide, of the slowest device used."""
    if name == "fp32":
        return f"fp32: {device.name} multiplies nothing narrower much faster."
    scaled = ", with a scaled loss" if name == "fp16" else ""
    tf32 = f" and {_times(device, name, 'tf32')} TF32's" if name == "bf16" and _rate(device, "tf32") else ""
    return f"{name}{scaled}: {_times(device, name, 'fp32')} fp32's rate{tf32} on {device.name}."


def _times(device: Device, name: str, other: str) -> str:
    return f"{_rate(device, name) / _rate(device, other):.2g}x"


def with_all(result: SearchResult) -> float | None:
    """Seconds of a step of the best plan that uses every device; None where none does."""
    option = result.best(lambda option: option.layout.world == len(option.cluster.devices()))
    return None if option is None else option.seconds


def _time_with_all(plan: Plan, others: dict[str, SearchResult]) -> str:
    """What the fastest plan takes that uses every device, in a precision that all have."""
    there = {seconds: name for name, result in others.items() if (seconds := with_all(result)) is not None}
    if not there or plan.predicted is None:
        return ""
    times = min(there) / plan.predicted.step_seconds
    taken = units.show_seconds(min(there))
    return f"; with all, in {there[min(there)]}, a step takes {taken}, {times:.2g} times as long"


def faster(request: Request, result: SearchResult) -> list[str]:
    """How much faster the same layout would be in the fastest precision of its GPUs, where the plan has another."""
    option = result.best()
    if option is None or request.precision == "fp64":
        return []
    layout = option.layout
    devices = [kind.table.device for kind in option.on.kinds]
    name = min((fast(device)[0] for device in devices), key=device_model.PRECISIONS.index)
    if name == request.precision or not all(device_model.has(device, name) for device in devices):
        return []
    on = replace(option.on, factors=request.factors)
    own_prices, fast_prices = (price(question, on, layout) for question in (request, request.changed(precision=name)))
    times = max(float(priced.step) for priced in own_prices) / max(float(priced.step) for priced in fast_prices)
    if times <= WORTH_SAYING:
        return []
    fits = "" if all(float(priced.over) <= 0 for priced in fast_prices) else ", but would not fit"
    return [f"In {name} this layout would be {times:.2g} times as fast as in {request.precision}{fits}."]
