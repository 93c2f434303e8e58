"""Tall matmul: a tall matrix times a small one, as a graph layer maps its rows; plain and compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from espalier.kernels.base import operation
from espalier.kernels.buffer_pool import BUFFERS

LEAST = 1024
"""Rows from which on the kernel pays: it takes some 30 µs to be called."""
MOST = 1 << 16
"""Values of the small matrix that second-level cache holds beside the rows."""


@operation("tall_product")
def tall_product(x: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
    """x · weightᵀ + start: x [rows, inputs], weight [outputs, inputs], start [outputs] or [rows, outputs]."""
    if start is None or start.dim() == 1:
        return functional.linear(x, weight, start)
    return start + functional.linear(x, weight)


def _pays(x: Tensor, weight: Tensor, start: Tensor | None = None) -> bool:
    kinds = {x.dtype, weight.dtype, x.dtype if start is None else start.dtype}
    fits = kinds in ({torch.float32}, {torch.float64}) and x.dim() == 2
    return fits and len(x) >= LEAST and 0 < weight.numel() <= MOST and not torch.is_autocast_enabled("cpu")


@tall_product.fast("cpu", wins=_pays)
def in_blocks(x: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
    """Six rows at a time; so are the gradients."""
    return _Tall.apply(x, weight, start)


class _Tall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, start: Tensor | None) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.shared = start is None or start.dim() == 1
        return _multiplied(x, weight.t().contiguous(), start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        from espalier.kernels import tall_matmul_cpu

        gradient = gradients[0].contiguous()
        x, weight = ctx.saved_tensors
        dx = _multiplied(gradient, weight.contiguous(), None) if ctx.needs_input_grad[0] else None
        dstart = gradient if ctx.needs_input_grad[2] and not ctx.shared else None
        if not ctx.needs_input_grad[1] and not (ctx.shared and ctx.needs_input_grad[2]):
            return dx, None, dstart
        pieces, outputs = tall_matmul_cpu.PIECES, gradient.shape[1]
        dweight, sums = x.new_empty(pieces, x.shape[1], outputs), x.new_empty(pieces, outputs)
        tall_matmul_cpu.gradients(dweight, sums, x, gradient, tall_matmul_cpu.tiles(outputs, x.element_size()))
        if ctx.shared and ctx.needs_input_grad[2]:
            dstart = torch.from_numpy(sums.numpy().sum(0))  # by NumPy: torch would wake threads, which spin afterwards
        return dx, torch.from_numpy(dweight.numpy().sum(0)).t(), dstart


def _multiplied(x: Tensor, matrix: Tensor, start: Tensor | None) -> Tensor:
    """x · matrix + start, without autograd."""
    from espalier.kernels import tall_matmul_cpu

    y = BUFFERS.empty((len(x), matrix.shape[1]), x.dtype)
    step = -1 if start is None else int(start.dim() == 2)
    begin = matrix if start is None else start.reshape(-1, matrix.shape[1]).contiguous()
    tall_matmul_cpu.multiply(y, x, matrix, begin, step, tall_matmul_cpu.tiles(matrix.shape[1], x.element_size()))
    return y
