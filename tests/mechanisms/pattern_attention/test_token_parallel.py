"""A graph transformer whose tokens are cut over ranks trains, validates and goes on as on one rank, and sends the bytes
that its plan says."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from tests.graph.conftest import made
from tests.graph.test_workload import STEPS, recipe_of
from tests.mechanisms.halo_exchange.test_halo_parallel import close, machines, plan_of, train

from espalier import recipe as config
from espalier.graph.data.graph import DataSplit, Graph
from espalier.graph.workload import GraphWorkload
from espalier.mechanisms.pattern_attention.token_parallel import TokenPart, tokens_by_rank
from espalier.plan import decide
from espalier.recipe import defaults
from espalier.recipe.errors import UserError
from espalier.train import request_from_recipe, table

MODEL = {"kind": "graph-transformer", "depth": 2, "width": 20, "heads": 5, "feed_forward": 16, "dropout": 0.0}
OPTIONS = {
    "edges, a virtual token and biases": {"attention": "sparse", "virtual": 1, "distance": 2},
    "averages over two hops that layers correct": {"local": 2},
    "interleaved with full steps": {"attention": "interleaved", "interleave": 2, "virtual": 0, "path": True},
}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(one, id=name, marks=pytest.mark.slow if 0 < at < len(OPTIONS) - 1 else ())
        for at, (name, one) in enumerate(OPTIONS.items())
    ],
)
def test_any_number_of_ranks_trains_and_validates_as_one(options):
    """Five heads: uneven over two and four ranks."""
    model = {**MODEL, **options}
    alone = train(recipe_of(model), made())
    recipe = recipe_of(model, {"halo": {}})
    for cuts in [(30,), (10, 40, 60)]:
        found = train(recipe, made(), cuts)
        close(found, alone, rel=1e-9)


def test_inductive_training_and_ranks_without_training_nodes_train_as_one():
    """Training nodes are the first ones, so that the last rank has none."""
    graph = made()
    split = DataSplit(*np.split(np.arange(graph.nodes), [20, 40]))
    graph = Graph(**{**vars(graph), "parts": split})
    alone = train(recipe_of(MODEL, {"inductive": True}), graph)
    close(train(recipe_of(MODEL, {"inductive": True, "halo": {}}), graph, (50,)), alone, rel=1e-9)


def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path):
    recipe = recipe_of(MODEL, {"halo": {}})
    whole = train(recipe, made(), (50,), tmp_path / "whole")
    first = train(recipe, made(), (30, 60), tmp_path / "cut", stop=2)
    for cuts in [(), (40,)]:
        folder = tmp_path / f"again {len(cuts)}"
        shutil.copytree(tmp_path / "cut", folder)
        then = train(recipe, made(), cuts, folder)
        assert first["losses"] + then["losses"] == pytest.approx(whole["losses"], rel=1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_of_a_step_are_those_of_the_plan_and_the_plan_says_what_each_rank_has(precision):
    recipe = recipe_of({**MODEL, "virtual": 2}, {"halo": {}}, precision=precision)
    workload = GraphWorkload(recipe, made())
    plan = plan_of(recipe, workload, (20, 60))
    shares = [one.share[1] - one.share[0] for one in plan.ranks]
    cut = workload.halos()
    sent = train(recipe, made(), (20, 60))["sent"]
    assert sent[1:] == [cut.step_bytes(shares, cut.value_bytes(precision))[0].sum()] * (STEPS - 1)
    pinned = msgspec.structs.replace(recipe, plan=config.Planning(pin=config.Pin(ranks=3)))
    taken = decide.decide(request_from_recipe.of_recipe(pinned, lambda: workload), machines(1, 0)).taken
    assert any("62 tokens are cut into 3 ranges" in one and "1 to 2 heads" in one for one in taken.why)


def test_no_more_ranks_are_planned_than_there_are_heads():
    recipe = recipe_of({**MODEL, "width": 8, "heads": 2}, {"halo": {}})
    with pytest.raises(UserError, match=r"model.heads = 2 cannot be computed by 3 ranks"):
        table.ordered(recipe, plan_of(recipe, GraphWorkload(recipe, made()), (30, 60)))
    asked = request_from_recipe.of_recipe(recipe, lambda: GraphWorkload(recipe, made(nodes=600, edges=4000)))
    assert len(decide.decide(asked, machines(4, 10_000)).taken.trainers) <= 2


def test_more_ranks_than_nodes_are_refused():
    workload = GraphWorkload(recipe_of(MODEL, {"halo": {}}), made(nodes=6))
    model, group = workload.bare(), SimpleNamespace(rank=lambda: 0)
    with pytest.raises(UserError, match="6 nodes for 7 ranks"):
        TokenPart(workload.whole_task, model, [1] * 7, {}, group)


def test_nodes_follow_the_shares_and_virtual_tokens_are_with_the_last():
    assert tokens_by_rank(60, 1, [1, 2]) == [20, 41]


def test_options_of_halos_are_refused():
    with pytest.raises(UserError, match="no options for a graph transformer"):
        defaults.resolve(recipe_of(MODEL, {"halo": {"bits": 1}}))
