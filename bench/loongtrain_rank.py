"""One rank of bench/loongtrain.py: contestants attend to the same sequences, forward and backward, in turn.

    torchrun's environment; argument: a Task as JSON. Rank 0 prints an Outcome as JSON.

Ours go over Channels, the peers over one process group of PyTorch's own Gloo. Each contestant gets the tokens that its
own layout gives this rank, and its output is compared with attention over the whole sequence on one device.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from espalier.mechanisms.sequence_parallel import SequenceSlots, attend
from espalier.parallel.sequence_slots import shares_of
from rank import late, run, stock

CLOSE = 1e-4
"""Largest difference of an output that is still the same, in float32."""


class Contestant(msgspec.Struct, frozen=True):
    """Who attends: `kind` is `ours`, `padded` (the same on a batch of documents), `gather` (our all-gather of keys) or
    a name in PEERS; heads, window and the ranks' speeds are of the first two."""

    name: str
    kind: str = "ours"
    heads: int = 1
    window: int = 1
    speeds: tuple[float, ...] = ()


class Task(msgspec.Struct, frozen=True):
    """What to measure: one causal sequence of `length` tokens, of documents of these lengths (empty: one)."""

    length: int
    contestants: tuple[Contestant, ...]
    rounds: int
    documents: tuple[int, ...] = ()
    heads: int = 8
    kv_heads: int = 8
    size: int = 64
    limit: float = 80.0


class Outcome(msgspec.Struct, frozen=True):
    """Seconds of a forward and backward pass by name, one for each round; bytes that rank 0 of ours sent in one."""

    seconds: dict[str, list[float]]
    sent: dict[str, float]


# --- the contestants -----------------------------------------------------------------------------------------------


class GatherKeys(torch.autograd.Function):
    """[2, batch, heads, tokens, size] of all ranks, by rank; gradients are summed and go back."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        made = own.new_empty(dist.get_world_size() * len(own), *own.shape[1:])
        dist.all_gather_single(made, own.contiguous())
        return made.view(-1, *own.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        made = torch.empty_like(gradient[0])
        dist.reduce_scatter_single(made, gradient.flatten(0, 1).contiguous())
        return made


def gathered(query: Tensor, key: Tensor, value: Tensor, slots: SequenceSlots) -> Tensor:
    """Keys of all ranks at once; each half of the zigzag slot sees what stands before its end."""
    parts = GatherKeys.apply(torch.stack([key, value]))
    keys, values = slots.join(list(parts), 3)
    position = torch.from_numpy(slots.index(dist.get_rank()))
    found = []
    for at, rows in zip(position.split(_halves(slots)), query.split(_halves(slots), 2), strict=True):
        stop = int(at[-1]) + 1
        mask = torch.arange(stop) <= at[:, None]
        grouped = {"enable_gqa": query.shape[1] != key.shape[1]}
        found.append(F.scaled_dot_product_attention(rows, keys[:, :, :stop], values[:, :, :stop], mask, **grouped))
    return torch.cat(found, 2)


def _halves(slots: SequenceSlots) -> list[int]:
    return [stop - start for start, stop in slots.ranges(dist.get_rank())]


def _zigzag(query: Tensor, key: Tensor, value: Tensor, task: Task) -> Tensor:
    from ringmaster.ring.zigzag import zigzag_ring_attention

    group = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(group, 1) for one in (key, value))
    ends = torch.tensor([0, *task.documents]).cumsum(0) if task.documents else torch.tensor([0, task.length])
    out = zigzag_ring_attention(query, key, value, group=stock(), scaling=None, cu_seqlens=ends)
    return out.transpose(1, 2)


def _p2p(query: Tensor, key: Tensor, value: Tensor, task: Task) -> Tensor:
    from ringmaster.ring.p2p_attn import ring_p2p_attention

    return ring_p2p_attention(query, key, value, group=stock(), causal=True, scaling=None).transpose(1, 2)


def _all_gather(query: Tensor, key: Tensor, value: Tensor, task: Task) -> Tensor:
    from ringmaster.config import RotateMethod
    from ringmaster.ring import ring_attention

    how = {"dropout": 0.0, "provider": "math", "rotate_method": RotateMethod.ALLGATHER, "attn_implementation": "math"}
    return ring_attention(query, key, value, group=stock(), causal=True, scaling=None, **how).transpose(1, 2)


def _ulysses(query: Tensor, key: Tensor, value: Tensor, task: Task) -> Tensor:
    from ringmaster.comm import seq_all_to_all

    query, key, value = (seq_all_to_all(one, 1, 2, stock()) for one in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])
    return seq_all_to_all(out, 2, 1, stock())


PEERS: dict[str, Callable[[Tensor, Tensor, Tensor, Task], Tensor]] = {
    "zigzag": _zigzag,
    "p2p": _p2p,
    "all-gather": _all_gather,
    "ulysses": _ulysses,
}


# --- the measurement -----------------------------------------------------------------------------------------------


def whole(task: Task) -> list[Tensor]:
    """Query, key, value and the gradient of the output of the whole sequence, and its output on one device."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, heads, task.length, task.size) for heads in (task.heads, task.kv_heads, task.kv_heads, task.heads)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    lengths = task.documents or (task.length,)
    parts = zip(*(one.split(lengths, 2) for one in made[:3]), strict=True)
    grouped = {"enable_gqa": task.heads != task.kv_heads}
    out = torch.cat([F.scaled_dot_product_attention(*one, is_causal=True, **grouped) for one in parts], 2)
    return [*made, out]


def padded(packed: Tensor, lengths: Sequence[int]) -> Tensor:
    """[1, heads, length, size] of documents as a batch of documents, each with zeros up to the longest."""
    parts = packed.split(list(lengths), 2)
    return torch.cat([F.pad(one, (0, 0, 0, max(lengths) - one.shape[2])) for one in parts])


class Runner:
    """One contestant on this rank."""

    def __init__(self, who: Contestant, task: Task, tensors: Sequence[Tensor]) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.who, self.task = who, task
        # Peers without zigzag hold one run of tokens each.
        apart = who.kind in ("p2p", "all-gather", "ulysses")
        length = max(task.documents) if who.kind == "padded" else task.length
        shares = shares_of(who.speeds, who.heads)
        self.slots = SequenceSlots(length, world // who.heads, who.heads, not apart, *shares)
        if who.kind == "padded":
            tensors = [padded(one, task.documents) for one in tensors]
        *leaves, self.gradient, self.right = (self.slots.take(one, rank, 2) for one in tensors)
        self.leaves = [one.requires_grad_() for one in leaves]
        labels = [label for label, tokens in enumerate(task.documents) for _ in range(tokens)]
        self.documents = torch.tensor([labels]) if labels and who.kind != "padded" else None
        holds = self.slots.take(torch.arange(length), rank) < torch.tensor(task.documents or (length,))[:, None]
        self.holds = holds[:, None, :, None] if who.kind == "padded" else torch.ones(())

    def attended(self) -> Tensor:
        """The output of this rank's tokens."""
        if self.who.kind in ("ours", "padded"):
            options = {"causal": True, "slots": self.slots, "documents": self.documents, "window": self.who.window}
            return attend(*self.leaves, **options)
        if self.who.kind == "gather":
            return gathered(*self.leaves, self.slots)
        return PEERS[self.who.kind](*self.leaves, self.task)

    def turn(self) -> float:
        """Seconds of forward and backward on the slowest rank."""
        dist.barrier(stock())
        begun = time.perf_counter()
        out = self.attended()
        torch.autograd.grad(out, self.leaves, self.gradient)
        dist.barrier(stock())
        seconds = time.perf_counter() - begun
        wrong = float(((out.detach() - self.right) * self.holds).abs().max())
        assert wrong < CLOSE, f"{self.who.name} differs by {wrong}"
        return seconds


def measure(task: Task, channel: dist.ProcessGroup) -> Outcome:
    """All contestants in turn: one pass to warm up, then rounds, each from another beginning."""
    begun, tensors = time.perf_counter(), whole(task)
    runners = [Runner(who, task, tensors) for who in task.contestants]
    ledger, sent = dist.group.WORLD.ledger, {}
    for runner in runners:
        before = sum(ledger.by_class().values())
        runner.turn()
        sent[runner.who.name] = sum(ledger.by_class().values()) - before
    seconds: dict[str, list[float]] = {who.name: [] for who in task.contestants}
    for number in range(task.rounds):
        first = number % len(runners)
        for runner in runners[first:] + runners[:first]:
            seconds[runner.who.name].append(runner.turn())
        if late(begun, task.limit):
            break
    return Outcome(seconds, sent)


if __name__ == "__main__":
    run(Task, measure)
