"""Predicted bytes are the ledger's, and each state takes its own share of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nets import TWO_NODES, Odd, every, one_step, spread, triples

from espalier.comm import Channel
from espalier.plan.axes.placement import ShardFactors
from espalier.plan.axes.placement_plan import Spread
from espalier.plan.axes.sharding import Division, StateBytes, StateSizes, cost
from espalier.train.wrap_policy import Sized, sizes_of
from many_ranks import ranks


def _accounts(channel: Channel, how: Spread, accumulate: int) -> Any:
    sharding, optimizer, _ = spread(channel, how, 1, accumulate)
    sharding.settle()
    before = channel.ledger.by_class()
    one_step(sharding, optimizer, 1, accumulate, (channel.rank(), channel.size()))
    sharding.settle()
    sent = {kind: count - before.get(kind, 0.0) for kind, count in channel.ledger.by_class().items()}
    states = sum(value.nbytes for value in optimizer.state_dict().values() if value.ndim)
    return sent, sharding.bytes_held(), states


def _division(factors: ShardFactors, nodes: Any) -> Division:
    machine = nodes.count(nodes[0]) if len(set(nodes)) > 1 else None
    return Division(*factors, len(nodes), machine=machine)


@pytest.mark.extremes
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("nodes", [(), TWO_NODES[4]])
@pytest.mark.parametrize("factors", triples(4), ids=lambda factors: "-".join(map(str, factors)))
def test_bytes_sent_and_held_are_the_formulas(factors: ShardFactors, nodes: Any, accumulate: int) -> None:
    """To the byte; of the optimizer's states no rank has more."""
    sizes = sizes_of(Odd())
    states = StateSizes(StateBytes(8, 8, 16), sizes=sizes, width=8, bucket_bytes=1000)
    predicted = cost(states, _division(factors, tuple(nodes) or (0,) * 4), rounds=accumulate)
    found = ranks(4, _accounts, every(factors, nodes=nodes, bucket_bytes=1000), accumulate)
    for sent, held, moments in found:
        assert sent["gradients"] == predicted.sent["gradients"]
        assert sent.get("parameters", 0.0) == predicted.sent["parameters"]
        assert held["params"] == predicted.memory_bytes["params"]
        assert held["grads"] == predicted.memory_bytes["grads"]
        assert moments <= predicted.memory_bytes["optimizer"]
    padding = 2 * 8 * 8 * len(sizes)  # at most a multiple of eight elements for each unit
    assert (
        predicted.memory_bytes["optimizer"] - 2 * 8 * sum(one.elements for one in sizes) / factors.optimizer <= padding
    )


def test_bytes_are_those_of_one_flat_collective_whatever_the_machines() -> None:
    """AMSP's formulas, for sizes that need no padding."""
    sizes = [Sized(4096, 4, block, ("torch.float32", True), False) for block in (0, 1, None)]
    states = StateSizes(StateBytes(4, 4, 8), sizes=sizes)
    for nodes in ((0,) * 16, tuple(rank // 4 for rank in range(16)), tuple(rank // 8 for rank in range(16))):
        sent = cost(states, _division(ShardFactors(2, 4, 8), nodes), rounds=3).sent
        size = 3 * 4096 * 4
        once = size / 4 * (1 - 1 / 2) + 2 * size / 8 * (1 - 1 / 2)  # scatter to 8 shards, sum over 2 replicas
        assert sent["gradients"] == 3 * size * (1 - 1 / 4) + once
        gathers = 3 * (size / 2) * (2 / 3 * 1 + 1 / 3 * 2)  # one block twice; the last and what is outside once
        assert sent["parameters"] == pytest.approx(gathers + size / 2 * (1 - 1 / 4))


def test_many_layouts_at_once_cost_what_each_does() -> None:
    """Every nested triple on 16 ranks of two machines, with and without whole matrices."""
    sizes = sizes_of(Odd())
    factors = np.array(triples(16)).T
    for whole in (False, True):
        states = StateSizes(StateBytes(8, 8, 16), sizes=sizes, width=8, bucket_bytes=1000, whole=whole)
        together = cost(states, Division(*factors, 16, machine=8), rounds=2)
        for index, one in enumerate(factors.T):
            alone = cost(states, Division(*map(int, one), 16, machine=8), rounds=2)
            for kind in ("memory_bytes", "sent"):
                found = {
                    name: np.broadcast_to(v, factors.shape[1])[index] for name, v in getattr(together, kind).items()
                }
                assert found == getattr(alone, kind)
