"""Several tasks on one model: their weighted losses add up, each is recorded, for any number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.cli import run_plan
from espalier.launch.ranks import agent
from espalier.machine import cluster as clusters
from espalier.parallel.workload import Shard, Tagged
from espalier.plan import base as plans
from espalier.recipe import recipe_file
from espalier.recipe.errors import UserError
from espalier.train import rank_spec as launch
from espalier.train import worker, workload_registry
from espalier.train.rank_setup import RankSetup

THEIRS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from espalier.module import Parts, Task

def pairs(count, seed):
    seeded = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=seeded)
    return TensorDataset(x, x.sum(1, keepdim=True) * seed)

def squares(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(), torch.tensor(len(batch[0]))

def distances(model, batch):
    return (model(batch[0]) - batch[1]).abs().sum(), torch.tensor(len(batch[0]))

def build(weight=0.5):
    torch.manual_seed(0)
    tasks = {
        "near": Task(pairs(24, 1), squares, pairs(6, 3)),
        "far": Task(pairs(10, 2), distances, pairs(3, 4), weight=weight),
    }
    return Parts(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), tasks=tasks)
"""
MACHINE = clusters.loads('[[nodes]]\ndevice = "cpu"\ncores = 4\nmemory = "8GiB"\n')


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., workload_registry.Resolved]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    sys.modules.pop("two_tasks", None)
    (tmp_path / "two_tasks.py").write_text(THEIRS)

    def do(*overrides: str, **arguments: Any) -> workload_registry.Resolved:
        table = {
            "model": {"kind": "module", "build": "two_tasks:build", "arguments": arguments},
            "train": {"steps": 3, "batch_tokens": 8, "validate_every": 3, "optimizer": "adamw"},
            "plan": {"trial": False},
        }
        return workload_registry.settle(recipe_file.from_table(table, "recipe", overrides), tmp_path)

    return do


def run(resolved: workload_registry.Resolved, plan: plans.Plan) -> list[dict[str, Any]]:
    """The events of a run of that plan."""
    workload = workload_registry.open_workload(resolved)

    def life(place: launch.RankSpec) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []

        def emit(event: str, **fields: Any) -> None:
            told.append({"event": event, **fields})

        worker.train(RankSetup(resolved.recipe, plan, workload, place, emit=emit), {})
        return told

    found: list[dict[str, Any]] = agent.run(life, launch.places(plan))[0]
    return found


def alone() -> plans.Plan:
    return plans.Plan(ranks=(plans.Rank(share=(0, 8)),), micro_batch=8)


def of(told: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [one for one in told if one["event"] == event]


def test_the_loss_is_the_weighted_sum_of_what_is_recorded_of_each_task(opened: Callable[..., Any]) -> None:
    told = run(opened(), alone())
    for step in of(told, "step"):
        assert list(step["tasks"]) == ["near", "far"]
        assert step["loss"] == pytest.approx((step["tasks"]["near"] + 0.5 * step["tasks"]["far"]) / 2)
    (held,) = of(told, "validation")
    assert held["loss"] == pytest.approx((6 * held["tasks.near"] + 0.5 * 3 * held["tasks.far"]) / 9)


def test_two_ranks_do_what_one_does(opened: Callable[..., Any]) -> None:
    one = run(opened(), alone())
    halves = (plans.Rank(share=(0, 4)), plans.Rank(share=(4, 8)))
    two = run(opened(), plans.Plan(ranks=halves, micro_batch=2))
    for event in ("step", "validation"):
        for left, right in zip(of(one, event), of(two, event), strict=True):
            assert right["loss"] == pytest.approx(left["loss"], rel=1e-5)
            for name in ("near", "far"):
                key = (name,) if event == "step" else (f"tasks.{name}",)
                places = [side["tasks"] if event == "step" else side for side in (left, right)]
                assert places[1][key[0]] == pytest.approx(places[0][key[0]], rel=1e-5)


def test_tasks_may_be_trained_with_sharded_parameters(opened: Callable[..., Any]) -> None:
    resolved = opened("plan.pin.ranks=2", "plan.pin.shard={params=2, grads=2, optimizer=2}")
    machine = clusters.loads('[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n')
    plan = run_plan.choose(resolved, workload_registry.open_workload(resolved), machine)
    assert any(unit.params for unit in plan.units)
    one, two = run(opened(), alone()), run(opened(), plan)
    for left, right in zip(of(one, "step"), of(two, "step"), strict=True):
        assert right["tasks"] == pytest.approx(left["tasks"], rel=1e-5)


def test_the_gradient_is_that_of_the_weighted_sum(opened: Callable[..., Any]) -> None:
    workload = workload_registry.open_workload(opened())
    model = workload.build(torch.device("cpu"), torch.float64)
    batches = workload.batches(0, Shard(0, 8, 8))
    assert [type(one) for one in batches] == [Tagged, Tagged]
    (near, far), shares = [workload.loss(model, one) for one in batches], list(workload.tasks().values())
    gradient = torch.autograd.grad((shares[0] * near[0] + shares[1] * far[0]) / 16, list(model.parameters()))
    norm = torch.cat([one.flatten() for one in gradient]).norm()
    (step, *_) = of(run(opened("train.precision=fp64"), alone()), "step")
    assert step["gradient_norm"] == pytest.approx(float(norm))


def test_a_task_that_counts_for_nothing_is_refused(opened: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="'far' has weight 0"):
        workload_registry.open_workload(opened(weight=0.0))
