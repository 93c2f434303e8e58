"""Rounds of workers whose outer parameters are on optimizer nodes: how long they are, and what they send. No torch.

Workers take their own steps on parameters that lie on their own disks (`mechanisms.optimizer_node.local_steps`),
and wait for the
nodes at the end of each round. Here a round is the least in which that wait is short.
"""

from __future__ import annotations

import math

from espalier.machine.cluster import Cluster
from espalier.mechanisms.local_rounds import round_plan as co2
from espalier.mechanisms.local_rounds.options import ByRounds
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.optim.diloco_slowmo import METHODS
from espalier.plan import collective_time
from espalier.plan.axes import optimizer_node
from espalier.plan.axes.node_cost import Route
from espalier.plan.axes.node_layout import BITS, LOCAL_BYTES, outer_method, push_of
from espalier.plan.base import Exchange, Plan, Predicted
from espalier.plan.request import Request
from espalier.recipe import EveryStep, units

FAST = 1e15
"""Bytes/s of a link that takes no time."""


def asked(request: Request, cluster: Cluster) -> bool:
    """Whether rounds are to end at nodes."""
    return isinstance(request.recipe.sync, ByRounds) and (request.pin.offload == "node" or bool(cluster.optimizers))


def inside(request: Request, cluster: Cluster, options: ByRounds) -> tuple[Request, Cluster]:
    """What is planned before there are rounds: all machines, each a replica, on links that no step waits for. Raises
    UserError where there is one."""
    ranks = options.replicas or request.pin.ranks or cluster.machines
    co2.refuse_single(ranks)
    pin = request.pin.changed(offload="node", ranks=ranks)
    between = cluster.between and cluster.between.changed(bandwidth=FAST, latency=0.0, launch=0.0)
    asked = request.changed(sync=EveryStep(), crossings={}, pin=pin)
    return asked, cluster.changed(between=between, pairs=())


def joined(plan: Plan, request: Request, cluster: Cluster, options: ByRounds) -> Plan:
    """`plan`, whose workers take steps of their own. Raises UserError for a method that nodes do not have."""
    method = co2.method_of(options)
    codec = options.codec or METHODS[method].codec
    replicas = tuple((rank,) for rank in plan.trainers)
    settings = co2.settings_of(options, codec)
    outer_method(method, settings, replicas)
    sent = optimizer_node.pushed(request) * BITS[push_of([codec], "sync")] / 32
    flight, local, computing = _seconds(plan, request, cluster, sent)
    steps = options.steps or min(co2.MOST, max(1, math.ceil(flight / (co2.WAITING * (local + computing)))))
    outer = LocalRoundsState(replicas=replicas, method=method, settings=settings, steps=steps, adapt=False)
    sentence = (
        f"In a round workers take {units.plural(steps, 'step')} of their own, on parameters and AdamW's states on "
        f"their disks. At its end they push how far they went to the optimizer nodes, which run {method}, and pull the "
        f"outer parameters: {units.show_seconds(flight)}."
    )
    return plan.with_state(outer).changed(
        planner="co2",
        stages=tuple(stage.changed(ranks=stage.ranks[:1]) for stage in plan.stages),
        exchanges=(Exchange(traffic="outer_step", codec=codec, agreement=method),),
        predicted=_predicted(plan.predicted, outer.steps, sent, (flight, local)),
        why=(sentence, *plan.why),
        runners_up=(),
    )


def _seconds(plan: Plan, request: Request, cluster: Cluster, sent: float) -> tuple[float, float, float]:
    """Of a round's exchange; of a local step's reads and writes (0 where the cluster names no disk of workers); and of
    its computing."""
    on = collective_time.fleet(cluster, len(plan.trainers), plan.ranks[0].threads)
    kind = on.kinds[0]
    size = optimizer_node.pushed(request)
    flight = (size + sent) / optimizer_node.rates(on, kind, Route(on.ranks, on.per_node)).link
    disks = kind.table.disks
    processes = kind.setting.processes
    rate = min(disks[0].read, disks[0].write) / processes if disks else math.inf
    terms = {} if plan.predicted is None else plan.predicted.terms
    computing = sum(terms.get(name, 0.0) for name in ("forward", "backward", "recompute", "launch")) or 1.0
    return flight, LOCAL_BYTES * size / 4 / rate, computing


def _predicted(before: Predicted | None, steps: int, sent: float, seconds: tuple[float, float]) -> Predicted | None:
    """Of a round that sends so many bytes, and takes `seconds` to exchange, and of a step to read and write."""
    if before is None:
        return None
    flight, local = seconds
    step = before.step_seconds - before.terms.get("offload", 0.0) + local + flight / steps
    return before.taking(step, offload=local, outer=flight / steps).changed(sent_bytes={"outer_step": sent / steps})
