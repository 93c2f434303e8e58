"""Unequal pipelines for unequal devices: FlashFlex's search (`mechanisms.unequal_pipelines.pipeline_search`) with the
planner's costs, as a plan. No
torch.

Seconds of a layer, of an exchange and bytes held are those of any plan, for each kind of device. Stages may have
unequal numbers of ranks to a matrix; where those of a layer differ between pipelines, its ranks sum whole gradients.
Sums of gradients count in full, as nothing is known of what hides them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from espalier.machine.cluster import Cluster, Link, Place
from espalier.mechanisms.unequal_pipelines import pipeline_search as flashflex
from espalier.mechanisms.unequal_pipelines.pipeline_solver import (
    DeviceClass,
    Group,
    Slot,
    SolvedPipeline,
    SolvedStage,
    UnequalLayout,
)
from espalier.plan import collective_time, device_model, memory_model, step_time
from espalier.plan.base import RESIDENT, Plan, Predicted, Rank, Stage, Unit
from espalier.plan.collective_time import DeviceGroup, gpus
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.layouts import Layouts
from espalier.plan.request import Request, exchanges
from espalier.recipe import units
from espalier.recipe.cost import Number
from espalier.recipe.errors import UserError

MOST = 64
"""Devices up to which unequal pipelines are considered by themselves: planning then takes seconds."""
FASTER = 1.03
"""By how much unequal pipelines must be faster than the best equal ones, which have fewer moving parts."""
SIZES = 4
"""Sizes of a micro-batch that are tried, at most."""
OTHER_PINS = (
    "ranks",
    "dp",
    "sp",
    "hp",
    "cp",
    "pp",
    "window",
    "placement",
    "interleave",
    "algorithm",
    "shard",
    "accumulate",
)
"""Pins of equal layouts: with one of them only these are asked for."""


@dataclass(frozen=True)
class StageInputs(CostInputs):
    """What a price is of, for a stage of so many layers, and parameters outside the layers."""

    layers_here: Number = 1
    outside_here: float = 0.0

    @property
    def stage_layers(self) -> Number:
        """Layers of this stage."""
        return self.layers_here

    @property
    def stage_parameters(self) -> Number:
        """Trainable parameters of a rank of this stage."""
        return (np.asarray(self.layers_here) * self.request.layer_parameters + self.outside_here) / self.layouts.tp


class EngineCosts:
    """The planner's costs of a request on the devices of a cluster: see `pipeline_solver.StageCosts`. Has state: what
    was priced so far.

    Args:
        size: samples of a micro-batch.
        tensor: degrees that stages may have.
    """

    def __init__(
        self, request: Request, cluster: Cluster, size: int, tensor: Sequence[int] = (1,), recompute: str = "none"
    ) -> None:
        self.request, self.cluster, self.size, self.tensor, self.recompute = request, cluster, size, tensor, recompute
        self.layers, self.micro_batches = request.layers, request.global_batch // size
        self.awaits_sends = request.refuses is None
        """As others begin 1F1B; `train` has more micro-batches on their way where links are slow."""
        self.places: list[list[Place]] = []
        """The devices of each class."""
        known: dict[tuple[int, int], list[Place]] = {}
        cuda = bool(gpus(cluster))
        for place in cluster.devices():
            if (place.table.device.kind == "cuda") == cuda and device_model.has(place.table.device, request.precision):
                known.setdefault((place.node, id(place.table)), []).append(place)
        self.places = list(known.values())
        self.classes = [
            DeviceClass(_name(places[0], cluster.machines), places[0].node, len(places)) for places in self.places
        ]
        self._layers: dict[Group, tuple[float, float]] = {}
        self._most: dict[tuple[Group, bool, bool, int], int] = {}
        self._links: dict[frozenset[int], Link] = {}
        self._steps: dict[tuple[Group, bool, bool, int], float] = {}

    def degrees(self, kind: int) -> Sequence[int]:
        """See `StageCosts.degrees`."""
        return tuple(one for one in self.tensor if one <= self.classes[kind].devices)

    def inputs(self, group: Group, pp: int = 2, layers: Number = 1, outside: float = 0.0) -> StageInputs:
        """What is priced of a stage on a group."""
        kind, tensor = group
        table = self.places[kind][0].table
        threads = self.threads(kind)
        alone = table.changed(count=1, devices=tensor, name="")
        on = collective_time.fleet(Cluster(nodes=(alone,)), tensor, threads)
        use = replace(on.kinds[0].setting, processes=1) if table.device.kind == "cpu" else on.kinds[0].setting
        layouts = Layouts(
            algorithm="megatron" if tensor > 1 else "data",
            recompute=self.recompute,
            tp=tensor,
            pp=pp,
            micro_batch=self.size,
            threads=threads,
        )
        on = replace(on, factors=self.request.factors)
        group_of = DeviceGroup(table, use, tensor)
        return StageInputs(self.request, on, group_of, layouts, layers_here=layers, outside_here=outside)

    def threads(self, kind: int) -> int:
        """Of each rank: all cores of a processor."""
        table = self.places[kind][0].table
        cores = table.cores if table.device.kind == "cpu" else table.cores // table.devices
        return self.request.pin.threads or max(1, cores)

    def _seconds(self, group: Group) -> tuple[float, float]:
        if group not in self._layers:
            layer, stage = step_time.passes(step := self.inputs(group), self.size)
            self._layers[group] = float(layer.total), float(sum(stage.values()) - step.stage_layers * layer.total)
        return self._layers[group]

    def layer(self, group: Group) -> float:
        """See `StageCosts.layer`."""
        return self._seconds(group)[0]

    def extra(self, group: Group, slot: Slot) -> float:
        """See `StageCosts.extra`: embedding, head and loss count where the head is."""
        return self._seconds(group)[1] if slot.last else 0.0

    def message_bytes(self, group: Group, following: Group) -> float:
        """Of what a rank hands over for one micro-batch: its part of the stream, all of it to another degree."""
        request, parts = self.request, group.tensor if group.tensor == following.tensor else 1
        each = request.bytes_each if request.low else request.compute  # states are whole, so the stream keeps fp32
        return self.size * request.tokens_per_sample * request.width * each / parts

    def send(self, group: Group, following: Group) -> float:
        """See `StageCosts.send`."""
        link = self.link((group.kind, following.kind))
        stall = self.request.factors.stall * step_time.STALL
        return 2 * (link.launch + link.latency + self.message_bytes(group, following) / link.bandwidth + stall)

    def link(self, kinds: Sequence[int]) -> Link:
        """The slowest link that devices of these classes meet over, as an exchange finds it."""
        key = frozenset(kinds)
        if key not in self._links:
            ranks = [place.rank for kind in key for place in self.places[kind]]
            level = self.cluster.level(ranks)
            self._links[key] = collective_time.reached(self.cluster.slowest(ranks, level), level)
        return self._links[key]

    def outside(self, slot: Slot) -> float:
        """Trainable parameters outside the layers that a stage has."""
        request = self.request
        return request.outside * min(1.0, (slot.first + slot.last) / max(1, request.tables))

    def held(self, group: Group, slot: Slot, layers: Number) -> tuple[Mapping[str, Number], float]:
        """(bytes by kind, what a rank may hold) of a stage of so many layers."""
        inputs = self.inputs(group, slot.stages, layers, self.outside(slot))
        anatomy = self.request.anatomy(self.size, self.recompute, self.request.precision, inputs.cut)
        flying = slot.stages - slot.number
        return (
            memory_model.stage(inputs, anatomy, flying, is_first=not slot.last or slot.first),
            memory_model.limit(inputs.kind, self.request),
        )

    def most_layers(self, group: Group, slot: Slot) -> int:
        """See `StageCosts.most_layers`."""
        key = group, slot.first, slot.last, slot.stages - slot.number
        if key not in self._most:
            held, limit = self.held(group, slot, np.arange(1, self.layers + 1))
            self._most[key] = int(np.count_nonzero(np.asarray(sum(held.values())) <= limit))
        return self._most[key]

    def profile(self, seconds: Sequence[float]) -> tuple[float, float]:
        """See `StageCosts.profile`: 1F1B, as long as no pipeline has fewer micro-batches than stages."""
        return sum(seconds) - max(seconds), max(seconds)

    def sync(self, pipelines: Sequence[SolvedPipeline]) -> float:
        """See `StageCosts.sync`: of the rank that spends most."""
        gradients = self.gradients(pipelines)
        return max(
            gradients[at] + self.optimizer(stage.group, Slot(number, len(one.stages)), stage.layers)
            for at, (one, number, stage) in enumerate(_numbered(pipelines))
        )

    def gradients(self, pipelines: Sequence[SolvedPipeline], seconds: bool = True) -> list[float]:
        """Seconds (or bytes) that each stage, pipeline by pipeline, spends on sums of gradients: over the pipelines,
        for each run of layers that the same stages hold. Of ranks that cut it alike each sums its part, else all sum
        the whole (`mechanisms.sharding.layer_holders.RecutSum`)."""
        count, first_stage = len(pipelines), [0, *itertools.accumulate(len(one.stages) for one in pipelines)]
        found = [0.0] * first_stage[-1]
        cuts = [[0, *itertools.accumulate(stage.layers for stage in one.stages)] for one in pipelines]
        ends = sorted({end for one in cuts for end in one})
        for first, last in itertools.pairwise(ends if count > 1 else ()):
            numbers = [bisect.bisect_left(at, last) - 1 for at in cuts]
            groups = [one.stages[n].group for one, n in zip(pipelines, numbers, strict=True)]
            alike = len({one.tensor for one in groups}) == 1
            parts, ranks = (groups[0].tensor, count) if alike else (1, sum(one.tensor for one in groups))
            size = (last - first) * self.request.layer_parameters
            size += self.request.outside / max(1, self.request.tables) * ((first == 0) + (last == self.layers))
            moved = 2 * (ranks - 1) / ranks * size * self._storage / parts
            if seconds:
                link = self.link([one.kind for one in groups])
                rate = link.bandwidth * (link.share or 1.0 if link.measured else 1.0)
                moved = link.launch + 2 * (ranks - 1) * link.latency + moved / rate
            for start, number in zip(first_stage, numbers, strict=False):
                found[start + number] += moved
        return found

    @cached_property
    def _storage(self) -> float:
        """Bytes of a gradient."""
        return float(np.max(self.inputs(Group(0)).storage.grads))

    def optimizer(self, group: Group, slot: Slot, layers: int) -> float:
        """Seconds of a stage's optimizer step."""
        key = group, slot.first, slot.last, layers
        if key not in self._steps:
            self._steps[key] = float(step_time.optimizer(self.inputs(group, slot.stages, layers, self.outside(slot))))
        return self._steps[key]

    def step(self, pipelines: float, sync: float) -> float:
        """See `StageCosts.step`."""
        return pipelines + sync


def _name(place: Place, machines: int) -> str:
    """What messages call the devices of a class."""
    table = place.table
    return f"{table.device.name} of {table.name or f'machine {place.node}'}" if machines > 1 else table.device.name


def _numbered(pipelines: Sequence[SolvedPipeline]) -> Iterator[tuple[SolvedPipeline, int, SolvedStage]]:
    """(pipeline, number of the stage, stage) of all of them."""
    for one in pipelines:
        for number, stage in enumerate(one.stages):
            yield one, number, stage


# --- the plan -----------------------------------------------------------------------------------------------------


def asked(request: Request, cluster: Cluster) -> str:
    """Why unequal pipelines are not considered; empty: they are."""
    pin = request.pin
    devices = [place.table.device for place in cluster.devices()]
    alike = cluster.same_speed and len({one.memory for one in devices}) == 1
    if pin.pipelines == "equal" or len(devices) < 2:
        return "equal pipelines were asked for"
    if pin.pipelines is None and len(devices) > MOST:
        return f"there are more than {MOST} devices"
    if pin.pipelines is None and (alike or any(getattr(pin, name) is not None for name in OTHER_PINS)):
        return "devices are alike, or a layout of equal pipelines is pinned"
    if request.width == 0 or request.layers < 2:
        return "nothing is known of the model's layers"
    if request.offload != RESIDENT or request.storage is not None or request.redundancy > 1 or request.outer:
        return "states lie elsewhere, or are not Espalier's own"
    if (request.max_devices or len(devices)) < len(devices):
        return f"plan.max_devices = {request.max_devices}"
    if pin.ranks is not None and pin.ranks != len(devices):
        return f"plan.pin.ranks = {pin.ranks}, and there are {len(devices)} devices"
    return ""


def best(request: Request, cluster: Cluster) -> tuple[EngineCosts, UnequalLayout] | None:
    """The fastest unequal pipelines over sizes of micro-batches, tensor degrees and recomputation; None: nothing
    fits."""
    pin, found = request.pin, None
    for recompute in (request.recompute,) if request.recompute is not None else ("none", "block"):
        for size, tensor in itertools.product(_sizes(request), _degrees(request, cluster)):
            costs = EngineCosts(request, cluster, size, tensor, recompute)
            if not costs.classes:
                continue
            try:
                made = flashflex.place(costs.classes, costs, whole=pin.ranks is not None)
            except UserError:
                continue
            if found is None or made.seconds < found[1].seconds:
                found = costs, made
        if found is not None:
            return found
    return found


def _sizes(request: Request) -> list[int]:
    """Samples of a micro-batch: what is pinned, else divisors of the batch, the smallest first."""
    if request.pin.micro_batch is not None:
        return [request.pin.micro_batch] if request.global_batch % request.pin.micro_batch == 0 else []
    every = [size for size in range(1, request.global_batch // 2 + 1) if request.global_batch % size == 0]
    return (every or [request.global_batch])[:SIZES]


def _degrees(request: Request, cluster: Cluster) -> list[tuple[int, ...]]:
    """Ranks to a matrix, the same in all stages: what is pinned, else those that divide the heads and fit into a
    machine; then stages of any of them, where no parameter is in two of them (tied embeddings are)."""
    if request.pin.tp is not None:
        return [(request.pin.tp,)]
    most = max(table.devices for table in cluster.nodes) if gpus(cluster) else 1
    fitting = [n for n in flashflex.TENSOR if n <= most and request.heads % n == 0 and request.kv_heads % n == 0]
    alike: list[tuple[int, ...]] = [(one,) for one in fitting]
    return [*alike, tuple(fitting)] if len(fitting) > 1 and request.tables > 1 else alike


def plan_of(costs: EngineCosts, layout: UnequalLayout, spread: float = 0.0) -> Plan:
    """The plan of a layout. Ranks are numbered in the order of the cluster's devices."""
    request = costs.request
    seated: list[tuple[Place, int, int, int]] = []  # device, pipeline, stage, place in the stage
    free = [iter(places) for places in costs.places]
    for pipeline, one in enumerate(layout.pipelines):
        for number, stage in enumerate(one.stages):
            seated += [(next(free[stage.group.kind]), pipeline, number, at) for at in range(stage.group.tensor)]
    seated.sort(key=lambda one: one[0].rank)
    ends = [0, *itertools.accumulate(costs.size * one.micro_batches for one in layout.pipelines)]
    kinds = {place.rank: kind for kind, places in enumerate(costs.places) for place in places}
    ranks = tuple(
        Rank(
            device="cpu" if place.table.device.kind == "cpu" else f"cuda:{place.slot}",
            node=place.node,
            threads=costs.threads(kinds[place.rank]),
            share=(ends[pipeline], ends[pipeline + 1]),
        )
        for place, pipeline, _, _ in seated
    )
    stages = []
    for pipeline, one in enumerate(layout.pipelines):
        cuts = [0, *itertools.accumulate(stage.layers for stage in one.stages)]
        for number, stage in enumerate(one.stages):
            held = [rank for rank, seat in enumerate(seated) if seat[1:3] == (pipeline, number)]
            stages.append(
                Stage(
                    pipeline=pipeline,
                    ranks=tuple(held),
                    layers=(cuts[number], cuts[number + 1]),
                    micro_batches=one.micro_batches,
                    tensor=stage.group.tensor,
                )
            )
    several = len(layout.pipelines) > 1
    return Plan(
        planner="flashflex",
        ranks=ranks,
        units=(Unit(whole=request.optimizer == "muon"),),
        stages=tuple(stages),
        exchanges=exchanges(request.crossings) if several else (),
        algorithm="megatron" if any(one.tensor > 1 for one in stages) else "data",
        schedule=request.pin.schedule or "1f1b",
        micro_batch=costs.size,
        recompute=costs.recompute,
        precision=request.precision,
        compile=request.compile,
        predicted=predicted(costs, layout, spread),
        why=tuple(reasons(costs, layout)),
    )


def predicted(costs: EngineCosts, layout: UnequalLayout, spread: float = 0.0) -> Predicted:
    """What a step should cost: the terms are those of the slowest stage of the slowest pipeline."""
    request, slowest = costs.request, max(layout.pipelines, key=lambda one: one.seconds)
    at = max(range(len(slowest.stages)), key=lambda n: slowest.stages[n].seconds)
    stage, count = slowest.stages[at], slowest.micro_batches
    between = [costs.send(*pair) for pair in itertools.pairwise(one.group for one in slowest.stages)]
    own = between[at] if costs.awaits_sends and at < len(between) else 0.0
    computing, sends = stage.seconds - own, count * own if costs.awaits_sends else sum(between)
    optimizer = min(layout.sync, costs.optimizer(stage.group, Slot(at, len(slowest.stages)), stage.layers))
    terms = {
        "forward": count * computing / 3,
        "backward": count * computing * 2 / 3,
        "send": sends,
        "pipeline": slowest.seconds - count * computing - sends,
        "all_reduce": layout.sync - optimizer,
        "optimizer": optimizer,
    }
    tokens = request.global_batch * request.tokens_per_sample
    used = [place.table.device for kind, count in _used(layout).items() for place in costs.places[kind][:count]]
    fullest, limit = _fullest(costs, layout)
    return Predicted(
        step_seconds=layout.seconds,
        tokens_per_second=tokens / layout.seconds,
        tokens_per_second_per_device=tokens / layout.seconds / len(used),
        mfu=request.model_flops / layout.seconds / sum(device_model.peak(one, request.precision) for one in used),
        terms=terms,
        memory_bytes={**fullest, "peak": sum(fullest.values())},
        memory_limit=limit,
        sent_bytes=_sent(costs, layout),
        spread=spread,
        sources={"forward": "a third of a stage's seconds by the planner's costs; FlashFlex (arXiv 2409.01143)"},
    )


def _used(layout: UnequalLayout) -> dict[int, int]:
    found: dict[int, int] = {}
    for one in layout.pipelines:
        for kind, count in one.devices.items():
            found[kind] = found.get(kind, 0) + count
    return found


def _fullest(costs: EngineCosts, layout: UnequalLayout) -> tuple[dict[str, float], float]:
    """Bytes by kind of the stage that is nearest to its limit, and the limit."""
    every = [
        costs.held(stage.group, Slot(number, len(one.stages)), stage.layers)
        for one, number, stage in _numbered(layout.pipelines)
    ]
    held, limit = max(every, key=lambda one: float(sum(one[0].values())) / one[1])
    return {name: float(size) for name, size in held.items()}, limit


def _sent(costs: EngineCosts, layout: UnequalLayout) -> dict[str, float]:
    """Payload bytes of the rank that sends most of each class."""
    most = 0.0
    for one in layout.pipelines:
        groups = [stage.group for stage in one.stages]
        between = [costs.message_bytes(*pair) for pair in itertools.pairwise(groups)]
        most = max(most, *(one.micro_batches * sum(pair) for pair in itertools.pairwise((0.0, *between, 0.0))))
    found = {"gradients": max(costs.gradients(layout.pipelines, seconds=False))}
    return found | ({"activations": most} if most else {})


# --- reasons ------------------------------------------------------------------------------------------------------


def reasons(costs: EngineCosts, layout: UnequalLayout) -> list[str]:
    """Why these pipelines, in sentences."""
    several = units.plural(len(layout.pipelines), "pipeline")
    said = [f"Devices differ, so layers and samples go by speed: {several}, the best of {layout.priced} priced."]
    for number, one in enumerate(layout.pipelines):
        held = ", ".join(
            f"{stage.layers} on {f'{stage.group.tensor} x ' * (stage.group.tensor > 1)}"
            f"{costs.classes[stage.group.kind].name}"
            for stage in one.stages
        )
        said.append(
            f"Pipeline {number} has layers {held}, and {one.micro_batches * costs.size} samples of a step: "
            f"{units.show_seconds(one.seconds)}."
        )
    for kind, count in layout.unused.items():
        there, name = costs.classes[kind].devices, costs.classes[kind].name
        what = f"{name} is" if there == 1 else f"{count} of {there} {name} are"
        if kind in layout.with_unused:
            before, after = (_fine(one) for one in (layout.with_unused[kind], layout.seconds))
            pronoun = "it" if count == 1 else "them"
            said.append(f"{what} left out: with {pronoun} a step takes {before}, without {after}.")
        else:
            said.append(f"{what} left out: no pipeline that uses {'it' if count == 1 else 'them'} holds the model.")
    return said


def _fine(seconds: float) -> str:
    """Seconds with two places, as both of a comparison could read alike with one."""
    return f"{seconds:.2f} s" if 0.9995 <= seconds < 59.95 else units.show_seconds(seconds)
