"""Factorisations: however ranks share matrices, sequences, layers, samples and states, they train as one rank does.

Ranks are divided into tensor x heads x context x stages x data, and states among those that hold the same parameters
(AMSP). What else a plan may say (schedule, recomputation, algorithm, placement, inner rings), key-value heads below, at
and above the ranks that share heads, odd lengths and packed documents are drawn beside. `slow` takes every
factorisation of 2, 4 and 8 ranks for 3 steps, and some of 8 for 100.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from tests.mechanisms.pipeline.runs import Trained, recipe_of, train

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.language.workload import open_language
from espalier.plan import base as plans
from espalier.recipe import Recipe
from espalier.train import table

TOLERANCE = 1e-9
HEADS = ((4, 1), (4, 2), (4, 4), (6, 2), (8, 2), (8, 8))
"""Query heads and key-value heads of a model."""


def divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


class Factors(NamedTuple):
    """Ranks along each axis, of which `window` make an inner ring, and AMSP's numbers of ranks for each state."""

    tensor: int
    heads: int
    context: int
    stages: int
    data: int
    window: int
    shard: tuple[int, int, int]

    @property
    def stage(self) -> int:
        """Ranks of one stage."""
        return self.tensor * self.heads * self.context * self.data


def factorisations(ranks: int) -> list[Factors]:
    """All of them, with every nested triple of shards."""
    found = []
    for axes in itertools.product(divisors(ranks), repeat=4):
        product = axes[0] * axes[1] * axes[2] * axes[3]
        if ranks % product:
            continue
        data = ranks // product
        alike = axes[1] * axes[2] * data
        triples = [(p, g, o) for o in divisors(alike) for g in divisors(o) for p in divisors(g)]
        found += [Factors(*axes, data, window, one) for window in divisors(axes[2]) for one in triples]
    return found


class Case(NamedTuple):
    """A factorisation and everything that is drawn beside it."""

    factors: Factors
    model: tuple[int, int]
    sequence: int
    packing: str
    tied: bool
    ends: tuple[int, ...]
    interleave: int
    schedule: str
    recompute: str
    algorithm: str
    placement: str
    micro_batch: int
    clip: bool

    def recipe(self, folder: Path, steps: int) -> Recipe:
        heads, kv_heads = self.model
        sizes = {"depth": self.ends[-1], "width": 4 * heads, "heads": heads, "kv_heads": kv_heads, "feed_forward": 24}
        rows: dict[str, Any] = {
            "steps": steps,
            "sequence": self.sequence,
            "batch_tokens": 8 * self.sequence,
            "validate_every": 1000,
        }
        rows |= {"validate_tokens": 5 * self.sequence, "clip": 0.5 if self.clip else 0.0}
        # At the rate that so small a model gets by default, AdamW makes much of the last bit in 100 steps.
        rows["optimizer"] = {"kind": "adamw", "learning_rate": 0.002}
        recipe = recipe_of(folder, {**sizes, "tied": self.tied}, rows)
        (data,) = recipe.data
        return msgspec.structs.replace(recipe, data=(msgspec.structs.replace(data, packing=self.packing),))

    def plan(self) -> plans.Plan:
        """Written by hand, as no planner would be asked."""
        one, width = self.factors, self.factors.tensor * self.factors.heads * self.factors.context
        shares = [(8 * number // one.data, 8 * (number + 1) // one.data) for number in range(one.data)]
        stages = tuple(
            plans.Stage(
                ranks=tuple(range(number % one.stages * one.stage, (number % one.stages + 1) * one.stage)),
                layers=layers,
                tensor=one.tensor,
                heads=one.heads,
                context=one.context,
                window=one.window,
            )
            for number, layers in enumerate(itertools.pairwise((0, *self.ends)))
        )
        alike = tuple(range(0, one.stage, one.tensor))
        held = {
            name: alike[:size] if size > 1 else ()
            for name, size in zip(("params", "grads", "optimizer"), one.shard, strict=True)
        }
        ranks = tuple(plans.Rank(share=share) for _ in range(one.stages) for share in shares for _ in range(width))
        how: dict[str, Any] = {"algorithm": self.algorithm, "placement": self.placement, "schedule": self.schedule}
        how |= {"interleave": self.interleave, "micro_batch": self.micro_batch, "recompute": self.recompute}
        plan = plans.Plan(ranks=ranks, units=(plans.Unit(**held),), stages=stages, precision="fp64", **how)
        return plans.check(plan, 8)


def cases(choose: Any, factors: Factors) -> Case:
    """A case of `factors`; `choose` takes one of a sequence."""
    tensor, heads = factors.tensor, factors.heads
    models = [
        one
        for one in HEADS
        if one[0] % tensor == 0 and one[0] >= tensor * heads and (one[1] % tensor == 0 or tensor % one[1] == 0)
    ]
    several = factors.stages > 1
    interleave = choose((1, 2)) if several and factors.stages < 4 else 1
    depth = max(2, factors.stages * interleave)
    ends = tuple(range(1, depth + 1)) if several else (depth,)
    if several and choose((False, True)):  # the last stage has a layer more
        ends = (*ends[:-1], depth + 1)
    pairs = factors.context % (2 * factors.window) == 0
    rounds = factors.shard[1] > 1 and 8 // factors.data
    return Case(
        factors=factors,
        model=choose(models),
        sequence=choose([one for one in (17, 23, 32, 37) if one >= 2 * tensor * heads * factors.context]),
        packing=choose(("stream", "documents")),
        tied=choose((True, False)),
        ends=ends,
        interleave=interleave,
        schedule=choose(("1f1b", "zero_bubble", "gpipe")) if several else "1f1b",
        recompute=choose(("none", "selective", "block")),
        algorithm=choose(("megatron", "fsp")) if tensor > 1 else "isp" if heads * factors.context > 1 else "data",
        placement=choose(("head_first", "context_first", *(["interleaved"] if pairs else []))),
        micro_batch=min(choose((1, 2, 3)), rounds or 3),
        clip=choose((True, False)),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents, so that a window holds several."""
    found = tmp_path_factory.mktemp("corpus")
    for number in range(150):
        (found / f"{number}.txt").write_text(f"{number} plus {number % 7} is {number + number % 7}" * (1 + number % 3))
    return found


@pytest.fixture(scope="module")
def known() -> dict[Any, Any]:
    """What runs of one rank gave, by what they depend on."""
    return {}


def trained(recipe: Recipe, plan: plans.Plan, saved: Path) -> tuple[list[Trained], dict[str, torch.Tensor]]:
    """The run of each rank, and the weights that its checkpoint holds."""
    workload = open_language(recipe)
    ranks = train(recipe, plan, saved, workload)
    model = workload.build(torch.device("cpu"), torch.float64)
    Checkpoints(saved).load({"model": model})
    return ranks, {name: value.clone() for name, value in model.state_dict().items()}


def proved(case: Case, folder: Path, saved: Path, known: dict[Any, Any], steps: int) -> bool:
    """Whether the plan can be run: then it does what one rank does; else a reason is given."""
    recipe, plan = case.recipe(folder, steps), case.plan()
    refused = table.refusal(recipe, plan)
    if refused is not None:
        assert refused.reason
        return False
    key = case.model, case.sequence, case.packing, case.tied, case.ends[-1], case.clip, steps
    if key not in known:
        alone = plans.Plan(ranks=(plans.Rank(share=(0, 8)),), micro_batch=8, precision="fp64")
        known[key] = trained(recipe, alone, saved / "one")
    (one,), wanted = known[key]
    ranks, found = trained(recipe, plan, saved / "cut")
    for rank in ranks:
        assert rank.losses == pytest.approx(one.losses, rel=TOLERANCE)
        assert rank.norms == pytest.approx(one.norms, rel=TOLERANCE)
    assert len(one.losses) == steps
    if case.factors.tensor == 1:  # each parameter is on one rank of a pipeline
        assert sum(rank.held for rank in ranks) == len(plan.ranks) // case.factors.stages * one.held
    assert ranks[0].validation == pytest.approx(one.validation, rel=TOLERANCE)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-8, atol=1e-10, msg=lambda text, n=name: n + text)
    return True


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "axis",
    ["context", "stages", *(pytest.param(one, marks=pytest.mark.slow) for one in ("tensor", "heads", "data", "shard"))],
)
def test_a_drawn_factorisation_trains_as_one_rank_does(
    folder: Path, tmp_path: Path, known: dict[Any, Any], axis: str
) -> None:
    """Of 4 ranks, among which `axis` and another one are cut."""
    cut = [one for one in factorisations(4) if getattr(one, axis) not in (1, (1, 1, 1)) and max(one[:5]) < 4]
    chosen = random.Random(axis)
    while not proved(cases(chosen.choice, chosen.choice(cut)), folder, tmp_path, known, steps=3):
        pass


PIECES = {2: 1, 4: 9, 8: 32}
"""Into how many tests the factorisations of so many ranks are divided."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "piece"), [(ranks, piece) for ranks, pieces in PIECES.items() for piece in range(pieces)]
)
def test_every_factorisation_trains_as_one_rank_does(
    folder: Path, tmp_path: Path, known: dict[Any, Any], ranks: int, piece: int
) -> None:
    """What is drawn beside a factorisation is drawn again until the plan can be run. Of 8 ranks with few passes."""
    for number, one in list(enumerate(factorisations(ranks)))[piece :: PIECES[ranks]]:
        drawn = random.Random(number)
        for _ in range(20):
            case = cases(drawn.choice, one)
            if ranks == 8:
                case = case._replace(micro_batch=min(4, 8 // one.data))
            if proved(case, folder, tmp_path / str(number), known, steps=3):
                break
        else:
            pytest.fail(f"no plan of {one} can be run")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(8))
def test_100_steps_of_8_ranks_are_those_of_one(folder: Path, tmp_path: Path, known: dict[Any, Any], seed: int) -> None:
    """Axes are drawn first, as most factorisations differ in their shards only. Passes are few, to save time."""
    chosen, every = random.Random(seed), factorisations(8)
    while True:
        axes = chosen.choice(sorted({one[:5] for one in every}))
        case = cases(chosen.choice, chosen.choice([one for one in every if one[:5] == axes]))
        if proved(case._replace(micro_batch=min(4, 8 // case.factors.data)), folder, tmp_path, known, steps=100):
            return


def test_whatever_compose_refuses_has_a_reason_and_a_choice(folder: Path) -> None:
    """Of every factorisation of 2, 4 and 8 ranks; only gathered parameters refuse zero bubble."""
    seen = set()
    recipe = None
    for number, one in enumerate(factorisations(2) + factorisations(4) + factorisations(8)[::5]):
        case = cases(random.Random(number).choice, one)
        recipe = recipe or case.recipe(folder, 3)
        refused = table.refusal(recipe, case.plan())
        gathers = case.schedule == "zero_bubble" and one.shard[0] > 1
        assert (refused is not None) == gathers, (case, refused)
        seen.add(gathers)
        if refused is not None:
            assert set(refused.pair) in ({"amsp", "zero_bubble"}, {"amsp_split", "zero_bubble"})
            assert refused.reason
            assert refused.instead
    assert seen == {True, False}
