"""A nonlinearity with the dropout behind it, plain and compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from espalier.kernels.base import operation
from espalier.kernels.buffer_pool import BUFFERS

KINDS = ("none", "relu", "elu")
LEAST = 1 << 14
"""Values from which on the kernel pays."""


@operation("activated")
def activated(values: Tensor, kind: str, share: float) -> Tensor:
    """`values` through "none", "relu" or "elu"; then a `share` of them dropped, the others scaled up by as much."""
    if kind != "none":
        values = functional.relu(values) if kind == "relu" else functional.elu(values)
    return functional.dropout(values, share) if share else values


def _fits(values: Tensor, kind: str, share: float) -> bool:
    does_something = 0 <= share < 1 and (kind != "none" or share > 0)
    return does_something and values.numel() >= LEAST and values.dtype in (torch.float32, torch.float64)


@activated.fast("cpu", wins=_fits)
def in_one_pass(values: Tensor, kind: str, share: float) -> Tensor:
    """The mask is a hash of a number that is drawn from torch's generator: nothing but that number is kept of it."""
    seed = int(torch.randint(2**62, ())) if share else 0
    return _Activated.apply(values, KINDS.index(kind), (seed, round(share * 2**32)))


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, kind: int, mask: tuple[int, int]) -> Tensor:
        from espalier.kernels import dropout_cpu

        values = values.contiguous()
        out = BUFFERS.empty(tuple(values.shape), values.dtype)
        ctx.kind, ctx.mask = kind, (np.uint64(mask[0]), np.uint64(mask[1]))
        dropout_cpu.activate(values.view(-1), values.view(-1), out.view(-1), *ctx.mask, kind)
        ctx.save_for_backward(out if kind else None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        from espalier.kernels import dropout_cpu

        gradient = gradients[0].contiguous()
        result = ctx.saved_tensors[0] if ctx.kind else gradient
        out = BUFFERS.empty(tuple(gradient.shape), gradient.dtype)
        dropout_cpu.activate_backward(gradient.view(-1), result.view(-1), out.view(-1), *ctx.mask, ctx.kind)
        return out, None, None
