"""Topology on disk: batches equal those of the in-memory sampler bitwise, drawn one by one or many together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.graph.conftest import made

from espalier.graph.sampling import neighbor_sampler
from espalier.graph.sampling.neighbor_sampler import ALL, Sampler, Style
from espalier.mechanisms.disk_batches.disk_sampler import (
    DiskSampler,
    Topology,
    disk_sampler,
    stays_on_disk,
)
from espalier.store.memory import MemoryRows

STYLES = [Style(False, "mean"), Style(True, "symmetric"), Style(True, "none"), Style(False, "none")]
FANOUTS = [(4, 3, 2), (ALL, 2), (60,), (1, ALL)]


def on_disk(folder, graph) -> Topology:
    """A topology in two files."""
    for name in ("indptr", "indices"):
        np.save(folder / f"{name}.npy", getattr(graph, name))
    mapped = {name: np.load(folder / f"{name}.npy", mmap_mode="c") for name in ("indptr", "indices")}
    return disk_sampler(replace(graph, **mapped), Style(False, "none"), 1 << 16).topology


def assert_same(found, expected):
    assert np.array_equal(found.nodes, expected.nodes)
    for ours, theirs in zip(found.blocks, expected.blocks, strict=True):
        assert ours.sources == theirs.sources
        for name in ("indptr", "indices", "weights", "left"):
            one, other = getattr(ours, name), getattr(theirs, name)
            assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("fanouts", FANOUTS)
@pytest.mark.parametrize("style", STYLES)
def test_batches_equal_those_in_memory(tmp_path, style, fanouts):
    graph = made(nodes=300, edges=4000)
    ours, theirs = DiskSampler(on_disk(tmp_path, graph), style), Sampler(graph, style)
    for step in range(3):
        seeds = np.random.default_rng(step).integers(0, 300, 20)  # some twice
        assert_same(ours.draw(seeds, fanouts, 5, step), theirs.draw(seeds, fanouts, 5, step))


@pytest.mark.parametrize("style", STYLES)
def test_weights_and_features_of_edges_on_disk_are_those_in_memory(tmp_path, style, monkeypatch):
    plain, random = made(nodes=300, edges=4000), np.random.default_rng(2)
    weights = random.random(plain.edges).astype(np.float32)
    graph = replace(plain, weights=weights, edge_features=random.normal(size=(plain.edges, 3)).astype(np.float32))
    for name in ("indptr", "indices", "weights", "edge_features"):
        np.save(tmp_path / f"{name}.npy", getattr(graph, name))
    opened = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="c") for name in ("indptr", "indices", "weights")}
    mapped = replace(graph, **opened, edge_features=np.load(tmp_path / "edge_features.npy", mmap_mode="c"))
    assert stays_on_disk(mapped, 1000)
    assert not stays_on_disk(mapped, 1 << 20)
    assert not stays_on_disk(graph, 1000)
    theirs = Sampler(graph, style)
    expected = theirs.draw(np.arange(40), (4, ALL), 5, 1)
    monkeypatch.setattr(neighbor_sampler, "SUMMED", 97)  # many pieces, to the same sums
    assert np.array_equal(neighbor_sampler.symmetric_root(mapped), theirs.root)
    found = disk_sampler(mapped, style, 1 << 16).draw(np.arange(40), (4, ALL), 5, 1)
    assert_same(found, expected)
    for one, other in zip(found.blocks, expected.blocks, strict=True):
        assert (one.features is None and other.features is None) or torch.equal(one.features, other.features)


@settings(max_examples=15)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(0, 40), st.booleans())
def test_batches_drawn_together_equal_those_drawn_alone(seed, count, size, loops):
    graph = made(nodes=200, edges=900, seed=seed % 7)
    style = Style(loops, "none")
    draws = np.random.default_rng(seed)
    seeds = [draws.integers(0, 200, size) for _ in range(count)]
    steps = draws.integers(0, 50, count).tolist()
    with TemporaryDirectory() as folder:
        found = DiskSampler(on_disk(Path(folder), graph), style).draw_together(seeds, (3, 2), seed, steps)
    sampler = Sampler(graph, style)
    for one, own, step in zip(found, seeds, steps, strict=True):
        assert_same(one, sampler.draw(own, (3, 2), seed, step))


def test_pages_are_read_once_for_all_batches(tmp_path):
    graph = made(nodes=2000, edges=30_000)
    topology = on_disk(tmp_path, graph)
    pages: list[int] = []

    class Counted(MemoryRows):
        def read(self, ids, out):
            pages.append(topology.indices.pages(ids))
            super().read(ids, out)

    counted = Counted(torch.from_numpy(graph.indices))
    sampler = DiskSampler(Topology(topology.indptr, counted), Style(False, "mean"))
    seeds = [np.random.default_rng(at).integers(0, 2000, 200) for at in range(8)]
    sampler.draw_together(seeds, (5, 5), 0, range(8))
    assert len(pages) == 2  # one read for each layer
    assert max(pages) <= -(-(graph.edges * 4 + 128) // 4096)
    together = sum(pages)
    pages.clear()
    for step, own in enumerate(seeds):
        sampler.draw(own, (5, 5), 0, step)
    assert together < sum(pages) / 4
