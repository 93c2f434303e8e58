"""Seconds of a step on optimizer nodes are those of its four queues: pulls, computing, pushes and the node."""

from __future__ import annotations

import random

import numpy as np
import pytest
from nodes import pulled_bytes, pushed_bytes

from espalier.plan.axes import node_cost as cost
from espalier.plan.axes.node_cost import Layers, Rates

TWO = Layers((10, 10), ((0,), (1,)), frozenset())
RATES = Rates(link=1.0, disk=14 * 10.0, adam=1e9)


def test_of_two_layers_by_hand() -> None:
    # pulls end at 10 and 20, as both layers stay; pushes of the last and the first at 30 and 40; the node takes 2
    assert cost.seconds(TWO, 0.0, RATES, (1, 1)) == 42
    # nothing but the first pull, the last push and the node is beside long computing
    assert cost.seconds(TWO, 1e6, RATES, (1, 1)) == pytest.approx(1e6 + 10 + 10 + 2)


def test_pulls_go_no_faster_than_the_node_reads_its_disk_for_each_worker() -> None:
    wide = Rates(link=1e9, disk=20.0, adam=1e9)
    one, two = (cost.seconds(TWO, 0.0, wide, (1, 1), readers) for readers in (1, 2))
    assert one == pytest.approx(20 / 20 + 20 / (20 / 14))
    assert two - one == pytest.approx(20 / 20)


def test_the_layers_before_the_last_piece_are_pulled_once() -> None:
    five = Layers((1, 10, 100, 1000, 10_000), tuple((one,) for one in range(5)))
    assert [five.pulls(window).tolist() for window in (1, 2, 3, 9)] == [
        [1, 2, 2, 2, 1],
        [1, 2, 2, 1, 1],
        [1, 2, 1, 1, 1],
        [1, 1, 1, 1, 1],
    ]


def test_a_table_is_not_pulled_for_its_gradient_and_one_that_two_pieces_share_is_pushed_once() -> None:
    table = Layers((10, 10), ((0,), (1,)), frozenset({0}))
    assert cost.seconds(table, 0.0, RATES, (1, 1)) == 42  # the pushes end no sooner
    assert cost.seconds(table, 0.0, RATES, (1, 0)) == 22
    tied = Layers((10, 10), ((0,), (1,), (0,)), frozenset({0}))
    assert cost.seconds(tied, 0.0, RATES, (0, 1)) == 22


def test_no_step_is_shorter_than_its_longest_queue_nor_longer_than_all_of_them_together() -> None:
    draw = random.Random(0)
    for _ in range(50):
        sizes = tuple(draw.randint(1, 1000) for _ in range(draw.randint(2, 9)))
        layers = Layers(sizes, tuple((one,) for one in range(len(sizes))))
        rates = Rates(draw.uniform(1, 100), draw.uniform(1, 1000), draw.uniform(1, 100))
        compute = np.array([0.0, draw.uniform(0, 1000)])
        wire = 4.0, draw.choice([1.0, 4.0])
        queues = (
            pulled_bytes(layers, wire[0]) / min(rates.link, rates.disk),
            pushed_bytes(layers, wire[1]) / rates.link,
            sum(sizes) / min(rates.disk / cost.STATE_BYTES, rates.adam),
        )
        found = cost.seconds(layers, compute, rates, wire)
        assert (found >= np.maximum(compute, max(queues)) * (1 - 1e-9)).all()
        assert (found <= (compute + sum(queues)) * (1 + 1e-9)).all()
