"""Rolling pool: an epoch is a function of seed and number; share 0 keeps all, 1 is online sampling."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.graph.conftest import made
from tests.mechanisms.disk_batches.conftest import read_whole

from espalier.graph.sampling.neighbor_sampler import Sampler, Style
from espalier.mechanisms.disk_batches import manifest, rolling_pool
from espalier.mechanisms.disk_batches.batch_pool import Draws
from espalier.mechanisms.disk_batches.features import open_features
from espalier.mechanisms.disk_batches.pack import PackedSet, PackRequest
from espalier.mechanisms.disk_batches.reader import PackedBatches, ReaderOptions
from espalier.mechanisms.disk_batches.rolling_pool import NICE, ResampleSchedule, RollingFeatures, RollingPool
from espalier.recipe.errors import UserError

STYLE, FANOUTS, BATCHES = Style(False, "mean"), (3, 2), 6


@pytest.fixture
def world(tmp_path):
    """A graph, and how its first epoch is packed."""
    graph = made(nodes=300, edges=1500)
    np.save(tmp_path / "features.npy", graph.features)
    seeds = np.array_split(np.random.default_rng(3).permutation(300)[:100], BATCHES)
    draws = Draws(seeds, range(BATCHES), FANOUTS, 4)
    request = PackRequest(
        (tmp_path / "packed",),
        Sampler(graph, STYLE),
        manifest.graph_hash(graph),
        open_features(tmp_path / "features.npy"),
        draws,
        memory=2000,
    )
    return graph, request


def read(pool: RollingPool, epoch: int) -> list[tuple[torch.Tensor, np.ndarray, torch.Tensor]]:
    """Seeds, nodes and features of every batch of the epoch."""
    found, hot = [], pool.first.load_hot()
    for batch in range(BATCHES):
        packed, number = pool.place(epoch * BATCHES + batch)
        with closing(PackedSet(packed.folders)) as own:
            found.append((own.pool[number].seeds, own.pool.nodes(number), read_whole(own, number, hot)))
    return found


def assert_same(one, other):
    for ours, theirs in zip(one, other, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@given(st.integers(1, 50), st.floats(0, 1), st.integers(0, 40), st.integers(0, 9))
def test_every_epoch_replaces_its_share_in_turn(batches, share, epoch, seed):
    schedule = ResampleSchedule(batches, share, seed)
    counts = [len(schedule.fresh(one)) for one in range(epoch + 1)]
    assert counts[0] == 0
    assert abs(sum(counts) - share * batches * epoch) <= 1 + 1e-6
    newest = np.zeros(batches, int)
    for one in range(1, epoch + 1):
        newest[schedule.fresh(one)] = one
    assert np.array_equal(schedule.sources(epoch), newest)
    if share:
        assert newest.min() >= epoch - np.ceil(1 / share)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.floats(0, 1))
def test_every_epoch_trains_on_every_seed_once(sizes, share):
    schedule = ResampleSchedule(len(sizes), share)
    cuts = np.cumsum(sizes)
    seeds = np.split(np.arange(cuts[-1]), cuts[:-1])
    for epoch in range(1, 5):
        seeds = schedule.dealt(seeds, epoch)
        assert [len(one) for one in seeds] == sizes
        assert sorted(np.concatenate(seeds).tolist()) == list(range(cuts[-1]))


@pytest.mark.parametrize("share", [0.0, 0.34, pytest.param(1.0, marks=pytest.mark.slow)])
def test_epochs_hold_what_the_sampler_draws_and_the_rows_of_its_nodes(world, share, monkeypatch):
    monkeypatch.setattr(rolling_pool, "AHEAD", BATCHES)
    graph, request = world
    every: list[list] = []
    with RollingPool(request, share) as pool:
        for epoch in range(4):
            pool.begin(epoch)
            every.append(read(pool, epoch))
            for batch, (seeds, nodes, rows) in enumerate(every[-1]):
                source = int(pool.schedule.sources(epoch)[batch])
                step = source * BATCHES + batch
                drawn = request.sampler.draw(seeds.numpy(), FANOUTS, 4, step)
                assert np.array_equal(nodes, drawn.nodes)
                assert torch.equal(rows, torch.from_numpy(graph.features[nodes]))
            assert sorted(torch.cat([one[0] for one in every[-1]]).tolist()) == sorted(
                np.concatenate(request.draws.seeds).tolist()
            )
    same = [np.array_equal(a[1], b[1]) for a, b in zip(every[2], every[3], strict=True)]
    assert sum(same) == BATCHES - len(pool.schedule.fresh(3))
    if share == 1:
        kept = {path.name for path in request.folders[0].glob("epoch-*")}
        assert kept <= {"epoch-2", "epoch-3", "epoch-4"}


def test_a_killed_pool_goes_on_as_if_it_had_not_been(world, tmp_path):
    _, request = world
    whole = []
    with RollingPool(request, 0.5) as pool:
        for epoch in range(4):
            pool.begin(epoch)
            whole.append(read(pool, epoch))
    other = replace(request, folders=(tmp_path / "other",))
    for epoch in (0, 1, 3, 2, 3):  # each by a process of its own; the one at 3 was lost with its work
        with RollingPool(other, 0.5) as pool:
            pool.begin(epoch)
            assert_same(read(pool, epoch), whole[epoch])


def test_what_fails_in_the_background_is_raised_when_its_epoch_begins(world, monkeypatch):
    _, request = world
    with RollingPool(request, 1.0) as pool:
        with monkeypatch.context() as patch:
            plain = rolling_pool.pack

            def full(wanted, *arguments):
                if wanted is not request:
                    raise UserError("The disk is full: 100 bytes more are needed.")
                return plain(wanted, *arguments)

            patch.setattr(rolling_pool, "pack", full)
            pool.begin(0)
            with pytest.raises(UserError, match="100 bytes more"):
                pool.begin(1)
        pool.begin(1)  # there is room again


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_reader_goes_from_epoch_to_epoch(world, share):
    graph, request = world
    entries = [(epoch, batch) for epoch in range(3) for batch in reversed(range(BATCHES))]
    with RollingPool(request, share) as pool:
        features = RollingFeatures(pool, ReaderOptions())
        with PackedBatches(features, features.order(entries)) as batches:
            found = [(one.sampled.seeds.numpy(), one.features.clone()) for one in batches]
        for (epoch, batch), (seeds, rows) in zip(entries, found, strict=True):
            step = int(pool.schedule.sources(epoch)[batch]) * BATCHES + batch
            drawn = request.sampler.draw(seeds, FANOUTS, 4, step)
            assert torch.equal(rows, torch.from_numpy(graph.features[drawn.nodes]))


def test_what_packs_in_the_background_yields_to_training(world, monkeypatch):
    plain, nice = rolling_pool.pack, []
    monkeypatch.setattr(rolling_pool, "NICE", NICE)
    monkeypatch.setattr(
        rolling_pool, "pack", lambda *given: nice.append(os.getpriority(os.PRIO_PROCESS, 0)) or plain(*given)
    )
    with RollingPool(world[1], 1.0) as pool:
        pool.begin(0)
        pool.begin(1)
    assert nice[0] < NICE
    assert nice[1] == NICE


def test_a_share_that_is_none_is_refused():
    with pytest.raises(UserError, match=r"store\.resample = 1\.5 is not possible"):
        ResampleSchedule(10, 1.5)
