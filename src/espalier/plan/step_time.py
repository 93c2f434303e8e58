"""Step time: seconds of one step on one rank, by part. NumPy arrays price many layouts at once; no torch.

Compute per layer by device, exchanges per layer and per step by link, 1F1B's bubble: Buff (arXiv 2401.09149), AMSP
(arXiv 2311.00257). Deviations: the host's price of each operation, a price for each launch, overlap that is neither
complete nor free, and the optimizer's own time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from espalier.plan import collective_time, device_model
from espalier.plan.axes import offload, optimizer_node
from espalier.plan.axes import offload_tiers as offload_cost
from espalier.plan.axes import tensor as tensor_cost
from espalier.plan.axes.pipeline import PipelineLoad
from espalier.plan.axes.pipeline import cost as stages_cost
from espalier.plan.axes.placement_plan import Prefetch
from espalier.plan.axes.sharding import cost, volumes
from espalier.plan.base import RESIDENT
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.device_model import OVERLAP
from espalier.recipe.cost import Anatomy, Cost, Number, Product, Terms, Work
from espalier.recipe.data_table import data_table

OPERATIONS = 6.0
"""Operations issued per matrix product in an eager forward pass where the workload does not count them: a decoder block
has 7 products among about 40 operations."""
BACKWARD = 2.0
"""Operations and bytes moved in backward over forward."""
ONCE = 200.0
"""Operations that a step issues beside its passes: reading, agreement, clipping, the optimizer. Steps of decoders of 12
thousand and 60 thousand parameters took 0.75 ms longer than their passes on a processor of 4 us an operation."""
CLIP_BYTES = 12
"""Per parameter: the norm reads a gradient, clipping reads and writes it."""
ADAM_BYTES = 28
"""Per parameter, fused: reads parameter, gradient and two moments, writes all but the gradient."""
FOREACH_BYTES = 44
"""Per parameter, more, where each operation of AdamW goes over all tensors by itself (torch's foreach)."""
UPDATE = 5.5
"""Operations that an update which is not fused issues for each tensor: its state, its gradient's scale and norm."""
MUON_BYTES = 36
"""Per parameter beside its products: momentum, normalising, the update."""
NEWTON_SCHULZ = 5
INTERFERENCE = {"cuda": 0.2, "cpu": 1.0, "cpu between": 0.3}
"""Seconds of compute lost per hidden second of communication. GPUs: Buff (arXiv 2401.09149). Processors: inside a
machine the same cores do the copying; over a network TCP slows two cores to 0.62-0.80 on a saturated 100 Mbit/s."""
UNHIDDEN = {"cuda": 0.2, "cpu": 0.0}
"""Share of computation's time in which nothing can be hidden: AMSP's overlap efficiency of 0.8."""
STALL = 200e-6
"""Seconds a stage loses at each hand-over beside the transfer: the host waits before it can issue more. Assumed."""


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch in one layer, or in everything else: by part, exchanges included."""

    forward: Number
    backward: Number
    recompute: Number
    launch: Number
    tensor: Number = 0.0
    sequence: Number = 0.0
    weights: Number = 0.0
    weight: Number = 0.0
    """Of backward: gradients of matrices, which zero bubble puts off."""

    @property
    def total(self) -> Number:
        return sum(self.parts.values())

    @property
    def parts(self) -> Terms:
        return {name: value for name, value in vars(self).items() if name != "weight"}


def step_seconds(step: CostInputs, samples: Number) -> Terms:
    """Seconds by part of a step in which each replica has `samples` samples; they add up to the whole."""
    layouts = step.layouts
    size = np.minimum(np.maximum(1, layouts.micro_batch), samples)
    full = samples // size
    rest = samples % size
    whole, stage = passes(step, size)
    terms = {name: full * value for name, value in stage.items()}
    last = stage
    if np.any(rest > 0):
        _, part = passes(step, np.maximum(rest, 1))
        terms = {name: value + (rest > 0) * part[name] for name, value in terms.items()}
        last = {name: np.where(rest > 0, part[name], stage[name]) for name in stage}
    micro_batches = full + (rest > 0)
    layers = step.stage_layers
    stage_seconds = pipeline(step, size, micro_batches, (layers * whole.total, layers * whole.weight)).seconds
    terms |= {name: value + 0.0 * size for name, value in stage_seconds.items()}
    if step.request.expert_ranks > 1:
        exchanged = step.experts(samples, micro_batches).seconds
        terms |= {name: value + 0.0 * size for name, value in exchanged.items()}
    terms["backward"] = terms["backward"] + (micro_batches - 1) * _added(step)
    terms |= _once(step, last)
    if not step.cuda or step.request.precision == "fp16":  # a GPU's host runs ahead, but of scaled losses
        terms["launch"] = terms["launch"] + ONCE * step.issue / step.kind.setting.share
    if step.request.offload != RESIDENT:
        terms |= _elsewhere(step, terms, micro_batches)
    return terms


def _elsewhere(step: CostInputs, terms: Terms, rounds: Number) -> Terms:
    """The terms that are others where states or activations wait outside the devices."""
    passes = terms["forward"] + terms["backward"] + terms["recompute"]
    if step.request.offload == offload.NODE:
        without = dict.fromkeys(("all_reduce", "refresh", "optimizer"), 0.0 * passes)
        return {**without, "offload": optimizer_node.seconds(step.request, step.on, step.kind, passes)}
    way = step.request.offload
    backward = terms["backward"] + terms["recompute"]
    again = offload.again(step.request)
    rounds = 1 if offload.windowed(way) else rounds  # all that wait are counted
    work = offload_cost.HidingWork(terms["optimizer"], terms["forward"], backward, step.stage_layers, rounds, again)
    rate = offload.rate(step.kind, offload.tier_of(way))
    replaced = {"offload": offload_cost.seconds(step.waiting, rate, work)}
    if way.parameters in ("host", "disk"):
        replaced["weights"] = (1 + work.again) * step.gathered(
            lambda size, over: step.wire("all_gather", size, over.ranks, over.stride, "parameters")
        )
    return replaced


# --- one micro-batch ---------------------------------------------------------------------------------------------


def passes(step: CostInputs, size: Number) -> tuple[Pass, dict[str, Number]]:
    """One layer's pass, and the seconds by part of a micro-batch in the stage that has all the rest too."""
    anatomy = step.anatomy(size)
    layer = _together(step, _exchanged(step, compute(step, anatomy.layer), anatomy))
    rest = _together(step, replace(compute(step, anatomy.rest), tensor=ends_seconds(step, anatomy.rest.tokens)))
    layers = step.stage_layers
    if stages := step.request.system.stages:  # the last has few layers, as it has the head too
        layers = np.maximum(stages[-1], layers - rest.total / layer.total)
    return layer, {name: layers * value + getattr(rest, name) for name, value in layer.parts.items()}


def compute(step: CostInputs, work: Work) -> Pass:
    """Seconds of forward, backward and recomputation of `work`, alone on its device."""
    device = step.kind.table.device
    setting = step.kind.setting
    precision = step.request.precision
    factors = step.on.factors

    def products(chosen: Sequence[Product]) -> Number:
        return sum(
            (device_model.product_seconds(device, precision, product, setting, factors) for product in chosen), 0.0
        )

    back = BACKWARD * work.moved if work.moved_back is None else work.moved_back
    moved, moved_back = (device_model.moved_seconds(device, size, setting, factors) for size in (work.moved, back))
    attention = core_seconds(step, work)
    repeated = BACKWARD if step.request.system.kernel == "written" else device_model.ATTENTION_BACKWARD
    dense = products(work.products) + attention
    forward = dense + moved
    both = [gradient for product in work.products for gradient in device_model.backward(product)]
    of_both = products(both)
    backward = of_both + repeated * attention + moved_back
    again = work.again * dense + (work.again if work.moved_again is None else work.moved_again) * moved
    count = work.issued or OPERATIONS * sum((product.count for product in work.products), 0.0)
    count = count * (1 + BACKWARD + work.again)
    weight = of_both / 2  # the other half of backward's products are gradients of inputs
    reading = 0.0 if step.cuda or not setting.full else work.reading / setting.share
    launch = step.issue * count + reading
    return Pass(forward, backward, again, launch, weight=weight)


def core_seconds(step: CostInputs, work: Work) -> Number:
    """Seconds of the attention core of `work`, forward; ranks that share tokens have so many fewer in a block."""
    request, device, setting, factors = step.request, step.kind.table.device, step.kind.setting, step.on.factors
    kernel = request.system.kernel
    catalogued = step.cuda and not device.rates
    if catalogued and kernel == "written" and work.head_size:
        product = device_model.written(work)
        return factors.attention * device_model.product_seconds(device, request.precision, product, setting, factors)
    taken = device_model.attention_seconds(device, request.precision, work, setting, factors)
    tokens = request.profile.tokens_per_sample / step.layouts.cp
    return taken / (device_model.kernel_share(kernel, tokens) if catalogued else 1.0)


def prefetch(step: CostInputs, size: Number) -> dict[Prefetch, float]:
    """Seconds of a layer's micro-batch of `size` samples of one layout, exchanges included, by when the next layer's
    gather begins, the fastest first; empty where nothing is gathered."""
    if int(step.layouts.params) == 1:
        return {}
    anatomy = step.anatomy(size)
    layer = _exchanged(step, compute(step, anatomy.layer), anatomy)
    rest = float(layer.total - layer.weights)
    by_start = {start: rest + float(taken) for start, taken in gathering(step, layer, anatomy.layer).items()}
    most = max(by_start.values())
    return dict(
        sorted(by_start.items(), key=lambda item: round(item[1] / most, 6))
    )  # equal ones in the order of `gathering`


def _together(step: CostInputs, part: Pass) -> Pass:
    """`part` with the host's time beside the device's: on a GPU the host runs ahead, also of exchanges, so only what
    the device waits for counts. Where experts are spread it waits in each layer to hear how many rows come."""
    if not step.cuda:
        return part
    busy = part.total - part.launch
    waits = part.launch / (1 + BACKWARD) * (step.request.expert_ranks > 1)
    ahead = part.launch - waits
    return replace(part, launch=waits + (busy**OVERLAP + ahead**OVERLAP) ** (1 / OVERLAP) - busy)


def _exchanged(step: CostInputs, layer: Pass, anatomy: Anatomy) -> Pass:
    """A layer's pass with what its tensor, sequence and state groups exchange in it."""
    request = step.request
    layouts = step.layouts
    again = anatomy.layer.again > 0.4
    stream = anatomy.layer.tokens * request.profile.width * request.compute
    tensor = sequence = 0.0 * layer.forward
    if np.any(layouts.tp > 1):
        tensor = tensor_seconds(step, stream, again)
    if np.any(layouts.sp > 1):
        sequence = sequence_seconds(step, anatomy.layer)
    made = replace(layer, tensor=tensor, sequence=sequence)
    by_start = gathering(step, made, anatomy.layer)
    return replace(made, weights=reduce(np.minimum, by_start.values()))


def tensor_seconds(step: CostInputs, stream: Number, again: Number) -> Number:
    """Seconds that a layer's tensor ranks exchange: transfers of `stream` bytes, as many as `plan.axes.tensor`
    says. Other trainers recompute to the layer's end (Buff, section 2.5)."""
    layouts = step.layouts
    repeated = 3 if step.request.system.storage is None else 4
    times = tensor_cost.of_layer(again, layouts.algorithm == "fsp", step.request.system.sequence_parallel, repeated)

    def exchange(operation: collective_time.Operation) -> Number:
        return step.awaited(operation, stream, layouts.tp, 1, tensor_cost.ACTIVATIONS)

    pairs = times.gathers * exchange("all_gather") + times.scatters * exchange("reduce_scatter")
    return pairs + times.reductions * exchange("all_reduce")


def ends_seconds(step: CostInputs, tokens: Number) -> Number:
    """Seconds that tensor ranks exchange for embedding, head and loss of `tokens`. Published figures leave them out."""
    request = step.request
    if request.system.storage is not None or not request.profile.width or np.all(step.layouts.tp == 1):
        return 0.0 * tokens

    return tensor_cost.cost(tensor_load(step, tokens, 0), step.awaited).seconds["tensor"]


def tensor_load(step: CostInputs, tokens: Number, layers: Number) -> tensor_cost.TensorLoad:
    """What ranks that share matrices exchange for `tokens` in so many layers, embedding, head and loss."""
    request = step.request
    layouts = step.layouts
    return tensor_cost.TensorLoad(
        tokens=tokens,
        width=request.profile.width,
        compute=request.compute,
        whole=max(4, request.compute),
        layers=layers,
        ranks=layouts.tp,
        again=float(layouts.recompute != "none"),
        regather=layouts.algorithm == "fsp",
    )


def sequence_seconds(step: CostInputs, work: Work) -> Number:
    """Seconds of a layer's all-to-alls of heads, and of its rings less what attention hides. On the cores of one
    processor it hides nothing: they do the copying."""
    hides = step.cuda or step.on.between is not None
    attention = hides * core_seconds(step, work)
    return sum(step.sequence(work.tokens, attention).seconds.values())


def weights(step: CostInputs) -> Terms:
    """Seconds of gathering the parameters of one layer once, and of scattering their gradients, in every micro-batch:
    those of experts that are spread, and all others."""
    one_length: dict[str, Any] = {"sizes": (), "tensors": None, "layers": 1, "layer": 0, "outside": 0, "largest": 0}
    layer = ((replace(states, elements=states.layer, **one_length), division) for states, division in step.parts)
    seconds = reduce(add, (cost(*part, wire=step.wire) for part in layer)).seconds
    scatter = seconds["scatter"]
    layouts = step.layouts
    if step.request.system.refresh == "broadcast":
        tensors = step.request.profile.tensors / max(1, step.request.profile.layers)
        scatter = _owner_by_owner(step, step.storage.grads * step.states.layer, layouts.grads, layouts.tp, tensors)
    return {"all_gather": seconds["gather"] / 2, "reduce_scatter": scatter}


def gathering(step: CostInputs, layer: Pass, work: Work) -> dict[Prefetch, Number]:
    """Seconds that gathers of weights and scatters of their gradients add to a layer of a micro-batch, by when the
    gather of the next layer begins; only what is pinned, where something is.

    From the block's beginning (`block`) a gather has all of its computation to hide behind, and takes bandwidth from
    the exchanges that attention waits for; from the end of attention (`attention`) it has the feed-forward. Scatters
    begin with the block in any case.
    """
    request = step.request
    layouts = step.layouts
    transfers = weights(step)
    frozen = step.frozen(wire=step.wire).seconds.get("gather", 0.0) / 2 / request.profile.layers
    gather = transfers["all_gather"] + frozen
    scatter = transfers["reduce_scatter"]
    backward = layer.backward + layer.recompute
    # Whether ranks that share a sequence and ranks that split parameters are as far apart as each other.
    within = [ranks * layouts.tp <= step.on.per_node for ranks in (layouts.sp, layouts.params)]
    waited = (within[0] == within[1]) * layer.sequence / (2 + (work.again > 0))

    def beside(taken: Number, window: Number) -> Number:
        contested = np.minimum(taken, waited)
        return contested + _awaited(step, taken - contested, window)

    scattered = beside(scatter, backward)
    by_start: dict[Prefetch, Number] = {
        "block": beside(gather, layer.forward) + beside(gather + scatter, backward),
        "none": 2 * gather + scattered,
    }
    if request.profile.heads:
        after = _after_attention(step, work)
        contested = np.minimum(scatter, waited)
        both = contested + _awaited(step, gather + scatter - contested, backward)
        late = _awaited(step, gather, after * backward)
        by_start["attention"] = _awaited(step, gather, after * layer.forward) + np.maximum(both, late)
    pinned = request.pin.prefetch
    return by_start if pinned is None or pinned not in by_start else {pinned: by_start[pinned]}


def _after_attention(step: CostInputs, work: Work) -> Number:
    """The share of a decoder layer's pass that comes after its attention, by FLOP."""
    width = step.request.profile.width
    kv_width = step.request.profile.kv_width
    projections = 4 * work.tokens * width * (width + kv_width) / step.layouts.tp
    return np.clip(1 - (work.attention + projections) / work.forward_flops, 0.0, 1.0)


def _owner_by_owner(step: CostInputs, size: Number, ranks: Number, stride: Number, tensors: float) -> Number:
    """Seconds of `size` bytes that come from their owners by a broadcast each, or go to them by a reduction each:
    tensors are owned whole, so that there are no more owners than tensors."""
    owners = np.minimum(ranks, max(1.0, tensors))
    broadcast = collective_time.seconds("broadcast", size / owners, ranks, stride, step.on)
    return owners * (broadcast + collective_time.chained(ranks, step.on))


def _exposed(step: CostInputs, taken: Number, window: Number, pieces: Number = 1, late: bool = False) -> Number:
    """Seconds a step gets longer by exchanges of `taken` seconds in all beside `window` seconds of computation, in
    equal pieces, one after the other: `exposed`. What is hidden still costs something."""
    unhidden = np.minimum(1.0, UNHIDDEN["cuda" if step.cuda else "cpu"] * step.on.factors.exposed)
    usable = (1 - unhidden) * window
    piece = taken / pieces
    kind = "cuda" if step.cuda else "cpu between" if step.on.between is not None else "cpu"
    return exposed(piece, pieces, usable, INTERFERENCE[kind], late)


def _awaited(step: CostInputs, taken: Number, window: Number) -> Number:
    """The same for what computation itself waits for, block by block. On processors nothing counts as hidden of what
    goes through machines and then between them, as it moves on only between blocks: so counted, five layouts on slow
    links come in the order in which they were measured (bench/amsp.py)."""
    hides = step.cuda | ~np.asarray(step.division.by_level)
    return np.where(hides, _exposed(step, taken, window), taken + 0.0 * window)


def exposed(piece: Number, pieces: Number, window: Number, interference: float, late: bool = False) -> Number:
    """Of `pieces` exchanges of `piece` seconds, what `window` seconds of computation cannot hide, and the loss by what
    is hidden. `late`: they become ready evenly over the window, the last at its end, as gradients do; else all may run
    from its beginning."""
    whole = piece * pieces
    rest = np.maximum(piece, window / pieces + whole - window) if late else whole - window
    shown = np.where(whole > 0, np.clip(rest, 0.0, whole), 0.0)
    return shown + interference * (whole - shown)


# --- once a step -------------------------------------------------------------------------------------------------


def pipeline(
    step: CostInputs,
    size: Number,
    micro_batches: Number,
    works: tuple[Number, Number] = (0.0, 0.0),
    leaves: Callable[[Number], Number] | None = None,
) -> Cost:
    """Idle time, hand-overs and bytes of pipelines (`plan.axes.pipeline`), whose fullest rank `works` so many seconds
    on a micro-batch of `size` samples, the second of them on gradients of matrices. `leaves`: bytes of a message -> of
    one that leaves a machine.

    Each tensor rank sends its part of a value, also where each has all of it (Megatron-LM, arXiv 2104.04473, section
    4.1; DeepSpeed's pipelines do the same)."""
    layouts = step.layouts
    request = step.request
    tokens = size * request.profile.tokens_per_sample / layouts.sp
    bytes_ = tokens * request.profile.width * step.stream_bytes / layouts.tp
    stride = layouts.tp * layouts.sp * layouts.dp
    stall = step.on.factors.stall * (STALL + request.system.stall)
    message = step.wire("send", bytes_, 1, stride, "activations") + stall
    split = layouts.schedule == "zero_bubble"
    together = np.clip(step.on.per_node // stride, 1, layouts.pp)
    share = 1.0 if step.cuda else step.kind.setting.share
    ahead = request.refuses is not None  # `train` carries the plan out; others begin as 1F1B does
    load = PipelineLoad(
        layouts.pp, micro_batches, layouts.chunks, *works, message, bytes_, None, split, ahead, share, together
    )
    if leaves is not None:
        crossing = request.crossings.get("activations")
        everywhere = crossing is not None and crossing.level == "all"
        coded = leaves(bytes_)
        load = replace(load, away_bytes=coded, message_bytes=coded if everywhere else bytes_)
    return stages_cost(load)


def away(step: CostInputs) -> Callable[[Number], Number]:
    """Bytes of a hand-over -> of one that leaves a machine, of one layout."""
    layouts = step.layouts
    stride = layouts.tp * layouts.sp * layouts.dp
    carried = step.carried("activations")
    return lambda size: carried("send", size, layouts.pp, stride, step.stream_bytes)


def _added(step: CostInputs) -> Number:
    """Seconds of adding a micro-batch's gradients to those before: both are read, the sum is written.
    Gradients that are scattered are copied to buckets instead."""
    each = step.request.system.adds * (2 * step.storage.grads + step.request.compute)
    moved = each * sum(states.elements for states, _ in step.parts)
    return device_model.moved_seconds(step.kind.table.device, moved, step.kind.setting, step.on.factors)


def _once(step: CostInputs, last: Terms) -> Terms:
    """Gradients, optimizer and refreshed parameters: what happens once a step, on the last micro-batch."""
    backward = last["backward"] + last["recompute"]
    summed = gradients(step)
    reduce = summed["seconds"] + 0.0 * backward
    if step.request.system.overlap:
        reduce = _exposed(step, summed["seconds"], backward, np.maximum(1, summed["units"]), late=True)
    return {
        "all_reduce": reduce,
        "refresh": _awaited(step, refresh(step), last["forward"]),
        "optimizer": optimizer(step) + 0.0 * reduce,
    }


def gradients(step: CostInputs) -> Terms:
    """Seconds of summing a step's gradients, and the units in which they become ready (AMSP, section 2.5): scattered
    from the gradients' shards to the optimizer's, then summed over that shard's replicas."""
    layouts = step.layouts
    if step.request.system.refresh != "broadcast":
        units = sum(volume.units for part in step.parts for volume in volumes(*part))
        return {"seconds": step.exchanged.seconds["reduce"], "units": units}
    size = step.storage.grads * step.stage_parameters / layouts.grads
    units = np.maximum(1, np.ceil(size / step.bucket_bytes))
    replicas = layouts.shards // layouts.grads
    whole = step.wire("all_reduce", size / units, replicas, layouts.tp * layouts.grads, "gradients")
    return {"seconds": units * whole, "units": units}


def refresh(step: CostInputs) -> Number:
    """Seconds of bringing updated parameters back from the optimizer's shards to the parameters'."""
    layouts = step.layouts
    if step.request.system.refresh != "broadcast":
        return step.exchanged.seconds["refresh"]
    size = step.storage.params * step.stage_parameters / layouts.params
    ranks = layouts.optimizer // layouts.params
    return _owner_by_owner(step, size, ranks, layouts.tp * layouts.params, step.request.profile.tensors)


def optimizer(step: CostInputs) -> Number:
    """Seconds of the optimizer step on a rank's shard, clipping included."""
    request = step.request
    device = step.kind.table.device
    setting = step.kind.setting
    muon = request.profile.hidden / max(1, request.profile.trainable) if request.muon else 0.0
    each = ADAM_BYTES * (1 - muon) + MUON_BYTES * muon
    foreach = step.cuda and request.system.temporaries > 0
    moved = request.bytes_each / 4 * (each + CLIP_BYTES + foreach * FOREACH_BYTES) * step.owned
    taken = device_model.moved_seconds(device, moved, setting, step.on.factors)
    of_host = foreach * step.issue * UPDATE * request.profile.tensors / step.layouts.pp
    taken = np.maximum(taken, of_host)
    if request.muon:
        share = step.owned / max(1, request.profile.trainable)
        taken = taken + share * sum(
            _orthogonal(step, *matrices) for matrices in sorted(request.profile.matrices.items())
        )
        if np.any(step.layouts.tp > 1):
            exchanged = collective_time.seconds("all_to_all", step.matrix_bytes, step.layouts.tp, 1, step.on)
            taken = taken + 2 * exchanged
    return taken


def _orthogonal(step: CostInputs, shape: tuple[int, int], count: int) -> float:
    """Seconds of Newton-Schulz on `count` matrices: three products an iteration, on the smaller side."""
    device, (rows, columns) = step.kind.table.device, shape
    small = min(rows, columns)
    large = max(rows, columns)
    times = count * NEWTON_SCHULZ
    low = device.kind == "cuda" and device_model.has(device, "bf16")
    precision = "bf16" if low else "fp64" if step.request.precision == "fp64" else "fp32"
    sizes = [(small, large, small), (small, small, small), (small, small, large)]
    products = [Product(*size, times) for size in sizes]
    setting: Any = step.kind.setting
    return float(
        sum(device_model.product_seconds(device, precision, product, setting, step.on.factors) for product in products)
    )


def sources(step: CostInputs) -> dict[str, str]:
    """Where each part's number comes from."""
    device = step.kind.table.device
    on = step.on
    links = [("inside", on.inside)] + ([("between", on.between)] if on.between is not None else [])
    listed = "; ".join(f"{n}: {k.bandwidth:.3g} bytes/s, {k.latency:.2g} s per hop ({k.source})" for n, k in links)
    known = {
        "device": device.name,
        "described": device_model.describe(device),
        "attention": device_model.ATTENTION_BACKWARD,
        "traffic": BACKWARD,
        "operations": OPERATIONS,
        "issue": device_model.issue_seconds(device) * 1e6,
        "stall": STALL * 1e6,
        "links": listed,
        "adam": ADAM_BYTES,
        "muon": MUON_BYTES,
        "iterations": NEWTON_SCHULZ,
        "clip": CLIP_BYTES,
    }
    return {name: text.format(**known) for name, text in data_table(__file__)["sources"].items()}
