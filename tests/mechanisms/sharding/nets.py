"""Small models that are a multiple of nothing, and their training in plain PyTorch and spread over ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from espalier.mechanisms.sharding.amsp import Amsp
from espalier.optim import adamw
from espalier.optim.base import owned_by
from espalier.plan.axes.placement import ShardFactors
from espalier.plan.axes.placement_plan import Spread
from espalier.recipe import Adamw

ROWS = 24  # divides by 1, 2, 4 and 8 ranks and by 3 micro-batches


TWO_NODES = {4: (0, 0, 1, 1), 8: (0, 0, 0, 0, 1, 1, 1, 1)}


def triples(ranks: int) -> list[ShardFactors]:
    """Every nested (params, grads, optimizer) of `ranks` ranks."""
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    return [
        ShardFactors(p, g, o)
        for p, g, o in itertools.product(divisors, repeat=3)
        if g % p == 0 and o % g == 0 and ranks % o == 0
    ]


class Layer(nn.Module):
    """Prime sizes."""

    def __init__(self, dtype: torch.dtype, draw: torch.Generator) -> None:
        super().__init__()
        self.inner = nn.Linear(11, 17, dtype=dtype)
        self.outer = nn.Linear(17, 11, bias=False, dtype=dtype)
        for parameter in self.parameters():
            parameter.data.normal_(0.0, 0.3, generator=draw)
        self.gain = nn.Parameter(torch.ones(11, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """A residual layer."""
        return x + self.outer(torch.tanh(self.inner(x * self.gain)))


class Odd(nn.Module):
    """Prime sizes, tied weights, a frozen parameter, a single number, one that no rank uses, one that some rows use."""

    def __init__(self, dtype: torch.dtype = torch.float64, layers: int = 3) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(7)  # one of its own: ranks may be threads
        self.embed = nn.Parameter(torch.randn(13, 11, dtype=dtype, generator=draw))
        self.frozen = nn.Parameter(torch.randn(11, dtype=dtype, generator=draw), requires_grad=False)
        self.blocks = nn.ModuleList(Layer(dtype, draw) for _ in range(layers))
        self.single = nn.Parameter(torch.tensor(0.7, dtype=dtype))
        self.unused = nn.Parameter(torch.randn(5, dtype=dtype, generator=draw))
        self.sometimes = nn.Parameter(torch.randn(11, dtype=dtype, generator=draw))
        self.head = nn.Linear(11, 13, bias=False, dtype=dtype)
        self.head.weight = self.embed
        self.register_buffer("scale", torch.full((3,), 2.0, dtype=dtype))

    def forward(self, tokens: Tensor, extra: list[int]) -> Tensor:
        """Log probabilities [batch, seq, 13]; only the rows in `extra` use one of the parameters."""
        hidden = self.embed[tokens] + self.frozen
        if extra:
            hidden = torch.index_add(hidden, 0, torch.tensor(extra), self.sometimes.expand(len(extra), 5, 11))
        for block in self.blocks:
            hidden = block(hidden) * self.single
        return torch.log_softmax(self.head(hidden), -1)


def loss(model: nn.Module, rows: range, step: int = 0) -> Tensor:
    """Summed over `rows`; row 4 uses the parameter that is sometimes used."""
    tokens = (torch.arange(ROWS * 5).view(ROWS, 5) * 7 + step * 3) % 13
    extra = [index for index, row in enumerate(rows) if row == 4]
    total = -model(tokens[list(rows)], extra).diagonal(0, -2, -1).sum().double()
    return total / ROWS


def plain(dtype: torch.dtype, steps: int, clip: float = 0.0, model: nn.Module | None = None) -> dict[str, Any]:
    """Training on one rank with the whole batch: parameters at the end, and the gradient's norm in each step."""
    model = Odd(dtype) if model is None else model
    optimizer = adamw.build(Adamw(learning_rate=1e-2), owned_by(model))
    norms = []
    for step in range(steps):
        model.zero_grad()
        loss(model, range(ROWS), step).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step(1.0)
    return {"parameters": {name: p.detach().clone() for name, p in model.named_parameters()}, "norms": norms}


def rounds(rank: int, world: int, accumulate: int) -> Iterator[tuple[bool, range]]:
    """(last, rows) of each micro-batch of a rank."""
    each = ROWS // world // accumulate
    for index in range(accumulate):
        start = (rank * accumulate + index) * each
        yield index == accumulate - 1, range(start, start + each)


def one_step(sharding: Amsp, optimizer: Any, step: int, accumulate: int, place: tuple[int, int]) -> float:
    """One step of a spread model; its gradient's norm."""
    sharding.clear()
    for last, rows in rounds(*place, accumulate):
        with sharding.accumulate(last):
            loss(sharding.model, rows, step).backward()
    sharding.wait()
    norm = sharding.norm()
    optimizer.step(1.0)
    sharding.refresh()
    return norm


def spread(channel: Any, spread: Spread, steps: int, accumulate: int = 1, dtype: torch.dtype = torch.float64) -> Any:
    """(Amsp, optimizer, norms) after training `Odd` on the ranks of `channel`."""
    sharding = Amsp(Odd(dtype), channel, spread)
    optimizer = adamw.build(Adamw(learning_rate=1e-2), sharding.owned)
    place = (0, 1) if channel is None else (channel.rank(), channel.size())
    norms = [one_step(sharding, optimizer, step, accumulate, place) for step in range(steps)]
    return sharding, optimizer, norms


def whole(sharding: Amsp) -> dict[str, Tensor]:
    """All parameters, gathered; the model is plain afterwards."""
    sharding.detach()
    return {name: parameter.detach().clone() for name, parameter in sharding.model.named_parameters()}


def every(factors: ShardFactors, **more: Any) -> Spread:
    """All parameters by the same factors."""
    return Spread(factors=[("*", factors)], **more)
