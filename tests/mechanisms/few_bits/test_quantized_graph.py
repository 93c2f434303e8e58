"""Quantizers on another graph than that of training: widths stay those that were trained; what is hidden teaches
nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.graph.conftest import made
from tests.mechanisms.few_bits.test_quantization import recipe, trained
from tests.mechanisms.halo_exchange.test_halo_parallel import close, train

from espalier.graph.data import pyg
from espalier.graph.data.graph import divided, seen_in_training
from espalier.graph.sampling.subgraphs import infer
from espalier.graph.workload import GraphWorkload
from espalier.mechanisms.few_bits import quantization
from espalier.mechanisms.few_bits.bit_allocator import BankBits
from espalier.recipe.errors import UserError


def applied(model, options, graph, nodes: int, places=None) -> tuple[GraphWorkload, torch.nn.Module]:
    """The network that was trained on a graph of so many nodes, on another."""
    workload = GraphWorkload(options, graph)
    workload.trained = nodes, places
    found = workload.build(torch.device("cpu"), torch.float32)
    found.load_state_dict(model.state_dict())
    return workload, found.eval()


def widths(model: torch.nn.Module) -> list[torch.Tensor]:
    found = quantization.equipped(model)
    shift = found.target.shift()
    return [one.allocator.widths(one.rule.signed, shift).bits for one in found.features]


@pytest.mark.extremes
@pytest.mark.parametrize("target", [None, "400B"])
@pytest.mark.parametrize("nodes", [20, 300, 2000])
def test_each_degree_keeps_its_width_on_another_graph(nodes, target):
    options = recipe({"kind": "mega", **({"target": target} if target else {})})
    _, model = trained(made(200, 800), options, steps=20)
    workload, found = applied(model, options, made(nodes, 4 * nodes, seed=1), 200)
    assert all(map(torch.equal, widths(found), widths(model)))
    assert torch.isfinite(infer(found, workload.task.view)).all()
    assert quantization.equipped(found).target.target == quantization.equipped(model).target.target


def paths(lengths: range):
    items = [
        {"x": torch.rand(n, 5), "edge_index": torch.tensor([range(n - 1), range(1, n)]), "y": torch.tensor([n % 2])}
        for n in lengths
    ]
    return divided(pyg.from_many(items, origin="paths"), (0.6, 0.2, 0.2), 1)


@pytest.mark.parametrize("target", [None, "200B"])
@pytest.mark.parametrize("lengths", [range(3, 8), range(3, 100)])
def test_a_bank_keeps_its_widths_on_other_graphs(lengths, target):
    options = recipe({"kind": "a2q", **({"target": target} if target else {})}, "gin", graph={"task": "graph"})
    graph = paths(range(3, 23))
    _, model = trained(graph, options, steps=3)
    assert isinstance(quantization.equipped(model).features[0].allocator, BankBits)
    _, found = applied(model, options, paths(lengths), graph.nodes)
    assert all(map(torch.equal, widths(found), widths(model)))


@pytest.mark.parametrize("nodes", [30, 300])
def test_each_node_keeps_its_width_on_another_graph_and_new_ones_have_one_of_them(nodes):
    options = recipe({"kind": "a2q", "target": "60B"})
    _, model = trained(made(), options, steps=20)
    places = np.where(np.arange(nodes) < 60, np.arange(nodes), -1)
    workload, found = applied(model, options, made(nodes, 4 * nodes, seed=1), 60, places)
    assert all(map(torch.equal, widths(found), widths(model)))
    with quantization.packing(quantization.equipped(found)) as stored:
        assert torch.isfinite(infer(found, workload.task.view)).all()
        for rows, known in zip(stored.values(), widths(model), strict=True):
            own = rows.decoded().widths
            assert torch.equal(own[:60], known[: len(own[:60])])
            assert set(own.tolist()) <= set(known.tolist())


def test_a_target_that_is_too_small_is_refused_in_training_alone():
    options = recipe({"kind": "mega", "target": "14B"})
    with pytest.raises(UserError, match="one bit for each of 120 rows takes 15"):
        GraphWorkload(options, made()).build(torch.device("cpu"), torch.float32)


def with_other_hidden(graph):
    """`graph` with other features of held-out nodes, and none of their edges."""
    assert graph.parts is not None
    hidden = np.concatenate([graph.parts.validation, graph.parts.test])
    features = np.array(graph.features)
    features[hidden] = 3 * features[hidden][::-1] + 1
    return replace(seen_in_training(graph), features=features)


@pytest.mark.parametrize(
    ("kind", "quant", "more"),
    [
        ("gcn", {"kind": "a2q", "aggregates": 8}, {}),
        ("gcn", {"kind": "mega", "aggregates": 8}, {}),
        ("sage", {"kind": "uniform", "aggregates": 8}, {}),
        ("gat", {"kind": "mega", "aggregates": 8}, {}),
        ("gin", {"kind": "a2q"}, {}),
        ("gcn", {"kind": "mega"}, {"fanout": [3, 2]}),
    ],
)
def test_hidden_nodes_change_no_gradient_and_no_width_in_training(kind, quant, more):
    options, gradients = recipe(quant, kind, graph={"inductive": True, **more}), []
    states = []
    for graph in (made(), with_other_hidden(made())):
        _, model = trained(graph, options, steps=3)
        states.append(model.state_dict())
        gradients.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    assert any(name.endswith("raw_step") for name in gradients[0])
    for one, other in (gradients, states):
        assert list(one) == list(other)
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


def test_degrees_are_those_of_the_graph_that_training_sees():
    """Counts too, which stand for as many rows as there are; in evaluation all edges count."""
    graph = made(200, 800)
    workload, model = trained(graph, recipe({"kind": "mega"}, graph={"inductive": True}), steps=2)
    found, counts = quantization.equipped(model), quantization.equipped(model).features[0].allocator.counts
    seen = torch.from_numpy(workload.task.train.graph.degrees()[graph.parts.train])
    assert counts.sum() == pytest.approx(200)
    assert torch.equal(counts[:40] * (len(seen) / 200), torch.bincount(seen, minlength=40)[:40].float())
    block = workload.task.view.block
    assert torch.equal(found.index(block).degrees, torch.from_numpy(graph.degrees()))
    model.train()
    index = found.index(workload.task.train.block)
    assert torch.equal(index.degrees[index.shown], seen)
    assert index.shown.nonzero()[:, 0].tolist() == graph.parts.train.tolist()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["a2q", "mega"])
def test_ranks_that_hide_nodes_train_as_one(kind):
    known = {"model": {"kind": "gcn", "width": 8, "dropout": 0.0}, "train": {"precision": "fp64", "steps": 4}}
    quant, hidden = {"kind": kind, "aggregates": 8}, {"inductive": True}
    alone = train(recipe(quant, graph=hidden, **known), made())
    ranks = train(recipe(quant, graph={**hidden, "halo": {}}, **known), made(), (40,))
    close(ranks, alone, rel=1e-6)
