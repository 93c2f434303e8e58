"""One rank of bench/isp.py: plans train in turn, a few steps each, through the product's own trainer.

    torchrun's environment; argument: a Task as JSON. Rank 0 prints an Outcome as JSON.

All contestants live in one process at once, so that their turns are as close together as can be.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from espalier.language.workload import open_language
from espalier.plan import base as plans
from espalier.recipe import defaults, recipe_file
from espalier.train import rank_spec as launch
from espalier.train.rank_setup import RankSetup
from espalier.train.trainer import Trainer
from rank import late, run


class Contestant(msgspec.Struct, frozen=True):
    """A recipe, as its table, and the plan to train it by, as JSON. A plan of one rank is trained by each rank."""

    name: str
    recipe: dict[str, Any]
    plan: str


class Task(msgspec.Struct, frozen=True):
    """Who trains, in how many turns; after `limit` seconds no further one begins. `gathers`: sizes in bytes of
    all-gathers that are timed first."""

    contestants: tuple[Contestant, ...]
    rounds: int
    limit: float
    gathers: tuple[int, ...] = ()


class Outcome(msgspec.Struct, frozen=True):
    """Seconds of a step by contestant and round, the last loss of each, and seconds of the all-gathers by size."""

    seconds: dict[str, list[float]]
    losses: dict[str, float]
    gathers: dict[int, float]


def recipe_of(table: dict[str, Any]) -> Any:
    """The resolved recipe of a table."""
    return defaults.resolve(recipe_file.from_table(table))[0]


class Runner:
    """A contestant at work. Has state: its trainer."""

    def __init__(self, who: Contestant, group: dist.ProcessGroup) -> None:
        recipe, plan = recipe_of(who.recipe), plans.loads(who.plan)
        alone = len(plan.ranks) == 1
        self.name, self.workload = who.name, open_language(recipe)
        place = launch.places(plan)[0 if alone else dist.get_rank()]
        self.trainer = Trainer(RankSetup(recipe, plan, self.workload, place), None if alone else group)
        self.loss = 0.0

    def turn(self) -> float:
        """Seconds of a step on the slowest rank."""
        batches = self.workload.batches(self.trainer.step, self.trainer.setting.shard)
        dist.barrier()
        begun = time.perf_counter()
        self.loss = self.trainer.train_step(batches).loss
        self.trainer.built.sharding.settle()
        dist.barrier()
        return time.perf_counter() - begun


def gathered(size: int) -> float:
    """Seconds of an all-gather that leaves `size` bytes on every rank, the best of five."""
    whole = torch.zeros(size // 4)
    part = torch.zeros(size // 4 // dist.get_world_size())
    found = []
    for _ in range(5):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_gather_single(whole, part)
        found.append(time.perf_counter() - begun)
    return min(found)


def measure(task: Task, group: dist.ProcessGroup) -> Outcome:
    """All contestants in turn: one step to warm up, then rounds of turns, each from another beginning."""
    begun, gathers = time.perf_counter(), {size: gathered(size) for size in task.gathers}
    runners = [Runner(who, group) for who in task.contestants]
    for runner in runners:
        runner.turn()
    seconds: dict[str, list[float]] = {runner.name: [] for runner in runners}
    for number in range(task.rounds):
        first = number % len(runners)
        for runner in runners[first:] + runners[:first]:
            seconds[runner.name].append(runner.turn())
        if late(begun, task.limit):
            break
    return Outcome(seconds, {runner.name: runner.loss for runner in runners}, gathers)


if __name__ == "__main__":
    run(Task, measure)
