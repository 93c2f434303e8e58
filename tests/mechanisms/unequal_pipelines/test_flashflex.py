"""Pipelines of different depth side by side train as one rank does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from tests.mechanisms.pipeline.runs import Trained, corpus, recipe_of, together, train

from espalier.plan import base as plans
from espalier.recipe.errors import UserError
from many_ranks import same


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


@pytest.mark.sampled(1)
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
    with pytest.raises(UserError, match="different layers, and waves of tasks, shard optimizer states only"):
        train(recipe_of(folder), plan)


@pytest.mark.parametrize("ends", [(2, 3), (0, 4)])
def test_a_plan_that_leaves_a_layer_nowhere_is_refused(folder: Path, ends: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="its stages hold layers"):
        train(recipe_of(folder), ragged([(ends, 5), ((4,), 3)]))


def test_more_stages_than_layers_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="5 stages for 4 layers"):
        train(recipe_of(folder), ragged([((1, 2, 3, 4, 5), 4), ((4,), 4)]))


# --- tensor degrees ---

WIDE = {"tied": False, "heads": 4}


@pytest.fixture(scope="module")
def one_wide(folder: Path) -> Trained:
    return train(recipe_of(folder, WIDE), plans.Plan(ranks=(plans.Rank(share=(0, 8)),), precision="fp64"))[0]


def degrees(pipelines: Sequence[tuple[Sequence[tuple[int, int]], int]], **fields: object) -> plans.Plan:
    """A plan of ((layer at which each stage ends, ranks to a matrix), samples) for each pipeline."""
    ranks: list[plans.Rank] = []
    stages, at = [], 0
    for number, (pipeline, samples) in enumerate(pipelines):
        first = 0
        for end, wide in pipeline:
            held = tuple(range(len(ranks), len(ranks) + wide))
            stages.append(plans.Stage(pipeline=number, ranks=held, layers=(first, end), tensor=wide))
            ranks += [plans.Rank(share=(at, at + samples))] * wide
            first = end
        at += samples
    plan = plans.Plan(ranks=tuple(ranks), stages=tuple(stages), precision="fp64", algorithm="megatron")
    return plans.check(msgspec.structs.replace(plan, **fields), at)


def of_degrees(seed: int) -> plans.Plan:
    """A random plan of at most 6 ranks, some of which share matrices."""
    draw = random.Random(seed)
    while True:
        pipelines = []
        for _ in range(draw.randint(2, 3)):
            ends = (*sorted(draw.sample(range(1, 4), draw.randint(0, 2))), 4)
            pipelines.append([(end, draw.choice([1, 1, 2, 4])) for end in ends])
        if 3 <= sum(wide for one in pipelines for _, wide in one) <= 6:
            break
    cuts = sorted(draw.sample(range(1, 8), len(pipelines) - 1))
    samples = [b - a for a, b in itertools.pairwise([0, *cuts, 8])]
    split = draw.choice([(), (0, 1)])
    return degrees(list(zip(pipelines, samples, strict=True)), units=(plans.Unit(optimizer=split),))


NOTE = degrees([([(3, 2), (4, 1)], 5), ([(4, 1)], 3)])
"""[[2, 1], [1]] with layers [[3, 1], [4]]: layers 0 to 2 over two ranks in one pipeline, on one in the other."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        NOTE,
        degrees([([(2, 2), (4, 1)], 5), ([(2, 2), (3, 1), (4, 1)], 3)]),  # each layer alike in both
        degrees([([(4, 1)], 2), ([(1, 1), (4, 4)], 6)], units=(plans.Unit(optimizer=(0, 1)),)),
        degrees([([(4, 1)], 3), ([(4, 2)], 5)]),  # one stage each
        degrees([([(2, 1), (4, 1)], 3), ([(4, 2)], 5)]),  # all of a pipeline's ranks share matrices
    ],
)
def test_pipelines_cut_matrices_over_unequal_numbers_of_ranks(
    folder: Path, one_wide: Trained, plan: plans.Plan
) -> None:
    as_one_rank(train(recipe_of(folder, WIDE), plan), one_wide)


@pytest.mark.extremes
@pytest.mark.parametrize(
    "plan",
    [
        degrees([([(3, 2), (4, 1)], 5), ([(4, 1)], 3)], units=(plans.Unit(optimizer=(0, 1), whole=True),)),
        pytest.param(degrees([([(2, 2), (4, 1)], 5), ([(2, 2), (4, 1)], 3)]), marks=pytest.mark.slow),
    ],
)
def test_muon_moves_whole_matrices_where_pipelines_cut_them_unlike(folder: Path, plan: plans.Plan) -> None:
    recipe = recipe_of(folder, WIDE, {"optimizer": {"kind": "muon"}})
    one = train(recipe, plans.Plan(ranks=(plans.Rank(share=(0, 8)),), precision="fp64"))[0]
    as_one_rank(train(recipe, plan), one)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_tensor_degrees_train_as_one_rank_does(folder: Path, one_wide: Trained, seed: int) -> None:
    as_one_rank(train(recipe_of(folder, WIDE), of_degrees(seed)), one_wide)


def as_one_rank(ranks: Sequence[Trained], one: Trained) -> None:
    """Weights are compared where a rank has all of them."""
    assert ranks[0].losses == pytest.approx(one.losses, rel=1e-10)
    assert ranks[-1].norms == pytest.approx(one.norms, rel=1e-10)
    found = [(name, value) for rank in ranks for name, value in rank.weights.items()]
    whole = [(name, value) for name, value in found if value.shape == one.weights[name].shape]
    assert whole
    for name, value in whole:
        assert (value - one.weights[name]).abs().max() <= 1e-10 * one.weights[name].abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-10), pytest.param("fp32", 1e-5, marks=pytest.mark.slow)])
def test_ten_steps_in_either_precision_are_those_of_one_rank(folder: Path, precision: str, bound: float) -> None:
    recipe = recipe_of(folder, WIDE, {"steps": 10, "precision": precision, "validate_every": 100})
    plan = msgspec.structs.replace(NOTE, precision=precision)
    one = train(recipe, plans.Plan(ranks=(plans.Rank(share=(0, 8)),), precision=precision))[0]
    found = train(recipe, plan)
    assert found[0].losses == pytest.approx(one.losses, rel=bound)
    assert len(one.losses) == 10
    largest = max(float(value.abs().max()) for value in one.weights.values())
    for name, value in found[3].weights.items():  # the second pipeline has all of each
        assert float((value - one.weights[name]).abs().max()) <= bound * largest, name


@pytest.mark.slow
def test_a_checkpoint_goes_from_one_tensor_degree_to_another(folder: Path, one_wide: Trained, tmp_path: Path) -> None:
    recipe = recipe_of(folder, WIDE)
    turned = degrees([([(4, 1)], 3), ([(1, 1), (4, 4)], 5)])
    begun = train(recipe, NOTE, tmp_path, until=1)
    middle = train(recipe, turned, tmp_path, until=2)
    ended = train(recipe, plans.Plan(ranks=(plans.Rank(share=(0, 8)),), precision="fp64"), tmp_path)
    losses = [*begun[0].losses, *middle[0].losses, *ended[0].losses]
    assert losses == pytest.approx(one_wide.losses, rel=1e-10)
    as_one_rank(ended, one_wide._replace(losses=one_wide.losses[2:], norms=one_wide.norms[2:]))


def test_unlike_degrees_beside_shared_sequences_are_refused(folder: Path) -> None:
    two = [plans.Stage(pipeline=n, ranks=(2 * n, 2 * n + 1), layers=(0, 4)) for n in (0, 1)]
    stages = (
        msgspec.structs.replace(two[0], layers=(0, 2), context=2),
        plans.Stage(pipeline=0, ranks=(2, 3), layers=(2, 4), context=2),
        plans.Stage(pipeline=1, ranks=(4, 5, 6, 7), layers=(0, 4), context=2, tensor=2),
    )
    ranks = tuple(plans.Rank(share=(0, 5) if rank < 4 else (5, 8)) for rank in range(8))
    plan = plans.Plan(ranks=ranks, stages=stages, precision="fp64", algorithm="megatron")
    with pytest.raises(UserError, match="over unlike numbers of ranks, and sequences too"):
        train(recipe_of(folder, WIDE), plan)


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(1)
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


@pytest.mark.slow
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
