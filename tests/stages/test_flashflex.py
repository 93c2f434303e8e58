"""Pipelines of different depth side by side train as one rank does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from espalier.errors import UserError
from espalier.plan import base as plans
from espalier.testing import same

from .runs import Trained, corpus, recipe_of, together, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Trained:
    return train(recipe_of(folder), plans.Plan(ranks=(plans.Rank(share=(0, 8)),), precision="fp64"))[0]


def ragged(pipelines: Sequence[tuple[Sequence[int], int]], **fields: object) -> plans.Plan:
    """A plan of (layer at which each stage ends, samples) for each pipeline; fields: of the plan."""
    ranks: list[plans.Rank] = []
    stages, at = [], 0
    for number, (ends, samples) in enumerate(pipelines):
        for layers in itertools.pairwise((0, *ends)):
            stages.append(plans.Stage(pipeline=number, ranks=(len(ranks),), layers=layers))
            ranks.append(plans.Rank(share=(at, at + samples)))
        at += samples
    plan = plans.Plan(ranks=tuple(ranks), stages=tuple(stages), precision="fp64")
    return plans.check(msgspec.structs.replace(plan, **fields), at)


def drawn(seed: int) -> plans.Plan:
    """A random plan of at most 6 ranks for 4 layers and 8 samples."""
    draw = random.Random(seed)
    while True:
        depths = [draw.randint(1, 4) for _ in range(draw.randint(2, 3))]
        if sum(depths) <= 6 and len(set(depths)) + len(depths) > 2:
            break
    cuts = sorted(draw.sample(range(1, 8), len(depths) - 1))
    samples = [b - a for a, b in itertools.pairwise([0, *cuts, 8])]
    ends = [(*sorted(draw.sample(range(1, 4), depth - 1)), 4) for depth in depths]
    split = draw.choice([(), (0, 1), (0, 1, 2)])
    return ragged(
        list(zip(ends, samples, strict=True)),
        units=(plans.Unit(optimizer=split),),
        schedule=draw.choice(["1f1b", "zero_bubble", "gpipe"]),
        micro_batch=draw.choice([1, 1, 2, 3]),
        recompute=draw.choice(["none", "none", "block"]),
    )


def as_one(ranks: Sequence[Trained], one: Trained) -> None:
    assert ranks[0].losses == pytest.approx(one.losses, rel=1e-10)
    assert ranks[-1].norms == pytest.approx(one.norms, rel=1e-10)
    assert ranks[0].validation == pytest.approx(one.validation, rel=1e-10)
    same(together(ranks), one.weights, relative=1e-10)


@pytest.mark.parametrize(
    "plan",
    [
        ragged([((2, 4), 5), ((4,), 3)]),
        ragged([((2, 4), 4), ((1, 4), 2), ((4,), 2)], micro_batch=2),
        ragged([((1, 3, 4), 4), ((2, 4), 4)], schedule="zero_bubble", units=(plans.Unit(optimizer=(0, 1)),)),
        drawn(7),
    ],
)
def test_unequal_pipelines_train_as_one_rank_does(folder: Path, one_rank: Trained, plan: plans.Plan) -> None:
    as_one(train(recipe_of(folder), plan), one_rank)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_random_unequal_pipelines_train_as_one_rank_does(folder: Path, one_rank: Trained, seed: int) -> None:
    as_one(train(recipe_of(folder), drawn(seed)), one_rank)


def test_parameters_that_are_gathered_are_refused(folder: Path) -> None:
    plan = ragged([((2, 4), 4), ((4,), 4)], units=(plans.Unit(params=(0, 1), grads=(0, 1), optimizer=(0, 1)),))
    with pytest.raises(UserError, match="different layers shard optimizer states only"):
        train(recipe_of(folder), plan)


@pytest.mark.parametrize("ends", [(2, 3), (0, 4)])
def test_a_plan_that_leaves_a_layer_nowhere_is_refused(folder: Path, ends: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="its stages hold layers"):
        train(recipe_of(folder), ragged([(ends, 5), ((4,), 3)]))


def test_more_stages_than_layers_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="5 stages for 4 layers"):
        train(recipe_of(folder), ragged([((1, 2, 3, 4, 5), 4), ((4,), 4)]))


def test_stages_share_matrices_over_unequal_numbers_of_ranks(folder: Path) -> None:
    """Layers 0 and 1 over two ranks in both pipelines, 2 and 3 on one; in the second pipeline on one each."""
    ends, stages, ranks = [(2, 4), (2, 3, 4)], [], []
    for number, (pipeline, share) in enumerate(zip(ends, [(0, 5), (5, 8)], strict=True)):
        for layers in itertools.pairwise((0, *pipeline)):
            wide = 2 if layers == (0, 2) else 1
            held = tuple(range(len(ranks), len(ranks) + wide))
            stages.append(plans.Stage(pipeline=number, ranks=held, layers=layers, tensor=wide))
            ranks += [plans.Rank(share=share)] * wide
    plan = plans.Plan(ranks=tuple(ranks), stages=tuple(stages), precision="fp64", algorithm="megatron")
    recipe = recipe_of(folder, {"tied": False})
    one = train(recipe, plans.Plan(ranks=(plans.Rank(share=(0, 8)),), precision="fp64"))[0]
    found = train(recipe, plans.check(plan, 8))
    assert found[0].losses == pytest.approx(one.losses, rel=1e-10)
    assert found[-1].norms == pytest.approx(one.norms, rel=1e-10)


def test_matrices_that_pipelines_cut_differently_are_refused(folder: Path) -> None:
    plan = ragged([((2, 4), 5), ((4,), 3)])
    ranks = (*plan.ranks, plans.Rank(share=(5, 8)))
    wide = msgspec.structs.replace(plan.stages[2], ranks=(2, 3), tensor=2)
    other = msgspec.structs.replace(plan, ranks=ranks, stages=(*plan.stages[:2], wide), algorithm="megatron")
    with pytest.raises(UserError, match=r"share matrices of layer [012] over 1 and 2 ranks"):
        train(recipe_of(folder, {"tied": False}), other)


@pytest.mark.parametrize(
    "second",
    [plans.Plan(ranks=(plans.Rank(share=(0, 8)),), precision="fp64"), ragged([((4,), 3), ((1, 4), 5)])],
)
def test_a_checkpoint_is_taken_up_under_another_cut(
    folder: Path, one_rank: Trained, tmp_path: Path, second: plans.Plan
) -> None:
    first = ragged([((2, 4), 5), ((4,), 3)], units=(plans.Unit(optimizer=(0, 1)),))
    begun = train(recipe_of(folder), first, tmp_path, until=2)
    ended = train(recipe_of(folder), second, tmp_path)
    assert [*begun[0].losses, *ended[0].losses] == pytest.approx(one_rank.losses, rel=1e-10)
    same(together(ended), one_rank.weights, relative=1e-10)


LAYOUTS = {
    "one rank": plans.Plan(ranks=(plans.Rank(share=(0, 8)),), precision="fp64"),
    "equal stages": ragged([((2, 4), 4), ((2, 4), 4)]),
    "unequal": ragged([((2, 4), 5), ((4,), 3)]),
    "unequal, sharded": ragged([((3, 4), 3), ((1, 4), 5)], units=(plans.Unit(optimizer=(0, 1)),)),
}


@pytest.mark.parametrize(("first", "second"), [("unequal, sharded", "equal stages"), ("equal stages", "unequal")])
def test_a_checkpoint_of_any_layout_is_that_of_any_other_to_the_bit(
    folder: Path, tmp_path: Path, first: str, second: str
) -> None:
    """Weights after two steps, as the first layout left them and as the second takes them up."""
    begun = train(recipe_of(folder), LAYOUTS[first], tmp_path, until=2)
    taken = train(recipe_of(folder), LAYOUTS[second], tmp_path, until=2)
    found, left = together(taken), together(begun)
    assert found.keys() == left.keys()
    assert all((found[name] == value).all() for name, value in left.items())
    assert not taken[0].losses


def test_optimizer_states_go_through_any_layout_to_the_bit(folder: Path, tmp_path: Path) -> None:
    """A third step on one rank from what a layout left, and from what three others in turn took up and saved again."""
    recipe, at = recipe_of(folder), [tmp_path / str(number) for number in range(4)]
    train(recipe, LAYOUTS["unequal, sharded"], at[0], until=2)
    for number, name in enumerate(("equal stages", "unequal", "one rank")):
        train(recipe, LAYOUTS[name], at[number], until=2, into=at[number + 1])
    direct, round_about = (train(recipe, LAYOUTS["one rank"], folder)[0] for folder in (at[0], at[-1]))
    assert direct.losses == round_about.losses
    assert len(direct.losses) == 1
    assert all((round_about.weights[name] == value).all() for name, value in direct.weights.items())


def test_gradients_cross_by_the_codec_of_the_plan(folder: Path, one_rank: Trained) -> None:
    exchange = plans.Exchange(traffic="gradients", codec="bf16")
    ranks = train(recipe_of(folder, train={"precision": "fp32"}), _single(ragged([((2, 4), 5), ((4,), 3)]), exchange))
    assert ranks[0].losses == pytest.approx(one_rank.losses, rel=2e-2)


def _single(plan: plans.Plan, exchange: plans.Exchange) -> plans.Plan:
    return msgspec.structs.replace(plan, precision="fp32", exchanges=(exchange,))
