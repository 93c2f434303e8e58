"""Feed-forward of some tokens at a time: only its input is kept, and backward computes each chunk again.

As activation checkpointing (Chen et al., arXiv 1604.06174) of each chunk by itself. Inside a block that is computed
again too, its input is the last that is kept, so that the block's recomputation ends before the feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Float


def by_chunks(module: nn.Module, chunk: int) -> Callable[[Tensor], Tensor]:
    """A forward for `module`, which takes each token by itself, of at most `chunk` tokens at a time."""
    plain = module.forward

    def forward(x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        tokens = x.flatten(0, -2)
        entry = _Entry()
        answers = _Chunks.apply(_Input.apply(tokens, entry), plain, chunk, entry, *module.parameters())
        return answers.unflatten(0, x.shape[:-1])

    return forward


class _Entry:
    """Where backward finds the input. Has state: the node that keeps it."""

    node: Any = None


class _Input(torch.autograd.Function):
    """Keeps the input, before anything is computed with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, entry: _Entry) -> Tensor:
        entry.node = ctx
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], chunk: int, entry: _Entry, *parameters: nn.Parameter
    ) -> Tensor:
        ctx.run, ctx.chunk, ctx.entry, ctx.parameters = run, chunk, entry, parameters
        ctx.autocast = _autocast(x)
        with ctx.autocast:
            answers = torch.empty(0)
            for start in range(0, len(x), chunk):
                part = run(x[start : start + chunk].detach())
                if start == 0:
                    answers = part.new_empty(len(x), part.shape[-1])
                answers[start : start + chunk] = part
        return answers

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.entry.node.saved_tensors
        of_x = torch.empty_like(x)
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        trained = [parameter for parameter in ctx.parameters if parameter.requires_grad]
        for start in range(0, len(x), ctx.chunk):
            part = x[start : start + ctx.chunk].detach().requires_grad_()
            with torch.enable_grad(), ctx.autocast:
                answer = ctx.run(part)
            wanted = gradients[0][start : start + ctx.chunk]
            of_x[start : start + ctx.chunk], *more = torch.autograd.grad(answer, (part, *trained), wanted)
            _add(sums, ctx.parameters, more)
            del answer, more  # before the next are made
        return of_x, None, None, None, *sums


def _add(sums: list[Tensor | None], parameters: Sequence[nn.Parameter], more: Sequence[Tensor]) -> None:
    """Adds the gradients `more` of those `parameters` that have any."""
    places = (place for place, parameter in enumerate(parameters) if parameter.requires_grad)
    for place, gradient in zip(places, more, strict=True):
        total = sums[place]
        sums[place] = gradient if total is None else total.add_(gradient)


def _autocast(x: Tensor) -> torch.autocast:
    """The precision of the pass under way. Casts of weights are not kept: those of a pass without gradients have no
    way back to the weights."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind)
    enabled = torch.is_autocast_enabled(kind)
    return torch.autocast(kind, dtype, enabled, cache_enabled=False)
