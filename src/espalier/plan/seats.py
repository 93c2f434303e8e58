"""Where do equal ranks sit?"""

from __future__ import annotations

from espalier.cluster import Cluster, Device, Place
from espalier.plan import speed


def seats(cluster: Cluster, ranks: int) -> list[Place]:
    """The device of each rank: GPUs in order where there are any, else equally many ranks on each processor; machine by
    machine, in the order in which a ring through them crosses slow links least."""
    places = cluster.devices()
    gpus = [place for place in places if place.table.device.kind == "cuda"]
    assert ranks <= len(gpus) or not gpus, "planners refuse more ranks than GPUs"
    each, over = divmod(ranks, len(places))
    taken = gpus[:ranks] or [one for index, one in enumerate(places) for _ in range(each + (index < over))]
    if not cluster.pairs:
        return taken
    turn = {machine: index for index, machine in enumerate(cluster.ring)}
    return sorted(taken, key=lambda place: turn[place.node])


def devices(cluster: Cluster, ranks: int) -> dict[int, Device]:
    """The devices that `ranks` ranks use, by their number in the cluster."""
    return {place.rank: place.table.device for place in seats(cluster, ranks)}


def peak_flops(cluster: Cluster, ranks: int, precision: str) -> float:
    """FLOP/s that count for MFU of the devices `ranks` ranks use together."""
    return sum(speed.peak(device, precision) for device in devices(cluster, ranks).values())


def gpus(cluster: Cluster) -> int:
    """How many GPUs the cluster has."""
    return sum(table.count * table.devices for table in cluster.nodes if table.device.kind == "cuda")
