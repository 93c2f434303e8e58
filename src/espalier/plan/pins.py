"""What is pinned, checked before anything is priced. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from espalier.machine.cluster import Cluster
from espalier.plan import choice, device_model, executable
from espalier.plan.axes import offload
from espalier.plan.collective_time import gpus
from espalier.plan.layouts import divisors
from espalier.plan.request import Request
from espalier.recipe import Pin, ShardPin
from espalier.recipe.errors import UserError


def check(request: Request, cluster: Cluster) -> None:
    """Refuses pins that cannot be met. Raises UserError naming the pin and the nearest valid value."""
    pin = request.pin
    there = gpus(cluster)
    for name, value in given(pin):
        if isinstance(value, int) and value < 1 and not name.endswith("_chunk"):
            raise UserError(f"plan.pin.{name} = {value} is not possible.", do=f"plan.pin.{name}=1, or leave it out")
    for name in ("tp", "sp", "hp", "cp", "pp", "dp"):
        if (value := getattr(pin, name)) is not None:
            _check_degree(request, name, value, there)
    _check_experts(request)
    _check_chunks(request)
    _check_degrees(request)
    if pin.shard is not None:
        _check_chain(pin.shard, there)
    if (batch := request.profile.global_batch) < 1:
        raise UserError(f"The global batch has {batch} samples.", do="a larger train.batch_tokens")
    if there:
        devices = [table.device for table in cluster.nodes if table.device.kind == "cuda"]
        if not any(device_model.has(device, request.precision) for device in devices):
            device_model.peak(devices[0], request.precision)  # raises UserError; those that have it do without the rest
        _check_devices(request, there)
        return
    _check_ranks(request, cluster)
    for table in cluster.nodes:
        device_model.peak(table.device, request.precision)  # raises UserError where a processor has no such precision


def _check_ranks(request: Request, cluster: Cluster) -> None:
    """Whether there is something for each rank to train on."""
    pin = request.pin
    for divided in filter(None, (each.divided(request) for each in choice.asked(request, cluster))):
        _at_most("ranks", pin.ranks, request.profile.global_batch, divided)
        return
    shared = (pin.tp or 1) * (pin.sp or (pin.hp or 1) * (pin.cp or 1)) * (pin.pp or 1)  # ranks that take one sample
    what = "samples of the global batch" + (f" x {shared} ranks that share each" if shared > 1 else "")
    _at_most("ranks", pin.ranks, request.profile.global_batch * shared, what, "a larger train.batch_tokens")


def _check_devices(request: Request, there: int) -> None:
    """Whether ranks, redundancy and the GPUs allowed agree."""
    pin = request.pin
    most = request.recipe.plan.max_devices
    if most is not None and pin.ranks is not None and pin.ranks > most:
        raise UserError(
            f"plan.pin.ranks = {pin.ranks} is more than plan.max_devices = {most}.", do=f"plan.pin.ranks={most}"
        )
    _at_most("ranks", pin.ranks, there, "devices of the cluster")
    least = min(number for number in (pin.ranks, most, there) if number is not None)
    if request.recipe.plan.redundancy > least:
        raise UserError(
            f"plan.redundancy = {request.recipe.plan.redundancy} needs that many ranks; there are {least}.",
            do=f"plan.redundancy={least} or less",
        )


def _check_degree(request: Request, name: str, value: int, there: int) -> None:
    ranks = request.pin.ranks
    profile = request.profile
    if name != "dp" and value > 1 and not profile.heads and (name, value) != ("tp", profile.tensor):
        page = "src/espalier/mechanisms/pipeline/README.md"
        by_hand = f"; a plan.json with stages is run where the module says where it may be cut ({page})"
        raise UserError(
            f"plan.pin.{name} = {value}: only decoders of kind gpt and moe are cut by the planner.",
            why="of other modules it knows neither how long their layers take nor what these send to one another",
            do=f"plan.pin.{name}=1, or plan.pin.shard for its states" + (by_hand if name == "pp" else ""),
        )
    if name != "dp" and value > 1 and (why := executable.refusal(request, **{"hp" if name == "sp" else name: value})):
        raise UserError(
            f"plan.pin.{name} = {value} cannot run.", why=why.reason, do=f"plan.pin.{name}=1, or {why.instead}"
        )
    if name in ("tp", "hp") and value > 1 and profile.heads and profile.heads % value:
        raise _no_division(f"plan.pin.{name}", value, "heads", profile.heads)
    if name == "pp":
        _at_most(name, value, profile.layers, "layers of the model")
    if name == "dp" and (not there or value <= there):
        _at_most(name, value, profile.global_batch, "samples of the global batch", "a larger train.batch_tokens")
    if ranks and ranks % value:
        raise _no_division(f"plan.pin.{name}", value, "ranks", ranks)
    if there and not ranks:
        _at_most(name, value, there, "devices of the cluster")


def _check_experts(request: Request) -> None:
    """Whether there are experts to spread, and ranks that may hold them."""
    pin = request.pin
    ep = request.pin.ep or 1
    if ep == 1:
        return
    if not request.experts.total:
        raise UserError(
            f"plan.pin.ep = {ep} spreads experts, and this model has none.", do='model.kind = "moe", or leave it out'
        )
    _at_most("ep", ep, request.experts.total, "experts of a layer")
    shared = ep * (pin.tp or 1)
    if pin.ranks and pin.ranks % shared:
        raise _no_division("plan.pin.ep" + " x plan.pin.tp" * (shared > ep), shared, "ranks", pin.ranks)


def _check_chunks(request: Request) -> None:
    """Whether loss and feed-forward can be computed by chunks of tokens, where that is pinned."""
    able = {"loss_chunk": "token_chunks" in request.profile.facts}
    able["feed_forward_chunk"] = able["loss_chunk"] and not request.experts.total
    for name, can in able.items():
        if not (chunk := getattr(request.pin, name)):
            continue
        if not can:
            raise UserError(
                f"plan.pin.{name} = {chunk}: this model is not computed by chunks of tokens.",
                why="the loss of decoders trained on text is, and feed-forwards that are no experts",
                do=f"leave plan.pin.{name} out",
            )
        if why := executable.refusal(request):
            raise UserError(
                f"plan.pin.{name} = {chunk} cannot run.", why=why.reason, do=f"plan.pin.{name}=0, or {why.instead}"
            )


def _check_degrees(request: Request) -> None:
    """Whether what is pinned of heads, context and rings, of the algorithm, and of stages and their order agrees."""
    pin = request.pin
    if None not in (pin.sp, pin.hp, pin.cp) and pin.sp != (pin.hp or 1) * (pin.cp or 1):
        raise UserError(
            f"plan.pin.sp = {pin.sp} is not hp x cp = {pin.hp} x {pin.cp}.",
            do=f"plan.pin.sp={(pin.hp or 1) * (pin.cp or 1)}, or leave it out",
        )
    if pin.window is not None and pin.cp is not None and pin.cp % pin.window:
        raise _no_division("plan.pin.window", pin.window, "plan.pin.cp", pin.cp)
    if pin.algorithm in ("megatron", "fsp") and pin.tp == 1:
        raise UserError(f"plan.pin.algorithm = {pin.algorithm!r} has tensor ranks.", do="plan.pin.tp=2, or more")
    if pin.algorithm == "isp" and pin.tp not in (None, 1):
        raise UserError('plan.pin.algorithm = "isp" has no tensor ranks.', do="plan.pin.tp=1, sp instead")
    if pin.algorithm == "data" and (pin.tp or 1) * (pin.sp or 1) > 1:
        raise UserError('plan.pin.algorithm = "data" cuts neither matrices nor sequences.', do="leave tp and sp out")
    many = pin.interleave or 1
    layers = request.profile.layers
    for name in ("schedule", "interleave"):
        if getattr(pin, name) not in (None, 1) and pin.pp == 1:
            raise UserError(
                f"plan.pin.{name} = {getattr(pin, name)!r} orders stages, and plan.pin.pp = 1.",
                do="plan.pin.pp=2, or more",
            )
    if many > 1 and (pin.pp or 2) * many > layers:
        raise UserError(
            f"plan.pin.interleave = {many} needs {(pin.pp or 2) * many} layers; the model has {layers}.",
            do=f"plan.pin.interleave={max(1, layers // (pin.pp or 2))}",
        )


def _check_chain(shard: ShardPin, there: int) -> None:
    chain = [(f"shard.{state}", value) for state, value in _states(shard)]
    for (inner, few), (outer, many) in itertools.pairwise(chain):
        if many % few:
            why = "shards nest: params | grads | optimizer"
            raise _no_division(f"plan.pin.{inner}", few, f"plan.pin.{outer}", many, why)
    if chain and there > 1:
        _at_most(*chain[-1], there, "devices of the cluster")


def expert_groups(request: Request, cluster: Cluster) -> list[int]:
    """Ranks over which experts may be spread, the fewest first, where nobody said over how many and that can run: 2, 4
    and so on, and all of a machine. Ranks of one processor gain nothing: one rank has its memory and threads."""
    pin = request.pin
    if pin.ep is not None or request.recipe.train.compile or len(cluster.devices()) == 1:
        return []
    places = pin.ranks or gpus(cluster) or len(cluster.devices())
    counts = {2, 4, 8, 16, 32, 64, places, *(table.devices for table in cluster.nodes)}
    return sorted(ranks for ranks in counts if 1 < ranks <= request.experts.total and places % ranks == 0)


def check_offload(request: Request, cluster: Cluster) -> None:
    """Whether the machines have the tier that is pinned, and what is asked for runs with it. Raises UserError."""
    pinned = request.pin.offload
    if pinned is None:
        return
    ways = offload.ways(request, cluster)
    if not ways and pinned == "host":
        raise UserError(
            'plan.pin.offload = "host": on processors that is the memory that they compute in.',
            do='plan.pin.offload="disk", or leave it out',
        )
    if not ways:
        raise UserError(
            f'plan.pin.offload = "{pinned}": the cluster file names no disk of these machines.',
            why="what a step takes depends on how fast it is",
            do="[[nodes.disks]] with path, read, write and iops, as `espalier probe` measures them, or leave it out",
        )
    if why := executable.refusal(replace(request, offload=ways[0])):
        raise UserError(
            f'plan.pin.offload = "{pinned}" cannot run.',
            why=why.reason,
            do=f'plan.pin.offload="none", or {why.instead}',
        )


def _at_most(name: str, value: int | None, most: int, what: str, otherwise: str = "") -> None:
    if value is not None and value > most:
        raise UserError(
            f"plan.pin.{name} = {value} is more than the {most} {what}.",
            do=f"plan.pin.{name}={most} or less" + (f", or {otherwise}" if otherwise else ""),
        )


def _no_division(name: str, few: int, outer: str, many: int, why: str = "") -> UserError:
    near = min(divisors(many), key=lambda d: (abs(d - few), d))
    return UserError(
        f"{name} = {few} does not divide {outer} = {many}.", why=why, do=f"{name}={near}, the nearest that does"
    )


def given(pin: Pin) -> Iterator[tuple[str, Any]]:
    """(name, value) of everything pinned that a layout has."""
    for name in Pin.__struct_fields__:
        value = getattr(pin, name)
        if isinstance(value, ShardPin):
            yield from ((f"shard.{state}", number) for state, number in _states(value))
        elif value is not None:
            yield name, value


def _states(shard: ShardPin) -> list[tuple[str, int]]:
    """(state, ranks) of what is pinned of the shards."""
    named = ((state, getattr(shard, state)) for state in ShardPin.__struct_fields__)
    return [(state, number) for state, number in named if number is not None]
