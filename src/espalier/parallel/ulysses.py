"""Sequence shards to head shards and back, by one all-to-all each (DeepSpeed-Ulysses, arXiv 2309.14509).

Head counts and lengths may be uneven. Grouped-query attention with fewer key-value heads than ranks: every rank gets
the key-value heads that its query heads need, so neighbours get copies of one head, and its gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from espalier.comm.base import Traffic, traffic
from espalier.parallel.sequence_slots import divided
from espalier.recipe.errors import UserError


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each of `ranks` ranks computes. Immutable.

    Attributes:
        heads, kv_heads: of the model; shares: speeds of the ranks; empty: equal.
    """

    heads: int
    kv_heads: int
    ranks: int
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UserError(
                f"{self.kv_heads} key-value heads do not divide {self.heads} query heads.",
                do=f"kv_heads = {max(n for n in range(1, self.kv_heads + 1) if self.heads % n == 0)}",
            )
        if min(stop - start for start, stop in self.queries) < 1:
            raise UserError(
                f"hp = {self.ranks} is too much for {self.heads} heads.",
                why="every rank of the head-parallel axis computes at least one head",
                do=f"hp = {min(self.heads, self.ranks // 2)}, and the other ranks along cp",
            )

    @property
    def queries(self) -> list[tuple[int, int]]:
        """The query heads of each rank, whole groups where there are enough."""
        unit = self.heads // self.kv_heads if self.kv_heads >= self.ranks else 1
        ends = divided(self.heads // unit, self.shares or (1.0,) * self.ranks)
        return list(pairwise(end * unit for end in ends))

    @property
    def keys(self) -> list[tuple[int, int]]:
        """The key-value heads of each rank."""
        group = self.heads // self.kv_heads
        return [(start // group, -(-stop // group)) for start, stop in self.queries]

    def repeated(self, rank: int) -> list[int] | None:
        """Which of a rank's key-value heads each of its query heads takes, where groups are uneven; None: even."""
        (start, stop), (first, last) = self.queries[rank], self.keys[rank]
        taken = [head // (self.heads // self.kv_heads) - first for head in range(start, stop)]
        each = len(taken) // (last - first)
        return None if taken == [index // each for index in range(each * (last - first))] else taken


class _AllToAll(torch.autograd.Function):
    """Parts of a flat tensor to the ranks of a group; backward sends the gradients the other way."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.reverse = received, sent, group
        made = flat.new_empty(sum(received))
        with traffic(Traffic.ACTIVATIONS):
            dist.all_to_all_single(made, flat, received, sent, group=group)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient: Tensor = _AllToAll.apply(gradients[0].contiguous(), *ctx.reverse)
        return gradient, None, None, None


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """The ranks that share a slot, as one of them sees them. Immutable.

    Attributes:
        split: who computes which heads; pieces: how many tokens of the slot each rank holds.
        group: of these ranks; rank: this one in it.
    """

    split: HeadSplit
    pieces: list[int]
    group: dist.ProcessGroup
    rank: int

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Own tokens of all heads [batch, heads, tokens, head] to all tokens of own heads."""
        split, (batch, _, _, size) = self.split, query.shape
        parts = [
            torch.cat([query[:, a:b], key[:, c:d], value[:, c:d]], 1)
            for (a, b), (c, d) in zip(split.queries, split.keys, strict=True)
        ]
        (a, b), (c, d) = split.queries[self.rank], split.keys[self.rank]
        shapes = [(batch, b - a + 2 * (d - c), tokens, size) for tokens in self.pieces]
        query, key, value = torch.cat(self._exchanged(parts, shapes), 2).split([b - a, d - c, d - c], 1)
        taken = split.repeated(self.rank)
        return (query, key, value) if taken is None else (query, key[:, taken], value[:, taken])

    def to_tokens(self, out: Tensor) -> Tensor:
        """All tokens of own heads to own tokens of all heads."""
        shapes = [(len(out), stop - start, self.pieces[self.rank], out.shape[3]) for start, stop in self.split.queries]
        return torch.cat(self._exchanged(list(out.split(self.pieces, 2)), shapes), 1)

    def _exchanged(self, parts: list[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        received = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.cat([part.flatten() for part in parts])
        made: Tensor = _AllToAll.apply(flat, [part.numel() for part in parts], received, self.group)
        return [part.view(shape) for part, shape in zip(made.split(received), shapes, strict=True)]
