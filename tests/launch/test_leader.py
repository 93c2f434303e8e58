"""Supervisors of two and three hosts, each in a process of its own: whatever happens to a rank or a host, no bit of the
result changes, or the error names the host.

Each kind of real kill is here once; what follows it on any rank of any number of hosts is proven in simulated time
(`test_simulated`).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from abroad import Abroad
from struck import Struck, plan_of, recipe_of, same

from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.plan import base as plans
from espalier.recipe.errors import HostLost
from espalier.train import table
from many_ranks.faults import Fault

KINDS = {
    "kill": "killed", "terminate": "signal", "raise": "exception", "stop": "stopped", "hang": "hang", "exit": "exit",
}  # fmt: skip


def incidents(run: Struck) -> list[dict[str, Any]]:
    """Without hosts that were merely starved on a busy machine."""
    return [event for event in run.all("incident") if event["kind"] != "lost"]


def test_two_hosts_train_as_one_does_and_nothing_is_told(corpus, unbroken, tmp_path) -> None:
    run = Abroad(recipe_of(corpus), 3, tmp_path / "run", hosts=(0, 1, 1), heartbeat=2.0).run()
    assert same(run, unbroken(3))
    assert run.all("incident") == []
    assert len(run.outcome(1)) == 2


@pytest.mark.extremes
@pytest.mark.parametrize(
    ("what", "rank"),
    [
        ("kill", 1),
        pytest.param("stop", 1, marks=pytest.mark.slow),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("raise", 0), ("hang", 0), ("exit", 1))),
        pytest.param("terminate", 0, marks=pytest.mark.slow),
    ],
)
def test_what_happens_to_a_rank_is_named_with_its_host_and_changes_no_bit(
    corpus, unbroken, tmp_path, what, rank
) -> None:
    run = Abroad(recipe_of(corpus), 2, tmp_path / "run", (Fault(rank, 6, what),), memory=1 << 26).run()
    assert same(run, unbroken(2)), run.said()
    (incident,) = incidents(run)
    assert (incident["kind"], incident["rank"]) == (KINDS[what], rank)
    if what != "terminate":
        assert incident["what"].startswith(f"On host {('here', 'there')[rank]}: Rank {rank}")
    recovered = [event for event in run.all("recovered") if event["kind"] == KINDS[what]]
    assert [event["source"] for event in recovered] == ["disk" if what == "terminate" else "memory"]


def lives_of(run: Struck, rank: int) -> list[str]:
    """The process of each attempt of `rank`."""
    return (run.folder / f"lives-{rank}").read_text().split()


@pytest.mark.extremes
@pytest.mark.parametrize(
    ("what", "rank"),
    [("kill", 2), pytest.param("stop", 0, marks=pytest.mark.slow), pytest.param("hang", 1, marks=pytest.mark.slow)],
)
def test_where_all_ranks_are_alike_those_that_are_left_stay_on_all_hosts(
    corpus, unbroken, tmp_path, what, rank
) -> None:
    faults = (Fault(rank, 6, what),)
    run = Abroad(recipe_of(corpus), 3, tmp_path / "run", faults, memory=1 << 26, stays="alike", hosts=(0, 1, 1)).run()
    assert same(run, unbroken(3)), run.said()
    assert [event["lost_steps"] for event in run.all("recovered") if event["kind"] != "lost"] == [0]
    for other in range(3):
        assert len(set(lives_of(run, other))) == (2 if other == rank else 1)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "rank", "stays"), [("kill", 0, ""), ("hang", 1, ""), ("raise", 2, "alike")])
def test_three_hosts_get_over_what_happens_to_a_rank_of_any(corpus, unbroken, tmp_path, what, rank, stays) -> None:
    faults = (Fault(rank, 6, what),)
    run = Abroad(recipe_of(corpus), 3, tmp_path / "run", faults, memory=1 << 26, stays=stays, hosts=(0, 1, 2)).run()
    assert same(run, unbroken(3)), run.said()
    (incident,) = incidents(run)
    assert (incident["kind"], incident["rank"]) == (KINDS[what], rank)
    assert incident["what"].startswith(f"On host {('here', 'there', 'yonder')[rank]}: Rank {rank}")


@pytest.mark.slow
def test_a_rank_that_is_lost_on_any_of_several_hosts_changes_no_bit_of_rounds(corpus, tmp_path) -> None:
    recipe = recipe_of(corpus, train={"steps": 24}, checkpoint={"every": 100})
    outer = LocalRoundsState(replicas=((0,), (1,), (2,)), method="eager", steps=2, adapt=False)
    plan = msgspec.structs.replace(plan_of(recipe, 3), choices={"local_rounds": outer})
    whole = Struck(recipe, 3, tmp_path / "whole", plan=plan).run()
    run = Abroad(
        recipe, 3, tmp_path / "run", (Fault(1, 7, "kill"),), memory=1 << 26, plan=plan, stays="rounds", hosts=(0, 1, 1)
    ).run()
    assert same(run, whole), run.said()
    assert run.all("recovered")[-1]["source"] == "memory"


@pytest.mark.slow
def test_one_budget_is_for_all_hosts_and_its_end_is_everybodys(corpus, tmp_path) -> None:
    faults = tuple(Fault(rank, 2, "raise") for rank in (0, 1))
    run = Abroad(recipe_of(corpus), 2, tmp_path / "run", faults, restarts=0).run()
    assert "On host" in run.outcome(0).what
    assert "scripted failure" in run.outcome(0).what
    assert run.outcome(1) is None
    assert nobody_left(run)


def nobody_left(run: Abroad, within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    pids = [int(file.read_text()) for file in run.folder.glob("pid-*")]
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(lives, pids))


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def long(corpus: Path, steps: int) -> Any:
    return recipe_of(corpus, train={"steps": steps, "validate_every": 10_000}, checkpoint={"every": 10_000})


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_a_host_whose_supervisor_dies_is_named_and_no_rank_is_left(corpus, tmp_path, host) -> None:
    run = Abroad(long(corpus, 10_000), 2, tmp_path / "run", absence=4.0).start()
    run.reaches(10)
    os.kill(run.supervisors[host], signal.SIGKILL)
    run.finish()
    other = run.outcome(1 - host)
    assert isinstance(other, HostLost)
    assert f"Host {('here', 'there')[host]}" in other.what
    assert nobody_left(run)


def lost(run: Abroad) -> tuple[dict[str, Any], dict[str, Any]]:
    """The incident that ended an attempt because a host was lost, and how the run went on."""
    (incident,) = [one for one in run.all("incident") if one["rank"] >= 0 and not one["action"].startswith("wait")]
    (recovered,) = [one for one in run.all("recovered") if one["source"] != "place"]  # starved on a busy machine
    assert (incident["kind"], incident["rank"], recovered["kind"]) == ("lost", 1, "lost")
    assert incident["what"].startswith("Host there was not heard for")
    assert recovered["lost_steps"] == max(0, incident["step"] - recovered["step"])
    return incident, recovered


@pytest.mark.slow
@pytest.mark.parametrize(
    ("away", "stays"),
    [
        (0.0, "alike"),
        pytest.param(2.0, "alike", marks=pytest.mark.slow),
        pytest.param(0.0, "", marks=pytest.mark.slow),
        pytest.param(9.0, "alike", marks=pytest.mark.slow),
    ],
)
def test_a_host_that_comes_back_is_healed_from_what_the_others_hold_in_memory(corpus, tmp_path, away, stays) -> None:
    """Its ranks' peers stay where they may and still do: they wait for a while, then all begin anew."""
    recipe = long(corpus, 60)
    whole = Struck(recipe, 2, tmp_path / "whole").run()
    run = Abroad(recipe, 2, tmp_path / "run", memory=1 << 26, stays=stays).start()
    run.reaches(10)
    os.kill(run.supervisors[1], signal.SIGKILL)
    time.sleep(away)
    run.again(1)
    run.finish()
    assert same(run, whole), run.said()
    _, recovered = lost(run)
    assert recovered["source"] == "memory"
    assert recovered["lost_steps"] <= (1 if stays else 60)
    stayed = len(set((run.folder / "lives-0").read_text().split())) == 1
    assert stayed == (stays == "alike" and away < 5)


def comes_back(recipe: Any, folder: Path, nodes: tuple[int, int]) -> str:
    """From where a lost host's part of a cut state is taken up; `nodes`: the machine of each rank, by the plan."""
    unit = plans.Unit(params=(0, 1), grads=(0, 1), optimizer=(0, 1), whole=True)
    ranks = tuple(
        msgspec.structs.replace(one, node=node) for node, one in zip(nodes, plan_of(recipe, 2).ranks, strict=True)
    )
    plan = plans.Plan(ranks=ranks, units=(unit,), micro_batch=2)
    assert table.recovery(recipe, plan) != "alike"
    whole = Struck(recipe, 2, folder / "whole", plan=plan).run()
    run = Abroad(recipe, 2, folder / "run", memory=1 << 26, plan=plan).start()
    run.reaches(12)
    os.kill(run.supervisors[1], signal.SIGKILL)
    run.again(1)
    run.finish()
    assert same(run, whole), run.said()
    return str(lost(run)[1]["source"])


@pytest.mark.slow
def test_a_host_whose_state_nobody_else_holds_comes_back_from_the_disk(corpus, tmp_path) -> None:
    recipe = recipe_of(corpus, train={"steps": 60, "validate_every": 10_000}, checkpoint={"every": 5})
    assert comes_back(recipe, tmp_path, (0, 0)) == "disk"


@pytest.mark.slow
def test_a_host_comes_back_to_what_another_host_kept_of_its_part(corpus, tmp_path) -> None:
    assert comes_back(long(corpus, 60), tmp_path, (0, 1)) == "memory"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_replicas_go_on_by_rounds_while_a_host_is_away(corpus, tmp_path) -> None:
    steps = 3000  # of 7 ms alone: more than it does before the other is back
    recipe = long(corpus, steps)
    outer = LocalRoundsState(replicas=((0,), (1,)), method="eager", steps=2, adapt=False)
    plan = msgspec.structs.replace(plan_of(recipe, 2), choices={"local_rounds": outer})
    run = Abroad(recipe, 2, tmp_path / "run", memory=1 << 26, plan=plan, stays="rounds").start()
    run.reaches(10)
    os.kill(run.supervisors[1], signal.SIGKILL)
    at = len(run.all("step"))
    time.sleep(8.0)
    assert len(run.all("step")) > at + 4, "it trains on alone"
    run.again(1)
    run.finish(180)
    assert [event["step"] for event in run.all("step")] == list(range(1, steps + 1)), run.said()
    assert len(set((run.folder / "lives-0").read_text().split())) == 1
    assert lost(run)[1]["lost_steps"] == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_supervisor_whose_place_was_taken_leaves_and_its_ranks_with_it(corpus, tmp_path) -> None:
    """As where only the launcher's connection to it is gone."""
    recipe = long(corpus, 60)
    whole = Struck(recipe, 2, tmp_path / "whole").run()
    run = Abroad(recipe, 2, tmp_path / "run", memory=1 << 26, stays="alike").start()
    run.reaches(10)
    former = int((run.folder / "pid-1").read_text())
    run.again(1)
    run.finish(90)
    assert same(run, whole), run.said()
    lost(run)
    assert not lives(former)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_supervisor_that_is_stopped_for_a_while_costs_nothing(corpus, tmp_path) -> None:
    recipe = long(corpus, 200)
    whole = Struck(recipe, 2, tmp_path / "whole").run()
    run = Abroad(recipe, 2, tmp_path / "run").start()
    run.reaches(10)
    os.kill(run.supervisors[1], signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(run.supervisors[1], signal.SIGCONT)
    run.finish(90)
    assert same(run, whole)
    assert run.all("incident")[0]["what"].startswith("Host there has not been heard for")
    assert run.all("recovered")[0]["source"] == "place"
    assert [event["step"] for event in run.all("run")] == [0], "its ranks went on meanwhile"


@pytest.fixture
def lab() -> Iterator[Any]:
    """Two hosts, each a network namespace."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        pytest.skip("network namespaces need root and iproute2")
    file = Path(__file__).parents[2] / "bench" / "netlab.py"
    spec = importlib.util.spec_from_file_location("netlab", file)
    assert spec is not None
    assert spec.loader is not None
    netlab = sys.modules["netlab"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(netlab)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with netlab.Lab(netlab.Shape(nodes=2, hosts=1)) as made:
            yield made
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_link_that_is_cut_for_five_seconds_does_not_lose_the_run(corpus, lab, tmp_path) -> None:
    recipe = long(corpus, 150)
    whole = Struck(recipe, 2, tmp_path / "whole").run()
    run = Abroad(recipe, 2, tmp_path / "run", heartbeat=0.5, memory=1 << 26, lab=lab).start()
    run.reaches(15)
    with lab.cut(1):
        time.sleep(5.0)
    run.finish(100)
    assert same(run, whole), run.said()
    assert "Host there has not been heard for" in run.all("incident")[0]["what"]
    assert run.all("recovered")


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_link_that_stays_cut_ends_the_run_on_both_sides_and_names_the_host(corpus, lab, tmp_path) -> None:
    run = Abroad(long(corpus, 10_000), 2, tmp_path / "run", heartbeat=0.5, absence=5.0, lab=lab).start()
    run.reaches(15)
    with lab.cut(1):
        run.finish(60)
    for host, other in ((0, "there"), (1, "here")):
        error = run.outcome(host)
        assert isinstance(error, HostLost), run.said()
        assert f"Host {other}" in error.what
    assert nobody_left(run)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "rank"), [("kill", 0), ("stop", 1)])
def test_over_a_real_link_a_fault_changes_no_bit(corpus, unbroken, lab, tmp_path, what, rank) -> None:
    run = Abroad(recipe_of(corpus), 2, tmp_path / "run", (Fault(rank, 6, what),), memory=1 << 26, lab=lab).run()
    assert same(run, unbroken(2)), run.said()
    assert [(one["kind"], one["rank"]) for one in incidents(run)] == [(KINDS[what], rank)]
