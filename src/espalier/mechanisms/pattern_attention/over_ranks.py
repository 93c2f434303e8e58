"""Attention whose tokens are cut over ranks: each holds some tokens, and computes all tokens of some heads.

After TorchGT's cluster-aware graph parallelism (arXiv 2407.14106) on the all-to-all of DeepSpeed-Ulysses: every rank
knows the whole pattern. Ranks may hold unequal numbers of tokens and heads; nothing is
padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from espalier.mechanisms.pattern_attention.attention import AttentionPlan, Plan, attention
from espalier.mechanisms.pattern_attention.pattern import Pattern
from espalier.parallel.ulysses import HeadExchange, HeadSplit
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class RankedAttention:
    """`attention` over the ranks of a group, rank after rank holding the next `pieces[rank]` tokens. Immutable.

    Raises UserError: pieces that are not the pattern's tokens or not one for each rank.
    """

    def __init__(self, pattern: Pattern, pieces: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
        process_group = group if group is not None else dist.group.WORLD
        assert process_group is not None
        if len(pieces) != process_group.size() or sum(pieces) != pattern.tokens or min(pieces) < 0:
            raise UserError(
                f"pieces = {list(pieces)} do not cut {pattern.tokens} tokens over {process_group.size()} ranks.",
                do="the number of tokens that each rank holds, virtual tokens included",
            )
        self.pattern = pattern
        self.pieces = list(pieces)
        self.group = process_group

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, plan: Plan | AttentionPlan = "auto"
    ) -> Tensor:
        """Own tokens [tokens of this rank, heads, width] to the same; `bias` of all entries and heads, on every rank.

        The gradient of `bias` is that of this rank's heads; the sum over the ranks is the whole.
        Raises UserError where there are fewer heads than ranks, and as `attention`.
        """
        rank = self.group.rank()
        if len(q) != self.pieces[rank]:
            raise UserError(f"q has {len(q)} tokens; rank {rank} holds {self.pieces[rank]}.", do="its own tokens")
        exchange = HeadExchange(HeadSplit(q.shape[1], q.shape[1], self.group.size()), self.pieces, self.group, rank)
        start, stop = exchange.split.queries[rank]
        if bias is not None:
            bias = bias[start:stop] if self.pattern.matrix is None else bias[:, start:stop]
        q, k, v = exchange.to_heads(_by_head(q), _by_head(k), _by_head(v))
        out = attention(_by_token(q), _by_token(k), _by_token(v), self.pattern, bias=bias, plan=plan)
        return _by_token(exchange.to_tokens(_by_head(out)))


@dataclass(frozen=True, eq=False)
class TokenExchange:
    """How the tokens of a block are cut over ranks: rank after rank holds the next `pieces[rank]` of them."""

    pieces: tuple[int, ...]
    group: dist.ProcessGroup

    @property
    def last(self) -> bool:
        """Whether this rank holds the last tokens, which are the virtual ones."""
        return self.group.rank() == len(self.pieces) - 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, **options: Any) -> Tensor:
        """As `attention`, of the tokens of this rank."""
        return RankedAttention(pattern, self.pieces, self.group)(q, k, v, **options)


def _by_head(rows: Tensor) -> Tensor:
    """[tokens, heads, width] as [1, heads, tokens, width]."""
    return rows.transpose(0, 1)[None]


def _by_token(rows: Tensor) -> Tensor:
    return rows[0].transpose(0, 1)
