"""The planned sharding of a decoder beside fixed ones: two nodes of two hosts, 200 Mbit/s and 2 ms between the nodes.

    python bench/amsp.py [--quick] [--pairs N] [--json FILE] [--only links,layouts,levels,unequal,loopback]

Peers on PyTorch's own Gloo: DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2 over all ranks, and FSDP2 inside
nodes with replicas between them (HSDP). All train the same decoder on the same bytes with fused AdamW, in turn, in the
same processes. Also measured: the planner's seconds of five layouts, after its processors' speed is taken from a step
that exchanges nothing and its links' from plain data parallel, with the nodes' limit and without; hosts of 1.0 and 0.4
cores with samples by speed beside equal ones; and our engine beside DDP and FSDP2 on loopback. `levels`: three levels
of link, two ranks on each of two machines in each of two racks, four micro-batches in a step, and ranks with so little
memory that neither plain data parallel nor ZeRO-1 nor ZeRO-2 nor HSDP within machines fits, by the planner's count of
bytes; beside what fits (ZeRO-3, HSDP over a rack; FSDP2 and its HSDP with a direct reduce-scatter) and, measured
without that limit, what does not; and the order of five layouts.
Links, levels and unequal hosts need root (see bench/netlab.py).
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from scipy.optimize import brentq
from scipy.stats import spearmanr

from amsp_rank import Contestant, Outcome, Task
from espalier.machine import cluster as clusters
from espalier.plan.calibration import DATASHEET, UNCALIBRATED, Calibration
from espalier.plan.calibration_factors import CostFactors
from espalier.plan.decide import decide
from espalier.plan.layout_estimate import estimate
from espalier.plan.layouts import Layouts
from espalier.plan.request import Request
from espalier.recipe import Pin
from espalier.train import request_from_recipe
from netlab import Lab, Shape, first_said, ranked
from table import Row, arguments, compare, publish

Triple = tuple[int, int, int]
LINKS = Shape(nodes=2, hosts=2, rate=200e6, delay=2e-3)
FREE = Shape(nodes=2, hosts=2)
LEVELS = Shape(nodes=4, hosts=2, rate=64e6, rack=2, rack_rate=32e6)
RACKS = "2 racks x 2 machines x 2 ranks, 32 and 64 Mbit/s"
MICRO = 4
"""Micro-batches of a step over three levels."""
NESTED: tuple[Triple, ...] = ((2, 2, 8), (2, 4, 8), (4, 4, 4), (8, 8, 8))
"""What fits into the memory there: two nested triples, HSDP over a rack and ZeRO-3."""
BEYOND: tuple[Triple, ...] = ((1, 8, 8), (1, 1, 8), (1, 1, 1), (2, 2, 2))
"""What does not: ZeRO-2, ZeRO-1, plain data parallel and HSDP within machines."""
ORDERED = (*NESTED, (1, 8, 8))
UNEQUAL = Shape(nodes=1, hosts=2, cpu=(1.0, 0.4))
PLACE = "2 nodes x 2, 200 Mbit/s + 2 ms"
ALONE = Contestant("alone", "alone")
PEERS = ("ddp", "zero", "fsdp2", "hsdp")
LAYOUTS: tuple[Triple, ...] = ((1, 1, 1), (1, 1, 4), (2, 2, 2), (2, 2, 4), (4, 4, 4))
GOAL = 0.1
"""Largest relative error of a predicted step that is still as promised."""


# --- running -------------------------------------------------------------------------------------------------------


def command(task: Task) -> list[str]:
    """What each rank runs."""
    return [sys.executable, str(Path(__file__).parent / "amsp_rank.py"), msgspec.json.encode(task).decode()]


def in_lab(task: Task, shape: Shape) -> Outcome:
    """`task` on every host of a lab."""
    with Lab(shape) as lab:
        return _outcome(lab.start(command(task)))


def on_loopback(task: Task, world: int) -> Outcome:
    """`task` in plain processes of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = ({**os.environ, **ranked(index, [0] * world, "127.0.0.1", port)} for index in range(world))
    return _outcome([subprocess.Popen(command(task), env=env, stdout=subprocess.PIPE, text=True) for env in places])


def _outcome(ranks: Sequence[subprocess.Popen[str]]) -> Outcome:
    outcome = msgspec.json.decode(first_said(ranks), type=Outcome)
    losses = [loss for name, loss in outcome.losses.items() if name != "alone"]
    assert max(losses, default=0.0) - min(losses, default=0.0) < 1e-3, (
        f"contestants do not train alike: {outcome.losses}"
    )
    return outcome


def named(factors: Triple, **more: Any) -> Contestant:
    """Our engine with these factors."""
    return Contestant(told(factors), "amsp", factors, **more)


def told(factors: Triple) -> str:
    """`1/1/4`."""
    return "/".join(map(str, factors))


def show(outcome: Outcome) -> None:
    """Prints what was measured."""
    for name, seconds in outcome.seconds.items():
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        print(f"  {name:10} {statistics.median(seconds):8.3f} s a step ({spread}, {len(seconds)} turns)")
    print()


# --- planning ------------------------------------------------------------------------------------------------------


def request_of(task: Task, ranks: int) -> Request:
    """What the planner is asked: exactly so many ranks of one thread, the batch of each in one piece."""
    pin = Pin(ranks=ranks, threads=1, recompute="none", accumulate=task.accumulate, algorithm="data", pp=1)
    return request_from_recipe.of_recipe(task.recipe()).changed(pin=pin)


def two_nodes() -> clusters.Cluster:
    """The lab as a user would declare it. Named machines: the planner is to use all of them."""
    node = '[[nodes]]\nname = "node{}"\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n'
    between = f'[links]\nbetween = {{ bandwidth = "{LINKS.rate / 1e6:g}Mbit/s", latency = "{LINKS.delay * 1e3:g}ms" }}'
    return clusters.loads(node.format(0) + node.format(1) + between)


def unlimited() -> clusters.Cluster:
    """The lab without limits: one machine of four cores."""
    return clusters.loads('[[nodes]]\nname = "node0"\ndevice = "cpu"\ncores = 4\nmemory = "16GiB"\n')


def layout_of(task: Task, factors: Triple, ranks: int = 4) -> Layouts:
    """Data parallel with these factors, one micro-batch."""
    params, grads, optimizer = factors
    size = task.batch // ranks // task.accumulate
    return Layouts(dp=ranks, threads=1, micro_batch=size, params=params, grads=grads, optimizer=optimizer)


def speed(task: Task, alone: float, ranks: int = 4) -> CostFactors:
    """The factors with which a step that exchanges nothing is predicted to take `alone` seconds."""
    cluster = two_nodes() if ranks == 4 else machines(64 * 2**30)
    terms = estimate(request_of(task, ranks), cluster, layout_of(task, (1, 1, 1), ranks)).terms
    busy = sum(terms[name] for name in ("forward", "backward", "launch", "optimizer"))
    slow = alone / busy
    return CostFactors(product=slow, attention=slow, memory=slow, issue=slow)


def links(task: Task, factors: CostFactors, inside: float, between: float) -> CostFactors:
    """`factors` with the links on which plain data parallel is predicted to take `inside` seconds where nothing limits
    the nodes' links, and `between` seconds where something does."""
    plain = fitted(task, factors, "inside", inside, unlimited())
    return fitted(task, plain, "between", between, two_nodes())


def fitted(task: Task, factors: CostFactors, name: str, plain: float, cluster: clusters.Cluster) -> CostFactors:
    """`factors` with the one called `name` such that plain data parallel is predicted to take `plain` seconds."""

    def at(value: float) -> CostFactors:
        return msgspec.structs.replace(factors, **{name: value})

    def miss(value: float) -> float:
        return predicted(task, at(value), (1, 1, 1), cluster) - plain

    low, high = 0.3, 20.0
    if miss(low) > 0 or miss(high) < 0:
        return factors
    return at(float(brentq(miss, low, high)))


def predicted(task: Task, factors: CostFactors, triple: Triple, cluster: clusters.Cluster | None = None) -> float:
    """Seconds of a step."""
    return estimate(request_of(task, 4), cluster or two_nodes(), layout_of(task, triple), factors).step_seconds


def choose(task: Task, cluster: clusters.Cluster, ranks: int, factors: CostFactors | None = None) -> Any:
    """The plan that `espalier train` would take."""
    calibration = Calibration(factors=factors, spread=UNCALIBRATED) if factors else DATASHEET
    taken = decide(request_of(task, ranks), cluster, calibration, lambda plans: {}).taken
    assert taken is not None
    return taken


def triple_of(plan: Any) -> Triple:
    """A plan's factors."""
    shard = plan.layout.shard
    return shard["params"], shard["grads"], shard["optimizer"]


# --- the cases -----------------------------------------------------------------------------------------------------


def slow_links(task: Task, note: str) -> list[Row]:
    """Ours as planned beside the peers, over slow links between nodes."""
    alone = in_lab(replace_task(task, [ALONE], 3), LINKS).seconds["alone"]
    plan = choose(task, two_nodes(), 4, speed(task, statistics.median(alone)))
    chosen = triple_of(plan)
    found = in_lab(
        replace_task(task, [named(chosen), *(Contestant(name, name) for name in PEERS)], task.rounds, steps=1), LINKS
    )
    case = f"{found.parameters / 1e6:.1f} M, {PLACE}, planned {told(chosen)}{note}"
    print(f"{case}:\n  {plan.why[0]}")
    show(found)
    rows = [against(case, found, told(chosen), name) for name in PEERS]
    best = min(PEERS, key=lambda name: statistics.median(found.seconds[name]))
    return [*rows, msgspec.structs.replace(against(case, found, told(chosen), best), peer=f"best fixed ({best})")]


def predictions(task: Task, note: str) -> list[Row]:
    """Predicted seconds of five layouts beside the measured ones, and the order of both."""
    free = in_lab(replace_task(task, [ALONE, named((1, 1, 1))], task.rounds), FREE).seconds
    found = in_lab(replace_task(task, [ALONE, *map(named, LAYOUTS)], task.rounds, steps=5), LINKS)
    print(f"{found.parameters / 1e6:.1f} M, {PLACE}, five layouts{note}:")
    show(found)
    measured = {triple: statistics.median(found.seconds[told(triple)]) for triple in LAYOUTS}
    busy = speed(task, statistics.median(found.seconds["alone"]))
    factors = links(task, busy, statistics.median(free["1/1/1"]), measured[1, 1, 1])
    expected = {triple: predicted(task, factors, triple) for triple in LAYOUTS}
    print(f"  seconds per byte between nodes x {factors.between:.2f} (of 90 % of the declared rate), from 1/1/1;")
    print(f"  inside x {factors.inside:.2f} (of the assumed rate), from 1/1/1 without limits")
    for triple, seconds in measured.items():
        error = expected[triple] / seconds - 1
        print(f"  {told(triple)}: predicted {expected[triple]:.3f} s, measured {seconds:.3f} s, {error:+.1%}")
    print()
    others = LAYOUTS[1:]  # the first was fitted to
    errors = [
        (statistics.mean(abs(expected[one] / found.seconds[told(one)][turn] - 1) for one in others), GOAL)
        for turn in range(len(found.seconds["alone"]))
    ]
    mean = statistics.mean(abs(expected[one] / measured[one] - 1) for one in others)
    case = f"predicted steps of {len(others)} layouts, fitted to alone and 1/1/1 with and without limits{note}"
    row = compare(case, "goal", "mean error of medians", errors, higher_is_better=False)
    order = float(spearmanr([*expected.values()], [*measured.values()]).statistic)
    ranked_alike = Row(f"order of {len(LAYOUTS)} layouts{note}", "measured", 1.0, order, order, "Spearman", "-")
    return [msgspec.structs.replace(row, ours=mean, ratio=GOAL / mean), ranked_alike]


def machines(memory: float) -> clusters.Cluster:
    """The four machines of the lab with three levels, with so many bytes each; between them the slowest link, of which
    two share a rack's."""
    node = f'[[nodes]]\nname = "node{{}}"\ndevice = "cpu"\ncores = 2\nmemory = {int(memory)}\n'
    between = f'[links]\nbetween = {{ bandwidth = "{LEVELS.rack_rate / 1e6:g}Mbit/s", latency = "1ms" }}'
    return clusters.loads("".join(map(node.format, range(LEVELS.nodes))) + between)


def tight(task: Task) -> clusters.Cluster:
    """The machines with the least memory into which every layout of NESTED fits; checks that no other does."""
    roomy = machines(64 * 2**30)

    def peak(triple: Triple) -> float:
        return estimate(request_of(task, 8), roomy, layout_of(task, triple, 8)).memory_bytes["peak"]

    least, beyond = max(map(peak, NESTED)), min(map(peak, BEYOND))
    print(f"  bytes of a rank: { ({told(one): round(peak(one) / 2**20, 1) for one in (*NESTED, *BEYOND)}) } MiB")
    limit = estimate(request_of(task, 8), roomy, layout_of(task, (8, 8, 8), 8)).memory_limit
    assert least < beyond, "the layouts that are to fit need more than those that are not to"
    return machines(64 * 2**30 / limit * (least + beyond) / 2)


def levels(task: Task, note: str) -> list[Row]:
    """Three levels of link and little memory: what the planner takes beside all else that fits, and the order."""
    task = msgspec.structs.replace(task, depth=8, width=128, sequence=16, batch=8 * MICRO)
    task = msgspec.structs.replace(task, accumulate=MICRO, replicas=2)
    plan = choose(task, tight(task), 8)
    chosen = triple_of(plan)
    layouts = (*NESTED, *BEYOND[:3])
    peers = [Contestant(name, name) for name in ("fsdp2 direct", "hsdp direct", "ddp")]
    found = in_lab(replace_task(task, [ALONE, *map(named, layouts), *peers], task.rounds, steps=1), LEVELS)
    case = f"{found.parameters / 1e6:.2f} M, {RACKS}, {MICRO} micro-batches, planned {told(chosen)}{note}"
    print(f"{case}:\n  {plan.why[0]}")
    show(found)
    fitting = [*map(told, NESTED), "fsdp2 direct", "hsdp direct"]
    rows = [against(case, found, told(chosen), name) for name in fitting if name != told(chosen)]
    best = min(
        (name for name in fitting if name != told(chosen)), key=lambda name: statistics.median(found.seconds[name])
    )
    rows.append(msgspec.structs.replace(against(case, found, told(chosen), best), peer=f"next best that fits ({best})"))
    for name in (*map(told, BEYOND[:3]), "ddp"):
        rows.append(
            msgspec.structs.replace(against(case, found, told(chosen), name), peer=f"{name}, which does not fit")
        )
    factors = speed(task, statistics.median(found.seconds["alone"]), 8)
    roomy = machines(64 * 2**30)
    expected = [estimate(request_of(task, 8), roomy, layout_of(task, one, 8), factors).step_seconds for one in ORDERED]
    measured = [statistics.median(found.seconds[told(one)]) for one in ORDERED]
    for triple, *pair in zip(ORDERED, expected, measured, strict=True):
        print(f"  {told(triple)}: predicted {pair[0]:.2f} s, measured {pair[1]:.2f} s")
    order = float(spearmanr(expected, measured).statistic)
    return [
        *rows,
        Row(f"order of {len(ORDERED)} layouts, {RACKS}{note}", "measured", 1.0, order, order, "Spearman", "-"),
    ]


def unequal(task: Task, note: str) -> list[Row]:
    """Hosts of 1.0 and 0.4 cores: samples by speed, as planned, beside equal ones."""
    plan = choose(task, uneven_hosts(), 2)
    shares = tuple(rank.share[1] - rank.share[0] for rank in plan.ranks)
    factors = triple_of(plan)
    by_speed, equal = Contestant("by speed", "amsp", factors, shares), Contestant("equal", "amsp", factors)
    found = in_lab(replace_task(task, [equal, by_speed, Contestant("ddp", "ddp")], task.rounds), UNEQUAL)
    case = f"{found.parameters / 1e6:.1f} M, hosts of 1.0 and 0.4 cores, samples {shares[0]} and {shares[1]}{note}"
    print(f"{case}:")
    show(found)
    return [against(case, found, "by speed", name) for name in ("equal", "ddp")]


def uneven_hosts() -> clusters.Cluster:
    """Two hosts whose processors' speeds are as their shares of a core."""
    node = (
        '[[nodes]]\ncores = 1\nmemory = "8GiB"\n[nodes.device]\nname = "{0:g} cores"\nkind = "cpu"\n'
        "memory = 8589934592\nmemory_bandwidth = {1:g}\nflops = {{ fp32 = {2:g} }}\npeak = false\n"
    )
    hosts = "".join(node.format(cores, cores * 1e10, cores * 4e10) for cores in UNEQUAL.cpu)
    return clusters.loads(f'{hosts}[links]\nbetween = {{ bandwidth = "10Gbit/s", latency = "50us" }}')


def loopback(task: Task, world: int, note: str) -> list[Row]:
    """Our engine as DDP and as FSDP2, beside them, without slow links; and DDP beside a second DDP, which shows how far
    from 1 such a ratio comes out by itself."""
    plain, full = (1, 1, 1), (world, world, world)
    peers = [Contestant("ddp", "ddp"), Contestant("fsdp2", "fsdp2"), Contestant("ddp again", "ddp")]
    everybody = [*peers, named(plain), named(full)]
    found = on_loopback(replace_task(task, everybody, task.rounds, steps=3), world)
    case = f"{found.parameters / 1e6:.1f} M, loopback, {world} ranks"
    print(f"{case}{note}:")
    show(found)
    rows = [
        against(f"{case}, {told(ours)}{note}", found, told(ours), peer)
        for ours, peer in ((plain, "ddp"), (full, "fsdp2"))
    ]
    return [*rows, against(f"{case}, a second DDP in the place of ours{note}", found, "ddp again", "ddp")]


def against(case: str, found: Outcome, ours: str, peer: str) -> Row:
    """A row of seconds per step from turns of the same round."""
    pairs = list(zip(found.seconds[ours], found.seconds[peer], strict=True))
    return compare(case, peer, "s/step", pairs, higher_is_better=False)


def replace_task(task: Task, contestants: Sequence[Contestant], rounds: int, steps: int = 2) -> Task:
    """`task` for these contestants."""
    return msgspec.structs.replace(task, contestants=tuple(contestants), rounds=rounds, steps=steps)


def main() -> None:
    """Runs what is asked and prints the table."""
    asked = arguments(__doc__ or "", only={"default": "links,layouts,levels,unequal,loopback"})
    depth, width = (3, 256) if asked.quick else (6, 384)
    note, rounds = (", quick", asked.pairs or 5) if asked.quick else ("", asked.pairs or 7)
    limit = 60.0 if asked.quick else 250.0
    task = Task(depth, width, sequence=64, batch=8, contestants=(), rounds=rounds, limit=limit)
    cases: dict[str, Callable[[], list[Row]]] = {
        "links": lambda: slow_links(task, note),
        "layouts": lambda: predictions(task, note),
        "levels": lambda: levels(msgspec.structs.replace(task, limit=900.0), note),
        "unequal": lambda: unequal(msgspec.structs.replace(task, batch=28), note),
        "loopback": lambda: loopback(task, 4, note) + loopback(task, 2, note),
    }
    rows: list[Row] = []
    try:
        for name in asked.only.split(","):
            rows += cases[name]()
    finally:
        publish(rows, asked.json)  # what is known when it is told to end


if __name__ == "__main__":
    main()
