"""Aggregation of features of which each node kept its k largest: MaxK-GNN's format CBSR, forward and backward.

After Peng et al., "MaxK-GNN" (arXiv 2312.08656): a node's kept values and their columns have the same length k in every
row, so an edge moves k values instead of the whole width; backward is wanted at the kept places only. Where k is too
large a share of the width for that to pay on a CPU, the dense product does the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from espalier.kernels.base import operation
from espalier.kernels.buffer_pool import BUFFERS
from espalier.recipe.errors import UserError
from espalier.sparse.csr import CSR, matmul, product, turned

NARROW, NARROWER = 6, 12
"""The compiled forms run where width / k is at least this, forward and backward: below, the dense product was as fast
at degrees 16 and 50 and width 256 (two cores with AVX-512)."""

GATHERED, NEAR = 16, 1 << 18
"""Backward walks through all rows this often at least, and once for each quarter MiB of what it writes at random."""


def cbsr_aggregate(adjacency: CSR, values: Tensor, indices: Tensor, width: int) -> Tensor:
    """A·X for an X of which row c is zero but for `values[c]` at the columns `indices[c]`. Differentiable in `values`.

    Args:
        adjacency: [rows, columns], binary or weighted.
        values: float32 or float64 [columns, k].
        indices: integers [columns, k] below `width`, different in each row (as `kernels.rtopk` returns them).
        width: of X.

    Returns:
        [rows, width], dense.

    Raises UserError: shapes that do not fit, columns outside the width.
    """
    columns = adjacency.shape[1]
    if values.shape != indices.shape or values.dim() != 2 or values.shape[0] != columns:
        raise UserError(
            f"values has shape {tuple(values.shape)} and indices {tuple(indices.shape)}.",
            why=f"both are [{columns}, k] for a matrix with {columns} columns",
            do="take both from rtopk(x, k)",
        )
    if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= width):
        raise UserError(
            f"indices goes from {int(indices.min())} to {int(indices.max())}.",
            why=f"the width is {width}",
            do="width = x.shape[1], of the x whose values these are",
        )
    return sparse_rows(adjacency, values, indices, width)


@operation("cbsr_aggregate")
def sparse_rows(adjacency: CSR, values: Tensor, indices: Tensor, width: int) -> Tensor:
    """The plain form: the rows are written out, and the dense product does the rest."""
    dense = values.new_zeros(values.shape[0], width).scatter(1, indices.long(), values)
    return matmul(adjacency, dense)


def _pays(adjacency: CSR, values: Tensor, indices: Tensor, width: int) -> bool:
    fits = values.dtype in (torch.float32, torch.float64) and values.numel() > 0 and adjacency.entries > 0
    return fits and width >= NARROW * values.shape[1]


@sparse_rows.fast("cpu", wins=_pays)
def scattered(adjacency: CSR, values: Tensor, indices: Tensor, width: int) -> Tensor:
    """k additions for each entry, into a row that stays in first-level cache; backward k readings."""
    columns = indices.to(torch.uint8 if width <= 256 else torch.int32).contiguous()
    return _CbsrProduct.apply(adjacency, values, columns, width)


class _CbsrProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, adjacency: CSR, values: Tensor, columns: Tensor, width: int) -> Tensor:
        from espalier.sparse import cbsr_kernels

        ctx.adjacency = adjacency
        ctx.columns = columns
        ctx.width = width
        y = BUFFERS.empty((adjacency.shape[0], width), values.dtype)
        weights = _weights(adjacency, values)
        where = (adjacency.indptr, adjacency.indices, weights)
        cbsr_kernels.scatter_rows(y, *where, values.contiguous(), columns, adjacency.cuts)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None, None]:
        return None, _Gathered.apply(ctx.adjacency, gradients[0], ctx.columns), None, None


class _Gathered(torch.autograd.Function):
    """The gradient at the kept places; its own backward is the aggregate again."""

    @staticmethod
    def forward(ctx: Any, adjacency: CSR, gradient: Tensor, columns: Tensor) -> Tensor:
        from espalier.sparse import cbsr_kernels

        ctx.adjacency = adjacency
        ctx.columns = columns
        ctx.width = gradient.shape[1]
        if gradient.shape[1] < NARROWER * columns.shape[1]:
            return product(*turned(adjacency, gradient, adjacency.weights(gradient.dtype))).gather(1, columns.long())
        dvalues = gradient.new_zeros(columns.shape)
        where = (adjacency.indptr, adjacency.indices, _weights(adjacency, gradient))
        pieces = max(GATHERED, -(-dvalues.numel() * dvalues.element_size() // NEAR))
        cuts = torch.linspace(0, len(columns), pieces + 1).long()
        cbsr_kernels.gather_rows(dvalues, *where, gradient.contiguous(), columns, cuts)
        return dvalues

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        return None, _CbsrProduct.apply(ctx.adjacency, gradients[0], ctx.columns, ctx.width), None


def _weights(adjacency: CSR, like: Tensor) -> Tensor:
    weights = adjacency.weights(like.dtype)
    return like.new_empty(0) if weights is None else weights
