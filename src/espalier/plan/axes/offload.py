"""Offload in plans: what waits in host memory or on disk where devices cannot hold it, and the seconds that takes.

A rank's shard of the optimizer states, then what blocks that are computed again give to the next (on disk), then its
shard of the parameters waits on one tier between uses; of a model with adapters its shard of the frozen blocks waits in
host memory. What that costs is `plan.axes.offload_tiers`'s. No torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import astuple

from espalier.plan.axes.offload_layout import CHUNK
from espalier.plan.axes.offload_tiers import UNUSED, TierRate, buffers
from espalier.plan.base import RESIDENT, Offload, Tier
from espalier.recipe import Pin, ShardPin
from espalier.recipe.cost import Number, Terms

if TYPE_CHECKING:
    from espalier.machine.cluster import Cluster
    from espalier.plan.collective_time import DeviceGroup
    from espalier.plan.request import Request

PCIE = 15.75e9
"""Bytes/s from a GPU where its link to the host is not known: PCIe 3.0 with 16 lanes, 8 GT/s each at 128/130 (PCI-SIG),
the slowest still in use."""
COPY_SHARE = 0.78
"""Share of that link that copies reach. Assumed: as collectives inside a machine."""
HOST_BANDWIDTH = 204.8e9
"""Bytes/s of a machine's memory, which its GPUs share, reads and writes together. Assumed: eight channels of DDR4-3200,
25.6e9 bytes/s each (JEDEC)."""
HOST_MEMORY = 0.9
"""Share of a machine's memory that may hold what its GPUs do not."""
SCRATCH = 0.95
"""Share of the free space of a disk that may hold what devices do not: checkpoints and logs go there as well."""
NODE = Offload(optimizer="node", parameters="node")


def resident_optimizer(request: Request, room: float, waiting: Terms) -> Number:
    """Bytes of optimizer states on disk for which there is memory after all, and which stay there: of a single rank on
    a processor that has `room` bytes left, but where states were pinned to the disk."""
    if (request.offload.optimizer, request.offload.parameters, request.pin.offload) != ("disk", "device", None):
        return 0.0
    return np.minimum(UNUSED * max(0.0, room), waiting["optimizer"])


def rate(kind: DeviceGroup, tier: Tier, free: float | None = None) -> TierRate:
    """Of a rank on such a device, when all ranks of its machine use the tier at once; `free`: bytes of its disk."""
    table = kind.table
    cuda = kind.table.device.kind == "cuda"
    ranks = min(table.devices, kind.ranks) if cuda else kind.setting.processes
    link = COPY_SHARE * (table.inside.bandwidth if "PCI" in table.inside.source else PCIE) if cuda else math.inf
    if tier == "host":
        link = min(link, HOST_BANDWIDTH / 2 / ranks) if cuda else link
        return TierRate(link, link, HOST_MEMORY * table.memory / ranks if table.memory else math.inf)
    disk = table.disks[0]
    room = math.inf if free is None else SCRATCH * free / ranks
    return TierRate(min(link, disk.read / ranks), min(link, disk.write / ranks), room)


def ways(request: Request, cluster: Cluster) -> list[Offload]:
    """What may wait elsewhere, the least first: on tiers that are pinned, else on those that all machines are known to
    have. A tier that is pinned holds optimizer states, and for GPUs nothing but states."""
    pinned = request.pin.offload
    cuda = any(table.device.kind == "cuda" for table in cluster.nodes)
    used = [table for table in cluster.nodes if (table.device.kind == "cuda") == cuda]
    known: list[Tier] = ["host"] * (cuda and (pinned == "host" or all(table.memory for table in used)))
    known += ["disk"] * all(table.disks for table in used)
    tiers = [tier for tier in known if pinned in (None, tier)]  # of "none": none
    holding = (*cluster.optimizers, *cluster.standbys) or (used if pinned == "node" else ())
    nodes = [NODE] * (pinned in (None, "node") and bool(holding) and all(table.disks for table in holding))
    made = [Offload(optimizer=tier) for tier in tiers]
    if request.profile.heads and request.recompute in (None, "block") and not (cuda and pinned):
        places: tuple[Tier, ...] = ("device",) if pinned is None else ()
        made += [Offload(optimizer=place, activations=tier) for tier in tiers for place in (*places, tier)]
    if request.profile.frozen and request.profile.untrained and "host" in tiers:
        resident = [RESIDENT] * (pinned is None)
        made += [way.changed(frozen="host") for way in (*resident, *made) if "disk" not in astuple(way)]
    made += [Offload(optimizer=tier, parameters=tier) for tier in tiers]
    if request.profile.heads:
        made += [Offload(optimizer=tier, parameters=tier, activations=tier) for tier in tiers]
    return [*made, *nodes]


def pinned(request: Request, way: Offload) -> Pin:
    """What layouts are searched with. Ranks with a window of layers compute activations again, and hold no
    shards; activations wait where they are computed again."""
    if not windowed(way):
        return request.pin if way.activations == "device" else request.pin.changed(recompute="block", pp=1)
    mode = "block" if request.profile.heads else request.pin.recompute
    whole = ShardPin(params=1, grads=1, optimizer=1)
    return request.pin.changed(recompute=mode, algorithm="data", pp=1, shard=whole)


def windowed(way: Offload) -> bool:
    """Whether a rank holds a window of layers at a time: their parameters and gradients are elsewhere too."""
    return way.parameters != "device"


def waiting(way: Offload, sharded: Terms) -> dict[str, Number]:
    """Bytes of a rank that wait elsewhere, by kind of memory, of those of its sharded states."""
    kinds = ["optimizer"] * (way.optimizer != "device") + ["params", "grads"] * windowed(way)
    return {kind: sharded[kind] for kind in kinds if way != NODE or kind != "grads"}


def again(request: Request) -> float:
    """Share of the parameters that backward reads once more: not those of a table of its own, nor of a head, which is
    one pass with the loss (`mechanisms.pipeline.layerwise_schedule`)."""
    return 1.0 - (request.profile.tables > 1) * request.profile.outside / max(1, request.profile.trainable)


def resident(away: Terms, sharded: Terms, extent: Number = CHUNK) -> Terms:
    """Bytes of sharded states on the device, by kind: what does not wait elsewhere, and buffers of what does, extents
    of so many bytes at most."""
    on_device = {name: 0.0 * size if name in away else size for name, size in sharded.items()}
    return {**on_device, "buffers": buffers(away, extent)}


def lacking(over: Number, away: Terms, kind: DeviceGroup, request: Request) -> Number:
    """Bytes that a rank lacks, `over` on its device (negative: room left), with what its machine lacks for those that
    wait in its memory or on its disk."""
    beyond = beyond_room(away, kind, request)
    return np.where(beyond > 0, np.maximum(0.0, over) + beyond, over)


def tier_of(way: Offload) -> Tier:
    """Where it is that things wait."""
    return next(tier for tier in (way.optimizer, way.activations, way.frozen) if tier != "device")


def beyond_room(away: Terms, kind: DeviceGroup, request: Request) -> Number:
    """Bytes of a rank that its tier has no room for; negative: room left."""
    tier = tier_of(request.offload)
    if tier == "node":
        return -math.inf
    taken = sum(away.values())
    if request.offload.frozen == "host":  # a rank reads all of them before it keeps its share
        taken = np.maximum(taken, request.profile.frozen or 0)
    return taken - rate(kind, tier, request.free).room
