"""Regression on graphs: equal to a plain loop, to other units of the targets, to any number of ranks, and to itself
when it is resumed; figures and answers are in the units of the targets."""

from __future__ import annotations

import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from tests.graph.conftest import made
from tests.graph.test_foreign import CODE
from tests.graph.test_workload import many, recipe_of
from tests.mechanisms.disk_batches.test_mini_batches import losses as losses_from_disk
from tests.mechanisms.disk_batches.test_mini_batches import recipe_of as disk_recipe
from tests.mechanisms.halo_exchange.test_halo_parallel import close, train

from espalier.graph import workload_row
from espalier.graph.data import kept_graph
from espalier.graph.data.graph import DataSplit, Graph, divided
from espalier.graph.data.targets import Scale
from espalier.graph.parts import partition_folder
from espalier.graph.sampling.neighbor_sampler import Style
from espalier.graph.sampling.subgraphs import infer
from espalier.graph.tasks import answers, metrics
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.mechanisms.few_bits import packed_run, quantization
from espalier.parallel.workload import Shard
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import UserError
from espalier.sparse.partition import clusters
from espalier.train.workload_row import Sampling

RATE = {"optimizer": {"learning_rate": 0.02, "weight_decay": 0.0}, "schedule": {"kind": "constant"}, "clip": 1e9}


def targets_of(graph: Graph, columns: int = 1, seed: int = 3) -> np.ndarray:
    """Values between 20 and 80, say."""
    items = graph.items
    return 50 + 10 * np.random.default_rng(seed).normal(size=(items, columns))


def valued(columns: int = 1, gaps: bool = False, **known) -> Graph:
    graph = made(**known)
    values = targets_of(graph, columns)
    if gaps:
        values[np.random.default_rng(5).random(values.shape) < 0.3] = np.nan
    return with_values(graph, values)


def with_values(graph: Graph, values: np.ndarray) -> Graph:
    return replace(graph, labels=values, values=True, scale=None, classes=())


def valued_many(columns: int = 1) -> Graph:
    graph = many()
    sizes = np.diff(graph.starts)[:, None]
    return with_values(graph, -7.9 + 0.37 * sizes + 0.2 * targets_of(graph, columns) / 10)


def figures_of(workload, model):
    validation = workload.validation_samples()
    sums = workload.evaluate(model, Shard(0, validation, validation))
    return workload.summary({name: total / weight for name, (total, weight) in sums.items() if weight})


# --- the plain loop ----------------------------------------------------------------------------------------------


def plain_loop(weights, graph: Graph, values: np.ndarray, steps: int, forward) -> list[float]:
    """Losses of Adam on the mean squared error of standardised values, float64, by hand."""
    known = ~np.isnan(values)
    train_ids = graph.parts.train
    scaled = np.full(values.shape, np.nan)
    for column in range(values.shape[1]):
        given = values[train_ids, column][known[train_ids, column]]
        scaled[:, column] = (values[:, column] - given.mean()) / given.std()
    truth, mask = torch.from_numpy(scaled[train_ids]), torch.from_numpy(known[train_ids])
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    losses = []
    for step in range(1, steps + 1):
        loss = ((forward(weights)[train_ids] - truth)[mask] ** 2).mean()
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient, (first, second) in zip(weights, gradients, moments, strict=True):
                first.mul_(0.9).add_(gradient, alpha=0.1)
                second.mul_(0.999).add_(gradient**2, alpha=0.001)
                weight.sub_(0.02 * first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-8))
    return losses


def dense(graph: Graph) -> torch.Tensor:
    matrix = torch.zeros(graph.nodes, graph.nodes, dtype=torch.float64)
    matrix[torch.from_numpy(graph.targets()), torch.from_numpy(graph.indices).long()] = 1.0
    return matrix


@pytest.mark.parametrize(("columns", "gaps"), [(1, False), (3, True)])
def test_a_regression_on_nodes_is_a_plain_loop(columns, gaps):
    graph, recipe = valued(columns, gaps), recipe_of({"kind": "gcn"}, **RATE)
    model = GraphWorkload(recipe, graph).build(torch.device("cpu"), torch.float64)
    weights = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    matrix = dense(graph) + torch.eye(graph.nodes, dtype=torch.float64)
    root = (matrix.sum(1) ** -0.5).float().double()  # scales of a graph are float32
    matrix, x = root[:, None] * matrix * root, torch.from_numpy(graph.features).double()
    names = [name for name, _ in model.named_parameters()]

    def forward(given):
        by_name = dict(zip(names, given, strict=True))
        hidden = (matrix @ x @ by_name["layers.0.weight.weight"].T + by_name["layers.0.bias"]).relu()
        return matrix @ hidden @ by_name["layers.1.weight.weight"].T + by_name["layers.1.bias"]

    expected = plain_loop(weights, graph, graph.labels, 4, forward)
    assert train(recipe, graph)["losses"] == pytest.approx(expected, rel=1e-9)


def test_a_regression_on_small_graphs_is_a_plain_loop():
    graph = valued_many()
    recipe = recipe_of({"kind": "gin", "norm": False}, {"task": "graph"}, batch_tokens=1000, **RATE)
    model = GraphWorkload(recipe, graph).build(torch.device("cpu"), torch.float64)
    weights = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    matrix, x = dense(graph), torch.from_numpy(graph.features).double()
    member = torch.repeat_interleave(torch.arange(graph.items), torch.from_numpy(np.diff(graph.starts)))

    def forward(given):
        by_name, rows = dict(zip(names, given, strict=True)), x
        for at in (0, 1):
            layer = {name.removeprefix(f"layers.{at}."): one for name, one in by_name.items() if f".{at}." in name}
            sums = (1 + layer["epsilon"]) * rows + matrix @ rows
            inner = sums @ layer["first.weight"].T + layer["first.bias"]
            rows = (inner.relu() if at == 0 else inner) @ layer["second.weight"].T + layer["second.bias"]
            rows = rows.relu() if at == 0 else rows
        return torch.zeros(graph.items, 1, dtype=torch.float64).index_add(0, member, rows)

    expected = plain_loop(weights, graph, graph.labels, 4, forward)
    assert train(recipe, graph)["losses"] == pytest.approx(expected, rel=1e-9)


# --- units of the targets ----------------------------------------------------------------------------------------


def trained(recipe, graph):
    """The workload and its model after some steps of plain Adam."""
    workload = GraphWorkload(recipe, graph)
    torch.manual_seed(0)
    model = workload.build(torch.device("cpu"), torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(8):
        (batch,) = workload.batches(step, Shard(0, workload.global_batch, workload.global_batch))
        optimizer.zero_grad()
        loss, weight = workload.loss(model, batch)
        (loss / weight).backward()
        optimizer.step()
    return workload, model.eval()


def predicted(workload, model) -> np.ndarray:
    rows = workload_row.answers(workload, model, None)
    return np.array([row["value"] if "value" in row else row["values"] for row in rows])


@pytest.mark.parametrize("graph", [valued(2, gaps=True), valued_many(2)])
def test_other_units_of_the_targets_change_predictions_alone(graph):
    recipe = recipe_of({"kind": "gin"}, {"task": "node" if graph.starts is None else "graph"})
    workload, model = trained(recipe, graph)
    plain = predicted(workload, model)
    other, twin = trained(recipe, with_values(graph, 4 * graph.labels))  # a power of two: no rounding
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    np.testing.assert_array_equal(predicted(other, twin), 4 * plain)
    other, twin = trained(recipe, with_values(graph, -3.7 * graph.labels + 1000))
    mirrored, plain_labels = trained(recipe, with_values(graph, -graph.labels)), graph.labels
    np.testing.assert_allclose(predicted(other, twin), 3.7 * predicted(*mirrored) + 1000, rtol=1e-7)
    figures, scaled = figures_of(workload, model), figures_of(*trained(recipe, with_values(graph, 4 * plain_labels)))
    assert scaled["mse"] == pytest.approx(16 * figures["mse"], rel=1e-12)
    assert scaled["mae"] == pytest.approx(4 * figures["mae"], rel=1e-12)
    assert (scaled["loss"], scaled["r2"]) == (figures["loss"], figures["r2"])


def test_a_vector_and_a_column_are_the_same():
    values = targets_of(made())
    flat, column = (made(labels=labels) for labels in (values[:, 0], values))
    assert flat.fingerprint() == column.fingerprint()
    assert train(recipe_of(), flat) == train(recipe_of(), column)


def test_targets_that_are_not_there_are_as_items_left_out():
    graph = valued()
    gone = graph.parts.train[::3]
    values = graph.labels.copy()
    values[gone] = np.nan
    masked = trained(recipe_of(), with_values(graph, values))
    fewer = DataSplit(np.setdiff1d(graph.parts.train, gone), graph.parts.validation, graph.parts.test)
    without = trained(recipe_of(), replace(graph, parts=fewer))
    np.testing.assert_allclose(predicted(*masked), predicted(*without), rtol=1e-9)
    assert masked[0].graph.scale.table() == without[0].graph.scale.table()


# --- figures -----------------------------------------------------------------------------------------------------


def test_figures_are_those_of_predictions_in_the_units_of_the_targets():
    graph = valued(3, gaps=True)
    values = graph.labels.copy()
    values[graph.parts.validation, 2] = 4.0  # constant where it is judged
    workload, model = trained(recipe_of(), with_values(graph, values))
    ids, guess, figures = graph.parts.validation, predicted(workload, model), figures_of(workload, model)
    expected = {}
    for column in range(3):
        known = ~np.isnan(values[ids, column])
        errors, truth = (guess[ids] - values[ids])[known, column], values[ids, column][known]
        expected |= {f"mse.{column}": np.mean(errors**2), f"mae.{column}": np.mean(np.abs(errors))}
        expected |= {f"r2.{column}": 1 - np.sum(errors**2) / np.sum((truth - truth.mean()) ** 2)} if column < 2 else {}
    for name, columns in (("mse", 3), ("mae", 3), ("r2", 2)):
        expected[name] = np.mean([expected[f"{name}.{column}"] for column in range(columns)])
    assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert set(figures) - {name for name in figures if name.startswith("test_")} == {"loss", *expected}
    assert list(figures)[:4] == ["loss", "mae", "mse", "r2"]


def test_r2_of_the_mean_is_zero_and_of_the_truth_one_in_any_number_of_parts():
    labels = torch.randn(31, 1, dtype=torch.float64)
    for guess, expected in ((labels.mean().expand(31, 1), 0.0), (labels, 1.0)):
        total: dict[str, list[float]] = {}
        for part in (slice(0, 7), slice(7, 8), slice(8, 31)):
            for name, pair in metrics.regressed(guess[part], labels[part], [5.0]).items():
                before = total.setdefault(name, [0.0, 0.0])
                total[name] = [before[0] + pair[0], before[1] + pair[1]]
        figures = metrics.summary({name: value / weight for name, (value, weight) in total.items()})
        assert figures["r2"] == pytest.approx(expected, abs=1e-12)
        assert figures["mse"] == pytest.approx(25 * float((guess - labels).square().mean()))


def test_a_function_of_neighbours_is_learned_and_a_constant_is_not_enough():
    graph = made(nodes=300, edges=1200)
    rows = np.split(graph.features[graph.indices], graph.indptr[1:-1])
    mean = np.stack([row.mean(0) if len(row) else np.zeros(5) for row in rows])
    truth = 30 + 12 * graph.features[:, :1] - 9 * np.tanh(mean[:, 1:2])
    graph = with_values(graph, truth)
    recipe = recipe_of({"kind": "sage", "width": 32}, steps=150, optimizer={"learning_rate": 0.02}, precision="fp32")
    figures = train(recipe, graph)["validation"][-1]
    assert figures["r2"] > 0.9
    assert figures["test_r2"] > 0.9
    constant = torch.zeros(graph.nodes, 1)
    task = GraphWorkload(recipe, graph).task
    sums = answers.held_out_figures(task, Shard(0, task.validation, task.validation), lambda ids: constant[ids])
    plain = metrics.summary({name: total / weight for name, (total, weight) in sums.items()})
    assert -0.1 < plain["r2"] <= 0


# --- ranks, disks, networks --------------------------------------------------------------------------------------


@pytest.mark.extremes
@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gin", "graph-transformer"])
def test_two_ranks_train_and_validate_as_one(kind):
    recipe, graph = recipe_of({"kind": kind}), valued(2, gaps=True)
    close(train(recipe, graph, (40,)), train(recipe, graph), rel=1e-6)


def test_two_ranks_train_small_graphs_as_one():
    recipe = recipe_of({"kind": "gin"}, {"task": "graph"}, batch_tokens=12)
    close(train(recipe, valued_many(2), (50,)), train(recipe, valued_many(2)), rel=1e-6)


@pytest.mark.extremes
@pytest.mark.parametrize("kind", ["gcn", "gat", "graph-transformer"])
def test_parts_of_a_graph_train_and_validate_as_the_whole(kind):
    graph = valued(2, gaps=True)
    halo = {"bits": 32} if kind != "graph-transformer" else {}
    close(train(recipe_of({"kind": kind}, {"halo": halo}), graph, (30,)), train(recipe_of({"kind": kind}), graph), 1e-6)


def test_drawn_neighbourhoods_are_the_same_on_any_number_of_ranks():
    recipe = recipe_of({"kind": "sage"}, {"fanout": [3, 2]}, batch_tokens=24)
    close(train(recipe, valued(), (50,)), train(recipe, valued()), rel=1e-6)


def test_batches_from_disk_are_those_in_memory_to_the_bit(tmp_path):
    store, graph = {"path": str(tmp_path), "memory": "60KiB"}, valued(2, gaps=True)
    assert losses_from_disk(disk_recipe(store), graph)[0] == losses_from_disk(disk_recipe(store), graph, pack=False)[0]


def test_a_resumed_run_is_the_unbroken_one_to_the_bit(tmp_path):
    recipe, graph = recipe_of({"kind": "sage", "dropout": 0.2}), valued(2, gaps=True)
    whole = train(recipe, graph, folder=tmp_path / "whole")
    train(recipe, graph, folder=tmp_path / "stopped", stop=2)
    assert train(recipe, graph, folder=tmp_path / "stopped")["losses"] == whole["losses"][2:]


def test_networks_of_ones_own_are_trained_on_values(tmp_path, monkeypatch):
    (tmp_path / "networks.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    table = {"model": {"kind": "messages", "build": "networks:network"}, "data": {"path": "x"}}
    workload = GraphWorkload(defaults.resolve(recipe_file.from_table(table))[0], valued(2), tmp_path)
    model = workload.build(torch.device("cpu"), torch.float32).eval()
    assert predicted(workload, model).shape == (60, 2)
    assert figures_of(workload, model)["mse"] > 0
    sys.modules.pop("networks", None)


def test_few_bits_train_and_are_packed_and_judged_by_r2(tmp_path):
    recipe = recipe_of({"kind": "gcn"}, quant={"kind": "mega"}, precision="fp32")
    workload, model = GraphWorkload(recipe, valued()), None
    model = workload.build(torch.device("cpu"), torch.float32).eval()
    shown = [str(one) for one in workload.sample(model)]
    assert any("R²" in text for text in shown)
    expected = infer(model, workload.task.view)
    packed_run.write(workload, model, tmp_path / "export")
    kept = packed_run.with_features(kept_graph.read(tmp_path / "export" / "preprocessing"), tmp_path / "export")
    again = GraphWorkload(recipe, kept.graph)
    again.signs = kept.signs
    twin = again.build(torch.device("cpu"), torch.float32)
    assert packed_run.load(twin, tmp_path / "export")
    torch.testing.assert_close(infer(twin.eval(), again.task.view), expected)
    assert again.graph.scale.table() == workload.graph.scale.table()
    quantization.equipped(twin).packed = False


# --- what runs keep, and other data ------------------------------------------------------------------------------


def test_a_run_keeps_its_scale_for_other_data(tmp_path):
    graph = valued(2, gaps=True)
    workload, model = trained(recipe_of(), graph)
    kept_graph.write(tmp_path, workload.graph, None)
    kept = kept_graph.read(tmp_path)
    np.testing.assert_array_equal(kept.graph.labels, graph.labels)
    assert kept.graph.values
    assert kept.graph.scale.table() == workload.graph.scale.table()
    other = kept_graph.mapped(with_values(graph, graph.labels * 100), kept)
    np.testing.assert_array_equal(predicted(GraphWorkload(recipe_of(), other), model), predicted(workload, model))
    with pytest.raises(UserError, match="1 columns of answers, and the run 2"):
        kept_graph.mapped(valued(), kept)


def test_other_data_is_read_as_the_run_read_its_own(tmp_path):
    graph = made()
    kept_graph.write(tmp_path, valued(), None)
    ends = np.stack([graph.indices, graph.targets()])
    np.savez(tmp_path / "other.npz", edge_index=ends, x=graph.features, y=np.arange(60))
    recipe = recipe_of()
    data = (msgspec.structs.replace(recipe.data[0], path=str(tmp_path / "other.npz")),)
    recipe = msgspec.structs.replace(recipe, data=data)
    workload = open_graph(recipe, run_graph=kept_graph.read(tmp_path))
    np.testing.assert_array_equal(workload.graph.labels[:, 0], np.arange(60)[_order(workload)])
    assert open_graph(recipe).graph.kind == "classes"


def _order(workload):
    numbers = workload.graph.numbers
    return np.arange(60) if numbers is None else numbers


def test_parts_on_disk_keep_that_labels_are_values(tmp_path):
    from espalier.graph.parts.halo import boundary

    graph = valued(2, gaps=True)
    cut = boundary(graph.indptr, graph.indices, clusters(graph.indptr, graph.indices, 2), 2)
    partition_folder.write(tmp_path / "parts", graph, Style(loops=True, scale="symmetric"), cut)
    outlined, _ = partition_folder.outlined(tmp_path / "parts")
    assert outlined.kind == "values"
    np.testing.assert_array_equal(outlined.labels, graph.labels)
    assert Scale.of(outlined.labels, outlined.parts.train).table() == Scale.of(graph.labels, graph.parts.train).table()


# --- words and limits --------------------------------------------------------------------------------------------


def test_answers_are_told_in_the_units_of_the_targets():
    workload, model = trained(recipe_of(), valued())
    rows = workload.task.labels[[3, 5]]  # as if it knew
    told = answers.told(rows, workload.graph, [3, 5])
    assert [one["value"] for one in told] == pytest.approx(workload.graph.labels[[3, 5], 0].tolist(), rel=1e-12)
    answer = workload_row.ROW.answer(workload, model, "3,5", Sampling())
    shown = answer.record()["answers"]
    assert "".join(answer.text) == "".join(f"{one['name']}\t{one['value']:.6g}\n" for one in shown)
    several, deep = trained(recipe_of(), valued(2))
    (row,) = workload_row.answers(several, deep, "3")
    assert list(row) == ["name", "values"]
    (table,) = workload.sample(model)
    assert table.columns == ("node", "answer", "truth")


def test_links_have_no_targets():
    with pytest.raises(UserError, match=r"graph\.target = 'values' is not possible with graph\.task = 'link'"):
        recipe_of(graph={"task": "link", "target": "values"})


def test_a_split_by_shares_deals_out_those_that_have_a_value():
    values = targets_of(made())
    values[::4] = np.nan
    graph = divided(made(labels=values, parts=None), (0.6, 0.2, 0.2), 1)
    ids = np.concatenate([part for _, part in graph.parts.named()])
    assert sorted(ids.tolist()) == [at for at in range(60) if at % 4]


def test_training_parts_without_targets_are_named():
    graph = valued(2)
    values = graph.labels.copy()
    values[graph.parts.train, 1] = np.nan
    assert (
        "targets: column 1 has no value in the training part"
        in GraphWorkload(recipe_of(), with_values(graph, values)).notes()
    )
    values[graph.parts.train] = np.nan
    with pytest.raises(UserError, match="has no target in its training part"):
        GraphWorkload(recipe_of(), with_values(graph, values))


def test_links_say_that_labels_are_not_used():
    notes = GraphWorkload(recipe_of(graph={"task": "link"}), made(labels=targets_of(made()))).notes()
    assert notes[0] == "not used: labels (graph.task = 'link')"
    assert not any("regression" in note for note in notes)
