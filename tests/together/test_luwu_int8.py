"""Gradients in 8 bits with error feedback on an optimizer node: whatever is killed, and wherever the run is stopped, it
goes on to the bits of a run to which nothing happened."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_runs import STRUCK, OnNode, on_node, recipe
from struck import same, write_corpus

from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.mechanisms.optimizer_node.client import Client
from espalier.plan import base as plans
from espalier.recipe import Recipe
from espalier.recipe.errors import EspalierError, Interrupted
from many_ranks.faults import Fault

pytestmark = pytest.mark.slow


def planned(recipe: Recipe, *helpers: str, rounds: bool = False) -> plans.Plan:
    traffic = "outer_step" if rounds else "gradients"
    outer = LocalRoundsState(replicas=((0,), (1,)), method="diloco", steps=3, adapt=False)
    choices: dict[str, Any] = {"choices": {"local_rounds": outer}} if rounds else {}
    return on_node(recipe, 2, *helpers, exchanges=(plans.Exchange(traffic=traffic, codec="int8"),), **choices)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("luwu") / "corpus")


@pytest.fixture(scope="module")
def run_of(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., OnNode]:
    """A run in 8 bits; `helpers` serve it."""
    asked = recipe(corpus)

    def made(folder: Path, *faults: Fault, helpers: tuple[str, ...] = (), rounds: bool = False, **how: Any) -> OnNode:
        plan = planned(asked, *helpers, rounds=rounds)
        return OnNode(asked, len(plan.ranks), folder, faults, plan=plan, **how)

    return made


@pytest.fixture(scope="module")
def whole(run_of: Callable[..., OnNode], tmp_path_factory: pytest.TempPathFactory) -> OnNode:
    return run_of(tmp_path_factory.mktemp("whole") / "run").run()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("helpers", [(), ("aggregator",)], ids="-".join)
def test_a_worker_killed_in_a_push(
    run_of: Callable[..., OnNode], tmp_path: Path, whole: OnNode, rank: int, helpers: tuple[str, ...]
) -> None:
    fault = Fault(rank, STRUCK, "kill")
    run = run_of(tmp_path / "run", fault, helpers=helpers, inside=(Client, "encode")).run()
    assert run.all("recovered")
    assert same(run, whole)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("helpers", [(), ("standby",)], ids="-".join)
def test_a_node_killed_as_it_commits(
    run_of: Callable[..., OnNode], tmp_path: Path, whole: OnNode, when: str, helpers: tuple[str, ...]
) -> None:
    run = run_of(tmp_path / "run", helpers=helpers, killed=(STRUCK, when)).run()
    assert (tmp_path / "run" / "node-killed").exists()
    assert same(run, whole)


def test_a_run_that_was_stopped(run_of: Callable[..., OnNode], tmp_path: Path, whole: OnNode) -> None:
    with pytest.raises(Interrupted):
        run_of(tmp_path / "run", restarts=0, stop_after=STRUCK).run()
    assert same(run_of(tmp_path / "run").run(), whole)


def test_a_run_of_which_a_worker_raised(run_of: Callable[..., OnNode], tmp_path: Path, whole: OnNode) -> None:
    with pytest.raises(EspalierError, match="scripted failure"):
        run_of(tmp_path / "run", Fault(1, STRUCK, "raise"), restarts=0).run()
    assert same(run_of(tmp_path / "run").run(), whole)


def test_a_run_whose_processes_are_all_killed(run_of: Callable[..., OnNode], tmp_path: Path, whole: OnNode) -> None:
    child = os.fork()
    if not child:
        run_of(tmp_path / "run", Fault(0, STRUCK, "kill"), orphans=True).run()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    run = run_of(tmp_path / "run").run()
    assert run.all("run")[-1]["step"] in (STRUCK - 2, STRUCK - 1)
    assert same(run, whole)


def test_residuals_that_are_gone_are_told(run_of: Callable[..., OnNode], tmp_path: Path, whole: OnNode) -> None:
    with pytest.raises(Interrupted):
        run_of(tmp_path / "run", restarts=0, stop_after=STRUCK).run()
    shutil.rmtree(tmp_path / "run" / "optimizer" / "worker-1")
    run = run_of(tmp_path / "run").run()
    (incident,) = (one for one in run.all("incident") if one["kind"] == "damaged")
    assert incident["what"] == f"What rounding left of the pushes before step {STRUCK + 1} is not there on rank 1."
    assert "differ" in incident["action"]
    assert run.losses.keys() == whole.losses.keys()


@pytest.mark.parametrize("how", ["killed worker", "killed node", "stopped"])
def test_rounds_in_int8(run_of: Callable[..., OnNode], tmp_path: Path, how: str) -> None:
    unbroken = run_of(tmp_path / "whole", rounds=True).run()
    if how == "killed worker":
        run = run_of(tmp_path / "run", Fault(1, STRUCK - 1, "kill"), rounds=True)
    elif how == "killed node":
        run = run_of(tmp_path / "run", rounds=True, killed=(2, "before"))
    else:
        run = run_of(tmp_path / "run", rounds=True, stop_after=4)  # its launcher begins anew
    assert same(run.run(), unbroken)
