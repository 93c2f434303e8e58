"""Direct preference optimization (Rafailov et al., arXiv 2305.18290, equation 7).

The loss of a pair is -log sigmoid(beta * ((log p(chosen) - log r(chosen)) - (log p(rejected) - log r(rejected)))), with
p the model and r the reference: the model before training. Under adapters the reference is the frozen model beside
them, which takes no memory; without, a frozen copy of the model (`Reference`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.language.decoder_workload import Windows
from espalier.language.gpt import GPT, IGNORED
from espalier.language.tune import lora

if TYPE_CHECKING:
    from jaxtyping import Float, Int

ROWS = 2
"""Rows of a pair: the chosen answer, and the rejected one."""
REFERENCE = "reference"
"""The name of the frozen copy in a model that is trained whole."""


class PairLosses(NamedTuple):
    """Of each pair: the loss, by how much the model prefers the chosen answer more than the reference does (times
    beta), and whether it does. All [pairs]."""

    loss: Tensor
    margin: Tensor
    preferred: Tensor


def with_reference(model: GPT) -> GPT:
    """`model` with a frozen copy of itself, which is no part of its state."""
    model.add_module(REFERENCE, copy.deepcopy(model).requires_grad_(False))
    lora.leave_out_frozen(model)
    return model


@contextmanager
def reference(model: GPT) -> Iterator[GPT]:
    """The model before training."""
    held = model._modules.get(REFERENCE)
    if isinstance(held, GPT):
        yield held
        return
    with lora.without_adapters(model):
        yield model


def log_probability(
    logits: Float[Tensor, "rows seq vocabulary"], targets: Int[Tensor, "rows seq"]
) -> Float[Tensor, " rows"]:
    """The sum over each row of log p(target), targets of `IGNORED` left out."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return -losses.view_as(targets).sum(1)


def losses(model: GPT, batch: Windows, beta: float) -> PairLosses:
    """Of the pairs in `batch`: even rows are chosen answers, odd rows rejected ones."""
    ours = log_probability(model(batch.tokens, where=batch.where), batch.targets)
    with torch.no_grad(), reference(model) as before:
        theirs = log_probability(before(batch.tokens, where=batch.where), batch.targets)
    gains = ours - theirs
    margin = beta * (gains[0::2] - gains[1::2])
    return PairLosses(-F.logsigmoid(margin), margin.detach(), margin.detach() > 0)
