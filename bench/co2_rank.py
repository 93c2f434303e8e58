"""One host of bench/co2.py: trains a decoder on real text for a while by one method, and says how that went.

torchrun's environment; argument: a Task as JSON. Rank 0 prints an Outcome as JSON.

Every host reads its own part of each global batch. The clock stands still while the common model is evaluated. At the
end methods by rounds make all hosts one, which counts: the last point of a curve has all that was done.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier import comm
from espalier.comm.ddp import ddp_hook
from espalier.language.workload import open_language
from espalier.machine.malloc_trim import keep_freed
from espalier.mechanisms.local_rounds.co2 import CO2
from espalier.parallel.workload import Shard
from espalier.recipe import defaults, recipe_file

TIMEOUT = 300.0
PACKET = 66
"""Bytes of Ethernet, IP and TCP headers with timestamps."""


class Task(msgspec.Struct, frozen=True):
    """What to train and how: `kind` is `alone`, `ddp`, `accumulated`, `int8`, `torchft` or a method of
    `optim.diloco_slowmo`.

    `batch`: windows of `sequence` bytes of each host and step; `steps`: local steps between exchanges; `seconds`: after
    which no further round begins, evaluation not counted.
    """

    kind: str
    depth: int
    width: int
    sequence: int
    batch: int
    steps: int
    seconds: float
    codec: str = "exact"
    adapt: bool = False
    """Rounds follow the measured waits, as they do in `espalier train`."""
    most: int = 0
    """Local steps after which no further round begins either; 0: any number."""
    held_out: int = 32


class Outcome(msgspec.Struct, frozen=True):
    """Seconds and local steps in all, payload bytes that a host sent, seconds of the kernel, those spent standing still
    in our engine, (seconds, tokens of all hosts, held-out loss) along the way, parameters, and of each round its
    seconds standing still."""

    seconds: float
    steps: int
    sent: float
    kernel: float
    stood: float
    curve: list[tuple[float, int, float]]
    parameters: int
    still: list[float] = []


def recipe_of(task: Task, world: int) -> Any:
    """The task as a resolved recipe."""
    table = {
        "name": "bench",
        "model": {"depth": task.depth, "width": task.width},
        "data": {"path": "python:stdlib"},
        "train": {
            "steps": 100_000,
            "sequence": task.sequence,
            "batch_tokens": world * task.batch * task.sequence,
            "optimizer": {"kind": "adamw"},
            "schedule": {"kind": "constant"},
        },
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


def wire_bytes() -> int:
    """Payload that this host's interface has sent."""
    place = Path("/sys/class/net/eth0/statistics")
    total, packets = (int((place / name).read_text()) for name in ("tx_bytes", "tx_packets"))
    return total - PACKET * packets


def own_address() -> str:
    """Of the interface towards rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect((os.environ["MASTER_ADDR"], 1))
        return str(one.getsockname()[0])


def kernel_seconds() -> float:
    """Processor time of the kernel on this machine: system calls and soft interrupts, where TCP is."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return (int(fields[3]) + int(fields[7])) / os.sysconf("SC_CLK_TCK")


class Runner:
    """A method at work. Has state: the model, its optimizer, the steps done, and the clock."""

    def __init__(self, task: Task, rank: int, world: int) -> None:
        self.task, self.rank, self.world = task, rank, world
        recipe = recipe_of(task, world)
        self.workload = open_language(recipe)
        self.model: nn.Module = self.workload.build(torch.device("cpu"), torch.float32)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        rate = recipe.train.optimizer.learning_rate
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.1, fused=True)
        self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT))
        self.shown: Callable[[], Any] = contextlib.nullcontext
        self.stood: Callable[[], float] = lambda: 0.0
        self.finish: Callable[[], None] = lambda: None
        self.length: Callable[[], int] = lambda: task.steps
        self.called: nn.Module = self.model
        self.number = 0
        self.steps: Callable[[], None] = getattr(self, f"_{task.kind}", self._by_rounds)() or self._round

    # --- the methods: each makes what it needs; default: a round is local steps, each moved by the optimizer ----------

    def _alone(self) -> None:
        pass

    def _ddp(self) -> Callable[[], None]:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT))
        self.called = nn.parallel.DistributedDataParallel(self.model, process_group=group, gradient_as_bucket_view=True)
        return self._accumulate

    _accumulated = _ddp

    def _int8(self) -> Callable[[], None]:
        step = self._ddp()
        assert isinstance(self.called, nn.parallel.DistributedDataParallel)
        self.called.register_comm_hook(None, ddp_hook("int8", timeout=TIMEOUT))
        return step

    def _by_rounds(self) -> None:
        task = self.task
        made = CO2(self.model, self.optimizer, steps=task.steps, method=task.kind, codec=task.codec)
        made.engine.length = made.engine.length._replace(adapt=task.adapt)
        self.length = lambda: made.engine.own_steps
        self.shown, self.stood, self.finish = made.shown, lambda: made.engine.stood, made.finish

    def _torchft(self) -> None:
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        host, me = os.environ["MASTER_ADDR"], own_address()
        told = [None]
        if self.rank == 0:
            self.lighthouse = LighthouseServer(bind=f"{host}:0", min_replicas=self.world, join_timeout_ms=60_000)
            port = self.lighthouse.address().rsplit(":", 1)[1]  # it names itself, which nobody here can look up
            told = [f"http://{host}:{port}"]
        dist.broadcast_object_list(told, 0, group=self.control)
        store = dist.TCPStore(me, 0, is_master=True, wait_for_workers=False)
        limit = timedelta(seconds=TIMEOUT)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=limit),
            min_replica_size=self.world,
            load_state_dict=lambda state: None,
            state_dict=dict,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=limit,
            connect_timeout=limit,
            rank=0,
            world_size=1,
            store_addr=me,
            store_port=store.port,
            lighthouse_addr=told[0],
            replica_id=f"host{self.rank}",
            hostname=me,
            init_sync=False,
        )
        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        made = DiLoCo(manager, [self.model], self.optimizer, outer, sync_every=self.task.steps)
        self.kept = (store, manager, made)
        made.__enter__()

    # --- training -----------------------------------------------------------------------------------------------------

    def _loss(self) -> Tensor:
        task = self.task
        shard = Shard(self.rank * task.batch, (self.rank + 1) * task.batch, task.batch)
        (batch,) = self.workload.batches(self.number, shard)
        self.number += 1
        return nn.functional.cross_entropy(self.called(batch.tokens).flatten(0, 1), batch.targets.flatten())

    def _round(self) -> None:
        for _ in range(self.length()):
            self.optimizer.zero_grad(set_to_none=True)
            self._loss().backward()
            self.optimizer.step()

    def _accumulate(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        steps = self.task.steps if self.task.kind == "accumulated" else 1
        for index in range(steps):
            last = index == steps - 1
            assert isinstance(self.called, nn.parallel.DistributedDataParallel)
            with contextlib.nullcontext() if last else self.called.no_sync():
                (self._loss() / steps).backward()
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Held-out loss of the common model."""
        each = self.task.held_out // self.world
        shard = Shard(self.rank * each, (self.rank + 1) * each, each)
        self.model.eval()
        with self.shown():
            total, weight = self.workload.evaluate(self.model, shard)["loss"]
        self.model.train()
        sums = torch.tensor([total, weight], dtype=torch.float64)
        dist.all_reduce(sums, group=self.control)
        return float(sums[0] / sums[1])

    def run(self) -> Outcome:
        """Trains until the time is over."""
        self.steps()  # the first makes buffers and compiles kernels
        spent, first, curve = 0.0, self.number, [(0.0, 0, self.evaluate())]
        dist.barrier(self.control)
        stood, sent, kernel = self.stood(), wire_bytes(), kernel_seconds()
        quiet, still = 0.0, list[float]()
        while True:
            begun, stopped = time.perf_counter(), self.stood()
            self.steps()
            still.append(self.stood() - stopped)
            dist.barrier(self.control)
            spent += time.perf_counter() - begun
            tokens = (self.number - first) * self.task.batch * self.task.sequence * self.world
            begun = kernel_seconds()
            curve.append((spent, tokens, self.evaluate()))
            done = self.task.most and self.number - first >= self.task.most
            over = torch.tensor([float(done or spent > self.task.seconds)])
            dist.broadcast(over, 0, group=self.control)
            quiet += kernel_seconds() - begun
            if over.item():
                break
        begun = time.perf_counter()
        self.finish()
        dist.barrier(self.control)
        spent += time.perf_counter() - begun
        curve[-1] = (spent, tokens, self.evaluate())
        took = (wire_bytes() - sent, kernel_seconds() - kernel - quiet, self.stood() - stood)
        return Outcome(spent, self.number - first, *took, curve, self.parameters, still)


def main(arguments: Sequence[str]) -> None:
    """Joins the others, trains, says what came out."""
    task = msgspec.json.decode(arguments[0], type=Task)
    torch.set_num_threads(1)
    keep_freed()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, rank == 0)
    comm.connect(store, rank, world, timeout=TIMEOUT)
    runner = Runner(task, rank, world)
    outcome = runner.run()
    if rank == 0:
        print(msgspec.json.encode(outcome).decode(), flush=True)
    dist.barrier(runner.control)
    sys.stdout.flush()
    os._exit(0)  # threads of torchft's managers never end


if __name__ == "__main__":
    main(sys.argv[1:])
