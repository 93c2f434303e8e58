"""Waves of a recipe with several tasks: its parts as MetaOps on the devices of a cluster, and the plan of their ranks.

The seconds of a part on n devices are those of its share of the batch: `T(n) = a + b / n` fitted to what was measured
on one thread, else from its operations and the device's speed. No torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from espalier.mechanisms.task_waves.metaops import MetaOp, fit
from espalier.mechanisms.task_waves.state import TaskWavesState, WaveSlice, crossings, rows
from espalier.mechanisms.task_waves.wave_placement import Devices, exchange, holders
from espalier.mechanisms.task_waves.wave_search import Method, WavePlan, simulate, waves
from espalier.mechanisms.task_waves.wave_solver import MetaOpSlice
from espalier.plan import device_model, plan_summary
from espalier.plan.axes.pipeline import NESTED_IN_FLIGHT
from espalier.plan.base import Plan, Predicted, Rank
from espalier.recipe import EveryStep, units
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from espalier.machine.cluster import Cluster, Place
    from espalier.plan.request import Request
    from espalier.recipe.cost import PartCost

NESTED = (1, 4, 8, 16, 32, 64)
"""Micro-batches of each task that are tried, the first with which waves fit into memory: nested passes keep two."""
NAMED = 8
"""Waves that the reasons of a plan name, each."""


def ranks_of(request: Request, cluster: Cluster) -> int:
    """How many ranks run the parts: as pinned, else one for each GPU or machine."""
    places = [place for place in cluster.devices() if place.table.device.kind == cluster.devices()[0].table.device.kind]
    most = request.recipe.plan.max_devices or len(places)
    return request.pin.ranks or min(most, len(places))


def alone(request: Request, cluster: Cluster) -> tuple[Request, Cluster]:
    """The request for one rank of the first machine that runs all parts: its optimizer step is that of a wave plan
    without waves. It need not fit into memory: a rank of a wave plan holds its slices only."""
    pin = request.pin.changed(ranks=1, offload=request.pin.offload or "none")
    first = cluster.changed(nodes=cluster.nodes[:1], pairs=())
    return request.changed(facts={}, sync=EveryStep(), pin=pin), first


def parts_of(request: Request) -> tuple[PartCost, ...]:
    """Of the tasks, what ranks can run apart."""
    return request.profile.facts["task_waves"]


def with_waves(
    plan: Plan,
    request: Request,
    cluster: Cluster,
    method: Method | None = None,
    seats: Sequence[tuple[Place, float]] = (),
) -> Plan:
    """The plan of one rank as one of waves over the ranks of `request`, where there are several.

    Args:
        seats: where the ranks sit, and how many times as slow as its seat each has shown to be; empty: machine by
            machine, as planned.

    Raises:
        UserError: there are more ranks than cores, or no waves fit into memory.
    """
    count = ranks_of(request, cluster)
    if count == 1:
        return plan
    request = request.changed(precision=plan.precision)
    slower, places = [slower for _, slower in seats], [place for place, _ in seats] or _seats(cluster, count)
    limit = plan.predicted.memory_limit if plan.predicted is not None else float("inf")
    limit *= min(map(_memory, places)) / _memory(first_seat(cluster))
    fixed = plan.predicted.memory_bytes.get("runtime", 0.0) if plan.predicted is not None else 0.0
    devices = devices_of(request, cluster, places, slower, limit - fixed)
    nested, metaops, solved = _fitting(request, devices, first_seat(cluster), method)
    made = _waves(solved, parts_of(request))
    ranks = tuple(
        Rank(share=(0, 1), device=place.device_name, node=place.node, threads=request.pin.threads or 1)
        for place in places
    )
    reasons, alone = _reasons(solved, parts_of(request), count), plan_summary.sentences(plan, cluster)  # of one rank
    if nested > 1:
        reasons += (
            f"The passes of {nested} micro-batches of each task are nested, as the activations of whole batches do not "
            "fit; a task whose head needs its whole batch is not divided.",
        )
    others = (line for line in plan.why if line not in alone and not line.startswith("It is the best of"))
    changed = plan.with_state(TaskWavesState(waves=made, nested=nested)).changed(
        ranks=ranks, executable=True, missing="", runners_up=(), why=(*reasons, *others)
    )
    if plan.predicted is None:
        return changed
    traffic = _traffic(changed, parts_of(request), holders(metaops, solved.waves))
    predicted = _predicted(plan.predicted, solved, traffic, fixed, request)
    return changed.changed(predicted=predicted.changed(memory_limit=limit))


def devices_of(
    request: Request, cluster: Cluster, seats: Sequence[Place], shown: Sequence[float], memory: float = math.inf
) -> Devices:
    """The devices of ranks that sit at `seats` and have `shown` to be so many times as slow, of `memory` bytes each."""
    slower = _slower(seats, request, first_seat(cluster))
    if any(factor != 1 for factor in shown):
        slower = tuple(foreseen * factor for foreseen, factor in zip(slower or (1.0,) * len(seats), shown, strict=True))
    return Devices(tuple(place.node for place in seats), memory, *_seconds_per_byte(cluster, seats), slower)


def seconds(plan: Plan, request: Request, seat: Place, devices: Devices) -> float:
    """Of the waves of `plan`, and of its sums of gradients, on other devices than it was made for; of one rank of all
    parts. `seat`: whose seconds those of parts are."""
    count, parts = len(devices.nodes), parts_of(request)
    state = plan.state(TaskWavesState)
    metaops = [_metaop(part, seat, request, count, state.nested) for part in parts]
    if not state.waves:
        return sum(metaop.operators * metaop.curve(1) for metaop in metaops) * devices.slowest((0,))
    planned = [tuple(map(_slice, wave)) for wave in state.waves]
    ends = (end for _, end in simulate(metaops, planned, devices))
    return max(ends, default=0.0) + exchange(metaops, planned, devices)


def _slice(part: WaveSlice) -> MetaOpSlice:
    return MetaOpSlice(f"{part.task}.{part.node}", part.first, part.last - part.first, len(part.ranks), part.ranks)


def first_seat(cluster: Cluster) -> Place:
    """The place whose seconds those of parts are."""
    return _seats(cluster, 1)[0]


def _memory(place: Place) -> float:
    """Bytes of a device, or of its machine where that has them."""
    return float(place.table.device.memory or place.table.memory or 1)


def _fitting(
    request: Request, devices: Devices, seat: Place, method: Method | None
) -> tuple[int, list[MetaOp], WavePlan]:
    """The fewest nested micro-batches of `NESTED` with which waves fit into memory, their MetaOps, and the
    waves. Raises what `waves` raises where none do."""
    refused: UserError | None = None
    for nested in NESTED:
        try:
            metaops = [_metaop(part, seat, request, len(devices.nodes), nested) for part in parts_of(request)]
            return nested, metaops, waves(metaops, devices, method)
        except UserError as error:
            refused = error
    assert refused is not None
    raise refused


def _seats(cluster: Cluster, count: int) -> list[Place]:
    """A place for each rank: machine by machine, the GPUs of each in turn; on processors ranks share their machine."""
    places = list(cluster.devices())
    cpu = places[0].table.device.kind == "cpu"
    if count > len(places) and not cpu:
        raise UserError(f"{count} ranks for {len(places)} GPUs.", do=f"plan.pin.ranks={len(places)}")
    cores = sum(max(1, place.table.cores) for place in places)
    if count > max(cores, len(places)):
        raise UserError(f"{count} ranks for {cores} cores.", do=f"plan.pin.ranks={cores}")
    each = -(-count // len(places))
    return [places[index // each] if cpu else places[index] for index in range(count)]


def _seconds_per_byte(cluster: Cluster, seats: Sequence[Place]) -> tuple[float, float]:
    """Of links inside a machine and between machines."""
    ranks = {place.rank for place in seats}
    inside = 1 / seats[0].table.inside.bandwidth
    several = len({place.node for place in seats}) > 1
    return inside, 1 / cluster.slowest(ranks, "between").bandwidth if several else inside


def _slower(seats: Sequence[Place], request: Request, first: Place | None = None) -> tuple[float, ...]:
    """How many times as long each seat takes as `first` (None: the first of them), of which the seconds of parts are;
    empty: all as long."""

    def speed(place: Place) -> float:
        whole = _speed(place, request)
        return whole if place.table.device.kind == "cuda" else whole / max(1, place.table.cores)

    ratios = tuple(speed(first or seats[0]) / speed(place) for place in seats)
    return ratios if any(abs(ratio - 1) > 1e-9 for ratio in ratios) else ()


def _speed(place: Place, request: Request) -> float:
    """Operations per second of a device, all its cores together."""
    device = place.table.device
    return device_model.sustained(device, request.precision) or device_model.peak(device, request.precision)


def micro_batches(part: PartCost, parts: Sequence[PartCost], nested: int) -> list[int]:
    """Samples of each nested micro-batch of a part's task: all in one where its head needs them together."""
    if any(other.whole for other in parts if other.task == part.task):
        return [part.rows]
    return [last - first for first, last in (rows(part.rows, nested, k) for k in range(nested))]


def _metaop(part: PartCost, seat: Place, request: Request, count: int, nested: int) -> MetaOp:
    """A part on 1, 2, 4, ... devices and on all of them, its micro-batches together."""
    batches = [size for size in micro_batches(part, parts_of(request), nested) if size]
    most = 1 if part.whole else min(count, max(batches))
    sizes = sorted({n for n in (*(2**k for k in range(12)), count) if n <= most})
    device, fitted = seat.table.device, _per_sample(part)

    def seconds(samples: int) -> float:
        if fitted is not None:
            return fitted[0] + fitted[1] * samples
        share = 1.0 if device.kind == "cuda" else 1 / max(1, seat.table.cores)
        issued = part.launches * device_model.issue_seconds(device)
        return part.flops * samples / (_speed(seat, request) * share) + issued

    return MetaOp(
        part.key,
        part.operators,
        {n: sum(seconds(-(-size // n)) for size in batches) for n in sizes},
        part.needs,
        part.tower,
        states=4 * part.parameters,  # parameter, gradient and two moments
        activations=part.saved * min(part.rows, NESTED_IN_FLIGHT * max(batches)),
        output=part.output * part.rows,
        gradients=part.parameters,
        forward=part.forward,
    )


def _per_sample(part: PartCost) -> tuple[float, float] | None:
    """(seconds of a pass without samples, of each sample), as measured; None: it was not."""
    if not part.seconds:
        return None
    if len(part.seconds) == 1:
        ((samples, seconds),) = part.seconds.items()
        return 0.0, seconds / samples
    return fit({1 / samples: seconds for samples, seconds in part.seconds.items()})


def _waves(solved: WavePlan, parts: Sequence[PartCost]) -> tuple[tuple[WaveSlice, ...], ...]:
    by_key, count = {part.key: part for part in parts}, sum(map(len, solved.waves))
    backs = solved.spans[count:] or ((0.0, 0.0),) * count
    spans = zip(solved.spans, backs, strict=False)

    def timed(slice_: MetaOpSlice) -> WaveSlice:
        (begin, end), back = next(spans)
        part = by_key[slice_.metaop]
        return WaveSlice(
            task=part.task,
            node=part.node,
            first=slice_.first,
            last=slice_.first + slice_.operators,
            ranks=slice_.devices,
            begin=begin,
            end=end,
            back=back,
        )

    return tuple(tuple(map(timed, wave)) for wave in solved.waves)


class _Traffic(NamedTuple):
    """Payload bytes of the rank that sends most: activations and their gradients, and gradients of parameters in rings;
    and the largest share of all parameters that a rank holds."""

    sent: dict[str, float]
    share: float


def _traffic(plan: Plan, parts: Sequence[PartCost], groups: Collection[tuple[float, set[int]]]) -> _Traffic:
    """`groups`: of each operator the bytes of its parameters, and the ranks that hold it."""
    sent, parameters = [0.0] * len(plan.ranks), [0.0] * len(plan.ranks)
    for size, ranks in groups:
        ring = 2 * (len(ranks) - 1) / len(ranks) * size
        for rank in ranks:
            sent[rank] += ring
            parameters[rank] += size
    handed = handed_on(plan, parts)
    activations = {"activations": max(handed)} if any(handed) else {}
    whole = sum(size for size, _ in groups)
    return _Traffic({"gradients": max(sent), **activations}, max(parameters) / max(1.0, whole))


def handed_on(plan: Plan, parts: Sequence[PartCost]) -> list[float]:
    """Payload bytes of activations and of their gradients that each rank sends in a step: samples whose next slice is
    another rank's."""
    sent, by_key = [0.0] * len(plan.ranks), {part.key: part for part in parts}
    latest: dict[str, WaveSlice] = {}
    state = plan.state(TaskWavesState)
    for slice_ in state.slices:
        part = by_key[f"{slice_.task}.{slice_.node}"]
        for key, samples in itertools.product(
            [part.key] if slice_.first else part.needs, micro_batches(part, parts, state.nested)
        ):
            for sender, receiver, first, last in crossings(samples, latest[key].ranks, slice_.ranks):
                for rank in (sender, receiver) if sender != receiver else ():
                    sent[rank] += by_key[key].output * (last - first)
        latest[part.key] = slice_
    return sent


def _predicted(alone: Predicted, solved: WavePlan, traffic: _Traffic, fixed: float, request: Request) -> Predicted:
    moved = alone.terms.get("optimizer", 0.0) * traffic.share
    terms = {"waves": solved.seconds, "exchange": solved.exchange, "optimizer": moved}
    step = sum(terms.values())
    tokens = request.profile.global_batch * request.profile.tokens_per_sample
    memory = {"waves": max(solved.device_bytes, default=0.0), "runtime": fixed}
    sources = {"waves": "the timetable of the slices, from seconds of their parts", **alone.sources}
    return alone.changed(
        step_seconds=step,
        tokens_per_second=tokens / step,
        tokens_per_second_per_device=tokens / step / len(solved.device_bytes),
        mfu=min(1.0, alone.mfu * alone.step_seconds / step),
        terms=terms,
        memory_bytes={**memory, "peak": sum(memory.values())},
        sent_bytes=traffic.sent,
        sources=sources,
    )


def _reasons(solved: WavePlan, parts: Sequence[PartCost], count: int) -> tuple[str, ...]:
    """What the waves are, and what they are compared with."""
    show, names = units.show_seconds, {"program": "a linear program", "greedy": "the greedy wavefront"}
    plain = {"static": "the best fixed groups of ranks take", "sequential": "one task after the other takes"}
    others = [f"{words} {show(solved.compared[name])}" for name, words in plain.items() if name in solved.compared]
    how = names.get(solved.method, f"a {solved.method} plan")
    first = f"{units.plural(len(solved.waves), 'wave')} over {count} ranks, by {how}: {show(solved.step)} a step"
    lines = [f"{first} before the optimizer; {', '.join(others)}."]
    by_key = {part.key: part for part in parts}
    for number, wave in enumerate(solved.waves[:NAMED], 1):
        slices = []
        for slice_ in wave:
            part, ranks = by_key[slice_.metaop], ", ".join(map(str, slice_.devices))
            last = slice_.first + slice_.operators
            blocks = f" {slice_.first} to {last}" if slice_.operators < part.operators else ""
            word = "rank" if len(slice_.devices) == 1 else "ranks"
            slices.append(f"{part.node} of {part.task}{blocks} on {word} {ranks}")
        lines.append(f"Wave {number}: {'; '.join(slices)}.")
    fullest = units.show_size(max(solved.device_bytes, default=0.0))
    lines.append(f"The fullest rank holds {fullest} of parameters, gradients, optimizer states and activations.")
    return tuple(lines)
