"""Anybody's experts over anybody's process group: what all experts in one process give, and messages of bad input."""

from __future__ import annotations

import doctest

import pytest
import torch
import torch.distributed as dist
from torch import nn

from espalier.mechanisms.expert_parallel import route, routed_experts
from espalier.parallel.local_experts import local
from espalier.recipe.errors import UserError
from many_ranks import forks


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_example_runs():
    assert doctest.testmod(routed_experts).failed == 0


def made(count=5, tokens=7):
    torch.manual_seed(3)
    experts = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(count)]
    best, chosen = torch.randn(tokens, count, dtype=torch.float64).topk(2, -1)
    return experts, torch.randn(tokens, 4, dtype=torch.float64), chosen, best.softmax(-1)


def test_a_plain_group_of_torch_carries_experts_of_unequal_ranks():
    experts, x, chosen, weights = made()
    right = local(x, chosen, weights, experts)
    sums = [one.grad for one in _summed(right, experts)]

    def life(channel):
        rank = channel.rank()
        own = experts[:1] if rank == 0 else experts[1:]
        for one in own:
            one.zero_grad()
        mixture = route(own, dist.new_group([0, 1], backend="gloo"))
        out = mixture(x, chosen, weights)
        out.sum().backward()
        return out.detach(), [p.grad for p in mixture.parameters()], mixture.load

    (first, _, some), (second, grads, rest) = forks(2, life)
    torch.testing.assert_close(first, right.detach(), rtol=1e-12, atol=1e-12)
    assert torch.equal(first, second)
    torch.testing.assert_close(grads, [2 * one for one in sums[2:]], rtol=1e-12, atol=1e-12)
    assert [*some, *rest] == (2 * chosen.flatten().bincount(minlength=5)).tolist()


def _summed(out, experts):
    out.sum().backward()
    return [p for expert in experts for p in expert.parameters()]


def test_numbers_may_be_in_any_order_also_in_one_process():
    experts, x, chosen, weights = made()
    order = [3, 0, 4, 1, 2]
    mixture = route([experts[number] for number in order], experts_by_rank=[order])
    assert torch.equal(mixture(x, chosen, weights), local(x, chosen, weights, experts))


def test_bad_input_is_named():
    experts, x, chosen, weights = made()
    mixture = route(experts)
    with pytest.raises(UserError, match="there are 5 experts"):
        mixture(x, chosen + 4, weights)
    with pytest.raises(UserError, match="have the shapes"):
        mixture(x[:3], chosen, weights)
    for held in ([[0, 1, 2, 3, 3]], [[0, 1]], [[], []]):
        with pytest.raises(UserError, match="each expert is held once"):
            route(experts, experts_by_rank=held)
    with pytest.raises(UserError, match="each expert is held once"):
        route([])
    with pytest.raises(UserError, match="no codec 'int7'"):
        route(experts, codec="int7")
