"""Experts over ranks by all-to-alls: counts, then rows to their experts, then answers back. What FlashMoE is compared
with.

The plain form of expert parallelism (GShard, arXiv 2006.16668; without capacity as in MegaBlocks, arXiv 2211.15841):
nothing is padded and no token is dropped, and every exchange is a barrier of its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier.comm.base import Traffic, traffic
from espalier.parallel.expert_map import ExpertsOverRanks, RoutedTokens
from espalier.parallel.local_experts import combined, inverse

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class AllToAll(ExpertsOverRanks):
    """See `parallel.expert_map.OverRanks`."""

    def _routed(self, tokens: RoutedTokens, experts: Sequence[nn.Module]) -> Tensor:
        x, chosen, weights, anchor = tokens
        expert_map = self.expert_map
        position = expert_map.positions(chosen.device)[chosen].flatten()
        order = position.argsort(stable=True)
        counts = position.bincount(minlength=expert_map.count)
        arriving = self._counts(counts)
        leaving = [int(part.sum()) for part in counts.split(expert_map.sizes)]
        coming = [int(part.sum()) for part in arriving]
        sent = x.index_select(0, order // chosen.shape[1])
        rows = _Exchange.apply(sent, anchor, leaving, coming, self.group)
        kinds = torch.cat([torch.arange(len(experts)).repeat_interleave(part) for part in arriving]).to(x.device)
        answers = _Exchange.apply(run(rows, kinds, experts), anchor, coming, leaving, self.group)
        return combined(answers, order, weights)

    def _counts(self, counts: Int[Tensor, " experts"]) -> list[Tensor]:
        """How many rows come from each rank for each expert here: int64 [experts here] of each rank."""
        local_count = len(self.expert_map.ranks[self.group.rank()])
        own_counts, received = counts.int().cpu(), torch.empty(self.group.size() * local_count, dtype=torch.int32)
        with traffic(Traffic.EXPERTS):
            dist.all_to_all_single(
                received, own_counts, [local_count] * self.group.size(), self.expert_map.sizes, group=self.group
            )
        return list(received.long().split(local_count)) if local_count else [received.long()] * self.group.size()


class _Exchange(torch.autograd.Function):
    """Rows to other ranks: `leaving` of them to each, `coming` from each. Its gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, anchor: Tensor, leaving: Sequence[int], coming: Sequence[int], group: Any
    ) -> Tensor:
        """[sum of leaving, width] to [sum of coming, width]."""
        ctx.leaving, ctx.coming, ctx.group = leaving, coming, group
        return _exchanged(rows, leaving, coming, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient of the rows."""
        return _exchanged(gradients[0], ctx.coming, ctx.leaving, ctx.group), None, None, None, None


def _exchanged(rows: Tensor, leaving: Sequence[int], coming: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(coming), rows.shape[1])
    with traffic(Traffic.EXPERTS):
        dist.all_to_all_single(received, rows.contiguous(), list(coming), list(leaving), group=group)
    return received


def run(
    rows: Float[Tensor, "rows width"], kinds: Int[Tensor, " rows"], experts: Sequence[nn.Module]
) -> Float[Tensor, "rows width"]:
    """What expert `kinds[i]` says of row i, of rows in any order."""
    if not experts:
        return rows
    order = kinds.argsort(stable=True)
    parts = rows.index_select(0, order).split(kinds.bincount(minlength=len(experts)).tolist())
    answers = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    return answers.index_select(0, inverse(order))
