"""Waves planned again: without a rank, and at measured speeds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan.asked import decoder

from espalier.machine import cluster as clusters
from espalier.mechanisms.task_waves.state import TaskWavesState
from espalier.plan import base as plans
from espalier.plan import replan
from espalier.plan.calibration import DATASHEET
from espalier.plan.decide import decide
from espalier.recipe.cost import PartCost
from espalier.recipe.errors import UserError

CLUSTER = clusters.loads(
    '[[nodes]]\ncount = 4\ndevice = "cpu"\ncores = 1\nmemory = "8GiB"\n[links]\nbetween = "1Gbit/s"\n'
)


def part(task: str, node: str, operators: int, seconds: float, *needs: str) -> PartCost:
    """One whose operators take so many seconds for a batch of 64 samples."""
    measured = {32: seconds / 2, 64: seconds}
    return PartCost(task, node, operators, needs, f"{task}.{node}", 64, parameters=1e5, output=1e3, seconds=measured)


REQUEST = decoder(batch=1).changed(
    facts={
        "task_waves": (
            part("see", "image", 6, 0.2),
            part("see", "head", 1, 0.05, "see.image"),
            part("read", "text", 4, 0.1),
            part("read", "head", 1, 0.05, "read.text"),
            part("sort", "package", 2, 0.05),
            part("sort", "head", 1, 0.02, "sort.package"),
        )
    },
    max_devices=4,
)


@pytest.fixture(scope="module")
def plan() -> plans.Plan:
    made = decide(REQUEST, CLUSTER, DATASHEET).taken
    assert len(made.ranks) == 4
    assert made.state(TaskWavesState).waves
    return made


def work(plan: plans.Plan) -> list[float]:
    """Seconds of each rank, on devices that are as fast as planned."""
    found = [0.0] * len(plan.ranks)
    parts = {one.key: one for one in REQUEST.profile.facts["task_waves"]}
    for one in (one for wave in plan.state(TaskWavesState).waves for one in wave):
        for rank in one.ranks:
            each = parts[f"{one.task}.{one.node}"].seconds[64] / len(one.ranks)
            found[rank] += (one.last - one.first) * each
    return found


def whole(plan: plans.Plan) -> bool:
    """Whether all operators are run once, in order."""
    at: dict[str, int] = {}
    for one in (one for wave in plan.state(TaskWavesState).waves for one in wave):
        key = f"{one.task}.{one.node}"
        if one.first != at.get(key, 0):
            return False
        at[key] = one.last
    return at == {one.key: one.operators for one in REQUEST.profile.facts["task_waves"]}


def test_the_cost_of_waves_as_they_are_is_the_one_they_were_planned_with(plan: plans.Plan) -> None:
    assert plan.predicted is not None
    same = replan.seconds(REQUEST, CLUSTER, plan, replan.equal(plan))
    assert same == pytest.approx(plan.predicted.terms["waves"] + plan.predicted.terms["exchange"])
    assert replan.planned_work(REQUEST, CLUSTER, plan) == pytest.approx(work(plan), rel=0.01)


def test_ranks_that_compute_as_planned_count_as_equal_though_their_seconds_differ(plan: plans.Plan) -> None:
    planned = replan.planned_work(REQUEST, CLUSTER, plan)
    twice = [2 * one for one in planned]
    assert replan.speeds(REQUEST, CLUSTER, plan, twice).slower == (1.0,) * 4
    slow = [one * factor for one, factor in zip(planned, (1.0, 3.0, 1.0, 1.0), strict=True)]
    assert replan.speeds(REQUEST, CLUSTER, plan, slow).slower == pytest.approx((1.0, 3.0, 1.0, 1.0))


@pytest.mark.parametrize("slow", range(4))
def test_a_rank_that_stays_slow_gets_less_work_and_the_step_shorter(plan: plans.Plan, slow: int) -> None:
    found = replan.Speeds(tuple(4.0 if rank == slow else 1.0 for rank in range(4)))
    best, *_ = every = replan.options(REQUEST, CLUSTER, plan, found)
    assert all(whole(one.plan) for one in every if one.plan.state(TaskWavesState).waves)
    assert best.ratio < 0.8
    kept_all = next(one for one in every if len(one.remaining) == 4)
    assert kept_all.ratio <= 1
    assert work(kept_all.plan)[slow] <= work(plan)[slow]


def test_where_nothing_is_slow_no_waves_are_much_faster(plan: plans.Plan) -> None:
    assert all(one.ratio > 0.97 for one in replan.options(REQUEST, CLUSTER, plan, replan.equal(plan)))


@pytest.mark.parametrize("kept", [(0, 2, 3), (1, 3), (2,)])
def test_the_ranks_that_are_left_run_all_parts_where_they_sit(plan: plans.Plan, kept: tuple[int, ...]) -> None:
    made = replan.plan_on(REQUEST, CLUSTER, plan, kept, replan.equal(plan))
    assert [rank.node for rank in made.ranks] == [plan.ranks[rank].node for rank in kept]
    assert whole(made) if len(kept) > 1 else not made.state(TaskWavesState).waves
    assert replan.seconds(REQUEST, CLUSTER, made, replan.equal(made)) > replan.seconds(
        REQUEST, CLUSTER, plan, replan.equal(plan)
    )


def test_what_the_ranks_that_are_left_cannot_hold_is_refused(plan: plans.Plan) -> None:
    heavy = tuple(replace(one, parameters=6e8) for one in REQUEST.profile.facts["task_waves"])
    with pytest.raises(UserError, match="No waves fit"):
        replan.plan_on(REQUEST.changed(facts={"task_waves": heavy}), CLUSTER, plan, (0, 1), replan.equal(plan))
