"""Training in fp16 with a scaled loss, beside the mechanisms that it runs with: the curve of fp32 within a tolerance,
and steps whose gradients overflow are left out on all ranks alike."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.language.workload import open_language
from espalier.launch.ranks import agent
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.optim import loss_scale
from espalier.plan import base as plans
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import Anomaly, Interrupted
from espalier.train import rank_spec as launch
from espalier.train import table, trainer, worker
from espalier.train.rank_setup import RankSetup

STEPS, SAMPLES = 6, 8
TOLERANCE = 5e-3
"""Of each step's loss against fp32's: products of fp16 have 11 bits of mantissa."""
TOO_LARGE = 2.0**30
"""A factor with which gradients of these models overflow fp16: some halvings later they do not."""


def recipe_of(corpus, steps=STEPS, **train):
    table = {
        "model": {"depth": 2, "width": 32, "heads": 4, "feed_forward": 64},
        "data": {"path": str(corpus), "cache": str(corpus.parent / "cache"), "validation": 0.2},
        "train": {"steps": steps, "sequence": 32, "batch_tokens": 32 * SAMPLES, "validate_tokens": 256}
        | {"optimizer": {"kind": "adamw"}}
        | train,
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


def plan_of(ranks=1, shard=(), sequence=(1, 1), tensor=1, stages=1, precision="fp16", **how):
    cuts = [SAMPLES * one // ranks for one in range(ranks + 1)]
    heads, context = sequence
    shares = [plans.Rank(share=share) for share in itertools.pairwise(cuts) for _ in range(heads * context * tensor)]
    held = tuple(
        plans.Stage(
            ranks=tuple(range(at * len(shares), (at + 1) * len(shares))),
            layers=layers,
            heads=heads,
            context=context,
            tensor=tensor,
        )
        for at, layers in enumerate(itertools.pairwise(range(0, 3, 2 // stages)))
    )
    groups = [tuple(range(size)) if size > 1 else () for size in shard]
    unit = plans.Unit(**dict(zip(("params", "grads", "optimizer"), groups, strict=False)), whole=True)
    how = {"micro_batch": 4, **how}
    return plans.Plan(ranks=(*shares,) * stages, units=(unit,), stages=held, precision=precision, **how)


class Trained(NamedTuple):
    """What a rank showed, by step: its losses, the factor after each, and how many were left out so far."""

    losses: list[float]
    factors: list[float]
    skipped: list[int]
    weights: dict[str, torch.Tensor]


def train(recipe, plan, folder=None, stop_after=None, workload=None):
    workload = workload or open_language(recipe)

    def life(place):
        steps = []

        def emit(event, **fields):
            if event == "step":
                steps.append(fields)

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
            weights = {name: value.clone() for name, value in one.built.model.state_dict().items()}
            scales = [[step.get(name) for step in steps] for name in ("loss_scale", "skipped")]
            return [step["loss"] for step in steps], *scales, weights

    return [Trained(*one) for one in agent.run(life, launch.places(plan))]


WAYS = {
    "one rank": {},
    "two ranks": {"ranks": 2},
    "optimizer states in shards": {"ranks": 2, "shard": (1, 1, 2)},
    "all states in shards": {"ranks": 2, "shard": (2, 2, 2)},
    "matrices over 2": {"tensor": 2, "algorithm": "fsp"},
    "two stages": {"stages": 2},
    "two stages, backward in two parts": {"stages": 2, "schedule": "zero_bubble"},
    "heads of 2": {"sequence": (2, 1)},
    "context of 2": {"sequence": (1, 2)},
    "recompute block": {"recompute": "block"},
    "two ranks, accumulation": {"ranks": 2, "micro_batch": 1},
}


@pytest.fixture(scope="module")
def exact(corpus):
    return train(recipe_of(corpus), plan_of(precision="fp32"))[0]


@pytest.mark.extremes
@pytest.mark.parametrize(
    "way", [pytest.param(one, marks=pytest.mark.slow if number % 3 else ()) for number, one in enumerate(WAYS)]
)
def test_the_curve_is_that_of_fp32(corpus, exact, way):
    ranks = train(recipe_of(corpus), plan_of(**WAYS[way]))
    assert ranks[0].losses == pytest.approx(exact.losses, rel=TOLERANCE)
    assert ranks[0].losses != exact.losses
    assert {one.skipped[-1] for one in ranks} == {0}


def test_muon_takes_gradients_of_fp16(corpus):
    recipe = recipe_of(corpus, optimizer={"kind": "muon"})
    plain, half = (train(recipe, plan_of(precision=name))[0] for name in ("fp32", "fp16"))
    assert half.losses == pytest.approx(plain.losses, rel=TOLERANCE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "way",
    [
        "all states in shards",
        "two stages",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("one rank", "two ranks", "matrices over 2")),
    ],
)
def test_steps_that_overflow_are_left_out_on_all_ranks_alike(corpus, monkeypatch, way):
    """Each halves the factor; then the model learns as fp32's does."""
    monkeypatch.setattr(loss_scale, "START", TOO_LARGE)
    ranks = train(recipe_of(corpus, steps=20), plan_of(**WAYS[way]))
    assert len({(tuple(one.factors), tuple(one.skipped)) for one in ranks}) == 1
    one = ranks[0]
    left_out = one.skipped[-1]
    assert 3 <= left_out < 18
    assert one.factors[-1] == TOO_LARGE / 2**left_out
    assert all(math.isfinite(loss) for loss in one.losses)
    assert all(bool(value.isfinite().all()) for value in one.weights.values())
    assert one.losses[-1] < one.losses[0]


def test_one_rank_that_overflows_leaves_the_step_out_on_both(corpus):
    """Its own samples have a gradient that is not a number, in one backward pass."""
    recipe = recipe_of(corpus)
    workload = Overflowing(open_language(recipe), step=2, sample=5)
    plain = train(recipe, plan_of(2))
    first, second = train(recipe, plan_of(2), workload=workload)
    assert first.skipped == second.skipped == [0, 0, 1, 1, 1, 1]
    assert first.factors == second.factors
    assert first.losses[:3] == plain[0].losses[:3]
    assert plain[0].losses[3] < first.losses[3] < plain[0].losses[2]  # it has learnt one step less
    for name, value in first.weights.items():
        torch.testing.assert_close(second.weights[name], value, rtol=0, atol=0)


class Overflowing:
    """A workload whose gradient, not its loss, overflows in one step for the rank that has one sample."""

    def __init__(self, inner, step, sample):
        self.inner, self.step, self.sample = inner, step, sample

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def batches(self, step, shard):
        bad = step == self.step and shard.start <= self.sample < shard.stop
        return [(batch, bad) for batch in self.inner.batches(step, shard)]

    def loss(self, model, batch):
        value, weight = self.inner.loss(model, batch[0])
        if batch[1]:
            value.register_hook(lambda gradient: gradient * math.inf)
        return value, weight


def test_what_no_factor_mends_ends_the_run(corpus, monkeypatch):
    recipe = recipe_of(corpus)
    monkeypatch.setattr(loss_scale, "START", loss_scale.LEAST)
    with pytest.raises(Anomaly, match="gradient is not finite in step 3 on rank 0"):
        train(recipe, plan_of(), workload=Overflowing(open_language(recipe), step=2, sample=5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["all states in shards", *(pytest.param(one, marks=pytest.mark.slow) for one in ("one rank", "two stages"))]
)
def test_a_resumed_run_is_the_unbroken_one(corpus, tmp_path, monkeypatch, way):
    """Also in the middle of a series of overflows: the factor comes back with the rest."""
    monkeypatch.setattr(loss_scale, "START", TOO_LARGE)
    recipe, plan = recipe_of(corpus, steps=16), plan_of(**WAYS[way])
    whole = train(recipe, plan)[0]
    train(recipe, plan, tmp_path, stop_after=3)
    rest = train(recipe, plan, tmp_path)[0]
    assert rest.losses == whole.losses[3:]
    assert (rest.factors, rest.skipped) == (whole.factors[3:], whole.skipped[3:])
    for name, value in whole.weights.items():
        assert torch.equal(rest.weights[name], value), name


def test_two_runs_of_one_seed_are_equal_bit_by_bit(corpus):
    first, second = (train(recipe_of(corpus), plan_of(2))[0] for _ in range(2))
    assert first.losses == second.losses
    assert all(torch.equal(second.weights[name], value) for name, value in first.weights.items())


def test_replicas_that_agree_by_rounds_have_a_factor_each(corpus, tmp_path):
    recipe = recipe_of(corpus, steps=8)
    outer = LocalRoundsState(replicas=((0,), (1,)), method="co2", steps=2, adapt=False)
    workload = Overflowing(open_language(recipe), step=1, sample=5)
    plain = train(recipe, plan_of(2, precision="fp32", choices={"local_rounds": outer}))
    first, second = train(recipe, plan_of(2, choices={"local_rounds": outer}), workload=workload)
    assert (first.skipped[-1], second.skipped[-1]) == (0, 1)
    assert first.losses == pytest.approx(plain[0].losses, rel=0.1)  # one of its replicas has taken one step less
    train(recipe, plan_of(2, choices={"local_rounds": outer}), tmp_path, stop_after=4, workload=workload)
    again = train(recipe, plan_of(2, choices={"local_rounds": outer}), tmp_path)
    assert [one.skipped[-1] for one in again] == [0, 1]
    assert again[1].losses == second.losses[4:]


def test_codecs_and_loops_of_others_are_refused_by_name(corpus):
    recipe = recipe_of(corpus)
    encoded = plan_of(2, exchanges=(plans.Exchange(traffic="gradients", codec="int8"),))
    refused = table.refusal(recipe, encoded)
    assert refused is not None
    assert set(refused.pair) == {"fp16", "codecs"}
    assert "bf16" in refused.instead
    alone = table.refusal(recipe, plan_of(2), table.APPLIED)
    assert alone is not None
    assert "the loss is scaled" in alone.reason


def test_the_factor_grows_after_many_steps_without_overflow():
    scale = loss_scale.LossScale()
    for _ in range(loss_scale.INTERVAL):
        assert not scale.after(True)
    assert scale.factor == 2 * loss_scale.START
    assert scale.after(False)
    assert (scale.factor, scale.skipped) == (loss_scale.START, 1)
    taken = loss_scale.LossScale()
    taken.load_state_dict(scale.state_dict())
    assert taken.state_dict() == scale.state_dict()
