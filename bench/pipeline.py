"""Pipeline schedules: zero bubble and interleaved 1F1B beside 1F1B, and our executor beside PyTorch's.

    python bench/pipeline.py [--quick] [--pairs N] [--json FILE]

Ranks are processes with Gloo on this machine. Four stages on two cores have no idle time to fill: where schedules are
compared, passes wait instead of computing: each block waits so long in its forward pass, in the gradients of its inputs
and in those of its weights. Where executors are compared, two stages compute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "support"))
from espalier.mechanisms.pipeline import split_backward
from espalier.mechanisms.pipeline.pipeline import PipelinePasses, PipelineSchedule
from espalier.mechanisms.pipeline.schedules import action_lists
from espalier.parallel.action_list import Pipeline
from espalier.parallel.model_stages import ModelStages, Placed
from espalier.parallel.stage_messages import StageMessages
from espalier.parallel.workload import in_sequence
from many_ranks import forks
from table import Row, arguments, compare, publish, settle

STAGES, MICRO_BATCHES = 4, 8
WAIT = 0.008
"""Seconds of each third of a block's pass."""
WIDTH, BLOCKS, ROWS = 512, 8, 256
LIMIT = 150.0


class Waiting(torch.autograd.Function):
    """Hands its input on; forward and backward each wait."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Block(nn.Module):
    """A small product, and its waits."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(8, 8), seconds

    def forward(self, x: Tensor) -> Tensor:
        return Waiting.apply(self.linear(x), self.seconds)


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    return model(batch).square().sum(), torch.tensor(float(len(batch)))


def schedule(group: Any, model: nn.Module, stages: int, name: str, chunks: int = 1, split: bool = False) -> Any:
    """Ours, on blocks divided evenly. `split`: gradients of weights may be put off."""
    count, blocks = stages * chunks, len(list(model.children()))
    placed = Placed(
        Pipeline(tuple((stage % stages,) for stage in range(count)), MICRO_BATCHES),
        tuple((blocks * stage // count, blocks * (stage + 1) // count) for stage in range(count)),
    )
    held = ModelStages(model, lambda: in_sequence(list(model.children())), placed, group.rank())
    weights = split_backward.WeightGradients(model) if split else None
    passes = PipelinePasses(1.0, lambda last: nullcontext(), nullcontext, nullcontext, weights)
    messages = StageMessages(group, {rank: rank for rank in range(stages)}, torch.device("cpu"))
    return PipelineSchedule(group.rank(), held, messages, lambda one: action_lists([one], name), passes)


def turns(group: Any, steps: Sequence[Callable[[], Any]], pairs: int) -> list[tuple[float, ...]]:
    """Seconds of each of `steps`, taken in turn; the slowest rank's."""
    found = []
    for number in range(pairs + 1):
        row = []
        for step in steps:
            settle()
            dist.barrier(group=group)
            begun = time.perf_counter()
            step()
            taken = torch.tensor(time.perf_counter() - begun)
            dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
            row.append(float(taken))
        found += [tuple(row)] if number else []  # the first warms up
    return found


def schedules(group: Any, pairs: int) -> list[tuple[float, ...]]:
    """Zero bubble, interleaved 1F1B of half stages, and 1F1B, on blocks that wait."""
    product = split_backward._product

    def waited(gradient: Tensor, x: Tensor) -> Tensor:
        time.sleep(WAIT / 2)
        return product(gradient, x)

    split_backward._product = waited
    batches, steps = list(torch.ones(MICRO_BATCHES, 4, 8)), []
    for name, chunks in (("zero_bubble", 1), ("1f1b", 2), ("1f1b", 1)):
        model = nn.Sequential(*(Block(WAIT / 2) for _ in range(2 * STAGES)))
        made = schedule(group, model, STAGES, name, chunks, split=True)  # all of them wait for weights
        steps.append(lambda made=made, model=model: made.run(model, batches, loss))
    return turns(group, steps, pairs)


def executors(group: Any, pairs: int) -> list[tuple[float, ...]]:
    """1F1B of two stages that compute: ours, and PyTorch's."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    def layers(count: int) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(count)))

    whole, rank = layers(BLOCKS), group.rank()
    batches = list(torch.randn(MICRO_BATCHES, ROWS, WIDTH))
    made = schedule(group, whole, 2, "1f1b")
    theirs = layers(BLOCKS)[BLOCKS // 2 * rank : BLOCKS // 2 * (rank + 1)]
    stage = PipelineStage(theirs, rank, 2, torch.device("cpu"), group=group)
    peer = Schedule1F1B(stage, MICRO_BATCHES, lambda found, _: found.square().sum(), scale_grads=False)
    together = torch.cat(batches)

    def step() -> None:
        if rank:
            peer.step(target=together, losses=[])
        else:
            peer.step(together)

    return turns(group, [lambda: made.run(whole, batches, loss), step], pairs)


def main() -> None:
    asked = arguments(__doc__.splitlines()[0])
    pairs = asked.pairs or (5 if asked.quick else 11)
    torch.set_num_threads(1)
    rows: list[Row] = []
    waits = f"{STAGES} stages x {MICRO_BATCHES} micro-batches, passes of {3 * WAIT * 1e3:g} ms that wait"
    found = forks(STAGES, schedules, pairs, timeout=LIMIT)[0]
    for place, name in enumerate(("zero bubble", "interleaved 1F1B, 2 stages a rank")):
        taken = [(1e3 * row[place], 1e3 * row[2]) for row in found]
        rows.append(compare(f"{name}: {waits}", "1F1B", "ms/step", taken, higher_is_better=False))
    found = forks(2, executors, pairs, timeout=LIMIT)[0]
    case = f"1F1B: 2 stages x {MICRO_BATCHES} micro-batches, {BLOCKS} layers of width {WIDTH}"
    taken = [(1e3 * ours, 1e3 * theirs) for ours, theirs in found]
    rows.append(compare(case, "torch.distributed.pipelining", "ms/step", taken, higher_is_better=False))
    publish(rows, asked.json)


if __name__ == "__main__":
    main()
