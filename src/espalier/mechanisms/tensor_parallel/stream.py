"""The residual stream of ranks that share matrices: what goes in and out where a matrix cut by columns begins and one
cut by rows ends.

Sharded (Megatron's sequence parallelism, arXiv 2205.05198): between matrices each rank has some of a micro-batch's
tokens, `[1, part, width]`; an all-gather brings all of them, `[batch, seq, width]`, and a reduce-scatter adds up and
divides again. Tokens are counted through the batch, so shards are whole runs of memory, as even as can be. Not sharded
(arXiv 1909.08053): each rank has all tokens, and an all-reduce adds up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)

from espalier.comm.base import Traffic, traffic
from espalier.parallel.tensor_roles import even

if TYPE_CHECKING:
    from collections.abc import Sequence

Arrived = Callable[[], Tensor]
"""Waits for an exchange under way and gives its result."""


class Stream:
    """The exchanges of one rank. Has state: how many samples and tokens the forward pass under way has.

    Args:
        group: the ranks that share matrices.
        sharded: whether the stream is.
        regather: of a sharded stream, matrices keep only this rank's tokens for backward, and gather again (Buff's FSP,
            arXiv 2401.09149).
    """

    def __init__(self, group: dist.ProcessGroup, sharded: bool, regather: bool = False) -> None:
        self.group = group
        self.sharded = sharded
        self.regather = regather and sharded
        self.rank = group.rank()
        self.ranks = group.size()
        self.tokens: tuple[int, int] = (0, 0)
        """(batch, seq) of the forward pass under way."""

    def begin(self, tokens: Tensor) -> None:
        """A forward pass of `tokens` `[batch, seq, ...]` begins."""
        self.tokens = (tokens.shape[0], tokens.shape[1])

    def counts(self, tokens: tuple[int, int]) -> list[int]:
        """Tokens of each rank."""
        ends = [even(tokens[0] * tokens[1], rank, self.ranks) for rank in range(self.ranks)]
        return [last - first for first, last in ends]

    def spread(self, part: Tensor, tokens: tuple[int, int]) -> Arrived:
        """`[1, part, width]` to `[batch, seq, width]`: all ranks' tokens."""
        if not self.sharded:
            return lambda: part
        gathered = self.gather(part[0], self.counts(tokens))
        return lambda: gathered().view(*tokens, part.shape[-1])

    def fold(self, whole: Tensor) -> Arrived:
        """`[batch, seq, width]` to `[1, part, width]`: the sum over the ranks, of this rank's tokens."""
        if not self.sharded:
            return self.sum(whole)
        scattered = self._scatter(whole.reshape(-1, whole.shape[-1]), self.counts((whole.shape[0], whole.shape[1])))
        return lambda: scattered().unsqueeze(0)

    def part_of_rank(self, whole: Tensor, tokens: tuple[int, int]) -> Tensor:
        """`[batch, seq, width]` to `[1, part, width]`: this rank's tokens."""
        first, last = even(tokens[0] * tokens[1], self.rank, self.ranks)
        return whole.reshape(-1, whole.shape[-1])[first:last].unsqueeze(0)

    def part(self, whole: Tensor) -> Tensor:
        return _Part.apply(whole, self)

    def whole(self, part: Tensor) -> Tensor:
        return _Whole.apply(part, self)

    def sum(
        self,
        values: Tensor,
        operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        kind: Traffic = Traffic.ACTIVATIONS,
    ) -> Arrived:
        """The reduction over the ranks."""
        values, options = values.clone(memory_format=torch.contiguous_format), AllreduceOptions()
        options.reduceOp = dist.ReduceOp(operation)
        with traffic(kind):
            work = self.group.allreduce([values], options)
        return _after(work, lambda: values)

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Arrived:
        """All ranks' `rows`, of which each has as many as `counts` says, one after the other."""
        gathered = rows.new_empty(sum(counts), *rows.shape[1:])
        with traffic(Traffic.ACTIVATIONS):
            if len(set(counts)) == 1:
                work = self.group._allgather_base(gathered, rows.contiguous(), AllgatherOptions())
            else:
                sent = torch.cat([rows] * self.ranks)
                each = [len(rows)] * self.ranks
                work = self.group.alltoall_base(gathered, sent, list(counts), each, AllToAllOptions())
        return _after(work, lambda: gathered)

    def _scatter(self, rows: Tensor, counts: Sequence[int]) -> Arrived:
        """The sum over the ranks of this rank's run of `rows`, in the order of the ranks."""
        count, rows = counts[self.rank], rows.contiguous()
        with traffic(Traffic.ACTIVATIONS):
            if len(set(counts)) == 1:
                scattered = rows.new_empty(count, rows.shape[1])
                work = self.group._reduce_scatter_base(scattered, rows, ReduceScatterOptions())
                return _after(work, lambda: scattered)
            scattered = rows.new_empty(self.ranks * count, rows.shape[1])
            work = self.group.alltoall_base(scattered, rows, [count] * self.ranks, list(counts), AllToAllOptions())
        return _after(work, lambda: scattered.view(self.ranks, count, rows.shape[1]).sum(0))


class _Part(torch.autograd.Function):
    """This rank's tokens of a stream that each rank has whole; each gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, stream: Stream) -> Tensor:
        ctx.stream = stream
        ctx.tokens = stream.tokens
        return stream.part_of_rank(whole, stream.tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.stream.spread(gradients[0], ctx.tokens)(), None


class _Whole(torch.autograd.Function):
    """All tokens on each rank, of which each then has the same gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, stream: Stream) -> Tensor:
        ctx.stream = stream
        ctx.tokens = stream.tokens
        return stream.spread(part, stream.tokens)()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.stream.part_of_rank(gradients[0], ctx.tokens), None


def _after(work: Any, result: Callable[[], Tensor]) -> Arrived:
    def arrived() -> Tensor:
        work.wait()
        return result()

    return arrived
