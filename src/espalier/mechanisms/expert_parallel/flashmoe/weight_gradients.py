"""Gradients of the experts' parameters: products of weight matrices are put off until nothing else is to do.

What others wait for, the gradients of rows, goes out first; while this rank waits, it computes the gradient of a matrix
from the rows of all tiles in one product, as zero bubble does with micro-batches (arXiv 2401.10241). A product for each
tile would read and write the matrix as often. Everything is in a fixed order of tiles, whatever the order in which
these ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from espalier.mechanisms.expert_parallel.flashmoe.protocol import TileTask


class Late(NamedTuple):
    """A product that is put off: gradient [rows, out] and input [rows, in] of a weight [out, in]."""

    weight: nn.Parameter
    gradient: Tensor
    x: Tensor


class PutOff(TorchFunctionMode):
    """Within it, `F.linear` by a parameter puts off that one's gradient. Has state: what the backward pass at work has
    put off."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[Late] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls `func`."""
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if isinstance(weight, nn.Parameter) and weight.requires_grad and torch.is_grad_enabled():
            return _LinearWithoutWeightGradient.apply(input, weight, bias, self)
        return F.linear(input, weight, bias)


class _LinearWithoutWeightGradient(torch.autograd.Function):
    """`F.linear` whose backward pass leaves the weight's gradient to `PutOff`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, late: PutOff) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.late = late
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of the input and the bias."""
        (gradient,), (x,), weight = gradients, ctx.saved_tensors, ctx.weight
        of_x = (gradient @ weight.to(gradient.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        # Without its graph, which would lead back to what is put off: a cycle that only the collector frees.
        x = x.detach().flatten(0, -2).to(gradient.dtype)
        ctx.late.late.append(Late(weight, gradient.flatten(0, -2), x))
        return of_x, None, bias, None


@dataclass
class _Expert:
    """The tiles of an expert. Has state: how many have not run, and what those that have brought."""

    left: int = 0
    late: dict[TileTask, list[Late]] = field(default_factory=dict)


class FixedOrderSum:
    """Gradients of parameters, added up in a fixed order of tiles whatever the order in which these ran. Has state: the
    sums so far, and what has to wait for its turn.

    Args:
        order: of all tiles, with the expert of each.
    """

    def __init__(self, order: Mapping[TileTask, int], parameters: Sequence[nn.Parameter]) -> None:
        self._order, self._of, self._turn, self._parameters = list(order), order, 0, parameters
        self._waiting: dict[TileTask, Sequence[Tensor | None]] = {}
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._experts: dict[int, _Expert] = {}
        self._ready: list[int] = []
        self._products: dict[int, dict[nn.Parameter, Tensor]] = {}
        for expert in order.values():
            self._experts.setdefault(expert, _Expert()).left += 1

    def add(self, task: TileTask, gradients: Sequence[Tensor | None], late: list[Late]) -> None:
        """What one tile gives: gradients (None for parameters of other experts, and of what is put off)."""
        expert = self._experts[self._of[task]]
        expert.late[task] = late
        expert.left -= 1
        if not expert.left:
            self._ready.append(self._of[task])
        self._waiting[task] = gradients
        while self._turn < len(self._order) and self._order[self._turn] in self._waiting:
            of_task = self._waiting.pop(self._order[self._turn])
            for index, gradient in enumerate(of_task):
                if gradient is not None:
                    total = self._sums[index]
                    self._sums[index] = gradient if total is None else total.add_(gradient)
            self._turn += 1

    def spare(self) -> bool:
        """Computes what is put off of an expert whose tiles have all run; False: there is none."""
        if not self._ready:
            return False
        number = self._ready.pop()
        late = self._experts.pop(number).late
        parts: dict[nn.Parameter, list[Late]] = {}
        for task in self._order:
            for part in late.get(task, ()):
                parts.setdefault(part.weight, []).append(part)
        self._products[number] = {weight: _product(late_parts).to(weight.dtype) for weight, late_parts in parts.items()}
        return True

    def total(self) -> list[Tensor]:
        """The sums, after `spare` has nothing left; zeros for an expert without tokens."""
        for number in sorted(self._products):
            for index, parameter in enumerate(self._parameters):
                product = self._products[number].get(parameter)
                total = self._sums[index]
                if product is not None:
                    self._sums[index] = product if total is None else total + product
        pairs = zip(self._sums, self._parameters, strict=True)
        return [torch.zeros_like(parameter) if gradient is None else gradient for gradient, parameter in pairs]


def _product(parts: Sequence[Late]) -> Tensor:
    """The gradient of a weight from all its rows."""
    if len(parts) == 1:
        return parts[0].gradient.mT @ parts[0].x
    return torch.cat([part.gradient for part in parts]).mT @ torch.cat([part.x for part in parts])
