"""One rank of bench/amsp.py: contestants train the same decoder on the same bytes, a few steps each in turn.

    torchrun's environment; argument: a Task as JSON. Rank 0 prints an Outcome as JSON.

Each contestant is what its user would write: fused AdamW, one process group of PyTorch's own Gloo for the peers, our
engine over its Channels. All live in one process at once, so that their turns are as close together as can be.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

sys.path.insert(0, str(Path(__file__).parent))
from espalier.language.decoder_workload import new_model
from espalier.language.gpt import GPT
from espalier.mechanisms.sharding.amsp import Amsp
from espalier.plan.axes.placement import ShardFactors
from espalier.plan.axes.placement_plan import Spread
from espalier.recipe import Gpt, defaults, recipe_file
from luwu_rank import Direct
from rank import late, run, stock

SEED = 11


class Contestant(msgspec.Struct, frozen=True):
    """Who trains.

    Attributes:
        kind: `amsp`, `alone` (exchanges nothing), `ddp`, `zero`, `fsdp2` or `hsdp`, of which both may be `direct`:
            with a reduce-scatter that sends half of Gloo's bytes.
        factors: of `amsp`.
        shares: samples of each rank; empty: equal.
        bucket: bytes exchanged at once by `amsp`.
    """

    name: str
    kind: str
    factors: tuple[int, int, int] = (1, 1, 1)
    shares: tuple[int, ...] = ()
    bucket: int = 25 * 2**20


class Task(msgspec.Struct, frozen=True):
    """What to measure: a decoder of `depth` and `width`, `batch` windows of `sequence` bytes a step, and by whom.

    `steps`: in each turn; `limit`: seconds after which no further round begins; `accumulate`: micro-batches of a step;
    `replicas`: of `hsdp`, 0: one on each node.
    """

    depth: int
    width: int
    sequence: int
    batch: int
    contestants: tuple[Contestant, ...]
    rounds: int
    steps: int = 1
    limit: float = 600.0
    accumulate: int = 1
    replicas: int = 0

    def options(self) -> Gpt:
        """The decoder's options, resolved."""
        model = self.recipe().model
        assert isinstance(model, Gpt)
        return model

    def recipe(self) -> Any:
        """The recipe of this task, resolved."""
        table = {
            "name": "bench",
            "model": {"depth": self.depth, "width": self.width},
            "data": {"path": "python:stdlib"},
            "train": {
                "steps": 1000, "sequence": self.sequence, "batch_tokens": self.batch * self.sequence,
                "optimizer": {"kind": "adamw"}, "precision": "fp32",
            },
        }  # fmt: skip
        return defaults.resolve(recipe_file.from_table(table))[0]


class Outcome(msgspec.Struct, frozen=True):
    """Seconds of a step by contestant and round, the last loss of each, and the model's parameters."""

    seconds: dict[str, list[float]]
    losses: dict[str, float]
    parameters: int


class Runner:
    """A contestant at work. Has state: its model, its optimizer, and how many steps it has done."""

    def __init__(self, who: Contestant, task: Task, group: dist.ProcessGroup) -> None:
        self.who, self.task, self.rank = who, task, dist.get_rank()
        self.steps = 0
        torch.manual_seed(SEED)
        model = new_model(task.options(), SEED, torch.device("cpu"))
        assert isinstance(model, GPT)
        self.sharding: Amsp | None = None
        if who.kind in ("amsp", "alone"):
            channel = group if who.kind == "amsp" else None
            self.model, parameters = self._ours(model, channel)
        else:
            self.model = PEERS[who.kind](model, task)
            parameters = list(self.model.parameters())
        if who.kind == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            self.optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
                parameters, torch.optim.AdamW, process_group=stock(), lr=1e-3, fused=True
            )
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    def _ours(self, model: GPT, channel: dist.ProcessGroup | None) -> tuple[nn.Module, list[Tensor]]:
        nodes = [int(node) for node in os.environ["NETLAB_NODES"].split(",")]
        factors = (("*", ShardFactors(*self.who.factors)),)
        spread = Spread(factors, nodes, list(model.blocks), bucket_bytes=self.who.bucket)
        self.sharding = Amsp(model, channel, spread)
        return model, [one.tensor for one in self.sharding.owned]

    def batch(self) -> tuple[Tensor, Tensor]:
        """This rank's windows of the step's batch, the same for all contestants with equal shares."""
        task, world = self.task, dist.get_world_size()
        shares = self.who.shares or (task.batch // world,) * world
        generator = torch.Generator().manual_seed(SEED + self.steps)
        windows = torch.randint(256, (task.batch, task.sequence + 1), generator=generator)
        start = sum(shares[: self.rank])
        mine = windows[start : start + shares[self.rank]]
        return mine[:, :-1], mine[:, 1:]

    def step(self) -> Tensor:
        """One step; returns this rank's part of the loss."""
        tokens, targets = self.batch()
        self.steps += 1
        if self.sharding is None:
            return self._peer_step(tokens, targets)
        sharding = self.sharding
        sharding.clear()
        loss = torch.zeros(())
        pieces = self._pieces(tokens, targets)
        for number, (inputs, wanted) in enumerate(pieces, 1):
            with sharding.accumulate(last=number == len(pieces)):
                total = nn.functional.cross_entropy(self.model(inputs).flatten(0, 1), wanted.flatten(), reduction="sum")
                part = total / (self.task.batch * self.task.sequence)
                part.backward()
            loss += part.detach()
        sharding.wait() if self.who.kind == "amsp" else None
        self.optimizer.step()
        sharding.refresh()
        return loss

    def _pieces(self, tokens: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets of each micro-batch."""
        count = self.task.accumulate
        return list(zip(tokens.chunk(count), targets.chunk(count), strict=True))

    def _peer_step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros(())
        pieces = self._pieces(tokens, targets)
        for number, (inputs, wanted) in enumerate(pieces, 1):
            last = number == len(pieces)
            if isinstance(self.model, FSDPModule):  # shards are summed each time, replicas once
                self.model.set_requires_all_reduce(last)
            plain = isinstance(self.model, nn.parallel.DistributedDataParallel) and not last
            with self.model.no_sync() if plain else nullcontext():
                part = nn.functional.cross_entropy(self.model(inputs).flatten(0, 1), wanted.flatten()) / len(pieces)
                part.backward()
            loss += part.detach()
        self.optimizer.step()
        return loss / dist.get_world_size()

    def turn(self, steps: int) -> tuple[float, float]:
        """Seconds of a step when `steps` are taken, everything that belongs to them waited for; the last loss."""
        dist.barrier(stock())
        begun = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
        if self.sharding is not None:
            self.sharding.settle()
        dist.barrier(stock())
        seconds = (time.perf_counter() - begun) / steps
        dist.all_reduce(loss, group=stock())
        return seconds, float(loss)


# --- the peers -----------------------------------------------------------------------------------------------------


def _ddp(model: GPT, task: Task) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, process_group=stock(), gradient_as_bucket_view=True)


def _fsdp2(model: GPT, task: Task) -> nn.Module:
    return _sharded(model, init_device_mesh("cpu", (dist.get_world_size(),), backend_override={0: "gloo"}))


def _hsdp(model: GPT, task: Task) -> nn.Module:
    nodes = os.environ["NETLAB_NODES"].split(",")
    count = task.replicas or len(set(nodes))
    shape = (count, len(nodes) // count)
    names = ("replicate", "shard")
    return _sharded(
        model, init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override={0: "gloo", 1: "gloo"})
    )


def _sharded(model: GPT, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _direct(wrap: Callable[[GPT, Task], nn.Module]) -> Callable[[GPT, Task], nn.Module]:
    """As `wrap`, each rank sending each other one its part of a sum."""

    def wrapped(model: GPT, task: Task) -> nn.Module:
        sharded = wrap(model, task)
        for module in sharded.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(Direct())  # type: ignore[attr-defined]
        return sharded

    return wrapped


PEERS: dict[str, Callable[[GPT, Task], nn.Module]] = {
    "ddp": _ddp,
    "zero": _ddp,
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "fsdp2 direct": _direct(_fsdp2),
    "hsdp direct": _direct(_hsdp),
}


# --- the measurement -----------------------------------------------------------------------------------------------


def measure(task: Task, group: dist.ProcessGroup) -> Outcome:
    """All contestants in turn: one step to warm up, then rounds of turns, each from another beginning."""
    begun = time.perf_counter()
    runners = [Runner(who, task, group) for who in task.contestants]
    for runner in runners:
        runner.turn(1)
    seconds: dict[str, list[float]] = {who.name: [] for who in task.contestants}
    losses = {}
    for number in range(task.rounds):
        first = number % len(runners)
        for runner in runners[first:] + runners[:first]:
            taken, losses[runner.who.name] = runner.turn(task.steps)
            seconds[runner.who.name].append(taken)
        if late(begun, task.limit):
            break
    model = new_model(task.options(), SEED, torch.device("meta"))
    return Outcome(seconds, losses, sum(parameter.numel() for parameter in model.parameters()))


if __name__ == "__main__":
    run(Task, measure)
