"""State holders: which ranks hold a parameter, and over how many of them each of its states is split. No torch.

The planner's bytes and seconds and the executor ask the same functions. Ranks that hold the same part of a model also
hold the same parameters, but for experts: a group of `ep` consecutive ranks divides these among it, so that every
`ep`-th rank holds the same experts, and their states are split over those only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from espalier.plan.axes.flat_layout import Sized
from espalier.plan.axes.placement import ShardFactors
from espalier.plan.layouts import stage_layers


@cache
def split(wanted: int, holders: int) -> int:
    """Over how many of its `holders` a state is split where `wanted` ranks are asked for: the most that divide them."""
    return max(ranks for ranks in range(1, min(wanted, holders) + 1) if holders % ranks == 0)


_splits = np.vectorize(split, otypes=[int])


def nested(wanted: ShardFactors, holders: Any) -> ShardFactors:
    """Over how many of its `holders` each state is split, so that shards nest: parameters over some of the ranks that
    split gradients, and these over some of those that split optimizer states. Arrays allowed."""
    optimizer = _splits(wanted.optimizer, holders)
    grads = _splits(wanted.grads, optimizer)
    return ShardFactors(_splits(wanted.params, grads), grads, optimizer)


def fullest(tensors: Sequence[Sized], ep: int, stages: int, chunks: int) -> list[Sized]:
    """Of the ranks of a pipeline, which have so many `chunks` of layers each, the tensors of the one that holds most,
    on the rank of an expert group that holds most. What stands before the layers is the first stage's, what stands
    behind them the last one's."""
    layers = 1 + max(tensor.block or 0 for tensor in tensors)
    experts = -(-max(tensor.experts.stop for tensor in tensors) // ep)
    spans = stage_layers(layers, stages * chunks)
    ranks: dict[int | None, int] = {n: at % stages for at, span in enumerate(spans) for n in range(*span)}
    by_rank: defaultdict[int, list[Sized]] = defaultdict(list)
    outside = 0
    for tensor in tensors:
        if tensor.block is not None:
            outside = stages - 1
        part = tensor.of_first(experts)
        if part.copies:
            by_rank[ranks.get(tensor.block, outside)].append(part)
    return max(by_rank.values(), key=lambda rank: sum(tensor.elements * tensor.copies for tensor in rank))
