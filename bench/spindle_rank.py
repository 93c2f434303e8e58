"""One rank of bench/spindle.py: plans of waves of the same tasks, a step of each in turn.

torchrun's environment; argument: a Task as JSON. Rank 0 prints an Outcome as JSON.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from espalier.comm import plain_collectives
from espalier.machine import cluster as clusters
from espalier.machine import link
from espalier.mechanisms.task_waves import wave_plan as task_waves
from espalier.mechanisms.task_waves.metaops import MetaOp
from espalier.mechanisms.task_waves.state import TaskWavesState, WaveSlice
from espalier.mechanisms.task_waves.wave_placement import Devices
from espalier.mechanisms.task_waves.wave_schedule import Slices, WavePasses, WaveSchedule
from espalier.parallel.mesh import ProcessMesh
from espalier.parallel.stage_messages import StageMessages
from espalier.parallel.workload import HEAD, Tagged, TaskNode
from espalier.plan import base as plans
from espalier.plan import waves
from espalier.plan.decide import decide
from espalier.recipe import recipe_file
from espalier.train import table, workload_registry
from espalier.train.build import build
from espalier.train.rank_setup import RankSetup
from espalier.train.rank_spec import RankSpec
from espalier.train.request_from_recipe import of_recipe
from rank import late, run, stock
from table import settle

TASKS = ("match", "write", "sort")
PARTS = {
    ("match", "image"): (4.0, 8, ()),
    ("match", "text"): (2.0, 4, ()),
    ("match", HEAD): (0.02, 1, ("image", "text")),
    ("write", "text"): (2.0, 4, ()),
    ("write", HEAD): (0.02, 1, ("text",)),
    ("sort", "package"): (1.0, 2, ()),
    ("sort", HEAD): (0.02, 1, ("package",)),
}
"""Of each part its work, its operators and what it needs: three tasks of 6, 2 and 1, two of which share a tower."""
FIXED = 0.2
"""What does not become less on more ranks, as a share of an average operator on one."""
ROWS, TOKENS, WIDTH = 32, 32, 32
TABLE: dict[str, Any] = {
    "model": {"kind": "multitask", "length": 64},
    "towers": [
        {"name": "image", "kind": "image", "width": 128, "depth": 4},
        {"name": "text", "kind": "text", "width": 128, "depth": 2},
        {"name": "package", "kind": "graph", "width": 128, "depth": 2},
    ],
    "tasks": [
        {"name": "match", "data": "python:glyphs", "towers": ["image", "text"], "loss": "contrastive", "batch": 48},
        {"name": "write", "data": "python:stdlib", "towers": ["text"], "loss": "next_token", "batch": 24},
        {"name": "sort", "data": "python:imports", "towers": ["package"], "loss": "classes", "batch": 96},
    ],
    "train": {"steps": 4},
}
"""The towers that compute."""


class Task(msgspec.Struct, frozen=True):
    """What to measure: `waits` or `computes`; `unit`: seconds of a unit of work; `rate`: bits/s of the links."""

    case: str
    rounds: int
    unit: float = 0.3
    rate: float = 200e6
    limit: float = 150.0


class Outcome(msgspec.Struct, frozen=True):
    """By plan: seconds of a step, one for each round, and predicted ones; how many waves."""

    seconds: dict[str, list[float]]
    predicted: dict[str, float]
    waves: dict[str, int]


Step = Callable[[], Any]


def measure(task: Task, channel: dist.ProcessGroup) -> Outcome:
    """Steps of all plans in turn."""
    steps, predicted, count = (waiting if task.case == "waits" else computing)(task, channel)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    begun = time.perf_counter()
    for number in range(task.rounds + 1):
        for name, step in steps.items():
            settle()
            dist.barrier(stock())
            before = time.perf_counter()
            step()
            taken = torch.tensor(time.perf_counter() - before)
            dist.all_reduce(taken, dist.ReduceOp.MAX, group=stock())
            if number:  # the first warms up
                seconds[name].append(float(taken))
        if number > 2 and late(begun, task.limit):
            break
    return Outcome(seconds, predicted, count)


# --- parts that wait -----------------------------------------------------------------------------------------------


class Waiting(torch.autograd.Function):
    """Hands its input on; forward waits a third of the seconds, backward the rest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds / 3)
        return gradients[0], None


def seconds_of(task: str, node: str, unit: float, share: float) -> float:
    """Of an operator on `share` of the samples."""
    work, operators, _ = PARTS[task, node]
    if node == HEAD:
        return work * unit
    average = sum(one for one, *_ in PARTS.values()) / sum(count for _, count, _ in PARTS.values())
    return unit * (FIXED * average + work / operators * share)


class Parts(nn.Module):
    """The graph of the tasks, whose parts wait as if each rank had a device of its own."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.unit, self.scale = unit, nn.Parameter(torch.ones(()))

    def nodes(self, task: int) -> list[TaskNode]:
        """See `TaskGraph.nodes`."""
        return [TaskNode(node, n, needs) for (name, node), (_, n, needs) in PARTS.items() if name == TASKS[task]]

    def compute(
        self, task: int, node: str, operators: tuple[int, int], inputs: Sequence[Tensor], fields: Mapping[str, Tensor]
    ) -> Any:
        """See `TaskGraph.compute`."""
        x = torch.stack(list(inputs)).sum(0) if inputs else fields["x"] * self.scale
        share = len(x) / ROWS
        for _ in range(*operators):
            x = Waiting.apply(x, seconds_of(TASKS[task], node, self.unit, share))
        return {"loss": (x.sum(), torch.tensor(float(len(x))))} if node == HEAD else x


def waiting(task: Task, channel: dist.ProcessGroup) -> tuple[dict[str, Step], dict[str, float], dict[str, int]]:
    """Waves by the linear program and the plain forms, without gradients of parameters to exchange."""
    world, size = channel.size(), 4.0 * ROWS * TOKENS * WIDTH
    metaops = [
        MetaOp(
            f"{name}.{node}",
            operators,
            {
                n: seconds_of(name, node, task.unit, 1 / n)
                for n in ((1,) if node == HEAD and name == "match" else (1, 2, 4))
            },
            tuple(f"{name}.{need}" for need in needs),
            output=size,
            forward=1 / 3,
        )
        for (name, node), (_, operators, needs) in PARTS.items()
    ]
    devices = Devices(tuple(range(world)), between=8 / task.rate)
    steps, predicted, count = dict[str, Step](), dict[str, float](), dict[str, int]()
    for method in ("program", "greedy", "static", "sequential"):
        found = waves(metaops, devices, method)
        rows = tuple(
            tuple(
                WaveSlice(
                    task=one.metaop.split(".")[0],
                    node=one.metaop.split(".")[1],
                    first=one.first,
                    last=one.first + one.operators,
                    ranks=one.devices,
                )
                for one in wave
            )
            for wave in found.waves
        )
        ranks = tuple(plans.Rank(share=(0, 1)) for _ in range(world))
        plan = plans.Plan(ranks=ranks).with_state(TaskWavesState(waves=rows))
        model = Parts(task.unit)
        messages = StageMessages(channel, {rank: rank for rank in range(world)}, torch.device("cpu"))
        passes = WavePasses(1.0, lambda last: nullcontext(), nullcontext, lambda: None, (1.0, 1.0, 1.0))
        made = WaveSchedule(channel.rank(), model, Slices(plan, TASKS, model.nodes), messages, passes)
        batches = [Tagged(k, {"x": torch.ones(ROWS, TOKENS, WIDTH)}) for k in range(len(TASKS))]
        steps[method] = lambda made=made, model=model, batches=batches: made.run(model, batches, lambda *_: None)
        predicted[method], count[method] = found.seconds, len(found.waves)
    return steps, predicted, count


# --- towers that compute -------------------------------------------------------------------------------------------


def computing(task: Task, channel: dist.ProcessGroup) -> tuple[dict[str, Step], dict[str, float], dict[str, int]]:
    """Whole steps of the product on real towers, gradients and optimizer with them."""
    world = channel.size()
    resolved = workload_registry.settle(recipe_file.from_table(TABLE), Path(__file__).parent)
    workload: Any = workload_registry.open_workload(resolved)
    dist.barrier(stock())
    request = of_recipe(resolved.recipe, lambda: workload)  # all ranks measure their parts at once
    nodes = f'[[nodes]]\ncount = {world}\ndevice = "cpu"\ncores = 1\nmemory = "4GiB"\n'
    slowest = float(link.measure(stock()).bandwidth[0, 1])  # as `espalier probe` does
    cluster = clusters.loads(nodes + f'[links]\nbetween = "{8 * slowest / 1e6:g}Mbit/s"\n')
    alone = decide(*task_waves.alone(request, cluster)).taken
    pinned = msgspec.structs.replace(request.pin, ranks=world)
    asked = request.changed(pin=pinned)
    steps, predicted, count = dict[str, Step](), dict[str, float](), dict[str, int]()
    for method in ("program", "static", "sequential"):
        text = plans.dumps(task_waves.with_waves(alone, asked, cluster, method))
        plan = plans.loads(plain_collectives.broadcast(text, channel))
        setting = RankSetup(resolved.recipe, plan, workload, RankSpec(rank=channel.rank(), world=world))
        built = build(
            setting, ProcessMesh(setting.mesh, channel, channel.rank()), table.ordered(setting.recipe, setting.plan)
        )
        batches = workload.batches(0, setting.shard)

        def step(built: Any = built, batches: Any = batches) -> None:
            built.sharding.clear()
            outcome = built.schedule.run(built.model, batches, workload.loss)
            built.agreement.step(outcome, 1.0, False)

        steps[method] = step
        predicted[method] = plan.predicted.step_seconds if plan.predicted else 0.0
        count[method] = len(plan.state(TaskWavesState).waves)
    return steps, predicted, count


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run(Task, measure)
