"""The workload's laws: ranks and micro-batches change nothing but rounding, full fan-out is the whole graph, kernels
answer as the plain forms, and what cannot be asked is refused by name."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from tests.graph.conftest import made

from espalier.graph import workload_row
from espalier.graph.data.graph import Graph, divided
from espalier.graph.networks import base, compiled_aggregate, gnn
from espalier.graph.sampling.subgraphs import infer
from espalier.graph.tasks import link_prediction
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.kernels import rtopk
from espalier.kernels.dropout import activated
from espalier.launch.ranks import agent
from espalier.parallel.workload import Shard
from espalier.plan import base as plans
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import UserError
from espalier.train import rank_spec as launch
from espalier.train import request_from_recipe, trainer, worker
from espalier.train.rank_setup import RankSetup

STEPS = 4


def recipe_of(model=None, graph=None, quant=None, **train):
    table = {
        "model": {"kind": "gcn", "depth": 2, "width": 8, "dropout": 0.0, **(model or {})},
        "data": {"path": "made"},
        "graph": graph or {},
        "train": {"steps": STEPS, "precision": "fp64", **train},
        **({"quant": quant} if quant else {}),
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


def plan_of(recipe, workload, ranks=1, micro_batch=None):
    samples = workload.global_batch
    cuts = [samples * one // ranks for one in range(ranks + 1)]
    shares = tuple(plans.Rank(share=(cuts[one], cuts[one + 1])) for one in range(ranks))
    return plans.Plan(ranks=shares, micro_batch=micro_batch or samples, precision=recipe.train.precision)


def train(recipe, graph, ranks=1, micro_batch=None):
    """(losses by step, held-out loss) as rank 0 tells them."""
    workload = GraphWorkload(recipe, graph)
    plan = plan_of(recipe, workload, ranks, micro_batch)

    def life(place):
        losses = []

        def emit(event, **fields):
            if event in ("step", "validation"):
                losses.append(fields["loss"])

        with worker.joined(place, 90.0) as channel:
            trainer.Trainer(RankSetup(recipe, plan, workload, place, emit=emit), channel).run()
        return losses

    places = launch.places(plan)
    return agent.run(life, places)[0] if ranks > 1 else life(places[0])


@pytest.mark.extremes
@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gin", "graph-transformer"])
def test_ranks_and_micro_batches_change_nothing_but_rounding(kind):
    graph, recipe = made(), recipe_of({"kind": kind})
    alone = train(recipe, graph)
    assert train(recipe, graph, ranks=2) == pytest.approx(alone, rel=1e-6)
    assert train(recipe, graph, micro_batch=7) == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("task", ["node", "link"])
def test_four_ranks_draw_what_one_draws(task):
    graph = made()
    recipe = recipe_of({"kind": "sage"}, {"fanout": [3, 2], "task": task}, batch_tokens=24)
    alone = train(recipe, graph)
    assert train(recipe, graph, ranks=4, micro_batch=5) == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gin"])
def test_full_fan_out_trains_as_the_whole_graph(kind):
    graph = made()
    whole = train(recipe_of({"kind": kind}), graph)
    sampled = train(recipe_of({"kind": kind}, {"fanout": [-1, -1]}, batch_tokens=30), graph)
    assert sampled == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["gcn", "sage", "gat"])
def test_narrow_products_follow_the_curve_of_fp32(kind, precision):
    graph = made()
    exact = train(recipe_of({"kind": kind}, precision="fp32"), graph)
    assert train(recipe_of({"kind": kind}, precision=precision), graph) == pytest.approx(exact, rel=2e-2)


TRANSFORMER = {"kind": "graph-transformer", "attention": "interleaved", "interleave": 2, "encodings": ["laplacian"]}


def test_a_graph_transformer_predicts_links_alike_on_any_number_of_ranks():
    recipe = recipe_of(TRANSFORMER, {"task": "link"}, batch_tokens=24)
    assert train(recipe, made(), ranks=2, micro_batch=5) == pytest.approx(train(recipe, made()), rel=1e-6)


def test_a_graph_transformer_classifies_graphs_alike_on_any_number_of_ranks():
    recipe, small = recipe_of(TRANSFORMER, {"task": "graph"}, batch_tokens=12), many()
    assert train(recipe, small, ranks=2, micro_batch=5) == pytest.approx(train(recipe, small), rel=1e-6)


@pytest.mark.parametrize("graph", [{"fanout": [3, 2]}, {"task": "link", "fanout": [3, 2]}])
def test_a_graph_transformer_learns_from_samples_and_says_what_they_attend_to(graph):
    recipe = recipe_of(TRANSFORMER, graph, batch_tokens=24, steps=40, precision="fp32")
    losses = train(recipe, made())
    assert losses[-2] < 0.9 * losses[0]
    assert any("graph.fanout" in one for one in GraphWorkload(recipe, made()).notes())


def test_sums_over_neighbours_overflow_fp16_at_first_and_then_learn():
    losses = train(recipe_of({"kind": "gin", "norm": False}, precision="fp16", steps=24), made())
    assert losses[1] == losses[0]  # left out
    assert losses[-2] < 0.7 * losses[0]


def test_training_learns():
    losses = train(recipe_of(steps=60, precision="fp32", optimizer={"learning_rate": 0.05}), made(nodes=200, edges=600))
    assert losses[-2] < 0.7 * losses[0]


@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gin"])
@pytest.mark.parametrize("k", [None, 1, 3])
def test_kernels_answer_as_the_plain_forms(kind, k, monkeypatch):
    if kind == "gat" and k is not None:
        return
    recipe, graph = recipe_of({"kind": kind, **({} if k is None else {"k": k})}), made()
    workload = GraphWorkload(recipe, graph)
    found = []
    for plain in (False, True):
        model = workload.build(torch.device("cpu"), torch.float64)
        assert (model.layers[0].aggregate, model.layers[0].attend) == (
            compiled_aggregate.aggregate,
            compiled_aggregate.attend,
        )
        if plain:
            for layer in model.layers:
                layer.aggregate, layer.attend, layer.project = base.aggregate, base.attend, base.project
            monkeypatch.setattr(gnn, "rtopk", lambda rows, k, _: torch.topk(rows, k, sorted=False))
        (batch,) = workload.batches(0, Shard(0, workload.global_batch, workload.global_batch))
        loss, _ = workload.loss(model, batch)
        loss.backward()
        found.append([loss.detach(), *(one.grad for one in model.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("limit", [None, 1])
def test_maxk_ends_its_search_where_the_recipe_says(limit, monkeypatch):
    sparse, limits = [], []

    def spy(rows, k, max_iterations):
        values, columns = rtopk(rows, k, max_iterations)
        sparse.append((rows.detach(), values.detach()))
        limits.append(max_iterations)
        return values, columns

    monkeypatch.setattr(gnn, "rtopk", spy)
    model = {"width": 64, "k": 8} | ({} if limit is None else {"max_iterations": limit})
    train(recipe_of({"kind": "sage", **model}, precision="fp32", steps=2), made())
    exact = [torch.equal(rows.topk(8).values, values.sort(descending=True).values) for rows, values in sparse]
    assert set(limits) == {limit}
    assert all(exact) is (limit is None)
    assert all(torch.equal(rows.amax(1), values.amax(1)) for rows, values in sparse)


def products_of(workload, model, monkeypatch, steps):
    """Columns of each product that `steps` steps make with the graph's matrix, forward; and the losses."""
    made, run = [], compiled_aggregate.matmul
    monkeypatch.setattr(
        compiled_aggregate, "matmul", lambda one, x, **more: made.append(x.shape[1]) or run(one, x, **more)
    )
    losses = []
    for _ in range(steps):
        (batch,) = workload.batches(0, Shard(0, workload.global_batch, workload.global_batch))
        loss, _ = workload.loss(model, batch)
        loss.backward()
        losses.append(loss.item())
    return made, losses


@pytest.mark.parametrize("kind", ["gcn", "sage", "gin"])
def test_features_that_no_dropout_changes_are_aggregated_once(kind, monkeypatch):
    recipe, graph = recipe_of({"kind": kind, "width": 40}), made()
    workload = GraphWorkload(recipe, graph)
    model = workload.build(torch.device("cpu"), torch.float64)
    products, losses = products_of(workload, model, monkeypatch, 4)
    inputs = graph.features.shape[1]
    assert products.count(inputs) == 2, "once as if they might change, once to be kept"
    assert len(set(losses)) == 1
    assert "once" in " ".join(workload.decisions())
    (batch,) = workload.batches(0, Shard(0, workload.global_batch, workload.global_batch))
    batch.features.mul_(2)
    products, changed = products_of(workload, model, monkeypatch, 3)
    assert products.count(inputs) == 2, "and anew when they were changed"
    assert changed[0] == changed[2] != losses[0]


def test_features_that_dropout_changes_are_aggregated_at_every_step(monkeypatch):
    workload = GraphWorkload(recipe_of({"kind": "gcn", "width": 40, "dropout": 0.5}), made())
    model = workload.build(torch.device("cpu"), torch.float32)
    products, _ = products_of(workload, model, monkeypatch, 4)
    assert products.count(workload.graph.features.shape[1]) == 4
    assert "once" not in " ".join(workload.decisions())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 3, 40_000])
def test_a_map_without_gradients_is_the_plain_one_and_stays_as_it_is(count, dtype):
    torch.manual_seed(0)
    rows, weight, bias = (torch.randn(size, dtype=dtype) for size in ((count, 24), (32, 24), (32,)))
    with torch.no_grad():
        first = compiled_aggregate.project(rows, weight, bias)
        kept = first.clone()
        second = compiled_aggregate.project(-rows, weight, bias)
    torch.testing.assert_close(first, base.project(rows, weight, bias))
    torch.testing.assert_close(second, base.project(-rows, weight, bias))
    assert torch.equal(first, kept)
    asked = compiled_aggregate.project(rows, weight.requires_grad_(), bias)
    assert asked.requires_grad


def test_dropout_drops_its_share_and_keeps_the_mean():
    torch.manual_seed(0)
    rows = torch.rand(3001, 7, requires_grad=True)
    dropped = activated(rows, "none", 0.5)
    dropped.sum().backward()
    assert torch.equal(dropped == 0, rows.grad == 0)
    assert torch.allclose(dropped[dropped != 0], 2 * rows[dropped != 0])
    assert abs(float((dropped == 0).double().mean()) - 0.5) < 0.05
    torch.manual_seed(0)
    torch.rand(3001, 7)
    assert torch.equal(activated(rows, "none", 0.5), dropped)


def many(count=40):
    """Small rings and stars."""
    sources, targets, labels, starts = [], [], [], [0]
    for at in range(count):
        size, first = 4 + at % 3, starts[-1]
        ring = at % 2 == 0
        for node in range(size):
            if ring or node > 0:
                sources.append(first + node)
                targets.append(first + ((node + 1) % size if ring else 0))
        labels.append(int(ring))
        starts.append(first + size)
    graph = Graph.from_edges(
        sources,
        targets,
        features=np.ones((starts[-1], 2)),
        undirected=True,
        labels=np.array(labels),
        starts=np.array(starts),
    )
    return divided(graph, (0.6, 0.2, 0.2), 1)


def test_small_graphs_are_told_apart_side_by_side_as_alone():
    recipe = recipe_of({"kind": "gin"}, {"task": "graph"}, batch_tokens=12, steps=60, optimizer={"learning_rate": 0.03})
    workload = GraphWorkload(recipe, many())
    model = workload.build(torch.device("cpu"), torch.float64).eval()
    together = workload.task.infer(model, np.array([5, 0, 9]))
    apart = torch.cat([workload.task.infer(model, np.array([one])) for one in (5, 0, 9)])
    torch.testing.assert_close(together, apart)
    losses = train(recipe, many())
    assert losses[-2] < 0.5 * losses[0]
    assert train(recipe, many(), ranks=2) == pytest.approx(losses, rel=1e-6)


def test_links_held_out_carry_no_message_and_are_ranked():
    graph = made(nodes=80, edges=300)
    links = link_prediction.split(graph, (0.6, 0.2, 0.2), 1)
    held = links.pairs[:, np.concatenate([links.parts.validation, links.parts.test])]
    flows = set(zip(links.rest.indices.tolist(), links.rest.targets().tolist(), strict=True))
    assert not any((a, b) in flows or (b, a) in flows for a, b in held.T.tolist())
    assert len(flows) == 2 * len(links.parts.train)
    workload = GraphWorkload(recipe_of({"kind": "sage"}, {"task": "link"}), graph)
    model = workload.build(torch.device("cpu"), torch.float64).eval()
    found = workload.evaluate(model, Shard(0, workload.validation_samples(), 8))
    figures = workload.summary({name: total / weight for name, (total, weight) in found.items()})
    assert {"loss", "mrr", "auc", "hits@10", "test_mrr"} <= set(figures)
    assert 0 < figures["mrr"] <= 1


def test_a_stranger_is_never_the_head_and_depends_on_its_link_alone():
    ids = np.arange(50)
    heads = ids % 7
    drawn = link_prediction.strangers(ids, heads, 7, 9, (1, 4))
    assert drawn.shape == (50, 9)
    assert (drawn != heads[:, None]).all()
    assert drawn.min() >= 0
    assert drawn.max() < 7
    assert np.array_equal(link_prediction.strangers(ids[20:30], heads[20:30], 7, 9, (1, 4)), drawn[20:30])
    assert not np.array_equal(link_prediction.strangers(ids, heads, 7, 9, (1, 5)), drawn)


def test_answers_name_what_was_asked_for():
    graph = made()
    workload = GraphWorkload(recipe_of(), graph)
    model = workload.build(torch.device("cpu"), torch.float64).eval()
    everything = workload_row.answers(workload, model, None)
    assert len(everything) == graph.nodes
    assert workload_row.answers(workload, model, "3, 5\n7") == [everything[at] for at in (3, 5, 7)]
    with pytest.raises(UserError, match="no node '99'"):
        workload_row.answers(workload, model, "99")
    pairs = GraphWorkload(recipe_of({}, {"task": "link"}), graph)
    model = pairs.build(torch.device("cpu"), torch.float64).eval()
    assert len(workload_row.answers(pairs, model, "0,1; 2,3")) == 2
    with pytest.raises(UserError, match="no pair"):
        workload_row.answers(pairs, model, "0,1,2")


def test_one_node_is_answered_by_its_likeliest_new_links():
    graph = made()
    workload = GraphWorkload(recipe_of({}, {"task": "link"}), graph)
    model = workload.build(torch.device("cpu"), torch.float64).eval()
    known = {tuple(pair) for pair in workload.task.links.pairs.T.tolist()}
    others = [other for other in range(graph.nodes) if other != 7 and not {(7, other), (other, 7)} & known]
    chances = workload_row.answers(workload, model, ";".join(f"7,{other}" for other in others))
    expected = sorted(chances, key=lambda one: -one["probability"])
    with torch.no_grad():
        found = workload_row.answers(workload, model, "7", 4)
        assert [one["name"] for one in found] == [one["name"] for one in expected[:4]]
        assert len(workload_row.answers(workload, model, " 7\n")) == workload_row.LINKS
        assert len(workload_row.answers(workload, model, "7", 1000)) == len(others)
        with pytest.raises(UserError, match="no node '99'"):
            workload_row.answers(workload, model, "99", 4)


def test_embeddings_of_links_score_them_and_of_nodes_are_what_the_last_layer_reads(tmp_path):
    graph = made()
    linked = GraphWorkload(recipe_of({}, {"task": "link"}), graph)
    model = linked.build(torch.device("cpu"), torch.float32).eval()
    workload_row.ROW.exports["embeddings"](linked, model, tmp_path / "links")
    rows = torch.from_numpy(np.load(tmp_path / "links" / "embeddings.npy"))
    (one,) = workload_row.answers(linked, model, "3,9")
    assert float((rows[3] @ rows[9]).sigmoid()) == pytest.approx(one["probability"], rel=1e-6)
    assert (tmp_path / "links" / "names.txt").read_text().splitlines() == [graph.called(at) for at in range(60)]

    workload = GraphWorkload(recipe_of({"kind": "sage", "depth": 2}), graph)
    model = workload.build(torch.device("cpu"), torch.float32).eval()
    workload_row.ROW.exports["embeddings"](workload, model, tmp_path / "nodes")
    rows = torch.from_numpy(np.load(tmp_path / "nodes" / "embeddings.npy"))
    with torch.no_grad():
        logits = model.step(1, workload.task.view.block, rows)
    assert torch.equal(logits, infer(model, workload.task.view))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    with pytest.raises(UserError, match="not an export"):
        workload_row.ROW.exports["embeddings"](workload, model, tmp_path / "mine")


@pytest.mark.parametrize(
    ("model", "graph", "known", "says"),
    [
        ({}, {}, {"labels": None, "parts": None}, "has no labels"),
        ({}, {"task": "graph"}, {}, "is one graph"),
    ],
)
def test_what_the_graph_lacks_is_named(model, graph, known, says):
    with pytest.raises(UserError, match=says):
        GraphWorkload(recipe_of(model, graph), made(**known))


@pytest.mark.parametrize(
    ("model", "graph", "says"),
    [
        ({"k": 0}, {}, "model.k = 0"),
        ({"k": 9, "width": 8}, {}, "model.k = 9 is larger than the width"),
        ({"activation": "relu", "max_iterations": 4}, {}, "model.max_iterations = 4 belongs to"),
        ({"k": 2, "max_iterations": 0}, {}, "model.max_iterations = 0"),
        ({"kind": "gat", "width": 12}, {}, "does not divide"),
        ({"kind": "gat", "activation": "maxk", "width": 16}, {}, "not possible with"),
        ({"depth": 3}, {"fanout": [5, 5]}, "2 entries for model.depth = 3"),
        ({}, {"fanout": [0]}, "graph.fanout"),
        ({}, {"split": [0.5, 0.2, 0.2]}, "add up to 1"),
        ({}, {"task": "graph", "fanout": [2, 2]}, "not possible with graph.task"),
        ({"dropout": 1.0}, {}, "model.dropout = 1.0"),
        ({"kind": "gpt", "dropout": None}, {"task": "node"}, "belongs to a graph model"),
    ],
)
def test_options_that_contradict_are_refused(model, graph, says):
    table = {"model": {"kind": "gcn", **model}, "data": {"path": "x"}, "graph": graph}
    table["model"] = {name: value for name, value in table["model"].items() if value is not None}
    with pytest.raises(UserError, match=says):
        defaults.resolve(recipe_file.from_table(table))


def test_the_workload_needs_data():
    with pytest.raises(UserError, match=r"no \[data\]"):
        open_graph(defaults.resolve(recipe_file.from_table({"model": {"kind": "gcn"}}))[0])


def test_a_measured_mfu_counts_what_the_planner_counts():
    recipe, graph = recipe_of(), made()
    workload = GraphWorkload(recipe, graph)
    plan = plan_of(recipe, workload, micro_batch=7)  # several passes over the graph, which count once
    setting = RankSetup(recipe, plan, workload, launch.places(plan)[0])
    with worker.joined(setting.place, 20.0) as channel:
        begun = trainer.Trainer(setting, channel)
    assert begun.step_flops == request_from_recipe.of_recipe(recipe, lambda: workload).model_flops
    assert begun.step_tokens == workload.global_batch


def test_a_trial_counts_what_a_step_waits_for_its_batch(monkeypatch):
    recipe = recipe_of(graph={"fanout": [3, 3]}, steps=6, batch_tokens=32)
    workload, drawn = GraphWorkload(recipe, made()), []
    plan = plan_of(recipe, workload)
    draw = workload.batches

    def slowly(step, shard):
        time.sleep(0.2)
        drawn.append(step)
        return draw(step, shard)

    monkeypatch.setattr(workload, "batches", slowly)
    assert worker.trial(RankSetup(recipe, plan, workload, launch.places(plan)[0]), 1.0) > 0.19
    assert drawn[:4] == [0, 1, 2, 3], "each step has a batch of its own"
    drawn.clear()
    assert worker.trial(RankSetup(recipe, plan, workload, launch.places(plan)[0]), 60.0, hopeless=0.1) > 0.19
    assert len(drawn) <= 3, "it ends after its first two steps, with one batch ahead"
