"""Unequal pipelines planned again: without a rank, and at measured speeds."""

from __future__ import annotations

import pytest
from tests.mechanisms.unequal_pipelines.test_unequal import GIB, asked, processors

from espalier.machine import cluster as clusters
from espalier.mechanisms.unequal_pipelines import choice
from espalier.mechanisms.unequal_pipelines.cost import EngineCosts
from espalier.mechanisms.unequal_pipelines.pipeline_solver import Slot
from espalier.plan import base as plans
from espalier.plan import replan
from espalier.plan.calibration import DATASHEET
from espalier.plan.decide import decide
from espalier.plan.measured_cluster import Speeds
from espalier.recipe.errors import UserError

SPEEDS = (4e10, 2e10, 2e10, 1e10)
CLUSTER = processors(*((one, GIB) for one in SPEEDS))
REQUEST = asked()


@pytest.fixture(scope="module")
def plan() -> plans.Plan:
    made = decide(REQUEST, CLUSTER, DATASHEET).taken
    assert made.planner == "flashflex"
    assert len(made.ranks) == 4
    return made


def own(plan: plans.Plan, slower: tuple[float, ...]) -> list[float]:
    """Seconds that each rank computes in a step, if it is so many times as slow as planned."""
    costs = choice._costs(REQUEST, CLUSTER, plan, range(len(plan.ranks)), Speeds((1.0,) * len(plan.ranks)))
    found = [0.0] * len(plan.ranks)
    for one in choice._pipelines(plan, costs):
        for number, (group, layers, _) in enumerate(one.stages):
            slot = Slot(number, len(one.stages))
            found[group.kind] = one.micro_batches * (layers * costs.layer(group) + costs.extra(group, slot))
    return [seconds * factor for seconds, factor in zip(found, slower, strict=True)]


def work(plan: plans.Plan) -> dict[int, int]:
    """Layers times samples of each rank."""
    found = {}
    for stage in plan.stages:
        start, stop = plan.ranks[stage.ranks[0]].share
        found[stage.ranks[0]] = (stop - start) * (stage.layers[1] - stage.layers[0])
    return found


def test_the_cost_of_a_plan_as_it_is_is_the_one_it_was_planned_with(plan: plans.Plan) -> None:
    assert plan.predicted is not None
    same = choice.CHOICE.seconds(REQUEST, CLUSTER, plan, replan.equal(plan))
    assert same == pytest.approx(plan.predicted.step_seconds, rel=0.02)


def test_ranks_that_compute_as_planned_count_as_equal_though_their_seconds_differ(plan: plans.Plan) -> None:
    seconds = own(plan, (1.0,) * 4)
    assert replan.speeds(REQUEST, CLUSTER, plan, seconds).slower == (1.0,) * 4
    found = replan.speeds(REQUEST, CLUSTER, plan, own(plan, (3.0, 1.0, 1.0, 1.0))).slower
    assert found == pytest.approx((3.0, 1.0, 1.0, 1.0))


def test_what_stays_slow_gets_less_and_the_new_plan_is_faster_at_those_speeds(plan: plans.Plan) -> None:
    found = Speeds((4.0, 1.0, 1.0, 1.0))
    made = choice.CHOICE.plan_on(REQUEST, CLUSTER, plan, range(4), found)
    assert work(made)[0] < work(plan)[0] / 2
    assert sum(work(made).values()) == sum(work(plan).values())
    best = replan.options(REQUEST, CLUSTER, plan, found)[0]
    assert best.ratio < 0.9
    assert [made.ranks[rank].device for rank in range(4)] == ["cpu"] * 4


@pytest.mark.parametrize("lost", range(4))
def test_the_others_take_over_what_a_lost_rank_did(plan: plans.Plan, lost: int) -> None:
    kept = [rank for rank in range(4) if rank != lost]
    made = plans.check(replan.plan_on(REQUEST, CLUSTER, plan, kept, replan.equal(plan)), 16)
    assert len(made.ranks) == 3
    assert sum(work(made).values()) == 16 * 8
    for number in {one.pipeline for one in made.stages}:
        held = sorted(one.layers for one in made.stages if one.pipeline == number)
        assert [first for first, _ in held] == [0, *(last for _, last in held[:-1])]
    before = replan.seconds(REQUEST, CLUSTER, plan, replan.equal(plan))
    after = made.predicted
    assert after is not None
    assert before * 0.99 <= after.step_seconds < 4 * before


def test_where_the_others_cannot_hold_it_that_is_said() -> None:
    tight, deep = processors((4e10, 240 * 2**20), (1e10, 240 * 2**20)), asked(depth=24)
    made = decide(deep, tight, DATASHEET).taken
    assert len(made.ranks) == 2
    with pytest.raises(UserError, match="1 rank cannot hold this run"):
        replan.plan_on(deep, tight, made, [1], replan.equal(made))


THREE = """
[links]
between = { bandwidth = "200Mbit/s", latency = "100us", launch = "100us" }
""" + "".join(
    f"""
[[nodes]]
name = "{name}"
cores = 1
memory = {GIB}
inside = {{ bandwidth = "10GB/s", latency = "1us", launch = "1us" }}
[nodes.device]
name = "core"
kind = "cpu"
memory = {GIB}
memory_bandwidth = 1e10
flops = {{ fp32 = {flops} }}
peak = false
"""
    for name, flops in (("a", 4e10), ("b", 2e10), ("c", 1e10))
)


def test_over_machines_what_is_left_is_planned_with_the_links_between_them() -> None:
    there = clusters.loads(THREE)
    plan = decide(REQUEST, there, DATASHEET).taken
    assert plan.planner == "flashflex"
    assert plan.predicted is not None
    same = choice.CHOICE.seconds(REQUEST, there, plan, replan.equal(plan))
    assert same == pytest.approx(plan.predicted.step_seconds, rel=0.02)
    kept = [rank for rank, one in enumerate(plan.ranks) if one.node != 1]
    made = plans.check(replan.plan_on(REQUEST, there, plan, kept, replan.equal(plan)), 16)
    assert [one.node for one in made.ranks] == [plan.ranks[rank].node for rank in kept]
    costs = choice._costs(REQUEST, there, plan, kept, replan.equal(plan))
    assert costs.cluster.machines == len({plan.ranks[rank].node for rank in kept})
    assert costs.link((0, 1)) == EngineCosts(REQUEST, there, 1).link((0, 2)), (
        "what crosses machines, not what is inside"
    )
    assert costs.link((0, 1)).bandwidth < 200e6 / 8
