"""Sorting tokens by expert gives what every expert computed on every token gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier import recipe as config
from espalier.language.gpt import FeedForward
from espalier.parallel.local_experts import local
from espalier.recipe import decoder_shapes, defaults


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def dense(x, chosen, weights, experts):
    """Each expert on each token; what was not chosen is weighed with 0."""
    total = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        weight = (weights * (chosen == number)).sum(-1, keepdim=True)
        total = total + weight * expert(x)
    return total


def made(tokens, count, active, dtype=torch.float64):
    model = config.Gpt(depth=1, width=12, heads=2, feed_forward=20, vocabulary=5, context=4)
    size = decoder_shapes.sizes(defaults.resolve(config.Recipe(model=model))[0].model)
    experts = [FeedForward(size).to(dtype) for _ in range(count)]
    x = torch.randn(tokens, 12, dtype=dtype, requires_grad=True)
    best, chosen = torch.randn(tokens, count, dtype=dtype).topk(active, -1)
    return x, chosen, best.softmax(-1).detach().requires_grad_(), experts


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(0, 17), count=st.integers(1, 9), active=st.integers(1, 9), seed=st.integers(0, 99))
def test_output_and_gradients_equal_the_dense_loop(tokens, count, active, seed):
    torch.manual_seed(seed)
    x, chosen, weights, experts = made(tokens, count, min(active, count))
    parameters = [parameter for expert in experts for parameter in expert.parameters()]
    ours, plain = local(x, chosen, weights, experts), dense(x, chosen, weights, experts)
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)
    pull = torch.randn_like(ours)
    left = torch.autograd.grad(ours, [x, weights, *parameters], pull)
    right = torch.autograd.grad(plain, [x, weights, *parameters], pull)
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def test_the_order_of_the_tokens_does_not_matter():
    torch.manual_seed(0)
    x, chosen, weights, experts = made(20, 4, 2)
    shuffled = torch.randperm(20)
    torch.testing.assert_close(
        local(x[shuffled], chosen[shuffled], weights[shuffled], experts), local(x, chosen, weights, experts)[shuffled]
    )


def test_no_token_is_dropped_when_all_choose_one_expert():
    torch.manual_seed(0)
    x, chosen, weights, experts = made(30, 6, 1)
    torch.testing.assert_close(local(x, torch.full_like(chosen, 3), torch.ones_like(weights), experts), experts[3](x))


def test_an_expert_without_tokens_gets_a_gradient_of_zeros():
    x, chosen, weights, experts = made(5, 3, 1)
    local(x, torch.zeros_like(chosen), weights, experts).sum().backward()
    assert all(not parameter.grad.any() for expert in experts[1:] for parameter in expert.parameters())
    assert all(parameter.grad.any() for parameter in experts[0].parameters())
