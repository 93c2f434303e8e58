"""Split backward: gradients of a stage's inputs first, those of its parameters later (zero bubble, arXiv 2401.10241).

The products that give the gradients of `nn.Linear` weights are put off; gradients of other parameters are cheap, and
are computed with those of the inputs and kept. `torch.distributed.pipelining` finds the split in autograd's graph
instead, for any module, and runs parts of it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Later = list[tuple[nn.Parameter, Callable[[], Tensor]]]
"""Parameters, and what computes a part of the gradient of each."""


class WeightGradients:
    """Has state: what is put off of the backward pass at work; None: nothing is put off."""

    def __init__(self, model: nn.Module) -> None:
        self.later: Later | None = None
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for module in model.modules():
            if type(module) is nn.Linear and "forward" not in vars(module):
                vars(module)["forward"] = partial(self._linear, module)

    def _linear(self, module: nn.Linear, x: Tensor) -> Tensor:
        return _SplitLinear.apply(x, module.weight, module.bias, self)

    def inputs(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> Later:
        """Fills `.grad` of `leaves`. Returns what is left to do for the parameters."""
        self.later = []
        try:
            wanted = [*leaves, *self.parameters]
            gradients_found = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
            for leaf, gradient in zip(leaves, gradients_found, strict=False):
                if gradient is not None:
                    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
            for parameter, gradient in zip(self.parameters, gradients_found[len(leaves) :], strict=True):
                if gradient is not None:
                    self.later.append((parameter, partial(_known, gradient)))
            return self.later
        finally:
            self.later = None


def accumulate(later: Later) -> None:
    """Computes what was put off and adds it to the parameters' `.grad`, as a backward pass does: hooks run."""
    parts: dict[nn.Parameter, list[Callable[[], Tensor]]] = {}
    for parameter, part in later:
        parts.setdefault(parameter, []).append(part)
    roots = [_Gradient.apply(parameter, gradient_parts) for parameter, gradient_parts in parts.items()]
    if roots:
        torch.autograd.backward(roots)


def _known(gradient: Tensor) -> Tensor:
    return gradient


def _product(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1]).to(gradient.dtype)


class _SplitLinear(torch.autograd.Function):
    """`F.linear` whose weight's gradient may be put off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, of: WeightGradients) -> Any:
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.of = of
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of the input, the weight (None where it is put off) and the bias."""
        (gradient,), (x,), weight = gradients, ctx.saved_tensors, ctx.weight
        of_inputs = of_weight = bias = None
        if ctx.needs_input_grad[0]:
            of_inputs = (gradient @ weight.to(gradient.dtype)).to(x.dtype)
        if ctx.needs_input_grad[2]:
            bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        if ctx.needs_input_grad[1] and ctx.of.later is None:
            of_weight = _product(gradient, x)
        elif ctx.needs_input_grad[1]:
            ctx.of.later.append((weight, partial(_product, gradient, x)))
        return of_inputs, of_weight, bias, None


class _Gradient(torch.autograd.Function):
    """A number whose backward pass gives `parameter` its gradient: the sum of `parts`."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, parts: Sequence[Callable[[], Tensor]]) -> Tensor:
        """Zero."""
        ctx.parts = parts
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The sum of the parts."""
        first, *others = (part() for part in ctx.parts)
        return sum(others, start=first), None
