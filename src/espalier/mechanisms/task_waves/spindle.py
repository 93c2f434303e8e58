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

from espalier.mechanisms.task_waves.metaops import EPSILON, MetaOp, Span, components, spans
from espalier.mechanisms.task_waves.wave_placement import Devices, Links, PlacedWaves, exchange, place_waves
from espalier.mechanisms.task_waves.wave_solver import Share, Slice, Wave, allocate, greedy, repair, solve_program
from espalier.recipe.errors import UserError
from espalier.recipe.records import Record

RECORD = Record(
    name="spindle",
    title="Spindle: several tasks and towers trained in waves on changing groups of devices",
    aliases=("multi-task waves",),
    paper="ASPLOS 2025, arXiv 2409.03365",
    question="Who does what?",
    files=(
        "mechanisms/task_waves/spindle.py",
        "mechanisms/task_waves/metaops.py",
        "mechanisms/task_waves/wave_solver.py",
        "mechanisms/task_waves/wave_placement.py",
        "mechanisms/task_waves/task_waves.py",
        "mechanisms/task_waves/choice.py",
        "mechanisms/task_waves/waves.py",
    ),
    chosen="a recipe with several tasks or towers whose sizes differ, on more devices than the small ones can use",
    cost="T_m(n) = a + b/n per tower and group size, fitted to measurements; per level the towers end together at C* "
    "with sum of n = N; step = a timetable of forward and backward passes and of what crosses links, then the sums of "
    "gradients",
    law="any plan of waves gives the loss and gradients of running the tasks one after the other",
    law_test="tests/stages/test_spindle.py::test_waves_give_the_loss_and_gradients_of_one_task_after_the_other",
    bench="bench/spindle.py",
    state="works",
    remark="recipes of several tasks and towers are planned and trained in waves over ranks, unlike machines too, with "
    "nested micro-batches where memory is short, and taken up under other waves, also when a rank is lost for good or "
    "stays slow; steps of real towers are predicted within about 10 %",
)

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
        held: bytes on each device.
        spans: of each slice, in the order of `waves`, when it starts and ends; then of backward passes (`simulate`).
        exchange: seconds in which gradients are summed afterwards.
    """

    waves: tuple[Wave, ...]
    seconds: float
    method: Method
    ideal: float
    fractional: float = 0.0
    compared: Mapping[str, float] = field(default_factory=dict)
    held: tuple[float, ...] = ()
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
    levels = [[one for one in metaops if span[one.name].first == level] for level in _levels(span)]
    best_of = [allocate(own, count) for own in levels]
    wavefront = [
        (level, wave) for level, own in enumerate(levels) for wave in greedy(own, count, best_of[level].shares)
    ]
    fractional, found, fewest = 0.0, dict[str, WavePlan](), math.inf
    for name in order[order.index(chosen) :]:
        if name == "program":
            seeds = [(level, {one: size for one, size, _ in wave}) for level, wave in wavefront]
            program = solve_program(metaops, span, count, seeds)
            fractional, shares = program.seconds, repair(metaops, span, count, program)
        elif name == "greedy":
            shares = [wave for _, wave in wavefront]
        for candidate in _candidates(metaops, devices, name, shares if name in order[:2] else []):
            placed = place_waves(metaops, candidate, devices)
            fewest = min(fewest, placed.most)
            if placed.most > devices.memory:
                continue
            made = _timed(metaops, placed, devices, name)
            if name not in found or made.step < found[name].step * (1 - EPSILON):
                found[name] = made
    if not found:
        raise UserError(
            f"No waves fit into {devices.memory:.3g} bytes per device: the least that a plan needs is {fewest:.3g}.",
            do="smaller batches of the tasks, or more devices",
        )
    compared = {name: one.step for name, one in found.items()}
    best = _first_least(found.values())
    if chosen in order[:2] and (devices.inside or devices.between):
        best = _first_least([best, *(_moved(one, metaops, devices, chosen) for one in found.values())])
    best = _exchanged(best, metaops, devices)
    compared[best.method] = min(best.step, compared.get(best.method, math.inf))
    return replace(best, ideal=sum(one.seconds for one in best_of), fractional=fractional, compared=compared)


def _timed(metaops: Sequence[MetaOp], placed: PlacedWaves, devices: Devices, method: Method) -> WavePlan:
    """Waves with devices, and what they take."""
    spans_ = tuple(simulate(metaops, placed.waves, devices))
    seconds, after = max((end for _, end in spans_), default=0.0), exchange(metaops, placed.waves, devices)
    return WavePlan(placed.waves, seconds, method, 0.0, 0.0, {}, placed.bytes, spans_, after)


def _first_least(plans: Iterable[WavePlan]) -> WavePlan:
    """The fastest; of those that differ by rounding only, the first."""
    return reduce(lambda best, one: one if one.step < best.step * (1 - EPSILON) else best, plans)


def _moved(best: WavePlan, metaops: Sequence[MetaOp], devices: Devices, method: Method) -> WavePlan:
    """The waves with whole MetaOps moved to other groups as long as that is faster: allocation knows nothing of links,
    on which it may be better to compute where the inputs are, or the parameters."""
    left, before = MOVES, None
    while best is not before and left:
        before = best
        groups = dict.fromkeys(one.devices for wave in best.waves for one in wave)
        groups |= dict.fromkeys((device,) for device in range(len(devices.nodes)) if len(devices.nodes) <= SLOWEST)
        for metaop, group in islice(itertools.product(metaops, groups), left):
            left -= 1
            slices = [one for wave in best.waves for one in wave]
            if metaop.curve.within(len(group))[0] != len(group):
                continue
            changed = [
                one._replace(size=len(group), devices=group) if one.metaop == metaop.name else one for one in slices
            ]
            if changed == slices:
                continue
            placed = place_waves(metaops, _apart(changed, metaops), devices)
            if placed.most <= devices.memory:
                best = _first_least([best, _timed(metaops, placed, devices, method)])
    return best


def _apart(slices: Sequence[Slice], metaops: Sequence[MetaOp]) -> list[Wave]:
    """Slices in the same order, as many in a wave as have devices of their own and do not need one another."""
    needs, found = {one.name: {one.name, *one.needs} for one in metaops}, list[list[Slice]]()
    for one in slices:
        wave = found[-1] if found else []
        busy = {device for other in wave for device in other.devices}
        if not wave or busy & set(one.devices) or needs[one.metaop] & {other.metaop for other in wave}:
            found.append([one])
        else:
            wave.append(one)
    return [tuple(wave) for wave in found]


def _exchanged(best: WavePlan, metaops: Sequence[MetaOp], devices: Devices) -> WavePlan:
    """The same waves with devices exchanged where that is faster: slow ones get the work that others wait for least."""
    count = len(devices.nodes)
    slowest = sorted(range(count), key=lambda one: -devices.slower[one])[:SLOWEST] if devices.slower else []
    for slow, other in itertools.product(slowest, range(count)):
        swap = {slow: other, other: slow}
        made = tuple(
            tuple(one._replace(devices=tuple(swap.get(device, device) for device in one.devices)) for one in wave)
            for wave in best.waves
        )
        held = tuple(best.held[swap.get(device, device)] for device in range(count))
        best = _first_least([best, _timed(metaops, PlacedWaves(made, held), devices, best.method)])
    return best


def _check(metaops: Sequence[MetaOp], devices: Devices) -> None:
    if not metaops or not devices.nodes:
        raise UserError("Waves need MetaOps and devices.", do="waves([MetaOp(...), ...], devices=2)")
    for one in metaops:
        if one.operators < 1 or not one.seconds or min(one.seconds.values()) <= 0:
            raise UserError(
                f"The MetaOp {one.name!r} has {one.operators} operators and seconds {dict(one.seconds)}.",
                do="at least one operator, and positive seconds for at least one number of devices",
            )
        if min(one.seconds) < 1 or min(one.seconds) > len(devices.nodes):
            raise UserError(
                f"The MetaOp {one.name!r} runs on {min(one.seconds)} devices at least; there are {len(devices.nodes)}.",
                do="its seconds for fewer devices",
            )


def _levels(span: Mapping[str, Span]) -> range:
    return range(1 + max(one.first for one in span.values()))


def simulate(metaops: Sequence[MetaOp], planned: Sequence[Wave], devices: Devices) -> list[tuple[float, float]]:
    """When each slice starts and ends; where MetaOps have backward passes, then also those of these, in the same order.

    A forward pass waits for its devices, for the operators before its own, for what its MetaOp needs, and for the
    activations that come from other devices. Backward passes follow in the reverse order, and wait for the gradients of
    their outputs, which go the same ways back. A device sends one message after the other.
    """
    by_name = {one.name: one for one in metaops}
    slices = [one for wave in planned for one in wave]
    takes = [
        by_name[one.metaop].curve.within(one.size)[1] * one.operators * devices.slowest(one.devices) for one in slices
    ]
    shares, (forward, backward) = [by_name[one.metaop].forward for one in slices], _routes(by_name, slices)
    free, links = [0.0] * len(devices.nodes), Links(devices)

    def run(number: int, seconds: float, ready: float) -> tuple[float, float]:
        ready = max(ready, *(free[device] for device in slices[number].devices), 0.0)
        for device in slices[number].devices:
            free[device] = ready + seconds
        return ready, ready + seconds

    def passes(order: Sequence[int], part: Sequence[float], after: Sequence[list[int]]) -> list[tuple[float, float]]:
        """`after`: of each slice those that take what it gives, in the order in which it is sent."""
        found, arrived = [(0.0, 0.0)] * len(slices), [0.0] * len(slices)
        for number in order:
            found[number] = run(number, takes[number] * part[number], arrived[number])
            for target in after[number]:
                size = by_name[slices[min(number, target)].metaop].output
                groups = slices[number].devices, slices[target].devices
                arrived[target] = max(arrived[target], links.moved(size, groups, found[number][1]))
        return found

    order = list(range(len(slices)))
    there = passes(order, shares, forward)
    if all(one == 1 for one in shares):
        return there
    return there + passes(order[::-1], [1 - one for one in shares], backward)


def _routes(by_name: Mapping[str, MetaOp], slices: Sequence[Slice]) -> tuple[list[list[int]], list[list[int]]]:
    """Of each slice those that take what it gives, and those whose outputs it takes."""
    latest: dict[str, int] = {}
    after, before = [list[int]() for _ in slices], [list[int]() for _ in slices]
    for number, one in enumerate(slices):
        before[number] = [latest[name] for name in ([one.metaop] if one.first else by_name[one.metaop].needs)]
        for source in before[number]:
            after[source].append(number)
        latest[one.metaop] = number
    return after, before


def _candidates(
    metaops: Sequence[MetaOp], devices: Devices, method: Method, shares: Sequence[Sequence[Share]]
) -> Iterator[list[Wave]]:
    """Waves of one method."""
    count = len(devices.nodes)
    if method == "sequential":
        yield _static_waves([components(metaops)], [tuple(range(count))])
    elif method == "static":
        yield from _static(metaops, count)
    else:
        yield _numbered(shares)


def _numbered(shares: Sequence[Sequence[Share]]) -> list[Wave]:
    """Slices whose operators follow one another."""
    at: dict[str, int] = {}
    found: list[Wave] = []
    for wave in shares:
        made = []
        for name, size, operators in wave:
            made.append(Slice(name, at.get(name, 0), operators, size))
            at[name] = at.get(name, 0) + operators
        found.append(tuple(made))
    return found


# --- plain forms ---------------------------------------------------------------------------------------------------


def _static(metaops: Sequence[MetaOp], count: int) -> Iterator[list[Wave]]:
    """The best partitions of the devices into fixed groups, each for some of the tasks one after the other: by their
    computation, as what crosses between groups is seen in a timetable only."""
    tasks, found = components(metaops), list[tuple[float, list[list[int]], list[int]]]()
    for groups in _groupings(tasks, count):
        sizes = _group_sizes([[tasks[k] for k in group] for group in groups], count)
        if sizes is None:
            continue
        seconds = max(_alone([tasks[k] for k in group], size) for group, size in zip(groups, sizes, strict=True))
        found.append((seconds, groups, sizes))
    for _, groups, sizes in sorted(found, key=lambda one: one[0])[:STATIC]:
        ends = list(itertools.accumulate(sizes))
        ranks = [tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
        yield _static_waves([[tasks[k] for k in group] for group in groups], ranks)


def _alone(tasks: Sequence[Sequence[MetaOp]], size: int) -> float:
    """Seconds of tasks one after the other on a group."""
    return sum(one.operators * one.curve.within(size)[1] for task in tasks for one in task)


def _groupings(tasks: Sequence[Sequence[MetaOp]], count: int) -> Iterator[list[list[int]]]:
    """Ways to put tasks into groups: all of them where tasks are few, else the longest tasks first into the group with
    the least work, for each number of groups."""
    if len(tasks) <= PARTITIONS:
        yield from islice(_set_partitions(list(range(len(tasks)))), 1000)
        return
    work = [sum(one.operators * one.curve(1) for one in task) for task in tasks]
    for groups in range(1, min(len(tasks), count) + 1):
        loads, found = [0.0] * groups, [list[int]() for _ in range(groups)]
        for k in sorted(range(len(tasks)), key=lambda one: -work[one]):
            least = loads.index(min(loads))
            found[least].append(k)
            loads[least] += work[k]
        yield found


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
    sizes = [max(min(one.curve.sizes) for task in group for one in task) for group in groups]
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
    chains = [[one for task in group for one in task] for group in groups]
    found: list[Wave] = []
    for k in range(max(map(len, chains))):
        wave = []
        for chain, own in zip(chains, ranks, strict=True):
            if k < len(chain):
                size = chain[k].curve.within(len(own))[0]
                wave.append(Slice(chain[k].name, 0, chain[k].operators, size, own[:size]))
        found.append(tuple(wave))
    return found
