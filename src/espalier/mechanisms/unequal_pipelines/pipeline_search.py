"""FlashFlex: pipelines of unequal depth, stages of unequal layers and tensor degrees, shares by speed. Pure; no torch.

After FlashFlex (arXiv 2409.01143), which searches such layouts by graph partitioning. Where we deviate:

- Equal devices of one machine are one class, so that a layout is counts of classes, not names of devices.
- Layers of a pipeline's stages are solved exactly (`solve_layers`), by speed; memory is only a bound. The paper gives
  them in proportion to memory.
- Every level of the search may leave devices out.
- Up to eight devices every partition into pipelines is tried. Beyond, seeds by links, classes and equal parts are
  improved by local moves. By links, machines are joined along the fastest ones, where the paper takes METIS's minimum
  cut: METIS is no part of a plain install, and the same input is to give the same plan everywhere.
- 1F1B instead of GPipe; micro-batches of each pipeline are found together (`share_micro_batches`), not by device count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from espalier.mechanisms.unequal_pipelines.pipeline_solver import (
    DeviceClass,
    Group,
    Slot,
    SolvedPipeline,
    SolvedStage,
    StageCosts,
    StageRate,
    UnequalLayout,
    side_by_side,
    solve_layers,
)
from espalier.recipe.errors import UserError

TENSOR = (1, 2, 4, 8)
"""Tensor degrees that are tried: a group stays inside one class, and so inside one machine."""
EXHAUSTIVE = 8
"""Devices up to which every partition is tried."""
PERMUTED = 4
"""Stages up to which every order is tried; beyond, an order by links is improved by exchanging neighbours."""
COMPOSITIONS = 48
"""Ways to divide the classes of one pipeline into tensor groups that are all tried; beyond, one class after the other
changes."""
REFINED = 3
"""Of them those whose stages are then put into the best order."""
EVALUATIONS = 400
"""Pipelines that a search by local moves solves at most, about two seconds. A number of them, as a clock would make
plans differ from run to run."""


# --- the search ---------------------------------------------------------------------------------------------------

Counts = tuple[int, ...]
"""Devices of each class."""

RateKey = tuple[Group, Group | None, bool, int]
"""A stage and the following one, whether it is the first, and how many stages are left with it."""


class Search:
    """Finds the fastest layout of classes of devices. Has state: pipelines solved so far.

    Args:
        classes: the devices.
        costs: the model on them.
        whole: layouts that leave devices out do not count.
    """

    def __init__(self, classes: Sequence[DeviceClass], costs: StageCosts, whole: bool = False) -> None:
        self.classes, self.costs, self.whole = tuple(classes), costs, whole
        self.there = tuple(
            device_class.devices if costs.degrees(number) else 0 for number, device_class in enumerate(self.classes)
        )
        self.priced = 0
        self._pipelines: dict[Counts, SolvedPipeline | None] = {}
        self._solutions: dict[Counts, SolvedPipeline | None] = {}
        self._alike: dict[int, list[int]] = {}
        for number, device_class in enumerate(self.classes):
            self._alike.setdefault(number if device_class.like is None else device_class.like, []).append(number)
        self._orders: dict[frozenset[int], tuple[int, ...]] = {}
        self._rates: dict[RateKey, StageRate] = {}
        self._speeds = [self._speed(number) for number in range(len(self.classes))]

    def _speed(self, number: int) -> float:
        """Layers per second of one device of a class."""
        degrees = self.costs.degrees(number)
        return 1.0 / self.costs.layer(Group(number, min(degrees))) / min(degrees) if degrees else 0.0

    # --- a pipeline of some devices

    def pipeline(self, counts: Counts) -> SolvedPipeline | None:
        """The fastest pipeline of exactly these devices; None where the model does not fit."""
        if counts not in self._pipelines:
            self.priced += 1
            kinds = self._first_alike(counts)
            alike = tuple(counts[kind] for kind in kinds)
            if alike not in self._solutions:
                self._solutions[alike] = self._solved(alike)
            solution = self._solutions[alike]
            self._pipelines[counts] = None if solution is None else solution.on(kinds)
        return self._pipelines[counts]

    def _first_alike(self, counts: Counts) -> list[int]:
        """The classes in an order in which of alike ones the first have most devices."""
        kinds = list(range(len(counts)))
        for members in self._alike.values():
            ordered = sorted(members, key=lambda kind: (-counts[kind], kind))
            for place, kind in zip(members, ordered, strict=True):
                kinds[place] = kind
        return kinds

    def _weight(self, counts: Counts) -> float:
        """Micro-batches after the first that these devices get, if all devices take part by their speed."""
        whole = sum(speed * count for speed, count in zip(self._speeds, self.there, strict=True))
        part = sum(speed * count for speed, count in zip(self._speeds, counts, strict=True))
        return max(1.0, self.costs.micro_batches * part / whole - 1)

    def _solved(self, counts: Counts) -> SolvedPipeline | None:
        used = [(kind, count) for kind, count in enumerate(counts) if count]
        ways = [
            [[Group(kind, tensor) for tensor in degrees] for degrees in tensor_groups(count, self.costs.degrees(kind))]
            for kind, count in used
        ]
        weight = self._weight(counts)
        if math.prod(map(len, ways)) <= COMPOSITIONS:
            chosen = [[group for groups in composition for group in groups] for composition in itertools.product(*ways)]
            begun = [(self._begun(groups, weight), groups) for groups in chosen]
        else:
            begun = list(self._one_by_one(ways, weight))
        ranked = sorted(
            ((made.fixed + (weight + 1) * made.each, groups) for made, groups in begun if made is not None),
            key=lambda candidate: candidate[0],
        )
        best: SolvedPipeline | None = None
        for _, groups in ranked[:REFINED]:
            best = _faster(best, self._ordered(groups, weight), weight)
        return best

    def _one_by_one(
        self, ways: Sequence[Sequence[list[Group]]], weight: float
    ) -> Iterator[tuple[SolvedPipeline | None, list[Group]]]:
        """Compositions of the classes' groups, begun: of each class in turn the best, beside what the others have."""
        at = [way[0] for way in ways]
        best: SolvedPipeline | None = None
        for place, groups in enumerate(ways):
            for composition in groups:
                other = [*at[:place], composition, *at[place + 1 :]]
                together = [group for part in other for group in part]
                made = self._begun(together, weight)
                yield made, together
                faster = _faster(best, made, weight)
                at, best = (other, faster) if faster is not best else (at, best)

    def _begun(self, groups: Sequence[Group], weight: float) -> SolvedPipeline | None:
        """Stages in the order of the links, one way or the other."""
        if len(groups) > self.costs.layers:
            return None
        start = self._by_links(groups)
        return _faster(self.in_order(start, weight), self.in_order(start[::-1], weight), weight)

    def _ordered(self, groups: Sequence[Group], weight: float) -> SolvedPipeline | None:
        """The fastest order of stages: all of them where they are few."""
        best: SolvedPipeline | None = None
        if len(groups) <= PERMUTED:
            for order in dict.fromkeys(itertools.permutations(groups)):
                best = _faster(best, self.in_order(order, weight), weight)
            return best
        best = self._begun(groups, weight)
        if best is None:
            return None
        at = tuple(stage.group for stage in best.stages)
        for a, b in itertools.combinations(range(len(groups)), 2):
            if at[a] != at[b] and (b - a == 1 or len(groups) <= EXHAUSTIVE):
                other = (*at[:a], at[b], *at[a + 1 : b], at[a], *at[b + 1 :])
                faster = _faster(best, self.in_order(other, weight), weight)
                at, best = (other, faster) if faster is not best and faster is not None else (at, best)
        return best

    def in_order(self, order: Sequence[Group], weight: float) -> SolvedPipeline | None:
        """The pipeline of stages in this order, with the best layers."""
        rates = stage_rates(order, self.costs, self._rates)
        layers = solve_layers(self.costs.layers, rates, weight)
        return None if layers is None else pipeline_of(order, layers, rates, self.costs)

    def _by_links(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """Stages machine by machine, the machines along the path whose slowest hand-over is fastest."""
        of_machine: dict[int, list[Group]] = {}
        for group in sorted(groups, key=lambda group: (self.costs.layer(group), group)):
            of_machine.setdefault(self.classes[group.kind].machine, []).append(group)
        key = frozenset(of_machine)
        if key not in self._orders:
            heads = {machine: members[0] for machine, members in of_machine.items()}
            table = {(a, b): self.costs.send(heads[a], heads[b]) for a, b in itertools.permutations(heads, 2)}
            self._orders[key] = fastest_path(sorted(of_machine), table)
        return tuple(group for machine in self._orders[key] for group in of_machine[machine])

    # --- pipelines side by side

    def layout(self, parts: Sequence[Counts]) -> UnequalLayout | None:
        """The layout of one pipeline for each of `parts`, with the best shares; None where one cannot be."""
        devices = [device_class.devices for device_class in self.classes]
        if self.whole and list(map(sum, zip(*parts, strict=True))) != devices:
            return None
        solved = [self.pipeline(part) for part in parts]
        made = [pipeline for pipeline in solved if pipeline is not None]
        if len(made) < len(solved) or not made:
            return None
        layout = side_by_side(made, self.classes, self.costs)
        return None if layout is None or math.isinf(layout.seconds) else layout

    def best(self) -> UnequalLayout:
        """The fastest layout. Raises UserError where none fits."""
        with_all: dict[int, float] = {}
        best: UnequalLayout | None = None
        for parts in self._candidates():
            layout = self.layout(parts)
            if layout is None:
                continue
            if best is None or layout.seconds < best.seconds * (1 - 1e-12):
                best = layout
            for kind in range(len(self.classes)):
                if kind not in layout.unused and self.there[kind]:
                    with_all[kind] = min(with_all.get(kind, math.inf), layout.seconds)
        if best is None:
            raise UserError(
                f"No pipeline of these devices holds the model's {self.costs.layers} layers.",
                why="each stage holds a layer at least, and its memory bounds how many",
                do="a smaller micro-batch, recomputation, or more devices",
            )
        polished = self.polished(best)
        with_unused = {kind: max(with_all[kind], polished.seconds) for kind in polished.unused if kind in with_all}
        return replace(polished, priced=self.priced, with_unused=with_unused)

    def polished(self, layout: UnequalLayout) -> UnequalLayout:
        """The layout with layers and orders for the micro-batches that its pipelines turned out to have."""
        better: list[SolvedPipeline] = []
        for pipeline in layout.pipelines:
            groups = [stage.group for stage in pipeline.stages]
            weight = max(1.0, pipeline.micro_batches - 1)
            better.append(_faster(pipeline, self._ordered(groups, weight), weight) or pipeline)
        made = side_by_side(better, self.classes, self.costs)
        return layout if made is None or made.seconds >= layout.seconds else made

    def _candidates(self) -> Iterator[Sequence[Counts]]:
        """Partitions to try: all of them where devices are few."""
        if sum(self.there) <= EXHAUSTIVE:
            yield from partitions(self.there)
            return
        tried: set[tuple[Counts, ...]] = set()
        for seed in self._seeds():
            key = _key(seed)
            if key and key not in tried:
                tried.add(key)
                yield key
        ranked = sorted((layout.seconds, key) for key in tried if (layout := self.layout(key)) is not None)
        for _, start in ranked[:4]:
            yield from self._climb(start, tried)

    def _climb(self, start: tuple[Counts, ...], tried: set[tuple[Counts, ...]]) -> Iterator[Sequence[Counts]]:
        """Local moves from a partition, as long as one makes it faster and pipelines may be solved."""
        at, layout = start, self.layout(start)
        seconds = math.inf if layout is None else layout.seconds
        moved = True
        while moved:
            moved = False
            for other in self._moves(at):
                key = _key(other)
                if not key or key in tried:
                    continue
                if self.priced >= EVALUATIONS:
                    return
                tried.add(key)
                yield key
                made = self.layout(key)
                if made is not None and made.seconds < seconds * (1 - 1e-9):
                    at, seconds, moved = key, made.seconds, True
                    break

    def _seeds(self) -> Iterator[Sequence[Counts]]:
        """All together; machine by machine; machines along fast links; class by class; equal parts of all classes, less
        one after the other of the slowest; one class alone, in equal parts; each class in as many pipelines as hold the
        model."""
        there, kinds = self.there, range(len(self.classes))
        machines = sorted({device_class.machine for device_class in self.classes})
        yield [_only(there, [k for k in kinds if self.classes[k].machine == machine]) for machine in machines]
        for joined in self._joined(machines):
            yield [_only(there, [k for k in kinds if self.classes[k].machine in some]) for some in joined]
        alone = [_only(there, [kind]) for kind in kinds if there[kind]]
        yield alone
        slowest = sorted((kind for kind in kinds if there[kind]), key=lambda kind: (self._speeds[kind], kind))
        for parts in sorted({n for count in there for n in range(1, count + 1) if count % n == 0}):
            yield [piece for counts in alone for piece in _equal_parts(counts, parts)]
            yield from (_equal_parts(counts, parts) for counts in alone)
            at = there
            yield _equal_parts(at, parts)
            for kind in slowest[:-1]:
                fewer = _less(at, kind, at[kind])
                yield _equal_parts(fewer, parts)
                before, after = (self.layout(_key(_equal_parts(counts, parts))) for counts in (at, fewer))
                if after is not None and (before is None or after.seconds < before.seconds):
                    at = fewer
        yield [piece for counts in alone for piece in self._narrowest(counts)]

    def _joined(self, machines: Sequence[int]) -> Iterator[list[frozenset[int]]]:
        """Sets of machines, fewer each time: the two that are joined have the fastest of the slowest links between
        their machines (complete linkage)."""
        heads = {
            device_class.machine: Group(kind)
            for kind, device_class in reversed(list(enumerate(self.classes)))
            if self.there[kind]
        }
        at = [frozenset([machine]) for machine in machines if machine in heads]

        def slowest(pair: tuple[frozenset[int], frozenset[int]]) -> tuple[float, list[int], list[int]]:
            first, other = pair
            seconds = max(self.costs.send(heads[a], heads[b]) for a in first for b in other)
            return seconds, sorted(first), sorted(other)

        while len(at) > 2:
            first, other = min(itertools.combinations(at, 2), key=slowest)
            at = [*(some for some in at if some not in (first, other)), first | other]
            yield at

    def _narrowest(self, counts: Counts) -> list[Counts]:
        for parts in range(max(counts), 0, -1):
            pieces = _equal_parts(counts, parts)
            if all(self.pipeline(piece) is not None for piece in set(pieces)):
                return pieces
        return []

    def _moves(self, at: tuple[Counts, ...]) -> Iterator[Sequence[Counts]]:
        """A device (or half of a class) to another pipeline, out or in; two pipelines as one, one as two; one out."""
        spare = tuple(there - sum(part[k] for part in at) for k, there in enumerate(self.there))
        parts: list[Counts] = [*at, spare]
        last = len(at)
        distinct = [n for n, part in enumerate(parts) if part not in parts[:n] or n == last]
        for a, b in itertools.permutations(distinct, 2):
            if a < last and b < last and a < b:
                yield [*(part for n, part in enumerate(at) if n not in (a, b)), _sum(parts[a], parts[b])]
            for kind, count in enumerate(parts[a]):
                for size in sorted({1, count // 2, count} - {0}) if count else ():
                    changed = list(parts)
                    changed[a], changed[b] = _less(parts[a], kind, size), _less(parts[b], kind, -size)
                    yield changed[:last]
        for n in distinct:
            if n < last:
                rest = [part for index, part in enumerate(at) if index != n]
                yield rest
                yield [*rest, *_equal_parts(parts[n], 2)]
                for kind, count in enumerate(parts[n]):
                    if 0 < count < sum(parts[n]):
                        yield [*rest, _less(parts[n], kind, count), _only(parts[n], [kind])]
            elif any(spare):
                yield [*at, spare]


def stage_rates(
    order: Sequence[Group], costs: StageCosts, known: dict[RateKey, StageRate] | None = None
) -> list[StageRate]:
    """What is known of each stage of a pipeline of these groups. `known`: those of the same costs so far."""
    rates, stages, known = [], len(order), {} if known is None else known
    for number, (group, following) in enumerate(zip(order, [*order[1:], None], strict=True)):
        key = group, following, number == 0, stages - number
        if key not in known:
            slot = Slot(number, stages)
            send = 0.0 if following is None else costs.send(group, following)
            extra = costs.extra(group, slot) + (send if costs.awaits_sends else 0.0)
            known[key] = StageRate(costs.layer(group), extra, costs.most_layers(group, slot), send)
        rates.append(known[key])
    return rates


def pipeline_of(
    order: Sequence[Group], layers: Sequence[int], rates: Sequence[StageRate], costs: StageCosts
) -> SolvedPipeline:
    """The pipeline of stages in this order with these layers."""
    seconds = [rate.extra + n * rate.layer for rate, n in zip(rates, layers, strict=True)]
    stages = tuple(SolvedStage(*stage) for stage in zip(order, layers, seconds, strict=True))
    fixed, each = costs.profile(seconds)
    if costs.awaits_sends or len(order) == 1:
        return SolvedPipeline(stages, fixed, each)
    sends = [rate.send for rate in rates[:-1]]
    slower = max(0.0, max(sends) / 2 - each)  # each way a link carries a message for each micro-batch
    return SolvedPipeline(stages, fixed + sum(sends) - slower, each + slower)


def _faster(first: SolvedPipeline | None, other: SolvedPipeline | None, weight: float) -> SolvedPipeline | None:
    """The first of two pipelines unless the second is faster with `weight + 1` micro-batches."""
    if first is None or other is None:
        return first or other
    before, after = (each.fixed + (weight + 1) * each.each for each in (first, other))
    return other if after < before * (1 - 1e-12) else first


# --- sets of devices ----------------------------------------------------------------------------------------------


def tensor_groups(count: int, degrees: Sequence[int]) -> list[tuple[int, ...]]:
    """Ways to divide `count` equal devices into tensor groups of these degrees, the narrowest first: all of them up to
    eight devices, beyond those that begin with as many of one degree as there can be."""
    degrees = sorted(degrees)
    if count <= EXHAUSTIVE:
        return sorted(_sums(count, degrees, degrees[-1]), key=lambda division: (division[0], -len(division)))
    divisions = []
    for degree in degrees:
        rest, groups = count, []
        for width in reversed([d for d in degrees if d <= degree]):
            groups += [width] * (rest // width)
            rest %= width
        if not rest:
            divisions.append(tuple(groups))
    return list(dict.fromkeys(divisions))


def _sums(count: int, degrees: Sequence[int], most: int) -> list[tuple[int, ...]]:
    if count == 0:
        return [()]
    return [
        (degree, *rest)
        for degree in degrees
        if degree <= min(most, count)
        for rest in _sums(count - degree, degrees, degree)
    ]


def partitions(there: Counts) -> Iterator[list[Counts]]:
    """Every way to divide some of these devices among pipelines, each once: pipelines in falling order."""

    def of(rest: Counts, most: Counts) -> Iterator[list[Counts]]:
        yield []
        for part in itertools.product(*(range(count, -1, -1) for count in rest)):
            if any(part) and part <= most:
                for others in of(tuple(a - b for a, b in zip(rest, part, strict=True)), part):
                    yield [part, *others]

    yield from (parts for parts in of(there, there) if parts)


PairSeconds = Mapping[tuple[int, int], float]
"""Of a step from one node to another."""

_BestPaths = dict[tuple[frozenset[int], int], tuple[float, tuple[int, ...]]]
"""(cost, path) by the nodes of the path and its last one."""


def fastest_path(nodes: Sequence[int], seconds: PairSeconds) -> tuple[int, ...]:
    """The path through all nodes whose slowest step is fastest, of equals the one with the least sum: exactly up to 10
    nodes (Held and Karp), beyond by taking the fastest next step from each start."""
    if len(nodes) > 10:
        return min((_greedy_path(start, nodes, seconds) for start in nodes), key=lambda path: _path_cost(path, seconds))
    slowest = _shortest(nodes, seconds, max)[0]
    within = {pair: step if step <= slowest else math.inf for pair, step in seconds.items()}
    return _shortest(nodes, within, lambda before, step: before + step)[1]


def _shortest(
    nodes: Sequence[int], seconds: PairSeconds, joined: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """(cost, path) of the best path through all nodes, its steps `joined` one after the other."""
    best: _BestPaths = {(frozenset([node]), node): (0.0, (node,)) for node in nodes}
    for _ in nodes[1:]:
        following: _BestPaths = {}
        for (seen, last), (cost, path) in best.items():
            for node in nodes:
                if node not in seen:
                    key, value = (seen | {node}, node), (joined(cost, seconds[last, node]), (*path, node))
                    following[key] = min(following.get(key, value), value)
        best = following
    return min(best.values())


def _greedy_path(start: int, nodes: Sequence[int], seconds: PairSeconds) -> tuple[int, ...]:
    path, rest = [start], [node for node in nodes if node != start]
    while rest:
        path.append(min(rest, key=lambda node: (seconds[path[-1], node], node)))
        rest.remove(path[-1])
    return tuple(path)


def _path_cost(path: Sequence[int], seconds: PairSeconds) -> tuple[float, float]:
    steps = [seconds[hop] for hop in itertools.pairwise(path)]
    return max(steps), sum(steps)


def _key(parts: Sequence[Counts]) -> tuple[Counts, ...]:
    return tuple(sorted((part for part in parts if any(part)), reverse=True))


def _only(counts: Counts, kinds: Sequence[int]) -> Counts:
    return tuple(count if kind in kinds else 0 for kind, count in enumerate(counts))


def _equal_parts(counts: Counts, parts: int) -> list[Counts]:
    """Each class divided among so many parts; where it does not divide, the first ones get more."""
    return [tuple(count // parts + (n < count % parts) for count in counts) for n in range(parts)]


def _less(counts: Counts, kind: int, size: int) -> Counts:
    return (*counts[:kind], counts[kind] - size, *counts[kind + 1 :])


def _sum(first: Counts, other: Counts) -> Counts:
    return tuple(a + b for a, b in zip(first, other, strict=True))


def place(classes: Sequence[DeviceClass], costs: StageCosts, whole: bool = False) -> UnequalLayout:
    """The fastest pipelines of unequal devices that this search finds. Pure: the same input gives the same layout.

    Args:
        classes: the devices; those of one machine and speed are one class.
        costs: seconds and memory of the model on them: `espalier.mechanisms.unequal_pipelines.cost.EngineCosts`
        has the planner's, for a
            request on a cluster; any object with these methods will do.
        whole: no device may be left out.

    Returns:
        Pipelines with stages, layers and micro-batches; what is left out; seconds of a step.

    Raises:
        UserError: the model does not fit, or there are no devices.
    """
    if not classes or sum(device_class.devices for device_class in classes) < 1:
        raise UserError("There are no devices to place a model on.", do="DeviceClass(name, machine, devices)")
    return Search(classes, costs, whole).best()


def beside_each_other(
    classes: Sequence[DeviceClass], costs: StageCosts, parts: Sequence[Counts], like: UnequalLayout
) -> UnequalLayout | None:
    """One pipeline for each of `parts`, devices of each class; None: one cannot be.

    Args:
        classes, costs: see `place`.
        like: what was searched, of which `parts` are copies on other devices.
    """
    search = Search(classes, costs)
    made = search.layout(parts)
    return None if made is None else replace(search.polished(made), priced=like.priced)
