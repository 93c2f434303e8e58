"""One rank of bench/choice.py: measures the links, or runs plans of one recipe in turn, a few steps each.

torchrun's environment; argument: a Task as JSON. Rank 0 prints an Outcome as JSON.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from cuts_rank import CLOSE, TIMEOUT, RandomTokens
from cuts_rank import Task as Model
from espalier import comm
from espalier.cluster import Link
from espalier.hardware import link as links
from espalier.hardware.malloc_trim import keep_freed
from espalier.launch import base as launch
from espalier.plan.base import Plan
from espalier.rank_setup import RankSetup
from espalier.trainer import Trainer
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


def measure(task: Task, channel: dist.ProcessGroup, world: int) -> Outcome:
    """All plans in turn: one step to warm up, then one step in each round."""
    if not task.plans:
        matrix = links.measure(channel)
        return Outcome(inside=matrix.link(0, 1), between=matrix.link(0, world - 1))
    workload, begun = RandomTokens(task.model.recipe()), time.perf_counter()
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT))
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
            dist.barrier(control)
            start = time.perf_counter()
            losses.append(trainer.train_step(batches).loss)
            dist.barrier(control)
            seconds[(at + number) % len(runners)].append(time.perf_counter() - start)
        assert max(losses) / min(losses) - 1 < CLOSE, f"plans do not train alike: {losses}"
        late = torch.tensor([time.perf_counter() - begun > task.limit], dtype=torch.int32)
        dist.broadcast(late, 0, group=control)
        if late.item() and number:
            break
    dist.barrier(control)
    return Outcome([one[1:] for one in seconds])


def main(arguments: Sequence[str]) -> None:
    """Joins the others, measures, says what came out."""
    task = msgspec.json.decode(arguments[0], type=Task)
    torch.set_num_threads(1)
    keep_freed()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, rank == 0)
    channel = comm.connect(store, rank, world, timeout=TIMEOUT)
    outcome = measure(task, channel, world)
    if rank == 0:
        print(msgspec.json.encode(outcome).decode(), flush=True)
    dist.barrier()
    comm.disconnect()


if __name__ == "__main__":
    main(sys.argv[1:])
