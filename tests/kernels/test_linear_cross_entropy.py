"""Head and loss by chunks of tokens are those of all tokens at once, in value and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from espalier.kernels.linear_cross_entropy import IGNORED, HeadWords, linear_cross_entropy
from espalier.language import gpt

TOKENS, WIDTH, WORDS = 13, 8, 37


def drawn(seed: int, dtype: torch.dtype, ignored: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(1, TOKENS, WIDTH, generator=draw, dtype=torch.float64)
    words = torch.randn(WORDS, WIDTH, generator=draw, dtype=torch.float64)
    targets = torch.randint(WORDS, (1, TOKENS), generator=draw)
    targets[torch.rand(1, TOKENS, generator=draw) < ignored] = IGNORED
    return x.to(dtype).requires_grad_(), words.to(dtype).requires_grad_(), targets


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    chunk=st.integers(1, TOKENS + 3),
    cap=st.sampled_from([None, 2.0]),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    bounds=st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-5)]),
)
def test_loss_and_gradients_are_those_of_all_tokens_at_once(
    seed: int, chunk: int, cap: float | None, ignored: float, bounds: tuple[torch.dtype, float]
) -> None:
    dtype, near = bounds
    x, words, targets = drawn(seed, dtype, ignored)
    whole, chunked = gpt.score(x, words, targets, cap), gpt.score(x, words, targets, cap, chunk)
    torch.testing.assert_close(chunked, whole, rtol=near, atol=near)
    pairs = zip(torch.autograd.grad(3 * chunked, (x, words)), torch.autograd.grad(3 * whole, (x, words)), strict=True)
    for of_chunks, of_whole in pairs:
        torch.testing.assert_close(of_chunks, of_whole, rtol=10 * near, atol=10 * near)


def test_under_autocast_it_is_as_near_to_fp64_as_the_whole_form() -> None:
    x, words, targets = drawn(3, torch.float32, 0.2)
    exact = torch.autograd.grad(gpt.score(x.double(), words.double(), targets), (x, words))

    def error(chunk: int) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = gpt.score(x.bfloat16(), words, targets, None, chunk)
        gradients = torch.autograd.grad(loss, (x, words))
        return max(float((near - true).norm() / true.norm()) for near, true in zip(gradients, exact, strict=True))

    assert error(4) < 1.5 * error(0) < 0.02


@pytest.mark.parametrize("differentiated", [False, True])
def test_logits_are_never_those_of_more_than_a_chunk(monkeypatch: pytest.MonkeyPatch, differentiated: bool) -> None:
    rows, plain = [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, words: rows.append(len(x)) or plain(x, words))
    x, words, targets = drawn(1, torch.float32, 0.0)
    with torch.set_grad_enabled(differentiated):
        loss = linear_cross_entropy(x.flatten(0, 1), HeadWords(words), targets.flatten(), 5)
    if differentiated:
        loss.backward()
    assert rows == [5, 5, 3]  # no product is done twice


def test_without_gradients_none_are_made() -> None:
    x, words, targets = drawn(1, torch.float32, 0.0)
    products = FlopCounterMode(display=False)
    with products, torch.no_grad():
        linear_cross_entropy(x.flatten(0, 1), HeadWords(words), targets.flatten(), 5)
    assert products.get_total_flops() == 2 * TOKENS * WIDTH * WORDS


def test_shares_of_the_words_make_the_same_loss() -> None:
    """Of two ranks, played one after the other: each is given what both have."""
    x, words, targets = drawn(2, torch.float64, 0.3)
    flat, aims = x.flatten(0, 1), targets.flatten()
    scores = flat.detach() @ words.detach().T
    largest = scores.amax(1)
    counted = aims != IGNORED
    own = scores.gather(1, aims.where(counted, 0)[:, None])[:, 0] - largest
    sums = torch.stack([(scores - largest[:, None]).exp().sum(1), own * counted])
    whole = torch.autograd.grad(gpt.score(x, words, targets), (x, words))
    of_x, of_words = torch.zeros_like(x), []
    for first, last in ((0, 20), (20, WORDS)):
        part = words.detach()[first:last].requires_grad_()
        at = iter(range(0, TOKENS, 4))
        starts = [next(at)]

        def total(values: torch.Tensor, starts: list[int] = starts, at: object = at) -> torch.Tensor:
            start = starts.pop()
            starts.append(start + 4)
            return sums[:, start : start + 4]

        head = HeadWords(part, None, first, lambda values, starts=starts: largest[starts[0] : starts[0] + 4], total)
        loss = linear_cross_entropy(flat, head, aims, 4)
        torch.testing.assert_close(loss, gpt.score(x, words, targets), rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad(loss, (x, part))
        of_x += gradients[0]
        of_words.append(gradients[1])
    torch.testing.assert_close(of_x, whole[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat(of_words), whole[1], rtol=1e-10, atol=1e-12)
