"""Cross entropy of answers from the residual stream: the head is asked about answers only, some rows at a time.

See `kernels.linear_cross_entropy`. Prompts cost nothing in the head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.kernels.linear_cross_entropy import IGNORED, HeadWords, linear_cross_entropy
from espalier.language.attention_variants import capped, wide
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
    chunk = max(1, CHUNK_BYTES // (4 * len(words)))
    return linear_cross_entropy(x[counted], HeadWords(words, cap), targets[counted], chunk)


def row_log_probability(
    x: Float[Tensor, "rows seq width"],
    words: Float[Tensor, "vocabulary width"],
    targets: Int[Tensor, "rows seq"],
    cap: float | None = None,
) -> Float[Tensor, " rows"]:
    """The sum over each row of log p(target), targets of `IGNORED` left out."""
    counted = targets != IGNORED
    logits = capped(wide(F.linear(x[counted], words.to(x.dtype))), cap)
    losses = F.cross_entropy(logits, targets[counted], reduction="none")
    rows = torch.arange(len(targets), device=targets.device)[:, None].expand_as(targets)[counted]
    return losses.new_zeros(len(targets)).index_add(0, rows, -losses)


def work(anatomy: Anatomy, head: float) -> Anatomy:
    """`anatomy` of a decoder whose head keeps no logits: a chunk of them and its copy, and the `head` bytes of the
    head's gradient or copy."""
    most = 2.0 * CHUNK_BYTES + head
    return replace(anatomy, rest=replace(anatomy.rest, transient=np.minimum(anatomy.rest.transient, most)))
