"""The reader's laws: rows from any tier are the graph's, bitwise; bytes read are the plan's; buffers are bounded."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mechanisms.disk_batches.conftest import read_whole
from tests.mechanisms.disk_batches.packing import graph_of, packed, request_of

from espalier.mechanisms.disk_batches import reader
from espalier.mechanisms.disk_batches.pack import repack
from espalier.mechanisms.disk_batches.reader import (
    FeatureBuffers,
    PackedBatches,
    ReaderOptions,
    TieredFeatures,
    batch_order,
)
from espalier.store.cost import PAGE
from espalier.store.extents import DamagedExtent


def wanted(graph, made, batch):
    return torch.from_numpy(np.asarray(graph.features)[made.pool.nodes(batch)])


@settings(max_examples=8, deadline=None)
@given(
    width=st.sampled_from([1, 5, 25, 128, 1433, 2050]),
    hot=st.integers(0, 300),
    disk=st.sampled_from([None, 1.05, 1.6]),
    cache=st.sampled_from([0, 3, 50]),
    batch=st.integers(1, 40),
)
def test_rows_from_any_tier_are_the_graphs(tmp_path_factory, width, hot, disk, cache, batch):
    graph, folder = graph_of(nodes=120, width=width, edges=360), tmp_path_factory.mktemp("set")
    row = 4 * width
    budget = None if disk is None else int(disk * graph.nodes * row)
    made = packed(graph, folder, batch=batch, memory=hot * row, disk=budget)
    features = TieredFeatures(made, ReaderOptions(cache_pages=cache))
    with features:
        for index in np.random.default_rng(0).permutation(len(made)).tolist():
            assert torch.equal(features.read(index), wanted(graph, made, index))
    order = [*range(len(made)), *range(len(made))]
    with PackedBatches(features, order) as batches:
        for index, one in zip(order, batches, strict=True):
            assert one.index == index
            assert torch.equal(one.features, wanted(graph, made, index))
            assert torch.equal(one.sampled.seeds, made.pool[index].seeds)
    made.close()


@pytest.mark.parametrize("disk", [None, 1.2])
def test_rows_striped_over_disks_and_rows_on_the_device_are_the_graphs(tmp_path, disk):
    graph = graph_of(nodes=2000, width=300, edges=6000)
    budget = disk and int(disk * graph.features.nbytes)
    made = packed(graph, [tmp_path / "a", tmp_path / "b"], batch=200, memory=100 * 1200, disk=budget)
    assert (tmp_path / "b" / "rows.extents").stat().st_size > 0
    features = TieredFeatures(made, ReaderOptions(cache_pages=30))
    features.keep_near(40 * made.row.row_bytes)
    with PackedBatches(features, range(len(made))) as batches:
        for one in batches:
            assert torch.equal(one.features, wanted(graph, made, one.index))
        stats = batches.features.stats
    assert min(stats.device, stats.host, stats.packed) > 0
    assert bool(stats.disk_cache) == (disk is not None)


@pytest.mark.parametrize("rows", ["fp32", "bf16", "int8", "int4"])
def test_batches_are_put_together_on_the_device_with_the_hot_rows_there(tmp_path, rows):
    """`meta` stands for an accelerator: only shapes are known."""
    graph = graph_of(nodes=500, width=40, edges=3000)
    made = packed(graph, tmp_path, batch=100, memory=60 * 160, rows=rows)
    features = TieredFeatures(made)
    features.keep_near(30 * made.row.row_bytes)
    features.device = torch.device("meta")
    with PackedBatches(features, range(len(made))) as batches:
        found = [one.features for one in batches]
        stats, near = batches.features.stats, batches.features._near.rows
    assert near.shape == (30, made.row.row_bytes)
    assert {near.device.type, *(x.device.type for x in found)} == {"meta"}
    assert [x.shape for x in found] == [(len(made.pool.nodes(at)), 40) for at in range(len(made))]
    near_uses = sum(int((made.split(at).hot_slots < 30).sum()) for at in range(len(made)))
    assert stats.device == near_uses * made.row.row_bytes > 0
    assert stats.host > 0


def test_the_kernel_reads_what_the_plan_says(tmp_path):
    graph = graph_of(nodes=3000, width=256, edges=12000)
    made = packed(graph, tmp_path, batch=300)
    counter = "read_bytes: " if made.rows.file.direct else "rchar: "  # of the page cache, what is copied out of it

    def read():
        return int(Path("/proc/self/io").read_text().split(counter)[1].split()[0])

    with TieredFeatures(made) as features:
        features.read(0)
        before = read()
        for index in range(len(made)):
            work = reader.ReadBatch(index, split=made.split(index))
            features.assemble(features.features(work))
    planned = PAGE * int(made.pages[:, 1].sum())
    extra = sum(made.plan.bytes(f"split/{index}") + PAGE for index in range(len(made)))  # positions, read beside them
    assert planned * 0.98 <= read() - before <= planned * 1.02 + extra


@pytest.mark.parametrize("rows", ["bf16", "int8", "int4"])
def test_narrow_rows_are_the_same_from_memory_and_disk(tmp_path, rows):
    graph = graph_of(width=33)
    made = [packed(graph, tmp_path / str(memory), rows=rows, memory=memory) for memory in (0, 2000, 1 << 20)]
    features = [TieredFeatures(one) for one in made]
    with features[0], features[1], features[2]:
        for index in range(len(made[0])):
            first, *others = [one.read(index) for one in features]
            assert all(torch.equal(first, other) for other in others)
            assert torch.equal(first, read_whole(made[0], index))
    assert features[0].stats.host == 0
    assert features[2].stats.packed == 0


@pytest.mark.parametrize("disk", [None, 1.3])
def test_bytes_read_are_those_of_the_plan(tmp_path, disk):
    graph = graph_of(nodes=600, width=100, edges=3000)
    made = packed(graph, tmp_path, memory=40_000, disk=disk and int(disk * graph.features.nbytes))
    with TieredFeatures(made) as features:
        for index in range(len(made)):
            before = features.stats.packed + features.stats.disk_cache
            features.read(index)
            assert features.stats.packed + features.stats.disk_cache - before == PAGE * made.pages[index, 1]
    assert features.stats.page_cache == 0
    assert bool(features.stats.disk_cache) == (disk is not None)


def test_pages_that_the_next_batches_use_are_read_once(tmp_path):
    graph = graph_of(nodes=600, width=100, edges=3000)
    made = packed(graph, tmp_path, disk=int(1.1 * graph.features.nbytes))
    reads = []
    for pages in (0, 20, 10_000):
        features = TieredFeatures(made, ReaderOptions(cache_pages=pages))
        with PackedBatches(features, range(len(made))) as batches:
            for one in batches:
                assert torch.equal(one.features, wanted(graph, made, one.index))
        reads.append(features.stats.disk_cache)
    assert reads[0] > reads[1] > reads[2]
    assert reads[2] >= len(np.unique(np.concatenate(made_pages(made)))) * PAGE


def made_pages(made):
    features = TieredFeatures(made)
    return [features._keys(index, made.split(index)) for index in range(len(made))]


@pytest.mark.parametrize("name", ["cold/3", "hot"])
def test_a_damaged_extent_is_named_and_packed_again(tmp_path, name):
    graph = graph_of(width=64)
    made = packed(graph, tmp_path, memory=40 * 256)
    where = made.rows.offset(name)
    with (tmp_path / "rows.extents").open("r+b") as file:
        file.seek(where + 17)
        byte = file.read(1)
        file.seek(where + 17)
        file.write(bytes([byte[0] ^ 4]))
    told = []
    with pytest.raises(DamagedExtent, match=name), TieredFeatures(made) as plain:
        plain.read(3)
    source = request_of(graph, tmp_path).features

    def repair(name, error):
        told.append(error.what)
        repack(made, name, source)

    with TieredFeatures(made, repair=repair) as repairing:
        assert torch.equal(repairing.read(3), wanted(graph, made, 3))
    assert name in told[0]
    assert repairing.stats.repaired == [name]
    with TieredFeatures(made) as plain:
        assert torch.equal(plain.read(3), wanted(graph, made, 3))


def test_no_more_buffers_are_held_than_allowed(tmp_path, monkeypatch):
    made = packed(graph_of(), tmp_path)
    sizes = []
    real = reader.aligned
    monkeypatch.setattr(reader, "aligned", lambda size: sizes.append(size) or real(size))
    with PackedBatches(TieredFeatures(made, ReaderOptions(buffers=1, ahead=1)), range(len(made))) as batches:
        for one in batches:
            one.features.add_(1)
    largest, most = PAGE * int(made.pages[:, 1].max()), 4 * 5 * made.pool.most_inputs
    # of features: the one in the loop's hands, the next, one that waits, one being assembled
    assert sizes[0] == largest
    assert set(sizes[1:]) == {most}
    assert len(sizes[1:]) <= 4
    assert not [one for one in threading.enumerate() if one.name.startswith(("reader-", "io-"))]


def test_memory_of_features_comes_back_when_the_last_view_of_them_is_gone():
    buffers = FeatureBuffers(4 * 6)
    first = buffers.matrix(2, 3)
    address, column = first.data_ptr(), first[:, 1]
    del first
    other = buffers.matrix(3, 2)
    assert other.data_ptr() != address
    del column
    assert buffers.matrix(1, 4).data_ptr() == address


@given(st.integers(0, 200), st.integers(0, 5), st.integers(0, 9))
def test_every_epoch_has_each_batch_once_in_windows_of_the_pools_order(batches, epoch, seed):
    order = batch_order(batches, epoch, seed)
    assert sorted(order.tolist()) == list(range(batches))
    assert np.array_equal(order, batch_order(batches, epoch, seed))
    for at in range(0, batches, reader.WINDOW):
        window = order[at : at + reader.WINDOW]
        assert bool((np.diff(window) > 0).all())
    if epoch == 0:
        assert order.tolist() == list(range(batches))
