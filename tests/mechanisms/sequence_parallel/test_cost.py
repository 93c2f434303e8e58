"""What cut attention is predicted to cost, over links of two speeds."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from espalier.machine import cluster
from espalier.plan import collective_time
from espalier.plan.axes.sequence import SequenceGrid, SequenceLoad, cost

NODES = (
    '[[nodes]]\nname = "a"\ndevice = "cpu"\ncores = 4\nmemory = "8GiB"\n'
    '[[nodes]]\nname = "b"\ndevice = "cpu"\ncores = 4\nmemory = "8GiB"\n'
    '[links]\nbetween = { bandwidth = "100Mbit/s", latency = "1ms" }\n'
)
LOAD = SequenceLoad(tokens=16_384, heads=8, kv_heads=8, head_size=64, layers=2, seconds=0.01)


def wire() -> Any:
    """Of four ranks on each of two machines."""
    on = collective_time.fleet(cluster.loads(NODES), 8)

    def seconds(operation: Any, size: Any, ranks: Any, stride: Any, kind: str) -> Any:
        return collective_time.seconds(operation, size, ranks, stride, on)

    return seconds


def total(grid: SequenceGrid, load: SequenceLoad = LOAD) -> Any:
    return sum(cost(load, grid, wire()).seconds.values())


def test_one_rank_costs_nothing() -> None:
    found = cost(LOAD, SequenceGrid(), wire())
    assert not any([*found.seconds.values(), *found.sent.values(), *found.memory_bytes.values()])


def test_many_grids_are_priced_as_one_by_one() -> None:
    rows = np.array([(1, 8, 8), (1, 8, 4), (2, 4, 2), (4, 2, 1), (8, 1, 1)])
    together = cost(LOAD, SequenceGrid(*rows.T), wire())
    for number, row in enumerate(rows):
        alone = cost(LOAD, SequenceGrid(*row), wire())
        for table, other in (
            (together.seconds, alone.seconds),
            (together.sent, alone.sent),
            (together.memory_bytes, alone.memory_bytes),
        ):
            assert [value[number] for value in table.values()] == pytest.approx([*map(float, other.values())])


def test_a_double_ring_crosses_slow_links_less_often() -> None:
    single, double = (cost(LOAD, SequenceGrid(1, 8, window), wire()).seconds["ring"] for window in (8, 4))
    assert 1.2 * double < single


def test_the_larger_exchange_belongs_on_the_fast_links() -> None:
    """That of keys and values where every query head has its own, else that of heads."""
    grid = partial(SequenceGrid, 4, 2)
    grouped = SequenceLoad(tokens=16_384, heads=32, kv_heads=4, head_size=16, seconds=0.01)
    assert total(grid(), grouped) < total(grid(head_first=False), grouped)
    assert total(grid(head_first=False)) < total(grid())


def test_attention_hides_rings_and_not_all_to_alls() -> None:
    busy = SequenceLoad(tokens=16_384, heads=8, kv_heads=8, head_size=64, seconds=1e4)
    hidden = cost(busy, SequenceGrid(2, 4, 2), wire()).seconds
    assert hidden["ring"] == 0
    assert hidden["heads"] > 0


def test_fewer_key_value_heads_favour_rings() -> None:
    few = SequenceLoad(tokens=16_384, heads=8, kv_heads=1, head_size=64)
    rows = cost(few, SequenceGrid(np.array([1, 8]), np.array([8, 1]), np.array([4, 1]))).sent
    many = cost(LOAD, SequenceGrid(np.array([1, 8]), np.array([8, 1]), np.array([4, 1]))).sent
    sums = [sum(one.values()) for one in (rows, many)]
    assert sums[0][0] / sums[0][1] < sums[1][0] / sums[1][1]
