"""One host of bench/luwu.py: trains a decoder by one method, some steps at a time, and says what they took.

torchrun's environment, the optimizer node being the last rank; argument: a Task as JSON. Each line on standard input is
a number of steps; the first of a turn is not counted. Rank 0 answers each line with a Turn. Ends with its input.
"""

from __future__ import annotations

import os
import socket
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
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from espalier.language.workload import open_language
from espalier.mechanisms.optimizer_node.client import Client
from espalier.mechanisms.optimizer_node.node import OptimizerNode
from espalier.mechanisms.optimizer_node.state import OptimizerNodeState
from espalier.mechanisms.optimizer_node.state_file import open_state, open_sums
from espalier.mechanisms.optimizer_node.wire import Times
from espalier.parallel.workload import Shard, Workload
from espalier.plan import base as plans
from espalier.plan.axes import node_cost as cost
from espalier.plan.axes.node_layout import FlatLayer, NodeJob
from espalier.recipe import Adamw, Recipe, defaults, recipe_file
from espalier.train import trainer, worker
from espalier.train.rank_setup import RankSetup
from espalier.train.rank_spec import RankSpec

PACKET = 66
"""Bytes of Ethernet, IP and TCP headers with timestamps."""
FEED_PORT = 29700


class Task(msgspec.Struct, frozen=True):
    """`kind`: a key of KINDS; `folder`: for the node's files; of `feed`, `depth` layers of `width` numbers. `link`:
    bytes/s of a worker's link, as a plan knows it; 0: it is not limited."""

    kind: str
    depth: int
    width: int
    sequence: int
    folder: str
    workers: int = 4
    link: float = 0.0


class Turn(msgspec.Struct, frozen=True):
    """Seconds of a step on average, those of them in which rank 0 waited for exchanges, and of these those for pulls;
    bytes that this host's link sent and received in one, headers left out, and what the cost function says of both."""

    seconds: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    expected_sent: float = 0.0
    expected_received: float = 0.0
    numel: tuple[int, ...] = ()
    uses: tuple[tuple[int, ...], ...] = ()
    stalled: float = 0.0
    pulls: float = 0.0


class Contestant:
    """What is timed: `step(number)`, `finish()` of what a step has left under way, what is expected of it, and seconds
    `stalled()` so far, in all and for pulls."""

    def __init__(
        self,
        step: Callable[[int], None],
        expected: Turn,
        finish: Callable[[], None] = lambda: None,
        stalled: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
    ) -> None:
        self.step, self.expected, self.finish, self.stalled = step, expected, finish, stalled
        self.number = 0

    def turn(self, steps: int) -> Turn:
        """One step that is not counted, then those that are."""
        for one in range(steps + 1):
            if one == 1:
                before, waited, began = link_bytes(), self.stalled(), time.perf_counter()
            self.step(self.number)
            self.number += 1
        seconds = (time.perf_counter() - began) / steps
        sent, received = ((after - first) / steps for after, first in zip(link_bytes(), before, strict=True))
        stalled, pulls = ((after - first) / steps for after, first in zip(self.stalled(), waited, strict=True))
        return msgspec.structs.replace(
            self.expected, seconds=seconds, sent=sent, received=received, stalled=stalled, pulls=pulls
        )


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


def job_of(layers: int, numel: int, workers: int = 1) -> NodeJob:
    """Equal layers of one matrix each."""
    each = tuple(FlatLayer(f"layer {one}", ((f"{one}", (numel // 64, 64)),)) for one in range(layers))
    return NodeJob(each, Adamw(learning_rate=1e-3), workers=workers)


def zero(layer: int, flat: Tensor) -> None:
    """The first parameters."""
    flat.zero_()


# --- ours ----------------------------------------------------------------------------------------------------------


@contextmanager
def ours(task: Task, rank: int) -> Iterator[Contestant | None]:
    """A worker, or the node, which serves until the workers have left."""
    recipe = recipe_of(task)
    exchanges = (plans.Exchange(traffic="gradients", codec="int8"),) if "int8" in task.kind else ()
    ranks = [plans.Rank(share=(one, one + 1), node=one) for one in range(task.workers)]
    ranks.append(plans.Rank(role="optimizer", node=task.workers))
    ranks += [plans.Rank(role="aggregator", node=task.workers + 1)] * ("aggregator" in task.kind)
    world = len(ranks)
    plan = plans.Plan(
        ranks=tuple(ranks), micro_batch=1, precision="fp32", exchanges=exchanges,
        choices={"optimizer_node": OptimizerNodeState(node_link=task.link)},
    )  # fmt: skip
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    place = RankSpec(rank=rank, world=world, role=plan.ranks[rank].role, host=host, port=port, serves=rank == 0)
    workload = open_language(recipe)
    setting = RankSetup(recipe, plan, workload, place, folder=Path(task.folder))
    with worker.joined(place, 300.0) as channel:
        if place.role != "trainer":
            worker.as_optimizer(setting, channel)
            yield None
            return
        made = trainer.Trainer(setting, channel)
        window = made.built.context.window
        assert window is not None
        numel, uses = tuple(one.layer.numel for one in window.layers), tuple(map(tuple, window.uses))
        layers = cost.Layers(numel, uses)
        sent = float(sum(layers.numel)) * (1 if exchanges else 4)
        received = 4.0 * sum(
            int(count) * size for size, count in zip(layers.numel, layers.pulls(cost.WINDOW), strict=True)
        )
        expected = Turn(0.0, 0.0, 0.0, sent, received, numel, uses)
        pulls, need = [0.0], window.need

        def timed(index: int) -> None:
            before = window.stalled
            need(index)
            pulls[0] += window.stalled - before

        window.need = timed
        yield Contestant(
            lambda number: made.train_step(workload.batches(number, setting.shard)),
            expected,
            stalled=lambda: (window.stalled, pulls[0]),
        )
        made.built.close()


@contextmanager
def feed(task: Task, rank: int) -> Iterator[Contestant | None]:
    """The node, or a worker that computes nothing: it pulls every layer twice and pushes it once in a step."""
    job = job_of(task.depth, task.width, task.workers)
    address = ("10.213.77." + str(task.workers + 1), FEED_PORT)
    if rank == task.workers:
        folder = Path(task.folder)
        with open_state(folder, job, zero) as state, socket.create_server(address) as door:
            times = Times(link=task.link)
            node = OptimizerNode(job, (state, open_sums(folder, job)), door, "bench", times).start()
            sys.stdin.read()
            node.close()
        os._exit(0)  # a thread of the node that is inside torch would abort a process that ends
    client = Client([[address]], rank, job, "bench", Times(link=task.link))
    outs = [torch.empty(layer.numel) for layer in job.layers]
    gradient = torch.full((job.layers[0].numel,), 1e-3)

    def step(number: int) -> None:
        for one in [client.pull(place, number, out) for place, out in enumerate(outs)]:
            client.wait(one)
        pulls = [client.pull(place, number, out) for place, out in enumerate(outs)]
        for one in [client.push(place, number, gradient) for place in range(task.depth)] + pulls:
            client.wait(one)
        client.totals(number, torch.zeros(1))
        client.move(number, 1.0, 1.0, following=1.0)

    size = 4.0 * task.depth * task.width
    yield Contestant(step, Turn(0.0, 0.0, 0.0, size, 2 * size))
    client.close()


# --- beside it -----------------------------------------------------------------------------------------------------


@contextmanager
def joined(rank: int, workers: int) -> Iterator[None]:
    """The workers' own process group."""
    dist.init_process_group("gloo", rank=rank, world_size=workers)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Direct(DefaultReduceScatter):
    """Reduce-scatter in which every rank sends each other one its part: (N-1)/N of the bytes, where Gloo's own is an
    all-reduce of twice as many."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(dist.get_world_size(group), -1), 0, out=output_tensor.view(-1))
        if op != dist.ReduceOp.SUM:  # the mean
            output_tensor /= dist.get_world_size(group)
        return None


BLOCK = 256
"""Values of one scale in an int8 peer."""


def coded(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Eight bits of each row of `parts`, [ranks x size]: [ranks x blocks x BLOCK] uint8, and fp32 scales by block."""
    blocks = nn.functional.pad(parts, (0, -parts.shape[1] % BLOCK)).view(len(parts), -1, BLOCK)
    scales = blocks.abs().amax(2, keepdim=True) / 127
    codes = (blocks / scales.clamp(min=1e-30)).round_().to(torch.int8)
    return codes.view(torch.uint8), scales


def summed(codes: Tensor, scales: Tensor, size: int) -> Tensor:
    """The sum over ranks of what was `coded`: [size]."""
    return (codes.view(torch.int8) * scales).sum(0).view(-1)[:size]


class Int8(DefaultReduceScatter):
    """As `Direct`, of eight bits a value, as ZeRO++ sends gradients."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        ranks = dist.get_world_size(group)
        sent = coded(input_tensor.view(ranks, -1))
        received = [torch.empty_like(part) for part in sent]
        for part, out in zip(sent, received, strict=True):
            dist.all_to_all_single(out, part, group=group)
        output_tensor.view(-1).copy_(summed(*received, output_tensor.numel()))
        if op != dist.ReduceOp.SUM:  # the mean
            output_tensor /= ranks
        return None


@contextmanager
def fsdp2(task: Task, rank: int) -> Iterator[Contestant]:
    """Fully sharded, each block gathered anew in backward; `fsdp2` alone reduces as Gloo does."""
    with joined(rank, task.workers):
        workload = open_language(recipe_of(task))
        model = workload.build(torch.device("cpu"), torch.float32)
        numel = sum(one.numel() for one in model.parameters())
        for block in (*workload.blocks(model), model):
            sharded = fully_shard(block, reshard_after_forward=True)
            if task.kind != "fsdp2":
                sharded.set_custom_reduce_scatter(Int8() if "int8" in task.kind else Direct())  # type: ignore[attr-defined]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        plain = _backward(workload, model, rank)

        def step(number: int) -> None:
            plain(number)
            optimizer.step()
            optimizer.zero_grad()

        pushed = 1 + 4 / BLOCK if "int8" in task.kind else 4
        expected = (2 * 4 + pushed) * (task.workers - 1) / task.workers * numel  # two all-gathers, a reduce-scatter
        yield Contestant(step, Turn(0.0, 0.0, 0.0, expected, expected, (numel,)))


class _Bucket:
    """A block of the model for `zero1`. Has state.

    Attributes:
        flat, gradient: [ranks x size] parameters and gradients, of which parameters and their `.grad` are views.
        shard: this rank's part, which its optimizer moves.
        under_way: the collective that was begun last.
    """

    def __init__(self, parameters: list[nn.Parameter], rank: int, workers: int, int8: bool = False) -> None:
        numel = sum(one.numel() for one in parameters)
        size = -(-numel // workers)
        self.parameters, self.missing = parameters, len(parameters)
        self.flat, self.gradient = torch.zeros(size * workers), torch.zeros(size * workers)
        self.parts = torch.empty(workers, size)
        self.int8 = int8
        self.codes = self.received = ()
        at = 0
        for one in parameters:
            view = self.flat[at : at + one.numel()].view_as(one)
            view.copy_(one.detach())
            one.data, one.grad = view, self.gradient[at : at + one.numel()].view_as(one)
            one.register_post_accumulate_grad_hook(self._arrived)
            at += one.numel()
        self.shard = nn.Parameter(self.flat[rank * size : (rank + 1) * size].clone())
        self.shard.grad = torch.zeros(size)
        self.under_way: Any = None

    def _arrived(self, _: Tensor) -> None:
        self.missing -= 1
        if not self.missing:  # all gradients of the block: their sums are exchanged while backward goes on
            if not self.int8:
                self.under_way = dist.all_to_all_single(self.parts.view(-1), self.gradient, async_op=True)
                return
            self.codes = coded(self.gradient.view(len(self.parts), -1))
            self.received = tuple(torch.empty_like(part) for part in self.codes)
            pairs = zip(self.received, self.codes, strict=True)
            self.works = [dist.all_to_all_single(out, part, async_op=True) for out, part in pairs]

    def reduce(self) -> None:
        """Waits for the sums of this rank's part."""
        if self.int8:
            for work in self.works:
                work.wait()
            self.shard.grad = summed(*self.received, self.parts.shape[1])
            return
        self.under_way.wait()
        torch.sum(self.parts, 0, out=self.shard.grad)

    def gather(self) -> None:
        """Begins to send what the optimizer has moved."""
        self.under_way = dist.all_gather_single(self.flat, self.shard.detach(), async_op=True)

    def ready(self, *_: object) -> None:
        """Before the block's forward: all parts are here."""
        if self.under_way is not None:
            self.under_way.wait()
            self.under_way = None
            self.gradient.zero_()
            self.missing = len(self.parameters)


@contextmanager
def zero1(task: Task, rank: int) -> Iterator[Contestant]:
    """ZeRO-1 by hand, its states in the host's memory, block by block: gradients are exchanged under backward, and
    parameters under the next forward. It sends 2 (N-1)/N S, and every worker holds the whole model."""
    with joined(rank, task.workers):
        workload = open_language(recipe_of(task))
        model = workload.build(torch.device("cpu"), torch.float32)
        numel = sum(one.numel() for one in model.parameters())
        blocks = list(workload.blocks(model))
        inside = {id(one) for block in blocks for one in block.parameters()}
        groups = [[one for one in model.parameters() if id(one) not in inside]]
        groups += [list(block.parameters()) for block in blocks]
        buckets = [_Bucket(group, rank, task.workers, "int8" in task.kind) for group in groups]
        for module, bucket in zip((model, *blocks), buckets, strict=True):
            module.register_forward_pre_hook(bucket.ready)
        optimizer = torch.optim.AdamW([one.shard for one in buckets], lr=1e-3, fused=True)
        plain = _backward(workload, model, rank)

        def step(number: int) -> None:
            plain(number)
            for bucket in reversed(buckets):
                bucket.reduce()
            optimizer.step()
            for bucket in buckets:
                bucket.gather()

        def finish() -> None:
            for bucket in buckets:
                bucket.ready()

        pushed = 1 + 4 / BLOCK if "int8" in task.kind else 4
        expected = (4 + pushed) * (task.workers - 1) / task.workers * numel
        yield Contestant(step, Turn(0.0, 0.0, 0.0, expected, expected, (numel,)), finish)


@contextmanager
def plain_loop(task: Task, rank: int) -> Iterator[Contestant]:
    """One process that holds everything and takes the sequences of all workers, one after the other."""
    workload = open_language(recipe_of(task))
    model = workload.build(torch.device("cpu"), torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    each = [_backward(workload, model, one) for one in range(task.workers)]

    def step(number: int) -> None:
        for one in each:
            one(number)
        optimizer.step()
        optimizer.zero_grad()

    yield Contestant(step, Turn(numel=(sum(one.numel() for one in model.parameters()),)))


def _backward(workload: Workload, model: nn.Module, rank: int) -> Callable[[int], None]:
    def step(number: int) -> None:
        (batch,) = workload.batches(number, Shard(rank, rank + 1, 1))
        value, _ = workload.loss(model, batch)
        (value / workload.nominal_weight).backward()  # type: ignore[no-untyped-call]

    return step


KINDS: dict[str, Any] = {
    "luwu": ours,
    "luwu int8": ours,
    "luwu aggregator": ours,
    "luwu int8 aggregator": ours,
    "fsdp2 int8": fsdp2,
    "zero1 int8": zero1,
    "fsdp2": fsdp2,
    "fsdp2 direct": fsdp2,
    "zero1": zero1,
    "plain": plain_loop,
    "feed": feed,
}


def main() -> int:
    """Runs the task on this host."""
    task = msgspec.json.decode(sys.argv[1], type=Task)
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    with KINDS[task.kind](task, rank) as contestant:
        if contestant is None:
            return 0
        for line in sys.stdin:
            found = contestant.turn(int(line))
            if rank == 0:
                print(msgspec.json.encode(found).decode(), flush=True)
        contestant.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
