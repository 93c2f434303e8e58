"""Training on unlike devices: our unequal pipelines beside an equal split, FlashFlex's own layer rule, and DDP.

    python bench/flashflex.py [--quick] [--pairs N] [--json FILE] [--cases 16:1000,16:200,16:50,32:200,32:50]

Four hosts whose speeds are as 0.25, 0.25, 0.5 and 1.0 (control groups of 0.2 to 0.8 of a core: what is left of two
cores is for links and for what else runs), with links of so many Mbit/s between them (bench/netlab.py; needs root). A
case is layers of the decoder and Mbit/s. Two clusters of cards have speeds that are to one another as those of the
hosts (datasheets):

- cards A: two RTX 3090, an RTX 4090, an A100 (80, 165 and 312 TFLOP/s in 16 bits; 24, 24, 24 and 80 GB), the kinds of
  FlashFlex's paper: memory grows with speed. Of 16 layers its rule gives 2, 2, 3 and 9, nearly shares by speed; of 32
  it gives 5, 5, 5 and 17;
- cards B: two Tesla P40, an RTX 4060 Ti, an RTX 4080 (11.8, 22.1 and 48.7 TFLOP/s in 32 bits; 24, 24, 16 and 16 GB),
  old cards with much memory beside new ones with less.

What the planner is told of memory is in proportion to that of the cards, of which the model takes 25 GB with its states
(`MODEL`): more than any card holds but an A100. All train the same decoder in float32 on the same tokens, in turn, in
the same processes:

- ours: the plan that the planner makes when it has to use all four hosts, the same for both clusters unless memory
  bounds a stage;
- memory rule: our engine with the best plan whose layers are in proportion to memory, as FlashFlex's released scheduler
  gives them (arXiv 2409.01143; layer_partition.py), shares of the batch by speed as ours; for each cluster;
- equal split: torch.distributed.pipelining, 1F1B, equal stages, the head on the fastest host;
- DDP: torch's, equal batches; it may hold the whole model on every host.

Seconds of a layer come from a few passes on all hosts at once before, and bytes/s of sums from those over all hosts
(`measured`). Planning is timed on 64 GPUs of six classes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from espalier.machine import cluster as clusters
from espalier.machine import probe
from espalier.machine.cluster import Cluster, Link
from espalier.mechanisms.unequal_pipelines import pipeline_search as flashflex
from espalier.mechanisms.unequal_pipelines import unequal_plan as unequal
from espalier.mechanisms.unequal_pipelines.cost import EngineCosts
from espalier.mechanisms.unequal_pipelines.pipeline_solver import Group, Slot, SolvedPipeline
from espalier.plan import base as plans
from espalier.plan import collective_time, replan
from espalier.plan.cost_inputs import CPU_MEMORY
from espalier.plan.memory_model import CPU_RUNTIME
from espalier.plan.request import Request
from espalier.recipe import Pin
from espalier.train import request_from_recipe
from flashflex_rank import Outcome, Speeds, Task
from netlab import Lab, Shape, first_said
from table import Row, arguments, compare, publish

SPEEDS = (0.25, 0.25, 0.5, 1.0)
CORES = (0.2, 0.2, 0.4, 0.8)
CARDS = {"A": (24, 24, 24, 80), "B": (24, 24, 16, 16)}
"""GB of the cards of each cluster whose speeds are as these."""
SHAPES = {16: Task(depth=16, width=96, batch=32), 32: Task(depth=32, width=64, batch=32)}
"""What is trained, by its layers."""
PERIOD = 5_000
MODEL = 25.0
"""GB of the cards that the whole model takes, with its states."""
SIX = """
nodes = [
    { device = "A100-80GB", devices = 8, count = 2 },
    { device = "A100-40GB", devices = 8 },
    { device = "RTX 4090", devices = 8, count = 2 },
    { device = "RTX 3090", devices = 8 },
    { device = "RTX A6000", devices = 8 },
    { device = "RTX 3080 Ti", devices = 8 },
]
links = { between = "25Gbit/s" }
"""


def started(task: Task, rate: float) -> str:
    """What rank 0 said of `task` on the four hosts."""
    with Lab(Shape(nodes=len(CORES), hosts=1, rate=rate * 1e6, cpu=CORES, period=PERIOD)) as lab:
        command = [sys.executable, str(Path(__file__).parent / "flashflex_rank.py"), msgspec.json.encode(task).decode()]
        return first_said(lab.start(command))


# --- what the planner is told --------------------------------------------------------------------------------------


def request_of(task: Task) -> Request:
    """All hosts are to be used."""
    pin = Pin(pipelines="unequal", ranks=len(CORES), threads=1, micro_batch=task.micro_batch, recompute="none")
    return request_from_recipe.of_recipe(task.recipe()).changed(pin=pin)


@dataclass(frozen=True)
class Found:
    """What was measured of the hosts: how many times as slow each is as the cost model has half of this machine, and
    bytes/s of sums over all of them where links are fast."""

    slower: tuple[float, ...]
    sums: float


def hosts(request: Request, rate: float, found: Found, cards: str = "A") -> Cluster:
    """The four hosts, with links of `rate` Mbit/s and memory as that of these cards."""
    ranks = [plans.Rank(device="cpu", node=0, threads=1)] * len(CORES)
    made = replan.measured(probe.ready(), ranks, replan.Speeds(found.slower))
    bandwidth = collective_time.LINK_SHARE["inside"] * rate * 1e6 / 8
    latency, share = clusters.default_link("cpu", "cpu").latency, min(1.0, found.sums / bandwidth)
    link = Link(bandwidth=bandwidth, latency=latency, share=share, measured=True, source="sums are measured")
    nodes = [msgspec.structs.replace(one, inside=link) for one in made.nodes]
    roomy = [_with_memory(one, 1 << 40) for one in nodes]
    costs = EngineCosts(request, msgspec.structs.replace(made, nodes=tuple(roomy)), task_size(request))
    held, _ = costs.held(Group(0), Slot(0, 1), request.profile.layers)
    own = float(sum(held.values())) - CPU_RUNTIME
    sizes = [int((CPU_RUNTIME + own * one / MODEL) / CPU_MEMORY) for one in CARDS[cards]]
    return msgspec.structs.replace(made, nodes=tuple(map(_with_memory, nodes, sizes)))


def _with_memory(node: clusters.Node, size: int) -> clusters.Node:
    return msgspec.structs.replace(node, memory=size, device=msgspec.structs.replace(node.device, memory=size))


def task_size(request: Request) -> int:
    """Samples of a micro-batch."""
    return request.pin.micro_batch or 1


def measured(task: Task, rate: float) -> Found:
    """The hosts, from passes of the model and sums over links of `rate` Mbit/s."""
    found = msgspec.json.decode(started(msgspec.structs.replace(task, passes=6), rate), type=Speeds)
    request, alike = request_of(task), Found((1.0,) * len(CORES), found.sums)
    costs = EngineCosts(request, hosts(request, rate, alike), task.micro_batch)
    whole = task.depth * costs.layer(Group(0)) + costs.extra(Group(0), Slot(0, 1))
    passes = ", ".join(f"{1e3 * one:.0f} ms" for one in found.seconds)
    print(f"  passes take {passes}; by the probe {1e3 * whole:.0f} ms; sums at {found.sums * 8e-6:.0f} Mbit/s")
    return Found(tuple(one / whole for one in found.seconds), found.sums)


class MemoryRule(flashflex.Search):
    """Layers in proportion to the memory of the cards, one after the other, what is left to the largest; memory that
    does not hold them is a refusal."""

    cards = "A"

    def in_order(self, order: Sequence[Group], weight: float) -> SolvedPipeline | None:
        """The one pipeline of these stages that the rule gives."""
        memory = [CARDS[self.cards][one.kind] * one.tensor for one in order]
        layers, rates = by_memory(self.costs.layers, memory), flashflex.stage_rates(order, self.costs)
        if min(layers) < 1 or any(n > one.most for n, one in zip(layers, rates, strict=True)):
            return None
        return flashflex.pipeline_of(order, layers, rates, self.costs)


def by_memory(layers: int, memory: Sequence[float]) -> list[int]:
    """Layers of each stage: a turn each while a stage has less than its share, the others by falling memory."""
    found, share = [0] * len(memory), [layers * one / sum(memory) for one in memory]
    while any(n + 1 <= most for n, most in zip(found, share, strict=True)):
        found = [n + (n + 1 <= most) for n, most in zip(found, share, strict=True)]
    largest = sorted(range(len(memory)), key=lambda at: (-memory[at], -at))
    for number in range(layers - sum(found)):
        found[largest[number % len(largest)]] += 1
    return found


class MemoryRuleB(MemoryRule):
    """The same for the other cluster."""

    cards = "B"


def planned(task: Task, rate: float, found: Found) -> Task:
    """`task` with our plan and those of the memory rule."""
    request, made, seconds = request_of(task), dict[str, plans.Plan](), dict[str, float]()
    for name, cards, search in (
        ("ours", "A", flashflex.Search),
        ("ours, cards B", "B", flashflex.Search),
        (memory_rule("A"), "A", MemoryRule),
        (memory_rule("B"), "B", MemoryRuleB),
    ):
        costs = EngineCosts(request, hosts(request, rate, found, cards), task.micro_batch)
        layout = search(costs.classes, costs, whole=True).best()
        made[name], seconds[name] = unequal.plan_of(costs, layout), layout.seconds
        for one in layout.pipelines:
            told = " + ".join(f"{stage.layers} on {SPEEDS[stage.group.kind]}" for stage in one.stages)
            print(f"  {name}: {told}; {one.micro_batches} micro-batches, {one.seconds:.3f} s")
    if seconds["ours, cards B"] < 1.001 * seconds["ours"]:  # memory bounds no stage: another order of equal stages
        made.pop("ours, cards B")
    return msgspec.structs.replace(task, plans=made)


def memory_rule(cards: str) -> str:
    """The contestant's name."""
    return f"memory rule, cards {cards}"


# --- rows ----------------------------------------------------------------------------------------------------------


def rows_of(task: Task, rate: float, note: str, known: Found) -> list[Row]:
    """One speed of the links."""
    case = f"4 hosts of speeds 0.25, 0.25, 0.5 and 1.0, {rate:g} Mbit/s, {task.depth} layers, {task.batch} x "
    case += f"{task.sequence} tokens{note}"
    print(f"{case}:")
    task = planned(task, rate, known)
    found = msgspec.json.decode(started(task, rate), type=Outcome)
    for name, seconds in found.seconds.items():
        print(f"  {name:22} {statistics.median(seconds):7.3f} s ({min(seconds):.3f} to {max(seconds):.3f})")
    ours = found.seconds["ours"]
    rows = []
    for name, seconds in found.seconds.items():
        if not name.startswith("ours"):
            own = found.seconds.get("ours, cards B", ours) if name == memory_rule("B") else ours
            rows.append(compare(case, name, "s/step", list(zip(own, seconds, strict=True)), higher_is_better=False))
    predicted = task.plans["ours"].predicted
    assert predicted is not None
    pairs = [(one, predicted.step_seconds) for one in ours]
    return [*rows, compare(f"{case}: as predicted", "predicted", "s/step", pairs, higher_is_better=False)]


def planning(rounds: int) -> Row:
    """Seconds of planning 64 GPUs of six classes."""
    recipe = Task(depth=32, width=4096, heads=32, batch=256, sequence=4096, vocabulary=32000).recipe()
    request = request_from_recipe.of_recipe(recipe).changed(precision="bf16", pin=Pin(pipelines="unequal"))
    cluster, taken = clusters.loads(SIX), []
    for _ in range(rounds):
        begun = time.perf_counter()
        costs = EngineCosts(request, cluster, 1, (1,), "block")
        found = flashflex.place(costs.classes, costs)
        taken.append((time.perf_counter() - begun, 2.0))
    case = f"planning 64 GPUs of 6 classes, Llama 7B: {len(found.pipelines)} pipelines, {found.priced} priced"
    return compare(case, "goal", "s", taken, higher_is_better=False)


def main() -> None:
    """Runs the cases and prints their rows."""
    known = "16:1000,16:200,16:50,32:200,32:50"
    asked = arguments(
        (__doc__ or "").splitlines()[0],
        cases={"default": known, "help": "layers:Mbit/s, with commas; empty: planning alone"},
    )
    rounds, note = (asked.pairs or 2, ", quick") if asked.quick else (asked.pairs or 5, "")
    cases = [tuple(map(int, one.split(":"))) for one in asked.cases.split(",") if one]
    rows: list[Row] = []
    try:
        rows.append(planning(5))
        for depth in dict.fromkeys(depth for depth, _ in cases):
            task = msgspec.structs.replace(SHAPES[depth], rounds=rounds)
            if asked.quick:
                task = msgspec.structs.replace(task, batch=16)
            known = measured(task, max(rate for _, rate in cases))
            for rate in (rate for layers, rate in cases if layers == depth):
                rows += rows_of(task, rate, note, known)
    finally:
        publish(rows, asked.json)  # what is known when it is told to end


if __name__ == "__main__":
    main()
