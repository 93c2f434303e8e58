"""One rank of bench/flashflex.py: contestants train the same decoder on the same tokens, a step each in turn.

torchrun's environment; argument: a Task as JSON. Rank 0 prints an Outcome as JSON, or with `passes` Speeds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from cuts_rank import Place, RandomTokens, place_batches
from espalier.language.decoder_workload import new_model
from espalier.machine import link as links
from espalier.plan.base import Plan
from espalier.recipe import Recipe, defaults, recipe_file
from espalier.train import rank_spec as launch
from espalier.train.rank_setup import RankSetup
from espalier.train.trainer import Trainer
from peers.stock import Decoder, Degrees, Stock
from rank import late, run, stock
from table import settle

CLOSE = 1e-3
"""Largest relative difference of losses that are still the same: AdamW makes steps of gradients of random tokens that
are next to nothing, whose sums differ by rounding."""


class Task(msgspec.Struct, frozen=True):
    """What to train: a decoder, `batch` windows of `sequence` tokens a step, in micro-batches.

    `passes`: measure so many forward and backward passes of a micro-batch instead. `limit`: seconds after which no
    further round begins. `plans`: those of our engine's contestants, by name.
    """

    depth: int = 32
    width: int = 64
    heads: int = 4
    vocabulary: int = 512
    batch: int = 64
    micro_batch: int = 2
    sequence: int = 128
    rounds: int = 7
    passes: int = 0
    limit: float = 120.0
    plans: dict[str, Plan] = {}

    def recipe(self) -> Recipe:
        """Resolved."""
        table = {
            "name": "bench",
            "model": {
                "depth": self.depth, "width": self.width, "heads": self.heads, "vocabulary": self.vocabulary,
                "tied": False,
            },
            "data": {"path": "python:stdlib"},
            "train": {
                "steps": 1000, "sequence": self.sequence, "batch_tokens": self.batch * self.sequence,
                "precision": "fp32", "optimizer": {"kind": "adamw"}, "schedule": {"kind": "constant"},
            },
        }  # fmt: skip
        return defaults.resolve(recipe_file.from_table(table))[0]


class Speeds(msgspec.Struct, frozen=True):
    """Seconds of a forward and backward pass of the whole decoder on one micro-batch, by rank, and bytes/s of sums over
    all ranks."""

    seconds: list[float]
    sums: float


class Outcome(msgspec.Struct, frozen=True):
    """Seconds of a step by contestant and round, and the last loss of each."""

    seconds: dict[str, list[float]]
    losses: dict[str, float]


class Planned:
    """The Trainer with a plan."""

    def __init__(self, place: Place, plan: Plan) -> None:
        spec = launch.RankSpec(rank=dist.get_rank(), world=len(plan.ranks))
        self.setting = RankSetup(place.workload.recipe, plan, place.workload, spec)
        self.trainer = Trainer(self.setting, place.channel)

    def step(self, number: int) -> float:
        """Loss of all ranks."""
        return float(self.trainer.train_step(place_batches(self.setting, number)).loss)


class Peer:
    """What both peers of PyTorch's share."""

    def __init__(self, place: Place) -> None:
        self.place, options = place, place.workload.options
        self.sizes = msgspec.structs.asdict(options) | {"sequence": place.task.sequence}
        self.state = new_model(options, place.workload.recipe.train.seed, torch.device("cpu")).state_dict()
        self.rates = msgspec.structs.asdict(place.workload.recipe.train.optimizer)

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all samples of a step."""
        rows = self.place.workload.rows(number)
        return rows[:, :-1], rows[:, 1:]


class EqualSplit(Peer):
    """torch.distributed.pipelining with a stage on each rank."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        count = place.task.batch // place.task.micro_batch
        self.stock = Stock(self.sizes, self.state, Degrees(dist.get_world_size(), 1, 1, 1, False), count, self.rates)

    def step(self, number: int) -> float:
        """Loss of all samples."""
        found = self.stock.step(*self.tokens(number))
        told = torch.zeros(1) if found is None else found.reshape(1)
        dist.all_reduce(told, group=stock())
        return float(told)


class Ddp(Peer):
    """DistributedDataParallel with as many samples on each rank."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        model = Decoder(self.sizes)
        model.load_state_dict(self.state)
        self.model = nn.parallel.DistributedDataParallel(model, process_group=stock(), gradient_as_bucket_view=True)
        decay = self.rates["weight_decay"]
        every = list(model.parameters())
        groups = [
            {"params": [one for one in every if one.ndim >= 2], "weight_decay": decay},
            {"params": [one for one in every if one.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.rates["learning_rate"], betas=self.rates["betas"], eps=self.rates["epsilon"], fused=True
        )

    def step(self, number: int) -> float:
        """Loss of all samples."""
        rank, world, size = dist.get_rank(), dist.get_world_size(), self.place.task.micro_batch
        parts = [one.chunk(world)[rank].split(size) for one in self.tokens(number)]
        self.optimizer.zero_grad(set_to_none=True)
        count, told = len(parts[0]), torch.zeros(1)
        for at, (tokens, targets) in enumerate(zip(*parts, strict=True)):
            with self.model.no_sync() if at + 1 < count else nullcontext():
                loss = Stock._loss(self.model(tokens), targets) / count
                loss.backward()
            told += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        dist.all_reduce(told, group=stock())
        return float(told) / world


def speeds(task: Task, workload: RandomTokens) -> Speeds:
    """All ranks compute at once, as they do in a step: what they share of a processor (caches, memory) counts."""
    model = new_model(workload.options, 1, torch.device("cpu"))
    (batch, *_) = workload.batches(0, launch_shard(task))
    taken = []
    for number in range(task.passes + 1):
        dist.barrier(stock())
        begun = time.perf_counter()
        loss, _ = workload.loss(model, batch)
        loss.backward()
        taken += [time.perf_counter() - begun] if number else []
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, sorted(taken)[len(taken) // 2], group=stock())
    matrix = links.measure(stock())
    apart = ~np.eye(dist.get_world_size(), dtype=bool)
    return Speeds(found, matrix.share * float(matrix.bandwidth[apart].min()))


def launch_shard(task: Task) -> Any:
    """The first micro-batch alone."""
    from espalier.parallel.workload import Shard

    return Shard(0, task.micro_batch, task.micro_batch)


def measure(task: Task, channel: dist.ProcessGroup) -> Outcome | Speeds:
    """All in turn: a step to warm up, then rounds of turns, each from another beginning."""
    workload = RandomTokens(task.recipe())
    if task.passes:
        return speeds(task, workload)
    place, begun = Place(task, workload, channel, ()), time.perf_counter()
    runners: dict[str, Any] = {name: Planned(place, plan) for name, plan in task.plans.items()}
    runners |= {"equal split": EqualSplit(place), "DDP": Ddp(place)}
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    losses: dict[str, float] = {}

    def turn(name: str, number: int) -> float:
        settle()
        dist.barrier(stock())
        start = time.perf_counter()
        losses[name] = runners[name].step(number)
        dist.barrier(stock())
        return time.perf_counter() - start

    for name in runners:
        turn(name, 0)
    for number in range(task.rounds):
        for name in _from(list(runners), number):
            seconds[name].append(turn(name, number + 1))
        if late(begun, task.limit):
            break
    for name, loss in losses.items():
        assert abs(loss / losses["ours"] - 1) < CLOSE, f"contestants do not train alike: {losses}: {name}"
    return Outcome(seconds, losses)


def _from(names: Sequence[str], number: int) -> list[str]:
    first = number % len(names)
    return [*names[first:], *names[:first]]


if __name__ == "__main__":
    run(Task, measure)
