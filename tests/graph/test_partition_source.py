"""A partition folder as `data.path`: a run over parts that were cut before reads no file of the whole graph."""

from __future__ import annotations

import dataclasses
import os

import msgspec
import numpy as np
import pytest
import torch
from tests.graph.conftest import made
from tests.graph.test_workload import recipe_of
from tests.mechanisms.halo_exchange.test_halo_parallel import HALO, close, machines, train

from espalier import recipe as config
from espalier.graph import workload_row
from espalier.graph.networks import gnn_adapter, graph_plan
from espalier.graph.parts import graph_cut as cutting
from espalier.graph.parts import part_inference, partition_folder
from espalier.graph.parts.graph_cut import Cutting
from espalier.graph.sampling.subgraphs import infer
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.plan import decide
from espalier.recipe import data_hash
from espalier.recipe.errors import UserError
from espalier.train import request_from_recipe

SAGE = {"kind": "sage", "depth": 3}


def cut(folder, model=SAGE, ranks=2, nodes=60, sums=True, order="none", **known):
    """A graph, and the folder of its parts."""
    graph, _ = graph_plan.ordered(made(nodes=nodes, **known), order)
    workload = GraphWorkload(recipe_of(model, {"halo": HALO}), graph)
    view = workload.whole_task.train
    cutter = Cutting(graph, view.style, sums and gnn_adapter.takes_sums(workload.bare()))
    parts = cutter.parts([1] * ranks)
    partition_folder.write(folder, graph, view.style, *cutter.boundary(parts, ranks))
    return graph


def of_parts(folder, model=SAGE, ranks=2, quant=None, **graph):
    recipe = recipe_of(model, {"halo": HALO, **graph}, quant)
    pinned = config.Planning(pin=config.Pin(ranks=ranks))
    return msgspec.structs.replace(recipe, data=(config.Data(path=str(folder)),), plan=pinned)


def test_ranks_train_and_validate_on_parts_as_one_rank_on_the_graph_and_each_reads_its_own_alone(tmp_path, monkeypatch):
    graph = cut(tmp_path / "parts")
    alone = train(recipe_of(SAGE), graph)
    log, load, check = tmp_path / "log", partition_folder.load_file, data_hash.of_file

    def told(path, read):
        if path.name.startswith("part-"):
            with log.open("a") as file:
                file.write(f"{os.getpid()} {path.name}\n")
        return read(path)

    monkeypatch.setattr(partition_folder, "load_file", lambda path: told(path, load))
    monkeypatch.setattr(data_hash, "of_file", lambda path: told(path, check))
    recipe = of_parts(tmp_path / "parts")
    found = train(recipe, open_graph(recipe).graph, (50,))
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-9)
    for one, other in zip(found["validation"], alone["validation"], strict=True):
        assert one == pytest.approx(other, rel=1e-9)
    opened = {tuple(line.split()) for line in log.read_text().splitlines()}
    assert len(opened) == 2
    assert {name for _, name in opened} == {"part-0.safetensors", "part-1.safetensors"}


def test_an_opened_partition_has_no_edges_and_no_features_in_memory_and_plans_as_the_graph(tmp_path):
    graph = cut(tmp_path / "parts", nodes=300)
    recipe = of_parts(tmp_path / "parts")
    workload = open_graph(recipe)
    assert workload.graph.edges == 0
    assert workload.graph.features.strides == (0, 0)
    assert workload.graph.labels.tolist() == graph.labels.tolist()
    asked = request_from_recipe.of_recipe(recipe, lambda: workload)
    whole = GraphWorkload(msgspec.structs.replace(recipe, data=()), graph)
    other = request_from_recipe.of_recipe(recipe, lambda: whole)
    plan, expected = (decide.decide(one, machines(1, 0)).taken for one in (asked, other))
    assert plan.predicted.sent_bytes["halo"] == expected.predicted.sent_bytes["halo"] > 0
    assert plan.predicted.step_seconds == pytest.approx(expected.predicted.step_seconds, rel=0.05)
    assert any("reads its part of 2 alone" in one for one in workload.decisions())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 3}, "plan.pin.ranks=2"),
        ({"model": {"kind": "gcn"}}, "loops and scales are others"),
        ({"inductive": True}, "needs the whole graph"),
        ({"halo": None}, "needs the whole graph"),
    ],
)
def test_recipes_that_cannot_train_on_parts_are_refused(tmp_path, changes, message):
    cut(tmp_path / "parts")
    with pytest.raises(UserError, match=message):
        open_graph(of_parts(tmp_path / "parts", **changes))


@pytest.mark.parametrize("model", [SAGE, {"kind": "gat"}, {"kind": "sage", "depth": 3, "activation": "maxk", "k": 3}])
def test_answers_from_parts_are_those_of_the_whole_graph(tmp_path, monkeypatch, model):
    monkeypatch.setattr(cutting, "PAYS", 1.0)  # sums cross too
    graph = cut(tmp_path / "parts", model, ranks=3)
    workload = open_graph(of_parts(tmp_path / "parts", model, 3))
    network = workload.build(torch.device("cpu"), torch.float64).eval()
    whole = GraphWorkload(recipe_of(model), graph)
    expected = infer(network, whole.whole_task.view)
    torch.testing.assert_close(infer(network, workload.whole_task.view), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        infer(network, workload.whole_task.view, 1), infer(network, whole.whole_task.view, 1), rtol=1e-6, atol=1e-6
    )
    assert [one["label"] for one in workload.task.answers(network, [0, 7])] == [
        one["label"] for one in whole.task.answers(network, [0, 7])
    ]
    (table,) = workload.sample(network)
    assert len(table.rows) == 5


@pytest.mark.parametrize("names", [[], [f"paper {node} " + "ü\udc80" * (node + 1) for node in range(60)]])
def test_answers_from_parts_of_a_reordered_graph_are_for_its_own_names_and_numbers(tmp_path, names):
    graph = cut(tmp_path / "parts", order="rcmpp", names=names)
    assert (graph.numbers != np.arange(60)).any()
    workload, whole = open_graph(of_parts(tmp_path / "parts")), GraphWorkload(recipe_of(SAGE), made(names=names))
    network = workload.build(torch.device("cpu"), torch.float64).eval()
    for asked in (",".join(names[one] if names else str(one) for one in (31, 0, 7)), None):
        found, expected = (workload_row.answers(one, network, asked) for one in (workload, whole))
        found, expected = ({one["name"]: one["probability"] for one in each} for each in (found, expected))
        assert found == pytest.approx(expected, abs=1e-6)
        assert asked is None or list(found) == list(expected)
    for one in (workload.graph, part_inference.whole_graph(workload.graph)):
        assert list(one.names) == list(graph.names)
        np.testing.assert_array_equal(one.numbers, graph.numbers)
    assert partition_folder.read_alone(tmp_path / "parts", 1).halo.mention(7) == graph.mention(7)


QUANTIZED = {
    "a2q, weighted": ({"kind": "gcn"}, {"kind": "a2q", "aggregates": 8}, {"weights": np.linspace(0.5, 2, 240)}),
    "mega": (SAGE, {"kind": "mega"}, {}),
    "uniform": ({"kind": "gat", "heads": 2}, {"kind": "uniform"}, {}),
}


@pytest.mark.extremes
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_layers_on_parts_that_were_cut_before_train_as_on_the_graph(tmp_path, name):
    """Widths by node and degree, steps that begin with the values of all ranks, answers and their packages."""
    model, quant, known = QUANTIZED[name]
    quant = {**quant, "fp32": False}  # parts train no other network
    graph = cut(tmp_path / "parts", model, sums=False, **known)
    alone = train(recipe_of(model, quant=quant), graph)
    recipe = of_parts(tmp_path / "parts", model, quant=quant)
    workload = open_graph(recipe)
    found = train(recipe, workload.graph, (50,))
    close(found, alone, rel=1e-6)
    whole = GraphWorkload(recipe_of(model, quant=quant), graph)
    network, expected = (one.build(torch.device("cpu"), torch.float32) for one in (workload, whole))
    network.load_state_dict(expected.state_dict())
    network.eval()  # in training, widths are on their way to the target
    assert torch.equal(infer(network, workload.whole_task.view), infer(expected.eval(), whole.whole_task.view))
    first = train(recipe, workload.graph, (50,), tmp_path / "kept", stop=2)
    then = train(recipe, workload.graph, (50,), tmp_path / "kept")
    assert first["losses"] + then["losses"] == found["losses"]
    tables, others = (list(each.sample(net)[1:]) for each, net in ((workload, network), (whole, expected)))
    assert tables == others
    assert workload.decisions()[1] == next(one for one in whole.decisions() if one.startswith("Quantization"))


def test_the_whole_graph_comes_back_from_its_parts(tmp_path):
    for at, (model, known) in enumerate([({"kind": "gcn"}, {"weights": np.linspace(0.5, 2, 240)}), (SAGE, {})]):
        graph = cut(tmp_path / str(at), model, **known)
        back = part_inference.whole_graph(open_graph(of_parts(tmp_path / str(at), model)).graph)
        assert back.fingerprint() == graph.fingerprint()
        assert dataclasses.replace(back, identity="").fingerprint() == graph.fingerprint()
