"""A feed-forward by chunks is the plain one in value and gradients, keeps its input only, and runs under the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from espalier.language import gpt
from espalier.language.decoder_workload import new_model
from espalier.mechanisms.token_chunks.feed_forward import by_chunks
from espalier.recipe import Gpt

SIZES: dict[str, Any] = {
    "depth": 2, "width": 24, "heads": 4, "kv_heads": 2, "feed_forward": 40, "vocabulary": 23, "context": 16,
    "tied": False, "rope_theta": 1e4, "norm_epsilon": 1e-5,
}  # fmt: skip


def decoder(chunk: int = 0, mode: str = "none", dtype: torch.dtype = torch.float64) -> gpt.GPT:
    model = new_model(Gpt(**SIZES), 3, torch.device("cpu")).to(dtype)
    gpt.recompute(model, mode)
    for block in model.blocks if chunk else ():
        block.feed_forward.forward = by_chunks(block.feed_forward, chunk)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(23, (2, 12), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(model: gpt.GPT, precision: torch.dtype | None = None) -> list[torch.Tensor]:
    """The loss, then the gradient of every parameter."""
    with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
        loss = model.loss_sum(*batch())
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("mode", ["none", "selective", "block"])
@settings(max_examples=6, deadline=None)
@given(chunk=st.integers(1, 25))
def test_loss_and_gradients_are_those_of_all_tokens_at_once(mode: str, chunk: int) -> None:
    for of_chunks, of_whole in zip(gradients(decoder(chunk, mode)), gradients(decoder()), strict=True):
        torch.testing.assert_close(of_chunks, of_whole, rtol=1e-12, atol=1e-13)


def test_under_autocast_they_differ_by_rounding_only() -> None:
    """Sums over chunks are in fp32: what differs is the order in which 16-bit products are added."""
    pairs = zip(
        gradients(decoder(5, "block", torch.float32), torch.bfloat16),
        gradients(decoder(0, "block", torch.float32), torch.bfloat16),
        strict=True,
    )
    for of_chunks, of_whole in pairs:
        assert (of_chunks - of_whole).norm() <= 0.01 * of_whole.norm()


def test_frozen_matrices_get_no_gradient() -> None:
    model = decoder(4)
    model.blocks[0].feed_forward.up.weight.requires_grad_(False)
    model.loss_sum(*batch()).backward()
    assert model.blocks[0].feed_forward.up.weight.grad is None
    assert model.blocks[0].feed_forward.down.weight.grad is not None


def test_a_pass_without_gradients_gives_the_same() -> None:
    with torch.no_grad():
        torch.testing.assert_close(decoder(5)(batch()[0]), decoder()(batch()[0]), rtol=1e-12, atol=1e-12)


class _Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def test_only_the_input_is_kept() -> None:
    module, saved = _Counted(), []
    module.forward = by_chunks(module, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: saved.append(kept.shape) or kept, lambda kept: kept):
        module(torch.randn(2, 5, 8, requires_grad=True))
    assert saved == [(10, 8)]


@pytest.mark.parametrize("mode", ["none", "selective", "block"])
def test_it_is_computed_once_more_and_not_twice(mode: str) -> None:
    """Where a block is computed again, that ends before the feed-forward."""
    rows, model = [], decoder(0, mode)
    for block in model.blocks:
        plain = block.feed_forward.forward
        block.feed_forward.forward = lambda x, plain=plain: rows.append(len(x)) or plain(x)
        block.feed_forward.forward = by_chunks(block.feed_forward, 5)
    gradients(model)
    assert rows == 2 * len(model.blocks) * [5, 5, 5, 5, 2]
