"""One host of bench/luwu.py: trains a decoder for some steps by one method, and says what they took.

torchrun's environment, the optimizer node being the last rank; argument: a Task as JSON. Rank 0 prints an Outcome.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from espalier import trainer, worker
from espalier.config import Recipe, defaults, recipe_file
from espalier.language.workload import open_language
from espalier.launch.base import RankSpec
from espalier.plan import base as plans
from espalier.rank_setup import RankSetup
from espalier.shard.luwu import cost
from espalier.workload import Workload

PACKET = 66
"""Bytes of Ethernet, IP and TCP headers with timestamps."""


class Task(msgspec.Struct, frozen=True):
    """`kind`: `luwu`, `luwu int8`, `fsdp2` or `zero1`; `steps` timed after two; `folder`: for the node's files."""

    kind: str
    depth: int
    width: int
    sequence: int
    steps: int
    folder: str
    workers: int = 4


class Outcome(msgspec.Struct, frozen=True):
    """Seconds of each step; bytes that rank 0's link sent and received in a step, headers left out, and what the cost
    function says of both."""

    seconds: list[float]
    sent: float
    received: float
    expected_sent: float
    expected_received: float
    parameters: int


def recipe_of(task: Task) -> Recipe:
    """Resolved: one sequence for each worker and step."""
    table = {
        "model": {"depth": task.depth, "width": task.width, "tied": False},
        "data": {"path": "python:stdlib"},
        "train": {
            "steps": 1000,
            "sequence": task.sequence,
            "batch_tokens": task.workers * task.sequence,
            "optimizer": {"kind": "adamw"},
            "precision": "fp32",
        },
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


def link_bytes() -> tuple[int, int]:
    """(sent, received) payload of this host's link so far."""
    place = Path("/sys/class/net/eth0/statistics")
    found = {name: int((place / name).read_text()) for name in ("tx_bytes", "tx_packets", "rx_bytes", "rx_packets")}
    return found["tx_bytes"] - PACKET * found["tx_packets"], found["rx_bytes"] - PACKET * found["rx_packets"]


def timed(task: Task, step: Callable[[int], None], expected: tuple[float, float], parameters: int) -> Outcome:
    """Two steps, then those that count."""
    for number in range(2):
        step(number)
    before, seconds = link_bytes(), []
    for number in range(2, 2 + task.steps):
        began = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - began)
    sent, received = ((after - first) / task.steps for after, first in zip(link_bytes(), before, strict=True))
    return Outcome(seconds, sent, received, *expected, parameters)


# --- ours ----------------------------------------------------------------------------------------------------------


def ours(task: Task, rank: int, world: int) -> Outcome | None:
    """A worker, or the node."""
    recipe = recipe_of(task)
    exchanges = (plans.Exchange(traffic="gradients", codec="int8"),) if task.kind.endswith("int8") else ()
    trainers = tuple(plans.Rank(share=(one, one + 1)) for one in range(task.workers))
    plan = plans.Plan(
        ranks=(*trainers, plans.Rank(role="optimizer")), micro_batch=1, precision="fp32", exchanges=exchanges
    )
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    place = RankSpec(rank=rank, world=world, role=plan.ranks[rank].role, host=host, port=port, serves=rank == 0)
    workload = open_language(recipe)
    setting = RankSetup(recipe, plan, workload, place, folder=Path(task.folder))
    with worker.joined(place, 300.0) as channel:
        if place.role == "optimizer":
            worker.as_optimizer(setting, channel)
            return None
        made = trainer.Trainer(setting, channel)

        def step(number: int) -> None:
            made.train_step(workload.batches(number, setting.shard))

        window = made.built.context.window
        assert window is not None
        numel = tuple(one.layer.numel for one in window.layers)
        layers = cost.Layers(numel, tuple(map(tuple, window.uses)))
        sent = cost.pushed_bytes(layers, 1 if exchanges else 4)
        found = timed(task, step, (sent, cost.pulled_bytes(layers)), sum(numel))
        made.built.close()
        return found


# --- beside it -----------------------------------------------------------------------------------------------------


@contextmanager
def joined(rank: int, workers: int) -> Iterator[None]:
    """The workers' own process group."""
    dist.init_process_group("gloo", rank=rank, world_size=workers)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fsdp2(task: Task, workload: Workload, rank: int) -> Outcome:
    """Fully sharded, each block gathered anew in backward."""
    model = workload.build(torch.device("cpu"), torch.float32)
    numel = sum(one.numel() for one in model.parameters())
    for block in workload.blocks(model):
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    expected = float(cost.sharded_bytes(cost.Layers((numel,), ((0,),)), task.workers))
    return timed(task, _step(task, workload, model, optimizer, rank), (expected, expected), numel)


def zero1(task: Task, workload: Workload, rank: int) -> Outcome:
    """ZeRO-1 by hand, its states in the host's memory: one reduce-scatter, a step of the shard, one all-gather."""
    model = workload.build(torch.device("cpu"), torch.float32)
    parameters = list(model.parameters())
    numel = sum(one.numel() for one in parameters)
    size = -(-numel // task.workers)
    flat, gradient = torch.zeros(size * task.workers), torch.zeros(size * task.workers)
    at = 0
    for one in parameters:
        view = flat[at : at + one.numel()].view_as(one)
        view.copy_(one.detach())
        one.data, one.grad = view, gradient[at : at + one.numel()].view_as(one)
        at += one.numel()
    shard = nn.Parameter(flat[rank * size : (rank + 1) * size].clone())
    optimizer = torch.optim.AdamW([shard], lr=1e-3, fused=True)
    plain = _step(task, workload, model, None, rank)
    own: Tensor = torch.zeros(size)

    def step(number: int) -> None:
        gradient.zero_()
        plain(number)
        dist.reduce_scatter_tensor(own, gradient)
        shard.grad = own
        optimizer.step()
        dist.all_gather_into_tensor(flat, shard.detach())

    expected = 2.0 * (task.workers - 1) / task.workers * 4 * numel
    return timed(task, step, (expected, expected), numel)


def _step(
    task: Task, workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int
) -> Callable[[int], None]:
    def step(number: int) -> None:
        from espalier.workload import Shard

        (batch,) = workload.batches(number, Shard(rank, rank + 1, 1))
        value, _ = workload.loss(model, batch)
        (value / workload.nominal_weight).backward()  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def main() -> int:
    """Runs the task on this host."""
    task = msgspec.json.decode(sys.argv[1], type=Task)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    found: Any = None
    if task.kind.startswith("luwu"):
        found = ours(task, rank, world)
    elif rank < task.workers:
        kinds = {"fsdp2": fsdp2, "zero1": zero1}
        with joined(rank, task.workers):
            found = kinds[task.kind](task, open_language(recipe_of(task)), rank)
    if rank == 0:
        print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of connections and process groups need not end first
