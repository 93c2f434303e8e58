"""A decoder cut over ranks: our training step beside DTensor, FSDP2 and torch.distributed.pipelining together.

    python bench/cuts.py [--quick] [--pairs N] [--json FILE] [--links loopback,slow] [--only tp4,dp4,...]

Eight ways to cut the same decoder over 4 or 8 ranks, on loopback and in two nodes with 100 Mbit/s between them
(bench/netlab.py; needs root). Ours is the Trainer with a plan written by hand; the stock composition is that of a
torchtitan user (bench/peers/stock.py): DTensor tensor parallelism with sequence parallelism and a parallel loss, FSDP2,
1F1B, fused AdamW and clipping. Both train the same parameters in float32 on the same tokens, in turn, in the same
processes; their losses agree to 1e-4. PyTorch's asynchronous tensor parallelism and ring attention need GPUs.
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from cuts_rank import Cut, Outcome, Task
from espalier.machine import cluster as clusters
from espalier.machine import probe
from espalier.machine.cluster import Cluster, Link, Node
from espalier.plan.base import Predicted
from espalier.plan.layout_estimate import estimate
from espalier.plan.layouts import Layouts
from espalier.plan.request import Request
from espalier.recipe import Pin
from espalier.train import request_from_recipe
from netlab import Lab, Shape, first_said, ranked
from table import Row, arguments, compare, publish

RATE = 100e6
SCHEDULES = ("1f1b", "zero_bubble")
TASKS = {
    "tp4": Task(Cut(tp=4)),
    "tp2 x dp2": Task(Cut(tp=2, dp=2)),
    "dp4, all states sharded": Task(Cut(dp=4, full=True)),
    "cp4": Task(Cut(cp=4), batch=1, sequence=2048),
    "pp4": Task(Cut(pp=4), micro_batches=8),
    "pp2 x dp2": Task(Cut(pp=2, dp=2), micro_batches=4),
    "pp2 x tp2": Task(Cut(pp=2, tp=2), micro_batches=4),
    "pp2 x dp2 x tp2": Task(Cut(pp=2, dp=2, tp=2), micro_batches=4),
}


def command(task: Task) -> list[str]:
    """What each rank runs."""
    return [sys.executable, str(Path(__file__).parent / "cuts_rank.py"), msgspec.json.encode(task).decode()]


def on_loopback(task: Task) -> Outcome:
    """In plain processes of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = task.cut.world
    places = ({**os.environ, **ranked(index, [0] * world, "127.0.0.1", port)} for index in range(world))
    return outcome_of([subprocess.Popen(command(task), env=env, stdout=subprocess.PIPE, text=True) for env in places])


def on_slow_links(task: Task) -> Outcome:
    """Two nodes."""
    with Lab(Shape(nodes=2, hosts=task.cut.world // 2, rate=RATE)) as lab:
        return outcome_of(lab.start(command(task)))


def outcome_of(ranks: Sequence[subprocess.Popen[str]]) -> Outcome:
    """What was measured, shown as it comes."""
    found = msgspec.json.decode(first_said(ranks), type=Outcome)
    for name, seconds in found.seconds.items():
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}, {len(seconds)} turns"
        print(f"  {name:6} {statistics.median(seconds):8.3f} s a step ({spread}); loss {found.losses[name]:.6f}")
    return found


LINKS = {"loopback": (on_loopback, "loopback"), "slow": (on_slow_links, "2 nodes, 100 Mbit/s")}


# --- planning ------------------------------------------------------------------------------------------------------


def cluster_of(here: Cluster, inside: Link | None, between: Link | None) -> Cluster:
    """This machine with these links; with some `between`, as two nodes that have half of its cores each. They have
    names, so that the planner takes both."""
    node = here.nodes[0]
    near = inside or node.inside
    if between is None:
        return msgspec.structs.replace(here, nodes=(msgspec.structs.replace(node, inside=near),))
    cores = max(1, node.cores // 2)
    halves = (Node(device=node.device, inside=near, cores=cores, memory=node.memory, name=f"node{n}") for n in range(2))
    return Cluster(nodes=tuple(halves), between=between)


def request_of(task: Task, pin: Pin) -> Request:
    """What the planner is asked."""
    return request_from_recipe.of_recipe(task.recipe()).changed(pin=pin)


def predicted(task: Task, links: str) -> Predicted:
    """What the planner expects of our plan: pipelines begin with more forward passes where links are slow."""
    cut, between = task.cut, None
    if links == "slow":
        between = Link(bandwidth=RATE / 8, latency=clusters.default_link("cpu", "cpu").latency, source="declared")
    shards = cut.dp * cut.cp
    layout = Layouts(
        algorithm="megatron" if cut.tp > 1 else "isp" if cut.cp > 1 else "data",
        dp=cut.dp, tp=cut.tp, hp=cut.heads, cp=cut.cp // cut.heads, window=cut.cp // cut.heads, pp=cut.pp,
        params=shards if cut.full else 1, grads=shards if cut.full else 1, optimizer=shards,
        micro_batch=task.batch // cut.dp // task.micro_batches, schedule=cut.schedule,
    )  # fmt: skip
    return estimate(request_of(task, Pin()), cluster_of(probe.ready(), None, between), layout)


def planned(task: Task, links: str) -> Task:
    """`task` with the schedule of stages that the planner expects to be fastest, and what it expects."""
    names = SCHEDULES if task.cut.pp > 1 else SCHEDULES[:1]
    cuts = [msgspec.structs.replace(task.cut, schedule=name) for name in names]
    tasks = [msgspec.structs.replace(task, cut=cut) for cut in cuts]
    return min(
        (msgspec.structs.replace(one, predicted=predicted(one, links)) for one in tasks),
        key=lambda one: one.predicted.step_seconds if one.predicted else 0.0,
    )


def row_of(name: str, links: str, rounds: int, note: str) -> Row:
    """One way to cut, on one class of links."""
    run, told = LINKS[links]
    task = msgspec.structs.replace(TASKS[name], rounds=rounds, steps=2 if links == "loopback" else 1)
    task = planned(task, links)
    print(f"{name}, {told}{note}:")
    found = run(task)
    pairs = list(zip(found.seconds["ours"], found.seconds["stock"], strict=True))
    own = f", ours {task.cut.schedule}" if task.cut.schedule != SCHEDULES[0] else ""
    case = f"{name}, {told}{own}, {found.parameters / 1e6:.1f} M, {task.batch} x {task.sequence} tokens{note}"
    return compare(case, "DTensor + FSDP2 + 1F1B", "s/step", pairs, higher_is_better=False)


def main() -> None:
    """Runs the cases and prints their rows."""
    asked = arguments(
        (__doc__ or "").splitlines()[0],
        only={"default": "", "help": f"ways to cut, with semicolons: {'; '.join(TASKS)}"},
        links={"default": ",".join(LINKS), "help": "classes of links, with commas"},
    )
    rounds, note = (asked.pairs or 3, ", quick") if asked.quick else (asked.pairs or 9, "")
    names = [name.strip() for name in asked.only.split(";")] if asked.only else list(TASKS)
    rows: list[Row] = []
    try:
        for links, name in itertools.product(asked.links.split(","), names):
            rows.append(row_of(name, links, rounds, note))
    finally:
        publish(rows, asked.json)  # what is known when it is told to end


if __name__ == "__main__":
    main()
