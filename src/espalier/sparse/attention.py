"""Attention over a graph's edges, scores, softmax and sum in one pass.

After Veličković et al., "Graph Attention Networks" (arXiv 1710.10903), eq. 1 to 6, with the scores taken apart into a
target's and a source's term, which is the same sum. The fused form keeps one logarithm per row and head for backward
and recomputes the shares from it (as FlashAttention does, arXiv 2205.14135): nothing of the edges' number is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from espalier.kernels.base import operation
from espalier.kernels.buffer_pool import BUFFERS
from espalier.recipe.errors import UserError
from espalier.sparse.csr import CSR

Scores = tuple[Tensor, Tensor]
"""Of targets [rows, heads] and of sources [columns, heads]: the two halves of GAT's vector a, applied."""


def attention_aggregate(
    adjacency: CSR, features: Tensor, scores: Scores, *, slope: float = 0.2, keep: Tensor | None = None
) -> Tensor:
    """Row i, head h: Σ over its entries e = (i, c) of `share[e, h] · keep[e, h] · features[c, h]`. Differentiable.

    `share = softmax(leaky_relu(scores[0][i, h] + scores[1][c, h], slope))` over the row's entries.

    Args:
        adjacency: [rows, columns], rows gather; values are not looked at. GAT wants self-loops in it.
        features: float32 or float64 [columns, heads, width].
        scores: of targets [rows, heads] and of sources [columns, heads].
        slope: of the leaky ReLU below zero.
        keep: [entries, heads], multiplied after the softmax: dropout of attention, zeros and 1/(1-p). No gradient.

    Returns:
        [rows, heads, width]; zeros in rows without entries.

    Raises UserError: shapes that do not fit, tensors of different types.
    """
    rows, columns = adjacency.shape
    if features.dim() != 3 or features.shape[0] != columns:
        raise UserError(
            f"features has shape {tuple(features.shape)}.",
            why=f"it is [{columns}, heads, width]",
            do="features[:, None] for one head",
        )
    heads = features.shape[1]
    named = {"scores[0]": (scores[0], rows), "scores[1]": (scores[1], columns)}
    if keep is not None:
        named["keep"] = (keep, adjacency.entries)
    for name, (tensor, size) in named.items():
        if tensor.shape != (size, heads):
            raise UserError(
                f"{name} has shape {tuple(tensor.shape)}.",
                why=f"it is [{size}, heads = {heads}]",
                do="as many heads as features have",
            )
        if tensor.dtype != features.dtype:
            kinds = (str(values.dtype).removeprefix("torch.") for values in (tensor, features))
            raise UserError(f"{name} is {next(kinds)}, features are {next(kinds)}.", do=f"{name}.to(features.dtype)")
    return graph_attention(adjacency, features, scores, slope, keep)


@operation("graph_attention")
def graph_attention(adjacency: CSR, features: Tensor, scores: Scores, slope: float, keep: Tensor | None) -> Tensor:
    """The plain form."""
    edges = Edges(adjacency.rows, adjacency.indices.long(), adjacency.shape[0])
    return attend_edges(edges, features, scores, slope, lambda shares: shares if keep is None else shares * keep)


class Edges(NamedTuple):
    """Row and column of each entry, int64 [entries], and the number of rows."""

    rows: Tensor
    columns: Tensor
    row_count: int


def row_shares(rows: Tensor, count: int, scores: Tensor) -> Tensor:
    """Softmax of `scores` [entries, heads] over the entries of each of `count` rows; `rows` int64 [entries].

    The largest score of a row is taken off, so that nothing overflows.
    """
    place = rows[:, None].expand_as(scores)
    highest = scores.new_full((count, scores.shape[1]), -torch.inf)
    highest = highest.scatter_reduce(0, place, scores.detach(), "amax")
    raised = (scores - highest[rows]).exp()
    total = torch.zeros_like(highest).index_add(0, rows, raised)
    return raised / total[rows]


def attend_edges(
    edges: Edges, features: Tensor, scores: Scores, slope: float, drop: Callable[[Tensor], Tensor]
) -> Tensor:
    """Attention edge by edge in memory, on any device; `drop` zeroes some of the shares [entries, heads]."""
    rows, columns, row_count = edges
    edge_scores = functional.leaky_relu(scores[0][rows] + scores[1][columns], slope)
    messages = features[columns] * drop(row_shares(rows, row_count, edge_scores))[..., None]
    return features.new_zeros(row_count, *features.shape[1:]).index_add(0, rows, messages)


def _fits(adjacency: CSR, features: Tensor, scores: Scores, slope: float, keep: Tensor | None) -> bool:
    kinds = {features.dtype, scores[0].dtype, scores[1].dtype, features.dtype if keep is None else keep.dtype}
    return kinds in ({torch.float32}, {torch.float64}) and features.numel() > 0 and adjacency.entries > 0


@graph_attention.fast("cpu", wins=_fits)
def fused(adjacency: CSR, features: Tensor, scores: Scores, slope: float, keep: Tensor | None) -> Tensor:
    """Row by row: scores, softmax and sum while the row is in registers and first-level cache."""
    return _EdgeSoftmax.apply(adjacency, features, *scores, (slope, keep))


class _EdgeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, adjacency: CSR, features: Tensor, target: Tensor, source: Tensor, how: Any) -> Tensor:
        from espalier.sparse import sddmm_kernels

        features = features.contiguous()
        target = target.contiguous()
        source = source.contiguous()
        slope, keep = how
        ctx.adjacency = adjacency
        ctx.slope = float(slope)
        mask = features.new_empty(0) if keep is None else keep.contiguous()
        out = BUFFERS.empty((adjacency.shape[0], *features.shape[1:]), features.dtype)
        logs = target.new_empty(target.shape)
        where = (adjacency.indptr, adjacency.indices, adjacency.cuts)
        scores = (target.view(-1), source.view(-1), mask.view(-1))
        sddmm_kernels.attend(out.flatten(1), logs, *where, features.flatten(1), *scores, ctx.slope)
        ctx.save_for_backward(features, target, source, mask, out, logs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor, Tensor, None]:
        from espalier.sparse import sddmm_kernels

        features, target, source, mask, out, logs = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        pattern, order = ctx.adjacency.transpose
        weighted = (gradient * out).sum(-1)  # Σ share·dshare of a row, as one dot product
        dfeatures = BUFFERS.empty(tuple(features.shape), features.dtype)
        dsource = torch.empty_like(source)
        dscores = BUFFERS.empty((ctx.adjacency.entries, target.shape[1]), target.dtype)
        where = (pattern.indptr, pattern.indices, order, pattern.cuts)
        known = (tensor.view(-1) for tensor in (target, source, mask, logs, weighted, gradient))
        made = (dfeatures.flatten(1), dsource.view(-1), dscores.view(-1))
        sddmm_kernels.attend_backward(*made, *where, features.flatten(1), *known, ctx.slope)
        dtarget = torch.empty_like(target)
        sddmm_kernels.sum_segments(dtarget, dscores, ctx.adjacency.indptr, ctx.adjacency.cuts)
        return None, dfeatures, dtarget, dsource, None
