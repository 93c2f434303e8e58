"""Optimizer nodes in plans (LuWu): what workers hold of a model that other machines have, and the seconds of pulls.

Bytes and seconds are those of the mechanism (`plan.axes.node_cost`). A node moves parameters as fast as the
slowest of its
link, its disk and its memory. No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

import espalier.plan.axes.node_cost as luwu
from espalier.plan.axes.flow_control import SHARE
from espalier.plan.axes.node_cost import STATE_BYTES, Layers, Rates
from espalier.plan.base import Rank
from espalier.recipe.cost import Number

if TYPE_CHECKING:
    from espalier.machine.cluster import Cluster, Node
    from espalier.plan.collective_time import DeviceGroup, Fleet
    from espalier.plan.request import Request

WINDOW = luwu.WINDOW
PAYS = 0.02
"""Share of a step's computing that an aggregator has to gain: it takes a process and some of the processor."""


def layers(request: Request) -> Layers:
    """The model's layers, between an embedding and a head, or one table that is both."""
    profile = request.profile
    each = int(request.layer_parameters)
    table = int(profile.outside / max(1, profile.tables))
    numel = (table, *[each] * profile.layers, *[table] * (profile.tables - 1))
    uses = [(number,) for number in range(profile.layers + 1)]
    return Layers(numel, (*uses, (len(numel) - 1 if profile.tables > 1 else 0,)))


def window_bytes(request: Request) -> float:
    """Bytes of parameters and gradients on a worker at most."""
    return float(luwu.window_bytes(layers(request), WINDOW))


def rates(on: Fleet, kind: DeviceGroup, summed: bool = False) -> Rates:
    """Of one worker's link, and of all nodes together; one that no table names is on the first machine. `summed`: an
    aggregator on each machine adds up what its workers push, and pulls once for all of them."""
    tables = [table for table in on.optimizers for _ in range(table.count)] or [kind.table]
    link = on.serving or on.inside
    served = sum(min(link.bandwidth, table.between.bandwidth if table.between else link.bandwidth) for table in tables)
    disks = [min(table.disks[0].read, table.disks[0].write) for table in tables]
    memory = sum(table.device.memory_bandwidth for table in tables)
    sharing = (1, on.nodes) if summed else (on.per_node, on.ranks)
    paced = SHARE * min(link.bandwidth / sharing[0], served / sharing[1])
    return Rates(paced, sum(disks), memory / (2 * STATE_BYTES))


def seconds(request: Request, on: Fleet, kind: DeviceGroup, computing: Number) -> Number:
    """Seconds by which pulls and pushes make a step longer than `computing`."""
    if not _several(request, on):
        return _seconds(request, on, kind, computing, False)
    summed = _seconds(request, on, kind, computing, True)
    if request.pin.roles is not None:
        return summed
    return np.minimum(summed, _seconds(request, on, kind, computing, False))


def _seconds(request: Request, on: Fleet, kind: DeviceGroup, computing: Number, summed: bool) -> Number:
    crossing = request.crossings.get("gradients")
    wire = 4.0, 4.0 / (crossing.ratio if crossing is not None else 1.0)
    readers = on.nodes if summed else on.ranks
    step = luwu.seconds(layers(request), computing, rates(on, kind, summed), wire, readers)
    return step - computing


def _several(request: Request, on: Fleet) -> bool:
    """Whether aggregators may stand before the nodes: machines have several workers, and nodes are elsewhere or
    aggregators pinned."""
    roles = request.pin.roles
    return on.per_node > 1 and (bool(on.optimizers) if roles is None else "aggregator" in roles)


def summed(request: Request, on: Fleet, terms: Mapping[str, float]) -> bool:
    """Whether a plan with those seconds has an aggregator on each machine: pinned, or a step is shorter by it."""
    if not _several(request, on) or request.pin.roles is not None:
        return _several(request, on)
    computing = sum(terms.get(name, 0.0) for name in ("forward", "backward", "recompute"))
    with_, without = (float(_seconds(request, on, on.kinds[0], computing, by_site)) for by_site in (True, False))
    return with_ + PAYS * computing < without


def ranks(request: Request, cluster: Cluster, numbers: Sequence[int], sites: Sequence[int]) -> Iterator[Rank]:
    """The nodes of a plan, each with its share of the layers, then their standbys and the aggregators of the machines
    `sites`. One whose table has the name of another is the same machine. `numbers`: of the machines in the user's
    cluster; empty: the same."""
    named = {place.table.name: place.node for place in cluster.devices() if place.table.name}
    new = itertools.count(cluster.machines)
    roles = request.pin.roles
    count = max(1, sum(table.count for table in cluster.optimizers))
    tables: list[Node | None] = [table for table in cluster.optimizers for _ in range(table.count)] or [None]
    standbys: list[Node | None] = []
    if roles is None or "standby" in roles:
        standbys = [table for table in cluster.standbys for _ in range(table.count)]
        standbys = standbys or [None] * (0 if roles is None else count)
    places_by_role: dict[Literal["optimizer", "standby"], list[Node | None]]
    places_by_role = {"optimizer": tables, "standby": standbys}
    for role, places in places_by_role.items():
        for index, table in enumerate(places[:count]):
            node = 0 if table is None else named[table.name] if table.name in named else next(new)
            share = index * request.profile.layers // count, (index + 1) * request.profile.layers // count
            threads = max(1, table.cores) if table is not None else 1
            yield Rank(role=role, node=numbers[node] if numbers else node, threads=threads, layers=share)
    yield from (Rank(role="aggregator", node=node) for node in sites)


def pushed(request: Request) -> float:
    """Bytes that a worker sends in a step."""
    return 4.0 * sum(layers(request).numel)
