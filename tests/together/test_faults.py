"""A killed rank among whatever else a run may be made of: shards, cut sequences, matrices, layers. No bit changes."""

from __future__ import annotations

import pytest
from struck import Struck, plan_of, recipe_of, same, write_corpus

from espalier.launch.testing.faults import Fault
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.mechanisms.sequence_parallel.ring import RingRanks
from espalier.mechanisms.tensor_parallel.stream import Stream
from espalier.parallel.stage_messages import StageMessages
from espalier.plan import base as plans

STEPS, STRUCK = 9, 7
OF_ROUNDS = 14, 11  # a step of their second round, whose begin is saved


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("faults") / "corpus")


def rounds(recipe, method):
    outer = LocalRoundsState(replicas=((0,), (1,)), method=method, steps=4, adapt=False)
    return plans.Plan(ranks=plan_of(recipe, 2).ranks, micro_batch=8, choices={"local_rounds": outer})


def shards(recipe, ranks):
    whole = tuple(range(ranks))
    unit = plans.Unit(params=whole, grads=whole, optimizer=whole, whole=True)
    return plans.Plan(ranks=plan_of(recipe, ranks).ranks, units=(unit,), micro_batch=2)


def ring(recipe):
    """Both ranks hold half of every sequence."""
    each = (plan_of(recipe, 1).ranks[0],) * 2
    stage = plans.Stage(ranks=(0, 1), layers=(0, recipe.model.depth), context=2)
    return plans.Plan(ranks=each, stages=(stage,), micro_batch=2)


def matrices(recipe, algorithm):
    whole = plan_of(recipe, 1).ranks[0].share
    stage = plans.Stage(ranks=(0, 1), layers=(0, recipe.model.depth), tensor=2)
    return plans.Plan(ranks=(plans.Rank(share=whole),) * 2, stages=(stage,), micro_batch=4, algorithm=algorithm)


def stages(recipe, schedule):
    """Each rank holds half of the layers."""
    each, depth = (plan_of(recipe, 1).ranks[0],) * 2, recipe.model.depth
    halves = ((0, depth // 2), (depth // 2, depth))
    cut = tuple(plans.Stage(ranks=(rank,), layers=layers) for rank, layers in enumerate(halves))
    return plans.Plan(ranks=each, stages=cut, micro_batch=2, schedule=schedule)


INSIDE = {
    "ring": (RingRanks, "exchange"),  # a ring step
    "pipeline": (StageMessages, "receive"),  # the bubble: the last stage waits for its first input
    "tensor_parallel": (Stream, "fold"),  # forward: the products of all ranks are to be summed
}
"""Where a rank dies, if not before its forward pass."""
PLANS = {
    "ring": ring,
    "co2": lambda recipe: rounds(recipe, "co2"),
    "streaming_diloco": lambda recipe: rounds(recipe, "streaming_diloco"),
    "shards": lambda recipe: shards(recipe, 2),
    "pipeline": lambda recipe: stages(recipe, "zero_bubble"),
    "tensor_parallel": lambda recipe: matrices(recipe, "fsp"),
}


FROM_DISK = {"ring", "streaming_diloco", "pipeline"}
"""Of these, those whose kill the normal suite takes up from disk; from memory the others. The rest is slow."""
CASES = [
    pytest.param(kind, memory, marks=() if (memory == 0) == (kind in FROM_DISK) else pytest.mark.slow)
    for kind in PLANS
    for memory in (0, 1 << 26)
]


@pytest.mark.parametrize(("kind", "memory"), CASES)
def test_a_killed_rank_changes_no_bit(corpus, tmp_path, kind, memory):
    steps, struck = OF_ROUNDS if kind in ("co2", "streaming_diloco") else (STEPS, STRUCK)
    tables = {"train": {"steps": steps, "optimizer": {"kind": "adamw"}}, "model": {"depth": 1 + (kind == "pipeline")}}
    recipe = recipe_of(corpus, checkpoint={"every": 100 if memory else 4}, **tables)
    plan = PLANS[kind](recipe)
    whole = Struck(recipe, 2, tmp_path / "whole", plan=plan).run()
    fault = Fault(1, struck, "kill")
    run = Struck(recipe, 2, tmp_path / "run", (fault,), memory=memory, plan=plan, inside=INSIDE.get(kind)).run()
    assert same(run, whole)
    (recovered,) = run.all("recovered")
    assert recovered["step"] > 0
    assert recovered["source"] == ("memory" if memory else "disk")
