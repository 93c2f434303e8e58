"""One rank of bench/choice.py: measures the links, or runs plans of one recipe in turn, a few steps each.

torchrun's environment; argument: a Task as JSON. Rank 0 prints an Outcome as JSON.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from cuts_rank import CLOSE, RandomTokens
from cuts_rank import Task as Model
from espalier.machine import link as links
from espalier.machine.cluster import Link
from espalier.plan.base import Plan
from espalier.train import rank_spec as launch
from espalier.train.rank_setup import RankSetup
from espalier.train.trainer import Trainer
from rank import late, run, stock
from table import settle


class Task(msgspec.Struct, frozen=True):
    """Plans to run in turn on a model; none: the links are measured. `limit`: seconds after which no round begins."""

    model: Model
    plans: tuple[Plan, ...] = ()
    rounds: int = 3
    limit: float = 60.0


class Outcome(msgspec.Struct, frozen=True):
    """Seconds of a step of each plan and round; links from rank 0 to its neighbour and to the last rank."""

    seconds: list[list[float]] = []
    inside: Link | None = None
    between: Link | None = None


def measure(task: Task, channel: dist.ProcessGroup) -> Outcome:
    """All plans in turn: one step to warm up, then one step in each round."""
    world = dist.get_world_size()
    if not task.plans:
        matrix = links.measure(channel)
        return Outcome(inside=matrix.link(0, 1), between=matrix.link(0, world - 1))
    workload, begun = RandomTokens(task.model.recipe()), time.perf_counter()
    runners = []
    for plan in task.plans:
        setting = RankSetup(workload.recipe, plan, workload, launch.RankSpec(rank=dist.get_rank(), world=world))
        runners.append((Trainer(setting, channel), setting.shard))
    seconds: list[list[float]] = [[] for _ in runners]
    for number in range(task.rounds + 1):
        losses = []
        for at in range(len(runners)):
            trainer, shard = runners[(at + number) % len(runners)]
            batches = workload.batches(number, shard)
            settle()
            dist.barrier(stock())
            start = time.perf_counter()
            losses.append(trainer.train_step(batches).loss)
            dist.barrier(stock())
            seconds[(at + number) % len(runners)].append(time.perf_counter() - start)
        assert max(losses) / min(losses) - 1 < CLOSE, f"plans do not train alike: {losses}"
        if late(begun, task.limit) and number:
            break
    return Outcome([one[1:] for one in seconds])


if __name__ == "__main__":
    run(Task, measure)
