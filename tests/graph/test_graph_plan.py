"""Order and format: chosen from counts, said in sentences, and without any effect on what is learned but rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clique_graphs import cliques, workload_of
from espalier.graph.data.graph import relabelled
from espalier.graph.networks import graph_plan
from espalier.mechanisms.pattern_attention.pattern import pattern as tokens
from espalier.parallel.workload import Shard
from espalier.sparse import CBM
from espalier.sparse.partition import clusters
from espalier.train import request_from_recipe


def loss_of(workload):
    model = workload.build(torch.device("cpu"), torch.float32)
    count = workload.global_batch
    (batch,) = workload.batches(0, Shard(0, count, count))
    return float(workload.loss(model, batch)[0].detach())


def test_cliques_are_compressed_and_nothing_else_changes():
    graph = cliques(9, 40)
    auto, plain = workload_of(graph), workload_of(graph, format="csr")
    assert any(sentence.startswith("Format: CBM") for sentence in auto.decisions())
    assert any(sentence.startswith("Format: CSR") for sentence in plain.decisions())
    assert loss_of(auto) == pytest.approx(loss_of(plain), rel=1e-5)


@pytest.mark.parametrize("kind", ["gcn", "sage", "gin"])
def test_quantized_messages_are_summed_over_the_compressed_matrix_to_the_same_bits(kind, monkeypatch):
    """Sums of codes are whole numbers of steps, so that the order of additions changes nothing."""
    used, real = [], CBM.product
    monkeypatch.setattr(CBM, "product", lambda self, x: used.append(self.scale) or real(self, x))
    found, graph = {}, cliques(9, 40)
    for form in ("cbm", "csr"):
        workload = workload_of(graph, kind=kind, quant={"kind": "a2q"}, format=form)
        assert any(sentence.startswith(f"Format: {form.upper()}") for sentence in workload.decisions())
        model = workload.build(torch.device("cpu"), torch.float32)
        layer = next(one for one in model.layers if one.quantized.messages is not None)
        rows = torch.randn(graph.nodes, layer.outputs, generator=torch.Generator().manual_seed(0)).requires_grad_()
        used.clear()
        sums = layer.quantized(workload.task.train.block, rows)
        sums.backward(torch.arange(sums.numel()).view_as(sums).float() % 3)
        found[form] = sums.detach(), rows.grad
        assert len(used) == 2 * (form == "cbm"), "forward and backward"
        assert all(scale == (None, None) for scale in used), "scaled before and after"
    assert torch.equal(found["cbm"][0], found["csr"][0])
    torch.testing.assert_close(found["cbm"][1], found["csr"][1], rtol=1e-5, atol=1e-6)


def test_short_rows_stay_plain_however_alike_they_are():
    said = workload_of(cliques(30, 6)).decisions()
    assert any(sentence.startswith("Format: CSR") for sentence in said)


def test_every_layer_is_said_and_the_planner_is_told():
    workload = workload_of(cliques())
    said = workload.decisions()
    assert [sentence for sentence in said if sentence.startswith("Layer")] == [
        "Layer 1 aggregates 16 columns once and keeps the sums, for its rows are the same at every step, "
        "then maps them to 64.",
        "Layer 2 maps 64 columns to 3, then aggregates those.",
    ]
    assert request_from_recipe.of_recipe(workload.recipe, lambda: workload).profile.remarks == said


@pytest.mark.parametrize("wanted", ["none", "rcmpp", "clusters", "auto"])
def test_an_order_renames_nodes_and_nothing_else(wanted):
    graph = cliques()
    other, sentence = graph_plan.ordered(graph, wanted)
    assert sentence.startswith("Order: ")
    assert loss_of(workload_of(other)) == pytest.approx(loss_of(workload_of(graph)), rel=1e-5)
    assert graph.called(other.find("7")) in {f"node {at}" for at in range(graph.nodes)}
    np.testing.assert_array_equal(other.features[other.find("7")], graph.features[7])


@pytest.mark.parametrize("made_by", ["METIS", "our own sweeps"])
def test_clusters_bring_rows_of_a_window_to_the_same_columns_and_say_who_made_them(made_by, monkeypatch, tmp_path):
    """Communities of which a cluster holds several: the order inside it brings each together."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if made_by == "METIS":
        pytest.importorskip("pymetis")
    else:
        monkeypatch.setattr("espalier.sparse.partition.installed", lambda: False)
    graph = cliques(50, 14)
    ordered, said = graph_plan.ordered(graph, "clusters")
    assert said.startswith(f"Order: 2 clusters by {made_by}")

    def dense(one, least):
        return tokens(torch.from_numpy(np.stack([one.indices, one.targets()])), one.nodes).dense_columns(least)[1]

    labels = clusters(graph.indptr, graph.indices, 2, volume=False)
    only = relabelled(graph, np.argsort(labels, kind="stable"))
    assert dense(ordered, 2) > 2 * dense(only, 2)
    assert dense(ordered, 5) > 5 * dense(only, 5)


@pytest.mark.parametrize("wanted", ["clusters", "auto"])
def test_an_order_is_kept_and_read_again_without_being_made(wanted, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(graph_plan, "SMALL", 0)
    graph = cliques()
    first, said = graph_plan.ordered(graph, wanted)
    for name in ("_advised", "_clusters"):
        monkeypatch.setattr(graph_plan, name, lambda graph: pytest.fail("it was made again"))
    again, told = graph_plan.ordered(graph, wanted)
    assert told == said
    assert (again.features == first.features).all()
    assert (again.indices == first.indices).all()
    (kept,) = (tmp_path / "espalier" / "orders").glob("*.npz")
    kept.write_bytes(kept.read_bytes()[:40])  # damaged: it is made again
    with pytest.raises(pytest.fail.Exception, match="made again"):
        graph_plan.ordered(graph, wanted)
