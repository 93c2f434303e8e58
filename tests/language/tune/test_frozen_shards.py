"""Frozen weights are sharded with the adapters' parameters: the same curve, and the bytes that are planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import espalier
from espalier import recipe as config
from espalier.language.tune.workload import TuneWorkload
from espalier.launch.ranks import agent
from espalier.machine import cluster as clusters
from espalier.plan.base import Plan
from espalier.train import rank_spec, trainer, worker
from espalier.train.rank_setup import RankSetup

CARD = '[[nodes]]\ndevice = "cpu"\ncores = 4\nmemory = "8GiB"\n'
STORED = ("fp32", "bf16", "int8", "int4")
STEPS = 4


def planned(workload: TuneWorkload, world: int, params: int, **pins: Any) -> Plan:
    shard = {"params": params, "grads": params, "optimizer": world}
    return espalier.make_plan(workload.recipe, clusters.loads(CARD), ranks=world, shard=shard, **pins)


def trained(workload: TuneWorkload, plan: Plan) -> list[Any]:
    """Of each rank: adapters after training, bytes by kind, and bytes that a step sends."""
    places = rank_spec.places(plan)

    def life(place: Any) -> Any:
        with worker.joined(place, 90.0) as channel:
            made = trainer.Trainer(RankSetup(workload.recipe, plan, workload, place), channel)
            made.run()
            sizes = made.built.sharding.bytes_held()
            made.built.sharding.detach()
            state = {name: value.detach().clone() for name, value in made.built.model.state_dict().items()}
            frozen = {name: p.detach() for name, p in made.built.model.named_parameters() if not p.requires_grad}
            made.built.close()
            return state, sizes, frozen

    return agent.run(life, places)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_sharded_frozen_weights_train_as_whole_ones_and_take_the_planned_bytes(
    opened: Callable[..., TuneWorkload], stored: Any, recompute: Any
) -> None:
    workload = opened(config.Lora(rank=4, frozen=stored), steps=STEPS, precision="fp32")
    (alone, _, whole), *_ = trained(workload, planned(workload, 1, 1))
    plan = planned(workload, 2, 2, recompute=recompute)
    assert plan.predicted is not None
    for state, held, frozen in trained(workload, plan):
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=2e-4, atol=2e-5)
        assert all(torch.equal(frozen[name], value) for name, value in whole.items())
        assert held["frozen"] == plan.predicted.memory_bytes["frozen"]
    assert plan.predicted.memory_bytes["frozen"] < 0.9 * sum(value.nbytes for value in whole.values())
