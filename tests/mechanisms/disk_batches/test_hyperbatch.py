"""Hyperbatches: batches and features as in memory, rows read once for many batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.graph.conftest import made
from tests.mechanisms.disk_batches.test_topology import assert_same, on_disk

from espalier.graph.sampling.neighbor_sampler import Sampler, Style
from espalier.mechanisms.disk_batches.disk_sampler import DiskSampler
from espalier.mechanisms.disk_batches.hyperbatch import HyperbatchReader
from espalier.recipe.errors import UserError
from espalier.store.memory import MemoryRows

STYLE = Style(False, "mean")


class CountedRows(MemoryRows):
    """Rows in memory that count how many were read, and how often."""

    rows = reads = 0

    def read(self, ids, out):
        self.rows, self.reads = self.rows + len(ids), self.reads + 1
        super().read(ids, out)


@pytest.fixture
def world(tmp_path):
    graph = made(nodes=500, edges=3000)
    seeds = [np.random.default_rng(at).integers(0, 500, 10) for at in range(9)]
    return graph, on_disk(tmp_path, graph), CountedRows(torch.from_numpy(graph.features)), seeds


@pytest.mark.parametrize("together", [1, 4, 16])
def test_batches_and_features_equal_those_in_memory(world, together):
    graph, topology, rows, seeds = world
    reader = HyperbatchReader(DiskSampler(topology, STYLE), rows, (4, 3), memory=1 << 20, seed=2, together=together)
    sampler = Sampler(graph, STYLE)
    found = list(reader.batches(seeds, range(30, 39)))
    assert len(found) == len(seeds)
    for (drawn, features), own, step in zip(found, seeds, range(30, 39), strict=True):
        assert_same(drawn, sampler.draw(own, (4, 3), 2, step))
        assert torch.equal(features, torch.from_numpy(graph.features[drawn.nodes]))


def test_rows_are_read_once_for_as_many_batches_as_memory_holds(world):
    _, topology, rows, seeds = world
    sampler = DiskSampler(topology, STYLE)
    drawn = [set(one.nodes.tolist()) for one in sampler.draw_together(seeds, (4, 3), 0, range(9))]
    list(HyperbatchReader(sampler, rows, (4, 3), memory=1 << 20).batches(seeds, range(9)))
    assert (rows.reads, rows.rows) == (1, len(set.union(*drawn)))
    limit = 2 * max(map(len, drawn)) * rows.row_bytes
    rows.reads = rows.rows = 0
    list(HyperbatchReader(sampler, rows, (4, 3), memory=limit).batches(seeds, range(9)))
    assert 1 < rows.reads < 9
    assert rows.rows < sum(map(len, drawn))


def test_a_batch_larger_than_the_memory_is_refused_with_what_it_takes(world):
    _, topology, rows, seeds = world
    reader = HyperbatchReader(DiskSampler(topology, STYLE), rows, (4, 3), memory=100)
    with pytest.raises(UserError, match=r"store\.memory = 100 B is too small for one batch"):
        next(reader.batches(seeds, range(9)))
