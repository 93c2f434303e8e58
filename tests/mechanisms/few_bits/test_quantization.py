"""Recipes with [quant]: the plan tells the bytes, training learns widths under the target, sums are exact."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from programs import MACHINE
from programs import forked as espalier
from tests.graph.conftest import made
from tests.graph.test_workload import recipe_of, train

from espalier import recipe as config
from espalier.graph.data import pyg, synthetic
from espalier.graph.data.graph import Graph, divided
from espalier.graph.networks import base, compiled_aggregate
from espalier.graph.sampling.subgraphs import infer
from espalier.graph.workload import GraphWorkload
from espalier.kernels.step_codes import STEPS
from espalier.mechanisms.few_bits import quantization, run_rounding
from espalier.mechanisms.few_bits.bit_allocator import BIT_RATE, BankBits, DegreeBits, RowIndex
from espalier.mechanisms.few_bits.mega import package_file
from espalier.parallel.workload import Shard
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import UserError
from espalier.store.artifacts import Curve, Table
from espalier.track import events


def recipe(quant: dict | None, kind: str = "gcn", **sections) -> config.Recipe:
    table = {"model": {"kind": kind, "width": 8, "dropout": 0.2}, "data": {"path": "made"}, "train": {"steps": 60}}
    if kind == "gat":
        table["model"]["heads"] = 2
    return defaults.resolve(recipe_file.from_table({**table, **({"quant": quant} if quant else {}), **sections}))[0]


def trained(graph: Graph, options: config.Recipe, steps: int = 60):
    workload = GraphWorkload(options, graph)
    model = workload.build(torch.device("cpu"), torch.float32).train()
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=0.01)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        for batch in workload.batches(step, Shard(0, workload.global_batch, workload.global_batch)):
            loss, weight = workload.loss(model, batch)
            (loss / weight).backward()
        optimizer.step()
    return workload, model.eval()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "quant"),
    [
        pytest.param(kind, quant, marks=() if kind == "gcn" or quant == "a2q" else pytest.mark.slow)
        for kind in ("gcn", "sage", "gin", "gat")
        for quant in ("a2q", "mega", "uniform")
    ],
)
def test_every_network_learns_with_every_policy(tmp_path, kind, quant):
    graph = synthetic.load("planted:nodes=150,degree=5,features=12,classes=3,train=0.5", tmp_path)
    workload, model = trained(graph, recipe({"kind": quant, "aggregates": 8}, kind))
    logits, parts = infer(model, workload.task.view), workload.task.parts
    assert (logits[parts.train].argmax(1) == workload.task.labels[parts.train]).float().mean() > 0.6
    found = quantization.quantization_of(model)
    if quant != "uniform":
        assert quantization.stored_bytes(found).codes <= found.target.target


def test_the_plan_tells_the_target_and_what_fp32_takes(make_graph):
    workload = GraphWorkload(recipe({"kind": "a2q", "target": "150B"}), make_graph())
    told = " ".join(workload.decisions())
    assert "features at most 150 B of codes (1.54 bits a value)" in told
    assert "fp32 takes 3.05 KiB" in told
    assert "weights 4 bits, messages 4 bits" in told


def test_a_target_below_one_bit_a_node_is_refused_before_training(make_graph):
    with pytest.raises(UserError, match="one bit for each of 120 rows takes 15"):
        GraphWorkload(recipe({"kind": "a2q", "target": "14B"}), make_graph()).decisions()


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        ({"kind": "a2q", "bits": 9}, "quant.bits = 9"),
        ({"kind": "a2q", "bits": 0.5}, "quant.bits = 0.5"),
        ({"kind": "a2q", "bits": float("nan")}, "quant.bits is not a number"),
        ({"kind": "uniform", "bits": 2.5}, "quant.bits = 2.5 is not possible with quant.kind"),
        ({"kind": "mega", "weights": 1}, "quant.weights = 1"),
        ({"kind": "mega", "messages": 12}, "quant.messages = 12"),
        ({"kind": "uniform", "target": "5KB"}, "quant.target has no effect"),
        ({"kind": "a2q", "target": "5 potatoes"}, "quant.target"),
    ],
)
def test_options_that_no_width_has_are_refused(quant, message):
    with pytest.raises(UserError, match=message):
        recipe(quant)


def test_other_kinds_of_model_have_no_such_section():
    table = {"model": {"kind": "gpt"}, "data": {"path": "x"}, "quant": {"kind": "a2q"}}
    with pytest.raises(UserError, match=r"\[quant\] belongs to"):
        defaults.resolve(recipe_file.from_table(table))


def test_widths_follow_degrees_where_each_degree_has_its_own(make_graph):
    _, model = trained(make_graph(), recipe({"kind": "mega"}))
    found = quantization.quantization_of(model)
    for one in found.features:
        widths = quantization.node_widths(found, one)
        for degree in found.degrees.unique().tolist():
            assert len(widths[found.degrees == degree].unique()) == 1


def test_a_degree_that_training_lacked_has_the_pair_of_the_nearest(make_graph):
    bits = DegreeBits(torch.tensor([1, 1, 5, 9]), 4)
    entry = bits.entries_of(torch.zeros(6, 2), RowIndex(None, torch.tensor([0, 2, 4, 6, 8, 1000])), True)
    assert entry.tolist() == [1, 1, 5, 5, 9, 9]


@pytest.mark.slow
def test_hiding_half_of_the_nodes_costs_learned_widths_no_more_than_fp32(tmp_path):
    """Inductive: held-out nodes and their edges are hidden while training, so that degrees are half as large and some
    are new afterwards. What a network loses by that without quantization is not counted."""
    graph = synthetic.load("planted:nodes=2000,degree=8,features=32,classes=4,train=0.5", tmp_path)
    lost = {}
    for kind in (None, "mega", "a2q"):
        found = {False: 0.0, True: 0.0}
        for inductive, seed in itertools.product(found, (1, 2, 3)):
            options = recipe(
                {"kind": kind} if kind else None, graph={"inductive": inductive}, train={"steps": 80, "seed": seed}
            )
            workload, model = trained(graph, options, steps=80)
            right = infer(model, workload.task.view).argmax(1) == workload.task.labels
            found[inductive] += 100 / 3 * float(right[workload.task.parts.test].float().mean())
        assert found[False] > 70
        lost[kind] = found[False] - found[True]
        assert lost[kind] < lost[None] + 0.5, lost


def test_sampled_neighbourhoods_have_the_pairs_of_their_nodes(make_graph):
    graph = make_graph()
    workload, model = trained(graph, recipe({"kind": "a2q"}, graph={"fanout": [-1, -1]}, train={"steps": 5}), steps=5)
    whole = infer(model, workload.task.view)
    features, drawn = workload.task.view.around(workload.task.parts.validation, (-1, -1))
    found = model(features, drawn.blocks)
    assert torch.allclose(found, whole[workload.task.parts.validation], atol=1e-5)


def test_nodes_that_no_step_saw_take_the_nearest_pair(make_graph):
    workload, model = trained(make_graph(), recipe({"kind": "a2q"}), steps=20)
    quantizer = quantization.quantization_of(model).features[0]
    quantizer.allocator.raw_bits.data[:30] = 3.0 / BIT_RATE
    before = infer(model, workload.task.view)
    assert torch.equal(infer(model, workload.task.view), before)
    quantizer.allocator.seen[:30] = 0
    after = infer(model, workload.task.view)
    assert not torch.equal(after, before)
    assert torch.isfinite(after).all()


@pytest.mark.parametrize("kind", ["gcn", "sage", "gin"])
def test_packed_sums_of_messages_are_the_fake_quantized_sums_and_those_of_integers_bit_for_bit(make_graph, kind):
    """MixQ's theorem (arXiv 2505.09361) of what predictions and training compute: edges without weights."""
    workload, model = trained(make_graph(), recipe({"kind": "a2q"}, kind), steps=20)
    quantized = next(one.quantized for one in model.layers if one.quantized.messages is not None)
    held, seen = workload.task.view, {}
    messages = quantized.messages
    messages.register_forward_hook(lambda module, inputs, out: seen.update(x=inputs[0], out=out))
    infer(model, held)
    _, block = quantization._source_scale(held.block, quantized.root)
    assert (block.weights, block.right) == (None, None)
    packed = quantization._packed_sums(messages, block, seen["x"])
    for plain in (base.aggregate, compiled_aggregate.aggregate):
        assert torch.equal(quantization._scaled_sums(plain, block, seen["out"]), packed)
    codes, step = messages.codes(seen["x"])
    assert torch.equal(codes * step, seen["out"])
    adjacency = torch.zeros(block.targets, block.sources, dtype=torch.int64)
    adjacency.index_put_((block.rows(), block.indices.long()), torch.tensor(1), accumulate=True)
    whole = adjacency @ codes.long()
    assert int(whole.abs().max()) < 2**16, "sums of so many codes are float32 without rounding"
    sums = whole.float() * step
    assert torch.equal(packed, sums if block.left is None else sums * block.left[:, None])


def test_the_quantized_rows_are_codes_of_the_stored_steps(make_graph):
    workload, model = trained(make_graph(), recipe({"kind": "mega"}), steps=20)
    found = quantization.quantization_of(model)
    layer, quantizer = model.layers[1], found.features[1]
    seen = {}
    quantizer.register_forward_hook(lambda module, inputs, out: seen.update(inputs=inputs, out=out))
    infer(model, workload.task.view)
    coded = quantizer.codes(*seen["inputs"])
    assert torch.equal(coded.codes * STEPS[coded.steps.long()][:, None], seen["out"])
    assert layer.quantizer is quantizer


def test_the_report_shows_bits_against_degree_and_bytes(make_graph):
    workload, model = trained(make_graph(), recipe({"kind": "a2q"}), steps=5)
    shown = [one for one in workload.sample(model) if isinstance(one, Table)]
    sizes, degrees = (one for one in shown if one.columns[0] in ("features", "degree"))
    names = [row[0] for row in sizes.rows]
    assert names[:2] == ["codes", "widths and steps"]
    assert names[2].startswith("packages, everything counted")
    bits = {name: row[2] for name, row in zip(names, sizes.rows, strict=True)}
    found = quantization.quantization_of(model)
    assert (found.packed, found.stored) == (False, {})
    found.packed = True
    infer(model, workload.task.view)
    stored = sum(one.nbytes for one in found.stored.values())
    values = quantization.stored_bytes(found).values
    assert bits[names[2]] == 8 * stored / values
    assert 8 * stored == sum(one.sizes.total for one in found.stored.values())
    assert sum(row[1] for row in degrees.rows) == workload.graph.nodes


def test_curves_show_bits_against_degree_and_accuracy_against_bytes(make_graph):
    workload, model = trained(make_graph(), recipe({"kind": "mega"}), steps=20)
    found = quantization.quantization_of(model)
    target, before = found.target.target, quantization.stored_bytes(found)
    whole = quantization.packed(found, lambda: float(infer(model, workload.task.view).mean())).bytes
    degrees, bytes_ = (one for one in workload.sample(model) if isinstance(one, Curve))
    assert [row[0] for row in degrees.rows] == found.degrees.unique().tolist()
    sizes = [row[0] for row in bytes_.rows]
    assert len(sizes) == 4
    assert sizes == sorted(sizes)
    assert sizes[-1] == whole / 1024
    assert all(0 <= row[1] <= 100 for row in bytes_.rows)
    assert (found.target.target, quantization.stored_bytes(found)) == (target, before)


def test_small_graphs_share_a_bank():
    items = [
        {"x": torch.rand(n, 5), "edge_index": torch.tensor([range(n - 1), range(1, n)]), "y": torch.tensor([n % 2])}
        for n in range(3, 23)
    ]
    graph = divided(pyg.from_many(items, origin="paths"), (0.6, 0.2, 0.2), 1)
    options = recipe({"kind": "a2q", "target": "1KB"}, "gin", graph={"task": "graph"})
    workload, model = trained(graph, options, steps=3)
    found = quantization.quantization_of(model)
    assert all(isinstance(one.allocator, BankBits) for one in found.features)
    assert torch.isfinite(workload.task.infer(model, workload.task.parts.validation)).all()
    assert "a2q" in " ".join(workload.decisions())


@pytest.mark.parametrize("kind", ["gcn", "sage", "gin", "gat"])
def test_the_packed_network_says_what_the_quantized_one_says_bit_for_bit(make_graph, kind):
    workload, model = trained(make_graph(), recipe({"kind": "a2q"}, kind), steps=10)
    plain = infer(model, workload.task.view)
    found = quantization.quantization_of(model)
    found.packed = True
    assert torch.equal(infer(model, workload.task.view), plain)
    for name, packed in found.stored.items():
        coded = packed.decoded()
        assert coded.codes.shape[0] == workload.graph.nodes, name
    codes = sum(8 * -(-int(packed.decoded().widths[row]) * packed.columns // 8)
                for packed in found.stored.values() for row in range(packed.rows))  # fmt: skip
    assert codes == 8 * quantization.stored_bytes(found).codes


ROOT = Path(__file__).parents[3]
SMALL = ("data.path=planted:nodes=400,degree=6,features=16,classes=3,train=0.5", "train.steps=6", "model.width=8")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The example, small, trained by the command line."""
    folder = tmp_path_factory.mktemp("quantized")
    (folder / "machine.toml").write_text(MACHINE)
    found = espalier(folder, *TRAIN, *SMALL, f"data.cache={folder}", "--run", "run")
    assert found.returncode == 0, found.stderr
    assert "Quantization (a2q): features at most" in found.stdout + found.stderr
    return folder


TRAIN = ("train", str(ROOT / "examples" / "quantized-graph.toml"), "plan.cluster=machine.toml", "plan.trial=false",
         "plan.pin.ranks=1", "plan.pin.threads=1")  # fmt: skip


def test_the_example_trains_reports_and_predicts(run):
    report = (run / "run" / "report.html").read_text()
    assert "bits, rows of 8" in report
    assert report.count("Bits against degree") > 1, "a chart"
    assert "Accuracy against bytes" in report
    found = espalier(run, "predict", "run", "3")
    assert found.returncode == 0, found.stderr
    assert len(found.stdout.split("\t")) == 3


def test_the_report_shows_the_figure_that_a_run_without_quant_reaches(run):
    table = (ROOT / "examples" / "quantized-graph.toml").read_text()
    (run / "fp32.toml").write_text(table.replace('[quant]\nkind = "a2q"', ""))
    command = (TRAIN[0], "fp32.toml", *TRAIN[2:], *SMALL, f"data.cache={run}", "--run", "fp32")
    assert espalier(run, *command).returncode == 0
    accuracy = events.last(run / "fp32" / events.NAME, "validation")["accuracy"]
    label = f"fp32 ({100 * accuracy:.1f} % after as many steps without [quant])"
    assert label in (run / "run" / events.NAME).read_text()


def test_the_figure_of_fp32_is_left_out_where_nobody_wants_it(make_graph, monkeypatch):
    def label(**options):
        workload, model = trained(make_graph(), recipe({"kind": "a2q", **options}), steps=1)
        sizes = next(one for one in workload.sample(model) if isinstance(one, Table) and one.columns[0] == "features")
        return sizes.rows[-1][0]

    assert label(fp32=False) == "fp32"
    assert label().startswith("fp32 (")
    assert label().endswith("without [quant])")
    monkeypatch.setattr(run_rounding, "MOST_FLOPS", 0)
    assert label() == "fp32 (not trained: quant.fp32 = true trains it)"
    assert label(fp32=True).endswith("without [quant])")


def test_the_packed_export_is_as_long_as_its_parts_and_reads_back(run):
    found = espalier(run, "export", "run", "--to", "packed")
    assert found.returncode == 0, found.stderr
    data = (run / "run" / "export-packed" / "packed.pkg").read_bytes()
    assert package_file.file_sizes(data).total == 8 * len(data)
    matrices, facts = package_file.from_bytes(data)
    assert facts == {"quant": "a2q"}
    assert {"layers.0.rows", "layers.1.rows", "layers.0.weight.weight"} <= set(matrices)
    assert "where fp32 takes" in found.stdout


def test_the_packed_export_predicts_by_itself_what_the_run_predicts(run, tmp_path):
    espalier(run, "export", "run", "--to", "packed", "--out", str(tmp_path / "packed"))
    (run / "run" / "checkpoints").rename(run / "elsewhere")
    try:
        found = espalier(tmp_path, "predict", "packed")
    finally:
        (run / "elsewhere").rename(run / "run" / "checkpoints")
    assert found.returncode == 0, found.stderr
    assert found.stdout == espalier(run, "predict", "run").stdout
    data = bytearray((tmp_path / "packed" / "packed.pkg").read_bytes())
    data[-9] ^= 1
    (tmp_path / "packed" / "packed.pkg").write_bytes(bytes(data[:-1]))
    found = espalier(tmp_path, "predict", "packed", "3")
    assert found.returncode == 2
    assert "packed.pkg is damaged at byte" in found.stderr


def test_the_energy_of_a_run_is_the_sum_of_its_parts_with_sources(run):
    found = espalier(run, "explain", "run", "--energy", "--json")
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    assert [part["part"] for part in told["parts"] if part["macs"] > 0]
    for part in told["parts"]:
        assert part["joules_with_dram"] == pytest.approx(part["joules"] + 160e-12 * part["bytes"])
    names = [row["accelerator"] for row in told["tables"][0]["rows"]]
    assert names == ["mega", "sgcn", "grow", "gcnax", "hygcn"]
    assert all(source for _, _, source in told["constants"])
    shown = espalier(run, "explain", "run", "--energy").stdout
    assert "Horowitz" in shown
    assert "a model, not a measurement" in shown


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a2q", pytest.param("mega", marks=pytest.mark.slow)])
def test_features_on_disk_and_quantized_layers_train_as_with_the_same_pool_in_memory(tmp_path, kind):
    (tmp_path / "machine.toml").write_text(MACHINE)
    words = ("train", str(ROOT / "examples" / "graph-on-disk.toml"), *TRAIN[2:], f"quant.kind={kind}")
    small = ["data.path=planted:nodes=4000,degree=6,features=64,classes=4,train=0.05", "graph.fanout=[3,2]"]
    small += ["train.steps=4", "train.batch_tokens=8", f"data.cache={tmp_path}", f"store.path={tmp_path / 'packed'}"]
    losses = {}
    for memory in ("192KiB", "64MiB"):
        found = espalier(tmp_path, *words, *small, f"store.memory={memory}", "--run", memory)
        assert found.returncode == 0, found.stderr
        assert f"Quantization ({kind})" in found.stdout
        events = [json.loads(line) for line in (tmp_path / memory / "events.jsonl").read_text().splitlines()]
        losses[memory] = [one["loss"] for one in events if one["event"] == "step"]
        assert ("Features (1000 KiB): 1000 KiB in host memory" in found.stdout) == (memory == "64MiB")
    assert len(losses["192KiB"]) == 4
    assert losses["192KiB"] == losses["64MiB"]


def test_a_quantized_run_is_not_taken_up_without_quantization(run):
    table = (ROOT / "examples" / "quantized-graph.toml").read_text()
    (run / "plain.toml").write_text(table.replace('[quant]\nkind = "a2q"', ""))
    words = list(TRAIN)
    words[1] = "plain.toml"
    found = espalier(run, *words, *SMALL, f"data.cache={run}", "train.steps=8", "--run", "run")
    assert found.returncode == 2
    assert "with quant" in found.stderr


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, None), (1, 10)])
def test_replicas_and_micro_batches_learn_widths_as_one_pass_does(ranks, micro_batch):
    """Widths come down by steps, of which each may have several passes."""
    asked = recipe_of(quant={"kind": "a2q", "fp32": False}, steps=8)
    known = train(asked, made())
    assert train(asked, made(), ranks, micro_batch) == pytest.approx(known, rel=1e-12)
