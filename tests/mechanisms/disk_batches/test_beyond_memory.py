"""Half a tebibyte of features and more than 2^31 edges, in sparse files: offsets beyond 32 bits, memory of a batch."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest
import torch
from tests.mechanisms.disk_batches.conftest import read_whole

from espalier.graph.data import synthetic
from espalier.graph.data.graph import Graph
from espalier.graph.sampling.neighbor_sampler import Drawn, Style
from espalier.mechanisms.disk_batches.batch_pool import Draws
from espalier.mechanisms.disk_batches.disk_sampler import disk_sampler
from espalier.mechanisms.disk_batches.features import open_features, rows_of
from espalier.mechanisms.disk_batches.pack import PackRequest, pack
from espalier.store.rows import RowFile, RowLayout

NODES, WIDTH = 1 << 30, 128
HUB = (1 << 31) + 1000
"""Edges into the last node but one; the last node's edges all lie beyond 2^31."""


def sparse(path, dtype, rows: int, values: dict[int, np.ndarray]) -> int:
    """An .npy file of zeros with some `values` at their places, which alone take room; where its data begin."""
    with synthetic._NpyFile(path, dtype) as file:
        file.rows = rows
    offset = path.stat().st_size
    os.truncate(path, offset + rows * np.dtype(dtype).itemsize)
    with path.open("r+b") as file:
        for at, value in values.items():
            file.seek(offset + at * np.dtype(dtype).itemsize)
            file.write(value.astype(dtype).tobytes())
    return offset


@pytest.mark.slow
def test_a_batch_of_a_graph_of_half_a_tebibyte(tmp_path):
    last = np.array([NODES - 3, 5, 1 << 29, NODES - 1000, 7, 9, 11, 13])
    sparse(tmp_path / "indptr.npy", np.int64, NODES + 1, {NODES - 1: np.array([HUB, HUB + 8])})
    sparse(tmp_path / "indices.npy", np.int32, HUB + 8, {HUB: last})
    rows = {node * WIDTH: np.full(WIDTH, node % 1013) for node in (NODES - 1, NODES - 2, *last.tolist(), 0)}
    offset = sparse(tmp_path / "features.npy", np.float32, NODES * WIDTH, rows)
    assert (tmp_path / "features.npy").stat().st_size > 512 << 30
    mapped = (np.load(tmp_path / f"{name}.npy", mmap_mode="c") for name in ("indptr", "indices"))
    sampler = disk_sampler(Graph(*mapped, np.zeros((0, WIDTH), np.float32)), Style(False, "mean"), 1 << 20)
    assert sampler.nodes == NODES
    assert sampler.topology.edges > 1 << 31
    assert sampler.degrees(np.array([0, NODES - 2, NODES - 1])).tolist() == [0, HUB, 8]
    tracemalloc.start()
    with RowFile(tmp_path / "features.npy", RowLayout(NODES, torch.float32, (WIDTH,), offset)) as features:
        drawn = sampler.draw(np.array([NODES - 1, NODES - 2]), (8, 4))
        x = rows_of(features, drawn.nodes)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert set(drawn.nodes.tolist()) == {NODES - 1, NODES - 2, 0, *last.tolist()}  # the hub hears from node 0 alone
    assert torch.equal(x, torch.from_numpy(drawn.nodes % 1013)[:, None].expand(-1, WIDTH).float())


class Chosen:
    """A sampler whose batches are the seeds and one node far away."""

    style = Style(False, "none")

    def draw(self, seeds, fanouts, seed=0, step=0) -> Drawn:
        return Drawn(np.concatenate([seeds, [WIDE - 1 - step]]), ())


WIDE, LONG = 1 << 26, 2048


@pytest.mark.slow
def test_rows_of_half_a_tebibyte_are_packed_in_the_ranges_that_batches_use(tmp_path):
    path = tmp_path / "rows"
    ids = (5, 1 << 25, WIDE - 2, WIDE - 1)
    with path.open("wb") as file:
        file.truncate(WIDE * LONG * 4)
        for node in ids:
            file.seek(node * LONG * 4)
            file.write(np.full(LONG, node, np.float32).tobytes())
    features = open_features(path, dtype="float32", shape=(WIDE, LONG))
    assert features.row_bytes * len(features) == 512 << 30
    seeds = [np.array([1 << 25, 5]), np.array([5, 6])]
    wanted = PackRequest((tmp_path / "set",), Chosen(), "graph", features, Draws(seeds, (0, 1), (1,)), memory=LONG * 4)
    packed = pack(wanted)
    assert packed.about.ranges > 8000
    for at, nodes in enumerate(([1 << 25, 5, WIDE - 1], [5, 6, WIDE - 2])):
        values = torch.tensor([node if node in ids else 0 for node in nodes], dtype=torch.float32)
        assert torch.equal(read_whole(packed, at), values[:, None].expand(-1, LONG))
    assert sum(packed.rows.bytes(name) for name in packed.rows) == 5 * LONG * 4  # node 5 is in memory
