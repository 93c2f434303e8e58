"""Optimizer nodes in plans (LuWu): what workers hold of a model that other machines have, and the seconds of pulls.

Bytes and seconds are those of the mechanism (`shard.luwu.cost`). A node moves parameters as fast as the slowest of its
link, its disk and its memory. No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import espalier.shard.luwu.cost as luwu
from espalier.cost import Number
from espalier.plan.base import Rank
from espalier.shard.luwu.cost import STATE_BYTES, Layers, Rates

if TYPE_CHECKING:
    from espalier.cluster import Cluster
    from espalier.plan.collective_time import DeviceGroup, Fleet
    from espalier.plan.request import Request

WINDOW = 3
"""Layers that a worker holds at once: one computed, one pulled, one pushed."""


def layers(request: Request) -> Layers:
    """The model's layers, between an embedding and a head, or one table that is both."""
    each, table = int(request.layer_parameters), int(request.outside / max(1, request.tables))
    numel = (table, *[each] * request.layers, *[table] * (request.tables - 1))
    uses = [(number,) for number in range(request.layers + 1)]
    return Layers(numel, (*uses, (len(numel) - 1 if request.tables > 1 else 0,)))


def held(request: Request) -> float:
    """Bytes of parameters and gradients on a worker at most."""
    return float(luwu.window_bytes(layers(request), WINDOW))


def rates(on: Fleet, kind: DeviceGroup) -> Rates:
    """Of one worker's link, and of all nodes together; one that no table names is on the first machine."""
    tables = [table for table in on.optimizers for _ in range(table.count)] or [kind.table]
    link = on.serving or on.inside
    served = sum(min(link.bandwidth, table.between.bandwidth if table.between else link.bandwidth) for table in tables)
    disks = [min(table.disks[0].read, table.disks[0].write) for table in tables]
    memory = sum(table.device.memory_bandwidth for table in tables)
    return Rates(min(link.bandwidth / on.per_node, served / on.ranks), sum(disks), memory / (2 * STATE_BYTES))


def seconds(request: Request, on: Fleet, kind: DeviceGroup, computing: Number) -> Number:
    """Seconds by which pulls and pushes make a step longer than `computing`."""
    crossing = request.crossing("gradients")
    wire = 4.0, 4.0 / (crossing.ratio if crossing is not None else 1.0)
    return luwu.cost(layers(request), computing, rates(on, kind), on.ranks, wire).seconds["pull and push"]


def ranks(request: Request, cluster: Cluster, numbers: Sequence[int]) -> Iterator[Rank]:
    """The nodes of a plan, each with its share of the layers; one whose table has the name of another is the same
    machine. `numbers`: of the machines in the user's cluster; empty: the same."""
    named = {place.table.name: place.node for place in cluster.devices() if place.table.name}
    tables = [table for table in cluster.optimizers for _ in range(table.count)]
    count, new = max(1, len(tables)), itertools.count(cluster.machines)
    for index in range(count):
        table = tables[index] if tables else None
        node = 0 if table is None else named[table.name] if table.name in named else next(new)
        own = index * request.layers // count, (index + 1) * request.layers // count
        threads = max(1, table.cores) if table is not None else 1
        yield Rank(role="optimizer", node=numbers[node] if numbers else node, threads=threads, layers=own)


def pushed(request: Request) -> float:
    """Bytes that a worker sends in a step."""
    return float(luwu.pushed_bytes(layers(request)))
