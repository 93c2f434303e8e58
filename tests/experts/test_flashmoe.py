"""Experts over ranks, by messages and by all-to-alls, give what all experts on one rank give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from espalier.experts.alltoall import AllToAll
from espalier.experts.base import ExpertMap, spread_evenly
from espalier.experts.flashmoe import FlashMoE
from espalier.experts.local import local
from espalier.testing import forks, ranks

WIDTH = 6


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Feed(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9, dtype=dtype), nn.Linear(9, WIDTH, dtype=dtype)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def made(seed, tokens, experts, active, dtype=torch.float64):
    """Tokens, choices and weights of each rank, and all experts."""
    torch.manual_seed(seed)
    feeds = [Feed(dtype) for _ in range(experts)]
    rows = []
    for count in tokens:
        best, chosen = torch.randn(count, experts, dtype=dtype).topk(active, -1)
        rows.append((torch.randn(count, WIDTH, dtype=dtype), chosen, best.softmax(-1), torch.randn(count, WIDTH, dtype=dtype)))
    return rows, feeds


def gradients(route, row, feeds):
    """Output, and gradients of tokens, weights and parameters."""
    x, chosen, weights, pull = row
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    found = route(x, chosen, weights, feeds)
    parameters = [p for feed in feeds for p in feed.parameters()]
    return found.detach(), torch.autograd.grad(found, [x, weights, *parameters], pull, allow_unused=True)


def check(kind, held, rows, feeds, run=ranks):
    def life(channel):
        rank = channel.rank()
        own = [feeds[expert] for expert in held.ranks[rank]]
        found, grads = gradients(kind(channel, held), rows[rank], own)
        return found, grads

    every = run(len(rows), life, timeout=10.0)
    plain = [gradients(local, row, feeds) for row in rows]
    each = len(list(feeds[0].parameters()))
    for rank, (found, grads) in enumerate(every):
        torch.testing.assert_close(found, plain[rank][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grads[:2], plain[rank][1][:2], rtol=1e-12, atol=1e-12)
        for place, expert in enumerate(held.ranks[rank]):
            for number in range(each):
                mine = grads[2 + place * each + number]
                whole = sum(one[1][2 + expert * each + number] for one in plain)
                torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [AllToAll, FlashMoE])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_ranks_equal_all_experts_on_one(kind, data):
    count = data.draw(st.integers(1, 4))
    experts = data.draw(st.integers(count, 7))
    active = data.draw(st.integers(1, min(experts, 4)))
    tokens = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    order = data.draw(st.permutations(range(experts)))
    ends = sorted(data.draw(st.lists(st.integers(0, experts), min_size=count - 1, max_size=count - 1)))
    held = ExpertMap(tuple(tuple(order[a:b]) for a, b in zip([0, *ends], [*ends, experts])))
    check(kind, held, *made(data.draw(st.integers(0, 99)), tokens, experts, active))
