"""Networks that are not ours, over parts of a graph: they train, validate and normalize as on one rank."""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from tests.graph.conftest import made
from tests.mechanisms.halo_exchange.test_halo_parallel import STEPS, close, plan_of, train
from torch import nn

from espalier import recipe as config
from espalier.graph.networks import foreign_network
from espalier.graph.parts import partition_folder
from espalier.graph.parts.graph_cut import Cutting
from espalier.graph.sampling.subgraphs import infer
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import UserError

CODE = '''
import torch
from torch import nn

class Sum(nn.Module):
    """Sums of neighbours; `symmetric`: scaled by the degrees of both ends; `hops` passes."""

    def __init__(self, inputs, outputs, symmetric=False, hops=1):
        super().__init__()
        self.map, self.symmetric, self.hops = nn.Linear(inputs, outputs), symmetric, hops

    def propagate(self, edge_index, x, weight):
        return torch.zeros_like(x).index_add(0, edge_index[1], weight[:, None] * x[edge_index[0]])

    def forward(self, x, edge_index):
        own, weight = self.map(x), x.new_ones(edge_index.shape[1])
        if self.symmetric:
            degrees = x.new_zeros(len(x)).index_add(0, edge_index[1], weight).clamp(min=1).rsqrt()
            weight = degrees[edge_index[0]] * degrees[edge_index[1]]
        found = own
        for _ in range(self.hops):
            found = self.propagate(edge_index, x=found, weight=weight)
        return own + found

class Network(nn.Module):
    def __init__(self, features, classes, norm, pooled=False, **how):
        super().__init__()
        self.embed = nn.Linear(features, 8)
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) if norm else nn.LayerNorm(8) for _ in range(2))
        self.first, self.second = Sum(8, 8, **how), Sum(8, classes, **how)
        self.pooled = pooled

    def forward(self, x, edge_index):
        x = self.first(self.norms[0](self.embed(x)), edge_index)
        x = self.norms[1](x).relu()
        return self.second(x - x.mean(0) if self.pooled else x, edge_index)

def network(features, classes, norm=False, **how):
    torch.manual_seed(0)
    return Network(features, classes, norm, **how)

class Trained(Network):
    """Does something in training alone."""

    def __init__(self, features, classes, what):
        super().__init__(features, classes, what == "norm")
        self.what = what

    def forward(self, x, edge_index):
        if self.what == ("mean" if self.training else "mean, evaluated too"):
            x = x - x.mean(0)
        if self.what == "dropout":
            x = nn.functional.dropout(x, 0.5, self.training)
        if self.training and self.what == "edges":
            edge_index = edge_index[:, torch.rand(edge_index.shape[1]) < 0.5]
        return super().forward(x, edge_index)

def trained(features, classes, what):
    torch.manual_seed(0)
    return Trained(features, classes, what)

class Bare(nn.Module):
    """Answers nothing of rows that are zero, and nothing at all where `gate` is."""

    def __init__(self, features, classes, gate):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Sum(features, 8, True), Sum(8, classes, True)
        self.gate = nn.Parameter(torch.tensor(gate))
        nn.init.zeros_(self.first.map.bias), nn.init.zeros_(self.second.map.bias)

    def forward(self, x, edge_index):
        return self.gate * self.second(self.first(x, edge_index), edge_index)

def bare(features, classes, gate=1.0):
    return Bare(features, classes, gate)

def silent(features, classes):
    class Silent(nn.Linear):
        def forward(self, x, edge_index):
            return super().forward(x)
    return Silent(features, classes)

def counted(features, classes):
    class Counted(Network):
        def forward(self, x, edge_index):
            return super().forward(x + torch.zeros(60, 1), edge_index)
    return Counted(features, classes, False)

def theirs(features, classes, name):
    from torch_geometric import nn as pyg
    torch.manual_seed(0)
    if name == "InstanceNorm":
        norm = pyg.InstanceNorm(8, track_running_stats=True)
        return pyg.GraphSAGE(features, 8, num_layers=2, out_channels=classes, norm=norm, dropout=0.5)
    if name == "APPNP":
        class Hops(nn.Module):
            def __init__(self):
                super().__init__()
                self.map, self.spread = nn.Linear(features, classes), pyg.APPNP(3, 0.2)
            def forward(self, x, edge_index):
                return self.spread(self.map(x), edge_index)
        return Hops()
    if name in ("ChebConv", "ARMAConv"):
        how = {"K": 3} if name == "ChebConv" else {"num_stacks": 2, "num_layers": 3}
        class Layers(nn.Module):
            def __init__(self):
                super().__init__()
                layer = getattr(pyg, name)
                self.first, self.second = layer(features, 8, **how), layer(8, classes, **how)
            def forward(self, x, edge_index):
                return self.second(self.first(x, edge_index).relu(), edge_index)
        return Layers()
    return getattr(pyg, name)(features, 8, num_layers=3, out_channels=classes, norm="batch_norm")
'''


@pytest.fixture(autouse=True)
def networks(tmp_path, monkeypatch):
    (tmp_path / "foreign_networks.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    sys.modules.pop("foreign_networks", None)


def recipe_of(build="network", halo=None, precision="fp64", **arguments):
    table = {
        "model": {"kind": "messages", "build": f"foreign_networks:{build}", "arguments": arguments},
        "data": {"path": "made"},
        "graph": {} if halo is None else {"halo": halo},
        "train": {"steps": STEPS, "precision": precision},
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


@pytest.mark.extremes
@pytest.mark.parametrize("how", [{}, {"norm": True}, {"symmetric": True, "norm": True}, {"hops": 3}])
def test_any_parts_train_and_validate_as_one_rank(how):
    alone = train(recipe_of(**how), made())
    found = train(recipe_of(halo={}, **how), made(), (20, 60) if how.get("norm") else (30,))
    close(found, alone, rel=1e-8)
    assert sum(found["halo"]) > 0


@pytest.mark.parametrize("name", ["ChebConv", "ARMAConv"])
def test_layers_of_pyg_that_read_rows_several_times_train_over_parts_as_on_one_rank(name):
    pytest.importorskip("torch_geometric")
    alone = train(recipe_of("theirs", name=name), made())
    close(train(recipe_of("theirs", halo={}, name=name), made(), (20, 60)), alone, rel=1e-6)


def test_layers_that_scale_edges_by_how_many_leave_a_node_are_refused_where_edges_run_one_way():
    pytest.importorskip("torch_geometric")
    with pytest.raises(UserError, match="run one way by how many leave a node, as ChebConv does"):
        GraphWorkload(recipe_of("theirs", halo={}, name="ChebConv"), made(undirected=False)).halos()
    assert GraphWorkload(recipe_of("theirs", halo={}, name="ARMAConv"), made(undirected=False)).halos() is not None


@pytest.mark.extremes
@pytest.mark.parametrize("name", ["GraphSAGE", "GCN", "GAT", "GIN", "APPNP"])
def test_networks_of_pyg_train_over_parts_as_on_one_rank(name):
    pytest.importorskip("torch_geometric")
    alone = train(recipe_of("theirs", name=name), made())
    close(train(recipe_of("theirs", halo={}, name=name), made(), (40,)), alone, rel=1e-6)


def test_few_bits_cross_late_and_bytes_are_those_of_the_plan():
    for halo in ({}, {"bits": 2, "synchronize": 2, "late": True}):
        recipe = recipe_of(halo=halo, precision="fp32", norm=True)
        workload = GraphWorkload(recipe, made())
        plan = plan_of(recipe, workload, (20, 60))
        shares = [one.share[1] - one.share[0] for one in plan.ranks]
        halos = workload.halos()
        assert halos is not None
        found = train(recipe, made(), (20, 60))
        assert found["halo"][1:] == [halos.step_bytes(shares, 4)[0].sum()] * (STEPS - 1)
        assert np.isfinite(found["losses"]).all()


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("network", {"pooled": True}, "its answers are not those on the whole"),
        ("trained", {"what": "mean, evaluated too"}, "two parts its answers are not those on the whole"),
        ("silent", {}, "method propagate"),
        ("counted", {}, "on 48 nodes it raised RuntimeError"),
    ],
)
def test_networks_that_cannot_be_cut_are_refused(name, how, message):
    with pytest.raises(UserError, match=message):
        GraphWorkload(recipe_of(name, halo={}, **how), made()).halos()


@pytest.mark.parametrize("what", ["norm", "dropout", "edges"])
def test_networks_that_drop_values_or_edges_in_training_can_be_cut(what):
    before = torch.get_rng_state()
    assert GraphWorkload(recipe_of("trained", halo={}, what=what), made()).halos().network.widths == (8, 8)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_network_that_reads_other_nodes_in_training_alone_is_refused():
    message = "in training, on a small graph in two parts its answers are not those on the whole"
    with pytest.raises(UserError, match=message):
        GraphWorkload(recipe_of("trained", halo={}, what="mean"), made()).halos()
    pytest.importorskip("torch_geometric")
    with pytest.raises(UserError, match=message):
        GraphWorkload(recipe_of("theirs", halo={}, name="InstanceNorm"), made()).halos()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_statistics_of_batch_normalization_have_the_range_and_digits_of_float32(dtype):
    """Of more rows than fp16 can count."""
    random = torch.Generator().manual_seed(0)
    rows = (20 + 10 * torch.randn(70_000, 3, generator=random)).to(dtype)
    ours = nn.BatchNorm1d(3, dtype=torch.promote_types(dtype, torch.float32))
    theirs = nn.BatchNorm1d(3, dtype=torch.float64)
    messages = foreign_network.ForeignMessages()
    messages.halo = SimpleNamespace(owned=range(len(rows)), group=None)
    found = foreign_network._normalized(messages, ours, ours.forward, rows)
    assert found.dtype == dtype
    torch.testing.assert_close(found, theirs(rows.double()).to(dtype), rtol=1e-2, atol=1e-4)
    for one, other in ((ours.running_mean, theirs.running_mean), (ours.running_var, theirs.running_var)):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("size", "gate"), [(0.0, 1.0), (1e-7, 1.0), (1.0, 0.0)])
def test_what_a_network_needs_depends_on_neither_features_nor_first_parameters(size, gate):
    graph = dataclasses.replace(made(), features=np.float32(size) * made().features)
    assert GraphWorkload(recipe_of("bare", halo={}, gate=gate), graph).halos().network.deep
    with pytest.raises(UserError, match="its answers are not those on the whole"):
        GraphWorkload(recipe_of(halo={}, pooled=True), graph).halos()


def test_a_network_is_itself_where_the_graph_is_whole():
    workload = GraphWorkload(recipe_of(norm=True), made())
    model = workload.build(torch.device("cpu"), torch.float64)
    expected = infer(model, workload.task.view)
    torch.testing.assert_close(infer(foreign_network.equip(model), workload.task.view), expected)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        next(model.parameters()).zero_()
    torch.testing.assert_close(infer(copied, workload.task.view), expected)


def of_parts(folder, **how):
    """A graph of whose parts there is a folder, and a recipe for two ranks that read it."""
    graph, recipe = made(), recipe_of(halo={}, **how)
    view = GraphWorkload(recipe, graph).whole_task.train
    cutting = Cutting(graph, view.style)
    partition_folder.write(folder, graph, view.style, *cutting.boundary(cutting.parts([1, 1]), 2))
    pinned = config.Planning(pin=config.Pin(ranks=2))
    return graph, msgspec.structs.replace(recipe, data=(config.Data(path=str(folder)),), plan=pinned)


@pytest.mark.parametrize("how", [{"norm": True}, {"hops": 3}])
def test_own_networks_train_on_a_folder_of_parts_as_on_one_rank_and_each_reads_its_own_alone(
    tmp_path, monkeypatch, how
):
    graph, recipe = of_parts(tmp_path / "parts", **how)
    alone = train(recipe_of(**how), graph)
    log, load = tmp_path / "log", partition_folder.load_file

    def told(path):
        if path.name.startswith("part-"):
            with log.open("a") as file:
                file.write(f"{os.getpid()} {path.name}\n")
        return load(path)

    opened = open_graph(recipe).graph
    assert opened.edges == 0
    whole = GraphWorkload(recipe_of(halo={}, **how), graph)
    assert GraphWorkload(recipe, opened).halos().network == whole.halos().network
    monkeypatch.setattr(partition_folder, "load_file", told)
    close(train(recipe, opened, (50,)), alone, rel=1e-9)
    read = {tuple(line.split()) for line in log.read_text().splitlines()}
    assert len(read) == 2
    assert {name for _, name in read} == {"part-0.safetensors", "part-1.safetensors"}


def test_answers_of_own_networks_from_parts_are_those_of_the_whole_graph(tmp_path):
    graph, recipe = of_parts(tmp_path / "parts")
    workload = open_graph(recipe)
    network = workload.build(torch.device("cpu"), torch.float64).eval()
    expected = infer(network, GraphWorkload(recipe_of(), graph).whole_task.view)
    torch.testing.assert_close(infer(network, workload.whole_task.view), expected)
    assert workload.reach()[0].edges == graph.edges


def test_a_network_that_needs_edges_of_others_is_refused_on_a_folder_of_parts(tmp_path):
    _, recipe = of_parts(tmp_path / "parts", symmetric=True)
    workload = open_graph(recipe)
    with pytest.raises(UserError, match="cut beforehand") as told:
        workload.halos()
    assert "degrees of their sources" in str(told.value)
