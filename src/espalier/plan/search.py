"""The search: the layouts of every algorithm on every useful part of the cluster, priced in arrays. No torch.

After Buff (arXiv 2401.09149: pipeline, sequence, weight and optimizer groups, algorithm, recomputation) and AMSP (arXiv
2311.00257: nested factors of the three states), which is its data-parallel slice. Deviations: exhaustive over arrays
instead of a solver; parts of the cluster; shares by speed on mixed devices; a tie within the prediction's uncertainty
goes to the plan that sends less between machines, then to fewer moving parts, larger micro-batches, and less memory.

Pruned by divisibility (`layouts.grid`), by memory (seconds are only computed of what fits), and by lower bounds: a part
of the cluster whose devices at their best would not beat the best plan found is not tried. Both are exact: the search
finds the same plan with them as without. On many ranks `coarse_search` says what is priced in full.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from espalier.machine.cluster import Cluster, Node
from espalier.plan import coarse_search, collective_time, device_model, executable, memory_model, search_budget
from espalier.plan import layouts as space
from espalier.plan.axes import offload
from espalier.plan.axes.sharding import exchanges, volumes
from espalier.plan.calibration import DATASHEET, LEAST, Calibration
from espalier.plan.coarse_search import in_one_ring, least_seconds, weakest
from espalier.plan.collective_time import gpus
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.layout_estimate import Shares, fullness, price, samples_each, slowest, worst
from espalier.plan.layouts import ALGORITHMS, MODES, Layouts, Limits
from espalier.plan.request import Request
from espalier.plan.step_time import compute
from espalier.recipe.cost import WHOLE, ring_bytes
from espalier.track.charts import Point

TIE = 0.03
"""Widest tie: two layouts of one model on the same machines have mostly the same errors; their difference is surer."""
ROOM = 0.97
"""Within a tie a plan that needs more than this share of what it may hold comes last."""
ALIKE = 1.25
"""Within a tie, plans that send up to so many times the fewest bytes between machines are alike in that."""
UNEQUAL = 8
"""Data-parallel layouts of each batch that are also priced with shares by speed, where devices differ."""
KEPT = 64
"""Layouts kept of each batch for the runners-up, the front and the picture."""


@dataclass(frozen=True)
class Option:
    """One priced layout on a part of the cluster (its first `ranks` devices, fastest first)."""

    layout: Layouts
    cluster: Cluster
    seconds: float
    peak: float
    over: float
    shares: tuple[int, ...] | None = None
    """Samples of a rank of each kind of device; None: equal."""
    speeds: tuple[float, ...] | None = None
    """Speed of a rank of each kind over the mean; its tokens of each sequence are proportional. None: equal."""
    leaving: float = 0.0
    """Bytes that leave a machine in a step."""
    nodes: tuple[int, ...] = ()
    """The machines' numbers in the user's cluster, in the order of this one; empty: the same."""

    @property
    def on(self) -> collective_time.Fleet:
        """The devices of its ranks and their links, as a datasheet has them."""
        return collective_time.fleet(self.cluster, int(self.layout.world), self.layout.threads)

    @property
    def fits(self) -> bool:
        """True when no rank holds more than it may."""
        return self.over <= 0

    @property
    def cuts(self) -> bool:
        """Whether ranks share matrices, sequences or layers."""
        return bool(self.layout.tp * self.layout.sp * self.layout.pp > 1)

    @property
    def tight(self) -> bool:
        """Whether hardly any memory is left."""
        return self.peak > ROOM * (self.peak - self.over)

    def order(self, least: float = math.inf) -> tuple[Any, ...]:
        """Some memory to spare, about the `least` bytes between machines, fewer moving parts, fewer states that leave
        their machine in every micro-batch, larger micro-batches while memory is ample (every further pass issues all
        operations and adds to all gradients once more), less memory, fewer devices."""
        layout = self.layout
        limit = self.peak - self.over
        tables = self.cluster.nodes
        machine = max(min(table.devices for table in tables), layout.world // sum(table.count for table in tables))
        roomy = memory_model.ROOMY["cuda" if gpus(self.cluster) else "cpu"]
        return (
            self.tight,
            self.leaving > ALIKE * least,
            *layout.key(),
            int(layout.params > machine) + int(layout.grads > machine),
            -layout.micro_batch if self.peak <= roomy * limit else 0,
            self.peak,
            layout.world,
            layout.pp,
            layout.optimizer,
            layout.micro_batch,
        )


@dataclass(frozen=True)
class SearchResult:
    """What a search gives: a selection of what fits, fastest first; the least violating layout; how many it priced.
    `whole`: the selection of those with whole states, where it was asked for."""

    options: tuple[Option, ...]
    closest: Option | None
    priced: int
    tie: float
    whole: tuple[Option, ...] = ()

    def best(self, allowed: Callable[[Option], bool] = lambda option: True) -> Option | None:
        """The best option: of those within a tie of the fastest, the one with the fewest moving parts."""
        usable = [option for option in self.options if allowed(option)]
        if not usable:
            return None
        fastest = min(option.seconds for option in usable)
        near = [option for option in usable if option.seconds <= fastest * (1 + self.tie)]
        least = min(option.leaving for option in near if option.tight == min(other.tight for other in near))
        return min(near, key=lambda option: option.order(least))


def search(
    request: Request,
    cluster: Cluster,
    calibration: Calibration = DATASHEET,
    *,
    whole: bool = False,
    below: float = math.inf,
) -> SearchResult:
    """Prices every layout and keeps the best of each kind. Never raises for lack of memory: see `SearchResult.closest`.
    `whole`: keeps the best of those with whole states too, as a search that is pinned to them would. `below`: as in
    `Ask`."""
    tie = min(TIE, max(LEAST, calibration.spread))
    selected: list[Option] = []
    selected_whole: list[Option] = []
    closest: Option | None = None
    best = float("inf")
    priced = 0
    budget = search_budget.current()

    def runnable(batches: Iterable[Layouts]) -> Iterator[Layouts]:
        """What can run, of those that the budget allows: all until something fits."""
        return _runnable(request, budget.allowed(batches, lambda: bool(selected) or below < math.inf))

    for part, on, threads, equal, unequal in _promising_first(request, cluster, calibration):
        many = on.ranks > coarse_search.EXHAUSTIVE
        if unequal > (min(best, below) if many else best) * (1 + tie):
            continue
        limits = _limits(request, on, threads)
        batches = runnable(_grids(request, replace(limits, few=many), on))
        if many:
            cuts, count = coarse_search.cuts(request, on, batches, min(best, below))
            batches = runnable(coarse_search.refined(cuts, on.per_node, limits))
            priced = priced + count
        for every in batches:
            slow = every.algorithm != "data" and equal > best * (1 + tie)
            batch = every.at(np.flatnonzero(in_one_ring(every, on.ranks))) if slow else every
            if not len(batch):
                continue
            options, unsharded, nearest = _price(request, part, on, batch, whole)
            priced += len(batch)
            selected += options
            selected_whole += unsharded
            best = min([best, *(option.seconds for option in options)])
            if nearest is not None and (closest is None or nearest.over < closest.over):
                closest = nearest
    return SearchResult(_in_order(selected, cluster), closest, priced, tie, _in_order(selected_whole, cluster))


def anywhere(request: Request, cluster: Cluster) -> tuple[Request, SearchResult]:
    """`search`, and where nothing fits or a tier is pinned `elsewhere`."""
    result = search(request, cluster)
    if request.pin.offload == "none" or (request.pin.offload is None and result.options):
        return request, result
    return elsewhere(request, cluster, result)


def elsewhere(
    request: Request,
    cluster: Cluster,
    resident: SearchResult,
    calibration: Calibration = DATASHEET,
    *,
    whole: bool = False,
) -> tuple[Request, SearchResult]:
    """The search with what waits outside the devices in the fastest of `offload.ways`: of those within a tie the first.
    With the request of what was found; `resident` where nothing fits so either."""
    attempts = []
    for way in offload.ways(request, cluster):
        asked = request.changed(offload=way, pin=offload.pinned(request, way))
        attempts.append((replace(request, offload=way), search(asked, cluster, calibration, whole=whole)))
    fitting = [attempt for attempt in attempts if attempt[1].options]
    if not fitting and request.pin.offload is None:
        return request, resident
    if not fitting:
        return min(
            attempts,
            key=lambda attempt: math.inf if attempt[1].closest is None else attempt[1].closest.over,
            default=(request, SearchResult((), None, 0, TIE)),
        )
    fastest = min(result.options[0].seconds for _, result in fitting)
    return next(attempt for attempt in fitting if attempt[1].options[0].seconds <= fastest * (1 + attempt[1].tie))


def _in_order(options: list[Option], cluster: Cluster) -> tuple[Option, ...]:
    """The fastest first, each with the numbers that its machines have in the user's cluster."""
    orders = {id(option.cluster): option.cluster for option in options if option.cluster is not cluster}
    nodes = {key: original_nodes(cluster, ordered) for key, ordered in orders.items()}
    options = [
        replace(option, nodes=nodes[id(option.cluster)]) if id(option.cluster) in nodes else option
        for option in options
    ]
    return tuple(sorted(options, key=lambda option: (option.seconds, option.order())))


# --- parts of the cluster ----------------------------------------------------------------------------------------


def _promising_first(
    request: Request, cluster: Cluster, calibration: Calibration
) -> list[tuple[Cluster, collective_time.Fleet, int, float, float]]:
    """(cluster, fleet, threads of each rank, seconds that no plan beats with equal shares, and with shares by speed):
    the whole first, which every plan is compared with, then the parts that could be fastest."""
    candidates = []
    for part, ranks, threads in parts(request, cluster):
        on = replace(collective_time.fleet(part, ranks, threads), factors=calibration.factors)
        candidates.append((part, on, threads, *(least_seconds(request, on) if on.cuda else (0.0, 0.0))))
    return [*candidates[:1], *sorted(candidates[1:], key=lambda candidate: candidate[3])]


def parts(request: Request, cluster: Cluster) -> Iterator[tuple[Cluster, int, int]]:
    """(cluster, ranks, threads of each) to consider, the largest first; parts are of the fastest machines."""
    pinned = request.pin.ranks
    if not gpus(cluster):
        yield from _processors(request, cluster)
        return
    ordered = fastest_first(request, cluster)
    places = [place for place in ordered.devices() if place.table.device.kind == "cuda"]
    places = list(itertools.takewhile(lambda place: device_model.has(place.table.device, request.precision), places))
    if not places:
        return
    threads = request.pin.threads or max(1, min(place.table.cores // place.table.devices for place in places))
    most = min(request.recipe.plan.max_devices or len(places), len(places))
    sizes = {pinned} if pinned is not None else _sizes(ordered, most)
    for ranks in sorted((size for size in sizes if size <= len(places)), reverse=True):
        yield (cluster if ranks == len(cluster.devices()) else ordered), ranks, threads


def fastest_possible(request: Request, cluster: Cluster, calibration: Calibration) -> float:
    """Seconds that no plan on any part of the cluster can beat."""
    return min((candidate[-1] for candidate in _promising_first(request, cluster, calibration)), default=float("inf"))


def original_nodes(cluster: Cluster, ordered: Cluster) -> tuple[int, ...]:
    """The numbers in `cluster` of the machines of `ordered`, then those of its `helpers`."""
    numbers: dict[int, dict[int, None]] = {}
    for place in cluster.devices():
        numbers.setdefault(id(place.table.device), {})[place.node] = None
    left = {key: iter(known) for key, known in numbers.items()}
    machines = [number for table in ordered.nodes for number in itertools.islice(left[id(table.device)], table.count)]
    others = sum(table.count for table in cluster.helpers)
    return (*machines, *range(cluster.machines, cluster.machines + others))


def fastest_first(request: Request, cluster: Cluster) -> Cluster:
    """The cluster with its fastest GPUs first; as it is where links are measured pair by pair or machines named."""
    tables = [table for table in cluster.nodes if table.device.kind == "cuda"]
    if cluster.pairs or any(table.name for table in tables):
        return cluster
    ordered = tuple(sorted(tables, key=_slowness(request)))
    return cluster if ordered == cluster.nodes else cluster.changed(nodes=ordered)


def _slowness(request: Request) -> Callable[[Node], tuple[float, float]]:
    """What sorts machines: the fastest devices first, of equal ones those without a slow link of their own."""
    return lambda table: (
        -device_model.sustained(table.device, request.precision),
        -table.between.bandwidth if table.between else -math.inf,
    )


def _sizes(cluster: Cluster, most: int) -> set[int]:
    """Numbers of devices: all, those of one kind and faster, whole machines by halves (of slower kinds beside faster
    ones a half, a quarter and the largest power of two), and less than a machine."""
    sizes = {most}
    before = 0
    for table in cluster.nodes:
        nodes = table.count
        each = table.devices
        halved = range(3 if before else nodes.bit_length())
        powers = range(nodes.bit_length() - 1 if before else 0, nodes.bit_length())
        whole = {*(nodes >> k for k in halved), *(1 << k for k in powers)}
        sizes |= {before + each * count for count in whole if 0 < count <= nodes}
        before += nodes * each
    first = cluster.nodes[0].devices
    sizes |= {first >> k for k in range(1, first.bit_length())}
    sizes.add(most // first * first)
    return {size for size in sizes if 0 < size <= most}


def _processors(request: Request, cluster: Cluster) -> Iterator[tuple[Cluster, int, int]]:
    """Every division of the cores into ranks, on all machines and on the fastest of them."""
    pin = request.pin
    for part in _machines(cluster, request):
        places = part.devices()
        cores = min(max(1, place.table.cores) for place in places)
        if pin.ranks is not None:
            if len(places) <= pin.ranks:
                yield part, pin.ranks, pin.threads or max(1, cores // -(-pin.ranks // len(places)))
            continue
        for each in reversed(space.divisors(cores)):
            yield part, each * len(places), pin.threads or cores // each


def _machines(cluster: Cluster, request: Request) -> Iterator[Cluster]:
    """All processors, then fewer of the fastest machines; only all where links are measured or machines named."""
    there = len(cluster.devices())
    most = request.recipe.plan.max_devices or there
    if most >= there:
        yield cluster
    if there == 1 or cluster.pairs or any(table.name or table.devices > 1 for table in cluster.nodes):
        return
    tables = sorted(cluster.nodes, key=_slowness(request))
    ordered = cluster.changed(nodes=tuple(tables))
    for size in sorted(_sizes(ordered, min(most, there)), reverse=True):
        if size < there:
            yield cluster.changed(nodes=tuple(_first(tables, size)))


def _first(tables: list[Node], machines: int) -> Iterator[Node]:
    """The tables of the first `machines` machines."""
    for table in tables:
        if machines <= 0:
            return
        yield table if table.count <= machines else table.changed(count=machines)
        machines -= table.count


# --- layouts -----------------------------------------------------------------------------------------------------


def _limits(request: Request, on: collective_time.Fleet, threads: int) -> Limits:
    profile = request.profile
    again = profile.heads > 0 or profile.frozen is not None  # a decoder, also with adapters
    return Limits(
        profile,
        request.pin,
        modes=(mode,) if (mode := request.recompute) else MODES if again else ("none",),
        per_node=on.per_node,
        threads=threads,
        redundancy=request.recipe.plan.redundancy,
        experts=request.expert_ranks,
    )


def _grids(request: Request, limits: Limits, on: collective_time.Fleet) -> Iterator[Layouts]:
    pinned = request.pin.algorithm
    profile = request.profile
    for algorithm in (pinned,) if pinned else ALGORITHMS:
        if algorithm == "data" or profile.heads or (algorithm == "megatron" and profile.tensor > 1):
            yield from space.grid(algorithm, on.ranks, on.per_node, limits)


def _runnable(request: Request, batches: Iterable[Layouts]) -> Iterator[Layouts]:
    for batch in batches:
        runnable = np.flatnonzero(executable.runs(request, batch))
        if len(runnable):
            yield batch.at(runnable)


def _price(
    request: Request, part: Cluster, on: collective_time.Fleet, batch: Layouts, whole: bool
) -> tuple[list[Option], list[Option], Option | None]:
    """Of each schedule of a batch the fastest that fit and the most frugal; the same of those with `whole` states, if
    asked for; the least violating one where none fits."""
    weak = weakest(request, on) if len(on.kinds) > 1 else on
    peak, over = fullness(request, weak, batch)
    if not np.any(over <= 0):
        at = int(np.argmin(over))
        return [], [], Option(batch.at(at), part, float("inf"), float(peak[at]), float(over[at]))
    fits = np.flatnonzero(over <= 0)
    chosen = batch.at(fits)
    peak = peak[fits]
    over = over[fits]
    seconds = np.broadcast_to(slowest(request, weak, chosen), fits.shape)

    def options(picked: list[int]) -> list[Option]:
        if not picked:
            return []
        away = np.broadcast_to(leaving(request, weak, chosen.at(picked)), len(picked))
        values = (column[picked].tolist() for column in (seconds, peak, over))
        rows = zip(chosen.each(picked), *values, away.tolist(), strict=True)
        return [Option(layout, part, taken, most, beyond, leaving=sent) for layout, taken, most, beyond, sent in rows]

    picked = _pick(seconds, peak, chosen, np.arange(len(fits)))
    priced = options(picked)
    able = coarse_search.shares_by_speed(chosen, on)
    apt = [index for index in picked if able[index]][:UNEQUAL]
    unequal = by_speed(request, part, on, chosen.at(apt), seconds[apt]) if apt else []
    sent = {option.layout: option.leaving for option in priced}
    priced += [replace(option, leaving=sent[option.layout]) for option in unequal]
    unsharded = np.flatnonzero(np.broadcast_to(chosen.optimizer, fits.shape) == 1) if whole else np.empty(0, dtype=int)
    return priced, options(_pick(seconds, peak, chosen, unsharded)), None


def leaving(request: Request, on: collective_time.Fleet, layouts: Layouts) -> Any:
    """Bytes that leave the machine that sends most in a step; 0 on one machine. Groups that reach beyond a machine send
    at once from all of its ranks."""
    if on.between is None:
        return 0.0
    step = CostInputs(request, on, on.kinds[0], layouts)
    samples = samples_each(request, layouts)
    machine = on.per_node
    rounds = -(-samples // np.minimum(layouts.micro_batch, samples))
    outgoing = np.zeros(len(layouts))
    for states, division in step.parts:
        for exchange in exchanges(volumes(states, division), division, rounds):
            inside = np.clip(machine // exchange.stride, 1, exchange.ranks)
            sent = ring_bytes(exchange.operation, exchange.size, exchange.ranks) * machine / inside
            outgoing = outgoing + np.where(exchange.ranks * exchange.stride > machine, sent, 0.0)
    tokens = samples * request.profile.tokens_per_sample / layouts.sp
    if np.any(layouts.sp > 1):
        sent = sum(step.sequence(tokens).sent.values()) * step.stage_layers * machine
        outgoing = outgoing + np.where((layouts.sp > 1) & (layouts.sp * layouts.tp > machine), sent, 0.0)
    if request.expert_ranks > machine:
        outgoing = outgoing + step.experts(samples, rounds).sent["experts"] * machine
    # Of the residual stream; a stage's machines pass it on and back.
    value = tokens * request.profile.width * request.compute
    hands = np.where(layouts.pp > 1, 2.0 * layouts.chunks * value, 0.0)
    shared = np.where(layouts.tp > machine, 8.0 * step.stage_layers * value, 0.0)
    return outgoing + machine / layouts.tp * (hands + shared)


def _pick(seconds: Any, peak: Any, layouts: Layouts, of: Any) -> list[int]:
    """Indices among `of`, for each schedule: of the fastest, of the fastest of each set of mechanisms, and of the front
    of seconds against bytes."""
    schedule = np.broadcast_to(layouts.schedule, seconds.shape)[of]
    chunks = np.broadcast_to(layouts.chunks, seconds.shape)[of]
    parts = (layouts.pp, layouts.optimizer, layouts.grads, layouts.params)
    used = np.broadcast_to(sum((degree > 1) * 2**place for place, degree in enumerate(parts)), seconds.shape)
    picked: list[int] = []
    for name, each in dict.fromkeys(zip(schedule.tolist(), chunks.tolist(), strict=True)):
        mine = of[(schedule == name) & (chunks == each)]
        order = mine[np.argsort(seconds[mine], kind="stable")]
        lowest = np.minimum.accumulate(peak[order])
        front = order[np.flatnonzero(np.diff(lowest, prepend=np.inf) < 0)]
        first_of_each = order[np.unique(used[order], return_index=True)[1]]
        picked += dict.fromkeys([*order[:KEPT].tolist(), *first_of_each.tolist(), *front[:KEPT].tolist()])
    return picked


def by_speed(request: Request, part: Cluster, on: collective_time.Fleet, layouts: Layouts, equal: Any) -> list[Option]:
    """Layouts with each rank's part in proportion to its device's speed, where that fits and is faster than the `equal`
    seconds [n]: of the samples, or, where all ranks share each sequence along the context, of its tokens."""
    rates = _rates(request, on, layouts)
    ranks = np.array([kind.ranks for kind in on.kinds])
    name = "shares" if layouts.algorithm == "data" else "speeds"
    able: Any = True
    if name == "shares":
        exact = _in_proportion(request.profile.global_batch, rates, ranks)
        parts = np.ceil(exact - 1e-9).astype(int)
        able = exact.astype(int).min(axis=0) >= np.where(
            layouts.grads > 1, -(-parts.max(axis=0) // layouts.micro_batch), 1
        )
        costs = price(request, on, layouts, Shares(np.maximum(1, parts)))
    else:
        parts = rates * ranks.sum() / (rates * ranks[:, None]).sum(0)
        costs = price(request, on, layouts, Shares(speeds=parts))
    most = worst(costs)
    wins = np.flatnonzero(able & (most.over <= 0) & (most.seconds < equal))
    values = (column[wins].tolist() for column in most)
    rows: Any = zip(layouts.each(wins), map(tuple, parts[:, wins].T.tolist()), *values, strict=True)
    return [Option(layout, part, *known, **{name: each}) for layout, each, *known in rows]


def _rates(request: Request, on: collective_time.Fleet, layouts: Layouts) -> Any:
    """Passes of the whole model in a second [kinds, layouts] by a rank of each kind, alone."""
    size = np.minimum(layouts.micro_batch, samples_each(request, layouts))
    rates = []
    for kind in on.kinds:
        work = request.profile.anatomy(size, layouts.recompute, request.precision, WHOLE).whole
        alone = compute(CostInputs(request, on, kind, layouts), work)
        rates.append(1.0 / (alone.forward + alone.backward + alone.recompute) + 0.0 * layouts.dp)
    return np.array(rates)


def _in_proportion(batch: int, rates: Any, ranks: Any) -> Any:
    """Samples [kinds, layouts] of one rank of each kind, in proportion to `rates` [kinds, layouts], one at least; kinds
    are of `ranks` [kinds]."""
    least = np.zeros(rates.shape, dtype=bool)
    exact = np.zeros(rates.shape)
    for _ in ranks:
        others = np.where(least, 0.0, rates * ranks[:, None]).sum(axis=0)
        left = batch - (least * ranks[:, None]).sum(axis=0)
        exact = np.where(least, 1.0, left * rates / np.where(others > 0, others, 1.0))
        least |= exact < 1.0
    return np.maximum(exact, 1.0)


def points(result: SearchResult, chosen: Option | None, label: Callable[[Layouts], str]) -> list[Point]:
    """The options as points of the picture, the front of seconds against bytes marked."""
    lowest = float("inf")
    made = []
    for option in result.options:
        front = option.peak < lowest
        lowest = min(lowest, option.peak)
        same = option is chosen
        made.append(
            Point(option.seconds, option.peak, option.fits, label(option.layout), option.layout.algorithm, same, front)
        )
    if not made and result.closest is not None:
        closest = result.closest
        made.append(
            Point(closest.seconds, closest.peak, closest.fits, label(closest.layout), closest.layout.algorithm, True)
        )
    return made
