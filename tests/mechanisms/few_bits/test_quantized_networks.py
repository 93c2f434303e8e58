"""[quant] in graph transformers and in networks of anybody's code: what is stored is what is computed with, packed or
not; ranks and parts train as one; what was exported predicts by itself."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
import torch
from tests.graph.conftest import made
from tests.graph.test_foreign_network import CODE, networks
from tests.graph.test_workload import STEPS as TRAINED
from tests.mechanisms.few_bits.test_quantization import trained
from tests.mechanisms.halo_exchange.test_halo_parallel import close, train
from tests.story.programs import MACHINE, forked
from torch.nn.utils import parametrize

from espalier import recipe as config
from espalier.graph.data import pyg, synthetic
from espalier.graph.data.graph import divided
from espalier.graph.parts import partition_folder
from espalier.graph.parts.graph_cut import Cutting
from espalier.graph.sampling.subgraphs import infer
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.kernels.step_codes import STEPS
from espalier.mechanisms.few_bits import energy, packed_run, quantization
from espalier.mechanisms.few_bits.a2q import ColumnQuantizer
from espalier.mechanisms.few_bits.bit_allocator import BankBits
from espalier.parallel.workload import Shard
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import UserError

__all__ = ["networks"]
TRANSFORMER = {"kind": "graph-transformer", "depth": 2, "width": 16, "heads": 2, "dropout": 0.1}
OWN = {"kind": "messages", "build": "foreign_networks:network"}
THEIRS = {**OWN, "build": "foreign_networks:theirs", "arguments": {"name": "GraphSAGE"}}
MODELS = {
    "transformer": TRANSFORMER,
    "virtual token, averages": {**TRANSFORMER, "virtual": 1, "local": 2},
    "own layers": OWN,
    "several hops": {**OWN, "arguments": {"hops": 2, "norm": True}},
    "PyG": THEIRS,
}


def recipe_of(model, quant=None, halo=None, graph=None, **train):
    table = {
        "model": model,
        "data": {"path": "made"},
        "graph": graph or ({} if halo is None else {"halo": halo}),
        "train": {"steps": TRAINED, "precision": "fp32", **train},
        **({"quant": quant} if quant else {}),
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("quant", ["a2q", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mega", "uniform"))])
@pytest.mark.parametrize("name", ["transformer", "own layers"])
def test_networks_learn_with_every_policy_within_the_target(tmp_path, name, quant):
    graph = synthetic.load("planted:nodes=150,degree=5,features=12,classes=3,train=0.5", tmp_path)
    aggregates = {"aggregates": 8} if name == "transformer" else {}
    workload, model = trained(graph, recipe_of(MODELS[name], {"kind": quant, **aggregates}, steps=60))
    logits, parts = infer(model, workload.task.view), workload.task.parts
    assert (logits[parts.train].argmax(1) == workload.task.labels[parts.train]).float().mean() > 0.6
    found = quantization.equipped(model)
    if quant != "uniform":
        assert quantization.stored_bytes(found).codes <= found.target.target
    assert any("packages, everything counted" in row[0] for table in workload.sample(model)[1:2] for row in table.rows)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_codes_times_steps_are_what_is_computed_with_and_packed_answers_are_the_same_bit_for_bit(name):
    if name == "PyG":
        pytest.importorskip("torch_geometric")
    workload, model = trained(made(), recipe_of(MODELS[name], {"kind": "a2q"}), steps=4)
    found, seen = quantization.equipped(model), {}
    for one in found.features:
        one.register_forward_hook(lambda module, inputs, out: seen.update({module: (inputs, out)}))
    plain = infer(model, workload.task.view)
    assert len(seen) == len(found.features) >= 3
    for quantizer, (inputs, out) in seen.items():
        coded = quantizer.codes(*inputs)
        assert len(out) == workload.graph.nodes
        assert torch.equal(coded.codes * STEPS[coded.steps.long()][:, None], out)
    found.packed = True
    assert torch.equal(infer(model, workload.task.view), plain)
    assert len(found.stored) == len(found.features)
    codes = sum(8 * -(-int(packed.decoded().widths[row]) * packed.columns // 8)
                for packed in found.stored.values() for row in range(packed.rows))  # fmt: skip
    assert codes == 8 * quantization.stored_bytes(found).codes
    for key, packed in packed_run.packed_weights(model).items():
        weight = model.get_parameter(key.replace(".weight", ".parametrizations.weight.original"))
        holder = model.get_submodule(key.removesuffix(".weight"))
        assert isinstance(holder.parametrizations["weight"][0], ColumnQuantizer)
        assert packed.rows == len(weight)
        coded = packed.decoded()
        assert torch.equal(coded.codes * STEPS[coded.steps.long()][:, None], holder.weight)
    linear = [one for one in model.modules() if "Linear" in type(one).__name__]
    assert linear
    assert all(map(parametrize.is_parametrized, linear))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quant", "halo"),
    [
        ("transformer", {"kind": "a2q"}, {}),
        ("virtual token, averages", {"kind": "mega", "aggregates": 8}, {}),
        ("own layers", {"kind": "a2q"}, {}),
        ("several hops", {"kind": "mega"}, {}),
    ],
)
def test_ranks_train_as_one_and_a_run_that_was_stopped_goes_on(tmp_path, name, quant, halo):
    model = {**MODELS[name], "dropout": 0.0} if "width" in MODELS[name] else MODELS[name]
    alone = train(recipe_of(model, quant, precision="fp64"), made())
    recipe = recipe_of(model, quant, halo, precision="fp64")
    found = train(recipe, made(), (40,))
    close(found, alone, rel=1e-6)
    first = train(recipe, made(), (40,), tmp_path / "kept", stop=2)
    then = train(recipe, made(), (40,), tmp_path / "kept")
    assert first["losses"] + then["losses"] == found["losses"]


def test_own_networks_on_a_folder_of_parts_train_as_on_the_graph(tmp_path):
    quant, graph = {"kind": "a2q"}, made()
    recipe = recipe_of(OWN, quant, {}, precision="fp64")
    view = GraphWorkload(recipe, graph).whole_task.train
    cutting = Cutting(graph, view.style)
    partition_folder.write(tmp_path / "parts", graph, view.style, *cutting.boundary(cutting.parts([1, 1]), 2))
    pinned = config.Planning(pin=config.Pin(ranks=2))
    recipe = msgspec.structs.replace(recipe, data=(config.Data(path=str(tmp_path / "parts")),), plan=pinned)
    close(
        train(recipe, open_graph(recipe).graph, (50,)), train(recipe_of(OWN, quant, precision="fp64"), graph), rel=1e-6
    )


@pytest.mark.parametrize("name", ["virtual token, averages", "own layers"])
def test_links_whole_graphs_and_drawn_neighbourhoods_have_few_bits_too(name):
    items = [
        {"x": torch.rand(n, 5), "edge_index": torch.tensor([range(n - 1), range(1, n)]), "y": torch.tensor([n % 2])}
        for n in range(3, 23)
    ]
    small = divided(pyg.from_many(items, origin="paths"), (0.6, 0.2, 0.2), 1)
    model = {**MODELS[name], **({"local": 0} if "local" in MODELS[name] else {})}
    for graph, options in ((small, {"task": "graph"}), (made(), {"task": "link"}), (made(), {"fanout": [3, 2]})):
        recipe = recipe_of(model, {"kind": "a2q", "target": "2KB"}, graph=options)
        workload, network = trained(graph, recipe, steps=2)
        found = quantization.equipped(network)
        banks = [isinstance(one.allocator, BankBits) for one in found.features]
        assert banks == [options.get("task") == "graph"] * 3
        assert all(bool((one.allocator.raw_step.grad != 0).any()) for one in found.features)
        figures = workload.evaluate(network, Shard(0, workload.task.validation, workload.task.validation))
        assert all(torch.isfinite(torch.tensor(value)).all() for value in figures.values())
    with pytest.raises(UserError, match="energy of this network is not counted"):
        energy.parts(workload, network)


def test_plans_say_what_is_rounded_and_count_it():
    for name, said in (("transformer", "weights 4 bits, messages 4 bits"), ("own layers", "weights 4 bits.")):
        workload = GraphWorkload(recipe_of(MODELS[name], {"kind": "a2q"}), made())
        plain = GraphWorkload(recipe_of(MODELS[name]), made())
        told = " ".join(workload.decisions())
        assert "Quantization (a2q): features at most" in told
        assert said in told
        one, other = (each.work(30, "none", "fp32") for each in (workload, plain))
        assert one.moved > other.moved
        assert one.saved > other.saved


def test_sums_inside_layers_that_are_not_ours_are_refused():
    with pytest.raises(UserError, match=r"quant.aggregates = 8 is not possible with model.kind = \"messages\""):
        recipe_of(OWN, {"kind": "a2q", "aggregates": 8})


VARYING = """
class Varying(Network):
    def forward(self, x, edge_index):
        if len(x) > 48:
            x = self.first.propagate(edge_index, x=x, weight=x.new_ones(edge_index.shape[1]))
            x = self.first(self.embed(x), edge_index)
        return super().forward(x if x.shape[1] == 5 else x[:, :5], edge_index)

def varying(features, classes):
    return Varying(features, classes, False)
"""


def test_a_network_whose_layers_read_other_rows_in_another_pass_is_refused(tmp_path):
    with (tmp_path / "foreign_networks.py").open("a") as file:
        file.write(VARYING)
    with pytest.raises(UserError, match=r"\[quant\] is not possible with this network: a layer reads"):
        GraphWorkload(recipe_of({**OWN, "build": "foreign_networks:varying"}, {"kind": "a2q"}), made()).build(
            torch.device("cpu"), torch.float32
        )


def test_a_network_that_takes_one_number_of_nodes_alone_is_refused():
    workload = GraphWorkload(recipe_of({**OWN, "build": "foreign_networks:counted"}, {"kind": "a2q"}), made())
    with pytest.raises(UserError, match=r"\[quant\] is not possible with this network: on 48 nodes it raised"):
        workload.decisions()


def told(done) -> list[list[str]]:
    assert done.returncode == 0, done.stderr
    return [line.split("\t") for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["virtual token, averages", "own layers"])
def test_what_was_exported_predicts_by_itself_what_the_run_predicts(tmp_path, name):
    (tmp_path / "machine.toml").write_text(MACHINE)
    (tmp_path / "foreign_networks.py").write_text(CODE)
    model = "\n".join(f"{key} = {value!r}" for key, value in MODELS[name].items())
    path = "planted:nodes=200,degree=5,features=16,classes=3,train=0.5"
    (tmp_path / "recipe.toml").write_text(
        f"[model]\n{model}\n[quant]\nkind = 'a2q'\n[data]\npath = '{path}'\ncache = '{tmp_path}'\n[train]\nsteps = 5\n"
        "[plan]\ncluster = 'machine.toml'\ntrial = false\n[plan.pin]\nranks = 1\nthreads = 1\n"
    )
    done = forked(tmp_path, "train", "recipe.toml", "--run", "run")
    assert done.returncode == 0, done.stderr
    assert "packages, everything counted" in (tmp_path / "run" / "report.html").read_text()
    expected = told(forked(tmp_path, "predict", "run"))
    done = forked(tmp_path, "export", "run", "--to", "packed", "--out", "packed")
    assert done.returncode == 0, done.stderr
    trust = ["--trust"] if name == "own layers" else []
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert told(forked(tmp_path, "predict", "packed", *trust)) == expected
    assert len(list(itertools.chain(*expected))) == 3 * 200
    assert Path(tmp_path / "packed" / "packed.pkg").stat().st_size < 4 * 200 * 16 * 3
