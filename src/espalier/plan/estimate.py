"""Sums the parts' costs into one data-parallel step: seconds by part, bytes held by kind, bytes sent by class.

After the training-systems survey's taxonomy (arXiv 2407.20018) and the collective model of AMSP and Buff; deviations:
the price of a launch, the optimizer's own time, and an overlap that is never free. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from espalier import cost
from espalier.cluster import Cluster, Link, Place
from espalier.config import Pin
from espalier.cost import Cost, Number, Product, Work
from espalier.plan import speed
from espalier.plan.base import Predicted
from espalier.plan.seats import devices, peak_flops, seats, shares
from espalier.sync.base import TOTAL_BYTES, TOTALS

OPERATIONS = {False: 6.0, True: 2.0}
"""Operations issued per matrix product in forward, eager and compiled: a decoder block has 7 products among about 40
operations, fused to about a third. Assumed."""
BACKWARD = 2.0
"""Operations and bytes moved in backward over forward."""
CLIP_BYTES = 12
"""Per parameter: the norm reads a gradient, clipping reads and writes it."""
ADAM_BYTES = 28
"""Per parameter, fused: reads parameter, gradient and two moments, writes all but the gradient."""
MUON_BYTES = 36
"""Per parameter beside its products: momentum, normalising, the update."""
NEWTON_SCHULZ = 5

INTERFERENCE = {"cuda": 0.2, "cpu": 1.0, "cpu between": 0.3}
"""Seconds of compute lost per hidden second of communication. GPUs: Buff (arXiv 2401.09149). Processors: inside a
machine the same cores do the copying; over a network TCP slows two cores to 0.62-0.80 on a saturated 100 Mbit/s."""
LINK_SHARE = {"inside": 0.6, "between": 0.9}
"""What collectives reach of a declared bandwidth: the networks of Calculon's a100_80g.json (SC23)."""
CONGESTION = ((16, 1.0), (32, 1.1), (64, 1.2), (256, 1.3), (512, 1.4))
"""Ranks up to which a declared network is divided by so much, 1.5 beyond: Buff's planner."""

CUDA_RUNTIME = 2 * 2**30
"""Bytes of context and libraries on a GPU, and the share of memory to be used: AMSP's rule 0.92 M - 2 GiB."""
CUDA_MEMORY = 0.92
CPU_RUNTIME = 256 * 2**20
CPU_MEMORY = 0.9


@dataclass(frozen=True)
class Request:
    """What is asked of a planner: the model's sizes, one step's batch, and what is pinned.

    Attributes:
        parameters, trainable: numbers of parameters; layers: of blocks; tensors: of trainable tensors.
        global_batch: samples per step; tokens_per_sample: tokens (nodes, rays) in one.
        work: (micro_batch, recompute, precision) -> Work; micro_batch may be a NumPy array.
        matrix_parameters: parameters that Muon moves; matrix_shapes: (rows, columns, count) of them.
        recompute: the mode asked for, None to leave it to the planner.
        bucket_bytes: gradients exchanged at once.
        resident: bytes a rank on a CPU holds before it holds anything of the model; 0 when not known.
    """

    parameters: int
    trainable: int
    layers: int
    global_batch: int
    tokens_per_sample: float
    work: Callable[[Any, str, str], Work]
    optimizer: Literal["adamw", "muon"] = "adamw"
    tensors: int = 0
    matrix_parameters: int = 0
    matrix_shapes: Sequence[tuple[int, int, int]] = ()
    precision: str = "fp32"
    compile: bool = False
    recompute: str | None = None
    pin: Pin = field(default_factory=Pin)
    bucket_bytes: int = 25 * 2**20
    resident: int = 0

    @property
    def width(self) -> int:
        """Bytes of a parameter, gradient or moment as it is kept: fp32 masters also under bf16."""
        return 8 if self.precision == "fp64" else 4


@dataclass(frozen=True)
class Candidate:
    """A layout to be priced. `micro_batch` may be a NumPy array: each term is then one too."""

    ranks: int
    threads: int
    micro_batch: Number
    recompute: str = "none"


# --- where ranks sit ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seat:
    """One kind of rank: its device, how that is used, and the largest share of samples such a rank has."""

    place: Place
    setting: speed.Setting
    samples: int

    @property
    def limit(self) -> float:
        """Bytes such a rank may hold."""
        device = self.place.table.device
        if device.kind == "cuda":
            return CUDA_MEMORY * device.memory
        return CPU_MEMORY * device.memory / self.setting.processes


def _kinds(request: Request, cluster: Cluster, candidate: Candidate) -> list[_Seat]:
    """The distinct kinds of ranks of a candidate."""
    placed = seats(cluster, candidate.ranks)
    on_device: dict[int, int] = {}
    for place in placed:
        on_device[place.rank] = on_device.get(place.rank, 0) + 1
    found: dict[tuple[int, int], _Seat] = {}
    for place, (start, stop) in zip(placed, shares(request.global_batch, candidate.ranks), strict=True):
        key = (id(place.table), on_device[place.rank])
        if key not in found or found[key].samples < stop - start:
            cuda = place.table.device.kind == "cuda"
            cores = place.table.cores or candidate.threads * key[1]
            setting = speed.Setting() if cuda else speed.Setting(candidate.threads, key[1], cores)
            found[key] = _Seat(place, setting, stop - start)
    return list(found.values())


# --- seconds -----------------------------------------------------------------------------------------------------


def _compute(request: Request, seat: _Seat, micro_batch: Number, recompute: str) -> dict[str, Number]:
    """Seconds of one micro-batch by part."""
    device, setting, precision = seat.place.table.device, seat.setting, request.precision
    work = request.work(micro_batch, recompute, precision)

    def products(chosen: Sequence[Product]) -> Number:
        return sum((speed.product_seconds(device, precision, product, setting) for product in chosen), 0.0)

    moved = speed.moved_seconds(device, work.moved, setting)
    attention = speed.attention_seconds(device, precision, work.attention, setting)
    forward = products(work.products) + attention + moved
    both = [product for one in work.products for product in speed.backward(one)]
    backward = products(both) + speed.ATTENTION_BACKWARD * attention + BACKWARD * moved
    issued = OPERATIONS[request.compile] * sum((product.count for product in work.products), 0.0)
    issued = issued * (1 + BACKWARD + work.again) * speed.issue_seconds(device)
    again = work.again * forward
    if device.kind == "cuda":  # the host runs ahead, so only what the device waits for counts
        issued = np.maximum(0.0, issued - forward - backward - again)
    zero = 0.0 * np.asarray(micro_batch)
    parts = {"forward": forward, "backward": backward, "recompute": again, "launch": issued}
    return {name: (value + zero)[()] for name, value in parts.items()}


def _optimizer(request: Request, seat: _Seat) -> float:
    """Seconds of the optimizer step, clipping included; whole on every rank."""
    device, setting = seat.place.table.device, seat.setting
    others = request.trainable - request.matrix_parameters
    scale = request.width / 4
    moved = scale * (ADAM_BYTES * others + MUON_BYTES * request.matrix_parameters + CLIP_BYTES * request.trainable)
    seconds = speed.moved_seconds(device, moved, setting)
    if request.optimizer == "muon":
        seconds += sum(_orthogonal(request, seat, shape) for shape in request.matrix_shapes)
    return float(seconds)


def _orthogonal(request: Request, seat: _Seat, shape: tuple[int, int, int]) -> float:
    """Seconds of Newton-Schulz on `count` matrices: three products an iteration, on the smaller side."""
    device, (rows, columns, count) = seat.place.table.device, shape
    small, large = min(rows, columns), max(rows, columns)
    times = count * NEWTON_SCHULZ
    precision = "bf16" if device.kind == "cuda" and "bf16" in device.flops else request.precision
    if precision not in device.flops or device.kind == "cpu":
        precision = "fp64" if request.precision == "fp64" else "fp32"
    steps = [
        Product(small, large, small, times),
        Product(small, small, small, times),
        Product(small, small, large, times),
    ]
    return float(sum(speed.product_seconds(device, precision, step, seat.setting) for step in steps))


def _exchange(request: Request, cluster: Cluster, ranks: int) -> tuple[float, int, Link | None]:
    """Seconds of one bucket's all-reduce, how many buckets there are, and the link they go over."""
    size = request.trainable * request.width
    buckets = max(1, -(-size // max(1, request.bucket_bytes)))
    if ranks == 1 or not size:
        return 0.0, buckets, None
    placed = seats(cluster, ranks)
    chosen = sorted({place.rank for place in placed})
    nodes = len({place.node for place in placed})
    inside = _reached(cluster.slowest(chosen, "inside"), "inside", ranks)
    if nodes == 1:
        return float(cost.all_reduce(size / buckets, ranks, inside)), buckets, inside
    between = _reached(cluster.slowest(chosen, "between"), "between", ranks)
    each = ranks // nodes
    if placed[0].table.device.kind == "cuda" and each * nodes == ranks and each > 1:
        within = cost.reduce_scatter(size / buckets, each, inside) + cost.all_gather(size / buckets, each, inside)
        across = cost.all_reduce(size / buckets / each, nodes, between, sharing=each)
        return float(within + across), buckets, between
    slowest = min(inside if each > 1 else between, between, key=lambda link: link.bandwidth)
    ring = msgspec.structs.replace(slowest, latency=between.latency, launch=between.launch)
    return float(cost.all_reduce(size / buckets, ranks, ring)), buckets, ring


def _reached(link: Link, level: Literal["inside", "between"], ranks: int) -> Link:
    """The link as a collective finds it: a declared one less what protocols and congestion take."""
    if link.measured:
        return link
    congestion = next((factor for up_to, factor in CONGESTION if ranks <= up_to), 1.5) if level == "between" else 1.0
    return msgspec.structs.replace(link, bandwidth=link.bandwidth * LINK_SHARE[level] / congestion)


def _exposed(bucket: float, buckets: int, backward: Number, interference: float) -> Number:
    """Seconds a step gets longer by `buckets` all-reduces that start while `backward` still runs.

    Buckets become ready evenly over backward and go one after the other. What is hidden still costs `interference`.
    """
    whole = bucket * buckets
    exposed = np.maximum(bucket, backward / buckets + whole - backward) if whole > 0 else 0.0 * backward
    exposed = np.minimum(exposed, whole)
    return exposed + interference * (whole - exposed)


# --- one kind of rank --------------------------------------------------------------------------------------------


def _price(request: Request, cluster: Cluster, candidate: Candidate, seat: _Seat) -> Cost:
    """Seconds, bytes held and bytes sent of one step on one rank."""
    size = np.minimum(np.maximum(1, np.asarray(candidate.micro_batch)), seat.samples)
    full, rest = seat.samples // size, seat.samples % size
    whole = _compute(request, seat, size, candidate.recompute)
    part = _compute(request, seat, np.maximum(rest, 1), candidate.recompute)
    seconds: dict[str, Number] = {name: full * whole[name] + (rest > 0) * part[name] for name in whole}
    last = {name: np.where(rest > 0, part[name], whole[name]) for name in ("backward", "recompute")}
    bucket, buckets, link = _exchange(request, cluster, candidate.ranks)
    device = seat.place.table.device
    kind = (
        "cpu between" if device.kind == "cpu" and cluster.level(_used(cluster, candidate)) == "between" else device.kind
    )
    seconds["optimizer"] = _optimizer(request, seat) + 0.0 * size
    seconds["all_reduce"] = _exposed(bucket, buckets, last["backward"] + last["recompute"], INTERFERENCE[kind])
    held, sent = _held(request, candidate, seat, size), _sent(request, candidate)
    return Cost(seconds, held, sent, _sources(request, seat, link))


def _sent(request: Request, candidate: Candidate) -> dict[str, Number]:
    """Payload bytes a rank sends per step: what `shard.replicate` and `sync.every_step` put on the ledger."""
    gradients = (request.trainable + request.tensors) * request.width
    return {
        "gradients": cost.ring_bytes("all_reduce", gradients, candidate.ranks),
        "control": cost.ring_bytes("all_reduce", TOTAL_BYTES * (TOTALS + candidate.ranks), candidate.ranks),
    }


def _used(cluster: Cluster, candidate: Candidate) -> set[int]:
    return {place.rank for place in seats(cluster, candidate.ranks)}


def _held(request: Request, candidate: Candidate, seat: _Seat, size: Number) -> dict[str, Number]:
    """Bytes by kind; `transient` is what the worst moment, in backward or in the optimizer step, adds to the rest."""
    work = request.work(size, candidate.recompute, request.precision)
    device, width, zero = seat.place.table.device, request.width, 0.0 * np.asarray(size)
    low = 2 if request.precision in ("bf16", "fp16") else 0
    matrices = request.matrix_parameters if request.optimizer == "muon" else 0
    grads = width * request.trainable
    runtime = device.runtime or (CUDA_RUNTIME if device.kind == "cuda" else CPU_RUNTIME)
    if device.kind == "cpu":
        runtime = request.resident or runtime
    held = {
        "params": (width + low) * request.parameters,
        "grads": grads,
        "optimizer": width * (2 * request.trainable - matrices),
        "activations": work.kept,
        "transient": np.maximum(work.transient, orthogonal_bytes(request) - work.kept),
        "buckets": min(2 * request.bucket_bytes, grads) if candidate.ranks > 1 else 0,
        "runtime": runtime,
    }
    return {kind: (value + zero)[()] for kind, value in held.items()}


def orthogonal_bytes(request: Request) -> int:
    """Bytes Muon needs beside its state: the matrices it takes at once, the old and the new of two products."""
    if request.optimizer != "muon":
        return 0
    from espalier.optim.muon import LARGEST_BATCH

    at_once = (
        rows * columns * min(count, max(1, LARGEST_BATCH // (rows * columns)))
        for rows, columns, count in request.matrix_shapes
    )
    return 4 * request.width * max(at_once, default=0)


def _sources(request: Request, seat: _Seat, link: Link | None) -> dict[str, str]:
    device, width = seat.place.table.device, request.width
    low = " + 2 bytes of bf16 copies" if request.precision in ("bf16", "fp16") else ""
    sources = {
        "forward": f"products, attention and memory traffic on {device.name}: {speed.describe(device)}",
        "backward": f"two products for each, attention x{speed.ATTENTION_BACKWARD}, traffic x{BACKWARD:g} (assumed)",
        "recompute": "the share of forward that the workload repeats",
        "optimizer": f"memory traffic: {ADAM_BYTES} bytes per AdamW parameter, {MUON_BYTES} per Muon parameter and its "
        f"{NEWTON_SCHULZ} iterations of 3 products, {CLIP_BYTES} for clipping",
        "launch": f"{OPERATIONS[request.compile]:g} operations per product (assumed), "
        f"{speed.issue_seconds(device) * 1e6:.1f} µs each",
        "params": f"{width} bytes per parameter{low}",
        "grads": f"{width} bytes per trainable parameter",
        "optimizer_state": f"{2 * width} bytes per AdamW parameter, {width} per Muon parameter",
        "activations": "the workload's formula",
        "runtime": "resident in the process the ranks are forked from"
        if request.resident and device.kind == "cpu"
        else "measured"
        if device.runtime
        else "assumed (AMSP's 2 GiB)"
        if device.kind == "cuda"
        else "assumed",
        "gradients": "2(n-1)/n bytes of all gradients",
    }
    if link is not None:
        sources["all_reduce"] = (
            f"launch + 2(n-1) latency + 2(n-1)/n bytes/bandwidth per bucket, less what backward hides; "
            f"{link.bandwidth:.3g} bytes/s, {link.latency:.2g} s ({link.source})"
        )
    return sources


# --- the step ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """A candidate priced at every micro-batch of an array, each [micro_batches]."""

    seconds: Any
    """Of a step, on the slowest device."""
    over: Any
    """Bytes beyond the limit of the tightest device; negative: room left."""


def grid(request: Request, cluster: Cluster, candidate: Candidate) -> Grid:
    """Prices all micro-batches of `candidate` (an array) at once; the slowest and the tightest device count."""
    kinds = _kinds(request, cluster, candidate)
    costs = [_price(request, cluster, candidate, seat) for seat in kinds]
    seconds = np.max([sum(one.seconds.values()) for one in costs], axis=0)
    over = np.max([sum(one.held.values()) - seat.limit for seat, one in zip(kinds, costs, strict=True)], axis=0)
    return Grid(seconds, over)


def estimate(request: Request, cluster: Cluster, candidate: Candidate) -> Predicted:
    """What one step of `candidate` (one micro-batch) should cost: its slowest rank's seconds, its tightest's bytes."""
    kinds = _kinds(request, cluster, candidate)
    costs = [_price(request, cluster, candidate, seat) for seat in kinds]
    slow = costs[int(np.argmax([sum(one.seconds.values()) for one in costs]))]
    room = [seat.limit - sum(one.held.values()) for seat, one in zip(kinds, costs, strict=True)]
    tight = int(np.argmin(room))
    terms = {name: float(value) for name, value in slow.seconds.items()}
    held = {name: float(value) for name, value in costs[tight].held.items()}
    step = sum(terms.values())
    used = devices(cluster, candidate.ranks)
    tokens = request.global_batch * request.tokens_per_sample
    return Predicted(
        step_seconds=step,
        tokens_per_second=tokens / step,
        tokens_per_second_per_device=tokens / step / len(used),
        mfu=_model_flops(request) / step / peak_flops(cluster, candidate.ranks, request.precision),
        terms=terms,
        memory_bytes={**held, "peak": sum(held.values())},
        memory_limit=kinds[tight].limit,
        sent_bytes={name: float(value) for name, value in slow.sent.items()},
        sources=dict(slow.sources),
    )


def _model_flops(request: Request) -> float:
    """FLOP of one step that count for MFU."""
    work = request.work(1, "none", request.precision)
    return float(work.model_flops) * request.global_batch


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
