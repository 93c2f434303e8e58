"""A decoder cut over ranks computes what one rank does: loss, logits and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoders import batch, cut, slab, whole
from torch import Tensor

from espalier.comm import Channel
from many_ranks.ranks import ranks


def computed(channel: Channel, regather: bool, mode: str, changes: dict[str, Any]) -> Any:
    model, found = cut(channel, regather, mode, **changes)
    tokens, targets = batch()
    loss = model.loss_sum(tokens, targets)
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.clone()
        holders = found.held_by(name)
        if holders.group is not None:
            holders.group.allreduce([gradient]).wait()
        gradients[name] = gradient
    with torch.no_grad():
        logits = model(tokens)
    return float(loss.detach()), logits, gradients, found


def alone(changes: dict[str, Any]) -> tuple[float, Tensor, dict[str, Tensor]]:
    model = whole(**changes)
    tokens, targets = batch()
    loss = model.loss_sum(tokens, targets)
    loss.backward()
    with torch.no_grad():
        return float(loss.detach()), model(tokens), {name: one.grad for name, one in model.named_parameters()}


EXPERTS = {"experts": 3, "active": 2, "balance": 0.1}
GEMMA2 = {
    "family": "gemma2", "head_size": 8, "window": 3, "attention_cap": 0.5, "logit_cap": 0.7, "attention_scale": 0.3,
    "tied": True,
}  # fmt: skip
GRANITE = {
    "family": "granite", "attention_bias": True, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 0.5,
    "attention_scale": 0.3,
}  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize(
    ("world", "mode", "changes"),
    [
        (2, "none", {}),
        (2, "selective", {"tied": True}),
        (3, "block", {"heads": 6, "kv_heads": 6}),
        (3, "none", {"heads": 4, "kv_heads": 4}),
        (4, "none", {"tied": True}),
        (4, "block", {"heads": 6, "kv_heads": 2}),
        (4, "selective", {"heads": 4, "kv_heads": 1}),
        (2, "none", EXPERTS),
        (3, "block", {**EXPERTS, "kv_heads": 4}),
        (4, "none", {"family": "qwen2"}),
        (4, "block", {"family": "qwen3", "head_size": 10}),
        (2, "selective", {"family": "mistral", "window": 3}),
        (2, "none", {"family": "gemma", "head_size": 8, "tied": True}),
        (4, "block", GEMMA2),
        (2, "block", {**EXPERTS, "family": "qwen2", "shared": 10, "normalized": False}),
        (2, "none", {**EXPERTS, "family": "qwen3"}),
        (2, "none", GRANITE),
        (4, "block", {**GEMMA2, "family": "gemma3_text", "attention_cap": None, "local_theta": 7.0}),
        (2, "selective", {"family": "glm4", "head_size": 8, "rotary": 0.5, "attention_bias": True}),
    ],
)  # fmt: skip
def test_loss_logits_and_gradients_are_those_of_one_rank(
    world: int, mode: str, regather: bool, changes: dict[str, Any]
) -> None:
    loss, logits, gradients = alone(changes)
    for own, own_logits, found, cut_as in ranks(world, computed, regather, mode, changes):
        assert own == pytest.approx(loss, rel=1e-13)
        torch.testing.assert_close(own_logits, logits, rtol=1e-11, atol=1e-12)
        assert found.keys() == gradients.keys()
        for name, gradient in found.items():
            wanted = slab(gradients[name], name, gradient, cut_as)
            torch.testing.assert_close(
                gradient, wanted, rtol=1e-10, atol=1e-12, msg=lambda told, n=name: f"{n}: {told}"
            )
