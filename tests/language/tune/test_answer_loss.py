"""The fused loss of answers is the plain one, in value and gradients, however many rows are taken at a time."""

from __future__ import annotations

import pytest
import torch

from espalier.language import gpt
from espalier.language.tune import answer_loss


def drawn(share: float, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(3, 11, 8, generator=generator, dtype=dtype).requires_grad_()
    words = torch.randn(37, 8, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(37, (3, 11), generator=generator)
    targets[torch.rand(3, 11, generator=generator) > share] = gpt.IGNORED
    return x, words, targets


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_the_fused_loss_and_its_gradients_are_the_plain_ones(
    monkeypatch: pytest.MonkeyPatch, share: float, rows: int
) -> None:
    monkeypatch.setattr(answer_loss, "CHUNK_BYTES", 4 * 37 * rows)
    x, words, targets = drawn(share)
    plain, fused = gpt.score(x, words, targets), answer_loss.answer_loss(x, words, targets)
    torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(3 * plain, (x, words))
    found = torch.autograd.grad(3 * fused, (x, words))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_frozen_head_gets_no_gradient_and_evaluation_makes_none() -> None:
    x, words, targets = drawn(0.5, torch.float32)
    words.requires_grad_(False)
    answer_loss.answer_loss(x, words, targets).backward()
    assert words.grad is None
    assert x.grad is not None
    with torch.no_grad():
        found = answer_loss.answer_loss(x, words, targets)
    torch.testing.assert_close(found, gpt.score(x, words, targets))


def test_rows_are_scored_apart() -> None:
    x, words, targets = drawn(0.5)
    found = answer_loss.row_log_probability(x, words, targets)
    for row in range(3):
        one = slice(row, row + 1)
        torch.testing.assert_close(-found[row], gpt.score(x[one], words, targets[one]), rtol=1e-12, atol=1e-12)
