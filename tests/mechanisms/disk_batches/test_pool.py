"""Pools: an entry is bit for bit the batch that training in memory draws; broken off, sampling goes on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.graph.conftest import made

from espalier.graph.sampling.neighbor_sampler import Sampler, Style
from espalier.graph.sampling.subgraphs import View
from espalier.graph.tasks.node_classification import NodeTask
from espalier.mechanisms.disk_batches import batch_pool as pool
from espalier.mechanisms.disk_batches.batch_pool import Draws, Pool

STYLES = {
    "gcn": Style(loops=True, scale="symmetric"),
    "gat": Style(loops=True, scale="none"),
    "sage": Style(loops=False, scale="mean"),
    "gin": Style(loops=False, scale="none"),
}


@pytest.mark.parametrize("edges", ["plain", "weighted", "featured"])
@pytest.mark.parametrize("style", STYLES)
def test_an_entry_is_the_batch_that_the_task_draws(tmp_path, style, edges):
    random = np.random.default_rng(5)
    known = {"weighted": {"weights": random.random(240)}, "featured": {"edge_features": random.random((240, 2))}}
    graph = made(**known.get(edges, {}))
    view = View(graph, STYLES[style], 2)
    task = NodeTask(view, view, (3, 2), seed=9)
    seeds = pool.epoch_seeds(graph.parts.train, 7, seed=9)
    found = pool.sample_pool(tmp_path, view.sampler, Draws(seeds, range(len(seeds)), (3, 2), 9))
    assert len(found) == len(seeds)
    for step, (ids, kept) in enumerate(zip(seeds, found, strict=True)):
        batch = task.batch(ids, step)
        assert torch.equal(torch.from_numpy(graph.features[found.nodes(step)]), batch.features)
        for mine, other in zip(kept.blocks, batch.blocks, strict=True):
            assert mine.sources == other.sources
            for name in ("indptr", "indices", "weights", "left", "right", "features"):
                assert same(getattr(mine, name), getattr(other, name)), name


def same(mine, other) -> bool:
    if mine is None or other is None:
        return mine is other
    return mine.dtype == other.dtype and torch.equal(mine, other)


def test_epochs_are_cut_as_the_workload_cuts_them():
    train = np.arange(100, 123)
    batches = pool.epoch_seeds(train, 5, seed=3, epoch=2)
    assert [len(one) for one in batches] == [5, 5, 5, 5, 3]
    assert np.array_equal(np.concatenate(batches), train[np.random.default_rng([3, 2]).permutation(23)])


def test_sampling_goes_on_where_it_stopped(tmp_path, monkeypatch):
    graph = made()
    monkeypatch.setattr(pool, "COMMIT", 2)
    sampler = Sampler(graph, STYLES["sage"])
    seeds = pool.epoch_seeds(graph.parts.train, 4, seed=0)
    draws = Draws(seeds, range(len(seeds)), (3, 2))
    (tmp_path / "whole").mkdir()
    pool.sample_pool(tmp_path / "whole", sampler, draws)
    (tmp_path / "broken").mkdir()

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.sample_pool(tmp_path / "broken", sampler, draws, stop)
    assert len(Pool(tmp_path / "broken")) == 4
    drawn = []
    monkeypatch.setattr(sampler, "draw", lambda *a, draw=sampler.draw: drawn.append(a) or draw(*a))
    pool.sample_pool(tmp_path / "broken", sampler, draws)
    assert len(drawn) == len(seeds) - 4
    for name in (pool.FILE, f"{pool.FILE}.index"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "broken" / name).read_bytes()
