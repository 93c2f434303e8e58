"""Partition folder: each rank reads its own part alone, and computes what it would of the whole graph."""

from __future__ import annotations

import dataclasses
import re
import shutil

import numpy as np
import pytest
import torch
from tests.graph.conftest import made
from tests.graph.test_workload import recipe_of

from espalier import recipe as config
from espalier.graph.data import sources
from espalier.graph.data.graph import Graph
from espalier.graph.networks.gnn import Gnn
from espalier.graph.parts import graph_cut as graph_cutting
from espalier.graph.parts import halo, partition_folder
from espalier.graph.sampling.neighbor_sampler import Style
from espalier.graph.sampling.subgraphs import View
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import UserError
from espalier.sparse import partition
from espalier.track import progress
from many_ranks import ranks

NODES, WIDTH, CLASSES = 41, 6, 4
STYLES = {
    "gcn": (config.Gcn(depth=2, width=8, dropout=0.0), Style(loops=True, scale="symmetric")),
    "sage": (config.Sage(depth=2, width=8, dropout=0.0), Style(loops=False, scale="mean")),
    "gat": (config.Gat(depth=2, width=8, dropout=0.0, heads=2), Style(loops=True, scale="none")),
    "gin": (config.Gin(depth=2, width=8, dropout=0.0, norm=True), Style(loops=False, scale="none")),
}
MEAN = STYLES["sage"][1]


def graph_of(seed=0, **known) -> Graph:
    random = np.random.default_rng(seed)
    features = random.normal(size=(NODES, WIDTH)).astype(np.float32)
    return Graph.from_edges(*random.integers(0, NODES - 3, (2, 120)), features=features, undirected=True, **known)


def cut_of(graph, world):
    parts = np.random.default_rng(1).integers(0, max(1, world - 1), NODES)  # the last rank owns no node
    return halo.boundary(graph.indptr, graph.indices, parts, world)


@pytest.fixture
def folder(tmp_path):
    graph = graph_of()
    partition_folder.write(tmp_path / "parts", graph, MEAN, cut_of(graph, 3))
    return tmp_path / "parts"


@pytest.mark.parametrize("kind", STYLES)
def test_ranks_that_read_their_parts_compute_what_one_rank_does(tmp_path, kind):
    options, style = STYLES[kind]
    random = np.random.default_rng(2)
    weights = {"weights": random.random(120).astype(np.float32)} if kind != "gat" else {}
    graph = graph_of(labels=random.integers(0, CLASSES, NODES), **weights)
    cut = cut_of(graph, 3)
    partition_folder.write(tmp_path, graph, style, cut)
    torch.manual_seed(0)
    network = Gnn(options, WIDTH, CLASSES)
    expected = network(*View(graph, style, 2).whole())
    state = network.state_dict()

    def run(channel):
        part = partition_folder.read(tmp_path, channel.rank(), channel, graph.fingerprint())
        own = Gnn(options, WIDTH, CLASSES)
        own.load_state_dict(state)
        return part, halo.equip(own)(*part.inputs(2)).detach()

    for rank, (part, found) in enumerate(ranks(3, run)):
        torch.testing.assert_close(found, expected.detach()[part.halo.owned], rtol=1e-5, atol=1e-5)
        assert torch.equal(part.labels, torch.from_numpy(graph.labels)[part.halo.owned])
        assert part.style == style
        np.testing.assert_array_equal(part.rows, cut.rows)
        direct = halo.Halo.of(*View(graph, style, 2).block[:2], cut, rank)
        for name in ("owned", "outer", "edges", "indptr", "indices"):
            assert torch.equal(getattr(part.halo, name), getattr(direct, name))
        assert all(map(torch.equal, part.halo.sends, direct.sends))
        assert part.halo.receives == direct.receives


def test_a_rank_opens_its_own_part_alone(folder):
    def run(channel):
        (folder / "part-1.safetensors").unlink(missing_ok=True)
        if channel.rank() != 1:
            return len(partition_folder.read(folder, channel.rank(), channel).halo.owned)
        with pytest.raises(UserError, match=r"part-1.safetensors cannot be read: it is not there"):
            partition_folder.read(folder, 1, channel)
        return 0

    assert sum(ranks(3, run)) == int((cut_of(graph_of(), 3).parts == 0).sum())


def test_one_rank_needs_no_group(tmp_path):
    graph = graph_of()
    partition_folder.write(tmp_path, graph, MEAN, cut_of(graph, 1))
    part = partition_folder.read(tmp_path, 0)
    features, blocks = part.inputs(2)
    assert torch.equal(features, torch.from_numpy(graph.features))
    assert part.labels is None
    assert torch.equal(blocks[1].left, View(graph, MEAN, 2).block.left)


def damaged(folder):
    path = folder / "part-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cropped(folder):
    path = folder / "part-0.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damaged, "part-0.safetensors is damaged"),
        (cropped, "part-0.safetensors is damaged"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": 1}'), "manifest.json cannot be read"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read: it is not there"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, change, message):
    graph = graph_of()
    partition_folder.write(tmp_path, graph, MEAN, cut_of(graph, 1))
    change(tmp_path)
    with pytest.raises(UserError, match=message):
        partition_folder.read(tmp_path, 0)


def test_another_format_is_refused(tmp_path):
    graph = graph_of()
    partition_folder.write(tmp_path, graph, MEAN, cut_of(graph, 1))
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"format":4', '"format":3'))
    with pytest.raises(UserError, match="another version of espalier"):
        partition_folder.read(tmp_path, 0)


def test_parts_for_another_number_of_ranks_are_refused(folder):
    with pytest.raises(UserError, match="holds 3 parts, and there are 2 ranks"):
        ranks(2, lambda channel: partition_folder.read(folder, channel.rank(), channel))


def test_a_graph_that_changed_is_refused(folder):
    changed = dataclasses.replace(graph_of(), features=graph_of().features + 1)
    assert changed.fingerprint() != graph_of().fingerprint()
    with pytest.raises(UserError, match="is of another graph"):
        ranks(3, lambda channel: partition_folder.read(folder, channel.rank(), channel, changed.fingerprint()))


def test_ranks_with_different_partitions_are_told(folder, tmp_path):
    graph = graph_of()
    other = halo.boundary(graph.indptr, graph.indices, np.arange(NODES) % 3, 3)
    partition_folder.write(tmp_path / "other", graph, MEAN, other)

    def run(channel):
        partition_folder.read(folder if channel.rank() < 2 else tmp_path / "other", channel.rank(), channel)

    with pytest.raises(UserError, match="rank 2 has another partition than rank 0"):
        ranks(3, run)


def test_a_cut_of_another_graph_is_refused(tmp_path):
    graph = graph_of()
    cut = halo.boundary(np.zeros(3, int), np.zeros(0, int), np.zeros(2, int), 1)
    with pytest.raises(UserError, match="The cut is of 2 nodes"):
        partition_folder.write(tmp_path, graph, MEAN, cut)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    graph = graph_of()
    with pytest.raises(UserError, match="is there already"):
        partition_folder.write(tmp_path, graph, MEAN, cut_of(graph, 1))
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_nodes_of_another_cut_or_damaged_are_refused(folder, tmp_path):
    graph = graph_of()
    partition_folder.write(
        tmp_path / "other", dataclasses.replace(graph, numbers=np.arange(NODES)[::-1]), MEAN, cut_of(graph, 2)
    )
    shutil.copy(tmp_path / "other" / partition_folder.NODES, folder)
    with pytest.raises(UserError, match=r"(?s)nodes.safetensors is damaged.*its checksum does not match.*copy it anew"):
        partition_folder.outlined(folder)
    (folder / partition_folder.NODES).unlink()
    with pytest.raises(
        UserError, match=r"(?s)nodes.safetensors cannot be read: it is not there.*try: copy it here, or"
    ):
        sources.load(config.Data(path=str(folder)), config.GraphOptions())


def test_others_may_read_what_the_umask_lets_them(folder):
    (folder / "plain").touch()
    assert len({one.stat().st_mode for one in folder.iterdir()}) == 1


def test_features_keep_their_names(tmp_path):
    graph = graph_of()
    columns = tuple(f"größe {at}" for at in range(graph.features.shape[1]))
    named = dataclasses.replace(graph, columns=columns, edge_columns=("age",))
    partition_folder.write(tmp_path / "parts", named, MEAN, cut_of(graph, 2))
    found, _ = partition_folder.outlined(tmp_path / "parts")
    assert (found.columns, found.edge_columns) == (columns, ("age",))


def test_a_partition_is_replaced_whole(folder):
    graph = graph_of()
    partition_folder.write(folder, graph, MEAN, cut_of(graph, 2))
    names = ["manifest.json", "nodes.safetensors", "part-0.safetensors", "part-1.safetensors"]
    assert sorted(one.name for one in folder.iterdir()) == names


@pytest.fixture
def asked(tmp_path):
    """A recipe for a graph in a file, whose parts are in another."""

    def recipe(parts, ranks=3, **graph):
        made = graph_of(labels=np.arange(NODES) % CLASSES)
        np.savez(
            tmp_path / "graph.npz", edge_index=np.stack([made.indices, made.targets()]), x=made.features, y=made.labels
        )
        if parts is not None:
            np.save(tmp_path / "parts.npy", parts)
        table = {
            "model": {"kind": "sage"},
            "data": {"path": str(tmp_path / "graph.npz")},
            "graph": {"halo": {"parts": str(tmp_path / "parts.npy")}, "order": "rcmpp", **graph},
            "plan": {"pin": {"ranks": ranks} if ranks else {}},
        }
        return defaults.resolve(recipe_file.from_table(table))[0]

    return recipe


def test_parts_for_fewer_ranks_than_the_plan_has_are_refused(asked):
    with pytest.raises(UserError, match=r"is for 2 ranks, and plan.pin.ranks = 4") as told:
        open_graph(asked(np.arange(NODES) % 2, ranks=4))
    assert "ranks 2 to 3 would train on nothing" in str(told.value)
    open_graph(asked(np.arange(NODES) % 2 * 3, ranks=4))  # ranks 1 and 2 have none, as was asked for


def test_parts_are_those_that_the_recipe_gives_also_where_nodes_are_reordered(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(graph_cutting, "cache_folder", lambda: tmp_path / "cache")
    parts = np.arange(NODES) * 7 % 3
    graph = open_graph(asked(parts)).whole_task.train.graph
    place = graph.numbers
    assert (place != np.arange(NODES)).any()
    cutting = graph_cutting.Cutting(graph, Style(loops=False, scale="mean"))
    assert (cutting.parts([1, 1, 1]) == parts[place]).all()

    def own(channel):
        return graph_cutting.open_part(cutting, [1, 1, 1], channel).halo.owned

    for rank, owned in enumerate(ranks(3, own)):
        assert (place[owned.numpy()] % NODES * 7 % 3 == rank).all()
    assert len(np.unique(cutting.parts([1, 1]))) == 2  # fewer ranks: cut anew
    other = open_graph(asked((parts + 1) % 3)).whole_task.train.graph
    assert graph_cutting.Cutting(other, cutting.style).folder([1]) != cutting.folder([1])


@pytest.mark.parametrize(
    ("parts", "count", "message"),
    [
        (None, 3, "cannot be read"),
        (np.zeros(NODES - 1, int), 3, "the graph has"),
        (np.full(NODES, 3), 3, "there are 3 ranks"),
        (np.zeros(NODES), 3, "parts is float64"),
        (np.arange(NODES) % 2, 0, "is for 2 ranks, and the number of ranks is open"),
    ],
)
def test_parts_that_cannot_be_taken_are_refused(asked, parts, count, message):
    with pytest.raises(UserError, match=message):
        open_graph(asked(parts, count))


@pytest.mark.parametrize("metis", [True, False])
def test_cutting_a_graph_shows_its_stages_where_it_takes_long(tmp_path, monkeypatch, capfd, metis):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(progress, "_PATIENCE", 0.0), monkeypatch.setattr(progress, "_EVERY", 0.0)
    monkeypatch.setattr(partition, "installed", lambda: metis)
    halos = GraphWorkload(recipe_of({"kind": "gcn"}, {"halo": {}}), made()).halos()
    halos.rows([1, 1])
    said = re.sub(r", [-\d.e]+ .?s\n", "\n", capfd.readouterr().err)
    sweeps = [f"sweep {one} of 10, {one / 11:.0%}" for one in range(1, 11)]
    metis_ = ["METIS, fewest edges between parts, 0%", "METIS, fewest rows between parts, 50%"]
    each = metis_ if metis else ["RCM++, 0%", *sweeps]
    for stage in [f"Cutting the graph: {one}" for one in each]:
        assert f"{stage}\n" in said
    assert "Finding the rows that cross: boundary, 0%\nFinding the rows that cross: partial sums, 50%\n" in said


def test_cutting_a_large_graph_says_so_in_one_line_and_is_done_once_for_the_plan_and_the_ranks(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe, line = recipe_of({"kind": "gcn"}, {"halo": {}}), "Cutting a graph of 60 nodes into 2 parts (once).\n"

    def cut():
        halos = GraphWorkload(recipe, made()).halos()
        halos.rows([1, 1])
        cutting, opened = halos.cutting, graph_cutting.open_part
        ranks(2, lambda channel: opened(cutting, [1, 1], channel, writes=channel.rank() == 0).halo.owned)
        return cutting.folder([1, 1]), cutting.parts([1, 1])

    monkeypatch.setattr(graph_cutting, "LARGE", made().edges)
    folder, expected = cut()
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(graph_cutting, "LARGE", made().edges - 1)
    for damage in (b"", b"1234", b"\xff" * 240):  # the last is of no part
        shutil.rmtree(folder)
        folder.with_suffix(".parts").write_bytes(damage)
        assert np.array_equal(cut()[1], expected)
        assert capfd.readouterr().err == line
