"""Rounds with what they meet in a run: shards inside a replica, codecs, checkpoints in flight, speeds, validation.

The reference is two replicas of one rank each, unbroken, float64.
"""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.language.workload import open_language
from espalier.launch.ranks import agent
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.plan import base as plans
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import Interrupted, UserError
from espalier.train import rank_spec as launch
from espalier.train import table, trainer, worker
from espalier.train.rank_setup import RankSetup

STEPS = 14
METHODS = ("local_sgd", "slowmo", "diloco", "streaming_diloco", "co2", "eager")


def recipe_of(corpus, precision="fp64", steps=STEPS, depth=1, **train):
    table = {
        "model": {"depth": depth, "width": 32, "heads": 2, "feed_forward": 64},
        "data": {"path": str(corpus), "cache": str(corpus.parent / "cache"), "validation": 0.2},
        "train": {"steps": steps, "sequence": 32, "batch_tokens": 256, "precision": precision}
        | {"validate_every": 4, "validate_tokens": 512}
        | {"optimizer": {"kind": "adamw"}}
        | train,
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


def plan_of(ranks=2, shard=(), method="co2", steps=4, settings=None, paces=(), precision="fp64"):
    shares = tuple(plans.Rank(share=(8 * one // ranks, 8 * (one + 1) // ranks)) for one in range(ranks))
    groups = [tuple(range(size)) if size > 1 else () for size in shard]
    unit = plans.Unit(**dict(zip(("params", "grads", "optimizer"), groups, strict=False)), whole=True)
    half = ranks // 2
    outer = LocalRoundsState(
        replicas=(tuple(range(half)), tuple(range(half, ranks))),
        method=method,
        settings=settings or {},
        steps=steps,
        adapt=False,
        paces=paces,
    )
    return plans.Plan(ranks=shares, units=(unit,), micro_batch=8, precision=precision, choices={"local_rounds": outer})


def train(recipe, plan, folder=None, stop_after=None):
    """Of every rank: what was validated, the common model, and which steps it took."""
    workload = open_language(recipe)

    def life(place):
        found, steps = {}, []

        def emit(event, **fields):
            if event == "validation":
                found[fields["step"]] = fields["loss"]
            if event == "step":
                steps.append(fields["step"])

        setting = RankSetup(recipe, plan, workload, place, folder, emit, stop_after=stop_after)
        saved = None
        with worker.joined(place, 90.0) as channel:
            one = trainer.Trainer(setting, channel)
            if folder is not None:
                saved = Checkpoints(folder / "checkpoints", keep=2, group=worker.saving_group(channel))
                one.restore(saved)
            try:
                one.run(saved)
            except Interrupted:
                assert stop_after is not None
            one.built.sharding.summon()
            return found, {n: v.clone() for n, v in one.built.model.state_dict().items()}, steps

    return agent.run(life, launch.places(plan))


def close(ours, theirs, tolerance):
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: n + text)


@pytest.mark.parametrize(
    "shard", [(1, 1, 2), *(pytest.param(one, marks=pytest.mark.slow) for one in ((1, 2, 2), (2, 2, 2)))]
)
def test_replicas_of_two_ranks_with_shards_are_replicas_of_one(corpus, shard):
    recipe = recipe_of(corpus)
    whole, shards = (train(recipe, plan)[0] for plan in (plan_of(), plan_of(4, shard)))
    assert shards[0] == pytest.approx(whole[0], rel=1e-6)
    close(shards[1], whole[1], 1e-6)


def test_replicas_that_are_pipelines_are_replicas_of_one_rank(corpus):
    """Each of the two has two stages, which exchange nothing between rounds with the other's."""
    recipe = recipe_of(corpus, depth=2)
    whole = train(recipe, plan_of())[0]
    stages = tuple(plans.Stage(ranks=(rank,), layers=(rank, rank + 1)) for rank in (0, 1))
    shares = tuple(plans.Rank(share=share) for share in ((0, 4), (4, 8)) for _ in stages)
    outer = LocalRoundsState(replicas=((0, 1), (2, 3)), method="co2", steps=4, adapt=False)
    ranks = train(
        recipe,
        plans.Plan(ranks=shares, stages=stages, micro_batch=2, precision="fp64", choices={"local_rounds": outer}),
    )
    assert ranks[0][0] == pytest.approx(whole[0], rel=1e-6)
    for one in ranks:
        close({name: whole[1][name] for name in one[1]}, one[1], 1e-6)


def test_replicas_whose_ranks_share_matrices_are_refused_by_name(corpus):
    stage = plans.Stage(ranks=(0, 1), layers=(0, 1), tensor=2)
    outer = LocalRoundsState(replicas=((0, 1), (2, 3)), method="co2", steps=4, adapt=False)
    plan = plans.Plan(
        ranks=(plans.Rank(share=(0, 8)),) * 4, stages=(stage,), choices={"local_rounds": outer}, algorithm="megatron"
    )
    refused = table.refusal(recipe_of(corpus), plan)
    assert refused is not None
    assert set(refused.pair) == {"outer_rounds", "tensor_parallel"}
    assert "every_step" in refused.instead


def test_a_penalty_over_shards_is_that_of_the_whole(corpus):
    recipe, settings = recipe_of(corpus), {"penalty": "norm", "momentum": 0.5}
    whole, shards = (
        train(recipe, p)[0] for p in (plan_of(settings=settings), plan_of(4, (1, 1, 2), settings=settings))
    )
    close(shards[1], whole[1], 1e-6)


@pytest.mark.extremes
@pytest.mark.parametrize("method", METHODS)
def test_all_ranks_end_with_one_model_and_have_learned(corpus, method):
    recipe = recipe_of(corpus, precision="fp32")
    first, second = train(recipe, plan_of(method=method, precision="fp32"))
    for name, value in first[1].items():
        assert torch.equal(value, second[1][name]), name
    assert first[0] == second[0], "validation is of the common model, with the same sum everywhere"
    assert list(first[0]) == [4, 8, 12, 14]
    assert first[0][14] < first[0][4] < math.log(256) + 0.5


@pytest.mark.slow
def test_interrupted_in_flight_and_resumed_equals_unbroken_bit_for_bit(corpus, tmp_path):
    recipe = recipe_of(corpus, precision="fp32")
    for method, ranks, shard in (("co2", 2, ()), ("streaming_diloco", 2, ()), ("co2", 4, (1, 1, 2))):
        plan = plan_of(ranks, shard, method=method, precision="fp32")
        folder = tmp_path / f"{method}{ranks}"
        unbroken = train(recipe, plan)
        train(recipe, plan, folder, stop_after=8)
        resumed = train(recipe, plan, folder)
        for ours, theirs in zip(resumed, unbroken, strict=True):
            assert ours[0] == {step: loss for step, loss in theirs[0].items() if step > 8}
            for name, value in theirs[1].items():
                assert torch.equal(ours[1][name], value), (method, name)


def test_the_common_model_resumes_without_rounds_and_with_other_replicas(corpus, tmp_path):
    recipe = recipe_of(corpus, precision="fp32")
    train(recipe, plan_of(precision="fp32"), tmp_path, stop_after=8)
    alone = plans.Plan(ranks=(plans.Rank(share=(0, 8)),), micro_batch=8)
    assert list(train(recipe, alone, tmp_path)[0][0]) == [12, STEPS]
    more = msgspec.structs.replace(
        plan_of(4, precision="fp32"),
        choices={"local_rounds": LocalRoundsState(replicas=((0,), (1,), (2,), (3,)), steps=4, adapt=False)},
    )
    ends = train(recipe_of(corpus, precision="fp32", steps=20), more, tmp_path)
    for name, value in ends[0][1].items():
        assert all(torch.equal(value, end[1][name]) for end in ends[1:]), name


def test_a_slower_replica_takes_fewer_steps_and_all_end_their_rounds_together(corpus):
    fast, slow = train(recipe_of(corpus), plan_of(paces=(1.0, 0.5)))
    assert fast[2] == list(range(1, 15))
    assert slow[2] == [2, 4, 6, 8, 10, 12, 14]
    close(slow[1], fast[1], 0)


def test_four_bits_end_near_full_precision(corpus):
    recipe = recipe_of(corpus, precision="fp32", steps=40)
    exact, rough = (train(recipe, plan_of(precision="fp32", settings=s))[0] for s in ({}, {"codec": "int4"}))
    assert rough[0][40] == pytest.approx(exact[0][40], rel=0.02)
    assert rough[0] != exact[0]


def test_replicas_whose_ranks_would_send_the_same_are_refused(corpus):
    with pytest.raises(UserError, match="A replica has 2 ranks"):
        train(recipe_of(corpus), plan_of(4))
