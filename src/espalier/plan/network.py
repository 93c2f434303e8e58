"""Which links a group of ranks talks over, and for how many seconds. NumPy arrays price many groups at once; no torch.

Collectives are rings of equal steps (AMSP, arXiv 2311.00257; Buff, arXiv 2401.09149): bytes over the slowest link they
cross, shared with the groups beside them, plus a latency for each hop and a price for each call. The two last are ours.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from espalier.cluster import Cluster, Link, Node
from espalier.cost import Number, ring_bytes
from espalier.plan.factors import PLAIN, Factors
from espalier.plan.seats import seats
from espalier.plan.speed import Setting

LINK_SHARE = {"inside": 0.78, "between": 0.9}
"""What collectives reach of a declared bandwidth. Inside: all-reduce on 8 A800s moves 149-156 of 200 GB/s per rank;
between: 91-97 GB/s of 4 x 200 Gbit/s (measurements that Buff's planner uses)."""
CONGESTION = ((16, 1.0), (32, 1.1), (64, 1.2), (256, 1.3), (512, 1.4))
"""Ranks up to which a declared network is divided by so much, 1.5 beyond: Buff's planner."""
ALL_TO_ALL = (16, 4.0, 0.4)
"""All-to-all between machines: up to 16 ranks 4 times slower than a ring's share of the link, then growing with
ranks^0.4. After 23 and 10 GB/s at 16 and 128 ranks on a network whose rings reach 94 GB/s (same measurements)."""
BROADCAST = 2.4e-3
"""Seconds that each broadcast of a parameter refresh takes beyond its bytes in InternEvo: the difference of its
published 7B figures at 256, 512 and 1,024 ranks divided by the number of broadcasts."""

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


@dataclass(frozen=True)
class Kind:
    """Equal devices of a fleet: their table, how each is used, and how many ranks they carry together."""

    table: Node
    setting: Setting
    ranks: int


@dataclass(frozen=True)
class Fleet:
    """The devices that `ranks` ranks sit on, and their links as collectives find them.

    `per_node`: ranks on each machine (the fewest); `inside`, `between`: the slowest link of each level.
    `factors`: what a calibration says of devices and links.
    """

    ranks: int
    nodes: int
    per_node: int
    kinds: tuple[Kind, ...]
    inside: Link
    between: Link | None
    factors: Factors = PLAIN

    @property
    def cuda(self) -> bool:
        """True when the ranks sit on GPUs."""
        return self.kinds[0].table.device.kind == "cuda"


def fleet(cluster: Cluster, ranks: int, threads: int = 1) -> Fleet:
    """The fleet of `ranks` ranks of `threads` threads on `cluster`, seated as planners do."""
    placed = seats(cluster, ranks)
    on_device = Counter(place.rank for place in placed)
    on_node = Counter(place.node for place in placed)
    used = sorted(on_device)
    kinds: dict[tuple[int, int], list[Any]] = {}
    for place in placed:
        kinds.setdefault((id(place.table), on_device[place.rank]), [place.table, 0])[1] += 1
    said = []
    for (_, processes), (table, count) in kinds.items():
        cores = table.cores or threads * processes
        setting = Setting() if table.device.kind == "cuda" else Setting(threads, processes, cores)
        said.append(Kind(table, setting, count))
    across = len(on_node) > 1
    return Fleet(
        ranks=ranks,
        nodes=len(on_node),
        per_node=min(on_node.values()),
        kinds=tuple(said),
        inside=_reached(cluster.slowest(used, "inside"), "inside"),
        between=_reached(cluster.slowest(used, "between"), "between") if across else None,
    )


def _reached(link: Link, level: Literal["inside", "between"]) -> Link:
    """The link as a collective finds it: a declared one less what protocols take."""
    return link if link.measured else msgspec.structs.replace(link, bandwidth=link.bandwidth * LINK_SHARE[level])


def congestion(ranks: Number) -> Number:
    """By what a declared network between machines is divided for a group of `ranks`."""
    up_to, factors = zip(*CONGESTION, strict=True)
    return np.array([*factors, 1.5])[np.searchsorted(np.array(up_to), np.asarray(ranks))]


def seconds(operation: Operation, size: Number, ranks: Number, stride: Number, on: Fleet) -> Number:
    """Seconds of one collective of groups of `ranks` ranks, `stride` apart, all groups at once.

    Args:
        operation: see `cost.ring_bytes`.
        size: bytes of the whole tensor (of a send: what is sent).
        ranks, stride: of each group; a send goes from a rank to the one `stride` further.
        on: the fleet.

    Returns:
        An array as the arguments broadcast; 0 where a group has one rank (not for a send).
    """
    size, ranks, stride = np.broadcast_arrays(np.asarray(size, dtype=float), ranks, stride)
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
    found = near + call * (on.inside.launch + hops[0] * on.inside.latency)
    if on.between is not None:
        far = on.factors.between * bytes_ * _sharing(operation, members, stride, on) / on.between.bandwidth
        far = far if on.between.measured else far * congestion(ranks)
        if operation == "all_to_all":
            far = _all_to_all(bytes_, group, members, on)
        apart = np.maximum(near, far) + call * (
            on.between.launch + hops[0] * on.inside.latency + hops[1] * on.between.latency
        )
        found = np.where(crossing, apart, found)
    return np.where((group > 1) & (size > 0), found, 0.0)


def _sharing(operation: Operation, members: Number, stride: Number, on: Fleet) -> Number:
    """Groups that push through one machine's link at once: as many as have a member there; of sends one stage's."""
    if operation == "send":
        return np.minimum(stride, on.per_node)
    return np.maximum(1, on.per_node // members)


def _all_to_all(bytes_: Number, group: Number, members: Number, on: Fleet) -> Number:
    """Only what leaves the machine counts, but a machine's ranks all send it through one link, in small pieces."""
    assert on.between is not None
    leaving = bytes_ * (group - members) / np.maximum(1, group - 1) * on.per_node
    first, slower, power = ALL_TO_ALL
    penalty = slower * np.maximum(1.0, group / first) ** power if on.cuda and not on.between.measured else 1.0
    return on.factors.between * leaving * penalty / on.between.bandwidth


def _hops(operation: Operation, group: Number, members: Number, on: Fleet) -> tuple[Number, Number]:
    """Steps inside machines and between them, one after the other; all-reduces climb a tree where that is shorter."""
    machines = np.maximum(1, group // members)
    if operation == "send":
        return (members > 1) * 1.0, (members == 1) * 1.0
    if operation == "broadcast":
        return np.ceil(np.log2(members)), np.ceil(np.log2(machines))
    far, near = np.where(machines > 1, machines, 0) * 1.0, (group - 1.0) - np.where(machines > 1, machines - 1, 0)
    if operation != "all_reduce":
        return near, np.where(machines > 1, machines - 1.0, 0.0)
    if not on.cuda:
        return 2 * near, 2 * np.where(machines > 1, machines - 1.0, 0.0)
    tree = np.minimum(2 * np.maximum(0, far - 1), 2 * np.ceil(np.log2(machines)))
    return np.where(machines > 1, 2 * (members - 1), 2 * near), tree
