"""Layouts in the JSON of FlashFlex's own code (`hetero_configs`, `layer_partitions`), priced, as plans. No torch.

The released scheduler and trainer (Relaxed-System-Lab/FlashFlex, README) exchange one object:

    {"hetero_configs": [[2, 1], [1]], "layer_partitions": [[12, 4], [16]], "devices_id": [[[0, 0], [1]], [[2]]]}

For each pipeline the ranks that share matrices in each stage, the layers of each stage, and the machine of each rank.
Their trainer takes `global_bsz` (samples of each pipeline) and `chunks` (its micro-batches) on the command line; here
they may stand in the file too. Without them each pipeline gets samples by its speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from espalier.machine.cluster import Cluster
from espalier.mechanisms.unequal_pipelines import pipeline_search as flashflex
from espalier.mechanisms.unequal_pipelines.cost import EngineCosts
from espalier.mechanisms.unequal_pipelines.pipeline_solver import (
    Group,
    SolvedPipeline,
    UnequalLayout,
    side_by_side,
)
from espalier.plan.request import Request
from espalier.recipe import serialization
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import parsing


class DoesNotFit(UserError):
    """A stage has more layers than its devices hold. Exit code 2."""


class Pipelines(msgspec.Struct, frozen=True):
    """The file. Raises UserError where its lists do not belong together.

    Attributes:
        hetero_configs: [pipeline][stage] ranks that share the stage's matrices.
        layer_partitions: [pipeline][stage] layers.
        devices_id: [pipeline][stage][rank] machines of the cluster, from 0; empty: devices in the cluster's order.
        global_bsz, chunks: [pipeline] samples of a step, and micro-batches; empty: by speed.
    """

    hetero_configs: tuple[tuple[int, ...], ...]
    layer_partitions: tuple[tuple[int, ...], ...]
    devices_id: tuple[tuple[tuple[int, ...], ...], ...] = ()
    global_bsz: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()

    def check(self, layers: int, samples: int, origin: str) -> None:
        """Raises UserError unless it says where each of so many layers and samples goes."""
        shape = [len(pipeline) for pipeline in self.hetero_configs]
        if not shape or min(shape) < 1 or min(map(min, self.hetero_configs)) < 1:
            raise UserError(f"{origin}: a pipeline has no stage, or a stage no rank.", do="one rank at least in each")
        if [len(partition) for partition in self.layer_partitions] != shape:
            raise UserError(
                f"{origin}: hetero_configs has pipelines of {_told(shape)} stages, layer_partitions of "
                f"{_told([len(partition) for partition in self.layer_partitions])}.",
                do="one number of layers for each stage",
            )
        for number, partition in enumerate(self.layer_partitions):
            if sum(partition) != layers or min(partition) < 1:
                raise UserError(
                    f"{origin}: the stages of pipeline {number} hold {_told(partition)} layers, and the model "
                    f"has {layers}.",
                    why="each layer is held once in each pipeline, and each stage holds one at least",
                    do=f"numbers above 0 whose sum is {layers}",
                )
        if self.devices_id and [[len(machines) for machines in stages] for stages in self.devices_id] != [
            list(pipeline) for pipeline in self.hetero_configs
        ]:
            raise UserError(f"{origin}: devices_id does not name one machine for each rank.", do="leave devices_id out")
        if len(self.global_bsz) not in (0, len(shape)) or len(self.chunks) not in (0, len(self.global_bsz)):
            raise UserError(
                f"{origin}: global_bsz and chunks have one number for each of {len(shape)} pipelines.",
                do="leave them out: samples go by speed",
            )
        if self.global_bsz and sum(self.global_bsz) != samples:
            raise UserError(
                f"{origin}: global_bsz has {sum(self.global_bsz)} samples, and a step has {samples}.",
                do="train.batch_tokens as many, or leave global_bsz out",
            )

    def size(self, origin: str) -> int | None:
        """Samples of a micro-batch; None: the file does not say. Raises UserError where pipelines differ in it."""
        if not self.chunks:
            return None
        sizes = sorted({samples / count for samples, count in zip(self.global_bsz, self.chunks, strict=True) if count})
        if len(sizes) != 1 or not sizes[0].is_integer():
            raise UserError(
                f"{origin}: micro-batches of {_told(sizes)} samples.",
                why="all pipelines have micro-batches of one size",
                do="chunks in proportion to global_bsz",
            )
        return int(sizes[0])


def read(path: str) -> Pipelines:
    """The file at `path`. Raises UserError where it is none."""
    if not path.endswith(".json"):
        raise UserError(
            f"plan.pin.pipelines = {path!r} is not possible.",
            do="equal, unequal, or a .json file of FlashFlex's (hetero_configs, layer_partitions)",
        )
    with parsing(
        path, 'hetero_configs and layer_partitions, as FlashFlex writes them; or plan.pin.pipelines="unequal"'
    ):
        return serialization.from_json(Path(path).read_bytes(), Pipelines)


def layout(file: Pipelines, request: Request, cluster: Cluster, origin: str) -> tuple[EngineCosts, UnequalLayout]:
    """The file's pipelines on the devices of a cluster, as the planner prices them. Raises UserError where they do not
    fit there."""
    file.check(request.profile.layers, request.profile.global_batch, origin)
    size = request.pin.micro_batch or file.size(origin) or 1
    degrees = sorted({tensor for pipeline in file.hetero_configs for tensor in pipeline})
    costs = EngineCosts(request, cluster, size, degrees, request.recompute or "none")
    try:
        pipelines = _priced(file, costs, origin)
    except DoesNotFit:
        if request.recompute is not None:
            raise
        costs = EngineCosts(request, cluster, size, degrees, "block")
        pipelines = _priced(file, costs, origin)
    shares = [-(-samples // costs.size) for samples in file.global_bsz]
    made = side_by_side(pipelines, costs.classes, costs, shares)
    if made is None:
        raise UserError(
            f"{len(pipelines)} pipelines cannot share {costs.micro_batches} micro-batches.",
            do="a larger train.batch_tokens, or a smaller plan.pin.micro_batch",
        )
    return costs, replace(made, priced=len(pipelines))


def _priced(file: Pipelines, costs: EngineCosts, origin: str) -> list[SolvedPipeline]:
    """Raises DoesNotFit where a stage has more layers than its devices hold."""
    priced: list[SolvedPipeline] = []
    for order, layers in zip(_groups(file, costs, origin), file.layer_partitions, strict=True):
        rates = flashflex.stage_rates(order, costs)
        for number, (group, count, rate) in enumerate(zip(order, layers, rates, strict=True)):
            if count > rate.most:
                raise DoesNotFit(
                    f"{origin}: stage {number} of pipeline {len(priced)} has {count} layers, and "
                    f"{costs.classes[group.kind].name} holds {rate.most}.",
                    do=f"{rate.most} layers there and more on others" if rate.most else "that stage on another device",
                )
        priced.append(flashflex.pipeline_of(order, layers, rates, costs))
    return priced


def _groups(file: Pipelines, costs: EngineCosts, origin: str) -> list[list[Group]]:
    """The class of each stage: that of the machine which the file names, else the next one with devices left."""
    left, groups = [device_class.devices for device_class in costs.classes], list[list[Group]]()
    for pipeline, degrees in enumerate(file.hetero_configs):
        groups.append([])
        for stage, tensor in enumerate(degrees):
            machines = (
                set(file.devices_id[pipeline][stage])
                if file.devices_id
                else {device_class.machine for device_class in costs.classes}
            )
            kinds = [
                kind
                for kind, device_class in enumerate(costs.classes)
                if device_class.machine in machines and left[kind] >= tensor
            ]
            if not kinds or (file.devices_id and len(machines) > 1):
                where = f"machine {_told(sorted(machines))}" if file.devices_id else "any machine"
                raise UserError(
                    f"{origin}: stage {stage} of pipeline {pipeline} needs {tensor} devices of {where}, which are not "
                    "there.",
                    why="the ranks of a stage are equal devices of one machine",
                    do="espalier plan --cluster FILE with these machines, or fewer ranks in hetero_configs",
                )
            left[kinds[0]] -= tensor
            groups[-1].append(Group(kinds[0], tensor))
    return groups


def _told(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
