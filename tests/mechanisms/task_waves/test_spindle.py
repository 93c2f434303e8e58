"""Waves over ranks train as one rank does: any cut of towers, groups of any size, shared towers, a task absent."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import tiny_tasks
import torch
from torch import Tensor

from espalier.mechanisms.task_waves.state import TaskWavesState, WaveSlice
from espalier.mechanisms.task_waves.wave_plan import handed_on
from espalier.parallel.mesh import ProcessMesh
from espalier.parallel.workload import HEAD, Shard, to_device
from espalier.plan import base as plans
from espalier.tasks.towers import MultitaskModel
from espalier.tasks.workload import MultitaskWorkload
from espalier.train import rank_spec as launch
from espalier.train import table, workload_registry
from espalier.train.build import build
from espalier.train.rank_setup import RankSetup
from many_ranks import forks

RESOLVED = tiny_tasks.resolved()
TASKS = ["match", "write", "sort"]


def opened(**changes: Any) -> MultitaskWorkload:
    found = workload_registry.open_workload(tiny_tasks.resolved(**changes) if changes else RESOLVED)
    assert isinstance(found, MultitaskWorkload)
    return found


WORKLOAD = opened()


def drawn(seed: int, ranks: int, nested: int = 1, workload: MultitaskWorkload = WORKLOAD) -> plans.Plan:
    """Waves at random: towers cut anywhere, on groups of any ranks in any order, tasks in any order."""
    r, model = random.Random(seed), workload.parts.model
    assert isinstance(model, MultitaskModel)
    waiting = []
    for k, task in enumerate(workload.tasks()):
        chain = []
        for node in model.nodes(k):
            cuts = sorted(r.sample(range(1, node.operators), r.randint(0, node.operators - 1)))
            for first, last in itertools.pairwise([0, *cuts, node.operators]):
                most = 1 if node.name == HEAD and model.heads[task].whole else ranks
                group = tuple(r.sample(range(ranks), r.randint(1, most)))
                chain.append(WaveSlice(task=task, node=node.name, first=first, last=last, ranks=group))
        waiting.append(chain)
    waves = []
    while any(waiting):
        chain = r.choice([one for one in waiting if one])
        waves.append((chain.pop(0),))
    own = tuple(plans.Rank(share=(0, 1)) for _ in range(ranks))
    state = TaskWavesState(waves=tuple(waves), nested=nested)
    return plans.Plan(ranks=own, choices={state.name: state}, precision="fp64")


def stepped(
    plan: plans.Plan, absent: int | None = None, workload: MultitaskWorkload = WORKLOAD
) -> Callable[[Any], dict[str, Tensor]]:
    """Of a rank: the gradients that it holds after a step, its part of the loss, bytes of activations that it sent."""

    def life(channel: Any) -> dict[str, Tensor]:
        rank = channel.rank()
        setting = RankSetup(workload.recipe, plan, workload, launch.RankSpec(rank=rank, world=len(plan.ranks)))
        built = build(setting, ProcessMesh(setting.mesh, channel, rank), table.ordered(setting.recipe, setting.plan))
        batches = [
            to_device(one, torch.device("cpu"), torch.float64)
            for one in workload.batches(3, setting.shard)
            if one.task != absent
        ]
        built.sharding.clear()
        before = channel.ledger.by_class().get("activations", 0.0)
        outcome = built.schedule.run(built.model, batches, workload.loss)
        values = torch.zeros(1, dtype=torch.float64)
        built.sharding.wait(values)
        found = {name: one.grad.clone() for name, one in built.model.named_parameters() if one.grad is not None}
        sent = torch.tensor(channel.ledger.by_class().get("activations", 0.0) - before)
        return {**found, "loss": outcome.loss, "weight": outcome.weight, "sent": sent}

    return life


def alone(absent: int | None, workload: MultitaskWorkload = WORKLOAD) -> dict[str, Tensor]:
    """The same of one rank, task after task, in plain PyTorch."""
    model = workload.build(torch.device("cpu"), torch.float64)
    shares, loss, weights = list(workload.tasks().values()), torch.zeros((), dtype=torch.float64), 0.0
    for one in workload.batches(3, Shard(0, 1, 1)):
        if one.task != absent:
            value, weight = workload.loss(model, one)
            loss = loss + shares[one.task] * value
            weights += float(weight)
    model.zero_grad()
    (loss / workload.nominal_weight).backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return {**found, "loss": loss.detach(), "weight": torch.tensor(weights, dtype=torch.float64)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ranks", "absent", "nested"), [(2, None, 1), (3, None, 1), (4, 0, 1), (4, 1, 1), (2, None, 4), (3, 0, 3)]
)
def test_waves_give_the_loss_and_gradients_of_one_task_after_the_other(
    ranks: int, absent: int | None, nested: int
) -> None:
    """Micro-batches may be nested, more of them than samples too."""
    for seed in range(3 if nested == 1 else 2):
        trains_as_one(drawn(10 * ranks + seed, ranks, nested), absent, WORKLOAD)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ranks", "nested"), [(2, 1), (3, 4)])
def test_a_radiance_field_trains_in_waves_as_on_one_rank(ranks: int, nested: int) -> None:
    """Rays of a scene are divided over ranks beside glyphs and nodes; the head of a field may be elsewhere."""
    workload = opened(**tiny_tasks.FIELD)
    for seed in range(2):
        trains_as_one(drawn(70 * ranks + seed, ranks, nested, workload), None, workload)


def test_a_rank_may_have_nothing_to_do_or_a_head_without_parameters() -> None:
    """Rank 1 runs the head of a field alone, rank 2 nothing."""
    workload = opened(**tiny_tasks.FIELD)
    plan = drawn(5, 1, 1, workload)
    there = tuple(
        tuple(
            WaveSlice(
                task=one.task,
                node=one.node,
                first=one.first,
                last=one.last,
                ranks=(1,) if (one.task, one.node) == ("scene", HEAD) else (0,),
            )
            for one in wave
        )
        for wave in plan.state(TaskWavesState).waves
    )
    trains_as_one(
        plans.Plan(ranks=plan.ranks * 3, choices={"task_waves": TaskWavesState(waves=there)}, precision="fp64"),
        None,
        workload,
    )


def trains_as_one(plan: plans.Plan, absent: int | None, workload: MultitaskWorkload) -> None:
    """Loss, weight and gradients, on the ranks that hold them."""
    expected, parts = alone(absent, workload), forks(len(plan.ranks), stepped(plan, absent, workload))
    for name in ("loss", "weight"):
        assert float(sum(part[name] for part in parts)) == pytest.approx(float(expected[name]), rel=1e-12)
    seen = set()
    for part in parts:
        for name, gradient in part.items():
            if name not in ("loss", "weight", "sent"):
                seen.add(name)
                like = expected.get(name, torch.zeros_like(gradient))
                torch.testing.assert_close(gradient.view_as(like), like, rtol=1e-12, atol=1e-14)
    assert seen >= set(expected) - {"loss", "weight"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_plan_knows_the_bytes_that_slices_hand_on(ranks: int) -> None:
    """Of every rank, as on its ledger; outputs were counted in float32, and cross in float64."""
    parts = WORKLOAD.parts_of(False)
    for seed in range(3):
        plan = drawn(50 * ranks + seed, ranks, nested=1 + 3 * (seed == 2))
        sent = [float(one["sent"]) for one in forks(ranks, stepped(plan))]
        assert sent == [2 * one for one in handed_on(plan, parts)]


def test_what_others_send_is_received_while_a_rank_computes() -> None:
    """From the second step on, when shapes are known: every receive of an input begins before the first slice runs, and
    that of a gradient as soon as the output was sent."""
    plan = drawn(31, 3)

    def life(channel: Any) -> list[list[str]]:
        setting = RankSetup(RESOLVED.recipe, plan, WORKLOAD, launch.RankSpec(rank=channel.rank(), world=3))
        built = build(
            setting, ProcessMesh(setting.mesh, channel, channel.rank()), table.ordered(setting.recipe, setting.plan)
        )
        schedule: Any = built.schedule
        told: list[str] = []

        def logged(where: Any, name: str, word: Callable[..., str]) -> None:
            own = getattr(where, name)
            setattr(where, name, lambda *given, **more: (told.append(word(*given)), own(*given, **more))[1])

        logged(schedule.graph, "compute", lambda *given: "compute")
        logged(schedule.messages, "expect", lambda rooms, peer, tag, *kind: "gradient" if tag % 2 else "input")
        logged(schedule.messages, "wait", lambda works: "wait")
        batches = [to_device(one, torch.device("cpu"), torch.float64) for one in WORKLOAD.batches(3, setting.shard)]
        found = []
        for _ in range(2):
            told.clear()
            schedule.run(built.model, batches, WORKLOAD.loss)
            found.append(list(told))
        return found

    steps = [second for _, second in forks(3, life)]
    assert any("input" in one for one in steps)
    assert any("gradient" in one for one in steps)
    for told in steps:
        inputs = [place for place, word in enumerate(told) if word == "input"]
        assert inputs == list(range(len(inputs)))
        gradients = [place for place, word in enumerate(told) if word == "gradient"]
        assert all(told[place - 1] in ("compute", "gradient", "input") for place in gradients)


def kept(nested: int) -> list[int]:
    """Of each of two ranks, the most bytes that a step keeps for backward passes, parameters aside."""
    tables = {name: tiny_tasks.TABLE[name] for name in ("tasks", "towers")}
    tasks = [{**one, "batch": 24} for one in tables["tasks"] if one["name"] != "match"]  # whose head is not divided
    towers = [one for one in tables["towers"] if one["name"] != "image"]
    found = tiny_tasks.resolved(tasks=tasks, towers=towers)
    workload = workload_registry.open_workload(found)
    assert isinstance(workload, MultitaskWorkload)
    plan = drawn(7, 2, nested, workload)

    def life(channel: Any) -> int:
        setting = RankSetup(found.recipe, plan, workload, launch.RankSpec(rank=channel.rank(), world=2))
        built = build(
            setting, ProcessMesh(setting.mesh, channel, channel.rank()), table.ordered(setting.recipe, setting.plan)
        )
        own = {one.untyped_storage().data_ptr() for one in built.model.parameters()}
        live = most = 0

        class Saved:
            def __init__(self, tensor: Tensor) -> None:
                nonlocal live, most
                self.tensor = tensor
                self.size = 0 if tensor.untyped_storage().data_ptr() in own else tensor.nbytes
                live += self.size
                most = max(most, live)

            def __del__(self) -> None:
                nonlocal live
                live -= self.size

        batches = [to_device(one, torch.device("cpu"), torch.float64) for one in workload.batches(0, setting.shard)]
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            built.schedule.run(built.model, batches, workload.loss)
        return most

    return forks(2, life)


def test_nested_passes_keep_the_activations_of_two_micro_batches() -> None:
    """Of eight: a quarter of those of whole batches."""
    for whole, nested in zip(kept(1), kept(8), strict=True):
        assert 0 < nested <= 0.27 * whole
