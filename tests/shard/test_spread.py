"""Predicted bytes are the ledger's, and each state takes its own share of memory."""

from __future__ import annotations

from typing import Any

import pytest
from nets import TWO_NODES, Odd, every, one_step, spread, triples

from espalier.cluster import Link
from espalier.comm import Channel
from espalier.optim.base import owned_by
from espalier.shard.arrange import Piece
from espalier.shard.blocks import Membership, blocks_of
from espalier.shard.placement import Factors
from espalier.shard.spread import Spread, Wires, cost, groups
from espalier.testing import ranks


def _accounts(channel: Channel, how: Spread, accumulate: int) -> Any:
    sharding, optimizer, _ = spread(channel, how, 1, accumulate)
    sharding.settle()
    before = channel.ledger.by_class()
    one_step(sharding, optimizer, 1, accumulate, (channel.rank(), channel.size()))
    sharding.settle()
    sent = {kind: count - before.get(kind, 0.0) for kind, count in channel.ledger.by_class().items()}
    states = sum(value.nbytes for value in optimizer.state_dict().values() if value.ndim)
    return sent, sharding.held(), states


def _pieces(factors: Factors) -> list[Piece]:
    model = Odd()
    member = Membership(model, blocks_of(model))
    trainable = [one.tensor for one in owned_by(model)]
    found = groups([factors] * len(trainable), [member.of(p) for p in trainable], [p.dtype for p in trainable])
    return [Piece(p.numel(), p.element_size(), group) for p, group in zip(trainable, found, strict=True)]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("nodes", [(), TWO_NODES[4]])
@pytest.mark.parametrize("factors", triples(4), ids=lambda factors: "-".join(map(str, factors)))
def test_bytes_sent_are_the_formulas_and_storage_is_each_factors_share(
    factors: Factors, nodes: Any, accumulate: int
) -> None:
    pieces, link = _pieces(factors), Link(bandwidth=1e9, latency=1e-5)
    predicted = cost(pieces, nodes or (0,) * 4, Wires(link, link), rounds=accumulate, bucket_bytes=1000).sent
    elements = sum(piece.elements for piece in pieces)
    for sent, held, states in ranks(4, _accounts, every(factors, nodes=nodes, bucket_bytes=1000), accumulate):
        assert sent["gradients"] == predicted["gradients"]
        assert sent.get("parameters", 0.0) == predicted["parameters"]
        padding = 8 * 8 * len(pieces)  # at most a multiple of eight elements for each unit
        assert 0 <= held["params"] - 8 * elements / factors.params <= padding
        assert 0 <= held["grads"] - 8 * elements / factors.grads <= padding
        assert abs(states - 2 * 8 * elements / factors.optimizer) <= 2 * padding


def test_bytes_are_those_of_one_flat_collective_whatever_the_machines() -> None:
    """AMSP's formulas, for sizes that need no padding."""
    pieces = [Piece(4096, 4, group) for group in groups([Factors(2, 4, 8)] * 3, [0, 1, None], [0] * 3)]
    link = Link(bandwidth=1e9, latency=1e-5)
    for nodes in ((0,) * 16, tuple(rank // 4 for rank in range(16)), tuple(rank // 8 for rank in range(16))):
        sent = cost(pieces, nodes, Wires(link, link), rounds=3).sent
        size = 3 * 4096 * 4
        once = size / 4 * (1 - 1 / 2) + 2 * size / 8 * (1 - 1 / 2)  # scatter to 8 shards, sum over 2 replicas
        assert sent["gradients"] == 3 * size * (1 - 1 / 4) + once
        gathers = 3 * (size / 2) * (2 / 3 * 1 + 1 / 3 * 2)  # one block twice; the last and what is outside once
        assert sent["parameters"] == pytest.approx(gathers + size / 2 * (1 - 1 / 4))
