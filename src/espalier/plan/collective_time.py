"""Collective time: the links a group of ranks uses, and for how many seconds. NumPy arrays price many groups at once;
no torch.

NumPy arrays price many groups at once. Collectives are rings of equal steps (AMSP, arXiv 2311.00257; Buff, arXiv
2401.09149): bytes over the slowest link they cross, shared with the groups beside them, plus a latency for each hop and
a price for each call. The two last are ours. On processors sums and gathers go inside machines first, as the engine
does them there (`plan.axes.placement`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from espalier.machine.cluster import Cluster, Device, Link, Node, Place
from espalier.plan.axes.placement import inside
from espalier.plan.calibration_factors import PLAIN, CostFactors
from espalier.plan.device_model import DeviceUse
from espalier.plan.request import Crossing
from espalier.recipe.cost import Number, in_turn, ring_bytes

if TYPE_CHECKING:
    from espalier.plan.base import Plan

LINK_SHARE = {"inside": 0.78, "between": 0.9}
"""What collectives reach of a declared bandwidth, where the link does not say. Inside: all-reduce on 8 A800s moves
149-156 of 200 GB/s per rank; between: 91-97 GB/s of 4 x 200 Gbit/s (measurements that Buff's planner uses)."""
TREE = 0.92
"""Share of a ring's bandwidth that a tree of machines reaches: NCCL 2.11, src/graph/tuning.cc."""
ALL_TO_ALL = (16, 0.1)
"""All-to-all between machines: beyond 16 ranks slower than its bytes over the link by ranks^0.1. 23 and 10 GB/s leave a
rank at 16 and 128 ranks, where its share of the link alone allows 21 and 12 (the same measurements)."""
PIECE = 4 * 512 * 2**10
"""Bytes that a GPU of a tree takes in before it passes them on: pieces of 512 KiB (NVIDIA/nccl issue 391), in a pair of
trees for each of a machine's network cards (issue 545), 4 assumed."""
CHAIN = 11e-6
"""Seconds that each rank of a broadcast adds beyond its latency: NCCL's is a chain through all ranks (NVIDIA/nccl issue
358). InternEvo's 7B loses 1.24 s more at 1,024 ranks than at 512 when optimizer states are split over all of them: 162
owners, since tensors are owned whole, times 512 ranks more, 15 microseconds each."""

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "ring"]


@dataclass(frozen=True)
class DeviceGroup:
    """Equal devices of a fleet: their table, how each is used, and how many ranks they carry together."""

    table: Node
    setting: DeviceUse
    ranks: int


@dataclass(frozen=True)
class Fleet:
    """The devices that `ranks` ranks sit on, and their links as collectives find them.

    `per_node`: ranks on each machine (the fewest); `inside`, `between`: the slowest link of each level.
    `factors`: what a calibration says of devices and links; `optimizers`: machines that hold the model for the others,
    `aggregators`: those that add up gradients on the way, and `serving` the link of a machine to them, `uplink` that of
    theirs.
    """

    ranks: int
    nodes: int
    per_node: int
    kinds: tuple[DeviceGroup, ...]
    inside: Link
    between: Link | None
    factors: CostFactors = PLAIN
    optimizers: tuple[Node, ...] = ()
    serving: Link | None = None
    aggregators: tuple[Node, ...] = ()
    uplink: Link | None = None

    @property
    def cuda(self) -> bool:
        """True when the ranks sit on GPUs."""
        return self.kinds[0].table.device.kind == "cuda"

    @property
    def by_level(self) -> bool:
        """True when sums and gathers go inside machines first: the engine leads them so on processors, where all
        machines have as many ranks."""
        return self.between is not None and not self.cuda and self.ranks == self.nodes * self.per_node


def seats(cluster: Cluster, ranks: int) -> list[Place]:
    """The device of each rank: GPUs in order where there are any, else equally many ranks on each processor; machine by
    machine, in the order in which a ring through them crosses slow links least."""
    places = cluster.devices()
    each, over = divmod(ranks, len(places))
    gpus = [place for place in places if place.table.device.kind == "cuda"]
    taken = gpus[:ranks] or [place for index, place in enumerate(places) for _ in range(each + (index < over))]
    assert ranks == len(taken), "planners refuse more ranks than GPUs"
    if not cluster.pairs:
        return taken
    turn = {machine: index for index, machine in enumerate(cluster.ring)}
    return sorted(taken, key=lambda place: turn[place.node])


def power_and_price(cluster: Cluster, ranks: int, optimizers: bool = False) -> tuple[float, float]:
    """Watts of the devices of `ranks`, and the price for an hour of their machines, with `optimizers` also of the
    optimizer nodes. Each is 0 where one is not known."""
    places = {place.rank: place for place in seats(cluster, ranks)}.values()
    watts = [place.table.device.watts for place in places]
    prices = list({place.node: place.table.price for place in places}.values())
    if optimizers:
        prices += [node.price for node in cluster.optimizers for _ in range(node.count)]
    return sum(watts) if all(watts) else 0.0, sum(prices) if all(prices) else 0.0


def used(cluster: Cluster, plan: Plan) -> list[Device]:
    """The devices of a plan's ranks."""
    there = {(rank.node, rank.device) for rank in plan.ranks}
    return [place.table.device for place in cluster.devices() if (place.node, place.device_name) in there]


def gpus(cluster: Cluster) -> int:
    """How many GPUs the cluster has."""
    return sum(table.count * table.devices for table in cluster.nodes if table.device.kind == "cuda")


def fleet(cluster: Cluster, ranks: int, threads: int = 1) -> Fleet:
    """The fleet of `ranks` ranks of `threads` threads on `cluster`, seated as planners do."""
    if (ranks, threads) in cluster.fleets:
        return cluster.fleets[ranks, threads]
    placed = seats(cluster, ranks)
    on_device = Counter(place.rank for place in placed)
    on_node = Counter(place.node for place in placed)
    used = sorted(on_device)
    by_kind: dict[tuple[int, int], list[Any]] = {}
    for place, kind in zip(placed, kinds(placed), strict=True):
        by_kind.setdefault(kind, [place.table, 0])[1] += 1
    groups = []
    for (_, processes), (table, count) in by_kind.items():
        cores = table.cores or threads * processes
        setting = DeviceUse() if table.device.kind == "cuda" else DeviceUse(threads, processes, cores)
        groups.append(DeviceGroup(table, setting, count))
    across = len(on_node) > 1
    seated = cluster.fleets[ranks, threads] = Fleet(
        ranks=ranks,
        nodes=len(on_node),
        per_node=min(on_node.values()),
        kinds=tuple(groups),
        inside=reached(cluster.slowest(used, "inside"), "inside"),
        between=reached(cluster.slowest(used, "between"), "between") if across else None,
        optimizers=cluster.optimizers,
        serving=reached(cluster.slowest(used, "between"), "between") if cluster.optimizers else None,
        aggregators=cluster.aggregators,
        uplink=reached(cluster.between, "between") if cluster.optimizers and cluster.between else None,
    )
    return seated


def kinds(placed: Sequence[Place]) -> list[tuple[int, int]]:
    """What ranks in these places have in common with others: their device's table, and how many ranks it carries."""
    on_device = Counter(place.rank for place in placed)
    return [(id(place.table), on_device[place.rank]) for place in placed]


def reached(link: Link, level: Literal["inside", "between"]) -> Link:
    """The link as a collective finds it: a declared one less what protocols take."""
    share = 1.0 if link.measured else link.share or LINK_SHARE[level]
    return link.changed(bandwidth=link.bandwidth * share)


def seconds(operation: Operation, size: Number, ranks: Number, stride: Number, on: Fleet) -> Number:
    """Seconds of one collective of groups of `ranks` ranks, `stride` apart, all groups at once.

    Args:
        operation: see `recipe.cost.ring_bytes`.
        size: bytes of the whole tensor (of a send, or of one step of a ring: what is sent).
        ranks, stride: of each group; a send goes from a rank to the one `stride` further, in a ring from every rank.
        on: the fleet.

    Returns:
        An array as the arguments broadcast; 0 where a group has one rank (not for a send).
    """
    size, ranks, stride = np.broadcast_arrays(np.asarray(size, dtype=float), ranks, stride)
    if operation in _BY_LEVEL and on.by_level:
        return _level_by_level(operation, size, ranks, stride, on)
    return _at_once(operation, size, ranks, stride, on)


def encoded(on: Fleet, crossing: Crossing | None, width: Number) -> Fleet:
    """The fleet as encoded values of `width` bytes find it: links of the codec's level carry as many raw bytes/s as the
    slower of sending and of encoding and decoding, which one thread does in turn while other pieces are sent."""
    if crossing is None:
        return on
    each = width / 4.0

    def through(link: Link) -> Link:
        speed = each * min(in_turn(crossing.encode, crossing.decode), crossing.ratio * link.bandwidth)
        return link.changed(bandwidth=speed)

    near = through(on.inside) if crossing.level != "between" else on.inside
    far = through(on.between) if on.between is not None and crossing.level != "inside" else on.between
    return replace(on, inside=near, between=far)


_BY_LEVEL = ("all_reduce", "all_gather", "reduce_scatter")


def _level_by_level(operation: Operation, size: Number, ranks: Number, stride: Number, on: Fleet) -> Number:
    """Seconds of a collective that goes along an axis inside machines and then, with the share of the tensor that each
    of a machine's ranks is left with, along one between them (AMSP, section 2.5)."""
    inner = inside(ranks, stride, on.per_node)
    there = "reduce_scatter" if operation == "all_reduce" else operation
    split = (inner > 1) & (inner < ranks)
    near = _at_once(there, size, inner, stride, on) * (2 if operation == "all_reduce" else 1)
    far = _at_once(operation, size / inner, ranks // inner, stride * inner, on)
    return np.where(split, near + far, _at_once(operation, size, ranks, stride, on))


def _at_once(operation: Operation, size: Number, ranks: Number, stride: Number, on: Fleet) -> Number:
    """Seconds of one ring (or tree) through the whole group."""
    sends = operation == "send"
    group = np.where(sends, 2, ranks)
    # Stages follow one another through the machines, so of a pipeline over several some hand-over leaves a machine, and
    # the slowest sets the pace.
    members = np.where(sends, 1, np.clip(on.per_node // stride, 1, group))
    members = members if on.between is not None else group
    crossing = members < group
    bytes_ = ring_bytes(operation, size, group)
    call = on.factors.call
    near = on.factors.inside * bytes_ / on.inside.bandwidth
    hops = _hops(operation, group, members, on)
    taken = near + call * (on.inside.launch + hops[0] * on.inside.latency)
    if on.between is not None:
        far = on.factors.between * bytes_ * _sharing(operation, members, stride, on) / on.between.bandwidth
        if operation == "all_to_all":
            far = _all_to_all(bytes_, group, members, on)
        apart = np.maximum(near, far) + call * (
            on.between.launch + hops[0] * on.inside.latency + hops[1] * on.between.latency
        )
        if operation == "all_reduce" and on.cuda:
            apart = np.minimum(apart, _tree(size, group, members, stride, on))
        taken = np.where(crossing, apart, taken)
    return np.where((group > 1) & (size > 0), taken, 0.0)


def _tree(size: Number, group: Number, members: Number, stride: Number, on: Fleet) -> Number:
    """Seconds of an all-reduce of GPUs up and down two trees of machines, each for half of the tensor, with a chain in
    every machine: fewer steps than a ring, and a little slower. Between two machines the tensor crosses once each way,
    not almost twice (NVIDIA/nccl-tests issue 196)."""
    assert on.between is not None
    machines = group // members
    crossed = np.where(machines == 2, size, 2 * size / TREE)
    far = on.factors.between * crossed * _sharing("all_reduce", members, stride, on) / on.between.bandwidth
    near = on.factors.inside * 2 * size / on.inside.bandwidth
    steps = 2 * (members - 1)
    climbs = 2 * np.ceil(np.log2(machines))
    latency = on.between.launch + steps * on.inside.latency + climbs * on.between.latency
    first = on.factors.inside * steps * PIECE / on.inside.bandwidth
    first = first + on.factors.between * climbs * PIECE / on.between.bandwidth
    return np.maximum(near, far) + on.factors.call * latency + first


def chained(ranks: Number, on: Fleet) -> Number:
    """Seconds that a broadcast takes beyond bytes and latency because its ranks wait for one another; on processors 0,
    where Gloo climbs a tree."""
    return on.factors.call * CHAIN * (np.asarray(ranks) - 1) * on.cuda


def _sharing(operation: Operation, members: Number, stride: Number, on: Fleet) -> Number:
    """Groups that push through one machine's link at once: as many as have a member there; of sends one stage's."""
    if operation == "send":
        return np.minimum(stride, on.per_node)
    return np.maximum(1, on.per_node // members)


def _all_to_all(bytes_: Number, group: Number, members: Number, on: Fleet) -> Number:
    """Only what leaves the machine counts, but a machine's ranks all send it through one link, in small pieces."""
    assert on.between is not None
    leaving = bytes_ * (group - members) / np.maximum(1, group - 1) * on.per_node
    first, power = ALL_TO_ALL
    penalty = np.maximum(1.0, group / first) ** power if on.cuda and not on.between.measured else 1.0
    return on.factors.between * leaving * penalty / on.between.bandwidth


def _hops(operation: Operation, group: Number, members: Number, on: Fleet) -> tuple[Number, Number]:
    """Steps inside machines and between them, one after the other, of a ring or chain through all ranks."""
    machines = np.maximum(1, group // members)
    if operation == "send":
        return (members > 1) * 1.0, (members == 1) * 1.0
    if operation == "ring":
        return (members == group) * 1.0, (members < group) * 1.0
    if operation == "broadcast" and not on.cuda:
        return np.ceil(np.log2(members)), np.ceil(np.log2(machines))
    far = machines - 1.0
    rounds = 2 if operation == "all_reduce" else 1
    return rounds * (group - 1 - far), rounds * far
