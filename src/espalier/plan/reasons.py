"""The plain planner's sentences: why this plan, what the others lose, and why none can be made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from espalier import units
from espalier.cluster import Cluster, order
from espalier.errors import UserError
from espalier.plan import memory, speed
from espalier.plan.base import Plan, Predicted, RunnerUp
from espalier.plan.estimate import estimate
from espalier.plan.layouts import Layouts
from espalier.plan.request import Request
from espalier.plan.seats import gpus

Measured = Mapping[tuple[int, int], float]


class DoesNotFit(UserError):
    """No layout fits in memory. Exit code 2."""


@dataclass(frozen=True)
class Choice:
    """The best micro-batch and mode for some ranks; `others`: the next best micro-batches.

    `roomy`: it leaves half of the memory free. `without`: bytes that a micro-batch of one would lack with less
    recomputation; 0 when that fits.
    """

    layout: Layouts
    fits: bool
    others: tuple[Layouts, ...] = ()
    without: float = 0.0
    roomy: bool = False


def key(plan: Plan) -> tuple[int, int]:
    """(ranks, threads) of a plan: what a trial is of."""
    return len(plan.ranks), plan.ranks[0].threads


def seconds(plan: Plan) -> float:
    """The predicted seconds of a step."""
    assert plan.predicted is not None
    return plan.predicted.step_seconds


# --- why this plan -----------------------------------------------------------------------------------------------


def why(request: Request, cluster: Cluster, chosen: Choice, made: Plan) -> tuple[str, ...]:
    """The sentences that defend a plan, with their numbers."""
    predicted = made.predicted
    assert predicted is not None
    if not chosen.fits:
        return tuple(_remarks(cluster, made))
    waits = predicted.terms["all_reduce"]
    shares = sorted({rank.share[1] - rank.share[0] for rank in made.ranks})
    said = [
        f"{_of(made)}: {units.show_seconds(predicted.step_seconds)} per step by estimate"
        + (f", {units.show_seconds(waits)} of it for exchanging gradients." if len(made.ranks) > 1 else "."),
        f"Micro-batch {made.micro_batch} of a rank's {' or '.join(map(str, shares))} samples: "
        f"{_size_reason(request, cluster, chosen)}; {units.show_size(predicted.memory_bytes['peak'])} of "
        f"{units.show_size(predicted.memory_limit)} per rank.",
        _recompute_reason(request, chosen, made),
    ]
    return (*said, *_remarks(cluster, made))


def _size_reason(request: Request, cluster: Cluster, chosen: Choice) -> str:
    if request.pin.micro_batch is not None:
        return "plan.pin.micro_batch was set"
    if not chosen.others:
        return "the only one that fits"
    after = estimate(request, cluster, chosen.others[0])
    beside = f"{chosen.others[0].micro_batch}: {units.show_seconds(after.step_seconds)}"
    return f"within 2 % of the fastest that fits: {_taken(request, chosen)} (beside it {beside})"


def _taken(request: Request, chosen: Choice) -> str:
    share = -(-request.global_batch // int(chosen.layout.dp))
    if chosen.layout.micro_batch >= share:
        return "all in one pass"
    return "the largest that leaves half of the memory free" if chosen.roomy else "the smallest"


def _recompute_reason(request: Request, chosen: Choice, made: Plan) -> str:
    if request.pin.recompute or request.recompute:
        return f"Recompute {made.recompute}: it was set."
    if made.recompute == "none":
        return "Recompute none: all activations fit."
    return f"Recompute {made.recompute}: with less, {units.show_size(chosen.without)} would be missing."


def asked_for(ranks: int) -> str:
    """The remark when the number of ranks was given, by the recipe or by a launcher such as torchrun."""
    return f"{ranks} ranks were asked for." if ranks > 1 else "1 rank was asked for."


def ring(cluster: Cluster) -> list[str]:
    """The remark when ranks do not sit on machines in the order of the cluster file."""
    asked = tuple(range(cluster.machines))
    if cluster.ring == asked:
        return []
    ours, plain = (order.crossings(cluster.links, one) for one in (cluster.ring, asked))
    machines = ", ".join(map(str, cluster.ring))
    return [f"Ranks follow machines {machines}: a ring crosses the slowest links {ours} times, in their order {plain}."]


def _remarks(cluster: Cluster, made: Plan) -> list[str]:
    said = []
    gpu = made.ranks[0].device != "cpu"
    threads = made.ranks[0].threads
    cores = min(max(1, table.cores) for table in cluster.nodes)
    nodes = [rank.node for rank in made.ranks]
    here = max(nodes.count(node) for node in set(nodes[:1] if gpu else nodes))
    if not gpu and here * threads > cores:
        said.append(f"{here} ranks x {threads} threads are more than the {cores} cores, so they take turns.")
    if len(made.ranks) > 1 and not cluster.same_speed:
        said.append("Devices differ in speed and shares are equal, so the slowest device sets the step.")
    if gpu and any(table.device.kind == "cpu" for table in cluster.nodes):
        said.append("Machines without a GPU are left out.")
    return said


def tried(plans: Sequence[Plan], measured: Measured) -> str:
    """What the trials took, fastest first."""
    ordered = sorted(plans, key=lambda one: measured[key(one)])
    told = ", ".join(f"{_of(one)} {units.show_seconds(measured[key(one)])}" for one in ordered)
    return f"Tried here, per step: {told}."


# --- what the others lose ----------------------------------------------------------------------------------------


def other(best: Plan, one: Plan, measured: Measured) -> RunnerUp:
    """A plan of other ranks beside the best."""
    assert one.predicted is not None
    here, there = measured.get(key(best), seconds(best)), measured.get(key(one), seconds(one))
    how = "measured" if key(one) in measured else "estimated"
    loses = f"{_change(there, here)} ({how} {units.show_seconds(there)})"
    if there < here:
        loses += ", but was not tried" if measured else ", but leaves devices idle"
    return RunnerUp(
        layout=one.layout,
        ranks=len(one.ranks),
        threads=one.ranks[0].threads,
        step_seconds=there,
        peak_bytes=one.predicted.memory_bytes["peak"],
        loses=loses,
    )


def other_size(best: Plan, size: int, priced: Predicted) -> RunnerUp:
    """The same ranks with another micro-batch."""
    here = seconds(best)
    most = max(rank.share[1] - rank.share[0] for rank in best.ranks)
    layout = msgspec.structs.replace(best.layout, micro_batch=size, accumulate=-(-most // size))
    return RunnerUp(
        layout=layout,
        ranks=len(best.ranks),
        threads=best.ranks[0].threads,
        step_seconds=priced.step_seconds,
        peak_bytes=priced.memory_bytes["peak"],
        loses=f"micro-batch {size}: {_change(priced.step_seconds, here)} (estimated)"
        + (", but holds more memory" if priced.step_seconds <= here else ""),
    )


def _change(there: float, here: float) -> str:
    percent = round(100 * (there / here - 1))
    if percent == 0:
        return "as fast"
    if percent >= 100:
        times = there / here
        return f"{round(times, 1):g}x slower" if times < 10 else f"{times:,.0f}x slower"
    return f"{percent} % slower" if percent > 0 else f"{-percent} % faster"


def _of(plan: Plan) -> str:
    ranks, threads = key(plan)
    if plan.ranks[0].device != "cpu":
        return f"{ranks} GPU{'s' * (ranks > 1)}"
    return f"{ranks} rank{'s' * (ranks > 1)} x {threads} thread{'s' * (threads > 1)}"


# --- why there is none -------------------------------------------------------------------------------------------


def check(request: Request, cluster: Cluster) -> None:
    """Refuses pins that cannot be met, and precisions that a device does not have. Raises UserError."""
    pin, batch = request.pin, request.global_batch
    for name in ("ranks", "threads", "micro_batch"):
        value = getattr(pin, name)
        if value is not None and value < 1:
            raise UserError(f"plan.pin.{name} = {value} is not possible.", do=f"plan.pin.{name}=1, or leave it out")
    if batch < 1:
        raise UserError(f"The global batch has {batch} samples.", do="a larger train.batch_tokens")
    if pin.ranks is not None and pin.ranks > batch:
        raise UserError(
            f"plan.pin.ranks = {pin.ranks} is more than the {batch} samples of the global batch.",
            why="each rank computes at least one sample of each step",
            do=f"plan.pin.ranks={batch}, or a larger train.batch_tokens",
        )
    there = gpus(cluster)
    if pin.ranks is not None and 0 < there < pin.ranks:
        raise UserError(
            f"plan.pin.ranks = {pin.ranks} is more than the {there} GPUs of the cluster.",
            why="each GPU is one rank",
            do=f"plan.pin.ranks={there}",
        )
    for table in cluster.nodes:
        if table.device.kind == "cuda" or not there:
            speed.peak(table.device, request.precision)


def too_coarse(request: Request) -> UserError:
    """The error when the pinned micro-batch is more than any rank's share of the batch."""
    share = -(-request.global_batch // (request.pin.ranks or 1))
    return UserError(
        f"plan.pin.micro_batch = {request.pin.micro_batch} is more than a rank's share of the global batch.",
        why=f"{request.global_batch} samples on {request.pin.ranks or 'one or more'} ranks",
        do=f"plan.pin.micro_batch={share} or less, or a larger train.batch_tokens",
    )


# What to do when the largest kind of memory is too large.
_STATES = "a smaller model, or devices with at least {need} each"
_CURES = {
    "params": _STATES,
    "grads": _STATES,
    "optimizer": _STATES,
    "activations": "a smaller train.sequence",
    "transient": "a smaller train.sequence or model.vocabulary",
    "buckets": 'comm.bucket="1MiB"',
    "runtime": "fewer ranks: plan.pin.ranks=1",
}


def closest(request: Request, cluster: Cluster, choices: Sequence[Choice]) -> tuple[Predicted, Choice]:
    """Of choices none of which fits, the one that lacks the fewest bytes."""
    asked = choices[:1] if gpus(cluster) else choices  # fewer GPUs need as much each
    priced = [(estimate(request, cluster, one.layout), one) for one in asked]
    return min(priced, key=lambda two: two[0].memory_bytes["peak"] - two[0].memory_limit)


def missing(predicted: Predicted) -> str:
    """What a plan lacks that does not fit."""
    over = predicted.memory_bytes["peak"] - predicted.memory_limit
    return f"{units.show_size(over)} of memory per rank, most of it {_largest(predicted)}"


def _largest(predicted: Predicted) -> str:
    return max(predicted.memory_bytes, key=lambda kind: predicted.memory_bytes[kind] if kind != "peak" else -1.0)


def too_large(request: Request, cluster: Cluster, choices: Sequence[Choice]) -> UserError:
    """The error when nothing fits: bytes missing for the closest candidate, of which kind, and what would help."""
    predicted, nearest = closest(request, cluster, choices)
    one = nearest.layout
    peak, limit, largest = predicted.memory_bytes["peak"], predicted.memory_limit, _largest(predicted)
    parts = ", ".join(
        f"{kind} {units.show_size(value)}" for kind, value in predicted.memory_bytes.items() if value and kind != "peak"
    )
    return DoesNotFit(
        f"The model does not fit: a rank needs {units.show_size(peak)} and may use {units.show_size(limit)}, "
        f"{units.show_size(peak - limit)} are missing, most of it {largest}.",
        why=f"{one.dp} rank{'s' * (one.dp != 1)}, micro-batch {one.micro_batch}, recompute {one.recompute}: "
        f"{parts}; every rank holds the whole model, as sharding is not there yet (`espalier explain amsp`)",
        do=", or ".join(_cures(request, cluster, one, predicted)),
    )


def _cures(request: Request, cluster: Cluster, one: Layouts, predicted: Predicted) -> list[str]:
    """What would help, the most likely first."""
    largest, pin = _largest(predicted), request.pin
    each = -(-one.dp // len(cluster.devices())) if not gpus(cluster) else 1
    usable = (memory.CUDA_MEMORY if gpus(cluster) else memory.CPU_MEMORY) / each
    cures = [_CURES[largest].format(need=units.show_size(math.ceil(predicted.memory_bytes["peak"] / usable)))]
    if largest == "optimizer" and request.optimizer != "muon":
        cures.append("train.optimizer.kind=muon, which keeps one moment instead of two")
    if largest == "transient" and memory.orthogonal_bytes(request) >= predicted.memory_bytes["transient"]:
        cures = ["train.optimizer.kind=adamw (Muon works on all matrices of one shape at once)"]
    if largest in ("activations", "transient") and pin.micro_batch not in (None, 1):
        cures.insert(0, "plan.pin.micro_batch=1")
    if largest == "activations" and one.recompute != "block":
        cures.insert(0, 'plan.pin.recompute="block"')
    if pin.ranks not in (None, 1) and not gpus(cluster):
        cures.append("fewer ranks: those on one machine share its memory")
    return cures
