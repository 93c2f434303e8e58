"""Direct preference optimization (Rafailov et al., arXiv 2305.18290, equation 7).

The loss of a pair is -log sigmoid(beta * ((log p(chosen) - log r(chosen)) - (log p(rejected) - log r(rejected)))), with
p the model and r the reference: the model before training. Under adapters the reference is the frozen model beside
them, which takes no memory; without, a frozen copy of the model (`Reference`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.language.decoder_workload import Windows
from espalier.language.gpt import GPT
from espalier.language.tune import lora

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
    """`model`, which scores rows, with a frozen copy of itself, which is no part of its state."""
    model.add_module(REFERENCE, copy.deepcopy(model).requires_grad_(False))
    lora.leave_out_frozen(model)
    return model


@contextmanager
def reference(model: GPT) -> Iterator[GPT]:
    """The model before training."""
    frozen = model._modules.get(REFERENCE)
    if isinstance(frozen, GPT):
        yield frozen
        return
    with lora.without_adapters(model):
        yield model


def losses(model: GPT, batch: Windows, beta: float) -> PairLosses:
    """Of the pairs in `batch`: even rows are chosen answers, odd rows rejected ones."""
    ours = model(batch.tokens, where=batch.where, targets=batch.targets)
    with torch.no_grad(), reference(model) as before:
        theirs = before(batch.tokens, where=batch.where, targets=batch.targets)
    gains = ours - theirs
    margin = beta * (gains[0::2] - gains[1::2])
    return PairLosses(-F.logsigmoid(margin), margin.detach(), margin.detach() > 0)
