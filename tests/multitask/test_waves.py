"""Recipes of several tasks, planned in waves and trained over ranks as on one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import struck
import tiny_tasks
import torch
from test_multitask import ALONE, of, trained

from espalier import cluster as clusters
from espalier import workload_registry
from espalier.errors import UserError
from espalier.parallel.mesh import of_plan
from espalier.plan import base as plans
from espalier.plan.decide import decide
from espalier.plan.request_from_recipe import of_recipe
from espalier.stages.spindle import Slices, WaveSchedule
from espalier.testing.faults import Fault
from espalier.verbs import plan_page

MACHINE = clusters.loads('[[nodes]]\ndevice = "cpu"\ncores = 4\nmemory = "8GiB"\n')
HOSTS = clusters.loads(
    '[[nodes]]\ncount = 3\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n[links]\nbetween = "1Gbit/s"\n'
)


def planned(cluster: clusters.Cluster = MACHINE, *overrides: str, **changes: Any) -> plans.Plan:
    found = tiny_tasks.resolved(*overrides, **changes)
    request = of_recipe(found.recipe, lambda: workload_registry.open_workload(found))
    return decide(request, cluster).taken


@pytest.fixture(scope="module")
def two() -> plans.Plan:
    return planned(MACHINE, "plan.pin.ranks=2")


@pytest.fixture(scope="module")
def whole() -> list[dict[str, Any]]:
    """The steps of a run on one rank, and its validation."""
    told = trained(None)
    return [*of(told, "step"), *of(told, "validation")]


def alike(told: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """Losses, norms and validations are those of one rank, to rounding."""
    found = [*of(told, "step"), *of(told, "validation")]
    assert len(found) == len(whole)
    for one, other in zip(found, whole, strict=True):
        for key in ("loss", "gradient_norm", "tasks", "tasks.match", "match.accuracy", "sort.accuracy"):
            if key in other:
                assert one[key] == pytest.approx(other[key], rel=1e-9), key


def test_a_plan_of_waves_says_who_runs_what_and_trains_as_one_rank_does(
    two: plans.Plan, whole: list[dict[str, Any]]
) -> None:
    assert [rank.share for rank in two.ranks] == [(0, 1), (0, 1)]
    assert {one.task for wave in two.waves for one in wave} == {"match", "write", "sort"}
    assert {rank for wave in two.waves for one in wave for rank in one.ranks} == {0, 1}
    assert "over 2 ranks" in two.why[0] or any("over 2 ranks" in line for line in two.why)
    assert plans.loads(plans.dumps(two)) == two
    assert two.layout.dp == 1
    assert of_plan(two).heads == {0, 1}
    alike(trained(None, plan=two), whole)


def test_a_run_in_waves_is_taken_up_by_other_waves_and_by_one_rank(
    two: plans.Plan, whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    """States move to the ranks that hold them in the new plan; with the same waves the run ends with the same bits."""
    unbroken = of(trained(None, plan=two), "step")
    first = of(trained(tmp_path, stop_after=2, plan=two), "step")
    swapped = tuple(
        tuple(msgspec.structs.replace(one, ranks=tuple(1 - rank for rank in one.ranks)) for one in wave)
        for wave in two.waves
    )
    other = tmp_path.parent / "copy"
    shutil.copytree(tmp_path, other)
    again = of(trained(tmp_path, plan=two), "step")
    assert [one["loss"] for one in (*first, *again)] == [one["loss"] for one in unbroken]
    third = tmp_path.parent / "third"
    shutil.copytree(other, third)
    for folder, plan in ((other, msgspec.structs.replace(two, waves=swapped)), (third, ALONE)):
        rest = of(trained(folder, plan=plan), "step")
        assert [one["loss"] for one in rest] == pytest.approx([one["loss"] for one in whole[2:4]], rel=1e-9)


def test_a_rank_killed_in_the_middle_of_a_wave_changes_no_bit(
    two: plans.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tiny_tasks.resolved(checkpoint={"every": 2}, train={"steps": 4, "validate_every": 4, "precision": "fp64"})
    monkeypatch.setattr(struck, "open_language", lambda recipe: workload_registry.open_workload(found))
    unbroken = struck.Struck(found.recipe, 2, tmp_path / "whole", plan=two).run()
    killed = struck.Struck(
        found.recipe, 2, tmp_path / "run", (Fault(1, 4, "kill"),), plan=two, inside=(WaveSchedule, "_backward")
    ).run()
    assert [one["kind"] for one in killed.all("incident")] == ["killed"]
    assert killed.parameters
    assert struck.same(killed, unbroken)


def test_machines_get_a_rank_each_and_the_reasons_compare_the_plain_forms() -> None:
    plan = planned(HOSTS)
    assert [rank.node for rank in plan.ranks] == [0, 1, 2]
    assert plan.predicted is not None
    assert plan.predicted.terms["waves"] > 0
    told = " ".join(plan.why)
    assert "one task after the other takes" in told
    assert "the best fixed groups of ranks take" in told
    assert "Wave 1: " in told
    ends = [one.end for wave in plan.waves for one in wave]
    assert max(ends) == pytest.approx(plan.predicted.terms["waves"])
    assert plan == planned(HOSTS)
    left_open = planned(HOSTS, train={"steps": 4})
    assert left_open.precision == "fp32"
    assert left_open.waves
    assert "on 1 rank" not in told
    assert "Rounds" not in told


def test_the_page_of_a_plan_draws_its_waves() -> None:
    plan = planned(HOSTS)
    page = plan_page.render(plan, [], "tasks")
    assert "One step, rank by rank" in page
    assert "blocks" in page
    for task in ("match", "write", "sort"):
        assert task in page


def test_one_rank_has_no_waves() -> None:
    plan = planned(MACHINE)
    assert (len(plan.ranks), plan.waves) == (1, ())


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda waves: waves[1:], "cannot be run"),
        (lambda waves: waves[:-1], "cannot be run"),
        (lambda waves: waves[::-1], "cannot be run"),
        (lambda waves: (*waves, waves[0]), "cannot be run"),
        (lambda waves: ((msgspec.structs.replace(waves[0][0], ranks=()), *waves[0][1:]), *waves[1:]), "cannot be run"),
        (lambda waves: ((msgspec.structs.replace(waves[0][0], task="x"), *waves[0][1:]), *waves[1:]), "a task 'x'"),
    ],
)
def test_waves_edited_so_that_a_part_is_nowhere_are_refused(two: plans.Plan, edit: Any, said: str) -> None:
    workload = workload_registry.open_workload(tiny_tasks.resolved())
    model: Any = workload.build(torch.device("cpu"), torch.float64)
    changed = msgspec.structs.replace(two, waves=edit(two.waves))
    with pytest.raises(UserError, match=said):
        Slices(changed, ["match", "write", "sort"], model.nodes)


def test_waves_on_ranks_that_there_are_not_are_refused(two: plans.Plan) -> None:
    stranger = ((msgspec.structs.replace(two.waves[0][0], ranks=(7,)), *two.waves[0][1:]), *two.waves[1:])
    with pytest.raises(UserError, match="have the ranks 7, which do not train"):
        plans.check(msgspec.structs.replace(two, waves=stranger), 1)


def test_more_ranks_than_cores_are_refused() -> None:
    with pytest.raises(UserError, match="9 ranks for 4 cores"):
        planned(MACHINE, "plan.pin.ranks=9")
