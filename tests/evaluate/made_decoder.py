"""A tiny decoder far from uniform, and likelihoods token by token: what tests of language tasks share."""

from __future__ import annotations

import torch

from espalier.language import gpt
from espalier.recipe import Gpt

OPTIONS = Gpt(
    depth=2, width=16, heads=2, kv_heads=1, feed_forward=24, vocabulary=257, context=24, tied=True
)  # a tiny decoder


def decoder() -> gpt.GPT:
    model = gpt.GPT(OPTIONS)
    gpt.initialise(model, 5)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 8  # far from uniform, so that mistakes show
    return model.double().eval()


def plainly(model: gpt.GPT, head: list[int], tail: list[int]) -> tuple[float, bool]:
    """Token by token, each with a forward pass of its own."""
    ids, total, greedy = [*head, *tail], 0.0, True
    for at in range(len(head), len(ids)):
        before = ids[:at]
        if len(ids) - 1 > model.size.context:  # what is cut is cut for all tokens alike
            first = len(ids) - 1 - model.size.context
            if at <= first:
                continue
            before = ids[first:at]
        logits = model(torch.tensor([before]))[0, -1]
        total += float(logits.log_softmax(-1)[ids[at]])
        greedy &= int(logits.argmax()) == ids[at]
    return total, greedy
