"""Graphs over ranks at their limits: no rows cross or all do twice, machines have other parts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tests.graph.conftest import made
from tests.graph.test_workload import recipe_of
from tests.mechanisms.halo_exchange.test_halo import NETWORKS, graph_of, network_of, parts_of
from tests.mechanisms.halo_exchange.test_halo_parallel import HALO, machines, train
from tests.mechanisms.halo_exchange.test_sylvie import part_of

from espalier import recipe as config
from espalier.graph.data.graph import Graph
from espalier.graph.networks import graph_plan
from espalier.graph.networks.gnn import style_of
from espalier.graph.parts import graph_cut as graph_cutting
from espalier.graph.parts import halo, part_inference, partition_folder
from espalier.graph.parts.graph_cut import Cutting, open_part
from espalier.graph.sampling.neighbor_sampler import Style
from espalier.graph.workload import GraphWorkload
from espalier.mechanisms.halo_exchange.quantized_exchange import Every, Sylvie
from espalier.plan import base as plans
from espalier.plan import decide
from espalier.recipe import data_hash
from espalier.recipe.errors import UserError
from espalier.train import request_from_recipe, table
from many_ranks import ranks


@pytest.mark.sampled(1)
@pytest.mark.parametrize("synchronize", [1, 4])
def test_a_plan_has_no_bits_to_choose_where_no_rows_cross(synchronize, tmp_path, monkeypatch):
    """One layer, whose rows cross once before training; two parts between which there is no edge."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(graph_cutting, "clusters_of", lambda *graph, **how: np.arange(60, dtype=np.int32) % 2)
    apart = made()
    both = apart.targets() % 2 == apart.indices % 2
    apart = Graph.from_edges(
        apart.indices[both], apart.targets()[both], features=apart.features, labels=apart.labels, parts=apart.parts
    )
    for model, graph in (({"depth": 1}, made()), ({"depth": 2}, apart)):
        recipe = recipe_of(
            model, {"halo": {"bits": "auto", "synchronize": synchronize, "late": True}}, precision="fp32"
        )
        recipe = msgspec.structs.replace(recipe, plan=config.Planning(pin=config.Pin(ranks=2)))
        request = request_from_recipe.of_recipe(recipe, lambda one=recipe, its=graph: GraphWorkload(one, its))
        plan = decide.decide(request, machines(1, 0)).taken
        assert any("no bits to choose" in one for one in plan.why)
        assert not any(one.traffic == "halo" for one in plan.exchanges)
        assert plan.predicted.sent_bytes["halo"] == 0
        assert not sum(train(recipe, graph, (50,), exchanges=plan.exchanges)["halo"][1:])


@dataclasses.dataclass(frozen=True, eq=False)
class Hosted(Cutting):
    """On a machine with a cache of its own."""

    host: Path = Path()

    def folder(self, shares):
        return self.host / "cut"


@pytest.mark.parametrize("old", [(0,), (1,), (0, 1)])
def test_machines_with_other_parts_in_their_caches_agree(old, tmp_path):
    """`old`: machines that have parts; those of machine 0 have their names exchanged, those of machine 1 are others."""
    graph = made()
    cutting = Cutting(graph, Style(True, "symmetric"))
    parts = cutting.parts([1, 1])
    for host in old:
        other = 1 - parts if host == 0 else (np.arange(60, dtype=np.int32) % 2)
        partition_folder.write(tmp_path / f"{host}/cut", graph, cutting.style, *cutting.boundary(other, 2))

    def opened(channel):
        hosted = Hosted(graph, cutting.style, host=tmp_path / str(channel.rank()))
        return open_part(hosted, [1, 1], channel).halo.owned.numpy()

    for rank, owned in enumerate(ranks(2, opened)):
        np.testing.assert_array_equal(owned, np.flatnonzero(parts == rank))
    manifests = [tmp_path / f"{host}/cut/manifest.json" for host in (0, 1)]
    written = [one.stat().st_mtime_ns for one in manifests]
    assert manifests[0].read_bytes() == manifests[1].read_bytes()
    ranks(2, opened)
    assert [one.stat().st_mtime_ns for one in manifests] == written


NAMES = [[], [f"paper {node}" for node in range(60)]]


@pytest.mark.extremes
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize(
    ("kind", "message"), [("gat", "the row of {}, which rank 1 owns"), ("gcn", "the row of {} for")]
)
def test_a_node_whose_row_is_not_finite_is_the_one_of_the_data_also_where_nodes_are_reordered(
    kind, message, names, monkeypatch, tmp_path
):
    """Rows of GAT cross as they are, GCN's as sums too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(graph_cutting, "PAYS", 1.0)
    given = made(names=names)
    graph = dataclasses.replace(graph_plan.ordered(given, "rcmpp")[0], cut=np.arange(60, dtype=np.int32) % 2)
    node = int(np.flatnonzero(graph.cut * (graph.numbers != np.arange(60)) * graph.degrees())[0])
    graph.features[node] = np.nan
    expected = given.mention(int(graph.numbers[node]))
    assert expected == (f"node 'paper {graph.numbers[node]}'" if names else f"node {graph.numbers[node]}")
    with pytest.raises(UserError, match=message.format(expected)):
        train(recipe_of({"kind": kind}, {"halo": {}}), graph, (50,))


def test_a_row_that_few_bits_cannot_say_is_of_the_node_of_the_data():
    graph = graph_plan.ordered(made(), "rcmpp")[0]
    cut = halo.boundary(graph.indptr, graph.indices, np.arange(60) % 2, 2)

    def sent(channel):
        own = halo.Halo.of(graph.indptr, graph.indices, cut, channel.rank(), channel)
        travelling = dataclasses.replace(own, layer=1, transport=Sylvie(Every(2)), mention=graph.mention)
        travelling.exchange(torch.full((len(own.owned), 8), torch.inf))

    first = {rank: graph.numbers[cut.node[cut.owner == rank][0]] for rank in range(2)}
    with pytest.raises(
        UserError, match=f"Rank 0 cannot send the row of node {first[0]} for|row of node {first[1]} for"
    ):
        ranks(2, sent)


@pytest.mark.parametrize("bits", [1, 8, "auto"])
def test_few_bits_are_refused_in_fp16_whose_gradients_may_overflow(bits):
    """By the recipe where it says fp16, by the plan where that may choose it."""
    with pytest.raises(UserError, match=f"graph.halo.bits = '?{bits}'? is not possible with train.precision") as told:
        recipe_of({}, {"halo": {"bits": bits}}, precision="fp16")
    assert 'train.precision = "bf16", or graph.halo.bits = 32' in str(told.value)
    plan = plans.Plan(ranks=(plans.Rank(share=(0, 1)), plans.Rank(share=(1, 2))), precision="fp16")
    recipe = recipe_of({}, {"halo": {"bits": bits}}, precision="auto")
    found = table.refusal(recipe, plan)
    assert found is not None
    assert "rows cross in few bits" in found.reason
    assert found.instead == "train.precision=bf16 instead of fp16"
    assert table.refusal(recipe, msgspec.structs.replace(plan, precision="bf16")) is None
    assert table.refusal(recipe_of({}, {"halo": {}}, precision="fp16"), plan) is None


@pytest.mark.parametrize("options", [Every(32), Every(1), Every(32, 0)])
def test_rows_that_cross_twice_in_a_step_are_refused_by_layer_and_step(options):
    """They would arrive as those of the first time."""
    graph, parts = graph_of(), parts_of("random", 2)

    def twice(channel):
        own = part_of(channel, "gcn", graph, parts)[1]
        transport = Sylvie(options)
        travelling = dataclasses.replace(own, transport=transport, layer=1)
        for step in range(3):
            transport.begin(step)
            travelling.exchange(torch.full((len(own.owned), 8), float(step)))
        with pytest.raises(UserError, match="Rows for layer 2 crossed in step 2 already") as told:
            travelling.exchange(torch.full((len(own.owned), 8), 5.0))
        assert "transport.begin(3)" in str(told.value)
        transport.begin(2)  # made anew
        found = travelling.exchange(torch.full((len(own.owned), 8), 7.0))
        transport.drain()
        return float(found.min())

    assert ranks(2, twice) == [7.0, 7.0]


def test_parts_are_read_again_for_each_layer_and_checked_once(tmp_path, monkeypatch):
    graph, network = graph_of(), network_of("sage", torch.float32)
    cut = halo.boundary(graph.indptr, graph.indices, parts_of("random", 3), 3)
    partition_folder.write(tmp_path / "cut", graph, style_of(NETWORKS["sage"]), cut)
    checked, inner = [], data_hash.of_file
    monkeypatch.setattr(data_hash, "of_file", lambda path: checked.append(path.name) or inner(path))
    part_inference.infer_parts(network.eval(), tmp_path / "cut", 3)
    assert checked == [f"part-{rank}.safetensors" for rank in range(3)]


@pytest.mark.extremes
@pytest.mark.parametrize(
    "options",
    [
        {"bits": 1},
        {"bits": 4, "synchronize": 3, "late": True},
        {"bits": 1, "by_degree": True},
        {"bits": 1, "delta": True},
    ],
)
def test_few_bits_send_less_and_still_learn(options):
    plain = train(recipe_of({"width": 64}, {"halo": HALO}, precision="fp32"), made(edges=600), (50,))
    found = train(recipe_of({"width": 64}, {"halo": options}, precision="fp32"), made(edges=600), (50,))
    descents = [one["losses"][0] - one["losses"][-1] for one in (plain, found)]
    assert found["losses"][-1] == pytest.approx(plain["losses"][-1], rel=0.1)
    assert descents[1] > 0.4 * descents[0] > 0
    assert found["halo"][2] < 0.6 * plain["halo"][2]


@pytest.mark.parametrize(
    ("model", "graph", "message"),
    [
        ({}, {"task": "link"}, "graph.task = 'link'"),
        ({}, {"fanout": [3, 3]}, r"graph.fanout = \[3, 3\]"),
        ({}, {"halo": {"synchronize": -1}}, "below 0"),
        ({}, {"halo": {"by_degree": True}}, "by_degree has no effect"),
        ({}, {"halo": {"by_degree": True, "bits": 8}}, "by_degree has no effect with graph.halo.bits = 8"),
        ({}, {"halo": {"adapt": True}}, "adapt has no effect"),
        ({}, {"halo": {"bits": "auto", "adapt": True}}, "not possible with by_degree, adapt and delta"),
        ({}, {"halo": {"delta": True}}, "delta is not possible with graph.halo.bits = 32"),
        ({}, {"halo": {"staleness": 2}}, "staleness = 2 is not possible with graph.halo.synchronize = 1"),
        ({}, {"halo": {"staleness": 0, "synchronize": 0}}, "staleness = 0 is not possible"),
        ({"activation": "maxk", "k": 3}, {"halo": {"bits": 2, "delta": True}}, "delta is not possible with model"),
        ({"activation": "maxk", "k": 3}, {"halo": {"synchronize": 0}}, "maxk"),
        (
            {},
            {"halo": {"synchronize": 5}},
            r"(?s)synchronize = 5 makes rows late.*82\.7 %.*97\.4 %.*graph.halo.late = true",
        ),
        ({}, {"halo": {"synchronize": 5, "bits": 1, "adapt": True}}, "synchronize = 5 makes rows late"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(model, graph, message):
    with pytest.raises(UserError, match=message):
        recipe_of(model, {"halo": {}, **graph})
