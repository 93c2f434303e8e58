"""One rank of bench/flashmoe.py: contestants pass the same tokens through the same experts, forward and backward.

    torchrun's environment; argument: a Task as JSON. Rank 0 prints an Outcome as JSON.

Ours goes over a Channel, the peers over PyTorch's own Gloo. Every output is compared with that of the plain form.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from espalier import recipe as config
from espalier.language.moe import MOE, Experts
from espalier.mechanisms.expert_parallel.flashmoe import FlashMoE
from espalier.mechanisms.expert_parallel.mechanism import keep
from espalier.parallel.expert_map import ExpertMap
from espalier.recipe import defaults
from experts_by_alltoall import AllToAll
from rank import late, run, stock

CLOSE = 2e-4
"""Largest difference of an output that is still the same, in float32; of int8 rows `ROUGH`."""
ROUGH = 0.1


class Task(msgspec.Struct, frozen=True):
    """What to measure. `held`: the experts of each rank (empty: evenly); `zipf`: exponent of the experts' popularity;
    `layers` above 0: whole training steps of a decoder of so many layers instead."""

    contestants: tuple[str, ...]
    rounds: int
    tokens: int = 1024
    width: int = 512
    inner: int = 256
    experts: int = 16
    active: int = 2
    zipf: float = 1.0
    held: tuple[tuple[int, ...], ...] = ()
    layers: int = 0
    limit: float = 90.0


class Outcome(msgspec.Struct, frozen=True):
    """By contestant: seconds of a pass or step, one for each round; seconds that each rank waited in it, on average
    (rank by rank); bytes that all ranks sent in one; share of choices that were dropped."""

    seconds: dict[str, list[float]]
    idle: dict[str, list[float]]
    sent: dict[str, float]
    dropped: dict[str, float]


class Feed(nn.Module):
    """A SwiGLU block."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


# --- the peers: their exchanges, counted and timed ----------------------------------------------------------------


class Clock:
    """Seconds in exchanges and bytes sent by this rank. Has state."""

    seconds = sent = 0.0
    dropped = 0.0

    def exchanged(self, rows: Tensor, leaving: Sequence[int], coming: Sequence[int]) -> Tensor:
        """All-to-all of rows."""
        found = rows.new_empty(sum(coming), *rows.shape[1:])
        begun = time.perf_counter()
        dist.all_to_all_single(found, rows.contiguous(), list(coming), list(leaving), group=stock())
        self.seconds += time.perf_counter() - begun
        own = leaving[dist.get_rank()]
        self.sent += (len(rows) - own) * rows[:1].nbytes
        return found


CLOCK = Clock()


class Exchange(torch.autograd.Function):
    """All-to-all of rows, and of their gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, leaving: list[int], coming: list[int]) -> Tensor:
        ctx.sizes = leaving, coming
        return CLOCK.exchanged(rows, leaving, coming)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        leaving, coming = ctx.sizes
        return CLOCK.exchanged(gradients[0].contiguous(), coming, leaving), None, None


class Gather(torch.autograd.Function):
    """All-gather of equally many rows; gradients are summed and scattered."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return gathered(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return scattered(gradients[0])


class Scatter(torch.autograd.Function):
    """Reduce-scatter; gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return scattered(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gathered(gradients[0])


def gathered(rows: Tensor) -> Tensor:
    found, begun = rows.new_empty(dist.get_world_size() * len(rows), *rows.shape[1:]), time.perf_counter()
    dist.all_gather_single(found, rows.contiguous(), group=stock())
    CLOCK.seconds += time.perf_counter() - begun
    CLOCK.sent += (dist.get_world_size() - 1) * rows.nbytes
    return found


def scattered(rows: Tensor) -> Tensor:
    found, begun = rows.new_empty(len(rows) // dist.get_world_size(), *rows.shape[1:]), time.perf_counter()
    dist.reduce_scatter_single(found, rows.contiguous(), group=stock())
    CLOCK.seconds += time.perf_counter() - begun
    CLOCK.sent += (dist.get_world_size() - 1) * found.nbytes
    return found


class Stacked:
    """The experts of this rank as stacked matrices, for grouped products."""

    def __init__(self, experts: Sequence[Feed]) -> None:
        self.parts = [
            torch.stack([getattr(one, name).weight.detach().T for one in experts]).requires_grad_()
            for name in ("gate", "up", "down")
        ]

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert, `counts` of each."""
        offs, (gate, up, down) = counts.cumsum(0).int(), self.parts
        inner = F.silu(F.grouped_mm(rows, gate, offs=offs)) * F.grouped_mm(rows, up, offs=offs)
        return F.grouped_mm(inner, down, offs=offs)


def grouped_alltoall(x: Tensor, chosen: Tensor, weights: Tensor, held: ExpertMap, experts: Stacked) -> Tensor:
    """torchtitan's structure: counts, rows to their experts, sorted by expert, grouped products, rows back."""
    here, active = len(held.ranks[dist.get_rank()]), chosen.shape[1]
    position = held.positions(x.device)[chosen].flatten()
    order = position.argsort(stable=True)
    counts = position.bincount(minlength=held.count)
    found = CLOCK.exchanged(counts, held.sizes, [here] * dist.get_world_size())
    leaving = [int(part.sum()) for part in counts.split(held.sizes)]
    coming = [int(part.sum()) for part in found.split(here)]
    rows = Exchange.apply(x.index_select(0, order // active), leaving, coming)
    kinds = torch.arange(here).repeat(dist.get_world_size()).repeat_interleave(found)
    by_expert = kinds.argsort(stable=True)
    answers = experts(rows.index_select(0, by_expert), found.view(-1, here).sum(0))
    back = Exchange.apply(answers.index_select(0, inverse(by_expert)), coming, leaving)
    return combined(back.index_select(0, inverse(order)), weights)


def padded_alltoall(x: Tensor, chosen: Tensor, weights: Tensor, experts: Stacked, factor: float = 0.0) -> Tensor:
    """Buffers of one capacity for each expert (Tutel, DeepSpeed-MoE): as large as the largest needs it (`factor` 0), or
    factor x choices / experts, beyond which tokens are dropped."""
    count, ranks = len(experts.parts[0]) * dist.get_world_size(), dist.get_world_size()
    choices = chosen.flatten()
    slots = F.one_hot(choices, count).cumsum(0).gather(1, choices[:, None]).squeeze(1) - 1
    if factor:
        capacity = int(factor * len(choices) / count)
    else:
        most = slots.max() + 1
        begun = time.perf_counter()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=stock())
        CLOCK.seconds += time.perf_counter() - begun
        capacity = int(most)
    kept = slots < capacity
    CLOCK.dropped = 1 - float(kept.float().mean())
    where, tokens = (choices * capacity + slots)[kept], torch.arange(len(choices))[kept] // chosen.shape[1]
    buffer = x.new_zeros(count * capacity, x.shape[1]).index_copy(0, where, x.index_select(0, tokens))
    each = [count * capacity // ranks] * ranks
    rows = Exchange.apply(buffer, each, each)
    here = count // ranks
    batch = rows.view(ranks, here, capacity, -1).transpose(0, 1).reshape(here, ranks * capacity, -1)
    gate, up, down = experts.parts
    answers = torch.bmm(F.silu(torch.bmm(batch, gate)) * torch.bmm(batch, up), down)
    back = Exchange.apply(answers.view(here, ranks, capacity, -1).transpose(0, 1).reshape(len(rows), -1), each, each)
    by_choice = x.new_zeros(len(choices), x.shape[1])
    by_choice = by_choice.index_copy(0, kept.nonzero().squeeze(1), back.index_select(0, where))
    return combined(by_choice, weights)


def gathered_tokens(x: Tensor, chosen: Tensor, weights: Tensor, held: ExpertMap, experts: Stacked) -> Tensor:
    """Every rank gets all tokens, its experts work on theirs, and the sums are scattered."""
    every, picked, factors = Gather.apply(x), gathered(chosen), Gather.apply(weights)
    here = len(held.ranks[dist.get_rank()])
    position = held.positions(x.device)[picked] - sum(held.sizes[: dist.get_rank()])
    mine = ((position >= 0) & (position < here)).flatten().nonzero().squeeze(1)
    order = mine[position.flatten()[mine].argsort(stable=True)]
    counts = position.flatten()[mine].bincount(minlength=here)
    tokens = order // chosen.shape[1]
    answers = experts(every.index_select(0, tokens), counts) * factors.flatten()[order][:, None]
    return Scatter.apply(torch.zeros_like(every).index_add(0, tokens, answers))


def combined(by_choice: Tensor, weights: Tensor) -> Tensor:
    return torch.bmm(weights.unsqueeze(1), by_choice.view(*weights.shape, -1)).squeeze(1)


def inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


# --- the measurement -----------------------------------------------------------------------------------------------


def routing(task: Task, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, chosen experts and weights of a rank; experts are as popular as Zipf's law has it, shuffled."""
    generator = torch.Generator().manual_seed(100 + rank)
    shuffled = torch.randperm(task.experts, generator=torch.Generator().manual_seed(3))
    popularity = (torch.arange(task.experts) + 1.0).pow(-task.zipf)[shuffled]
    chosen = torch.multinomial(popularity.expand(task.tokens, -1), task.active, generator=generator)
    weights = torch.rand(task.tokens, task.active, generator=generator)
    x = torch.randn(task.tokens, task.width, generator=generator)
    return x, chosen, weights / weights.sum(1, keepdim=True)


class Form:
    """The experts of this rank in one map, in the layers that use it."""

    def __init__(self, feeds: Sequence[Feed], held: ExpertMap, channel: dist.ProcessGroup) -> None:
        own = [feeds[expert] for expert in held.ranks[dist.get_rank()]]
        stacked = Stacked(own)
        self.leaves = [*(p for feed in own for p in feed.parameters()), *stacked.parts]
        self.flash = {name: FlashMoE(channel, held, codec=name) for name in ("exact", "int8")}
        plain = AllToAll(channel, held)
        self.layers: dict[str, Callable[..., Tensor]] = {
            "flashmoe": lambda *rows: self.flash["exact"](*rows, own),
            "flashmoe int8": lambda *rows: self.flash["int8"](*rows, own),
            "plain all-to-all": lambda *rows: plain(*rows, own),
            "all-to-all + grouped mm": lambda *rows: grouped_alltoall(*rows, held, stacked),
            "padded all-to-all": lambda *rows: padded_alltoall(*rows, stacked),
            "padded all-to-all, factor 1.25": lambda *rows: padded_alltoall(*rows, stacked, 1.25),
            "all-gather + reduce-scatter": lambda *rows: gathered_tokens(*rows, held, stacked),
        }

    @property
    def waited(self) -> float:
        """Seconds that ours waited so far."""
        return sum(one.links.idle for one in self.flash.values())


def spread_evenly(experts: int, ranks: int) -> ExpertMap:
    """Consecutive experts on each rank; where ranks do not divide them, the first ranks hold one more."""
    few, over = divmod(experts, ranks)
    ends = [rank * few + min(rank, over) for rank in range(ranks + 1)]
    return ExpertMap(tuple(tuple(range(first, last)) for first, last in itertools.pairwise(ends)))


def layers(task: Task, channel: dist.ProcessGroup) -> Outcome:
    """One layer, forward and backward."""
    rows = routing(task, dist.get_rank())
    torch.manual_seed(0)
    feeds = [Feed(task.width, task.inner) for _ in range(task.experts)]
    even = spread_evenly(task.experts, dist.get_world_size())
    forms = {"": Form(feeds, even, channel), "placed": Form(feeds, ExpertMap(task.held or even.ranks), channel)}
    ledger, right = channel.ledger, forms[""].layers["plain all-to-all"](*rows).detach()
    pull = torch.randn(right.shape, generator=torch.Generator().manual_seed(7))

    def counted(form: Form) -> tuple[float, float]:
        """Bytes sent and seconds waited so far."""
        return ledger.by_class().get("experts", 0.0) + CLOCK.sent, form.waited + CLOCK.seconds

    def turn(name: str) -> tuple[float, float, float]:
        kind = name.removesuffix(", placed")
        form = forms["placed" if name.endswith("placed") else ""]
        x, weights = rows[0].clone().requires_grad_(), rows[2].clone().requires_grad_()
        dist.barrier(stock())
        before, begun = counted(form), time.perf_counter()
        out = form.layers[kind](x, rows[1], weights)
        torch.autograd.grad(out, [x, weights, *form.leaves], pull, allow_unused=True)
        after = counted(form)
        dist.barrier(stock())
        seconds = time.perf_counter() - begun
        wrong = float((out.detach() - right).abs().max())
        assert "factor" in name or wrong < (ROUGH if "int8" in name else CLOSE), f"{name} differs by {wrong}"
        return seconds, after[0] - before[0], after[1] - before[1]

    return measured(task, turn)


def measured(task: Task, turn: Callable[[str], tuple[float, float, float]]) -> Outcome:
    """All contestants in turn: one to warm up, then rounds, each from another beginning."""
    begun, names = time.perf_counter(), list(task.contestants)
    sent, dropped = {}, {}
    for name in names:
        CLOCK.dropped = 0.0
        total = torch.tensor([turn(name)[1], CLOCK.dropped / dist.get_world_size()])
        dist.all_reduce(total, group=stock())
        sent[name], dropped[name] = total.tolist()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    idle = {name: torch.zeros(dist.get_world_size()) for name in names}
    for number in range(task.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            took, _, waited = turn(name)
            seconds[name].append(took)
            idle[name][dist.get_rank()] += waited
        if late(begun, task.limit):
            break
    for one in idle.values():
        dist.all_reduce(one, group=stock())
    return Outcome(seconds, {k: (v / len(seconds[k])).tolist() for k, v in idle.items()}, sent, dropped)


def steps(task: Task, channel: dist.ProcessGroup) -> Outcome:
    """Whole training steps of a decoder: forward, backward, the sum of all other gradients, AdamW. Both contestants
    train weights of their own from the same beginning on the same tokens."""
    model = config.Moe(
        depth=task.layers, width=task.width, heads=8, feed_forward=task.inner, vocabulary=256, context=128,
        experts=task.experts, active=task.active,
    )  # fmt: skip
    options = defaults.resolve(config.Recipe(model=model))[0].model
    held = spread_evenly(task.experts, dist.get_world_size())
    text = torch.randint(256, (task.tokens // 128, 129), generator=torch.Generator().manual_seed(dist.get_rank()))
    runs = {}
    for name, route in (("flashmoe", FlashMoE(channel, held)), ("plain all-to-all", AllToAll(channel, held))):
        torch.manual_seed(0)
        decoder = MOE(options)
        for block in decoder.modules():
            if isinstance(block, Experts):
                keep(block, held.ranks[dist.get_rank()], held.count)
                block.route = route
        own = [p for name, p in decoder.named_parameters() if ".experts." in name]
        shared = [p for name, p in decoder.named_parameters() if ".experts." not in name]
        runs[name] = decoder, shared, torch.optim.AdamW([*own, *shared], 1e-3), route

    def turn(name: str) -> tuple[float, float, float]:
        decoder, shared, optimizer, route = runs[name]
        dist.barrier(stock())
        before, begun = channel.ledger.by_class().get("experts", 0.0), time.perf_counter()
        waited = route.links.idle if isinstance(route, FlashMoE) else 0.0
        optimizer.zero_grad()
        (decoder(text[:, :-1], targets=text[:, 1:]).sum() / text[:, 1:].numel()).backward()
        flat = torch.cat([p.grad.flatten() for p in shared])
        dist.all_reduce(flat, group=stock())
        for p, part in zip(shared, flat.split([p.numel() for p in shared]), strict=True):
            p.grad.copy_(part.view_as(p))
        optimizer.step()
        dist.barrier(stock())
        waited = route.links.idle - waited if isinstance(route, FlashMoE) else 0.0
        return time.perf_counter() - begun, channel.ledger.by_class()["experts"] - before, waited

    return measured(task, turn)


def measure(task: Task, channel: dist.ProcessGroup) -> Outcome:
    """Layers, or steps."""
    return steps(task, channel) if task.layers else layers(task, channel)


if __name__ == "__main__":
    run(Task, measure)
