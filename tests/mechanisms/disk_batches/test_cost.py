"""Costs of packed sets: what is expected from degrees is near what sampling gives; more budget never costs more."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.graph.conftest import made

from espalier.graph.sampling.neighbor_sampler import Sampler, Style
from espalier.machine.cluster import Disk
from espalier.mechanisms.disk_batches import batch_pool as pool
from espalier.mechanisms.disk_batches import cost
from espalier.mechanisms.disk_batches import row_placement as access
from espalier.mechanisms.disk_batches.row_placement import Limits

DISK = Disk(path="/", write=400e6, read=650e6, iops=14e3, iops_parallel=69e3)


def sampled(nodes: int, edges: int, batch: int, fanouts: tuple[int, ...]):
    """A random graph, its degrees, and the input nodes of its batches."""
    graph = made(nodes, edges, seed=4)
    seeds = pool.epoch_seeds(graph.parts.train, batch, seed=0)
    sampler = Sampler(graph, Style(loops=False, scale="none"))
    lists = [sampler.draw(ids, fanouts, 0, step).nodes for step, ids in enumerate(seeds)]
    draws = cost.Draws(graph.degrees(), len(graph.parts.train), batch, fanouts)
    return draws, lists


@pytest.mark.parametrize(("nodes", "edges"), [(3000, 12_000), (3000, 40_000)])
@pytest.mark.parametrize("fanouts", [(5,), (5, 5), (4, 4, 4)])
@pytest.mark.parametrize("share", [None, 0.6])
def test_expected_levels_are_near_those_of_sampled_batches(nodes, edges, fanouts, share):
    draws, lists = sampled(nodes, edges, 50, fanouts)
    rows = sum(map(len, lists))
    disk = None if share is None else int(share * rows)
    plan = access.plan(lists, nodes, Limits(300, disk, 512, np.array([0, nodes])))
    found = cost.expected(draws, 300, disk, 512)
    assert (found.batches, found.hot) == (len(lists), len(plan.hot))
    assert found.inputs == pytest.approx(rows, rel=0.1)
    assert found.packed + found.shared == pytest.approx((plan.cold + plan.shared).sum(), rel=0.12)
    assert found.packed + found.cache == pytest.approx(plan.disk_rows, rel=0.12)
    if plan.length > 1:
        assert found.length == pytest.approx(plan.length, rel=0.5)
    fitted = cost.Draws(draws.degrees, draws.items, 50, fanouts, inputs=rows / len(lists))
    assert cost.expected(fitted, 300, disk, 512).inputs == pytest.approx(rows, rel=1e-3)


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 400))
def test_more_memory_reads_less_and_more_disk_reads_in_longer_runs(hot, more, disk):
    draws = cost.Draws(np.random.default_rng(0).zipf(1.7, 3000).clip(0, 500), 1500, 60, (5, 5))
    small, large = (cost.expected(draws, rows, None, 512) for rows in (hot, hot + more))
    assert cost.epoch_seconds(large, DISK) <= cost.epoch_seconds(small, DISK) + 1e-9
    budgets = [cost.expected(draws, hot, rows, 512) for rows in (disk * 100, disk * 200)]
    assert budgets[1].length <= budgets[0].length
    assert small.inputs == pytest.approx(large.inputs)


def test_packing_pays_where_rows_are_small_and_epochs_are_many():
    draws = cost.Draws(np.full(5_000_000, 15), 500_000, 1024, (10, 10, 10))
    levels = cost.expected(draws, 500_000, None, 512)
    feature_bytes = 5_000_000 * 512
    epochs = cost.break_even(levels, 5_000_000, feature_bytes, DISK)
    saved = cost.gather_seconds(levels, 5_000_000, DISK) - cost.epoch_seconds(levels, DISK)
    assert epochs == pytest.approx(cost.packing_seconds(levels, feature_bytes, DISK) / saved)
    assert 0 < epochs < 50
    everything = cost.expected(draws, 5_000_000, None, 512)  # memory holds all rows
    assert everything.packed == everything.cache == 0
    assert cost.break_even(everything, 5_000_000, feature_bytes, DISK) == float("inf")


def test_costs_need_no_torch():
    script = "import sys, espalier.mechanisms.disk_batches.cost\nassert not {'torch', 'numba'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
