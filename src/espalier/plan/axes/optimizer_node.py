"""Optimizer nodes in plans (LuWu): what workers hold of a model that other machines have, and the seconds of pulls.

Bytes and seconds are those of the mechanism (`plan.axes.node_cost`). A node moves parameters as fast as the
slowest of its
link, its disk and its memory. No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

import espalier.plan.axes.node_cost as luwu
from espalier.plan.axes.flow_control import SHARE
from espalier.plan.axes.node_cost import STATE_BYTES, Layers, Rates, Route
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


def step_bytes(request: Request) -> tuple[float, float, float]:
    """What a worker pulls and pushes in a step, and an aggregator pushes for it and others, to the byte of payload."""
    model = layers(request)
    width = 1.0 if "gradients" in request.crossings else 4.0
    numel = sum(model.numel)
    return 4.0 * float(np.dot(model.pulls(WINDOW), model.numel)), width * numel, max(2.0, width) * numel


def routes(request: Request, on: Fleet) -> list[Route]:
    """Ways that a plan may take: without aggregators, unless they are pinned; and with them where they have a place:
    machines of several workers, hosts of the cluster file, and the machine of the one optimizer node."""
    roles = request.pin.roles
    helped = roles is None or "aggregator" in roles
    counts = {
        "machine": on.nodes * (on.per_node > 1 and bool(on.optimizers or roles)),
        "host": min(on.ranks, sum(table.count for table in on.aggregators)),
        "node": int(on.ranks > 1 == sum(table.count for table in on.optimizers) and not on.optimizers[0].name),
    }
    ways = [Route(on.ranks, on.per_node, place, count) for place, count in counts.items() if helped and count]
    return ways if roles and ways else [Route(on.ranks, on.per_node), *ways]


def rates(on: Fleet, kind: DeviceGroup, route: Route, step: Sequence[float] = (1.0, 1.0, 1.0)) -> Rates:
    """Of one worker's link, where the slowest link on the way paces all others, and of all nodes together; one that no
    table names is on the first machine. `step`: see `step_bytes`."""
    tables = [table for table in on.optimizers for _ in range(table.count)] or [kind.table]
    uplink = on.uplink or on.inside
    nodes, hosts = ([(table.between or uplink).bandwidth for table in group] for group in (tables, on.aggregators))
    links = {"worker": (on.serving or uplink).bandwidth, "node": sum(nodes), "aggregator": min(hosts, default=0.0)}
    pulls, pushes = (
        SHARE * min(links[name] * step[way] / load[way] for name, load in route.links(*step).items()) for way in (0, 1)
    )
    disks = [min(table.disks[0].read, table.disks[0].write) for table in tables]
    memory = sum(table.device.memory_bandwidth for table in tables)
    return Rates(pulls, sum(disks), memory / (2 * STATE_BYTES), pushes)


def seconds(request: Request, on: Fleet, kind: DeviceGroup, computing: Number) -> Number:
    """Seconds by which pulls and pushes make a step longer than `computing`."""
    return np.min([*_priced(request, on, kind, computing).values()], axis=0)


def _priced(request: Request, on: Fleet, kind: DeviceGroup, computing: Number) -> dict[Route, Number]:
    model = layers(request)
    step = step_bytes(request)
    wire = 4.0, step[1] / sum(model.numel)
    return {
        route: luwu.seconds(model, computing, rates(on, kind, route, step), wire, route.aggregators or on.ranks)
        - computing
        for route in routes(request, on)
    }


def chosen(request: Request, on: Fleet, computing: float) -> Route:
    """The way of a plan whose step computes so long: with aggregators where a step is shorter by them, or pinned."""
    priced = _priced(request, on, on.kinds[0], computing)
    return min(priced, key=lambda route: float(priced[route]) + PAYS * computing * (route.aggregators > 0))


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
    """Bytes of all parameters in fp32."""
    return 4.0 * sum(layers(request).numel)
