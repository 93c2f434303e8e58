"""The loss by chunks over ranks that share the words is that of one rank, whole; in two runs to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoders import batch, cut, slab, whole

from espalier.comm import Channel
from many_ranks.ranks import ranks


def computed(channel: Channel, regather: bool, chunk: int, changes: dict[str, Any]) -> Any:
    """(loss, gradients, how the model is cut) of this rank."""
    model, model_cut = cut(channel, regather, "block", **changes)
    model.loss_chunk = chunk
    tokens, targets = batch()
    loss = model.loss_sum(tokens, targets)
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = parameter.grad.clone()
        group = model_cut.held_by(name).group
        if group is not None:
            group.allreduce([gradients[name]]).wait()
    return float(loss.detach()), gradients, model_cut


@pytest.mark.sampled(4)
@pytest.mark.parametrize("chunk", [1, 8, 30])
@pytest.mark.parametrize(
    ("regather", "changes"),
    [
        (False, {}),
        (True, {"tied": True}),
        (False, {"experts": 3, "active": 2, "balance": 0.1}),
        (False, {"family": "gemma2", "head_size": 8, "window": 3, "logit_cap": 0.7, "tied": True}),
    ],
    ids=["untied", "tied and gathered again", "experts", "logits with a cap"],
)
def test_two_ranks_have_the_loss_and_gradients_of_one(regather: bool, changes: dict[str, Any], chunk: int) -> None:
    model = whole(**changes)
    loss = model.loss_sum(*batch())
    loss.backward()
    runs = [ranks(2, computed, regather, chunk, changes) for _ in range(2)]
    for (found, gradients, model_cut), (again, same, _) in zip(*runs, strict=True):
        assert found == pytest.approx(float(loss.detach()), rel=1e-12)
        assert found == again
        for name, parameter in model.named_parameters():
            wanted = slab(parameter.grad, name, gradients[name], model_cut)
            torch.testing.assert_close(gradients[name], wanted, rtol=1e-10, atol=1e-12)
            assert torch.equal(gradients[name], same[name])
