"""One rank of bench/cuts.py: contestants train the same decoder on the same tokens, a few steps each in turn.

    torchrun's environment; argument: a Task as JSON. Rank 0 prints an Outcome as JSON.

Ours is the Trainer with a plan written by hand, over Channels; the stock composition has groups of PyTorch's own Gloo.
All live in one process at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from espalier.language.decoder_workload import TokenWindows, new_model
from espalier.language.workload import LanguageWorkload
from espalier.parallel.workload import Shard
from espalier.plan import base as plans
from espalier.recipe import Gpt, Recipe, defaults, recipe_file
from espalier.train import rank_spec as launch
from espalier.train.rank_setup import RankSetup
from espalier.train.trainer import Trainer
from peers.stock import Degrees, Stock
from rank import late, run, stock
from table import settle

STOCK = ("stock", "stock, kept")
CLOSE = 1e-4
"""Largest relative difference of losses that are still the same."""


class Cut(msgspec.Struct, frozen=True):
    """How a decoder is cut, by all contestants.

    Attributes:
        pp, dp, cp, tp: ranks of each kind; heads: of `cp`, those that share heads (ours only).
        full: parameters are gathered anew in backward: FSDP2's `reshard_after_forward`, AMSP's n/n/n. Else 1/1/n.
        schedule: of stages (ours only).
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    heads: int = 1
    full: bool = False
    schedule: str = "1f1b"

    @property
    def world(self) -> int:
        """Ranks of all kinds."""
        return self.pp * self.dp * self.cp * self.tp

    def plan(self, depth: int, samples: int, micro_batches: int, nodes: Sequence[int]) -> plans.Plan:
        """As a plan of ours."""
        within, cell = self.dp * self.cp * self.tp, self.cp * self.tp
        data = [rank % within // cell for rank in range(self.world)]
        shares = [(samples * one // self.dp, samples * (one + 1) // self.dp) for one in data]
        stages = tuple(
            plans.Stage(
                ranks=tuple(range(one * within, (one + 1) * within)),
                layers=(depth * one // self.pp, depth * (one + 1) // self.pp),
                micro_batches=micro_batches,
                tensor=self.tp,
                heads=self.heads,
                context=self.cp // self.heads,
                window=self.cp // self.heads,
            )
            for one in range(self.pp)
        )
        held = tuple(range(0, within, self.tp)) if self.dp * self.cp > 1 else ()
        unit = plans.Unit(optimizer=held, **({"params": held, "grads": held} if self.full else {}))
        return plans.Plan(
            ranks=tuple(plans.Rank(share=share, node=node) for share, node in zip(shares, nodes, strict=True)),
            stages=stages if self.pp * cell > 1 else (),
            units=(unit,),
            algorithm="megatron" if self.tp > 1 else "data",
            micro_batch=samples // self.dp // micro_batches,
            schedule=self.schedule,
        )


class Task(msgspec.Struct, frozen=True):
    """What to measure: a decoder, `batch` windows of `sequence` tokens a step, and how it is cut.

    `steps`: in each turn; `limit`: seconds after which no further round begins; `predicted`: by the planner, of ours.
    """

    cut: Cut
    batch: int = 8
    sequence: int = 256
    micro_batches: int = 1
    depth: int = 4
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 2048
    rounds: int = 7
    steps: int = 2
    limit: float = 100.0
    predicted: plans.Predicted | None = None

    def recipe(self) -> Recipe:
        """Resolved."""
        table = {
            "name": "bench",
            "model": {
                "depth": self.depth, "width": self.width, "heads": self.heads, "kv_heads": self.kv_heads,
                "vocabulary": self.vocabulary, "tied": False,
            },
            "data": {"path": "python:stdlib"},
            "train": {
                "steps": 1000, "sequence": self.sequence, "batch_tokens": self.batch * self.sequence,
                "optimizer": {"kind": "adamw"}, "schedule": {"kind": "constant"},
            },
        }  # fmt: skip
        return defaults.resolve(recipe_file.from_table(table))[0]


class Outcome(msgspec.Struct, frozen=True):
    """Seconds of a step by contestant and round, the last loss of each, and the model's parameters."""

    seconds: dict[str, list[float]]
    losses: dict[str, float]
    parameters: int


class RandomTokens(LanguageWorkload):
    """Windows of random tokens: nothing is read."""

    def __init__(self, recipe: Recipe) -> None:
        assert isinstance(recipe.model, Gpt)
        self.recipe, self.options, self.packed = recipe, recipe.model, False
        self.sequence = recipe.train.sequence or 0
        self.global_batch = (recipe.train.batch_tokens or 0) // self.sequence
        self.nominal_weight = float(self.global_batch * self.sequence)

    def rows(self, step: int) -> Tensor:
        """All windows of a step, [samples, sequence + 1]."""
        draw = torch.Generator().manual_seed(step)
        return torch.randint(self.options.vocabulary or 0, (self.global_batch, self.sequence + 1), generator=draw)

    def batches(self, step: int, shard: Shard) -> list[TokenWindows]:
        """This rank's, in micro-batches."""
        rows = self.rows(step)
        return [self._part(rows[start:stop], shard) for start, stop in shard.cuts]


# --- contestants ---------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """What all contestants share."""

    task: Task
    workload: RandomTokens
    channel: dist.ProcessGroup
    nodes: Sequence[int]


class Ours:
    """The Trainer with a plan."""

    def __init__(self, place: Place) -> None:
        task = place.task
        plan = task.cut.plan(task.depth, task.batch, task.micro_batches, place.nodes)
        plan = msgspec.structs.replace(plan, predicted=task.predicted)
        spec = launch.RankSpec(rank=dist.get_rank(), world=task.cut.world)
        self.setting = RankSetup(place.workload.recipe, plan, place.workload, spec)
        self.trainer = Trainer(self.setting, place.channel)

    def step(self, number: int) -> float:
        """Loss of all ranks."""
        return float(self.trainer.train_step(place_batches(self.setting, number)).loss)


def place_batches(setting: RankSetup, number: int) -> Sequence[TokenWindows]:
    """A step's micro-batches."""
    return setting.workload.batches(number, setting.shard)


class Theirs:
    """The stock composition. `reshard`: see `Cut.full`."""

    def __init__(self, place: Place) -> None:
        self.place = place
        task, cut = place.task, place.task.cut
        options, rates = place.workload.options, place.workload.recipe.train.optimizer
        sizes = msgspec.structs.asdict(options) | {"sequence": task.sequence}
        state = new_model(options, place.workload.recipe.train.seed, torch.device("cpu")).state_dict()
        degrees = Degrees(cut.pp, cut.dp, cut.cp, cut.tp, cut.full)
        self.stock = Stock(sizes, state, degrees, task.micro_batches, msgspec.structs.asdict(rates))

    def step(self, number: int) -> Tensor | None:
        """Loss of this rank's samples."""
        cut, rows = self.place.task.cut, self.place.workload.rows(number)
        data = dist.get_rank() % (cut.dp * cut.cp * cut.tp) // (cut.cp * cut.tp)
        samples = len(rows) // cut.dp
        mine = rows[data * samples : (data + 1) * samples]
        tokens, targets = mine[:, :-1], mine[:, 1:]
        if (gather := self.stock.gather) is not None:
            tokens, targets = tokens[:, gather.positions], targets[:, gather.positions]
        return self.stock.step(tokens, targets)

    def loss(self, own: Tensor | None) -> float:
        """Of all ranks."""
        total = torch.zeros(2) if own is None else torch.tensor([float(own), 1.0])
        dist.all_reduce(total, group=stock())
        return float(total[0] / total[1])


def measure(task: Task, channel: dist.ProcessGroup) -> Outcome:
    """Both in turn: a step to warm up, then rounds of turns, each from another beginning."""
    nodes = [int(node) for node in os.environ["NETLAB_NODES"].split(",")]
    place, begun = Place(task, RandomTokens(task.recipe()), channel, nodes), time.perf_counter()
    runners: dict[str, Any] = {"ours": Ours(place), "stock": Theirs(place)}
    done = dict.fromkeys(runners, 0)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    losses: dict[str, float] = {}

    def turn(name: str, steps: int) -> float:
        runner = runners[name]
        settle()
        dist.barrier(stock())
        start = time.perf_counter()
        for number in range(done[name], done[name] + steps):
            loss = runner.step(number)
        dist.barrier(stock())
        taken = (time.perf_counter() - start) / steps
        done[name] += steps
        losses[name] = loss if name == "ours" else runner.loss(loss)
        return taken

    for name in runners:
        turn(name, 1)
    for number in range(task.rounds):
        names = list(runners) if number % 2 else list(runners)[::-1]
        for name in names:
            seconds[name].append(turn(name, task.steps))
        if late(begun, task.limit):
            break
    assert abs(losses["ours"] / losses["stock"] - 1) < CLOSE, f"contestants do not train alike: {losses}"
    model = new_model(place.workload.options, 0, torch.device("meta"))
    return Outcome(seconds, losses, sum(one.numel() for one in model.parameters()))


if __name__ == "__main__":
    run(Task, measure)
