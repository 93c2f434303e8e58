"""Recipes of several tasks, planned in waves and trained over ranks as on one."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import struck
import tiny_tasks
import torch
from test_multitask import ALONE, of, trained

from espalier.cli import plan_page
from espalier.machine import cluster as clusters
from espalier.mechanisms.task_waves import wave_plan as task_waves
from espalier.mechanisms.task_waves.state import TaskWavesState
from espalier.mechanisms.task_waves.wave_schedule import Slices, WaveSchedule
from espalier.parallel.mesh import of_plan
from espalier.parallel.workload import Shard
from espalier.plan import base as plans
from espalier.plan.decide import decide
from espalier.recipe.errors import UserError
from espalier.train import run_folder as runs
from espalier.train import workload_registry
from espalier.train.request_from_recipe import of_recipe
from many_ranks.faults import Fault

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
    assert {one.task for wave in two.state(TaskWavesState).waves for one in wave} == {"match", "write", "sort"}
    assert {rank for wave in two.state(TaskWavesState).waves for one in wave for rank in one.ranks} == {0, 1}
    assert "over 2 ranks" in two.why[0] or any("over 2 ranks" in line for line in two.why)
    assert plans.loads(plans.dumps(two)) == two
    assert two.layout.dp == 1
    assert of_plan(two).heads == {0, 1}
    alike(trained(None, plan=two), whole)


@pytest.mark.slow
def test_a_run_in_waves_is_taken_up_by_other_waves_and_by_one_rank(
    two: plans.Plan, whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    """States move to the ranks that hold them in the new plan; with the same waves the run ends with the same bits."""
    unbroken = of(trained(None, plan=two), "step")
    first = of(trained(tmp_path, stop_after=2, plan=two), "step")
    swapped = tuple(
        tuple(msgspec.structs.replace(one, ranks=tuple(1 - rank for rank in one.ranks)) for one in wave)
        for wave in two.state(TaskWavesState).waves
    )
    other = tmp_path.parent / "copy"
    shutil.copytree(tmp_path, other)
    again = of(trained(tmp_path, plan=two), "step")
    assert [one["loss"] for one in (*first, *again)] == [one["loss"] for one in unbroken]
    third = tmp_path.parent / "third"
    shutil.copytree(other, third)
    for folder, plan in ((other, two.with_state(TaskWavesState(waves=swapped))), (third, ALONE)):
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
    ends = [end for wave in plan.state(TaskWavesState).waves for one in wave for end in (one.end, one.back[1])]
    assert max(ends) == pytest.approx(plan.predicted.terms["waves"])
    assert plan == planned(HOSTS)
    left_open = planned(HOSTS, train={"steps": 4})
    assert left_open.precision == "fp32"
    assert left_open.state(TaskWavesState).waves
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
    assert (len(plan.ranks), plan.choices) == (1, {})


@pytest.mark.extremes
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
    changed = two.with_state(TaskWavesState(waves=edit(two.state(TaskWavesState).waves)))
    with pytest.raises(UserError, match=said):
        Slices(changed, ["match", "write", "sort"], model.nodes)


def test_waves_on_ranks_that_there_are_not_are_refused(two: plans.Plan) -> None:
    (first, *others), *later = two.state(TaskWavesState).waves
    stranger = ((msgspec.structs.replace(first, ranks=(7,)), *others), *later)
    with pytest.raises(UserError, match="have the ranks 7, which do not train"):
        plans.check(two.with_state(TaskWavesState(waves=stranger)), 1)


def test_more_ranks_than_cores_are_refused() -> None:
    with pytest.raises(UserError, match="9 ranks for 4 cores"):
        planned(MACHINE, "plan.pin.ranks=9")


def some(*names: str) -> dict[str, Any]:
    """The tables of the recipe with these tasks, and the towers that they take."""
    tasks = [one for one in tiny_tasks.TABLE["tasks"] if one["name"] in names]
    used = {name for one in tasks for name in one["towers"]}
    return {"tasks": tasks, "towers": [one for one in tiny_tasks.TABLE["towers"] if one["name"] in used]}


@pytest.mark.slow
def test_a_task_comes_and_goes_between_runs_and_the_others_do_not_notice(two: plans.Plan, tmp_path: Path) -> None:
    """What stays goes on from the same bits: losses of its third step are those of the run that nobody changed. What
    comes has its initial weights. By waves, too."""
    few = some("match", "write")
    unbroken = {name: of(trained(None, **tables), "step")[2]["tasks"] for name, tables in (("all", {}), ("few", few))}
    trained(tmp_path, stop_after=2)
    (gone,) = (one["tasks"] for one in of(trained(tmp_path, stop_after=3, **few), "step"))
    assert gone == {name: unbroken["all"][name] for name in ("match", "write")}
    other, third = tmp_path.parent / "other", tmp_path.parent / "again"
    trained(other, stop_after=2, **few)
    shutil.copytree(other, third)
    (came,) = (one["tasks"] for one in of(trained(other, stop_after=3), "step"))
    assert {name: came[name] for name in ("match", "write")} == unbroken["few"]
    opened = workload_registry.open_workload(tiny_tasks.resolved())
    model = opened.build(torch.device("cpu"), torch.float64)
    batch = next(one for one in opened.batches(2, Shard(0, 1, 1)) if one.task == 2)
    value, weight = opened.loss(model, batch)
    assert came["sort"] == pytest.approx(float((value / weight).detach()), rel=1e-9)
    (waves,) = (one["tasks"] for one in of(trained(third, stop_after=3, plan=two), "step"))
    assert waves == pytest.approx(came, rel=1e-9)


def test_tasks_that_stay_have_to_stay_what_they_are(tmp_path: Path) -> None:
    folder = runs.lock_folder(tmp_path / "run")
    folder.write(tiny_tasks.resolved().recipe, MACHINE, ALONE)
    runs.refuse_other_meaning(folder, tiny_tasks.resolved(**some("match", "write")).recipe)
    for changes in (
        {"write_batch": 4},
        {"text_width": 32},
        {**some("match"), "model": {"kind": "multitask", "length": 5}},
    ):
        with pytest.raises(UserError, match="holds a run with"):
            runs.refuse_other_meaning(folder, tiny_tasks.resolved(**changes).recipe)
    folder.release()


def unlike(*machines: tuple[float, int]) -> clusters.Cluster:
    """A machine for each (operations a second, cores)."""
    rows = (
        f'[[nodes]]\nname = "h{k}"\ncores = {cores}\nmemory = "8GiB"\n[nodes.device]\nname = "d{k}"\nkind = "cpu"\n'
        f"memory = 8589934592\nmemory_bandwidth = 1e10\nflops = {{ fp32 = {flops}, fp64 = {flops} }}\npeak = false\n"
        for k, (flops, cores) in enumerate(machines)
    )
    return clusters.loads("\n".join(rows) + '\n[links]\nbetween = "1Gbit/s"\n')


def test_unlike_machines_are_priced_by_their_own_speeds() -> None:
    """A core of the second machine computes a quarter of what one of the first does, so it gets the smaller parts."""
    machines = unlike((4e10, 1), (2e10, 2))
    request = SimpleNamespace(precision="fp32")
    assert task_waves._slower(task_waves._seats(machines, 2), request) == pytest.approx((1.0, 4.0))  # type: ignore[arg-type]
    assert task_waves._slower(task_waves._seats(HOSTS, 3), request) == ()  # type: ignore[arg-type]
    plan = planned(machines)
    assert [rank.node for rank in plan.ranks] == [0, 1]
    assert {rank for wave in plan.state(TaskWavesState).waves for one in wave for rank in one.ranks} == {0, 1}
    assert plan.predicted is not None
    equal = planned(unlike((4e10, 1), (4e10, 1))).predicted
    assert equal is not None
    assert equal.step_seconds < plan.predicted.step_seconds


BATCHES = some("write", "sort")
"""Tasks whose heads need no whole batch."""
BATCHES["tasks"] = [{**one, "batch": 24} for one in BATCHES["tasks"]]


def with_room(room: float) -> tuple[plans.Plan, int]:
    """The plan of two ranks with so many bytes each beside what a process takes, and the bytes that it predicts."""
    found = tiny_tasks.resolved("plan.pin.ranks=2", **BATCHES)
    request = of_recipe(found.recipe, lambda: workload_registry.open_workload(found))
    one = decide(*task_waves.alone(request, MACHINE)).plan
    assert one.predicted is not None
    limit = one.predicted.memory_bytes["runtime"] + room
    predicted = msgspec.structs.replace(one.predicted, memory_limit=limit)
    plan = task_waves.with_waves(msgspec.structs.replace(one, predicted=predicted), request, MACHINE)
    assert plan.predicted is not None
    return plan, int(plan.predicted.memory_bytes["waves"])


def test_passes_are_nested_where_memory_asks_for_it() -> None:
    """The fewest micro-batches that fit; what a step then takes is more, and what is held less."""
    whole, most = with_room(1e9)
    nested, held = with_room(0.6 * most)
    assert (whole.state(TaskWavesState).nested, nested.state(TaskWavesState).nested) == (1, 4)
    assert held <= 0.6 * most
    assert any("4 micro-batches of each task are nested" in line for line in nested.why)
    assert not any("nested" in line for line in whole.why)
    assert nested.predicted is not None
    assert whole.predicted is not None
    assert nested.predicted.step_seconds >= whole.predicted.step_seconds
    assert nested.executable
    with pytest.raises(UserError, match="No waves fit"):
        with_room(0.1 * most)
