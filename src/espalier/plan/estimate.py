"""What layouts cost: seconds by part, bytes held by kind, bytes sent by class. One core for every planner; no torch.

`price` takes arrays of layouts; `estimate` tells one layout in full. A fleet of several kinds of device goes at the
pace of its slowest rank and is as full as its fullest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from espalier import cost
from espalier.cluster import Cluster
from espalier.cost import Number
from espalier.plan import memory, network, seconds
from espalier.plan.base import Predicted
from espalier.plan.factors import Factors
from espalier.plan.layouts import Layouts
from espalier.plan.network import Fleet
from espalier.plan.request import Request
from espalier.plan.seats import devices, peak_flops, seats
from espalier.plan.step import Step, storage_of
from espalier.shard import spread
from espalier.shard.placement import Factors as Shards
from espalier.shard.spread import control_values
from espalier.sync.base import TOTAL_BYTES, TOTALS, task_totals

DEALT = 2_000
"""Whole matrices times their owners up to which a plan's bytes count the padding between them."""


@dataclass(frozen=True)
class Priced:
    """Layouts priced on one kind of rank, each value [n]."""

    seconds: Mapping[str, Number]
    held: Mapping[str, Number]
    limit: float

    @property
    def step(self) -> Number:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def peak(self) -> Number:
        """Bytes at the worst moment."""
        return sum(self.held.values())


@dataclass(frozen=True)
class Grid:
    """Layouts priced on all kinds of ranks, each value [n]."""

    seconds: Any
    """Of a step, on the slowest device."""
    peak: Any
    """Bytes on the fullest device."""
    over: Any
    """Bytes beyond the limit of the tightest device; negative: room left."""


def samples_each(request: Request, layouts: Layouts) -> Number:
    """Samples of the replica that has most."""
    return -(-request.global_batch // np.asarray(layouts.dp))


def price(request: Request, on: Fleet, layouts: Layouts, shares: Any = None) -> list[Priced]:
    """Prices `layouts` on every kind of rank of a fleet.

    Args:
        shares: samples of a rank of each kind (unequal data parallelism); None: equal shares.
    """
    found = []
    for index, kind in enumerate(on.kinds):
        samples = samples_each(request, layouts) if shares is None else np.asarray(shares[index])
        step = Step(request, on, kind, layouts)
        size = np.minimum(np.maximum(1, np.asarray(layouts.micro_batch)), samples)
        held = memory.held(step, size, -(-samples // size))
        found.append(Priced(seconds.step_seconds(step, samples), held, memory.limit(kind, request)))
    return found


def grid(request: Request, on: Fleet, layouts: Layouts) -> Grid:
    """Prices arrays of layouts at once; the slowest and the tightest device count."""
    costs = price(request, on, layouts)
    return Grid(
        np.max([one.step for one in costs], axis=0),
        np.max([one.peak for one in costs], axis=0),
        np.max([one.peak - one.limit for one in costs], axis=0),
    )


def slowest(request: Request, on: Fleet, layouts: Layouts) -> Number:
    """Seconds of a step on the slowest kind of rank, without the bytes."""
    samples = samples_each(request, layouts)
    steps = (seconds.step_seconds(Step(request, on, kind, layouts), samples) for kind in on.kinds)
    return np.max([sum(terms.values()) for terms in steps], axis=0)


def estimate(
    request: Request, cluster: Cluster, layout: Layouts, factors: Factors | None = None, shares: Any = None
) -> Predicted:
    """What one step of one layout should cost: its slowest rank's seconds, its tightest's bytes."""
    ranks = int(layout.world)
    on = replace(network.fleet(cluster, ranks, layout.threads), factors=factors or request.factors)
    costs = price(request, on, layout, shares)
    slow = int(np.argmax([float(one.step) for one in costs]))
    tight = costs[int(np.argmin([one.limit - float(one.peak) for one in costs]))]
    terms = {name: float(value) for name, value in costs[slow].seconds.items()}
    kinds = {name: float(value) for name, value in tight.held.items()}
    step = sum(terms.values())
    tokens = request.global_batch * request.tokens_per_sample
    made = Step(request, on, on.kinds[slow], layout)
    most = int(samples_each(request, layout)) if shares is None else int(np.max(shares))
    nodes = [0 if on.cuda else place.node for place in seats(cluster, ranks)]
    exactly = {**sent(request, layout), **_of_units(request, on, layout, -(-most // int(layout.micro_batch)), nodes)}
    return Predicted(
        step_seconds=step,
        tokens_per_second=tokens / step,
        tokens_per_second_per_device=tokens / step / len(devices(cluster, ranks)),
        mfu=request.model_flops / step / peak_flops(cluster, ranks, request.precision),
        terms=terms,
        memory_bytes={**kinds, "peak": sum(kinds.values())},
        memory_limit=tight.limit,
        sent_bytes={name: float(value) for name, value in _encoded(exactly, request, on).items()},
        sources={**seconds.sources(made), **memory.sources(request, on)},
    )


def sent(request: Request, layouts: Layouts) -> dict[str, Number]:
    """Payload bytes that a rank sends per step in exchanges of states: what goes on the ledger.

    Beside the gradients, ranks tell each other at every step which tensors they used, the loss, and their part of the
    norm, in one exchange (`shard.control`). The padding of units is left out; `_of_units` counts it.
    """
    storage = storage_of(request, layouts)
    pp, replicas = np.asarray(layouts.pp), layouts.shards // np.asarray(layouts.optimizer)
    parameters = request.trainable / pp / layouts.tp
    rounds = -(-samples_each(request, layouts) // np.asarray(layouts.micro_batch))
    grads = storage.grads * parameters
    further = layouts.optimizer // np.asarray(layouts.grads)
    scattered = cost.ring_bytes("reduce_scatter", grads, layouts.grads) * rounds
    scattered = scattered + cost.ring_bytes("reduce_scatter", grads / layouts.grads, further)
    # Once forward and once backward; what lies outside the layers, and the last of them, stays from one to the other.
    stays = np.minimum(parameters, (request.outside + request.layer_parameters) / layouts.tp)
    gathered = rounds * (2 * parameters - stays)
    params = cost.ring_bytes("all_gather", storage.params * gathered, layouts.params)
    back = layouts.optimizer // np.asarray(layouts.params)
    params = params + cost.ring_bytes("all_gather", storage.params * parameters / layouts.params, back)
    found = {
        "gradients": scattered + cost.ring_bytes("all_reduce", grads / layouts.optimizer, replicas),
        "control": cost.ring_bytes("all_reduce", _steering(request, layouts), layouts.world),
    }
    return found | ({"parameters": params} if np.any(np.asarray(params) > 0) else {})


def _of_units(request: Request, on: Fleet, layout: Layouts, rounds: int, nodes: Sequence[int]) -> Mapping[str, Number]:
    """The same of gradients and parameters by the mechanism's own cost, over the very units that it exchanges, padding
    included: what goes on the ledger, to the byte.

    Empty where that is not known: models that are cut, the 16-bit shards of bf16, other executors, and whole matrices
    dealt to many owners, which takes long.
    """
    cut = int(layout.tp) * int(layout.sp) * int(layout.pp) > 1
    halves = bool(request.low) and int(layout.optimizer) > 1
    whole = request.optimizer == "muon"
    many = whole and len(request.sizes) * int(layout.optimizer) > DEALT
    if not request.sizes or cut or halves or many or request.storage is not None or on.ranks == 1:
        return {}
    chosen = Shards(int(layout.params), int(layout.grads), int(layout.optimizer))
    pieces = spread.pieces_of(request.sizes, chosen, whole)
    wires = spread.Wires(on.inside, on.between)
    found = spread.cost(pieces, nodes, wires, rounds=rounds, bucket_bytes=request.bucket_bytes).sent
    return {name: size for name, size in found.items() if size or name == "gradients"}


def _encoded(found: Mapping[str, Number], request: Request, on: Fleet) -> dict[str, Number]:
    """Bytes sent, with those that are encoded counted as such: of rings through all ranks, (ranks - ranks of a machine)
    of (ranks - 1) parts cross between machines. Headers are left out, and what is too small to be encoded."""
    result = dict(found)
    for one in request.crossings:
        if one.traffic not in found or on.ranks == 1:
            continue
        far = (on.ranks - on.per_node) / (on.ranks - 1) if on.between is not None else 0.0
        share = {"between": far, "inside": 1 - far, "all": 1.0}[one.level]
        width = request.bytes_each / 4
        result[one.traffic] = found[one.traffic] * (1 - share + share / (one.ratio * width))
    return result


def _steering(request: Request, layouts: Layouts) -> Number:
    """Bytes that ranks add up in each step beside tensors."""
    world = np.asarray(layouts.world)
    return TOTAL_BYTES * control_values(request.tensors, world, TOTALS + world + task_totals(request.tasks))


def scaled(predicted: Predicted, measured: float) -> Predicted:
    """The prediction with every time term scaled so that the step takes the `measured` seconds."""
    factor = measured / predicted.step_seconds
    trial: Mapping[str, str] = {"step": f"a trial; estimated terms scaled by {factor:.3g}"}
    return msgspec.structs.replace(
        predicted,
        step_seconds=measured,
        tokens_per_second=predicted.tokens_per_second / factor,
        tokens_per_second_per_device=predicted.tokens_per_second_per_device / factor,
        mfu=predicted.mfu / factor,
        terms={name: value * factor for name, value in predicted.terms.items()},
        sources={**predicted.sources, **trial},
    )
