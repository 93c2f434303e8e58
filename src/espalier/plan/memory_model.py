"""Memory model: bytes on one rank, by kind. NumPy arrays price many layouts at once; no torch.

Two ends of a pipeline can be the fullest: the first stage holds the activations of as many micro-batches as there are
stages, the last one the head. After Buff (arXiv 2401.09149) and Korthikanti et al. (arXiv 2205.05198); deviations: what
the allocator and the optimizer need for a moment, and gathered layers, are kinds of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from espalier.plan.axes import offload_tiers as offload_cost
from espalier.plan.axes import pipeline as pipeline_cost
from espalier.plan.collective_time import Fleet
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.request import Request
from espalier.recipe.cost import Anatomy, Number, Terms, Work

CUDA_RUNTIME = 800 * 2**20
"""Bytes on a GPU that hold nothing of the model: the context (300 MB with kernels loaded when needed, as CUDA does
since 11.7, more than 1,000 MB before: pytorch/pytorch issue 107667), kernels that a step then loads, and workspaces."""
CPU_RUNTIME = 180 * 2**20
"""Anonymous and shared pages of a rank whose model is next to nothing: 163 to 205 MiB measured, of 12 recipes."""
CPU_COMPILER = 66 * 2**20
"""Bytes of torch._dynamo and sympy, which `torch.utils.checkpoint` imports, and `torch.compile`: 154 MiB become 220."""
ROOMY = {"cuda": 0.8, "cpu": 0.5}
"""Share of what a rank may hold up to which larger micro-batches are preferred among equals: fewer passes."""
SLACK = {"cuda": 0.1, "cpu": 0.4}
"""What the allocator keeps in pieces nobody can use: on a GPU a share of all that a model holds there, assumed:
published FSDP peaks of about 27 bytes per parameter are 16 of states, 8 of AdamW's temporaries, and the rest this. On a
processor a share of what comes and goes in a step: of 12 recipes 0 to 0.64 of it, 0.4 in the median, beyond the bytes
that were live (glibc's malloc; bench/processors.py)."""
COMMUNICATION = 2**28
"""Bytes of buffers that NCCL holds for each kind of group a rank is in. Assumed."""
LOGITS = 3
"""Values of each logit at the loss's worst moment, of which the head's backward passes have one."""
CAST = 4
"""Bytes per parameter of 16-bit gradients that are cast for the update, all together."""


def memory_bytes(step: CostInputs, size: Number, in_flight: Number) -> Terms:
    """Bytes by kind on the fullest stage; their sum is the peak.

    Args:
        size: samples of a micro-batch.
        in_flight: micro-batches per step.
    """
    first, last = ends(step, size, in_flight)
    return first if last is first else _fullest([first, last])


def _fullest(moments: Sequence[Terms]) -> Terms:
    """The kinds of the moment with most bytes, of each layout."""
    most = np.argmax(np.stack(np.broadcast_arrays(*(sum(moment.values()) for moment in moments))), axis=0)
    return {name: np.choose(most, [moment[name] for moment in moments]) for name in moments[0]}


def ends(step: CostInputs, size: Number, in_flight: Number) -> tuple[Terms, Terms]:
    """Bytes by kind on the first stage and on the last; the same object where no layout has more than one. Of stages
    whose layers were said, the fullest and the last."""
    anatomy = step.anatomy(size)
    if count := len(step.request.system.stages):
        each = [
            stage(replace(step, stage=at), anatomy, in_flight, is_first=at < count - 1, behind=at)
            for at in range(count)
        ]
        return max(each, key=lambda sizes: float(np.max(sum(sizes.values())))), each[-1]
    first = stage(step, anatomy, in_flight, is_first=True)
    if np.all(step.layouts.pp == 1):
        return first, first
    return first, stage(step, anatomy, in_flight, is_first=False)


def stage(step: CostInputs, anatomy: Anatomy, micro_batches: Number, is_first: bool, behind: int = 0) -> Terms:
    """Of the first stage (or the last), or one `behind` it, with so many micro-batches in a step."""
    request = step.request
    layouts = step.layouts
    factors = step.on.factors
    pp = np.asarray(layouts.pp)
    device = step.kind.table.device
    sizes = dict(step.device_states)
    frozen = step.frozen().memory_bytes
    for name, size in frozen.items():
        sizes[name] = sizes.get(name, 0.0) + size
    if "frozen" in step.waiting:
        sizes["frozen"] = sizes["frozen"] - step.waiting["frozen"]
    waiting = np.minimum(pipeline_cost.most_in_flight(pp - behind, layouts.chunks) if is_first else 1, micro_batches)
    if has_window := request.offload.parameters != "device":  # all micro-batches of a layer, then the next
        waiting = micro_batches
    has_head = (pp == 1) | (not is_first)
    borders = has_window  # gradients of what the layer at work gave
    inputs = waiting * (step.stage_layers + borders) * anatomy.layer.saved
    if request.offload.activations != "device":
        rounds = micro_batches if has_window else 0
        inputs = offload_cost.activations_held(anatomy.layer.saved, step.stage_layers, rounds)
    late, growing = _put_off(step, anatomy.layer, micro_batches, 0 * pp if is_first else pp - 1)
    crossing = _crossing(step, anatomy.layer, micro_batches, waiting)
    activations = inputs + late + crossing + has_head * anatomy.rest.saved
    travelling: Number = 0.0
    if np.any(layouts.cp > 1):
        travelling = step.sequence(anatomy.layer.tokens).memory_bytes["keys_values"]
    in_layer = anatomy.layer.transient + travelling + growing
    if request.system.storage is None:  # its work counts on room that the head's share leaves
        in_layer = in_layer + (~has_head) * anatomy.rest.saved + _spread_experts(step, anatomy.layer.tokens)
    loss = has_head * anatomy.rest.transient
    update = 0.0 * layouts.tp if has_window else orthogonal_bytes(request, layouts.tp)
    if request.system.storage is None and not has_window:
        passes = StagePasses(activations, inputs / np.maximum(1, waiting), in_layer, loss, has_head, update)
        for kind, size in _fullest(_moments(step, anatomy, passes, micro_batches)).items():
            sizes[kind] = size + frozen.get(kind, 0.0)
    else:
        # The worst moment is in backward, or in the optimizer's step when no activation is held any more.
        transient = np.maximum(np.maximum(in_layer, loss), step.gathering)
        update = np.maximum(update, 0.0 if has_window else _temporaries(step) * step.owned)
        sizes["activations"] = factors.activations * activations
        sizes["transient"] = np.maximum(factors.activations * transient, update - factors.activations * activations)
    if request.system.fsdp:
        sizes["gathered"] = np.where(_fsdp(step) & (pp > 1), _resident(step), sizes["gathered"])
    within = sum(sizes.values()) if step.cuda else sizes["activations"] + sizes["transient"]
    slack = SLACK[device.kind] if request.system.slack is None else request.system.slack
    sizes["slack"] = factors.activations * slack * within
    compiles = layouts.recompute != "none" or request.recipe.train.compile
    groups = COMMUNICATION * sum(axis > 1 for axis in (layouts.tp, layouts.sp, layouts.dp, layouts.pp))
    on_gpu = (device.runtime or CUDA_RUNTIME) + groups
    on_cpu = max(device.runtime, CPU_RUNTIME) + compiles * CPU_COMPILER
    sizes["runtime"] = (on_gpu if step.on.cuda else on_cpu) + (0 if step.cuda else request.profile.loaded)
    zero = 0.0 * micro_batches
    return {name: value + zero for name, value in sizes.items()}


class StagePasses(NamedTuple):
    """Bytes of a stage's passes: what waits for backward, what one micro-batch gives its layers, what a layer and the
    loss work on, and the update; `has_head`: whether the head is in it."""

    activations: Number
    inputs: Number
    layer: Number
    loss: Number
    has_head: Any
    update: Number


def _moments(step: CostInputs, anatomy: Anatomy, passes: StagePasses, micro_batches: Number) -> list[Terms]:
    """Bytes beside the states at the moments of `plan.axes.sharding.passing`."""
    waits = passes.activations
    has_head = passes.has_head
    factor = step.on.factors.activations
    tail = has_head * anatomy.rest.saved
    has_table = (step.layouts.pp == 1) | ~has_head
    rows = {
        "next": (micro_batches > 1, waits - tail, 0.0),
        "loss": (has_head, waits, passes.loss),
        "head": (has_head, waits, passes.loss / LOGITS),
        "last": (True, waits, passes.layer),
        "layer": (step.stage_layers > 1, waits - anatomy.layer.saved, passes.layer),
        "table": (has_table, waits - passes.inputs - tail, anatomy.rest.saved),
        "update": (True, 0.0, passes.update / factor),
    }
    moments: list[Terms] = []
    for moment, (gathered, buckets) in step.passing.items():
        there, saved, working = rows[moment]
        sizes = {"activations": factor * saved, "transient": factor * working, "gathered": gathered, "buckets": buckets}
        moments.append({kind: there * size for kind, size in sizes.items()})
    return moments


def _put_off(step: CostInputs, layer: Work, micro_batches: Number, place: Number) -> tuple[Number, Number]:
    """Bytes that zero bubble keeps at a place of the pipeline, where gradients of weights are as many micro-batches
    behind: of these, and of the one at work when its first layer comes, beyond what its layers have kept."""
    layouts = step.layouts
    layers = step.stage_layers
    each = ((layouts.schedule == "zero_bubble") & (layouts.pp > 1)) * layer.put_off
    behind = np.minimum(place, np.maximum(0, micro_batches - 1)) / layouts.chunks
    return behind * layers * each, (layers - 1) * np.maximum(0.0, each - layer.saved)


def _spread_experts(step: CostInputs, tokens: Number) -> Number:
    """Bytes that backward holds beyond what it does where all experts are here: gradients of weights are summed when
    all tiles have run, and rows of others and answers have rooms of their own."""
    request = step.request
    if request.expert_ranks == 1:
        return 0.0
    inner = request.experts.parameters / request.experts.total / request.profile.width  # of three matrices
    return tokens * request.experts.active * request.compute * (3 * request.profile.width + inner / step.layouts.tp)


def _crossing(step: CostInputs, layer: Work, micro_batches: Number, waiting: Number) -> Number:
    """Bytes of what stages send and receive: kept until its gradient comes, with gloo until the step ends, and then
    there is room for the next one as well."""
    layouts = step.layouts
    if step.request.system.storage is not None:
        return 0.0
    messages = waiting if step.cuda else micro_batches + 1
    size = layer.tokens * step.request.profile.width * step.stream_bytes / layouts.tp
    return (layouts.pp > 1) * messages * layouts.chunks * size


def _temporaries(step: CostInputs) -> Number:
    """Bytes per parameter that an update needs beside its states: 16-bit gradients are cast for their fp32 masters,
    where there are such."""
    cast = CAST if step.storage.grads < 4 < step.storage.optimizer else 0.0
    return step.request.system.temporaries + np.where(_fsdp(step), 0.0, cast)


def _fsdp(step: CostInputs) -> Any:
    """Where PyTorch's FSDP shards parameters."""
    return step.request.system.fsdp & (step.layouts.params > 1)


def _resident(step: CostInputs) -> Number:
    """Bytes of a stage under FSDP: its parameters stay gathered and its gradients whole, in fp32, to the last
    micro-batch. Ours are released after every block."""
    storage = step.storage
    return step.stage_parameters * (storage.params + storage.grads + step.request.low)


def orthogonal_bytes(request: Request, ranks: Number) -> Number:
    """Bytes Muon needs beside its state: the matrices it takes at once, the old and the new of two products; where
    `ranks` share them, their parts as they were, as they were sent, and the whole ones."""
    if not request.muon:
        return 0
    from espalier.optim.muon import LARGEST_BATCH

    at_once = (
        rows * columns * min(count, max(1, LARGEST_BATCH // (rows * columns)))
        for (rows, columns), count in request.profile.matrices.items()
        if rows * columns
    )
    copies = 4 + 3 * (ranks > 1)
    return copies * request.bytes_each * max(at_once, default=0)


def sources(request: Request, on: Fleet) -> Mapping[str, str]:
    """Where each kind's number comes from."""
    device = on.kinds[0].table.device
    width = request.bytes_each
    low = " + 2 bytes of bf16 copies (sharded: bf16, masters with the optimizer)" if request.low else ""
    origins: dict[str, Any] = {
        "params": f"{width} bytes per parameter{low}",
        "grads": f"{width} bytes per trainable parameter",
        "optimizer_state": f"{2 * width} bytes per AdamW parameter, {width} per Muon parameter",
        **(
            {}
            if request.profile.frozen is None
            else {"frozen": "weights that are not trained, as stored; blocks in shards"}
        ),
        "activations": "the workload's formula, for as many micro-batches as wait in the pipeline",
        "gathered": "tables, the layer at work and the next one, where parameters are sharded",
        "slack": f"{SLACK[device.kind]:.0%} for the allocator"
        + (" (assumed)" if device.kind == "cuda" else " of activations and transient"),
        "runtime": "measured"
        if device.runtime > (0 if device.kind == "cuda" else CPU_RUNTIME)
        else "context, kernels and workspaces (assumed)"
        if device.kind == "cuda"
        else "a process with PyTorch and Espalier loaded",
    }
    return origins
