"""Waves of a recipe with several tasks: its parts as MetaOps on the devices of a cluster, and the plan of their ranks.

The seconds of a part on n devices are those of its share of the batch: `T(n) = a + b / n` fitted to what was measured
on one thread, else from its operations and the device's speed. No torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from espalier.mechanisms.task_waves.metaops import MetaOp, fit
from espalier.mechanisms.task_waves.state import TaskWavesState, WaveSlice
from espalier.mechanisms.task_waves.wave_placement import Devices, summed
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
TOLD = 8
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
    parts: tuple[PartCost, ...] = request.profile.facts["task_waves"]
    return parts


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
    found, places = [slower for _, slower in seats], [place for place, _ in seats] or _seats(cluster, count)
    limit = plan.predicted.memory_limit if plan.predicted is not None else float("inf")
    limit *= min(map(_memory, places)) / _memory(first_seat(cluster))
    fixed = plan.predicted.memory_bytes.get("runtime", 0.0) if plan.predicted is not None else 0.0
    devices = devices_of(request, cluster, places, found, limit - fixed)
    nested, solved = _fitting(request, devices, first_seat(cluster), method)
    made = _waves(solved, parts_of(request))
    ranks = tuple(
        Rank(share=(0, 1), device=_device(place), node=place.node, threads=request.pin.threads or 1) for place in places
    )
    told, alone = _reasons(solved, parts_of(request), count), plan_summary.sentences(plan, cluster)  # of one rank
    if nested > 1:
        told += (
            f"The passes of {nested} micro-batches of each task are nested, as the activations of whole batches do not "
            "fit; a task whose head needs its whole batch is not divided.",
        )
    kept = (line for line in plan.why if line not in alone and not line.startswith("It is the best of"))
    changed = plan.with_state(TaskWavesState(waves=made, nested=nested)).changed(
        ranks=ranks, executable=True, missing="", runners_up=(), why=(*told, *kept)
    )
    if plan.predicted is None:
        return changed
    exchanged = _exchange(changed, parts_of(request), devices)
    predicted = _predicted(plan.predicted, solved, exchanged, fixed, (request, count))
    return changed.changed(predicted=predicted.changed(memory_limit=limit))


def devices_of(
    request: Request, cluster: Cluster, seats: Sequence[Place], found: Sequence[float] = (), memory: float = math.inf
) -> Devices:
    """The devices of ranks that sit at `seats` and are `found` times as slow as these, with `memory` bytes each."""
    slower = _slower(seats, request, first_seat(cluster))
    if any(one != 1 for one in found):
        slower = tuple(one * own for one, own in zip(slower or (1.0,) * len(seats), found, strict=True))
    return Devices(tuple(place.node for place in seats), memory, *_seconds_per_byte(cluster, seats), slower)


def seconds(plan: Plan, request: Request, seat: Place, devices: Devices) -> float:
    """Of the waves of `plan`, and of its sums of gradients, on other devices than it was made for; of one rank of all
    parts. `seat`: whose seconds those of parts are."""
    count, parts = len(devices.nodes), parts_of(request)
    state = plan.state(TaskWavesState)
    metaops = [_metaop(one, seat, request, count, state.nested) for one in parts]
    if not state.waves:
        return sum(one.operators * one.curve(1) for one in metaops) * devices.slowest((0,))
    planned = [
        tuple(
            MetaOpSlice(f"{one.task}.{one.node}", one.first, one.last - one.first, len(one.ranks), one.ranks)
            for one in wave
        )
        for wave in state.waves
    ]
    ends = (end for _, end in simulate(metaops, planned, devices))
    return max(ends, default=0.0) + _exchange(plan, parts, devices).seconds


def first_seat(cluster: Cluster) -> Place:
    """The place whose seconds those of parts are."""
    return _seats(cluster, 1)[0]


def _memory(place: Place) -> float:
    """Bytes of a device, or of its machine where that has them."""
    return float(place.table.device.memory or place.table.memory or 1)


def _fitting(request: Request, devices: Devices, seat: Place, method: Method | None) -> tuple[int, WavePlan]:
    """The fewest nested micro-batches of `NESTED` with which waves fit into memory, and these. Raises what `waves`
    raises where none do."""
    refused: UserError | None = None
    for nested in NESTED:
        try:
            metaops = [_metaop(one, seat, request, len(devices.nodes), nested) for one in parts_of(request)]
            return nested, waves(metaops, devices, method)
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


def _device(place: Place) -> str:
    return "cpu" if place.table.device.kind == "cpu" else f"cuda:{place.slot}"


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
        device = place.table.device
        whole = device_model.sustained(device, request.precision) or device_model.peak(device, request.precision)
        return whole if device.kind == "cuda" else whole / max(1, place.table.cores)

    found = tuple(speed(first or seats[0]) / speed(place) for place in seats)
    return found if any(abs(one - 1) > 1e-9 for one in found) else ()


def micro_batches(one: PartCost, parts: Sequence[PartCost], nested: int) -> list[int]:
    """Samples of each nested micro-batch of a part's task: all in one where its head needs them together."""
    if any(other.whole for other in parts if other.task == one.task):
        return [one.rows]
    return [
        one.rows * (k + 1) // nested - one.rows * k // nested for k in range(nested)
    ]  # as `mechanisms.task_waves.wave_schedule.rows`


def _metaop(one: PartCost, seat: Place, request: Request, count: int, nested: int = 1) -> MetaOp:
    """A part on 1, 2, 4, ... devices and on all of them, its micro-batches together."""
    batches = [size for size in micro_batches(one, parts_of(request), nested) if size]
    most = 1 if one.whole else min(count, max(batches))
    sizes = sorted({n for n in (*(2**k for k in range(12)), count) if n <= most})
    device, fitted = seat.table.device, _per_sample(one)

    def seconds(rows: int) -> float:
        if fitted is not None:
            return fitted[0] + fitted[1] * rows
        speed = device_model.sustained(device, request.precision) or device_model.peak(device, request.precision)
        share = 1.0 if device.kind == "cuda" else 1 / max(1, seat.table.cores)
        return one.flops * rows / (speed * share) + one.launches * device_model.issue_seconds(device)

    rest = {n: sum(seconds(-(-size // n)) for size in batches) for n in sizes}
    states = 4 * one.parameters  # parameter, gradient and two moments
    kept = one.kept * min(one.rows, NESTED_IN_FLIGHT * max(batches))
    return MetaOp(
        one.key,
        one.operators,
        rest,
        one.needs,
        one.tower,
        states=states,
        kept=kept,
        output=one.output * one.rows,
        gradients=one.parameters,
        forward=one.forward,
    )


def _per_sample(one: PartCost) -> tuple[float, float] | None:
    """(seconds of a pass without samples, of each sample), as measured; None: it was not."""
    if not one.seconds:
        return None
    if len(one.seconds) == 1:
        ((rows, seconds),) = one.seconds.items()
        return 0.0, seconds / rows
    return fit({1 / rows: seconds for rows, seconds in one.seconds.items()})


def _waves(found: WavePlan, parts: Sequence[PartCost]) -> tuple[tuple[WaveSlice, ...], ...]:
    by_key, count = {one.key: one for one in parts}, sum(map(len, found.waves))
    backs = found.spans[count:] or ((0.0, 0.0),) * count
    spans = zip(found.spans, backs, strict=False)
    made = []
    for wave in found.waves:
        row = []
        for one in wave:
            (begin, end), back = next(spans)
            part = by_key[one.metaop]
            row.append(
                WaveSlice(
                    task=part.task,
                    node=part.node,
                    first=one.first,
                    last=one.first + one.operators,
                    ranks=one.devices,
                    begin=begin,
                    end=end,
                    back=back,
                )
            )
        made.append(tuple(row))
    return tuple(made)


class _Exchanged(NamedTuple):
    """Seconds of summing gradients over the holders of each operator, one group after the other; payload bytes of the
    rank that sends most: activations and their gradients, and gradients of parameters in rings; and the largest share
    of all parameters that a rank holds."""

    seconds: float
    sent: dict[str, float]
    held: float


def _exchange(plan: Plan, parts: Sequence[PartCost], devices: Devices) -> _Exchanged:
    holders: dict[tuple[str, int], tuple[float, set[int]]] = {}
    by_key = {(one.task, one.node): one for one in parts}
    for one in plan.state(TaskWavesState).slices:
        part = by_key[one.task, one.node]
        for operator in range(one.first, one.last):
            holders.setdefault((part.tower, operator), (part.parameters, set()))[1].update(one.ranks)
    seconds, sent, held = 0.0, [0.0] * len(devices.nodes), [0.0] * len(devices.nodes)
    handed = handed_on(plan, parts)
    for size, ranks in holders.values():
        ring = 2 * (len(ranks) - 1) / len(ranks) * size
        seconds += summed(size, ranks, devices)
        for rank in ranks:
            sent[rank] += ring
            held[rank] += size
    activations = {"activations": max(handed)} if any(handed) else {}
    whole = sum(size for size, _ in holders.values())
    return _Exchanged(seconds, {"gradients": max(sent), **activations}, max(held) / max(1.0, whole))


def handed_on(plan: Plan, parts: Sequence[PartCost]) -> list[float]:
    """Payload bytes of activations and of their gradients that each rank sends in a step: samples whose next slice is
    another rank's."""
    found, by_key = [0.0] * len(plan.ranks), {one.key: one for one in parts}
    latest: dict[str, WaveSlice] = {}
    state = plan.state(TaskWavesState)
    for one in state.slices:
        part = by_key[f"{one.task}.{one.node}"]
        for key, samples in itertools.product(
            [part.key] if one.first else part.needs, micro_batches(part, parts, state.nested)
        ):
            source = latest[key].ranks
            for (a, sender), (b, receiver) in itertools.product(enumerate(source), enumerate(one.ranks)):
                # As `mechanisms.task_waves.wave_schedule.rows` divides samples.
                low, high = (samples * (a + end) // len(source) for end in (0, 1))
                start, stop = (samples * (b + end) // len(one.ranks) for end in (0, 1))
                size = by_key[key].output * max(0, min(high, stop) - max(low, start))
                for rank in (sender, receiver) if sender != receiver else ():
                    found[rank] += size
        latest[part.key] = one
    return found


def _predicted(
    alone: Predicted,
    found: WavePlan,
    exchanged: _Exchanged,
    fixed: float,
    asked: tuple[Request, int],
) -> Predicted:
    request, count = asked
    moved = alone.terms.get("optimizer", 0.0) * exchanged.held
    terms = {"waves": found.seconds, "exchange": exchanged.seconds, "optimizer": moved}
    step = sum(terms.values())
    tokens = request.profile.global_batch * request.profile.tokens_per_sample
    held = {"waves": max(found.held, default=0.0), "runtime": fixed}
    sources = {"waves": "the timetable of the slices, from seconds of their parts", **alone.sources}
    return alone.changed(
        step_seconds=step,
        tokens_per_second=tokens / step,
        tokens_per_second_per_device=tokens / step / count,
        mfu=min(1.0, alone.mfu * alone.step_seconds / step),
        terms=terms,
        memory_bytes={**held, "peak": sum(held.values())},
        sent_bytes=exchanged.sent,
        sources=sources,
    )


def _reasons(found: WavePlan, parts: Sequence[PartCost], count: int) -> tuple[str, ...]:
    """What the waves are, and what they are compared with."""
    show, names = units.show_seconds, {"program": "a linear program", "greedy": "the greedy wavefront"}
    beside = {"static": "the best fixed groups of ranks take", "sequential": "one task after the other takes"}
    told = [f"{words} {show(found.compared[name])}" for name, words in beside.items() if name in found.compared]
    how = names.get(found.method, f"a {found.method} plan")
    took = show(found.step)
    first = f"{units.plural(len(found.waves), 'wave')} over {count} ranks, by {how}: {took} a step"
    lines = [f"{first} before the optimizer; {', '.join(told)}."]
    by_key = {one.key: one for one in parts}
    for number, wave in enumerate(found.waves[:TOLD], 1):
        said = []
        for one in wave:
            part, ranks = by_key[one.metaop], ", ".join(map(str, one.devices))
            blocks = f" {one.first} to {one.first + one.operators}" if one.operators < part.operators else ""
            said.append(f"{part.node} of {part.task}{blocks} on {'rank' if len(one.devices) == 1 else 'ranks'} {ranks}")
        lines.append(f"Wave {number}: {'; '.join(said)}.")
    held = units.show_size(max(found.held, default=0.0))
    lines.append(f"The fullest rank holds {held} of parameters, gradients, optimizer states and activations.")
    return tuple(lines)
