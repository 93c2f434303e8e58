"""Unequal pipelines for unequal devices: FlashFlex's search (`pipeline_search`) with the planner's costs (`cost`), as a
plan. No torch."""

from __future__ import annotations

import bisect
import itertools
import math

from espalier.machine.cluster import Cluster, Place
from espalier.mechanisms.unequal_pipelines import pipeline_search as flashflex
from espalier.mechanisms.unequal_pipelines.cost import EngineCosts, slots
from espalier.mechanisms.unequal_pipelines.pipeline_solver import (
    Group,
    Slot,
    SolvedPipeline,
    UnequalLayout,
)
from espalier.plan import device_model
from espalier.plan.base import RESIDENT, Plan, Predicted, Rank, Stage, Unit
from espalier.plan.collective_time import gpus
from espalier.plan.request import Request, exchanges
from espalier.recipe import units
from espalier.recipe.errors import UserError

MOST = 64
"""Devices that are searched at once, which takes seconds; of more a part, in which each kind has its share."""
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


def asked(request: Request, cluster: Cluster) -> str:
    """Why unequal pipelines are not considered; empty: they are."""
    pin = request.pin
    devices = [place.table.device for place in cluster.devices()]
    alike = cluster.same_speed and len({device.memory for device in devices}) == 1
    if pin.pipelines == "equal" or len(devices) < 2:
        return "equal pipelines were asked for"
    if pin.pipelines is None and len(devices) > MOST and equal_parts(request, cluster) == 1:
        return f"there are more than {MOST} devices, in no equal parts"
    if pin.pipelines is None and (alike or any(getattr(pin, name) is not None for name in OTHER_PINS)):
        return "devices are alike, or a layout of equal pipelines is pinned"
    if request.profile.width == 0 or request.profile.layers < 2:
        return "nothing is known of the model's layers"
    options = request.recipe.plan
    if request.offload != RESIDENT or request.system.storage is not None or options.redundancy > 1 or request.outer:
        return "states lie elsewhere, or are not Espalier's own"
    if (options.max_devices or len(devices)) < len(devices):
        return f"plan.max_devices = {options.max_devices}"
    if pin.ranks is not None and pin.ranks != len(devices):
        return f"plan.pin.ranks = {pin.ranks}, and there are {len(devices)} devices"
    return ""


def equal_parts(request: Request, cluster: Cluster) -> int:
    """Into how many equal parts of at most `MOST` devices the machines of each kind and the batch can be divided; 1:
    there are no more, or they cannot."""
    devices, machines = len(cluster.devices()), math.gcd(*(table.count for table in cluster.nodes))
    fitting = (count for count in range(1, machines + 1) if machines % count == 0 and devices <= count * MOST)
    count = 1 if cluster.pairs else next(fitting, 1)
    return count if request.profile.global_batch % count == 0 else 1


def _placed(costs: EngineCosts, parts: int) -> UnequalLayout | None:
    """The fastest pipelines, found on the first of `parts` equal parts and laid over all of them alike (no search sees
    more than `MOST` devices then); None: nothing fits."""
    request, tables, whole = costs.request, costs.cluster.nodes, costs.request.pin.ranks is not None
    try:
        if parts == 1:
            return flashflex.place(costs.classes, costs, whole)
        shares = [table.count // parts for table in tables]
        part = costs.cluster.changed(
            nodes=tuple(table.changed(count=share) for table, share in zip(tables, shares, strict=True))
        )
        asked = request.changed(global_batch=request.profile.global_batch // parts)
        first = EngineCosts(asked, part, costs.size, costs.tensor, costs.recompute)
        made = flashflex.place(first.classes, first, whole)
    except UserError:
        return None
    # A machine of the part, and the same in the other parts: those of a kind are numbered one after the other.
    starts = [0, *itertools.accumulate(shares)]
    steps = [share for share in shares for _ in range(share)]
    kinds = {device_class.machine: kind for kind, device_class in enumerate(costs.classes)}

    def counts(pipeline: SolvedPipeline, copy: int) -> tuple[int, ...]:
        used = [0] * len(costs.classes)
        for kind, count in pipeline.devices.items():
            machine = first.classes[kind].machine
            before = starts[bisect.bisect_right(starts, machine) - 1]
            used[kinds[before * parts + copy * steps[machine] + machine - before]] = count
        return tuple(used)

    laid = [counts(pipeline, copy) for copy in range(parts) for pipeline in made.pipelines]
    return flashflex.beside_each_other(costs.classes, costs, laid, made)


def best(request: Request, cluster: Cluster) -> tuple[EngineCosts, UnequalLayout] | None:
    """The fastest unequal pipelines over sizes of micro-batches, tensor degrees and recomputation; None: nothing
    fits."""
    fastest = None
    for recompute in (request.recompute,) if request.recompute is not None else ("none", "block"):
        for size, tensor in itertools.product(_sizes(request), _degrees(request, cluster)):
            costs = EngineCosts(request, cluster, size, tensor, recompute)
            made = _placed(costs, equal_parts(request, cluster)) if costs.classes else None
            if made is not None and (fastest is None or made.seconds < fastest[1].seconds):
                fastest = costs, made
        if fastest is not None:
            return fastest
    return fastest


def _sizes(request: Request) -> list[int]:
    """Samples of a micro-batch: what is pinned, else divisors of the batch, the smallest first."""
    batch = request.profile.global_batch
    if request.pin.micro_batch is not None:
        return [request.pin.micro_batch] if batch % request.pin.micro_batch == 0 else []
    every = [size for size in range(1, batch // 2 + 1) if batch % size == 0]
    return (every or [batch])[:SIZES]


def _degrees(request: Request, cluster: Cluster) -> list[tuple[int, ...]]:
    """Ranks to a matrix, the same in all stages: what is pinned, else those that divide the heads and fit into a
    machine; then stages of any of them, where no parameter is in two of them (tied embeddings are)."""
    if request.pin.tp is not None:
        return [(request.pin.tp,)]
    most = max(table.devices for table in cluster.nodes) if gpus(cluster) else 1
    profile = request.profile
    fitting = [n for n in flashflex.TENSOR if n <= most and profile.heads % n == 0 and profile.kv_heads % n == 0]
    alike: list[tuple[int, ...]] = [(degree,) for degree in fitting]
    return [*alike, tuple(fitting)] if len(fitting) > 1 and profile.tables > 1 else alike


def plan_of(costs: EngineCosts, layout: UnequalLayout, spread: float = 0.0) -> Plan:
    """The plan of a layout. Ranks are numbered in the order of the cluster's devices."""
    request = costs.request
    seated: list[tuple[Place, int, int, int]] = []  # device, pipeline, stage, place in the stage
    free = [iter(places) for places in costs.places]
    for pipeline, solved in enumerate(layout.pipelines):
        for number, stage in enumerate(solved.stages):
            seated += [(next(free[stage.group.kind]), pipeline, number, at) for at in range(stage.group.tensor)]
    seated.sort(key=lambda seat: seat[0].rank)
    ends = [0, *itertools.accumulate(costs.size * solved.micro_batches for solved in layout.pipelines)]
    kinds = {place.rank: kind for kind, places in enumerate(costs.places) for place in places}
    ranks = tuple(
        Rank(
            device=place.device_name,
            node=place.node,
            threads=costs.threads(kinds[place.rank]),
            share=(ends[pipeline], ends[pipeline + 1]),
        )
        for place, pipeline, _, _ in seated
    )
    stages = []
    for pipeline, solved in enumerate(layout.pipelines):
        cuts = [0, *itertools.accumulate(stage.layers for stage in solved.stages)]
        for number, stage in enumerate(solved.stages):
            stage_ranks = [rank for rank, seat in enumerate(seated) if seat[1:3] == (pipeline, number)]
            stages.append(
                Stage(
                    pipeline=pipeline,
                    ranks=tuple(stage_ranks),
                    layers=(cuts[number], cuts[number + 1]),
                    micro_batches=solved.micro_batches,
                    tensor=stage.group.tensor,
                )
            )
    several = len(layout.pipelines) > 1
    return Plan(
        planner="flashflex",
        ranks=ranks,
        units=(Unit(whole=request.muon),),
        stages=tuple(stages),
        exchanges=exchanges(request.crossings) if several else (),
        algorithm="megatron" if any(stage.tensor > 1 for stage in stages) else "data",
        schedule=request.pin.schedule or "1f1b",
        micro_batch=costs.size,
        recompute=costs.recompute,
        precision=request.precision,
        compile=request.recipe.train.compile,
        predicted=predicted(costs, layout, spread),
        why=tuple(reasons(costs, layout)),
    )


def predicted(costs: EngineCosts, layout: UnequalLayout, spread: float = 0.0) -> Predicted:
    """What a step should cost: the terms are those of the slowest stage of the slowest pipeline."""
    request, slowest = costs.request, max(layout.pipelines, key=lambda pipeline: pipeline.seconds)
    at = max(range(len(slowest.stages)), key=lambda n: slowest.stages[n].seconds)
    stage, count = slowest.stages[at], slowest.micro_batches
    between = [costs.send(*pair) for pair in itertools.pairwise(stage.group for stage in slowest.stages)]
    sending = between[at] if costs.awaits_sends and at < len(between) else 0.0
    computing, sends = stage.seconds - sending, count * sending if costs.awaits_sends else sum(between)
    optimizer = min(layout.sync, costs.optimizer(stage.group, Slot(at, len(slowest.stages)), stage.layers))
    terms = {
        "forward": count * computing / 3,
        "backward": count * computing * 2 / 3,
        "send": sends,
        "pipeline": slowest.seconds - count * computing - sends,
        "all_reduce": layout.sync - optimizer,
        "optimizer": optimizer,
    }
    tokens = request.profile.global_batch * request.profile.tokens_per_sample
    used = [place.table.device for kind, count in layout.devices.items() for place in costs.places[kind][:count]]
    fullest, limit = _fullest(costs, layout)
    return Predicted(
        step_seconds=layout.seconds,
        tokens_per_second=tokens / layout.seconds,
        tokens_per_second_per_device=tokens / layout.seconds / len(used),
        mfu=request.model_flops / layout.seconds / sum(device_model.peak(device, request.precision) for device in used),
        terms=terms,
        memory_bytes={**fullest, "peak": sum(fullest.values())},
        memory_limit=limit,
        sent_bytes=_sent(costs, layout),
        spread=spread,
        sources={"forward": "a third of a stage's seconds by the planner's costs; FlashFlex (arXiv 2409.01143)"},
    )


def _fullest(costs: EngineCosts, layout: UnequalLayout) -> tuple[dict[str, float], float]:
    """Bytes by kind of the stage that is nearest to its limit, and the limit."""
    every = [costs.held(stage.group, slot, stage.layers) for slot, stage in slots(layout.pipelines)]
    sizes, limit = max(every, key=lambda pair: float(sum(pair[0].values())) / pair[1])
    return {name: float(size) for name, size in sizes.items()}, limit


def _sent(costs: EngineCosts, layout: UnequalLayout) -> dict[str, float]:
    """Payload bytes of the rank that sends most of each class."""
    most = 0.0
    for pipeline in layout.pipelines:
        groups = [stage.group for stage in pipeline.stages]
        between = [costs.message_bytes(*pair) for pair in itertools.pairwise(groups)]
        most = max(most, *(pipeline.micro_batches * sum(pair) for pair in itertools.pairwise((0.0, *between, 0.0))))
    sent = {"gradients": max(costs.gradients(layout.pipelines, seconds=False))}
    return sent | ({"activations": most} if most else {})


# --- reasons ------------------------------------------------------------------------------------------------------


def reasons(costs: EngineCosts, layout: UnequalLayout) -> list[str]:
    """Why these pipelines, in sentences."""
    several = units.plural(len(layout.pipelines), "pipeline")
    sentences = [f"Devices differ, so layers and samples go by speed: {several}, the best of {layout.priced} priced."]
    shapes = set()
    for number, pipeline in enumerate(layout.pipelines):
        shape = tuple((stage.layers, _alike(costs, stage.group)) for stage in pipeline.stages)
        if (shape, pipeline.micro_batches) in shapes:
            continue
        shapes.add((shape, pipeline.micro_batches))
        samples = pipeline.micro_batches * costs.size
        sentences.append(
            f"Pipeline {number} has layers {_stages(costs, pipeline)}, and {samples} samples of a step: "
            f"{units.show_seconds(pipeline.seconds)}."
        )
    if others := len(layout.pipelines) - len(shapes):
        sentences.append(f"{units.plural(others, 'other pipeline')} of the same stages on other machines.")
    for kind, count in layout.unused.items():
        there, name = costs.classes[kind].devices, costs.classes[kind].name
        what = f"{name} is" if there == 1 else f"{count} of {there} {name} are"
        if kind in layout.with_unused:
            before, after = (_fine(seconds) for seconds in (layout.with_unused[kind], layout.seconds))
            pronoun = "it" if count == 1 else "them"
            sentences.append(f"{what} left out: with {pronoun} a step takes {before}, without {after}.")
        else:
            sentences.append(
                f"{what} left out: no pipeline that uses {'it' if count == 1 else 'them'} holds the model."
            )
    return sentences


def _alike(costs: EngineCosts, group: Group) -> Group:
    """The same of the first class that costs as much."""
    first = costs.classes[group.kind].like
    return group if first is None else group._replace(kind=first)


def _stages(costs: EngineCosts, pipeline: SolvedPipeline) -> str:
    """Layers of each stage and what it is on, those in a row that are alike together."""
    words = []
    for (layers, group), run in itertools.groupby((stage.layers, stage.group) for stage in pipeline.stages):
        count, place = len(list(run)), costs.classes[group.kind].name
        devices = f"{group.tensor} x {place}" if group.tensor > 1 else place
        words.append(f"{count} times {layers} on {devices}" if count > 1 else f"{layers} on {devices}")
    return ", ".join(words)


def _fine(seconds: float) -> str:
    """Seconds with two places, as both of a comparison could read alike with one."""
    return f"{seconds:.2f} s" if 0.9995 <= seconds < 59.95 else units.show_seconds(seconds)
