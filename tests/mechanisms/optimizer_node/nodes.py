"""Optimizer nodes and workers in one process, and the plain AdamW that they must equal."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from espalier.mechanisms.optimizer_node.client import Client
from espalier.mechanisms.optimizer_node.node import DEPTH, SENDING, OptimizerNode
from espalier.mechanisms.optimizer_node.state_file import entry_sizes, fill, open_state, open_sums
from espalier.mechanisms.optimizer_node.wire import Address, Times
from espalier.parallel.layer_client import Fill
from espalier.plan.axes.node_cost import WINDOW, Layers
from espalier.plan.axes.node_layout import FlatLayer, NodeJob
from espalier.recipe import Adamw
from espalier.store.generations import Generations

Made = TypeVar("Made")
TOKEN = "0123456789abcdef"
FAST = Times(heartbeat=0.01, resend=0.1, silence=2.0, patience=10.0, answer=20.0)
LAYERS = (
    FlatLayer("embedding", (("weight", (37, 20)),)),
    FlatLayer("block", (("norm", (20,)), ("matrix", (20, 61)), ("bias", (61,)))),
    FlatLayer("head", (("norm", (20,)), ("weight", (20, 53)))),
)
OPTIONS = Adamw(learning_rate=0.01, weight_decay=0.1)


def job(**changes: object) -> NodeJob:
    return NodeJob(**({"layers": LAYERS, "optimizer": OPTIONS, "chunk": 512} | changes))


def first(one: NodeJob, number: int) -> Tensor:
    """A layer's first parameters."""
    return torch.randn(one.layers[number].numel, generator=torch.Generator().manual_seed(number))


def gradient(one: NodeJob, layer: int, step: int, rank: int = 0) -> Tensor:
    seed = layer + 100 * step + 10_000 * rank
    values = torch.randn(one.layers[layer].numel, generator=torch.Generator().manual_seed(seed))
    return values * 10.0 ** (rank - 1)


def filler(one: NodeJob) -> Fill:
    return lambda number, out: out.copy_(first(one, number))


def memory(one: NodeJob) -> MemoryState:
    made = MemoryState(entry_sizes(one))
    fill(made, one, filler(one))
    return made


def buffer_bytes(node: OptimizerNode, workers: int) -> int:
    """Of all rings while so many workers are there: what a node holds, whatever the size of the model."""
    return 4 * node.largest * (len(node.slots) + DEPTH * 4 + workers * (1 + SENDING))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return door.getsockname()[1]


def again(start: Callable[[], Made]) -> Made:
    """What `start` gives, as soon as the kernel has freed the address of the node before it."""
    until = time.monotonic() + 10.0
    while True:
        try:
            return start()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def on_disk(one: NodeJob, folder: Path) -> tuple[Generations, Generations]:
    return open_state(folder, one, filler(one)), open_sums(folder, one)


@contextmanager
def node(one: NodeJob, folder: Path | None = None, times: Times = FAST) -> Iterator[tuple[OptimizerNode, Address]]:
    door = socket.create_server(("127.0.0.1", 0))
    kept = (memory(one), MemorySums()) if folder is None else on_disk(one, folder)
    made = OptimizerNode(one, kept, door, TOKEN, times).start()
    try:
        yield made, door.getsockname()
    finally:
        made.close()


def client(address: Address, one: NodeJob, rank: int = 0, times: Times = FAST) -> Client:
    return Client([[address]], rank, one, TOKEN, times)


def link_bytes(worker: Client) -> tuple[int, int]:
    """Sent and received by a worker, with headers, heartbeats and resends."""
    links = [link for node in worker._connections for link in node.links.values()]
    return sum(link.bytes_sent for link in links), sum(link.bytes_received for link in links)


def pulled_bytes(layers: Layers, value_bytes: float = 4, window: int = WINDOW) -> float:
    """That a worker receives in a step, with a window of so many layers."""
    pulls = zip(layers.numel, layers.pulls(window), strict=True)
    return float(sum(numel * int(count) for numel, count in pulls)) * value_bytes


def pushed_bytes(layers: Layers, value_bytes: float = 4) -> float:
    """That a worker sends in a step, whatever the number of micro-batches."""
    return float(sum(layers.numel)) * value_bytes


def pulled(worker: Client, step: int) -> list[Tensor]:
    """All parameters before `step`."""
    outs = [torch.empty(layer.numel) for layer in worker.job.layers]
    for handle in [worker.pull(number, step, out) for number, out in enumerate(outs)]:
        worker.wait(handle)
    return outs


def push_all(worker: Client, step: int, gradients: Sequence[Tensor]) -> None:
    order = range(len(worker.job.layers) - 1, -1, -1)
    for handle in [worker.push(number, step, gradients[number]) for number in order]:
        worker.wait(handle)


class MemoryState:
    """Entries in memory. Has state."""

    read_bytes = written_bytes = 0

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.step = -1
        self._sizes = dict(sizes)
        self._now: dict[str, Tensor] = {}
        self._before: tuple[int, dict[str, Tensor]] = (-1, {})
        self._written: dict[str, Tensor] = {}

    def read(self, name: str, buffer: Tensor, pending: bool = False) -> None:
        """See `store.generations.Generations`."""
        buffer[: self._sizes[name]].copy_(self._now[name])

    def write(self, name: str, buffer: Tensor) -> None:
        """See `store.generations.Generations`."""
        self._written[name] = buffer[: self._sizes[name]].clone()

    def commit(self, step: int) -> None:
        """See `store.generations.Generations`."""
        self._before = (self.step, dict(self._now))
        self._now |= self._written
        self._written = {}
        self.step = step

    def rollback(self) -> None:
        """See `store.generations.Generations`."""
        self._written = {}

    def revert(self) -> None:
        """See `store.generations.Generations`."""
        self.step, self._now = self._before
        self._written = {}


class MemorySums:
    """Sums in memory. Has state."""

    read_bytes = written_bytes = 0

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def read(self, name: str, buffer: Tensor, pending: bool = False) -> None:
        """See `store.generations.Generations`."""
        buffer[: self._kept[name].numel()].copy_(self._kept[name])

    def write(self, name: str, buffer: Tensor) -> None:
        """See `store.generations.Generations`."""
        self._kept[name] = buffer.clone()


class Plain:
    """torch's own AdamW on whole tensors. Has state."""

    def __init__(self, one: NodeJob) -> None:
        self.job = one
        self.tensors = []
        for number, layer in enumerate(one.layers):
            sizes = [math.prod(shape) for _, shape in layer.tensors]
            parts = first(one, number).split(sizes)
            self.tensors.append(
                [part.clone().view(shape) for part, (_, shape) in zip(parts, layer.tensors, strict=True)]
            )
        trained = [tensor.requires_grad_() for tensors in self.tensors for tensor in tensors]
        groups = [
            {"params": [tensor for tensor in trained if tensor.dim() >= 2], "weight_decay": one.optimizer.weight_decay},
            {"params": [tensor for tensor in trained if tensor.dim() < 2], "weight_decay": 0.0},
        ]
        rate = one.optimizer.learning_rate
        self.optimizer = torch.optim.AdamW(
            groups, lr=rate, betas=one.optimizer.betas, eps=one.optimizer.epsilon, fused=True
        )

    def step(self, gradients: Sequence[Tensor], scale: float = 1.0, rate: float = 1.0) -> None:
        for layer, tensors, whole in zip(self.job.layers, self.tensors, gradients, strict=True):
            for tensor, values in zip(tensors, layer.views(whole.clone()), strict=True):
                tensor.grad = values * scale if scale != 1.0 else values
        for group in self.optimizer.param_groups:
            group["lr"] = self.job.optimizer.learning_rate * rate
        self.optimizer.step()

    def parameters(self) -> list[Tensor]:
        return [torch.cat([tensor.detach().view(-1) for tensor in tensors]) for tensors in self.tensors]


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(mine.equal(its) for mine, its in zip(one, other, strict=True))
