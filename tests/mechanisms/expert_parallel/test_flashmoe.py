"""Experts over ranks, by messages and by all-to-alls, give what all experts on one rank give."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from even_experts import spread_evenly
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from espalier.mechanisms.expert_parallel.flashmoe import FlashMoE, shared_memory
from espalier.mechanisms.expert_parallel.flashmoe.shared_memory import SharedMemoryTransport, neighbours
from espalier.mechanisms.expert_parallel.flashmoe.transport import PeerMessages, row_codec
from espalier.mechanisms.expert_parallel.mechanism import LoadMeter
from espalier.parallel.expert_map import ExpertMap
from espalier.parallel.local_experts import local
from espalier.plan.axes.experts import ExpertLoad, Routed, sent_bytes
from experts_by_alltoall import AllToAll
from many_ranks import forks, ranks

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


def check(kind, held, rows, feeds, run=ranks, within=1e-12):
    def life(channel):
        rank = channel.rank()
        own = [feeds[expert] for expert in held.ranks[rank]]
        found, grads = gradients(kind(channel, held), rows[rank], own)
        return found, grads

    every = run(len(rows), life, timeout=10.0)
    plain = [gradients(local, row, feeds) for row in rows]
    each = len(list(feeds[0].parameters()))
    for rank, (found, grads) in enumerate(every):
        torch.testing.assert_close(found, plain[rank][0], rtol=within, atol=within)
        torch.testing.assert_close(grads[:2], plain[rank][1][:2], rtol=within, atol=within)
        for place, expert in enumerate(held.ranks[rank]):
            for number in range(each):
                mine = grads[2 + place * each + number]
                whole = sum(one[1][2 + expert * each + number] for one in plain)
                torch.testing.assert_close(mine, whole, rtol=within, atol=within)


def by_messages(channel, held):
    """Without shared memory, as between machines."""
    return FlashMoE(channel, held, PeerMessages(channel))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [AllToAll, FlashMoE, by_messages])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_ranks_equal_all_experts_on_one(kind, data):
    count = data.draw(st.integers(1, 4))
    experts = data.draw(st.integers(count, 9))
    active = data.draw(st.integers(1, min(experts, 8)))
    tokens = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    order = data.draw(st.permutations(range(experts)))
    ends = sorted(data.draw(st.lists(st.integers(0, experts), min_size=count - 1, max_size=count - 1)))
    held = ExpertMap(tuple(tuple(order[a:b]) for a, b in pairwise([0, *ends, experts])))
    check(kind, held, *made(data.draw(st.integers(0, 99)), tokens, experts, active))


@pytest.mark.parametrize("kind", [AllToAll, FlashMoE])
def test_in_float32_they_are_within_rounding(kind):
    """Of several tiles each, of which the last is no whole one."""
    check(kind, ExpertMap(((0, 3), (1, 2))), *made(11, [300, 170], 4, 2, torch.float32), within=1e-5)


class Shuffling:
    """Tells what has come in an order of its own."""

    def shuffled(self, seed):
        self.random, self.kept = random.Random(seed), []
        return self

    def next(self, wait):
        while (event := super().next(wait and not self.kept)) is not None:
            self.kept.append(event)
        if not self.kept or (not wait and self.random.random() < 0.5):
            return None
        return self.kept.pop(self.random.randrange(len(self.kept)))


class ShuffledMessages(Shuffling, PeerMessages):
    pass


class ShuffledMemory(Shuffling, SharedMemoryTransport):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "at_once", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["tile by tile", "all sources at once"]
)
def test_every_order_of_arrival_gives_the_same_bits_by_messages_and_by_shared_memory(monkeypatch, at_once):
    monkeypatch.setattr("espalier.mechanisms.expert_parallel.flashmoe.layer.tile_rows", lambda *_: 2)
    held = spread_evenly(5, 3)
    rows, feeds = made(1, [9, 4, 6], 5, 3, torch.float32)

    def life(channel):
        own = [feeds[expert] for expert in held.ranks[channel.rank()]]
        found, near = [], neighbours(channel)
        for seed in range(100):
            links = ShuffledMessages(channel) if seed % 2 else ShuffledMemory(channel, near)
            route = FlashMoE(channel, held, links.shuffled(1000 * channel.rank() + seed), at_once=at_once)
            answer, grads = gradients(route, rows[channel.rank()], own)
            found.append([answer, *grads])
        return all(torch.equal(a, b) for one in found for a, b in zip(one, found[0], strict=True))

    assert ranks(3, life) == [True] * 3


@pytest.mark.parametrize("kind", [FlashMoE, by_messages])
@pytest.mark.parametrize("choice", ["any", "one expert"])
def test_the_ledger_has_the_bytes_of_real_tokens_only(choice, kind):
    held, width = ExpertMap(((3, 0), (1,), (4, 2))), WIDTH
    rows, feeds = made(2, [9, 0, 6], 5, 2)
    if choice == "one expert":
        rows = [(x, torch.full_like(chosen, 4)[:, :1], weights[:, :1], pull) for x, chosen, weights, pull in rows]

    def life(channel):
        own = [feeds[expert] for expert in held.ranks[channel.rank()]]
        gradients(kind(channel, held), rows[channel.rank()], own)
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


def test_gradients_of_two_ranks_pass_gradcheck():
    """Of all tokens, weights and parameters, by finite differences of one function that the ranks evaluate together."""
    held, counts = ExpertMap(((2, 0), (1,))), [2, 1]
    torch.manual_seed(0)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(3)])
    inputs = [torch.randn(3, 2), torch.rand(3, 2), *[torch.randn(2, 2) for _ in range(3)]]
    inputs = [one.double().requires_grad_() for one in inputs]

    class Product(nn.Module):
        def __init__(self, matrix):
            super().__init__()
            self.matrix = nn.Parameter(matrix)

        def forward(self, x):
            return torch.tanh(x @ self.matrix)

    def together(x, weights, *matrices, pull=None):
        def life(channel):
            rank = channel.rank()
            own = [Product(matrices[number].detach().clone()) for number in held.ranks[rank]]
            leaves = [one.detach().split(counts)[rank].clone().requires_grad_() for one in (x, weights)]
            out = FlashMoE(channel, held)(leaves[0], chosen.split(counts)[rank], leaves[1], own)
            if pull is None:
                return out.detach()
            found = torch.autograd.grad(out, [*leaves, *(one.matrix for one in own)], pull.split(counts)[rank])
            return found[:2], dict(zip(held.ranks[rank], found[2:], strict=True))

        found = ranks(2, life)
        if pull is None:
            return torch.cat(found)
        sums = found[0][1] | found[1][1]
        return tuple(torch.cat(pair) for pair in zip(*(one[0] for one in found), strict=True)) + tuple(
            sums[number] for number in range(3)
        )

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            ctx.save_for_backward(*given)
            return together(*given)

        @staticmethod
        def backward(ctx, pull):
            return together(*ctx.saved_tensors, pull=pull)

    assert torch.autograd.gradcheck(Layer.apply, inputs, atol=1e-7)


def test_outputs_have_the_same_bits_wherever_experts_lie():
    """Any number of ranks that hold experts, any map: a source's tokens for an expert are in one tile."""
    torch.manual_seed(5)
    feeds = [nn.Linear(16, 16) for _ in range(6)]
    rows = [(torch.randn(count, 16), *torch.randn(count, 6).softmax(-1).topk(3)) for count in (9, 7, 5)]
    maps = [((0, 1, 2, 3, 4, 5), (), ()), ((3, 0), (5, 1), (2, 4)), ((), (1, 0, 2), (5, 3, 4))]

    def life(channel):
        x, weights, chosen = rows[channel.rank()]
        found = []
        for held in map(ExpertMap, maps):
            own = [feeds[expert] for expert in held.ranks[channel.rank()]]
            found.append(FlashMoE(channel, held)(x, chosen, weights, own).detach())
        return all(torch.equal(one, found[0]) for one in found)

    assert ranks(3, life) == [True] * 3


@pytest.mark.parametrize("held", [((0, 1), (2,)), ((0, 1, 2), ())])
def test_int8_rows_lose_half_a_step_of_their_scale_and_have_the_bytes_of_codes(held):
    held = ExpertMap(held)
    rows, feeds = made(6, [8, 6], 3, 2, torch.float32)

    def life(channel):
        own, row = [feeds[expert] for expert in held.ranks[channel.rank()]], rows[channel.rank()]
        exact = gradients(FlashMoE(channel, held), row, own)
        before = channel.ledger.by_class()["experts"]
        route = FlashMoE(channel, held, codec="int8")
        return exact, gradients(route, row, own), channel.ledger.by_class()["experts"] - before

    owner = {expert: rank for rank, experts in enumerate(held.ranks) for expert in experts}
    for me, (exact, rough, sent) in enumerate(ranks(2, life)):
        torch.testing.assert_close(rough[0], exact[0], rtol=0.05, atol=0.03)
        torch.testing.assert_close(rough[1][0], exact[1][0], rtol=0.1, atol=0.05)
        there = [[owner[e] for e in token].count(1 - me) for token in rows[me][1].tolist()]
        back = sum([owner[e] for e in token].count(me) for token in rows[1 - me][1].tolist())
        fresh = sum(count > 0 for count in there)
        load = ExpertLoad(WIDTH, 4, int8=True)
        assert sent == sent_bytes(load, [Routed(len(held.ranks[1 - me]), fresh, sum(there) - fresh, back)])


def test_int8_rows_with_a_value_that_is_not_finite_come_out_as_nan():
    codec = row_codec("int8")
    rows = torch.tensor([[1.0, float("inf")], [2.0, float("nan")], [0.0, 0.0], [127.0, -1.2]])
    found = codec.unpack(codec.pack(rows), rows)
    assert found[:2].isnan().all()
    assert torch.equal(found[2:], torch.tensor([[0.0, 0.0], [127.0, -1.0]]))
    shuffled = torch.tensor([3, 0, 2])
    assert torch.equal(codec.unpack(codec.pack(rows)[shuffled], rows)[::2], found[shuffled][::2])


@pytest.mark.parametrize("kind", [AllToAll, FlashMoE])
@pytest.mark.parametrize("chosen", [0, 3], ids=["all tokens to one expert", "none for the first rank"])
def test_a_router_that_sends_everything_to_one_expert(kind, chosen):
    rows, feeds = made(7, [5, 4, 0], 4, 1)
    rows = [(x, torch.full_like(picked, chosen), weights, pull) for x, picked, weights, pull in rows]
    check(kind, ExpertMap(((0,), (1, 2), (3,))), rows, feeds)


def test_a_step_says_the_rows_of_every_expert_and_how_long_ranks_waited():
    held = ExpertMap(((2, 0), (1, 3)))
    rows, feeds = made(8, [6, 3], 4, 2)

    def life(channel):
        own = held.ranks[channel.rank()]
        routes = [FlashMoE(channel, held) for _ in range(2)]
        meter = LoadMeter([SimpleNamespace(route=one) for one in routes], own, 4, channel)
        found = []
        for _ in range(2):
            for route in routes:
                gradients(route, rows[channel.rank()], [feeds[expert] for expert in own])
            found.append((meter.load(), meter.waited()))
        return found

    counts = sum(chosen.flatten().bincount(minlength=4) for _, chosen, _, _ in rows)
    for one in ranks(2, life):
        for load, waited in one:
            assert load == {str(expert): 2.0 * int(count) for expert, count in enumerate(counts)}
            assert 0 < waited["waited"] <= waited["longest"]


def test_processes_of_one_machine_share_memory_and_keep_no_more_than_a_pass_needs(monkeypatch):
    """Chunks of two tiles, so that some are taken again and some are new; of 20 passes' bytes a small part is
    kept."""
    monkeypatch.setattr(shared_memory, "CHUNK", 4096)
    held = spread_evenly(5, 3)
    rows, feeds = made(9, [70, 3, 40], 5, 3)

    def life(channel):
        own, row = [feeds[expert] for expert in held.ranks[channel.rank()]], rows[channel.rank()]
        links = shared_memory.links(channel)
        route, kept = FlashMoE(channel, held, links), []
        for _ in range(20):
            found = gradients(route, row, own)
            channel.barrier().wait()
            kept.append(sum(len(chunks) for chunks in links._chunks.values()))
        plain = gradients(FlashMoE(channel, held, PeerMessages(channel), at_once=True), row, own)
        sent = channel.ledger.bytes[("experts", "shared memory")] / 20
        return sorted(links.near), kept, found, plain, sent, channel.ledger.bytes[("experts", "send")]

    for rank, (near, kept, found, plain, sent, by_messages) in enumerate(forks(3, life)):
        assert near == [one for one in range(3) if one != rank]
        assert 2 < kept[-1] <= 2 * max(kept[:4])
        assert torch.equal(found[0], plain[0])
        assert all(torch.equal(a, b) for a, b in zip(found[1], plain[1], strict=True))
        assert sent == by_messages


def test_ranks_of_two_machines_share_memory_with_their_own_only(monkeypatch):
    """A token in the file, not the path alone, says that it is the same process: paths are alike on two machines."""
    here = threading.local()
    monkeypatch.setattr(shared_memory, "_machine", lambda: getattr(here, "machine", "machine 0"))
    held = spread_evenly(7, 4)
    rows, feeds = made(11, [6, 5, 0, 4], 7, 2)
    seen = {}

    def kind(channel, held):
        here.machine = f"machine {channel.rank() % 2}"
        route = FlashMoE(channel, held)
        seen[channel.rank()] = route.links.near
        return route

    check(kind, held, rows, feeds)
    assert seen == {rank: frozenset({(rank + 2) % 4}) for rank in range(4)}
    assert not shared_memory._reads(f"/proc/{os.getpid()}/fd/0 token machine 0")
    assert not shared_memory._reads("nowhere")


def test_rows_are_free_after_the_backward_pass_without_the_garbage_collector():
    rows, feeds = made(3, [12, 12], 4, 2)
    inputs = []

    class Watched(Feed):
        def forward(self, x):
            hidden = torch.tanh(self.up(x))
            inputs.extend([weakref.ref(x), weakref.ref(hidden)])
            return self.down(hidden)

    watched = [Watched(torch.float64) for _ in feeds]

    def life(channel):
        expert_map = ExpertMap(((0, 1), (2, 3)))
        mine = [watched[expert] for expert in expert_map.ranks[channel.rank()]]
        gradients(by_messages(channel, expert_map), rows[channel.rank()], mine)

    gc.collect()
    gc.disable()
    try:
        ranks(2, life)
        free = [known() is None for known in inputs]
    finally:
        gc.enable()
    assert free == [True] * 16  # two of each expert on each rank, and as many tiles of the other
