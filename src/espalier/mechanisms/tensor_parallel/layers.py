"""Tensor-parallel layers: products of matrices of which each rank has some columns or rows (Megatron-LM, arXiv
1909.08053), a table and a cross entropy of which each has some words.

They are what modules of a model do in the place of their own forward (`cut`); the modules keep their class and names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.comm.base import Traffic
from espalier.kernels.linear_cross_entropy import IGNORED
from espalier.mechanisms.tensor_parallel.stream import Arrived, Stream
from espalier.parallel.tensor_roles import even


class Entry:
    """One pass of the stream into matrices that share their input. Has state: what backward leaves here.

    The gradients of the matrices are computed where the stream's own is already under way, so that the reduce-scatter
    is hidden; with `regather`, the all-gather runs beside the products that come before.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.tokens = stream.tokens
        self.outputs: dict[int, Tensor] = {}
        """Gradients of the products, by the number of the matrix."""
        self.again: Arrived | None = None

    def whole(self, saved: Tensor) -> Arrived:
        """All tokens, given what was kept of them."""
        return self.stream.spread(saved, self.tokens) if self.stream.regather else lambda: saved


class _Enter(torch.autograd.Function):
    """The stream, spread. The gradients of the matrices behind it are computed here."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, entry: Entry, *matrices: Tensor) -> Tensor:
        whole = entry.stream.spread(part, entry.tokens)()
        ctx.entry = entry
        ctx.save_for_backward(part if entry.stream.regather else whole)
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        entry: Entry = ctx.entry
        (saved,) = ctx.saved_tensors
        folded = entry.stream.fold(gradient)
        gradients: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 2)
        if entry.outputs:
            whole = (entry.again or entry.whole(saved))().flatten(0, -2)
            for number, output in entry.outputs.items():
                gradients[number] = output.flatten(0, -2).mT @ whole
        entry.outputs = {}
        entry.again = None
        return folded(), None, *gradients


class _ColumnProduct(torch.autograd.Function):
    """A product with a matrix cut by columns. Backward leaves its output's gradient in the entry."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, matrix: Tensor, saved: Tensor | None, entry: Entry, number: int) -> Tensor:
        ctx.entry = entry
        ctx.number = number
        ctx.save_for_backward(matrix, saved)
        return F.linear(whole, matrix)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        matrix, saved = ctx.saved_tensors
        entry: Entry = ctx.entry
        if saved is not None and not entry.outputs:
            entry.again = entry.whole(saved)
        entry.outputs[ctx.number] = gradient
        return gradient @ matrix.to(gradient.dtype), None, None, None, None


class _LeaveStream(torch.autograd.Function):
    """What the ranks say of each token, added up: the stream again."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, stream: Stream) -> Tensor:
        ctx.stream = stream
        ctx.tokens = (partial.shape[0], partial.shape[1])
        return stream.fold(partial)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = ctx.stream.spread(gradient, ctx.tokens)()
        return whole.view_as(whole), None


def leave(partial: Tensor, stream: Stream) -> Tensor:
    """[batch, seq, width] summed over the ranks, as the stream has it. Differentiable."""
    return _LeaveStream.apply(partial, stream)


class Columns:
    """Matrices of which this rank has some columns (rows of their `weight`) and which share one input: query, key and
    value, say. Has state: the input under way, so that it crosses the ranks once for all of them.

    Args:
        weights: called for each matrix when it is needed.
    """

    def __init__(self, stream: Stream, weights: Sequence[Callable[[], Tensor]]) -> None:
        self.stream = stream
        self.weights = list(weights)
        self._input: Tensor | None = None
        self._state: tuple[Tensor, Tensor, Entry, list[Tensor]] | None = None
        self._left = 0

    def product(self, number: int, x: Tensor) -> Tensor:
        """`x` by matrix `number`: of the stream's tokens to all tokens."""
        if self._input is not x or self._state is None:
            self._begin(x)
        assert self._state is not None
        whole, part, entry, matrices = self._state
        self._left -= 1
        if not self._left:
            self._input = self._state = None
        saved = part if self.stream.regather else None
        return _ColumnProduct.apply(whole, matrices[number].detach(), saved, entry, number)

    def _begin(self, x: Tensor) -> None:
        part = x
        matrices = [weight() for weight in self.weights]
        if torch.is_autocast_enabled(x.device.type):
            part = x.to(torch.get_autocast_dtype(x.device.type))  # what is exchanged is what products read
        entry = Entry(self.stream)
        whole = _Enter.apply(part, entry, *matrices)
        self._input, self._left = x, len(self.weights)
        self._state = whole, part.detach(), entry, matrices


Forward = Callable[[Tensor], Tensor]


def column_forward(columns: Columns, number: int, module: nn.Linear) -> Forward:
    """The forward of a `Linear` cut by columns."""

    def forward(input: Tensor) -> Tensor:
        product = columns.product(number, input)
        return product if module.bias is None else product + module.bias

    return forward


def row_forward(stream: Stream, module: nn.Linear) -> Forward:
    """The forward of a `Linear` cut by rows (columns of its `weight`). The bias, which every rank has, counts once."""

    def forward(input: Tensor) -> Tensor:
        product = leave(F.linear(input, module.weight), stream)
        return product if module.bias is None else product + module.bias

    return forward


def table_forward(stream: Stream, module: nn.Embedding, first: int) -> Forward:
    """The forward of an `Embedding` of which this rank has the words from `first` on."""
    padding = module.padding_idx
    if padding is not None:
        padding = padding - first if first <= padding < first + len(module.weight) else None

    def forward(input: Tensor) -> Tensor:
        stream.begin(input)
        inside = (input >= first) & (input < first + len(module.weight))
        rows = F.embedding((input - first).where(inside, 0), module.weight, padding)
        return leave(rows * inside.unsqueeze(-1), stream)

    return forward


def region_forward(stream: Stream, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module inside which all tokens are needed and each rank computes a part of the answer, with
    further outputs that each computes whole."""

    def forward(x: Tensor, *more: Any) -> Any:
        answer, *others = plain(_Enter.apply(x, Entry(stream)), *more)
        return leave(answer, stream), *(_Once.apply(other, stream.ranks) for other in others)

    return forward


def words_forward(columns: Forward, stream: Stream, total: int) -> Forward:
    """The forward of a `Linear` cut by columns, whose output every rank gets whole."""

    def forward(input: Tensor) -> Tensor:
        return whole_words(columns(input), stream, total)

    return forward


def whole_words(part: Tensor, stream: Stream, total: int) -> Tensor:
    """Of an output of `total` columns, of which this rank has `part`, all of them. Differentiable."""
    return _GatheredWords.apply(part, stream, total)


def cross_entropy_sum(logits: Tensor, targets: Tensor, stream: Stream, first: int) -> Tensor:
    """Sum of the cross entropies of `targets`, of whose logits this rank has the words from `first` on.
    Differentiable."""
    return _CrossEntropySum.apply(logits, targets, stream, first)


def whole_tokens(x: Tensor, stream: Stream) -> Tensor:
    """[tokens, width] of all ranks' tokens, which each multiplies by words of its own. Differentiable."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))  # what is exchanged is what products read
    return _Enter.apply(x, Entry(stream)).flatten(0, -2)


class _Once(torch.autograd.Function):
    """What every rank computes alike, where gradients are summed over them: each counts its share."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


# --- the head ----------------------------------------------------------------------------------------------------


class _GatheredWords(torch.autograd.Function):
    """All columns of an output of which each rank has some; every rank then computes the same with them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, stream: Stream, total: int) -> Tensor:
        ctx.first, ctx.last = ends = even(total, stream.rank, stream.ranks)
        assert part.shape[-1] == ends[1] - ends[0]
        counts = [last - first for first, last in (even(total, rank, stream.ranks) for rank in range(stream.ranks))]
        gathered = stream.gather(part.flatten(0, -2).mT, counts)()
        return gathered.mT.reshape(*part.shape[:-1], total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[..., ctx.first : ctx.last], None, None


class _CrossEntropySum(torch.autograd.Function):
    """Sum of the cross entropies of logits of which each rank has some words; no rank has a whole row.

    Two all-reduces of numbers per token: the largest logit; the sum of exponentials and the target's logit.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, stream: Stream, first: int) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        scores = logits.flatten(0, -2).to(dtype, copy=True)
        targets = targets.flatten()
        scores -= stream.sum(scores.amax(-1), dist.ReduceOp.MAX, Traffic.CONTROL)().unsqueeze(-1)
        counted = targets != IGNORED
        inside = counted & (targets >= first) & (targets < first + scores.shape[-1])
        place = (targets - first).where(inside, 0).unsqueeze(-1)
        inside_score = scores.gather(-1, place).squeeze(-1) * inside
        scores.exp_()
        total, score = stream.sum(torch.stack([scores.sum(-1), inside_score]), kind=Traffic.CONTROL)()
        ctx.save_for_backward(scores.div_(total.unsqueeze(-1)), place, inside, counted)
        ctx.dtype = logits.dtype
        ctx.shape = logits.shape
        return ((total.log() - score) * counted).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        shares, place, inside, counted = ctx.saved_tensors
        of_scores = shares.scatter_add(-1, place, -inside.to(shares.dtype).unsqueeze(-1))
        of_scores *= (gradient * counted).unsqueeze(-1)
        return of_scores.to(ctx.dtype).view(ctx.shape), None, None, None
