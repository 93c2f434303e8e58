"""Anybody's network: on the whole graph and on drawn neighbourhoods, equal at full fan-out; mistakes are named."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from tests.graph.conftest import made

from espalier.graph.workload import GraphWorkload
from espalier.parallel.workload import Shard
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import UserError

CODE = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self, features, classes, width):
        super().__init__()
        self.first, self.second = nn.Linear(features, width), nn.Linear(width, classes)

    def spread(self, x, edge_index):
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])

    def forward(self, x, edge_index):
        x = self.first(x + self.spread(x, edge_index)).relu()
        return self.second(x + self.spread(x, edge_index))

def network(features, classes, width=8):
    torch.manual_seed(0)
    return Two(features, classes, width)

def pooled(features, classes):
    class Mean(Two):
        def forward(self, x, edge_index):
            return super().forward(x, edge_index).mean(0)
    return Mean(features, classes, 4)

def nothing(features, classes):
    return nn.ReLU()

class Asking(Two):
    def forward(self, x, edge_index, edge_weight, *, batch):
        return super().forward(x, edge_index)

class Relational(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(1, 1)

    def forward(self, x, edge_index, edge_type):
        return x

class Optional(Two):
    def forward(self, x, edge_index, edge_weight=None, batch=None, **more):
        return super().forward(x, edge_index)

def asking(features, classes):
    return Asking(features, 8, classes)

def relational(features, classes):
    return Relational()

def optional(features, classes):
    return Optional(features, 8, classes)

def theirs(features, classes):
    from torch_geometric.nn import GraphSAGE
    torch.manual_seed(0)
    return GraphSAGE(features, 8, num_layers=2, out_channels=classes)
"""


@pytest.fixture
def opened(tmp_path, monkeypatch):
    (tmp_path / "networks.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def do(name="network", fanout=(), **arguments):
        model = {"kind": "messages", "build": f"networks:{name}", "arguments": arguments}
        table = {
            "model": model,
            "data": {"path": "x"},
            "graph": {"fanout": list(fanout)},
            "train": {"batch_tokens": 30},
        }
        recipe = defaults.resolve(recipe_file.from_table(table))[0]
        return GraphWorkload(recipe, made(), tmp_path)

    yield do
    sys.modules.pop("networks", None)


def loss_of(workload):
    model = workload.build(torch.device("cpu"), torch.float64)
    (batch,) = workload.batches(0, Shard(0, 30, 30))
    loss, weight = workload.loss(model, batch)
    loss.backward()
    return torch.cat(
        [torch.stack([loss.detach(), weight.double()]), *(one.grad.flatten() for one in model.parameters())]
    )


@pytest.mark.parametrize("name", ["network", "theirs"])
def test_full_fan_out_is_the_whole_graph(opened, name):
    if name == "theirs":
        pytest.importorskip("torch_geometric")
    torch.testing.assert_close(loss_of(opened(name, fanout=(-1, -1))), loss_of(opened(name)))


def test_it_is_evaluated_and_answers(opened):
    workload = opened(width=4)
    model = workload.build(torch.device("cpu"), torch.float32).eval()
    found = workload.evaluate(model, Shard(0, workload.validation_samples(), 8))
    assert found["accuracy"][1] == workload.validation_samples()
    assert len(workload.task.answers(model, [1, 2])) == 2
    work = workload.work(np.array([1, 30]), "none", "fp32")
    assert (np.asarray(work.forward_flops) > 0).all()


@pytest.mark.parametrize(
    ("name", "says"), [("pooled", r"returned \[3\]"), ("nothing", "returned ReLU"), ("no", "no 'no'")]
)
def test_what_it_gives_wrong_is_said(opened, name, says):
    with pytest.raises(UserError, match=says):
        loss_of(opened(name))


def test_its_arguments_are_checked(opened):
    with pytest.raises(UserError, match="failed when it was called"):
        loss_of(opened(depth=4))


@pytest.mark.parametrize(
    ("name", "argument", "owner"), [("asking", "batch", "Asking"), ("relational", "edge_type", "Relational")]
)
def test_a_network_that_needs_what_no_step_gives_is_refused_with_its_place(opened, tmp_path, name, argument, owner):
    workload = opened(name)
    with pytest.raises(UserError) as refused:
        workload.bare()
    text = (tmp_path / "networks.py").read_text().splitlines()
    at = next(at for at, line in enumerate(text) if f"class {owner}" in line)
    line = next(n for n in range(at, len(text)) if "def forward" in text[n]) + 1
    assert f"{owner} is called with (x, edge_index): missing a required" in str(refused.value)
    assert f"'{argument}'" in refused.value.what
    assert refused.value.why == f"{tmp_path / 'networks.py'}:{line}"


def test_a_network_whose_other_arguments_have_defaults_trains(opened):
    assert torch.isfinite(loss_of(opened("optional"))).all()
