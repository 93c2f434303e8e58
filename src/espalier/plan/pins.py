"""What is pinned, checked before anything is priced. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from espalier.cluster import Cluster
from espalier.config import Pin, Shard
from espalier.errors import UserError
from espalier.plan import speed
from espalier.plan.layouts import divisors
from espalier.plan.network import gpus
from espalier.plan.request import Request


def check(request: Request, cluster: Cluster) -> None:
    """Refuses pins that cannot be met. Raises UserError naming the pin and the nearest valid value."""
    pin, there = request.pin, max(1, gpus(cluster))
    ranks = pin.ranks or (there if gpus(cluster) else None)
    for name, value in given(pin):
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
    if pin.shard is not None:
        _check_chain(pin.shard, there)
    if pin.algorithm is not None:
        _check_algorithm(pin)
    _check_ranks(request, cluster)


def _check_ranks(request: Request, cluster: Cluster) -> None:
    """Whether every rank has a sample, and a GPU or a processor that has the precision."""
    pin, batch = request.pin, request.global_batch
    if batch < 1:
        raise UserError(f"The global batch has {batch} samples.", do="a larger train.batch_tokens")
    if gpus(cluster):
        _check_devices(request, cluster)
        return
    if pin.ranks is not None and pin.ranks > batch:
        raise UserError(
            f"plan.pin.ranks = {pin.ranks} is more than the {batch} samples of the global batch.",
            why="each rank computes at least one sample of each step",
            do=f"plan.pin.ranks={batch}, or a larger train.batch_tokens",
        )
    for table in cluster.nodes:
        speed.peak(table.device, request.precision)


def _check_devices(request: Request, cluster: Cluster) -> None:
    """Whether ranks, redundancy and the GPUs allowed agree."""
    pin, most, there = request.pin, request.max_devices, gpus(cluster)
    if most is not None and pin.ranks is not None and pin.ranks > most:
        raise UserError(
            f"plan.pin.ranks = {pin.ranks} is more than plan.max_devices = {most}.", do=f"plan.pin.ranks={most}"
        )
    if pin.ranks is not None and pin.ranks > there:
        raise UserError(
            f"plan.pin.ranks = {pin.ranks} is more than the {there} devices of the cluster.",
            why="each GPU is one rank",
            do=f"plan.pin.ranks={there}",
        )
    least = min(number for number in (pin.ranks, most, there) if number is not None)
    if request.redundancy > least:
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


def _check_chain(shard: Shard, there: int) -> None:
    named = [(name, getattr(shard, name)) for name in ("params", "grads", "optimizer")]
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


def given(pin: Pin) -> Iterator[tuple[str, Any]]:
    """(name, value) of everything pinned that a layout has."""
    for name in Pin.__struct_fields__:
        value = getattr(pin, name)
        if isinstance(value, Shard):
            states = ((state, getattr(value, state)) for state in Shard.__struct_fields__)
            yield from ((f"shard.{state}", number) for state, number in states if number is not None)
        elif value is not None:
            yield name, value
