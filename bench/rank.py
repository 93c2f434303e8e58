"""What the ranks of several bench scripts share: they join, measure in turn, and rank 0 prints the outcome."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from espalier import comm
from espalier.machine.malloc_trim import keep_freed

TIMEOUT = 300.0
Task = TypeVar("Task", bound=msgspec.Struct)


def run(task: type[Task], measure: Callable[[Task, dist.ProcessGroup], msgspec.Struct]) -> None:
    """The rank that torchrun's environment describes. The one argument is the task, as JSON; so is what is printed."""
    asked = msgspec.json.decode(sys.argv[1], type=task)
    torch.set_num_threads(1)
    keep_freed()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, rank == 0)
    outcome = measure(asked, comm.connect(store, rank, world, timeout=TIMEOUT))
    if rank == 0:
        print(msgspec.json.encode(outcome).decode(), flush=True)
    dist.barrier(stock())
    comm.disconnect()
    os._exit(0)  # torch's threads that are still in C++ when the interpreter ends may abort the process


@functools.cache
def stock() -> Any:
    """PyTorch's own Gloo over all ranks."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT))


def late(begun: float, limit: float) -> bool:
    """Whether more than `limit` seconds have passed since `begun`, on rank 0."""
    found = torch.tensor([time.perf_counter() - begun > limit], dtype=torch.int32)
    dist.broadcast(found, 0, group=stock())
    return bool(found.item())
