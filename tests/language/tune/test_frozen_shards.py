"""Frozen weights are sharded with the adapters' parameters: the same curve, and the bytes that are planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plan.test_planned_peak import MostTensorBytes

import espalier
from espalier import recipe as config
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.language.tune.workload import TuneWorkload
from espalier.launch.ranks import agent
from espalier.machine import cluster as clusters
from espalier.plan.axes import offload
from espalier.plan.base import Offload, Plan
from espalier.recipe.errors import Interrupted
from espalier.train import rank_spec, trainer, worker
from espalier.train.rank_setup import RankSetup

CARD = '[[nodes]]\ndevice = "cpu"\ncores = 4\nmemory = "8GiB"\n'
STORED = ("fp32", "bf16", "int8", "int4")
STEPS = 4


def planned(workload: TuneWorkload, world: int, params: int, **pins: Any) -> Plan:
    shard = {"params": params, "grads": params, "optimizer": world}
    return espalier.make_plan(workload.recipe, clusters.loads(CARD), ranks=world, shard=shard, **pins)


def trained(workload: TuneWorkload, plan: Plan, folder: Path | None = None, **setup: Any) -> list[Any]:
    """Of each rank: adapters after training, bytes by kind, frozen weights, and events of steps."""
    places = rank_spec.places(plan)

    def life(place: Any) -> Any:
        steps: list[Any] = []

        def emit(event: str, **fields: Any) -> None:
            steps.extend([fields] * (event == "step"))

        with worker.joined(place, 90.0) as channel:
            made = trainer.Trainer(RankSetup(workload.recipe, plan, workload, place, folder, emit, **setup), channel)
            saved = None
            if folder is not None:
                saved = Checkpoints(folder / "checkpoints", keep=2, group=worker.saving_group(channel))
                made.restore(saved)
            try:
                made.run(saved)
            finally:
                if saved is not None:
                    saved.wait()
            sizes = made.built.sharding.bytes_held()
            made.built.sharding.detach()
            state = {name: value.detach().clone() for name, value in made.built.model.state_dict().items()}
            frozen = {name: p.detach() for name, p in made.built.model.named_parameters() if not p.requires_grad}
            made.built.close()
            return state, sizes, frozen, steps

    return agent.run(life, places)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_sharded_frozen_weights_train_as_whole_ones_and_take_the_planned_bytes(
    opened: Callable[..., TuneWorkload], stored: Any, recompute: Any
) -> None:
    workload = opened(config.Lora(rank=4, frozen=stored), steps=STEPS, precision="fp32")
    (alone, _, whole, _), *_ = trained(workload, planned(workload, 1, 1))
    plan = planned(workload, 2, 2, recompute=recompute)
    assert plan.predicted is not None
    for state, held, frozen, _ in trained(workload, plan):
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=2e-4, atol=2e-5)
        assert all(torch.equal(frozen[name], value) for name, value in whole.items())
        assert held["frozen"] == plan.predicted.memory_bytes["frozen"]
    assert plan.predicted.memory_bytes["frozen"] < 0.9 * sum(value.nbytes for value in whole.values())


def allocated(workload: TuneWorkload, plan: Plan) -> int:
    """Bytes of tensors at the worst moment."""

    def life(place: Any) -> int:
        with worker.joined(place, 90.0) as channel, MostTensorBytes() as counted:
            made = trainer.Trainer(RankSetup(workload.recipe, plan, workload, place), channel)
            made.run()
            made.built.close()
            return counted.most

    return max(agent.run(life, rank_spec.places(plan)))


HOST = Offload(frozen="host")
AWAY = [(1, 1, "none"), (2, 2, "block"), (1, 1, "block"), (2, 1, "block"), (2, 2, "selective")]
"""Ranks, ranks that share the parameters, and what is computed again."""


@pytest.mark.extremes
@pytest.mark.parametrize(
    ("stored", "world", "params", "recompute"),
    [
        pytest.param(stored, *case, marks=pytest.mark.slow if (stored != "int4") == (number < 2) else ())
        for number, case in enumerate(AWAY)
        for stored in STORED
        if number < 2 or stored == "fp32"
    ],
)
def test_frozen_weights_in_host_memory_change_no_bit_and_take_the_planned_bytes(
    opened: Callable[..., TuneWorkload],
    monkeypatch: pytest.MonkeyPatch,
    stored: Any,
    world: int,
    params: int,
    recompute: Any,
) -> None:
    workload = opened(config.Lora(rank=4, frozen=stored), steps=STEPS, precision="fp32")
    expected = trained(workload, planned(workload, world, params, recompute=recompute))
    monkeypatch.setattr(offload, "ways", lambda *_: [HOST])
    plan = planned(workload, world, params, recompute=recompute, offload="host")
    assert plan.offload == HOST
    assert plan.predicted is not None
    waiting, depth = plan.predicted.waiting_bytes["frozen"], workload.recipe.model.depth  # type: ignore[union-attr]
    rounds = max(-(-(stop - start) // plan.micro_batch) for start, stop in (rank.share for rank in plan.ranks))
    for whole, (state, held, frozen, steps) in zip(expected, trained(workload, plan), strict=True):
        assert all(torch.equal(state[name], value) for name, value in whole[0].items())
        assert all(torch.equal(frozen[name], value) for name, value in whole[2].items())
        assert held["waiting"] == waiting
        read = {step["frozen"]["host"]["read"] - rounds * (2 - 1 / depth) * waiting for step in steps}
        assert read == {0, waiting}, "a step, or one and a validation"
        if world > 1:
            assert held["frozen"] == plan.predicted.memory_bytes["frozen"]


def test_what_waits_in_host_memory_costs_the_planned_bytes_on_the_device(
    opened: Callable[..., TuneWorkload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor both are one memory: all that comes to it are the blocks that are fetched."""
    workload = opened(config.Lora(rank=4), steps=2, precision="fp32")
    plan = planned(workload, 1, 1, recompute="block")
    monkeypatch.setattr(offload, "ways", lambda *_: [HOST])
    away = planned(workload, 1, 1, recompute="block", micro_batch=plan.micro_batch, offload="host")
    assert plan.predicted is not None
    assert away.predicted is not None
    before, after = plan.predicted.memory_bytes, away.predicted.memory_bytes
    assert before["frozen"] == after["frozen"] + away.predicted.waiting_bytes["frozen"]
    more = allocated(workload, away) - allocated(workload, plan)
    assert more == pytest.approx(after["gathered"] - before["gathered"], abs=64), "numbers that stand for what is away"
    assert after["gathered"] > 0.3 * away.predicted.waiting_bytes["frozen"]


def test_preferences_beside_frozen_weights_in_host_memory_change_no_bit(opened: Callable[..., TuneWorkload]) -> None:
    """Whose loss calls the model with adapters and without."""
    workload = opened(config.Dpo(rank=4, frozen="int8"), steps=STEPS, precision="fp32")
    plan = planned(workload, 1, 1)
    (expected, *_), (state, *_) = trained(workload, plan)[0], trained(workload, plan.changed(offload=HOST))[0]
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_adapters_saved_beside_frozen_weights_in_host_memory_go_on_without_these(
    opened: Callable[..., TuneWorkload], tmp_path: Path
) -> None:
    workload = opened(config.Lora(rank=4, frozen="int4"), steps=STEPS, precision="fp32")
    plan = planned(workload, 1, 1)
    expected, away = trained(workload, plan)[0][0], plan.changed(offload=HOST)
    for first, then in ((away, plan), (plan, away)):
        folder = tmp_path / str(first.offload)
        with pytest.raises(Interrupted):
            trained(workload, first, folder, stop_after=2)
        state = trained(workload, then, folder)[0][0]
        assert all(torch.equal(state[name], value) for name, value in expected.items())
