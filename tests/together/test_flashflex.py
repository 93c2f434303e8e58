"""Unequal pipelines with what they meet in a run: shards, killed ranks, replicas by rounds, codecs."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from struck import Struck, recipe_of, same, write_corpus
from tests.together.test_rounds import close, plan_of, train
from tests.together.test_rounds import recipe_of as rounds_recipe

from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.plan import base as plans
from many_ranks.faults import Fault


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("ragged") / "corpus")


def ragged(ends=((2, 4), (1, 4), (4,)), shares=((0, 3), (3, 6), (6, 8)), **fields):
    """Pipelines whose stages end at these layers, each with a share of the samples."""
    ranks, stages = [], []
    for number, (pipeline, share) in enumerate(zip(ends, shares, strict=True)):
        for layers in itertools.pairwise((0, *pipeline)):
            stages.append(plans.Stage(pipeline=number, ranks=(len(ranks),), layers=layers))
            ranks.append(plans.Rank(share=share))
    return plans.Plan(ranks=tuple(ranks), stages=tuple(stages), micro_batch=2, **fields)


SHARDED = (plans.Unit(optimizer=(0, 1), whole=True),)


def of(corpus, every=4):
    tables = {"steps": 14, "optimizer": {"kind": "adamw"}}
    return recipe_of(corpus, model={"depth": 4}, train=tables, checkpoint={"every": every})


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0, pytest.param(1 << 26, marks=pytest.mark.slow)])
def test_a_rank_of_unequal_pipelines_with_sharded_states_is_killed_and_no_bit_changes(corpus, tmp_path, memory):
    recipe, plan = of(corpus, 100 if memory else 4), ragged(units=SHARDED, schedule="zero_bubble")
    whole = Struck(recipe, len(plan.ranks), tmp_path / "whole", plan=plan).run()
    fault = Fault(2, 11, "kill")
    run = Struck(recipe, len(plan.ranks), tmp_path / "run", (fault,), memory=memory, plan=plan).run()
    assert same(run, whole)
    (recovered,) = run.all("recovered")
    assert recovered["source"] == ("memory" if memory else "disk")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, 3])
def test_a_rank_of_pipelines_that_cut_matrices_unlike_is_killed_and_no_bit_changes(corpus, tmp_path, killed):
    """Layers 0 to 2 over two ranks in one pipeline, on one in the other: rank 3 has all that rank 1 has half of."""
    recipe = recipe_of(
        corpus,
        model={"depth": 4, "tied": False},
        train={"steps": 14, "optimizer": {"kind": "adamw"}},
        checkpoint={"every": 4},
    )
    stages = (
        plans.Stage(pipeline=0, ranks=(0, 1), layers=(0, 3), tensor=2),
        plans.Stage(pipeline=0, ranks=(2,), layers=(3, 4)),
        plans.Stage(pipeline=1, ranks=(3,), layers=(0, 4)),
    )
    ranks = tuple(plans.Rank(share=(0, 5) if rank < 3 else (5, 8)) for rank in range(4))
    plan = plans.Plan(ranks=ranks, stages=stages, micro_batch=1, algorithm="megatron")
    whole = Struck(recipe, 4, tmp_path / "whole", plan=plan).run()
    run = Struck(recipe, 4, tmp_path / "run", (Fault(killed, 11, "kill"),), plan=plan).run()
    assert same(run, whole)
    (recovered,) = run.all("recovered")
    assert recovered["source"] == "disk"


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["split", "int8"])
def test_gradients_of_unequal_pipelines_cross_by_a_codec_with_its_feedback(corpus, tmp_path, codec):
    """A killed rank changes no bit: the residuals of each set of holders come back. Losses are those of exact sums, up
    to rounding or within the codec's bound."""
    recipe, ranks, plain = of(corpus), 5, ragged(units=SHARDED)
    plan = msgspec.structs.replace(plain, exchanges=(plans.Exchange(traffic="gradients", codec=codec),))
    run = Struck(recipe, ranks, tmp_path / "run", (Fault(1, 11, "kill"),), plan=plan).run()
    assert same(run, Struck(recipe, ranks, tmp_path / "whole", plan=plan).run())
    exact = Struck(recipe, ranks, tmp_path / "plain", plan=plain).run()
    bound = 1e-5 if codec == "split" else 3e-2
    assert list(run.losses.values()) == pytest.approx(list(exact.losses.values()), rel=bound)
    assert codec == "split" or run.losses != exact.losses


def test_replicas_that_are_unequal_pipelines_agree_by_rounds(corpus):
    """Two replicas of three stages of unlike layers, beside two of one rank: the same model by rounds."""
    recipe = rounds_recipe(corpus, depth=4)
    whole = train(recipe, plan_of())[0]
    layers = ((0, 1), (1, 2), (2, 4))
    stages = tuple(plans.Stage(ranks=(rank,), layers=one) for rank, one in enumerate(layers))
    shares = tuple(plans.Rank(share=share) for share in ((0, 4), (4, 8)) for _ in stages)
    outer = LocalRoundsState(replicas=((0, 1, 2), (3, 4, 5)), method="co2", steps=4, adapt=False)
    ranks = train(
        recipe,
        plans.Plan(ranks=shares, stages=stages, micro_batch=2, precision="fp64", choices={"local_rounds": outer}),
    )
    assert ranks[0][0] == pytest.approx(whole[0], rel=1e-6)
    for one in ranks:
        close({name: whole[1][name] for name in one[1]}, one[1], 1e-6)


def test_replicas_of_several_unequal_pipelines_agree_by_rounds(corpus):
    """In each of two replicas pipelines of unlike depth, layers and shares sum their gradients at every step."""
    recipe = rounds_recipe(corpus, depth=4)
    whole = train(recipe, plan_of())[0]
    stages = tuple(
        plans.Stage(pipeline=number, ranks=(rank,), layers=layers)
        for rank, (number, layers) in enumerate([(0, (0, 1)), (0, (1, 4)), (1, (0, 4))])
    )
    shares = tuple(
        plans.Rank(share=(4 * half + a, 4 * half + b)) for half in (0, 1) for a, b in ((0, 3), (0, 3), (3, 4))
    )
    outer = LocalRoundsState(replicas=((0, 1, 2), (3, 4, 5)), method="co2", steps=4, adapt=False)
    ranks = train(
        recipe,
        plans.Plan(
            ranks=shares, stages=stages, units=SHARDED, micro_batch=1, precision="fp64", choices={"local_rounds": outer}
        ),
    )
    assert ranks[0][0] == pytest.approx(whole[0], rel=1e-6)
    for one in ranks:
        close({name: whole[1][name] for name in one[1]}, one[1], 1e-6)
