"""Edge softmax: softmax over the entries of each row, a graph's attention weights, plain and compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from espalier.kernels.base import operation
from espalier.recipe.errors import UserError
from espalier.sparse.csr import CSR


def segment_softmax(adjacency: CSR, scores: Tensor) -> Tensor:
    """Each entry's share: exp(score) over the sum of exp(score) of its row. Differentiable.

    Args:
        adjacency: its rows are the segments; values are not looked at.
        scores: float [entries] or [entries, heads], in the order of the matrix's entries.

    Returns:
        As `scores`; in a row, each head's shares add up to one. −inf has share 0; a row of nothing but −inf, NaN.

    Raises UserError: another number of entries.
    """
    if scores.dim() not in (1, 2) or scores.shape[0] != adjacency.entries:
        raise UserError(
            f"scores has shape {tuple(scores.shape)}.",
            why=f"it is [entries] or [entries, heads], and the matrix has {adjacency.entries} entries",
            do="one score for each entry, in the order of the matrix",
        )
    by_head = scores if scores.dim() == 2 else scores[:, None]
    return segment_shares(adjacency, by_head).reshape(scores.shape)


@operation("segment_softmax")
def segment_shares(adjacency: CSR, scores: Tensor) -> Tensor:
    """The plain form."""
    return row_shares(adjacency.rows, adjacency.shape[0], scores)


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


def _floating(adjacency: CSR, scores: Tensor) -> bool:
    return scores.dtype in (torch.float32, torch.float64) and scores.numel() > 0


@segment_shares.fast("cpu", wins=_floating)
def shares_by_row(adjacency: CSR, scores: Tensor) -> Tensor:
    """Row by row, in one pass over memory."""
    return _Shares.apply(adjacency, scores)


class _Shares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, adjacency: CSR, scores: Tensor) -> Tensor:
        from espalier.sparse import sddmm_kernels

        shares = torch.empty_like(scores, memory_format=torch.contiguous_format)
        sddmm_kernels.softmax(shares, scores.contiguous(), adjacency.indptr, adjacency.cuts)
        ctx.adjacency = adjacency
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (gradient,) = gradients
        (shares,) = ctx.saved_tensors
        rows = ctx.adjacency.rows
        weighted = gradient * shares
        total = weighted.new_zeros(ctx.adjacency.shape[0], shares.shape[1]).index_add(0, rows, weighted)
        return None, weighted - shares * total[rows]
