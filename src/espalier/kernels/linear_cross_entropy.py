"""Linear cross entropy: head and loss of some tokens at a time, so that the logits of a batch never exist.

The logits of a chunk become their gradient in place, which is multiplied into the gradients of the stream and of the
head at once: no product is done twice (fused linear cross entropy, Liger Kernel, arXiv 2410.10989, section 3.2; here in
plain products).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

IGNORED = -100
"""A target with this value has no loss."""


def _alone(values: Tensor) -> Tensor:
    return values


class HeadWords(NamedTuple):
    """The rows of a head's matrix that a rank has.

    Attributes:
        matrix: [words, width].
        cap: c of logits that are c · tanh(logits / c); None: there is none.
        first: the number of the first word.
        largest, total: the largest and the sum, over the ranks that share the head, of a tensor that each has.
    """

    matrix: Tensor
    cap: float | None = None
    first: int = 0
    largest: Callable[[Tensor], Tensor] = _alone
    total: Callable[[Tensor], Tensor] = _alone


def linear_cross_entropy(
    x: Float[Tensor, "tokens width"], words: HeadWords, targets: Int[Tensor, " tokens"], chunk: int
) -> Float[Tensor, ""]:
    """Sum of the cross entropies (nats) of `targets`, which count through all words, in at least fp32; the logits of
    `chunk` tokens are there at a time. Gradients are made in the forward pass: a scale of the loss comes too late to
    save small ones."""
    return _Fused.apply(x, words.matrix, words, targets, chunk, torch.is_grad_enabled())


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, words: HeadWords, targets: Tensor, *how: int) -> Tensor:
        chunk, differentiated = how
        matrix = whole.to(x.dtype)
        of_x = torch.empty_like(x) if differentiated and ctx.needs_input_grad[0] else None
        of_words = torch.zeros_like(whole) if differentiated and ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for start in range(0, len(x), chunk):
            part, aims = x[start : start + chunk], targets[start : start + chunk]
            scores, slope = _scores(part, matrix, words.cap)
            scores -= words.largest(scores.amax(1)).unsqueeze(1)
            counted = aims != IGNORED
            inside = counted & (aims >= words.first) & (aims < words.first + len(matrix))
            place = (aims - words.first).where(inside, 0).unsqueeze(1)
            score = scores.gather(1, place).squeeze(1) * inside
            sums, score = words.total(torch.stack([scores.exp_().sum(1), score]))
            total += ((sums.log() - score) * counted).sum()
            if of_x is None and of_words is None:
                continue
            gradient = scores.mul_((counted / sums).unsqueeze(1))
            gradient.scatter_add_(1, place, -inside.to(gradient.dtype).unsqueeze(1))
            gradient = (gradient if slope is None else gradient * slope).to(x.dtype)
            if of_x is not None:
                of_x[start : start + chunk] = gradient @ matrix
            if of_words is not None and of_words.dtype == x.dtype:
                of_words.addmm_(gradient.t(), part)
            elif of_words is not None:
                of_words += gradient.t() @ part
            del scores, gradient, slope  # before the next logits are made
        ctx.save_for_backward(of_x, of_words)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_words = ctx.saved_tensors
        for gradient in (of_x, of_words):
            if gradient is not None:
                gradient.mul_(gradients[0].to(gradient.dtype))
        return of_x, of_words, None, None, None, None


def _scores(part: Tensor, matrix: Tensor, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Logits in at least fp32, which may be written into, and (with `cap`) their derivative by those before it."""
    logits = F.linear(part, matrix)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if cap is None:
        return scores, None
    turned = scores.div_(cap).tanh_()
    return turned * cap, turned.square_().neg_().add_(1)
