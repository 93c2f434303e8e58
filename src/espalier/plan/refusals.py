"""When no plan can be made: what is missing where, and the cheapest change that would make one fit. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from espalier import units
from espalier.cluster import Cluster
from espalier.config import Pin, Shard
from espalier.errors import UserError
from espalier.plan import chosen, memory, network, search
from espalier.plan.estimate import estimate, samples_each
from espalier.plan.layouts import Layouts, divisors
from espalier.plan.reasons import DoesNotFit
from espalier.plan.request import Request
from espalier.plan.search import Found, Option
from espalier.plan.seats import gpus
from espalier.plan.step import Step

MOST_GROWTH = 10
"""How many times the cluster is doubled in search of a size that fits."""


def check_pins(request: Request, cluster: Cluster) -> None:
    """Refuses pins that cannot be met. Raises UserError naming the pin and the nearest valid value."""
    pin, there = request.pin, max(1, gpus(cluster))
    ranks = pin.ranks or (there if gpus(cluster) else None)
    for name, value in _set_pins(pin):
        if isinstance(value, int) and value < 1:
            raise UserError(f"plan.pin.{name} = {value} is not possible.", do=f"plan.pin.{name}=1, or leave it out")
    degrees = {name: getattr(pin, name) for name in ("tp", "sp", "pp", "dp")}
    for name, value in degrees.items():
        if value is None:
            continue
        if name != "dp" and value > 1 and not request.heads:
            raise UserError(
                f"plan.pin.{name} = {value}: this module cannot be cut.",
                why="only decoders of kind gpt and moe say where they can be cut",
                do=f"plan.pin.{name}=1, or plan.pin.shard for its states",
            )
        _check_degree(request, name, value, there if gpus(cluster) else value)
        if ranks and pin.ranks and ranks % value:
            raise _no_division(f"plan.pin.{name}", value, "ranks", ranks)
        if not pin.ranks and value > there and gpus(cluster):
            raise UserError(
                f"plan.pin.{name} = {value} is more than the {there} devices of the cluster.", do=f"{name} = {there}"
            )
    _check_chain(pin, there)
    _check_devices(request, cluster, there)
    if pin.algorithm is not None:
        _check_algorithm(pin)


def _check_devices(request: Request, cluster: Cluster, there: int) -> None:
    """Whether ranks, redundancy and the devices allowed agree."""
    pin, most = request.pin, request.max_devices
    if most is not None and pin.ranks is not None and gpus(cluster) and pin.ranks > most:
        raise UserError(
            f"plan.pin.ranks = {pin.ranks} is more than plan.max_devices = {most}.", do=f"plan.pin.ranks={most}"
        )
    if pin.ranks is not None and gpus(cluster) and pin.ranks > there:
        raise UserError(
            f"plan.pin.ranks = {pin.ranks} is more than the {there} devices of the cluster.",
            why="each GPU is one rank",
            do=f"plan.pin.ranks={there}",
        )
    least = min(number for number in (pin.ranks, most, there) if number is not None)
    if gpus(cluster) and request.redundancy > least:
        raise UserError(
            f"plan.redundancy = {request.redundancy} needs that many ranks; there are {least}.",
            do=f"plan.redundancy={least} or less",
        )


def _check_degree(request: Request, name: str, value: int, there: int) -> None:
    wanted: dict[str, tuple[str, int]] = {
        "tp": ("heads", request.heads), "sp": ("heads", request.heads), "dp": ("", 0), "pp": ("", 0)
    }  # fmt: skip
    what, whole = wanted[name]
    if what and value > 1 and whole % value:
        raise _no_division(f"plan.pin.{name}", value, what, whole)
    if name == "pp" and value > request.layers:
        raise UserError(
            f"plan.pin.pp = {value} is more than the model's {request.layers} layers.",
            why="each stage has at least one layer",
            do=f"plan.pin.pp={request.layers} or less",
        )
    if name == "dp" and value > request.global_batch and value <= there:
        raise UserError(
            f"plan.pin.dp = {value} is more than the {request.global_batch} samples of the global batch.",
            do=f"plan.pin.dp={request.global_batch}, or a larger train.batch_tokens",
        )


def _check_chain(pin: Pin, there: int) -> None:
    if pin.shard is None:
        return
    named = [(name, getattr(pin.shard, name)) for name in ("params", "grads", "optimizer")]
    chain = [(f"plan.pin.shard.{name}", value) for name, value in named if value is not None]
    for (inner, few), (outer, many) in itertools.pairwise(chain):
        if many % few:
            raise _no_division(inner, few, outer, many, "shards nest: params | grads | optimizer")
    if chain and there > 1 and chain[-1][1] > there:
        raise UserError(
            f"{chain[-1][0]} = {chain[-1][1]} is more than the {there} devices of the cluster.",
            do=f"{chain[-1][0]}={there} or less",
        )


def _check_algorithm(pin: Pin) -> None:
    if pin.algorithm in ("megatron", "fsp") and pin.sp not in (None, 1):
        raise UserError(
            f"plan.pin.algorithm = {pin.algorithm!r} has no sequence ranks.", do="plan.pin.tp instead of sp"
        )
    if pin.algorithm == "isp" and pin.tp not in (None, 1):
        raise UserError('plan.pin.algorithm = "isp" has no tensor ranks.', do="plan.pin.tp=1, sp instead")
    if pin.algorithm == "data" and (pin.tp or 1) * (pin.sp or 1) > 1:
        raise UserError('plan.pin.algorithm = "data" cuts neither matrices nor sequences.', do="leave tp and sp out")


def _no_division(name: str, few: int, outer: str, many: int, why: str = "") -> UserError:
    near = min(divisors(many), key=lambda d: (abs(d - few), d))
    return UserError(
        f"{name} = {few} does not divide {outer} = {many}.",
        why=why,
        do=f"{name}={near}, the nearest that does",
    )


# --- nothing fits ------------------------------------------------------------------------------------------------


def refusal(request: Request, cluster: Cluster, found: Found) -> UserError:
    """The error when nothing fits: the least-violating layout, its missing bytes by kind, and what would help."""
    nearest = found.closest
    if nearest is None:
        return _no_layout(request, cluster)
    predicted = estimate(request, nearest.cluster, nearest.layout)
    kinds = {name: size for name, size in predicted.memory_bytes.items() if name != "peak" and size}
    told = ", ".join(
        f"{kind} {units.show_size(size)}" for kind, size in sorted(kinds.items(), key=lambda item: -item[1])
    )
    limit = nearest.peak - nearest.over
    largest = max(kinds, key=lambda kind: kinds[kind])
    return DoesNotFit(
        f"The model does not fit: rank {_fullest(request, nearest)} needs {units.show_size(nearest.peak)} and may use "
        f"{units.show_size(limit)}, {units.show_size(nearest.over)} are missing, most of it {largest}.",
        why=f"the least violating of {found.priced:,} layouts is {chosen.label(nearest.layout)} on "
        f"{nearest.layout.world} devices: {told}",
        do=", or ".join(cures(request, cluster, nearest)),
    )


def _no_layout(request: Request, cluster: Cluster) -> UserError:
    """The error when pins and demands leave no layout: which one it is, and the nearest value that leaves some."""
    for name, value in _set_pins(request.pin):
        if name == "threads":
            continue
        others = search.search(replace(request, pin=_without(request.pin, name)), cluster)
        there = sorted({_value(option.layout, name) for option in others.options})
        if not there:
            continue
        near = min(there, key=lambda one: (abs(one - value), one)) if isinstance(value, int) else there[0]
        return UserError(
            f"plan.pin.{name} = {value!r} leaves no layout on this cluster, with the rest as it is.",
            why="degrees multiply to the ranks, divide heads and sequence, and shards nest in dp x sp"
            + ("" if gpus(cluster) else "; on processors nothing is cut"),
            do=f"plan.pin.{name}={near}, or leave it out",
        )
    free = {"redundancy": replace(request, redundancy=1), "max_devices": replace(request, max_devices=None)}
    for name, other in free.items():
        if search.search(other, cluster).options:
            return UserError(
                f"plan.{name} = {getattr(request, name)} leaves no layout, with the pins as they are.",
                do=f"another plan.{name}, or fewer pins",
            )
    told = ", ".join(f"plan.pin.{name}" for name, _ in _set_pins(request.pin))
    return UserError(
        "No layout is left to choose from.",
        why="together the pins, the batch and the cluster allow none" + (f" ({told})" if told else ""),
        do="leave some of them out, or a train.batch_tokens that the ranks can share",
    )


def _set_pins(pin: Pin) -> Iterator[tuple[str, Any]]:
    """(name, value) of everything pinned that a layout has."""
    for name in Pin.__struct_fields__:
        value = getattr(pin, name)
        if isinstance(value, Shard):
            states = ((state, getattr(value, state)) for state in Shard.__struct_fields__)
            yield from ((f"shard.{state}", number) for state, number in states if number is not None)
        elif value is not None:
            yield name, value


def _without(pin: Pin, name: str) -> Pin:
    first, _, state = name.partition(".")
    if not state or pin.shard is None:
        return msgspec.structs.replace(pin, **{first: None})
    return msgspec.structs.replace(pin, shard=msgspec.structs.replace(pin.shard, **{state: None}))


def _value(layout: Layouts, name: str) -> Any:
    name = name.partition(".")[2] or name
    if name == "ranks":
        return int(layout.world)
    if name == "accumulate":
        return 1
    return getattr(layout, name)


def _fullest(request: Request, option: Option) -> int:
    """The first rank of the stage that holds most: the first stage, or the last with the head."""
    layout = option.layout
    on = network.fleet(option.cluster, int(layout.world), layout.threads)
    samples = samples_each(request, layout)
    size = np.minimum(layout.micro_batch, samples)
    first, last = memory.ends(Step(request, on, on.kinds[0], layout), size, -(-samples // size))
    return 0 if sum(first.values()) >= sum(last.values()) else int(layout.world) - int(layout.world) // layout.pp


def cures(request: Request, cluster: Cluster, nearest: Option) -> list[str]:
    """Changes after which a plan fits, the cheapest first; each was tried."""
    told = []
    for change, wanted in _changes(request, cluster):
        if search.search(wanted, cluster).best() is not None:
            told.append(change)
        if len(told) == 2:
            return told
    more = _growth(request, cluster)
    if more:
        told.append(more)
    return told or [f"devices with {units.show_size(nearest.peak / 0.92)} of memory or a smaller model"]


def _changes(request: Request, cluster: Cluster) -> Iterator[tuple[str, Request]]:
    """What costs nothing but a word in the recipe."""
    if request.memory is not None:
        yield "leave plan.memory out", replace(request, memory=None)
    if request.redundancy > 1:
        yield "plan.redundancy=1", replace(request, redundancy=1)
    if request.max_devices is not None:
        yield "leave plan.max_devices out", replace(request, max_devices=None)
    if _pinned(request.pin):
        yield f"leave {_pinned(request.pin)} out", replace(request, pin=Pin())
    if request.recompute is not None and request.pin.recompute is None:
        yield "leave train.recompute out", replace(request, recompute=None)
    bf16 = all("bf16" in table.device.flops for table in cluster.nodes)
    if request.precision == "fp32" and bf16 and gpus(cluster):
        yield 'train.precision="bf16"', replace(request, precision="bf16")


def _pinned(pin: Pin) -> str:
    return ", ".join(f"plan.pin.{name}" for name in Pin.__struct_fields__ if getattr(pin, name) is not None)


def _growth(request: Request, cluster: Cluster) -> str:
    """How many machines of the first kind would be enough; empty when not found."""
    if not gpus(cluster) or cluster.pairs:
        return ""

    def grown(count: int) -> Cluster:
        first, *others = cluster.nodes
        between = cluster.between or first.inside
        more = msgspec.structs.replace(first, count=count, name="")
        return msgspec.structs.replace(cluster, nodes=(more, *others), between=between)

    def fits(count: int) -> bool:
        return search.search(request, grown(count)).best() is not None

    now = cluster.nodes[0].count
    return _told(cluster, _least(fits, now))


def _least(fits: Callable[[int], bool], now: int) -> int:
    """The least power-of-two multiple of `now` that fits; 0 when none of the first few does."""
    return next((now << k for k in range(1, MOST_GROWTH) if fits(now << k)), 0)


def _told(cluster: Cluster, count: int) -> str:
    first = cluster.nodes[0]
    return f"{count} machines of {first.devices} {first.device.name} instead of {first.count}" if count else ""
