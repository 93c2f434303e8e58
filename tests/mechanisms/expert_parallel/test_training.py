"""A mixture of experts whose experts are spread over ranks trains as it does on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from even_experts import spread_evenly
from safetensors.torch import load_file
from tests.mechanisms.pipeline.runs import Trained, corpus, recipe_of, train
from tests.plan import asked

import espalier
from espalier import recipe as config
from espalier.language import gpt, hf, moe
from espalier.mechanisms.expert_parallel.state import ExpertParallelState
from espalier.plan import base as plans
from espalier.plan import decide, pins
from espalier.recipe import recipe_file, value_ranges
from espalier.recipe.cost import ExpertSizes
from espalier.recipe.errors import UserError

TOLERANCE = 1e-9
EXPERTS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return corpus(tmp_path_factory.mktemp("corpus"))


def moe_recipe(folder: Path, **rows: Any) -> Any:
    model = {"kind": "moe", "depth": 2, "width": 16, "experts": EXPERTS, "active": 2, "feed_forward": 24}
    return recipe_of(folder, model, {"clip": 0.5, "optimizer": {"kind": "adamw", "learning_rate": 0.002}} | rows)


def plan_of(count: int, experts: Any, shard: tuple[int, int, int] = (1, 1, 1), **changes: Any) -> plans.Plan:
    shares = [(8 * number // count, 8 * (number + 1) // count) for number in range(count)]
    groups = [tuple(range(size)) if size > 1 else () for size in shard]
    units = (plans.Unit(**dict(zip(("params", "grads", "optimizer"), groups, strict=True))),)
    plan = plans.Plan(
        units=units,
        choices={"expert_parallel": ExpertParallelState(experts=experts)},
        **{"micro_batch": 2, "precision": "fp64", "ranks": tuple(plans.Rank(share=share) for share in shares)}
        | changes,
    )
    return plans.check(plan, 8)


def even(ranks: int) -> tuple[tuple[int, ...], ...]:
    return spread_evenly(EXPERTS, ranks).ranks


@pytest.fixture(scope="module")
def alone(folder: Path) -> Trained:
    return train(moe_recipe(folder), plan_of(1, ()))[0]


def same(found: list[Trained], alone: Trained) -> None:
    for one in found:
        assert one.losses == pytest.approx(alone.losses, rel=TOLERANCE)
        assert one.norms == pytest.approx(alone.norms, rel=TOLERANCE)
        assert one.validation == pytest.approx(alone.validation, rel=TOLERANCE)
        for name, value in one.weights.items():
            torch.testing.assert_close(value, alone.weights[name], rtol=1e-7, atol=TOLERANCE)
    assert {name for one in found for name in one.weights} == set(alone.weights)


def taken_up_by_one_rank(folder: Path, alone: Trained, saved: Path) -> None:
    """One rank goes on from step 2 as if it had been alone."""
    rest = train(moe_recipe(folder), plan_of(1, ()), saved)[0]
    assert rest.losses == pytest.approx(alone.losses[2:], rel=TOLERANCE)
    for name, value in rest.weights.items():
        torch.testing.assert_close(value, alone.weights[name], rtol=1e-7, atol=TOLERANCE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ranks", "experts"),
    [(2, ((0, 1, 2), (3, 4))), (4, even(2)), (3, ((4, 0), (2,), (3, 1)))],
    ids=["two ranks", "two groups of two", "three uneven ranks in any order"],
)
def test_experts_over_ranks_train_as_on_one(folder, alone, ranks, experts):
    found = train(moe_recipe(folder), plan_of(ranks, experts))
    same(found, alone)
    held = [{int(name.split(".")[4]) for name in one.weights if ".experts." in name} for one in found]
    assert held == [set(experts[rank % len(experts)]) for rank in range(ranks)]


def test_a_bias_and_a_z_loss_over_ranks_train_as_on_one(folder):
    recipe = moe_recipe(folder)
    model = msgspec.structs.replace(recipe.model, balancing="bias", z_loss=0.01)
    recipe = msgspec.structs.replace(recipe, model=model)
    whole = train(recipe, plan_of(1, ()))[0]
    assert any(name.endswith("feed_forward.router.bias") and value.any() for name, value in whole.weights.items())
    same(train(recipe, plan_of(2, even(2))), whole)


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_experts_and_shards_elsewhere(folder, alone, tmp_path):
    maps = [(2, even(2), (1, 2, 2)), (3, even(3), (1, 1, 1)), (1, (), (1, 1, 1)), (4, even(2), (2, 4, 4))]
    recipe, losses = moe_recipe(folder, steps=4), []
    for step, (ranks, experts, shard) in enumerate(maps, start=1):
        found = train(recipe, plan_of(ranks, experts, shard), tmp_path, until=step)
        losses += found[0].losses
    whole = train(recipe, plan_of(1, ()))[0]
    assert losses == pytest.approx(whole.losses, rel=TOLERANCE)
    for one in found:
        for name, value in one.weights.items():
            torch.testing.assert_close(value, whole.weights[name], rtol=1e-7, atol=TOLERANCE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "shard", [(1, 1, 4), (1, 2, 4), (1, 4, 4), (2, 2, 2), (2, 4, 4), (4, 4, 4)], ids="{0[0]}-{0[1]}-{0[2]}".format
)
def test_states_of_experts_are_sharded_over_the_ranks_that_share_them(folder, alone, shard):
    same(train(moe_recipe(folder), plan_of(4, even(2), shard=shard, micro_batch=1)), alone)


@pytest.mark.parametrize("recompute", ["block", "selective"])
def test_recomputed_layers_gather_their_experts_again(folder, alone, recompute):
    plan = plan_of(8, even(2), shard=(2, 4, 8), recompute=recompute, micro_batch=1)
    same(train(moe_recipe(folder), plan), alone)


def test_the_only_rank_with_an_expert_has_all_its_states(folder, alone):
    same(train(moe_recipe(folder), plan_of(3, ((4, 0), (2,), (3, 1)), shard=(3, 3, 3))), alone)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shard", [(1, 1, 1), (1, 4, 4), (4, 4, 4)], ids=["whole", "gradients", "parameters"])
def test_experts_over_the_ranks_of_each_stage(folder, alone, tmp_path, shard):
    shares = [(2 * rank, 2 * rank + 2) for rank in range(4)]
    ranks = tuple(plans.Rank(share=share) for _ in range(2) for share in shares)
    stages = tuple(plans.Stage(ranks=tuple(range(4 * one, 4 * one + 4)), layers=(one, one + 1)) for one in range(2))
    plan = plan_of(8, even(2), shard, ranks=ranks, stages=stages, micro_batch=1)
    last = train(moe_recipe(folder), plan, tmp_path, until=2)[4]
    assert last.losses == pytest.approx(alone.losses[:2], rel=TOLERANCE)
    assert last.norms == pytest.approx(alone.norms[:2], rel=TOLERANCE)
    taken_up_by_one_rank(folder, alone, tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("replicas", "heads", "context", "ep", "shard"),
    [
        (2, 1, 2, 4, (1, 1, 1)),
        (2, 2, 1, 4, (4, 4, 4)),
        (2, 1, 2, 2, (2, 2, 4)),
        (1, 1, 4, 4, (1, 4, 4)),
        (1, 2, 2, 4, (4, 4, 4)),
        (1, 2, 2, 2, (1, 4, 4)),
    ],
)
def test_experts_over_ranks_that_share_sequences(folder, alone, replicas, heads, context, ep, shard):
    """Also over more ranks than there are replicas of the data."""
    each = heads * context
    stage = plans.Stage(ranks=(0, 1, 2, 3), layers=(0, 2), heads=heads, context=context, window=1)
    ranks = tuple(
        plans.Rank(share=(rank // each * 8 // replicas, (rank // each + 1) * 8 // replicas)) for rank in range(4)
    )
    plan = plan_of(4, even(ep), shard, ranks=ranks, stages=(stage,))
    same(train(moe_recipe(folder), plan), alone)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("degrees", [{"dp": 1, "cp": 4}, {"dp": 1, "hp": 2, "cp": 2}, {"dp": 2, "hp": 2}], ids=str)
def test_the_planner_spreads_experts_over_more_ranks_than_replicas(folder, alone, degrees):
    recipe, shard = moe_recipe(folder), {"params": 1, "grads": 4, "optimizer": 4}
    plan = espalier.make_plan(recipe, asked.processor(cores=4), ranks=4, ep=4, tp=1, pp=1, shard=shard, **degrees)
    assert (plan.executable, plan.layout.ep, plan.layout.dp) == (True, 4, degrees["dp"])
    assert any("Experts are spread over groups of 4 ranks" in why for why in plan.why)
    same(train(recipe, plan), alone)


def test_experts_of_which_ranks_also_share_the_matrices(folder, alone, tmp_path):
    """experts x tensor x data: two groups of two hold the experts, and each rank half the columns of its own; taken up
    by one rank."""
    stage = plans.Stage(ranks=tuple(range(8)), layers=(0, 2), tensor=2)
    ranks = tuple(plans.Rank(share=(2 * one, 2 * one + 2)) for one in range(4) for _ in range(2))
    plan = plan_of(8, even(2), ranks=ranks, stages=(stage,), recompute="block", micro_batch=1)
    recipe = moe_recipe(folder)
    found = train(recipe, plan, tmp_path, until=2)
    for rank, one in enumerate(found):
        if rank % 2 == 0:  # the others compute the same losses, which count once
            assert one.losses == pytest.approx(alone.losses[:2], rel=TOLERANCE)
            assert one.norms == pytest.approx(alone.norms[:2], rel=TOLERANCE)
            assert one.validation == pytest.approx(alone.validation[: len(one.validation)], rel=TOLERANCE)
        own = {name: value for name, value in one.weights.items() if ".experts." in name}
        assert {int(name.split(".")[4]) for name in own} == set(even(2)[rank // 2 % 2])
        assert {tuple(value.shape) for value in own.values()} == {(12, 16), (16, 12)}
    rest = train(recipe, plan_of(1, ()), tmp_path)[0]
    assert rest.losses == pytest.approx(alone.losses[2:], rel=TOLERANCE)
    for name, value in rest.weights.items():
        torch.testing.assert_close(value, alone.weights[name], rtol=1e-7, atol=TOLERANCE)


def test_experts_of_stages_whose_ranks_share_the_matrices(folder, alone, tmp_path):
    """experts x tensor x pipeline: a stage of four ranks has one layer, its experts over two, each matrix over two;
    taken up by one rank."""
    stages = tuple(
        plans.Stage(ranks=tuple(range(4 * stage, 4 * stage + 4)), layers=(stage, stage + 1), tensor=2)
        for stage in range(2)
    )
    ranks = tuple(plans.Rank(share=share) for _ in range(2) for share in ((0, 4), (0, 4), (4, 8), (4, 8)))
    plan = plan_of(8, even(2), ranks=ranks, stages=stages, micro_batch=1)
    last = train(moe_recipe(folder), plan, tmp_path, until=2)[4]
    assert last.losses == pytest.approx(alone.losses[:2], rel=TOLERANCE)
    assert last.norms == pytest.approx(alone.norms[:2], rel=TOLERANCE)
    assert last.validation == pytest.approx(alone.validation[: len(last.validation)], rel=TOLERANCE)
    taken_up_by_one_rank(folder, alone, tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", ["block", "selective"])
def test_recomputed_layers_dispatch_again(folder, alone, recompute):
    same(train(moe_recipe(folder), plan_of(2, even(2), recompute=recompute)), alone)


@pytest.mark.parametrize(
    ("model", "pin", "said"),
    [
        ("gpt", {"ep": 2}, "this model has none"),
        ("moe", {"ep": 9}, "plan.pin.ep=8 or less"),
        ("moe", {"ep": 2, "ranks": 3}, "does not divide"),
        ("moe", {"ep": 2, "tp": 2, "ranks": 6}, "does not divide"),
    ],
)
def test_pins_that_cannot_be_met_say_what_can(model, pin, said):
    facts = {"expert_parallel": ExpertSizes(8, 2)} if model == "moe" else {}
    request = asked.decoder(batch=16).changed(pin=config.Pin(**pin), facts=facts)
    with pytest.raises(UserError, match=said):
        pins._check_experts(request)


def test_a_map_of_another_model_or_with_an_expert_twice_is_refused(folder):
    with pytest.raises(UserError, match="a layer of the model has 5"):
        train(moe_recipe(folder), plan_of(2, ((0, 1), (2, 3))))
    with pytest.raises(UserError, match="each is held once"):
        plan_of(2, ((0, 1), (1, 2)))


def test_a_mixtral_folder_goes_into_ranks_and_comes_out_as_from_one(folder, tmp_path):
    recipe = moe_recipe(folder)
    start = moe.MOE(recipe.model)
    gpt.initialise(start, 7)
    tokenizer = type("NoTokenizer", (), {"save": lambda self, folder: None})()
    hf.export(start, tokenizer, tmp_path / "start")
    recipe = msgspec.structs.replace(
        recipe, model=msgspec.structs.replace(recipe.model, initial=str(tmp_path / "start"))
    )
    whole = train(recipe, plan_of(1, ()), until=1)[0]
    train(recipe, plan_of(2, even(2)), tmp_path / "saved", until=1)
    read = train(recipe, plan_of(1, ()), tmp_path / "saved", until=1)[0]  # makes no step of its own
    assert read.losses == []
    for name, run in {"whole": whole, "ranks": read}.items():
        model = moe.MOE(recipe.model).double()
        model.load_state_dict(run.weights)
        hf.export(model, tokenizer, tmp_path / name)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ranks", "whole"))
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=TOLERANCE)
    assert any("block_sparse_moe.experts.4.w2" in name for name in ours)


def test_rows_in_eight_bits_are_in_the_plan_and_train_nearly_alike(folder, alone):
    """`comm.experts`: the plan says it, the planner prices it, and losses stay within rounding of eight bits."""
    recipe = moe_recipe(folder)
    plan = plan_of(2, even(2), exchanges=(plans.Exchange(traffic="experts", codec="int8"),))
    found = train(recipe, plan)[0]
    assert found.losses != alone.losses
    assert found.losses == pytest.approx(alone.losses, rel=2e-3)
    pin = config.Pin(ranks=2, pp=1, ep=2)
    request = asked.decoder(batch=16).changed(facts={"expert_parallel": ExpertSizes(8, 2, 1e5)}, pin=pin)
    whole, coded = (
        decide.decide(request.changed(experts=rows), asked.processor(count=2, between="200Mbit/s")).plan
        for rows in ("exact", "int8")
    )
    assert not any(one.traffic == "experts" for one in whole.exchanges)
    assert plans.Exchange(traffic="experts", codec="int8") in coded.exchanges
    assert coded.predicted.sent_bytes["experts"] < 0.75 * whole.predicted.sent_bytes["experts"]


def test_rows_in_eight_bits_need_experts():
    table = {"model": {"kind": "gpt"}, "data": {"path": "python:stdlib"}, "comm": {"experts": "int8"}}
    with pytest.raises(UserError, match="this model has none"):
        value_ranges.check(recipe_file.from_table(table))
