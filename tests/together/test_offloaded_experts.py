"""Experts over ranks whose parameters wait in host memory or on disk: the curve is that of the run in memory."""

import pytest
import torch
from tests.together.test_offload import ON_HOST, PARAMETERS, alike, plan_of, recipe_of, same, train

from espalier.mechanisms.expert_parallel.state import ExpertParallelState
from espalier.plan import base as plans

MODEL = {"kind": "moe", "experts": 4, "active": 2, "depth": 3, "width": 32, "heads": 4, "feed_forward": 32}
SPREAD = {2: ((0, 2, 3), (1,)), 4: ((0,), (1,), (2,), (3,))}


def plan(offload, ranks, ep):
    spread = {"expert_parallel": ExpertParallelState(experts=SPREAD[ep])} if ep > 1 else {}
    return plan_of(offload, ranks, micro_batch=2, choices=spread)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("away", "ranks", "ep", "model"),
    [
        (ON_HOST, 2, 2, {}),
        (plans.Offload(optimizer="disk", parameters="disk", activations="disk"), 2, 2, {}),
        (PARAMETERS, 4, 2, {"shared": 16, "balancing": "bias"}),
        *(
            pytest.param(*case, {"tied": tied, "shared": 8}, marks=pytest.mark.slow)
            for case in ((PARAMETERS, 2, 2), (ON_HOST, 4, 2), (ON_HOST, 4, 4))
            for tied in (True, False)
        ),
    ],
)
def test_experts_that_wait_elsewhere_follow_the_curve_of_those_in_memory(corpus, away, ranks, ep, model):
    """In three samples of validation some ranks have none, but hold experts that the others' tokens go to."""
    recipe = recipe_of(corpus, model=MODEL | model, validate_every=2, validate_tokens=96)
    made = [train(recipe, plan(way, ranks, ep)) for way in (away, plans.Offload())]
    alike(*made)
    tier = away.parameters
    assert all(fields["offload"][tier]["read"] > 0 for fields in made[0][2])


def test_experts_that_wait_are_saved_and_taken_up_on_other_ranks(corpus, tmp_path):
    recipe = recipe_of(corpus, model=MODEL)
    whole = train(recipe, plan(plans.Offload(), 2, 2))
    for number, (first, second) in enumerate(
        (((ON_HOST, 2, 2), (plans.Offload(), 2, 2)), ((plans.Offload(), 2, 1), (PARAMETERS, 2, 2)))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        before = train(recipe, plan(*first), folder, stop_after=3)
        after = train(recipe, plan(*second), folder)
        assert [*before[0], *after[0]] == pytest.approx(whole[0], rel=1e-6)
        for name in whole[1]:
            torch.testing.assert_close(after[1][name], whole[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("away", "recompute"),
    [
        (plans.Offload(optimizer="disk", activations="disk"), "block"),
        pytest.param(plans.Offload(optimizer="disk"), "none", marks=pytest.mark.slow),
    ],
)
def test_optimizer_states_and_activations_of_experts_wait_without_changing_a_bit(corpus, away, recompute):
    recipe = recipe_of(corpus, model=MODEL)
    same(*(train(recipe, plan(way, 2, 2).changed(recompute=recompute)) for way in (away, plans.Offload())))
