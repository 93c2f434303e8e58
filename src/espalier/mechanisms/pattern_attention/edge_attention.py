"""Attention entry by entry in PyTorch's operations, for devices that the kernels do not run on.

As edge_kernels.py: one logarithm per row and head is kept, backward recomputes the shares, and gradients of keys and
values are sums over the transposed pattern. Every sum is over a segment, so that two runs have the same bits. Rows are
taken in pieces, so that what is gathered at once is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from espalier.sparse import CSR

GATHERED = 1 << 26
"""Values that are gathered at once."""


class Side(NamedTuple):
    """Entries by rows: int64 row and column of each, entries of each row, and on the host where each row begins."""

    rows: Tensor
    columns: Tensor
    lengths: Tensor
    starts: Tensor

    @classmethod
    def of(cls, matrix: CSR, device: torch.device) -> Side:
        """Of a pattern in host memory."""
        places = (matrix.rows.to(device), matrix.indices.long().to(device), matrix.degrees.to(device))
        return cls(*places, matrix.indptr)

    def pieces(self, width: int) -> Iterator[tuple[slice, slice]]:
        """(rows, entries) of pieces that gather `GATHERED` values of rows of so many; a row is not cut."""
        total = len(self.starts) - 1
        most = max(1, GATHERED // width)
        first = 0
        while first < total:
            reach = int(torch.searchsorted(self.starts, self.starts[first] + most, right=True)) - 1
            last = min(total, max(first + 1, reach))
            yield slice(first, last), slice(int(self.starts[first]), int(self.starts[last]))
            first = last


class Entries(NamedTuple):
    """A pattern on a device: by rows, by columns, and where each entry of the latter stands among the former."""

    side: Side
    turned: Side
    order: Tensor

    @classmethod
    def of(cls, matrix: CSR, device: torch.device) -> Entries:
        """Of a pattern in host memory."""
        pattern, order = matrix.transpose
        return cls(Side.of(matrix, device), Side.of(pattern, device), order.to(device))


class EdgeAttention(torch.autograd.Function):
    """`attention` of q, k, v [tokens, heads, width] over `Entries`, with a bias [entries, heads] or None."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, entries: Entries) -> Tensor:
        out = torch.zeros_like(q)
        logs = q.new_zeros(q.shape[:2])
        for rows, piece in entries.side.pieces(q[0].numel()):
            scores = _scores(q, k, bias, entries.side, piece)
            top = _segments(scores, entries.side.lengths[rows], "max")
            top = top.masked_fill(top.isneginf(), 0)
            at = entries.side.rows[piece] - rows.start
            powers = (scores - top[at]).exp()
            total = _segments(powers, entries.side.lengths[rows])
            empty = total == 0  # a total of NaN is none
            logs[rows] = (top + total.log()).masked_fill(empty, 0)
            shares = powers / total.masked_fill(empty, 1)[at]
            out[rows] = _segments(shares[..., None] * v[entries.side.columns[piece]], entries.side.lengths[rows])
        ctx.save_for_backward(q, k, v, bias, out, logs)
        ctx.entries = entries
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v and the bias."""
        q, k, v, bias, out, logs = ctx.saved_tensors
        (side, turned, order), gradient, scale = ctx.entries, gradients[0], q.shape[2] ** -0.5
        weighted = (gradient * out).sum(-1)
        dq = torch.zeros_like(q)
        dk = torch.zeros_like(q)
        dv = torch.zeros_like(q)
        shares, slopes = (q.new_empty(len(side.rows), q.shape[1]) for _ in range(2))
        for rows, piece in side.pieces(q[0].numel()):
            at = side.rows[piece]
            columns = side.columns[piece]
            shares[piece] = (_scores(q, k, bias, side, piece) - logs[at]).exp()
            slopes[piece] = shares[piece] * ((gradient[at] * v[columns]).sum(-1) - weighted[at])
            dq[rows] = scale * _segments(slopes[piece][..., None] * k[columns], side.lengths[rows])
        for rows, piece in turned.pieces(q[0].numel()):
            at = order[piece]
            columns = turned.columns[piece]
            lengths = turned.lengths[rows]
            dk[rows] = scale * _segments(slopes[at][..., None] * q[columns], lengths)
            dv[rows] = _segments(shares[at][..., None] * gradient[columns], lengths)
        return dq, dk, dv, None if bias is None else slopes, None


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, side: Side, piece: slice) -> Tensor:
    scores = (q[side.rows[piece]] * k[side.columns[piece]]).sum(-1) * q.shape[2] ** -0.5
    return scores if bias is None else scores + bias[piece]


def _segments(values: Tensor, lengths: Tensor, reduce: str = "sum") -> Tensor:
    """Of each row, over its entries: [entries, ...] -> [rows, ...]."""
    return torch.segment_reduce(values.flatten(1), reduce, lengths=lengths, unsafe=True).view(-1, *values.shape[1:])
