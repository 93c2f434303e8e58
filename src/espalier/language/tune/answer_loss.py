"""Cross entropy of answers from the residual stream: the head is asked about answers only, some rows at a time.

The logits of a few hundred tokens are made, turned into their gradient in place, and multiplied into the gradients of
the stream and of the head at once, so that neither the logits of a batch nor their gradient ever exist (fused linear
cross entropy, Liger Kernel, arXiv 2410.10989, section 3.2; here in plain products). Prompts cost nothing in the head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.language.attention_variants import capped
from espalier.language.gpt import IGNORED
from espalier.recipe.cost import Anatomy

if TYPE_CHECKING:
    from jaxtyping import Float, Int

CHUNK_BYTES = 64 * 2**20
"""Of the logits that are held at a time."""


def answer_loss(
    x: Float[Tensor, "batch seq width"],
    words: Float[Tensor, "vocabulary width"],
    targets: Int[Tensor, "batch seq"],
    cap: float | None = None,
) -> Float[Tensor, ""]:
    """As `gpt.score`: the sum of the cross entropies (nats) of `targets` that are not `IGNORED`, in at least fp32."""
    counted = targets != IGNORED
    return _Fused.apply(x[counted], words, targets[counted], cap)


def row_log_probability(
    x: Float[Tensor, "rows seq width"],
    words: Float[Tensor, "vocabulary width"],
    targets: Int[Tensor, "rows seq"],
    cap: float | None = None,
) -> Float[Tensor, " rows"]:
    """The sum over each row of log p(target), targets of `IGNORED` left out."""
    counted = targets != IGNORED
    losses = F.cross_entropy(capped(_wide(F.linear(x[counted], words)), cap), targets[counted], reduction="none")
    rows = torch.arange(len(targets), device=targets.device)[:, None].expand_as(targets)[counted]
    return losses.new_zeros(len(targets)).index_add(0, rows, -losses)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def work(anatomy: Anatomy, vocabulary: int, width: int) -> Anatomy:
    """`anatomy` of a decoder whose head keeps no logits: a chunk of them and its copy, and the head's gradient."""
    most = 2.0 * CHUNK_BYTES + 4.0 * vocabulary * width
    return replace(anatomy, rest=replace(anatomy.rest, transient=np.minimum(anatomy.rest.transient, most)))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, words: Tensor, targets: Tensor, cap: float | None) -> Tensor:
        needs = ctx.needs_input_grad
        of_x = torch.empty_like(x) if needs[0] else None
        of_words = torch.zeros_like(words) if needs[1] else None
        total = torch.zeros((), dtype=_wide(x[:0]).dtype, device=x.device)
        rows = max(1, CHUNK_BYTES // (4 * len(words)))
        for start in range(0, len(x), rows):
            part, wanted = x[start : start + rows], targets[start : start + rows]
            logits = capped(_wide(F.linear(part, words.to(part.dtype))), cap)
            slope = None if cap is None else 1 - (logits / cap).square()
            norm = logits.logsumexp(1, keepdim=True)
            total += (norm - logits.gather(1, wanted[:, None])).sum()
            if of_x is None and of_words is None:
                continue
            gradient = logits.sub_(norm).exp_()  # softmax, then less 1 at the target
            gradient[torch.arange(len(wanted), device=x.device), wanted] -= 1
            gradient = (gradient if slope is None else gradient * slope).to(part.dtype)
            if of_x is not None:
                of_x[start : start + rows] = gradient @ words.to(part.dtype)
            if of_words is not None:
                of_words.addmm_(gradient.t().to(words.dtype), part.to(words.dtype))
        ctx.save_for_backward(of_x, of_words)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        of_x, of_words = ctx.saved_tensors
        for gradient in (of_x, of_words):
            if gradient is not None:
                gradient.mul_(gradients[0].to(gradient.dtype))
        return of_x, of_words, None, None
