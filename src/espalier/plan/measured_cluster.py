"""A cluster as a run has found it: one device for each of its ranks, as slow as that was measured. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.machine.cluster import Cluster, Link, Node, Pair, Place
from espalier.plan import base as plans
from espalier.plan import device_model
from espalier.recipe.errors import UserError

NOISE = 1.2
"""A rank whose samples take at most this many times as long as the others' (or the inverse) counts as equal."""


@dataclass(frozen=True)
class Speeds:
    """What ranks showed while they ran.

    `slower`: by rank, how many times as long a sample takes there as on the rank in the middle; `link`: how many times
    as long exchanges take as planned.
    """

    slower: tuple[float, ...]
    link: float = 1.0

    def of(self, ranks: Sequence[int]) -> Speeds:
        """Of some of the ranks, in that order."""
        return Speeds(tuple(self.slower[rank] for rank in ranks), self.link)


def equalised(ratio: float) -> float:
    """A rank's seconds over the others', 1 where that is noise."""
    return 1.0 if 1 / NOISE <= ratio <= NOISE else ratio


def measured(
    cluster: Cluster, ranks: Sequence[plans.Rank], speeds: Speeds, places: Sequence[Place] | None = None
) -> Cluster:
    """A cluster of one device for each of `ranks`, as slow as `speeds` (in the same order). `places`: where they sit,
    on one machine or several; None: all count as in one machine."""
    apart = places is not None
    places = places or [_places(cluster, rank)[0] for rank in ranks]
    used = [place.rank for place in places]
    inside = _slower(cluster.slowest(used, "inside"), speeds.link)
    tables = [
        _table(place.table, rank.threads, used.count(place.rank), slower).changed(
            name=f"machine {place.node if apart else 0}",
        )
        for place, rank, slower in zip(places, ranks, speeds.slower, strict=True)
    ]
    pairs = []
    for (a, place), (b, other) in itertools.combinations(enumerate(places), 2):
        if apart and place.node != other.node:
            link = _slower(cluster.link(place.rank, other.rank), speeds.link)
            share = link.share if link.measured else 0.0
            pairs.append(Pair(a, b, link.bandwidth, link.latency, link.launch, share))
    return Cluster(
        nodes=tuple(table.changed(inside=inside) for table in tables),
        between=_slower(cluster.between, speeds.link) if apart and cluster.between else None,
        pairs=tuple(pairs) if cluster.pairs else (),
        machine=cluster.machine,
    )


def seats(cluster: Cluster, plan: plans.Plan) -> list[Place]:
    """Where each rank of a plan sits. Of several processors in one machine the fastest, in the cluster's order."""
    places: list[Place] = []
    taken: set[int] = set()
    for rank in plan.ranks:
        fitting = _places(cluster, rank)
        if rank.device == "cpu":
            count = sum(other.node == rank.node and other.device == "cpu" for other in plan.ranks)
            fastest = sorted(fitting, key=lambda place: -max(place.table.device.flops.values()))[:count]
            fitting = [place for place in fitting if place in fastest and place.rank not in taken] or fitting
        places.append(fitting[0])
        taken.add(fitting[0].rank)
    return places


def _slower(link: Link, times: float) -> Link:
    return link.changed(bandwidth=link.bandwidth / times, latency=link.latency * times, launch=link.launch * times)


def _places(cluster: Cluster, rank: plans.Rank) -> list[Place]:
    """Where a rank of a plan may sit. Raises UserError where that is nowhere."""
    devices = (place for place in cluster.devices() if place.node == rank.node)
    fitting = [place for place in devices if place.device_name == rank.device]
    if not fitting:
        raise UserError(f"The cluster has no device {rank.device} on machine {rank.node}.", do="delete cluster.toml")
    return fitting


def _table(table: Node, threads: int, ranks: int, slower: float) -> Node:
    """One rank's part of a device that `ranks` ranks of `threads` threads use, `slower` times as slow."""
    device = table.device
    cores = max(1, table.cores)
    cuda = device.kind == "cuda"
    sharing = 1 if cuda else ranks
    left = min(1.0, cores / (threads * ranks))
    portion = 1.0 if cuda else threads * left / cores
    slowed = device.changed(
        memory=device.memory // sharing,
        memory_bandwidth=device.memory_bandwidth / sharing / slower,
        flops={precision: rate * portion / slower for precision, rate in device.flops.items()},
        dispatch=device_model.issue_seconds(device) * slower,
        rates=tuple(rate.changed(flops=rate.flops * left / slower) for rate in device.rates),
        copies=tuple(copy.changed(bandwidth=copy.bandwidth * left / slower) for copy in device.copies),
    )
    cores = table.cores // table.devices if cuda else threads
    return table.changed(device=slowed, count=1, devices=1, cores=cores)
