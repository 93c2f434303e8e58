"""The decoder's elementwise operations with backward passes written by hand: less traffic, fewer bytes kept.

PyTorch's CPU build composes RMSNorm from eight kernels, and autograd keeps every factor of a product. Each function
here keeps only its inputs; its plain form stands in the first line of its docstring and is the test's reference.
Without gradients it is no autograd function, whose call takes longer than its work on one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


def rms_norm(x: Float[Tensor, "*batch width"], weight: Float[Tensor, " width"], epsilon: float) -> Tensor:
    """`F.rms_norm(x, (width,), weight, epsilon)`; PyTorch's own kernel except in fp32 and fp64 on the CPU."""
    if x.device.type == "cpu" and x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64):
        return _RmsNorm.apply(x, weight, epsilon) if torch.is_grad_enabled() else _normed(x, weight, epsilon)[0]
    return F.rms_norm(x, weight.shape, weight, epsilon)


def swiglu(gate: Float[Tensor, "*batch inner"], up: Float[Tensor, "*batch inner"]) -> Float[Tensor, "*batch inner"]:
    """`F.silu(gate) * up`; silu(gate) is computed again in backward instead of kept."""
    return _Swiglu.apply(gate, up) if torch.is_grad_enabled() else F.silu(gate).mul_(up)


def rotate(
    heads: Float[Tensor, "batch seq heads head"],
    cos: Float[Tensor, "*batch seq half"],
    sin: Float[Tensor, "*batch seq half"],
) -> Float[Tensor, "batch seq heads head"]:
    """`cat(a * cos - b * sin, b * cos + a * sin)` with a, b the halves of each head.

    Rotary positions (RoFormer, arXiv 2104.09864) in the half-split order of Hugging Face's Llama, so that its weights
    and ours are the same numbers in the same order.
    """
    turns = cos.unsqueeze(-2).to(heads.dtype), sin.unsqueeze(-2).to(heads.dtype)
    return _Rotate.apply(heads, *turns) if torch.is_grad_enabled() else _turned(heads, *turns)


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The normalised x, and what it was scaled by."""
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    scale = square.div_(x.shape[-1]).add_(epsilon).rsqrt_()
    return (x * scale).mul_(weight), scale


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        normal, scale = _normed(x, weight, epsilon)
        ctx.save_for_backward(x, weight, scale)
        return normal

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        rows = (gradient * x).flatten(0, -2)
        of_weight = scale.flatten() @ rows
        # d scale / d x = -scale^3 x / width
        pull = (rows @ weight).view_as(scale).mul_(scale).mul_(scale).div_(x.shape[-1])
        return (gradient * weight).addcmul_(x, pull, value=-1).mul_(scale), of_weight, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(gradient * up, gate), F.silu(gate).mul_(gradient)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, -sin), None, None


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    result = heads.clone(memory_format=torch.contiguous_format)
    first, second = result.chunk(2, -1)
    crossed = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(crossed)
    return result
