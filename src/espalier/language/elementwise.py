"""The decoder's elementwise operations with backward passes written by hand: fewer passes over memory, fewer kept bytes.

PyTorch's CPU build composes RMSNorm from eight kernels, and autograd keeps every factor of a product. Each function
here keeps only its input; its plain form is the first line of its docstring and the test's reference.
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
        return _RmsNorm.apply(x, weight, epsilon)
    return F.rms_norm(x, weight.shape, weight, epsilon)


def swiglu(gate_up: Float[Tensor, "*batch both"]) -> Tensor:
    """`F.silu(gate) * up`, where `gate_up` holds the gate in its first half of columns, `up` in its second."""
    return _Swiglu.apply(gate_up)


def rotate(
    joint: Float[Tensor, "batch seq joint head"],
    cos: Float[Tensor, "seq half"],
    sin: Float[Tensor, "seq half"],
    heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key, value `[batch, seq, heads, head]` of the joint projection, query and key turned by their positions.

    Rotary positions (RoFormer, arXiv 2104.09864) in the half-split order of Hugging Face's Llama: with a, b the halves
    of a head, `cat(a cos - b sin, b cos + a sin)`. One copy serves all three, and the joint projection is not kept.
    """
    return _Rotate.apply(joint, cos.unsqueeze(1), sin.unsqueeze(1), heads, kv_heads)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = square.div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

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
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        result = torch.empty_like(gate_up)
        of_gate, of_up = result.chunk(2, -1)
        torch.mul(F.silu(gate), gradient, out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return result


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, joint: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.turned = heads + kv_heads
        result = joint.clone()
        _turn(result[:, :, : ctx.turned], cos, sin)
        query, key, value = result.split([heads, kv_heads, kv_heads], 2)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        result = torch.cat(gradients, 2)
        _turn(result[:, :, : ctx.turned], cos, -sin)
        return result, None, None, None, None


def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turns `[batch, seq, heads, head]` in place."""
    first, second = heads.chunk(2, -1)
    crossed = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(crossed)
