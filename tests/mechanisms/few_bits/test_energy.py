"""Operations and bytes of an inference: against operations that PyTorch makes, and cases by hand."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from espalier import recipe as config
from espalier.graph import workload_row
from espalier.graph.data.graph import Graph
from espalier.graph.sampling.subgraphs import infer
from espalier.graph.workload import GraphWorkload
from espalier.kernels.counts import Counter, Counts
from espalier.mechanisms.few_bits import energy, quantization
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import UserError
from espalier_accelerators.simulator import DATAFLOWS, Chip


def recipe(quant: dict | None = None, kind: str = "gcn", **more) -> config.Recipe:
    model = {"kind": kind, "width": 8 if kind == "gat" else 4, **more}
    table = {"model": model, "data": {"path": "made"}, "train": {"steps": 1}}
    return defaults.resolve(recipe_file.from_table({**table, **({"quant": quant} if quant else {})}))[0]


def model_of(graph: Graph, options: config.Recipe) -> tuple[GraphWorkload, torch.nn.Module]:
    torch.manual_seed(0)
    workload = GraphWorkload(options, graph)
    return workload, workload.build(torch.device("cpu"), torch.float32).eval()


def test_products_of_fp32_are_those_that_pytorch_makes(make_graph):
    """Of values that are not 0: PyTorch multiplies by the others too."""
    workload, model = model_of(make_graph(), recipe())
    with Counter(model) as counter:
        infer(model, workload.task.view)
    made, stats = energy.parts(workload, model), energy.row_stats(workload, model)
    assert len(stats) == len(model.layers) == 2
    for at, (rows, layer) in enumerate(zip(stats, model.layers, strict=True)):
        every = sum(one.macs for name, one in counter.parts.items() if name.startswith(f"layers.{at}"))
        assert every == workload.graph.nodes * layer.inputs * layer.outputs
        kept = rows.nonzeros.sum() / (workload.graph.nodes * layer.inputs)
        assert made[f"layers.{at} product"].macs == pytest.approx(kept * every)
        assert (kept == 1) == (at == 0)
        sums = made[f"layers.{at} aggregation"].acs
        assert sums == (workload.graph.edges + workload.graph.nodes) * layer.outputs


def test_operations_of_few_bits_are_counted_by_hand(make_graph, monkeypatch):
    """Three values in all, two of 2 bits and one of 4, by 4 columns of 4 bits: 12 products, which take of one of 8 by 8
    bits (2 * 2 + 4) / 3 * 4 / 64. Sums of messages have 16 bits, half of 32."""
    workload, model = model_of(make_graph(), recipe({"kind": "mega"}))
    nodes, edges = workload.graph.nodes, workload.graph.edges
    counts, bits = np.zeros(nodes, np.int64), np.ones(nodes, np.int64)
    counts[:2], bits[:2] = (2, 1), (2, 4)
    monkeypatch.setattr(energy, "row_stats", lambda *_: [energy.RowStats(counts, bits, 100.0)] * 2)
    made = energy.parts(workload, model)
    product, summed = made["layers.0 product"], made["layers.0 aggregation"]
    assert product == Counts(int8_macs=12 * (8 / 3) * 4 / 64, bytes_moved=100 + 5 * 4 / 2)
    assert summed.int32_adds == (edges + nodes) * 4 / 2
    assert summed.joules() == pytest.approx((edges + nodes) * 4 * 0.05e-12)
    assert summed.bytes_moved == 2 * nodes * 4 / 2 + 4 * (edges + nodes) + 4 * nodes * 4
    assert product.joules() == pytest.approx(12 * (8 / 3) * 4 / 64 * 0.3e-12)
    assert product.joules("dram") == pytest.approx(product.joules() + 110 * 160e-12)


@pytest.mark.parametrize("kind", ["gcn", "sage", "gin", "gat"])
def test_products_and_sums_of_each_kind_are_those_of_its_matrices_in_the_simulation_too(make_graph, kind):
    """With values that are 0, products are those that PyTorch makes (which multiplies GIN's first matrix with own rows
    once more, and GAT's scores by blocks of zeros); without, those of the accelerators that leave zeros out."""
    workload, model = model_of(make_graph(), recipe(kind=kind, depth=2))
    nodes, edges = workload.graph.nodes, workload.graph.edges
    with Counter(model) as counter:
        infer(model, workload.task.view)
    stats = energy.row_stats(workload, model)
    full = [one._replace(nonzeros=np.full(nodes, layer.inputs)) for one, layer in zip(stats, model.layers, strict=True)]
    full = [one._replace(hidden=one.hidden if one.hidden is None else np.full(nodes, 4)) for one in full]
    full[-1] = full[-1]._replace(hidden=None if full[-1].hidden is None else np.full(nodes, 3))
    made = energy.parts(workload, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(energy, "row_stats", lambda *_: full)
        every = energy.parts(workload, model)
    more = 0.0
    for layer in model.layers:
        own = {"gin": layer.inputs * layer.outputs}
        if kind == "gat":
            width = layer.heads * layer.columns
            own["gat"] = 2 * width * (layer.heads - 1)
        more += nodes * own.get(kind, 0)
    assert sum(one.macs for one in every.values()) + more == counter.total.macs
    if kind == "gat":
        with pytest.raises(UserError, match=r"not simulated for GAT"):
            energy.network(workload, model)
        told = workload_row.ROW.energy(workload, model)
        assert told.parts == made
        assert [title for title, _, _ in told.tables] == ["Accelerators are not simulated for GAT."]
        return
    found = energy.network(workload, model)
    products = {name: sum(one.products for one in flow(Chip(), found)) for name, flow in DATAFLOWS.items()}
    assert products.pop("hygcn") == sum(one.macs for one in every.values())
    assert set(products.values()) == {sum(one.macs for one in made.values())}
    loops = 0 if kind == "sage" else nodes
    for name, flow in DATAFLOWS.items():
        widths = [layer.inputs if name == "hygcn" else layer.outputs for layer in model.layers]
        assert sum(one.sums for one in flow(Chip(), found)) == (edges + loops) * sum(widths)


def test_rows_inside_gins_perceptron_are_what_its_second_matrix_reads(make_graph):
    workload, model = model_of(make_graph(), recipe(kind="gin"))
    stats = energy.row_stats(workload, model)
    for one, shape in zip(stats, model.layers, strict=True):
        assert one.hidden.max() <= shape.outputs
        assert 0 < one.hidden.sum() < workload.graph.nodes * shape.outputs


@pytest.mark.parametrize("quant", [None, {"kind": "mega"}])
@pytest.mark.parametrize("kind", ["gcn", "sage", "gin"])
def test_layers_that_sum_first_multiply_the_values_of_their_sums(make_graph, kind, quant):
    """5 columns to 8 to 8 to 3: the first two sum before they multiply, of which no message has few bits."""
    graph = make_graph()
    workload, model = model_of(graph, recipe(quant, kind, width=8, depth=3))
    edges = graph.edges + (graph.nodes if kind == "gcn" else 0)
    matrix = torch.zeros(graph.nodes, graph.nodes)
    matrix[torch.from_numpy(graph.targets()).long(), torch.from_numpy(np.asarray(graph.indices)).long()] = 1
    matrix += torch.eye(graph.nodes) * (kind != "sage")
    reached = int(((matrix @ torch.from_numpy(np.asarray(graph.features)).abs()) > 0).sum())
    stats, made = energy.row_stats(workload, model), energy.parts(workload, model)
    assert [one.sums is None for one in stats] == [False, False, True]
    summed = int(stats[0].sums.sum())
    assert summed == reached if quant is None else 0 < summed <= reached  # some values are rounded to 0
    product, aggregation = made["layers.0 product"], made["layers.0 aggregation"]
    assert (aggregation.acs, aggregation.int8_macs) == (edges * 5, 0)
    own, hidden = (
        8.0 * stats[0].nonzeros.sum() * (kind == "sage"),
        0.0 if kind != "gin" else 8.0 * stats[0].hidden.sum(),
    )
    if quant is None:
        assert (product.macs, product.int8_macs) == (8 * summed + own + hidden, 0)
    else:
        bits = stats[0].nonzeros @ stats[0].bits / stats[0].nonzeros.sum()
        assert product.int8_macs == pytest.approx((own * bits + (8 * summed + hidden) * 32) * 4 / 64)
    assert product.bytes_moved > 4 * graph.nodes * (5 + 8)
    told = [one.message_bits for one in energy.network(workload, model).layers if one.aggregates]
    assert told == [32, 32, 32 if quant is None else 4]
    assert quant is None or not quantization.quantization_of(model).packed


def test_without_the_simulator_operations_are_counted_and_its_distribution_is_named(make_graph, monkeypatch):
    workload, model = model_of(make_graph(), recipe())
    monkeypatch.setitem(sys.modules, "espalier_accelerators", None)
    tables = workload_row.ROW.energy(workload, model)
    assert tables.parts == energy.parts(workload, model)
    ((title, _, ((why, do),)),) = tables.tables
    assert title == "Accelerators are not simulated."
    assert "espalier-accelerators is not installed" in why
    assert "pip install ./accelerators" in do
