"""Experts over ranks, by messages and by all-to-alls, give what all experts on one rank give."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from espalier.experts.alltoall import AllToAll
from espalier.experts.base import ExpertMap, spread_evenly
from espalier.experts.cost import ExpertLoad, Routed, sent_bytes
from espalier.experts.flashmoe import FlashMoE
from espalier.experts.flashmoe.transport import Messages
from espalier.experts.local import local
from espalier.testing import ranks

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
        rows.append(
            (torch.randn(count, WIDTH, dtype=dtype), chosen, best.softmax(-1), torch.randn(count, WIDTH, dtype=dtype))
        )
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
    held = ExpertMap(tuple(tuple(order[a:b]) for a, b in pairwise([0, *ends, experts])))
    check(kind, held, *made(data.draw(st.integers(0, 99)), tokens, experts, active))


class Shuffled(Messages):
    """Tells what has come in an order of its own."""

    def __init__(self, group, seed):
        super().__init__(group)
        self.random, self.kept = random.Random(seed), []

    def next(self, wait):
        while (event := super().next(wait and not self.kept)) is not None:
            self.kept.append(event)
        if not self.kept or (not wait and self.random.random() < 0.5):
            return None
        return self.kept.pop(self.random.randrange(len(self.kept)))


def test_every_order_of_arrival_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr("espalier.experts.flashmoe.layer.tile_rows", lambda *_: 2)
    held = spread_evenly(5, 3)
    rows, feeds = made(1, [9, 4, 6], 5, 3, torch.float32)

    def life(channel):
        own = [feeds[expert] for expert in held.ranks[channel.rank()]]
        found = []
        for seed in range(100):
            route = FlashMoE(channel, held, Shuffled(channel, 1000 * channel.rank() + seed))
            answer, grads = gradients(route, rows[channel.rank()], own)
            found.append([answer, *grads])
        return all(torch.equal(a, b) for one in found for a, b in zip(one, found[0], strict=True))

    assert ranks(3, life) == [True] * 3


@pytest.mark.parametrize("choice", ["any", "one expert"])
def test_the_ledger_has_the_bytes_of_real_tokens_only(choice):
    held, width = ExpertMap(((3, 0), (1,), (4, 2))), WIDTH
    rows, feeds = made(2, [9, 0, 6], 5, 2)
    if choice == "one expert":
        rows = [(x, torch.full_like(chosen, 4)[:, :1], weights[:, :1], pull) for x, chosen, weights, pull in rows]

    def life(channel):
        own = [feeds[expert] for expert in held.ranks[channel.rank()]]
        gradients(FlashMoE(channel, held), rows[channel.rank()], own)
        return channel.ledger.by_class()["experts"]

    owner = {expert: rank for rank, experts in enumerate(held.ranks) for expert in experts}
    to = [[[owner[e] for e in token] for token in row[1].tolist()] for row in rows]
    for me, sent in enumerate(ranks(3, life)):
        routed = []
        for peer in (other for other in range(3) if other != me):
            entries = sum(token.count(peer) for token in to[me])
            fresh = sum(peer in token for token in to[me])
            answers = sum(token.count(me) for token in to[peer])
            routed.append(Routed(len(held.ranks[peer]), fresh, entries - fresh, answers))
        assert sent == sent_bytes(ExpertLoad(width, 8), routed)
