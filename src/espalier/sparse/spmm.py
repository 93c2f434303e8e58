"""SpMM: the differentiable product of a sparse matrix (by rows) with a dense one, plain and compiled.

The compiled form sums in the order of the entries, so the result does not depend on the number of threads.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from espalier.errors import UserError
from espalier.kernels.base import operation
from espalier.kernels.buffer_pool import BUFFERS
from espalier.sparse.csr import CSR

KERNEL_TYPES = (torch.float32, torch.float64)


class CompressedMatrix(Protocol):
    """A binary matrix in a format of its own, such as `CBM`."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        ...

    def product(self, x: Tensor) -> Tensor:
        """A·X."""
        ...


def matmul(
    adjacency: CSR | CompressedMatrix, x: Tensor, values: Tensor | None = None, start: Tensor | None = None
) -> Tensor:
    """A·X + start: row i of A·X is the (weighted) sum of the rows of X that row i of A names. Twice differentiable.

    Args:
        adjacency: [rows, columns]; CSR or CBM.
        x: float [columns] or [columns, ...]; half precision is summed in float32. Gradient by the transpose.
        values: [entries], instead of the matrix's own values (CSR only), in the order of its entries. Has a gradient.
        start: [width] or [rows, width] of a two-dimensional result, added to it. Has a gradient.

    Returns:
        [rows] or [rows, ...], of the type of `x`.

    Raises UserError: sizes that do not fit, numbers that are not real floats, `values` for a CBM.
    """
    rows, columns = adjacency.shape
    for name, one in (("x", x), ("values", values)):
        if one is not None and not isinstance(one, Tensor):
            raise UserError(f"{name} is {type(one).__name__}.", why="a product takes tensors", do="torch.as_tensor(…)")
    if x.dim() == 0 or x.shape[0] != columns:
        raise UserError(
            f"x has shape {tuple(x.shape)}.",
            why=f"a matrix {rows} x {columns} needs [{columns}, ...]",
            do="one row of x for each column of the matrix",
        )
    for name, one in (("x", x), ("values", values)):
        if one is not None and not one.is_floating_point():
            raise UserError(f"{name} is of type {str(one.dtype).removeprefix('torch.')}.", do=f"{name}.float()")
    if not isinstance(adjacency, CSR):
        if values is not None:
            raise UserError("A CBM has no values of its own to replace.", do="use the CSR matrix: cbm.to_csr()")
        found = adjacency.product(x)
        return found if start is None else found + start
    if values is not None and values.shape != (adjacency.entries,):
        raise UserError(
            f"values has shape {tuple(values.shape)}.",
            why=f"the matrix has {adjacency.entries} entries",
            do="give one for each, in the order of its entries",
        )
    weights = adjacency.values if values is None else values
    dense = as_columns(x)
    weights = None if weights is None else weights.to(dense.dtype)
    if start is not None and (start.dtype != dense.dtype or start.shape[-1] != dense.shape[1]):
        return shaped_as(x, csr_matmul(adjacency, dense, weights)) + start
    return shaped_as(x, csr_matmul(adjacency, dense, weights, start))


def as_columns(x: Tensor) -> Tensor:
    """`x` as the kernels take it: two dims, float32 or float64."""
    dense = x if x.dim() == 2 else x.reshape(x.shape[0], math.prod(x.shape[1:]))
    return dense if x.dtype in KERNEL_TYPES else dense.float()


def shaped_as(x: Tensor, y: Tensor) -> Tensor:
    """The product `y` [rows, width] with the type and the further dims of `x`."""
    shaped = y if x.dim() == 2 else y.reshape(len(y), *x.shape[1:])
    return shaped if y.dtype == x.dtype else shaped.to(x.dtype)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd has to see what is done with them: its bookkeeping takes as long as a small product's tenth."""
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


@operation("csr_matmul")
def csr_matmul(adjacency: CSR, x: Tensor, values: Tensor | None, start: Tensor | None = None) -> Tensor:
    """The plain form: every message is written out, then added to its row."""
    messages = x[adjacency.indices.long()]
    if values is not None:
        messages = messages * values[:, None]
    found = x.new_zeros(adjacency.shape[0], x.shape[1]).index_add(0, adjacency.rows, messages)
    return found if start is None else found + start


@csr_matmul.fast("cpu", wins=lambda adjacency, x, *_: adjacency.entries > 0 and x.shape[1] > 0)
def summed_in_registers(adjacency: CSR, x: Tensor, values: Tensor | None, start: Tensor | None = None) -> Tensor:
    """By the kernels of `rows`; the gradients by them too, with the transposed matrix."""
    if not needs_gradient(x, values, start):
        return product(adjacency, x, values, start)
    result: Tensor = _Product.apply(adjacency, x, values, start)
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, adjacency: CSR, x: Tensor, values: Tensor | None, start: Tensor | None) -> Tensor:
        ctx.adjacency, ctx.shared = adjacency, start is not None and start.dim() == 1
        ctx.save_for_backward(x if values is not None and values.requires_grad else None, values)
        return product(adjacency, x, values, start)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        (gradient,) = gradients
        x, values = ctx.saved_tensors
        dx = dvalues = None
        if ctx.needs_input_grad[1]:
            dx = summed_in_registers(*turned(ctx.adjacency, gradient, values))
        if ctx.needs_input_grad[2]:
            dvalues = _Dots.apply(ctx.adjacency, gradient, x)
        dstart = gradient if ctx.needs_input_grad[3] else None
        if dstart is not None and ctx.shared:
            dstart = _column_sums(dstart)
        return None, dx, dvalues, dstart


def _column_sums(x: Tensor) -> Tensor:
    if x.requires_grad:
        return x.sum(0)
    from espalier.kernels import tall_matmul_cpu

    return torch.from_numpy(tall_matmul_cpu.column_sums(x.contiguous().numpy()))


class _Dots(torch.autograd.Function):
    """values[e] = <left[row of e], right[column of e]>."""

    @staticmethod
    def forward(ctx: Any, adjacency: CSR, left: Tensor, right: Tensor) -> Tensor:
        from espalier.sparse import sddmm_kernels

        ctx.adjacency = adjacency
        ctx.save_for_backward(left, right)
        values = left.new_empty(adjacency.entries)
        cuts = adjacency.cuts
        sddmm_kernels.dot_rows(values, adjacency.indptr, adjacency.indices, left.contiguous(), right.contiguous(), cuts)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        (gradient,) = gradients
        left, right = ctx.saved_tensors
        dleft = summed_in_registers(ctx.adjacency, right, gradient)
        return None, dleft, summed_in_registers(*turned(ctx.adjacency, left, gradient))


def turned(adjacency: CSR, x: Tensor, values: Tensor | None) -> tuple[CSR, Tensor, Tensor | None]:
    """The arguments of the product with the transposed matrix; `values` in the order of `adjacency`'s entries."""
    pattern, order = adjacency.transpose
    if values is not None and values is adjacency.values:
        return pattern, x, adjacency.transposed.values
    return pattern, x, None if values is None else values[order]


def product(adjacency: CSR, x: Tensor, values: Tensor | None, start: Tensor | None = None) -> Tensor:
    """A·X + start by the kernels, without autograd. `x` float32 or float64 [columns, width]."""
    from espalier.sparse import spmm_kernels

    x = x.contiguous()
    y = BUFFERS.empty((adjacency.shape[0], x.shape[1]), x.dtype)
    tiles = spmm_kernels.tiles(x.shape[1], x.element_size())
    indptr, indices = adjacency.arrays
    begin = x if start is None else start.reshape(-1, x.shape[1]).contiguous()
    rest = (x, begin, -1 if start is None else start.dim() - 1, adjacency.cuts, tiles)
    if values is None:
        spmm_kernels.add_rows(y, indptr, indices, *rest)
    else:
        spmm_kernels.add_weighted_rows(y, indptr, indices, values.contiguous(), *rest)
    return y
