"""What layouts cost: seconds by part, bytes held by kind, bytes sent by class. One core for every planner; no torch.

`price` takes arrays of layouts; `estimate` tells one layout in full. A fleet of several kinds of device goes at the
pace of its slowest rank and is as full as its fullest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from espalier.machine.cluster import Cluster
from espalier.plan import collective_time, cost_inputs, device_model, memory_model, step_time
from espalier.plan.axes import offload, optimizer_node, placement_plan
from espalier.plan.axes import tensor as tensor_cost
from espalier.plan.axes.offload import NODE
from espalier.plan.axes.placement import ShardFactors as Shards
from espalier.plan.axes.sharding import wire_bytes
from espalier.plan.base import RESIDENT, TOTAL_BYTES, TOTALS, Predicted, task_totals
from espalier.plan.calibration_factors import CostFactors
from espalier.plan.collective_time import Fleet, seats
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.layouts import Layouts
from espalier.plan.request import Request, exchanges
from espalier.recipe.cost import Number, Terms, ring_bytes


@dataclass(frozen=True)
class Shares:
    """What a rank of each kind computes where devices differ. None: all ranks alike.

    `samples`: of each batch (unequal data parallelism). `speeds`: over the mean, to which its tokens of each sequence
    are proportional.
    """

    samples: Any = None
    speeds: Any = None


EQUAL = Shares()
UNCOUNTED = {"device": (), "reserved": ("runtime",), "allocated": ("runtime", "slack")}
"""Kinds of memory that PyTorch's counts of reserved and allocated bytes leave out, and the driver's does not."""


@dataclass(frozen=True)
class Priced:
    """Layouts priced on one kind of rank, each value [n]."""

    seconds: Terms
    memory_bytes: Terms
    limit: float
    peak: Number
    """Bytes at the worst moment."""
    over: Number
    """Bytes beyond what the rank and its machine may hold; negative: room left."""
    waiting: Terms = field(default_factory=dict)
    """Bytes outside the device, by kind."""

    @property
    def step(self) -> Number:
        """Seconds of a step."""
        return sum(self.seconds.values())

    def counted(self, memory: str) -> Number:
        """Of these, what a count of this kind has: `device`, `reserved` or `allocated`."""
        return sum(size for name, size in self.memory_bytes.items() if name not in UNCOUNTED[memory])


class Grid(NamedTuple):
    """Layouts priced on all kinds of ranks, each value [n]."""

    seconds: Any
    """Of a step, on the slowest device."""
    peak: Any
    """Bytes on the fullest device."""
    over: Any
    """Bytes beyond the limit of the tightest device; negative: room left."""


def samples_each(request: Request, layouts: Layouts) -> Number:
    """Samples of the replica that has most."""
    return -(-request.profile.global_batch // layouts.dp)


def price(
    request: Request, on: Fleet, layouts: Layouts, shares: Shares = EQUAL, resident_optimizer: Number = 0.0
) -> list[Priced]:
    """Prices `layouts` on every kind of rank of a fleet."""
    costs = []
    for index, kind in enumerate(on.kinds):
        samples = samples_each(request, layouts) if shares.samples is None else shares.samples[index]
        speed = 1.0 if shares.speeds is None else shares.speeds[index]
        step = CostInputs(request, on, kind, layouts, speed, resident_optimizer)
        costs.append(replace(_full(step, samples), seconds=step_time.step_seconds(step, samples)))
    return costs


def _full(step: CostInputs, samples: Number) -> Priced:
    """The bytes of layouts in which each replica has `samples` samples, without seconds."""
    size = np.minimum(step.layouts.micro_batch, samples)
    memory_bytes = memory_model.memory_bytes(step, size, -(-samples // size))
    limit = cost_inputs.limit(step.kind, step.request)
    peak = sum(memory_bytes.values())
    if step.request.offload == RESIDENT:
        return Priced({}, memory_bytes, limit, peak, peak - limit)
    return Priced({}, memory_bytes, limit, peak, step.lacking(peak - limit), step.waiting)


def grid(request: Request, on: Fleet, layouts: Layouts, memory: str = "device") -> Grid:
    """Prices arrays of layouts at once; the slowest and the tightest device count. `memory`: as `Priced.counted`."""
    return worst(price(request, on, layouts), memory)


def worst(costs: Sequence[Priced], memory: str = "device") -> Grid:
    """Of the kinds of rank, the one that has most of each."""
    rows = zip(*((priced.step, priced.counted(memory), priced.over) for priced in costs), strict=True)
    return Grid(*(np.max(row, axis=0) for row in rows))


def fullness(request: Request, on: Fleet, layouts: Layouts) -> tuple[Any, Any]:
    """Peak bytes and bytes beyond the limit of every layout, on the tightest kind of rank."""
    samples = samples_each(request, layouts)
    tightest = worst([_full(CostInputs(request, on, kind, layouts), samples) for kind in on.kinds])
    return tightest.peak.reshape(-1), tightest.over.reshape(-1)


def slowest(request: Request, on: Fleet, layouts: Layouts) -> Number:
    """Seconds of a step on the slowest kind of rank, without the bytes."""
    samples = samples_each(request, layouts)
    steps = (step_time.step_seconds(CostInputs(request, on, kind, layouts), samples) for kind in on.kinds)
    return np.max([sum(terms.values()) for terms in steps], axis=0)


def estimate(
    request: Request,
    cluster: Cluster,
    layout: Layouts,
    factors: CostFactors | None = None,
    shares: Shares = EQUAL,
) -> Predicted:
    """What one step of one layout should cost: its slowest rank's seconds, its tightest's bytes."""
    ranks = int(layout.world)
    on = replace(collective_time.fleet(cluster, ranks, layout.threads), factors=factors or request.factors)
    costs = price(request, on, layout, shares)
    if ranks == 1 and not on.cuda and (waiting := costs[0].waiting):
        resident_optimizer = offload.resident_optimizer(request, -float(costs[0].over), waiting)
        costs = price(request, on, layout, shares, resident_optimizer)
    slow = int(np.argmax([float(priced.step) for priced in costs]))
    tight = costs[int(np.argmin([-float(priced.over) for priced in costs]))]
    terms = {name: float(value) for name, value in costs[slow].seconds.items()}
    kinds = {name: float(value) for name, value in tight.memory_bytes.items()}
    step = sum(terms.values())
    tokens = request.profile.global_batch * request.profile.tokens_per_sample
    made = CostInputs(request, on, on.kinds[slow], layout)
    most = int(samples_each(request, layout)) if shares.samples is None else int(np.max(shares.samples))
    devices = [(kind.ranks // kind.setting.processes, kind.table.device) for kind in on.kinds]
    peak = sum(count * device_model.peak(device, request.precision) for count, device in devices)
    nodes = [0 if on.cuda else place.node for place in seats(cluster, ranks)]
    return Predicted(
        step_seconds=step,
        tokens_per_second=tokens / step,
        tokens_per_second_per_device=tokens / step / sum(count for count, _ in devices),
        mfu=request.model_flops / step / peak,
        terms=terms,
        memory_bytes={**kinds, "peak": sum(kinds.values())},
        memory_limit=tight.limit,
        waiting_bytes={name: float(value) for name, value in tight.waiting.items()},
        sent_bytes=sent(made, most, nodes),
        sources={**step_time.sources(made), **memory_model.sources(request, on)},
    )


def sent(step: CostInputs, samples: int, nodes: Sequence[int]) -> dict[str, float]:
    """Payload bytes that a rank of one layout sends in a step of `samples` samples: what goes on the ledger of the rank
    that sends most, by the mechanisms' own formulas. Empty classes are left out, but for gradients.

    Beside the gradients, ranks tell each other at every step which tensors they used, the loss, and their part of the
    norm, in one exchange (`mechanisms.sharding.amsp.ControlMessage`); the first gives the others its running statistics
    (`mechanisms.sharding.broadcast`).
    """
    request = step.request
    profile = step.request.profile
    layout = step.layouts
    rounds = -(-samples // int(layout.micro_batch))
    if request.offload == NODE:
        return {"gradients": optimizer_node.step_bytes(request)[1]}
    sent_bytes = dict(step.states_cost(rounds).sent)
    if request.crossings and step.states.sizes and not np.any(step.states.cut):
        codecs = placement_plan.codecs(exchanges(request.crossings))
        chosen = Shards(int(layout.params), int(layout.grads), int(layout.optimizer))
        sent_bytes = dict(wire_bytes(step.states, chosen, nodes, codecs, rounds=rounds))
        sent_bytes["parameters"] += step.frozen(rounds).sent.get("parameters", 0.0)
    if request.offload.parameters in ("host", "disk"):
        gathered = step.gathered(lambda size, division: ring_bytes("all_gather", size, division.ranks))
        sent_bytes["parameters"] = (1 + offload.again(request)) * gathered
    if request.expert_ranks > 1:
        sent_bytes |= step.experts(samples, rounds).sent
    world = int(layout.world)
    totals = TOTALS + world + task_totals(profile.tasks)
    steering = TOTAL_BYTES * placement_plan.control_values(profile.tensors, world, totals)
    sent_bytes["control"] = ring_bytes("all_reduce", steering, world)
    floats, whole = profile.running
    sent_bytes["parameters"] += (request.bytes_each * floats + 8 * whole) * (world > 1)
    if layout.tp * layout.pp > 1:  # totals and norm go to the whole replica, flags to those of the same part
        flags = TOTAL_BYTES * placement_plan.control_values(profile.tensors, layout.shards, 0)
        whole = ring_bytes("all_reduce", TOTAL_BYTES * (1 + totals), world)
        sent_bytes["control"] = whole + ring_bytes("all_reduce", flags, layout.shards)
    for count, size in passes(samples, int(layout.micro_batch)):
        for name, each in _of_a_pass(step, size):
            sent_bytes[name] = sent_bytes.get(name, 0.0) + count * float(each)
    if profile.width and layout.tp > 1:
        sent_bytes["gradients"] += _norms(step, rounds if layout.grads > 1 else 1)
        moved = 2 * ring_bytes("all_to_all", step.matrix_bytes, layout.tp)
        sent_bytes["parameters"] += moved * request.muon
    if request.expert_ranks > 1:  # how many rows each expert got, and how long each rank waited
        sent_bytes["control"] += ring_bytes("all_reduce", TOTAL_BYTES * (request.experts.total + world), world)
    return {name: float(size) for name, size in sent_bytes.items() if size or name != "parameters"}


def _norms(step: CostInputs, rounds: int) -> Number:
    """Gradients of the norms, which tensor ranks have whole: summed over them, and their part over replicas."""
    layout = step.layouts
    norms = (2 * step.stage_layers + 1) * step.request.profile.width * step.storage.grads
    over_shards = ring_bytes("all_reduce", norms * (1 - 1 / layout.tp), layout.shards)
    return ring_bytes("all_reduce", norms, layout.tp) * rounds + over_shards


def passes(samples: int, micro_batch: int) -> list[tuple[int, int]]:
    """How many micro-batches of a step have how many samples."""
    full, rest = divmod(samples, micro_batch)
    return [(count, size) for count, size in ((full, micro_batch), (min(1, rest), rest)) if count]


def _of_a_pass(step: CostInputs, size: int) -> list[tuple[str, Number]]:
    """What stages, tensor ranks and ranks of a sequence send in a micro-batch of `size` samples, by class."""
    layout = step.layouts
    profile = step.request.profile
    tokens = size * profile.tokens_per_sample / layout.sp
    costs = [step_time.pipeline(step, size, 1, leaves=step_time.away(step))] * (layout.pp > 1)
    if profile.width and layout.tp > 1:
        load = step_time.tensor_load(step, tokens, step.stage_layers)
        costs.append(tensor_cost.cost(load, carried=step.carried("activations")))
    if int(layout.sp) > 1:
        costs.append(step.sequence(tokens, coded=True).times(step.stage_layers))
    return [each for cost in costs for each in cost.sent.items()]


def scaled(predicted: Predicted, measured: float) -> Predicted:
    """The prediction with every time term scaled so that the step takes the `measured` seconds."""
    factor = measured / predicted.step_seconds
    trial: Mapping[str, str] = {"step": f"a trial; estimated terms scaled by {factor:.3g}"}
    return predicted.changed(
        step_seconds=measured,
        tokens_per_second=predicted.tokens_per_second / factor,
        tokens_per_second_per_device=predicted.tokens_per_second_per_device / factor,
        mfu=predicted.mfu / factor,
        terms={name: value * factor for name, value in predicted.terms.items()},
        sources={**predicted.sources, **trial},
    )
