"""Experts over ranks among what else a run may be made of: stages, recomputation, a kill amid a dispatch, rounds."""

from __future__ import annotations

import msgspec
import pytest
import torch
from struck import Struck, plan_of, recipe_of, same, write_corpus

from espalier.language.workload import open_language
from espalier.launch.ranks import agent
from espalier.mechanisms.expert_parallel.flashmoe.layer import FlashMoeCall
from espalier.mechanisms.expert_parallel.state import ExpertParallelState
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.plan import base as plans
from espalier.train import rank_spec as launch
from espalier.train import trainer, worker
from espalier.train.rank_setup import RankSetup
from many_ranks.faults import Fault

MODEL = {"kind": "moe", "experts": 3, "active": 2, "depth": 2}
HELD = ((0, 2), (1,))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("experts") / "corpus")


def recipe(corpus, steps, **more):
    tables = {"train": {"steps": steps, "optimizer": {"kind": "adamw"}}, "model": MODEL}
    return recipe_of(corpus, **tables, **more)


def staged(asked):
    """Two stages of two ranks each, which share the experts of their layer and shard all other states; blocks are
    recomputed."""
    halves = plan_of(asked, 2).ranks
    stages = tuple(plans.Stage(ranks=(2 * one, 2 * one + 1), layers=(one, one + 1)) for one in range(2))
    return plans.Plan(
        ranks=halves * 2,
        stages=stages,
        units=(plans.Unit(params=(0, 1), grads=(0, 1), optimizer=(0, 1)),),
        choices={"expert_parallel": ExpertParallelState(experts=HELD)},
        micro_batch=2,
        recompute="block",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("struck", "memory"), [pytest.param(1, 0, marks=pytest.mark.slow), pytest.param(2, 1 << 26)], ids=["disk", "memory"]
)
def test_a_rank_lost_amid_a_dispatch_changes_no_bit(corpus, tmp_path, struck, memory):
    """Its first answers are on their way, and tokens of the others' have come: stages x recomputation x kill."""
    asked = recipe(corpus, 7, checkpoint={"every": 100 if memory else 4})
    plan = staged(asked)
    whole = Struck(asked, 4, tmp_path / "whole", plan=plan).run()
    faults = (Fault(struck, 6, "kill"),)
    run = Struck(asked, 4, tmp_path / "run", faults, memory=memory, plan=plan, inside=(FlashMoeCall, "_answer")).run()
    assert same(run, whole)
    (recovered,) = run.all("recovered")
    assert recovered["source"] == ("memory" if memory else "disk")


@pytest.mark.slow
def test_stages_recomputation_rounds_and_a_kill_amid_a_dispatch_change_no_bit(corpus, tmp_path):
    """Two replicas of two stages of two ranks that share experts: one rank is lost in the second round."""
    asked = recipe(corpus, 8, checkpoint={"every": 100})
    one = staged(asked)
    shares = [(0, 2), (2, 4)] * 2 + [(4, 6), (6, 8)] * 2
    outer = LocalRoundsState(replicas=((0, 1, 2, 3), (4, 5, 6, 7)), method="co2", steps=4, adapt=False)
    ranks = tuple(plans.Rank(share=share) for share in shares)
    plan = msgspec.structs.replace(one, ranks=ranks, choices={**one.choices, "local_rounds": outer})
    whole = Struck(asked, 8, tmp_path / "whole", plan=plan).run()
    faults = (Fault(5, 6, "kill"),)
    run = Struck(asked, 8, tmp_path / "run", faults, memory=1 << 26, plan=plan, inside=(FlashMoeCall, "_answer")).run()
    assert same(run, whole)
    assert len(run.all("recovered")) == 1


def trained(asked, plan):
    """The common model of the replicas."""
    workload = open_language(asked)

    def life(place):
        with worker.joined(place, 90.0) as channel:
            one = trainer.Trainer(RankSetup(asked, plan, workload, place, None, lambda *_, **__: None), channel)
            one.run(None)
            one.built.sharding.summon()
            return {name: value.clone() for name, value in one.built.model.state_dict().items()}

    return agent.run(life, launch.places(plan))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["co2", "diloco"])
def test_replicas_with_experts_over_ranks_are_replicas_of_one_rank(corpus, method):
    asked = recipe(corpus, 6)
    asked = msgspec.structs.replace(asked, train=msgspec.structs.replace(asked.train, precision="fp64"))

    def rounds(ranks, experts):
        half = ranks // 2
        outer = LocalRoundsState(
            replicas=(tuple(range(half)), tuple(range(half, ranks))), method=method, steps=3, adapt=False
        )
        of = plan_of(asked, ranks).ranks
        shard = tuple(range(half)) if half > 1 else ()
        units = (plans.Unit(params=shard, grads=shard, optimizer=shard),)
        return plans.Plan(
            ranks=of,
            units=units,
            micro_batch=2,
            precision="fp64",
            choices={"local_rounds": outer, "expert_parallel": ExpertParallelState(experts=experts)},
        )

    whole = trained(asked, rounds(2, ()))[0]
    found = trained(asked, rounds(4, HELD))
    assert {name for one in found for name in one} == set(whole)
    for one in found:
        for name, value in one.items():
            torch.testing.assert_close(value, whole[name], rtol=1e-6, atol=1e-6)
