"""One rank of bench/sylvie.py: contestants train the same network on the same parts of a planted graph.

    torchrun's environment; argument: a Task as JSON. Rank 0 prints an Outcome as JSON.

A turn is a block of epochs, with what is under way at its end waited for, so that late messages are not hidden behind
others' turns; where messages are late a block has at least the epochs from one fresh one to the next. Held-out accuracy
is measured between turns and not timed.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from espalier import recipe as config
from espalier.comm.base import Traffic, traffic
from espalier.comm.codecs import codec
from espalier.comm.ddp import coded
from espalier.graph.data import synthetic
from espalier.graph.networks.compiled_aggregate import equip
from espalier.graph.networks.gnn import Gnn
from espalier.graph.parts import halo
from espalier.graph.parts.halo import Crossing, Halo
from espalier.graph.sampling.neighbor_sampler import Sampler, Style, whole
from espalier.graph.sampling.subgraphs import forward
from espalier.graph.tasks.answers import summed_loss
from espalier.mechanisms.halo_exchange.quantized_exchange import Every, Sylvie
from rank import late, run, stock

BNS = 0.1
"""Share of the boundary that BNS-GCN keeps (arXiv 2203.10983, section 4)."""
FANOUTS = (10, 10, 5)
SEEDS = 256
"""Targets of a rank's sampled batch."""
RATES = {"full": 0.003, "sampled": 0.01}
"""Adam's learning rates: the fastest of 0.001, 0.003 and 0.01 for the whole graph in fp32 on one rank, and for batches,
of which an epoch has several."""
PERIOD = 5
"""Epochs from a fresh one to the next, of late rows."""
ALONE = "computing alone"
"""Nothing crosses, gradients neither: what no way to exchange can be faster than."""
INT8, FRESH_INT8 = "sylvie 1 bit, late, int8 gradients", "sylvie 1 bit, int8 gradients"
DRAWN_INT8 = "sampled batches, int8 gradients"


class Task(msgspec.Struct, frozen=True):
    """What to measure: contestants, blocks of `epochs` each (of those whose messages are always late of `late` at
    least; of sampled batches `portion` of an epoch, where that is less than one), the graph, the file of its parts, and
    the network; seconds at most. `evaluates`: after each block."""

    contestants: tuple[str, ...]
    rounds: int
    epochs: int
    folder: str
    parts: str
    nodes: int
    degree: int = 30
    width: int = 256
    depth: int = 3
    limit: float = 100.0
    evaluates: bool = True
    late: int = PERIOD
    portion: float = 1.0


class Outcome(msgspec.Struct, frozen=True):
    """By contestant: seconds of an epoch in each block; bytes of halos, and of gradients, that all ranks sent in an
    epoch; held-out accuracy after each block, and the epochs until then, those of warming up included."""

    seconds: dict[str, list[float]]
    sent: dict[str, tuple[float, float]]
    accuracy: dict[str, list[float]]
    epochs: dict[str, list[float]]


class Sampled:
    """BNS-GCN's transport: of each pair's boundary a share, drawn anew in each step, scaled up; the rest are zeros."""

    def __init__(self) -> None:
        self.step = 0

    def begin(self, step: int) -> None:
        """Another draw."""
        self.step = step

    def __call__(self, own: Halo, sent: Tensor, received: Tensor, crossing: Crossing) -> Callable[[], None]:
        """See `halo.Transport`. Both ends draw the same."""
        rank = dist.get_rank()
        out = self._drawn(own.leaving(crossing), crossing, rank, leaves=True)
        into = self._drawn(own.arriving(crossing), crossing, rank, leaves=False)
        rows = torch.cat([part[one] for part, one in zip(sent.split(own.leaving(crossing)), out, strict=True)])
        found = sent.new_empty(sum(map(len, into)), *sent.shape[1:])
        with traffic(Traffic.HALO):
            sizes = list(map(len, into)), list(map(len, out))
            work = dist.all_to_all_single(found, rows, *sizes, group=own.group, async_op=True)

        def arrive(kept: Tensor = rows) -> None:
            work.wait()
            received.zero_()
            parts = zip(received.split(own.arriving(crossing)), found.split(sizes[0]), into, strict=True)
            for part, rows_, one in parts:
                part[one] = rows_ / BNS

        return arrive

    def _drawn(self, counts: list[int], crossing: Crossing, rank: int, leaves: bool) -> list[Tensor]:
        drawn = []
        for peer, count in enumerate(counts):
            owner, reader = (rank, peer) if leaves != crossing.backward else (peer, rank)
            random = np.random.default_rng([self.step, owner, reader])
            drawn.append(torch.from_numpy(np.flatnonzero(random.random(count) < BNS)))
        return drawn


class Nothing:
    """Rows of others are zeros."""

    def begin(self, step: int) -> None:
        """Nothing is sent."""

    def __call__(self, own: Halo, sent: Tensor, received: Tensor, crossing: Crossing) -> Callable[[], None]:
        """See `halo.Transport`."""
        received.zero_()
        return lambda: None


TRANSPORTS: dict[str, Callable[[], Any]] = {
    "fp32 synchronous": lambda: None,
    "fp32 pipelined (PipeGCN)": lambda: Sylvie(Every(32, 0)),
    "8-bit synchronous (AdaQP-like)": lambda: Sylvie(Every(8, 1)),
    "boundary sampling 0.1 (BNS-GCN)": Sampled,
    "sylvie 1 bit": lambda: Sylvie(Every(1, 1)),
    FRESH_INT8: lambda: Sylvie(Every(1, 1)),
    "sylvie 1 bit, late": lambda: Sylvie(Every(1, PERIOD)),
    INT8: lambda: Sylvie(Every(1, PERIOD)),
    ALONE: Nothing,
}


class Sums:
    """Gradients of a layer are summed over the ranks as soon as they are all there, while backward goes on, as
    DistributedDataParallel does; in 8 bits as `comm.codec = "int8"` has it, with error feedback."""

    def __init__(self, network: Gnn, group: Any, int8: bool) -> None:
        self.group = group
        self.coded = coded(codec("int8"), group, Traffic.GRADIENTS) if int8 else None
        self.under_way: list[tuple[list[Tensor], Tensor, Any]] = []
        for at, layer in enumerate(network.layers):
            own = [*layer.parameters(), *(one for norm in network.norms[at : at + 1] for one in norm.parameters())]
            state = {"missing": len(own), "residual": torch.zeros(sum(one.numel() for one in own))}

            def there(_: Tensor, own: list[Any] = own, state: dict[str, Any] = state) -> None:
                state["missing"] -= 1
                if not state["missing"]:
                    state["missing"] = len(own)
                    self.begin(own, state["residual"])

            for one in own:
                one.register_post_accumulate_grad_hook(there)

    def begin(self, own: list[Any], residual: Tensor) -> None:
        """Of one layer."""
        flat = torch.cat([one.grad.flatten() for one in own])
        if self.coded is not None:
            book = partial(self.group.ledger.add_encoded, Traffic.GRADIENTS.value, "all_reduce")
            work = self.coded.all_reduce(flat, residual, True)(book)
        else:
            with traffic(Traffic.GRADIENTS):
                work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.under_way.append((own, flat, work))

    def wait(self) -> None:
        """Until parameters have the sums."""
        for own, flat, work in self.under_way:
            work.wait()
            if self.coded is not None:
                flat.mul_(dist.get_world_size())
            for one, part in zip(own, flat.split([p.numel() for p in own]), strict=True):
                one.grad.copy_(part.view_as(one))
        self.under_way = []


class Parts:
    """A contestant that trains on parts."""

    def __init__(self, name: str, network: Gnn, graph: Any, own: Halo, block: Any) -> None:
        self.transport, self.own, self.name = TRANSPORTS[name](), own, name
        self.network = halo.equip(copy.deepcopy(network))
        self.optimizer = torch.optim.Adam(self.network.parameters(), RATES["full"])
        self.sums = None if name == ALONE else Sums(self.network, own.group, name in (INT8, FRESH_INT8))
        self.features = own.exchange(torch.from_numpy(np.asarray(graph.features))[own.owned])
        depth = len(network.layers)
        travelling = own if self.transport is None else replace(own, transport=self.transport)
        self.blocks, self.exact = travelling.by_layer(block, depth), own.by_layer(block, depth)
        ids = own.owned.numpy()
        labels = torch.from_numpy(np.asarray(graph.labels))[ids]
        self.chosen, self.held = (
            torch.from_numpy(np.flatnonzero(np.isin(ids, one))) for one in (graph.parts.train, graph.parts.test)
        )
        self.labels, self.all, self.step = labels, len(graph.parts.train), 0

    def epoch(self) -> None:
        """One step on the whole graph."""
        if self.transport is not None:
            self.transport.begin(self.step)
        self.step += 1
        self.optimizer.zero_grad()
        logits = self.network(self.features, self.blocks)
        loss, _ = summed_loss(logits, self.labels[self.chosen], self.chosen)
        (loss / self.all).backward()
        if self.sums is not None:
            self.sums.wait()
        self.optimizer.step()

    def block(self, task: Task, warming: bool) -> float:
        """Trains a block, or an epoch to warm up. Returns: its epochs."""
        count = 1 if warming else task.epochs
        if not warming and isinstance(self.transport, Sylvie) and self.transport.policy.synchronize != 1:
            count = max(count, self.transport.policy.synchronize or task.late)
        for _ in range(count):
            self.epoch()
        return count

    def settle(self) -> None:
        """Waits for what is under way."""
        for flights in getattr(self.transport, "_flights", {}).values():
            for flight in flights:
                flight.wait(range(len(flight.works)))

    @torch.no_grad()
    def accuracy(self) -> float:
        """Of all test nodes, with rows as they are."""
        self.network.eval()
        found = self.network(self.features, self.exact)[self.held].argmax(1) == self.labels[self.held]
        self.network.train()
        return mean(found)


class Batches(Parts):
    """DDP over sampled batches, with gradients as they are or in 8 bits: every rank has the whole graph; an epoch
    passes over all training nodes."""

    def __init__(self, name: str, network: Gnn, graph: Any, own: Halo, block: Any) -> None:
        super().__init__(FRESH_INT8 if name == DRAWN_INT8 else "fp32 synchronous", network, graph, own, block)
        self.optimizer = torch.optim.Adam(self.network.parameters(), RATES["sampled"])
        self.graph, self.sampler, self.drawn = graph, Sampler(graph, Style(loops=False, scale="mean")), 0
        self.every = torch.from_numpy(np.asarray(graph.features))
        self.targets = torch.from_numpy(np.asarray(graph.labels))
        self.batches: list[np.ndarray] = []

    def block(self, task: Task, warming: bool) -> float:
        """See `Parts.block`; or a portion of an epoch, of whole batches."""
        if task.portion == 1:
            return super().block(task, warming)
        steps = math.ceil(len(self.graph.parts.train) / (SEEDS * dist.get_world_size()))
        count = max(1, round(task.portion * steps))
        self.train(count)
        return count / steps

    def epoch(self) -> None:
        """All training nodes once."""
        self.train(math.ceil(len(self.graph.parts.train) / (SEEDS * dist.get_world_size())))

    def train(self, steps: int) -> None:
        """The next batches of the epoch, or of the next one."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for _ in range(steps):
            if not self.batches:
                order = np.random.default_rng(self.drawn).permutation(self.graph.parts.train)
                self.batches = [order[at : at + SEEDS * ranks] for at in range(0, len(order), SEEDS * ranks)]
            batch = self.batches.pop(0)
            seeds = batch[rank::ranks]
            self.drawn += 1
            nodes, blocks = self.sampler.draw(seeds, FANOUTS[: len(self.network.layers)], 0, self.drawn)
            self.optimizer.zero_grad()
            logits = forward(self.network, self.every[nodes], blocks)
            (summed_loss(logits, self.targets[seeds])[0] / len(batch)).backward()
            assert self.sums is not None
            self.sums.wait()
            self.optimizer.step()


def mean(found: Tensor) -> float:
    """Over all ranks."""
    total = torch.tensor([float(found.sum()), float(len(found))], dtype=torch.float64)
    dist.all_reduce(total, group=stock())
    return float(total[0] / total[1])


def measure(task: Task, channel: Any) -> Outcome:
    """All contestants in turn, after an epoch to warm up, which counts for accuracy and not for seconds. Without rounds
    one block each, which nothing warms up."""
    graph = synthetic.opened(Path(task.folder))
    options = config.Sage(depth=task.depth, width=task.width, dropout=0.0, activation="relu", norm=True)
    torch.manual_seed(0)
    network = equip(Gnn(options, graph.features.shape[1], graph.outputs))
    style = Style(loops=False, scale="mean")
    block = whole(graph, style)
    ranks, rank = channel.size(), channel.rank()
    cut = halo.boundary(block.indptr, block.indices, np.load(task.parts), ranks)
    own = Halo.of(block.indptr, block.indices, cut, rank, channel)
    local = own.block(block)
    made = {
        name: (Parts if name in TRANSPORTS else Batches)(name, network, graph, own, local) for name in task.contestants
    }
    seconds: dict[str, list[float]] = {name: [] for name in made}
    accuracy: dict[str, list[float]] = {name: [] for name in made}
    passed, at = dict.fromkeys(made, 0.0), {name: list[float]() for name in made}
    sent: dict[str, tuple[float, float]] = {}
    begun = time.perf_counter()
    for number in range(task.rounds + 1):
        for name, one in made.items():
            dist.barrier(stock())
            before, start = _bytes(channel), time.perf_counter()
            counts = number > 0 or not task.rounds
            epochs = one.block(task, warming=not counts)
            one.settle()
            dist.barrier(stock())
            took = time.perf_counter() - start
            passed[name] += epochs
            if counts:
                seconds[name].append(took / epochs)
                both = (_bytes(channel) - before) / epochs
                dist.all_reduce(both, group=stock())
                sent[name] = (float(both[0]), float(both[1]))
                if task.evaluates:
                    accuracy[name].append(one.accuracy())
                    at[name].append(passed[name])
        if late(begun, task.limit):
            break
    return Outcome(seconds, sent, accuracy, at)


def _bytes(channel: Any) -> Tensor:
    """Of halos and of gradients, so far."""
    found = channel.ledger.by_class()
    return torch.tensor([found.get(one.value, 0.0) for one in (Traffic.HALO, Traffic.GRADIENTS)], dtype=torch.float64)


if __name__ == "__main__":
    run(Task, measure)
