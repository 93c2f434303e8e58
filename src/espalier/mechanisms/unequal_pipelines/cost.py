"""Costs of stages on the devices of a cluster, for the search of unequal pipelines. No torch.

Seconds of a layer, of an exchange and bytes held are those of any plan, for each kind of device. Stages may have
unequal numbers of ranks to a matrix; where those of a layer differ between pipelines, its ranks sum whole gradients.
Sums of gradients count in full, as nothing is known of what hides them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from espalier.machine.cluster import Cluster, Link, Place
from espalier.mechanisms.unequal_pipelines.pipeline_solver import (
    DeviceClass,
    Group,
    Slot,
    SolvedPipeline,
    SolvedStage,
)
from espalier.plan import collective_time, cost_inputs, device_model, memory_model, step_time
from espalier.plan.collective_time import DeviceGroup, gpus
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.layouts import Layouts
from espalier.plan.request import Request
from espalier.recipe.cost import Number, Terms

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class StageInputs(CostInputs):
    """What a price is of, for a stage of so many layers, and parameters outside the layers."""

    chooses_chunks: ClassVar[bool] = False
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
        self.layers, self.micro_batches = request.profile.layers, request.profile.global_batch // size
        self.awaits_sends = request.refuses is None
        """As others begin 1F1B; `train` has more micro-batches on their way where links are slow."""
        known: dict[tuple[int, int], list[Place]] = {}
        cuda = bool(gpus(cluster))
        for place in cluster.devices():
            if (place.table.device.kind == "cuda") == cuda and device_model.has(place.table.device, request.precision):
                known.setdefault((place.node, id(place.table)), []).append(place)
        self.places = list(known.values())
        """The devices of each class."""
        first: dict[int, int] = {}
        self._alike = [first.setdefault(id(places[0].table), kind) for kind, places in enumerate(self.places)]
        """Of each class the first with equal machines: they cost the same."""
        self.classes = [
            DeviceClass(
                _name(places[0], cluster.machines), places[0].node, len(places), None if cluster.pairs else like
            )
            for places, like in zip(self.places, self._alike, strict=True)
        ]
        self._layers: dict[Group, tuple[float, float]] = {}
        self._most: dict[tuple[Group, bool, bool], NDArray[Any]] = {}
        """By how many stages are left in the pipeline, less one."""
        self._links: dict[frozenset[int], Link] = {}
        self._steps: dict[tuple[Group, bool, bool, int], float] = {}

    def degrees(self, kind: int) -> Sequence[int]:
        return tuple(degree for degree in self.tensor if degree <= self.classes[kind].devices)

    def inputs(self, group: Group, pp: Number = 2, layers: Number = 1, outside: float = 0.0) -> StageInputs:
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
        group = group._replace(kind=self._alike[group.kind])
        if group not in self._layers:
            layer, stage = step_time.passes(step := self.inputs(group), self.size)
            self._layers[group] = float(layer.total), float(sum(stage.values()) - step.stage_layers * layer.total)
        return self._layers[group]

    def layer(self, group: Group) -> float:
        return self._seconds(group)[0]

    def extra(self, group: Group, slot: Slot) -> float:
        """See `StageCosts.extra`: embedding, head and loss count where the head is."""
        return self._seconds(group)[1] if slot.last else 0.0

    def message_bytes(self, group: Group, following: Group) -> float:
        """Of what a rank hands over for one micro-batch: its part of the stream, all of it to another degree."""
        request, parts = self.request, group.tensor if group.tensor == following.tensor else 1
        each = request.bytes_each if request.low else request.compute  # states are whole, so the stream keeps fp32
        return self.size * request.profile.tokens_per_sample * request.profile.width * each / parts

    def send(self, group: Group, following: Group) -> float:
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
        return request.profile.outside * min(1.0, (slot.first + slot.last) / max(1, request.profile.tables))

    def held(self, group: Group, slot: Slot, layers: Number, flying: Number | None = None) -> tuple[Terms, float]:
        """(bytes by kind, what a rank may hold) of a stage of so many layers. `flying`: micro-batches on their way, as
        many as stages are left in its pipeline; None: as `slot` has it."""
        stages = slot.stages if flying is None else flying + (not slot.first)
        inputs = self.inputs(group, stages, layers, self.outside(slot))
        anatomy = inputs.anatomy(self.size)
        flying = slot.stages - slot.number if flying is None else flying
        return (
            memory_model.stage(inputs, anatomy, flying, is_first=not slot.last or slot.first),
            cost_inputs.limit(inputs.kind, self.request),
        )

    def most_layers(self, group: Group, slot: Slot) -> int:
        group = group._replace(kind=self._alike[group.kind])
        key = group, slot.first, slot.last
        if key not in self._most:
            layers = np.arange(1, self.layers + 1)
            stage_bytes, limit = self.held(group, slot, layers, layers[:, None])
            self._most[key] = np.count_nonzero(sum(stage_bytes.values()) <= limit, axis=1)
        return int(self._most[key][slot.stages - slot.number - 1])

    def profile(self, seconds: Sequence[float]) -> tuple[float, float]:
        """See `StageCosts.profile`: 1F1B, as long as no pipeline has fewer micro-batches than stages."""
        return sum(seconds) - max(seconds), max(seconds)

    def sync(self, pipelines: Sequence[SolvedPipeline]) -> float:
        """See `StageCosts.sync`: of the rank that spends most."""
        gradients = self.gradients(pipelines)
        return max(
            gradients[at] + self.optimizer(stage.group, slot, stage.layers)
            for at, (slot, stage) in enumerate(slots(pipelines))
        )

    def gradients(self, pipelines: Sequence[SolvedPipeline], seconds: bool = True) -> list[float]:
        """Seconds (or bytes) that each stage, pipeline by pipeline, spends on sums of gradients: over the pipelines,
        for each run of layers that the same stages hold. Of ranks that cut it alike each sums its part, else all sum
        the whole (`mechanisms.sharding.layer_holders.RecutSum`)."""
        count, first_stage = len(pipelines), [0, *itertools.accumulate(len(pipeline.stages) for pipeline in pipelines)]
        spent = [0.0] * first_stage[-1]
        cuts = [[0, *itertools.accumulate(stage.layers for stage in pipeline.stages)] for pipeline in pipelines]
        ends = sorted({end for cut in cuts for end in cut})
        for first, last in itertools.pairwise(ends if count > 1 else ()):
            numbers = [bisect.bisect_left(at, last) - 1 for at in cuts]
            groups = [pipeline.stages[n].group for pipeline, n in zip(pipelines, numbers, strict=True)]
            alike = len({group.tensor for group in groups}) == 1
            parts, ranks = (groups[0].tensor, count) if alike else (1, sum(group.tensor for group in groups))
            size = (last - first) * self.request.layer_parameters
            size += (
                self.request.profile.outside
                / max(1, self.request.profile.tables)
                * ((first == 0) + (last == self.layers))
            )
            moved = 2 * (ranks - 1) / ranks * size * self._storage / parts
            if seconds:
                link = self.link([group.kind for group in groups])
                rate = link.bandwidth * (link.share or 1.0 if link.measured else 1.0)
                moved = link.launch + 2 * (ranks - 1) * link.latency + moved / rate
            for start, number in zip(first_stage, numbers, strict=False):
                spent[start + number] += moved
        return spent

    @cached_property
    def _storage(self) -> float:
        """Bytes of a gradient."""
        return float(np.max(self.inputs(Group(0)).storage.grads))

    def optimizer(self, group: Group, slot: Slot, layers: int) -> float:
        """Seconds of a stage's optimizer step."""
        group = group._replace(kind=self._alike[group.kind])
        key = group, slot.first, slot.last, layers
        if key not in self._steps:
            self._steps[key] = float(step_time.optimizer(self.inputs(group, slot.stages, layers, self.outside(slot))))
        return self._steps[key]

    def step(self, pipelines: float, sync: float) -> float:
        return pipelines + sync


def _name(place: Place, machines: int) -> str:
    """What messages call the devices of a class."""
    table = place.table
    return f"{table.device.name} of {table.name or f'machine {place.node}'}" if machines > 1 else table.device.name


def slots(pipelines: Iterable[SolvedPipeline]) -> Iterator[tuple[Slot, SolvedStage]]:
    """The stages of all of them, and where each stands."""
    for pipeline in pipelines:
        for number, stage in enumerate(pipeline.stages):
            yield Slot(number, len(pipeline.stages)), stage
