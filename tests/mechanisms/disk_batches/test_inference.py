"""Inference out of core: equal to inference in memory, for every network, and the same after a kill."""

from __future__ import annotations

import resource

import msgspec
import numpy as np
import pytest
import torch
from tests.graph.conftest import made
from tests.mechanisms.disk_batches.test_topology import on_disk

from espalier import recipe as config
from espalier.graph.data import condensed_file
from espalier.graph.data.condensed_file import Foretold
from espalier.graph.networks import compiled_aggregate, gnn
from espalier.graph.sampling.neighbor_sampler import Sampler, Style
from espalier.graph.sampling.subgraphs import View
from espalier.graph.sampling.subgraphs import infer as infer_in_memory
from espalier.mechanisms.disk_batches import inference
from espalier.mechanisms.disk_batches.disk_sampler import DiskSampler
from espalier.mechanisms.disk_batches.inference import InferenceFolder, infer
from espalier.recipe.errors import UserError
from espalier.store.io_queue import IoQueue
from espalier.store.memory import MemoryRows

NETWORKS = {
    "gcn": config.Gcn(),
    "sage": config.Sage(),
    "gat": config.Gat(),
    "gin": config.Gin(),
    "maxk": config.Sage(activation="maxk", k=3),
}


def network(name: str) -> gnn.Gnn:
    torch.manual_seed(3)
    plain = {"depth": 3, "width": 8, "dropout": 0.0} | ({} if name == "maxk" else {"activation": "relu"})
    return compiled_aggregate.equip(gnn.Gnn(msgspec.structs.replace(NETWORKS[name], **plain), 5, 3)).eval()


def style(model: gnn.Gnn) -> Style:
    return Style(model.layers[0].loops, model.layers[0].scale)


@pytest.fixture
def world(tmp_path):
    """A graph, its topology on disk, and its features."""
    graph = made(nodes=400, edges=1500)
    features = MemoryRows(torch.from_numpy(graph.features))
    return graph, on_disk(tmp_path, graph), features, tmp_path / "inference"


def values(rows) -> torch.Tensor:
    out = torch.empty(len(rows), *rows.shape, dtype=rows.dtype)
    rows.read(torch.arange(len(rows)), out)
    return out


@pytest.fixture(params=[False, True], ids=["by node", "condensed"])
def condensed(request, monkeypatch):
    """How results of inner layers lie on disk, whatever takes less."""
    monkeypatch.setattr(Foretold, "pays", request.param)
    return request.param


@pytest.mark.extremes
@pytest.mark.parametrize("name", NETWORKS)
def test_all_nodes_equal_inference_in_memory(world, name, condensed):
    graph, topology, features, folder = world
    model = network(name)
    found = infer(model, DiskSampler(topology, style(model)), features, InferenceFolder(folder, 50_000))
    expected = infer_in_memory(model, View(graph, style(model), 3))
    torch.testing.assert_close(values(found), expected, rtol=1e-6, atol=1e-6)
    place = InferenceFolder(folder.with_name("by the sampler in memory"), 50_000)
    by_memory = infer(model, Sampler(graph, style(model)), features, place)
    assert torch.equal(values(found), values(by_memory))
    assert [path.name for path in sorted(folder.glob("*.rows"))] == ["layer-1.rows", "layer-2.rows"]


@pytest.mark.parametrize("name", NETWORKS)
def test_condensed_rows_change_no_bit_and_take_the_bytes_foretold(world, name, monkeypatch):
    """On a larger graph, in few ranges, all of which are looked at."""
    graph = made(nodes=3000, edges=12000)
    model, features = network(name), MemoryRows(torch.from_numpy(graph.features))
    sampler, folder, read, asked = Sampler(graph, style(model)), world[-1], [], []
    starts = inference._starts(model, 1, sampler, 2_000_000)
    assert 2 < len(starts) <= condensed_file.SAMPLED + 1
    told = inference.foretold(model, sampler, 2_000_000)
    real = IoQueue.read_runs

    def counted(self, file, runs, buffer, end):
        read.append(int(runs[:, 1].sum()))
        asked.append(len(runs))
        return real(self, file, runs, buffer, end)

    found = []
    for pays in (False, True):
        monkeypatch.setattr(Foretold, "pays", pays)
        with monkeypatch.context() as patch:
            patch.setattr(IoQueue, "read_runs", counted)
            rows = infer(model, sampler, features, InferenceFolder(folder / str(pays), 2_000_000))
        assert sum(read) == sum(one.condensed if pays else one.plain for one in told)
        assert pays or sum(asked) >= len(told)
        read.clear()
        found.append(values(rows))
    assert torch.equal(*found)
    assert not list((folder / "True").glob("*.layout"))


def test_ranges_that_need_too_much_of_one_another_are_not_condensed(world):
    """Where a row fills its pages and each range needs all of them, condensing writes them once for each range."""
    graph = made(nodes=64, edges=3000)
    sampler = Sampler(graph, Style(False, "sum"))
    starts = np.arange(0, 65, 8)
    every = condensed_file.foretell(sampler, starts, 4096)
    assert not every.pays
    assert every.plain == every.condensed == 8 * 64 * 4096
    assert every.written == 7 * 64 * 4096
    few = condensed_file.foretell(
        Sampler(made(nodes=3000, edges=3000), Style(False, "sum")), np.arange(0, 3001, 300), 8
    )
    assert few.plain > few.condensed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sage", "maxk"])
def test_a_killed_inference_goes_on_where_it_stood(world, name, monkeypatch, condensed):
    _, topology, features, folder = world
    monkeypatch.setattr(inference, "COMMIT", 1)
    model = network(name)
    sampler = DiskSampler(topology, style(model))
    whole = values(infer(model, sampler, features, InferenceFolder(folder / "whole", 50_000)))
    calls, place = 0, InferenceFolder(folder / "killed", 50_000)
    for kill_after in (1, 2, 5, 3, 7, 1, 10**9):
        drawn = 0

        class Killed(DiskSampler):
            def draw(self, *arguments):
                nonlocal drawn, calls
                drawn += 1
                calls += 1
                if drawn > kill_after:  # noqa: B023
                    raise KeyboardInterrupt
                return super().draw(*arguments)

        try:
            found = infer(model, Killed(topology, style(model)), features, place)
        except KeyboardInterrupt:
            with (place.path / "layer-0.rows").open("ab") as file:  # torn behind what was committed
                file.write(b"torn")
    assert torch.equal(values(found), whole)
    draws = 0

    class Counted(DiskSampler):
        def draw(self, *arguments):
            nonlocal draws
            draws += 1
            return super().draw(*arguments)

    infer(model, Counted(topology, style(model)), features, place)
    assert draws == 0  # all is done
    infer(model, Counted(topology, style(model)), features, InferenceFolder(folder / "new", 50_000))
    assert calls == draws + 6  # the six that were killed, once more


@pytest.mark.sampled(1)
@pytest.mark.parametrize("commit", [1, 64 << 20])
def test_a_full_disk_says_how_much_is_missing_and_inference_goes_on(world, commit, monkeypatch, condensed):
    _, topology, features, folder = world
    monkeypatch.setattr(inference, "COMMIT", commit)
    model = network("sage")
    sampler, place = DiskSampler(topology, style(model)), InferenceFolder(folder / "full", 50_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = 40_000 if condensed else 400 * 8 * 4 // 2  # half of a layer of 8 columns
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(UserError, match=r"(?s)The disk of .*full is full: [\d,]+ bytes more .*File too large"):
            infer(model, sampler, features, place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    there = (folder / "full" / "layer-0.rows").stat().st_size
    first = inference._layer_bytes(model, 0, 400, place)
    assert (first > 400 * 8 * 4) == condensed
    assert inference._missing(model, 400, place) == first + 400 * 8 * 4 - there
    assert there == 0 or not condensed, "room for all of them is reserved first"
    whole = values(infer(model, sampler, features, InferenceFolder(folder / "whole", 50_000)))
    assert torch.equal(values(infer(model, sampler, features, place)), whole)


def test_another_network_or_graph_begins_anew(world):
    _, topology, features, folder = world
    model, other = network("sage"), network("sage")
    torch.nn.init.ones_(other.layers[0].weight.weight)
    sampler = DiskSampler(topology, style(model))
    first = values(infer(model, sampler, features, InferenceFolder(folder, 50_000)))
    assert not torch.equal(values(infer(other, sampler, features, InferenceFolder(folder, 50_000))), first)
    begun = (folder / "inference.json").read_text()
    infer(other, sampler, features, InferenceFolder(folder, 50_000, identity="another graph"))
    assert (folder / "inference.json").read_text() != begun


def test_too_little_memory_names_what_one_node_needs(world):
    _, topology, features, folder = world
    model = network("sage")
    with pytest.raises(UserError, match=r"store\.memory = 100 B is too small to infer node 0") as told:
        infer(model, DiskSampler(topology, style(model)), features, InferenceFolder(folder, 100))
    assert "neighbours take" in str(told.value)
