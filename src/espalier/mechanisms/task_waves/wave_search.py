"""Spindle: several tasks and towers trained in waves on changing groups of devices. Pure; no torch.

After Spindle (arXiv 2409.03365, ASPLOS 2025), which contracts the operators of a step to MetaOps, gives each of them
devices level by level, and executes the result in waves. Where we deviate:

- Up to twelve MetaOps a linear program over configurations finds the allocation, with a repair to whole operators; the
  paper's greedy wavefront is the default beyond, and the plan never is slower than that or than a static partition.
- A MetaOp that nobody waits for may run in any later level, so that levels are better filled.
- A wave is no barrier: a slice starts when its devices are free and its inputs are there (`simulate`).
- `static` and `sequential` are the plain forms: one group of devices for some tasks each, all devices for one after the
  other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice
from typing import Literal

from espalier.mechanisms.task_waves.metaops import EPSILON, MetaOp, components, spans
from espalier.mechanisms.task_waves.wave_placement import DeviceLinks, Devices, PlacedWaves, exchange, place_waves
from espalier.mechanisms.task_waves.wave_solver import (
    MetaOpSlice,
    Program,
    Share,
    Wave,
    allocate,
    greedy,
    repair,
    solve_program,
)
from espalier.recipe.errors import UserError

Method = Literal["program", "greedy", "static", "sequential"]
PROGRAM = 12
"""MetaOps up to which the linear program is the default."""
SLOWEST = 8
"""Of devices of unlike speed, so many of the slowest may change places with others."""
MOVES = 200
"""Changes of the groups of MetaOps that are tried from each method's waves."""
STATIC = 6
"""Static partitions whose timetables are compared."""
PARTITIONS = 5
"""Tasks up to which every way to put them into groups is tried for a static partition."""


@dataclass(frozen=True)
class WavePlan:
    """Waves of a step.

    Attributes:
        waves: slices with their devices. Operators of a MetaOp are in order over the waves.
        seconds: of the step, from the first slice to the last.
        method: which solver's waves these are.
        ideal: sum over levels of the continuous optimum, where devices and operators could be divided.
        fractional: what the linear program takes with operators that can be divided; 0 where it was not asked.
        compared: seconds of each method's waves that were considered, and of the exchange after them.
        device_bytes: bytes on each device.
        spans: of each slice, in the order of `waves`, when it starts and ends; then of backward passes (`simulate`).
        exchange: seconds in which gradients are summed afterwards.
    """

    waves: tuple[Wave, ...]
    seconds: float
    method: Method
    ideal: float
    fractional: float = 0.0
    compared: Mapping[str, float] = field(default_factory=dict)
    device_bytes: tuple[float, ...] = ()
    spans: tuple[tuple[float, float], ...] = ()
    exchange: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of both."""
        return self.seconds + self.exchange


def waves(metaops: Sequence[MetaOp], devices: int | Devices, method: Method | None = None) -> WavePlan:
    """The waves of a step of several tasks and towers. Pure: the same input gives the same plan.

    Args:
        metaops: see `MetaOp`.
        devices: how many, or `Devices` with their nodes, memory and links.
        method: `program` (linear program and repair, default up to 12 MetaOps), `greedy` (wavefront, default beyond),
            `static` (the best partition of the devices among tasks), `sequential` (all devices for each in turn). Those
            that stand later are considered with each, and the fastest is returned.

    Raises:
        UserError: a MetaOp has no operators or no valid number of devices, MetaOps need one another in a circle, there
            are no devices, or no plan fits into their memory.
    """
    devices = Devices((0,) * devices) if isinstance(devices, int) else devices
    _check(metaops, devices)
    span, count = spans(metaops), len(devices.nodes)
    order: tuple[Method, ...] = ("program", "greedy", "static", "sequential")
    chosen: Method = method or ("program" if len(metaops) <= PROGRAM else "greedy")
    levels = [
        [metaop for metaop in metaops if span[metaop.name].first == level]
        for level in range(1 + max(range_.first for range_ in span.values()))
    ]
    best_of = [allocate(members, count) for members in levels]
    wavefront = [
        (level, wave) for level, members in enumerate(levels) for wave in greedy(members, count, best_of[level].shares)
    ]
    program, plans, fewest = Program(0.0, []), dict[str, WavePlan](), math.inf
    for name in order[order.index(chosen) :]:
        if name == "program":
            seeds = [(level, {name: size for name, size, _ in wave}) for level, wave in wavefront]
            program = solve_program(metaops, span, count, seeds)
            candidates: Iterable[list[Wave]] = [_numbered(repair(metaops, span, count, program))]
        elif name == "greedy":
            candidates = [_numbered([wave for _, wave in wavefront])]
        elif name == "static":
            candidates = _static(metaops, count)
        else:
            candidates = [_static_waves([components(metaops)], [tuple(range(count))])]
        for candidate in candidates:
            placed = place_waves(metaops, candidate, devices)
            fewest = min(fewest, placed.most)
            if placed.most > devices.memory:
                continue
            made = _timed(metaops, placed, devices, name)
            if name not in plans or made.step < plans[name].step * (1 - EPSILON):
                plans[name] = made
    if not plans:
        raise UserError(
            f"No waves fit into {devices.memory:.3g} bytes per device: the least that a plan needs is {fewest:.3g}.",
            do="smaller batches of the tasks, or more devices",
        )
    compared = {name: plan.step for name, plan in plans.items()}
    best = _first_least(plans.values())
    if chosen in order[:2] and (devices.inside or devices.between):
        best = _first_least([best, *(_moved(plan, metaops, devices, chosen) for plan in plans.values())])
    best = _swapped(best, metaops, devices)
    compared[best.method] = min(best.step, compared.get(best.method, math.inf))
    ideal = sum(allocation.seconds for allocation in best_of)
    return replace(best, ideal=ideal, fractional=program.seconds, compared=compared)


def _timed(metaops: Sequence[MetaOp], placed: PlacedWaves, devices: Devices, method: Method) -> WavePlan:
    """Waves with devices, and what they take."""
    spans_ = tuple(simulate(metaops, placed.waves, devices))
    seconds, after = max((end for _, end in spans_), default=0.0), exchange(metaops, placed.waves, devices)
    return WavePlan(placed.waves, seconds, method, 0.0, 0.0, {}, placed.bytes, spans_, after)


def _first_least(plans: Iterable[WavePlan]) -> WavePlan:
    """The fastest; of those that differ by rounding only, the first."""
    return reduce(lambda best, plan: plan if plan.step < best.step * (1 - EPSILON) else best, plans)


def _moved(best: WavePlan, metaops: Sequence[MetaOp], devices: Devices, method: Method) -> WavePlan:
    """The waves with whole MetaOps moved to other groups as long as that is faster: allocation knows nothing of links,
    on which it may be better to compute where the inputs are, or the parameters."""
    left, before = MOVES, None
    while best is not before and left:
        before = best
        groups = dict.fromkeys(slice_.devices for wave in best.waves for slice_ in wave)
        groups |= dict.fromkeys((device,) for device in range(len(devices.nodes)) if len(devices.nodes) <= SLOWEST)
        for metaop, group in islice(itertools.product(metaops, groups), left):
            left -= 1
            slices = list(itertools.chain.from_iterable(best.waves))
            if metaop.curve.within(len(group))[0] != len(group):
                continue
            changed = [
                slice_._replace(size=len(group), devices=group) if slice_.metaop == metaop.name else slice_
                for slice_ in slices
            ]
            if changed == slices:
                continue
            placed = place_waves(metaops, _apart(changed, metaops), devices)
            if placed.most <= devices.memory:
                best = _first_least([best, _timed(metaops, placed, devices, method)])
    return best


def _apart(slices: Sequence[MetaOpSlice], metaops: Sequence[MetaOp]) -> list[Wave]:
    """Slices in the same order, as many in a wave as have devices of their own and do not need one another."""
    needs, split = {metaop.name: {metaop.name, *metaop.needs} for metaop in metaops}, list[list[MetaOpSlice]]()
    for slice_ in slices:
        wave = split[-1] if split else []
        busy = {device for other in wave for device in other.devices}
        if not wave or busy & set(slice_.devices) or needs[slice_.metaop] & {other.metaop for other in wave}:
            split.append([slice_])
        else:
            wave.append(slice_)
    return [tuple(wave) for wave in split]


def _swapped(best: WavePlan, metaops: Sequence[MetaOp], devices: Devices) -> WavePlan:
    """The same waves with devices exchanged where that is faster: slow ones get the work that others wait for least."""
    count = len(devices.nodes)
    slowest = sorted(range(count), key=lambda device: -devices.slower[device])[:SLOWEST] if devices.slower else []
    for slow, other in itertools.product(slowest, range(count)):
        swap = {slow: other, other: slow}
        made = tuple(
            tuple(
                slice_._replace(devices=tuple(swap.get(device, device) for device in slice_.devices)) for slice_ in wave
            )
            for wave in best.waves
        )
        swapped = tuple(best.device_bytes[swap.get(device, device)] for device in range(count))
        best = _first_least([best, _timed(metaops, PlacedWaves(made, swapped), devices, best.method)])
    return best


def _check(metaops: Sequence[MetaOp], devices: Devices) -> None:
    if not metaops or not devices.nodes:
        raise UserError("Waves need MetaOps and devices.", do="waves([MetaOp(...), ...], devices=2)")
    for metaop in metaops:
        if metaop.operators < 1 or not metaop.seconds or min(metaop.seconds.values()) <= 0:
            raise UserError(
                f"The MetaOp {metaop.name!r} has {metaop.operators} operators and seconds {dict(metaop.seconds)}.",
                do="at least one operator, and positive seconds for at least one number of devices",
            )
        if min(metaop.seconds) < 1 or min(metaop.seconds) > len(devices.nodes):
            raise UserError(
                f"The MetaOp {metaop.name!r} runs on {min(metaop.seconds)} devices at least; "
                f"there are {len(devices.nodes)}.",
                do="its seconds for fewer devices",
            )


def simulate(metaops: Sequence[MetaOp], planned: Sequence[Wave], devices: Devices) -> list[tuple[float, float]]:
    """When each slice starts and ends; where MetaOps have backward passes, then also those of these, in the same order.

    A forward pass waits for its devices, for the operators before its own, for what its MetaOp needs, and for the
    activations that come from other devices. Backward passes follow in the reverse order, and wait for the gradients of
    their outputs, which go the same ways back. A device sends one message after the other.
    """
    by_name = {metaop.name: metaop for metaop in metaops}
    slices = list(itertools.chain.from_iterable(planned))
    takes = [
        by_name[slice_.metaop].curve.within(slice_.size)[1] * slice_.operators * devices.slowest(slice_.devices)
        for slice_ in slices
    ]
    shares, (forward, backward) = [by_name[slice_.metaop].forward for slice_ in slices], _routes(by_name, slices)
    free, links = [0.0] * len(devices.nodes), DeviceLinks(devices)

    def run(number: int, seconds: float, ready: float) -> tuple[float, float]:
        ready = max(ready, *(free[device] for device in slices[number].devices), 0.0)
        for device in slices[number].devices:
            free[device] = ready + seconds
        return ready, ready + seconds

    def passes(order: Sequence[int], part: Sequence[float], after: Sequence[list[int]]) -> list[tuple[float, float]]:
        """`after`: of each slice those that take what it gives, in the order in which it is sent."""
        times, arrived = [(0.0, 0.0)] * len(slices), [0.0] * len(slices)
        for number in order:
            times[number] = run(number, takes[number] * part[number], arrived[number])
            for target in after[number]:
                size = by_name[slices[min(number, target)].metaop].output
                groups = slices[number].devices, slices[target].devices
                arrived[target] = max(arrived[target], links.moved(size, groups, times[number][1]))
        return times

    order = list(range(len(slices)))
    there = passes(order, shares, forward)
    if all(share == 1 for share in shares):
        return there
    return there + passes(order[::-1], [1 - share for share in shares], backward)


def _routes(by_name: Mapping[str, MetaOp], slices: Sequence[MetaOpSlice]) -> tuple[list[list[int]], list[list[int]]]:
    """Of each slice those that take what it gives, and those whose outputs it takes."""
    latest: dict[str, int] = {}
    after, before = [list[int]() for _ in slices], [list[int]() for _ in slices]
    for number, slice_ in enumerate(slices):
        before[number] = [latest[name] for name in ([slice_.metaop] if slice_.first else by_name[slice_.metaop].needs)]
        for source in before[number]:
            after[source].append(number)
        latest[slice_.metaop] = number
    return after, before


def _numbered(shares: Sequence[Sequence[Share]]) -> list[Wave]:
    """Slices whose operators follow one another."""
    at: dict[str, int] = {}
    numbered: list[Wave] = []
    for wave in shares:
        made = []
        for name, size, operators in wave:
            made.append(MetaOpSlice(name, at.get(name, 0), operators, size))
            at[name] = at.get(name, 0) + operators
        numbered.append(tuple(made))
    return numbered


# --- plain forms ---------------------------------------------------------------------------------------------------


def _static(metaops: Sequence[MetaOp], count: int) -> Iterator[list[Wave]]:
    """The best partitions of the devices into fixed groups, each for some of the tasks one after the other: by their
    computation, as what crosses between groups is seen in a timetable only."""
    tasks, candidates = components(metaops), list[tuple[float, list[list[int]], list[int]]]()
    for groups in _groupings(tasks, count):
        sizes = _group_sizes([[tasks[k] for k in group] for group in groups], count)
        if sizes is None:
            continue
        seconds = max(_alone([tasks[k] for k in group], size) for group, size in zip(groups, sizes, strict=True))
        candidates.append((seconds, groups, sizes))
    for _, groups, sizes in sorted(candidates, key=lambda candidate: candidate[0])[:STATIC]:
        ends = list(itertools.accumulate(sizes))
        ranks = [tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
        yield _static_waves([[tasks[k] for k in group] for group in groups], ranks)


def _alone(tasks: Sequence[Sequence[MetaOp]], size: int) -> float:
    """Seconds of tasks one after the other on a group."""
    return sum(metaop.operators * metaop.curve.within(size)[1] for task in tasks for metaop in task)


def _groupings(tasks: Sequence[Sequence[MetaOp]], count: int) -> Iterator[list[list[int]]]:
    """Ways to put tasks into groups: all of them where tasks are few, else the longest tasks first into the group with
    the least work, for each number of groups."""
    if len(tasks) <= PARTITIONS:
        yield from islice(_set_partitions(list(range(len(tasks)))), 1000)
        return
    work = [sum(metaop.operators * metaop.curve(1) for metaop in task) for task in tasks]
    for groups in range(1, min(len(tasks), count) + 1):
        loads, grouping = [0.0] * groups, [list[int]() for _ in range(groups)]
        for k in sorted(range(len(tasks)), key=lambda task: -work[task]):
            least = loads.index(min(loads))
            grouping[least].append(k)
            loads[least] += work[k]
        yield grouping


def _set_partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in _set_partitions(items[1:]):
        yield [[items[0]], *rest]
        for k, group in enumerate(rest):
            yield [*rest[:k], [items[0], *group], *rest[k + 1 :]]


def _group_sizes(groups: Sequence[Sequence[Sequence[MetaOp]]], count: int) -> list[int] | None:
    """Devices of each group, so that the slowest is fastest: each the fewest that will do, then the slowest gets
    more as long as it gains."""
    sizes = [max(min(metaop.curve.sizes) for task in group for metaop in task) for group in groups]
    if sum(sizes) > count:
        return None
    while True:
        times = [_alone(group, size) for group, size in zip(groups, sizes, strict=True)]
        slowest, free = times.index(max(times)), count - sum(sizes)
        better = (sizes[slowest] + more for more in range(1, free + 1))
        larger = next((size for size in better if _alone(groups[slowest], size) < times[slowest]), None)
        if larger is None:
            return sizes
        sizes[slowest] = larger


def _static_waves(groups: Sequence[Sequence[Sequence[MetaOp]]], ranks: Sequence[tuple[int, ...]]) -> list[Wave]:
    """Wave number k holds the k-th MetaOp of each group."""
    chains = [[metaop for task in group for metaop in task] for group in groups]
    made_waves: list[Wave] = []
    for k in range(max(map(len, chains))):
        wave = []
        for chain, group in zip(chains, ranks, strict=True):
            if k < len(chain):
                size = chain[k].curve.within(len(group))[0]
                wave.append(MetaOpSlice(chain[k].name, 0, chain[k].operators, size, group[:size]))
        made_waves.append(tuple(wave))
    return made_waves
