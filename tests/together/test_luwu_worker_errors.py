"""Workers of an optimizer node that end by an error: a step counts when every worker's part was in it and the log has
its line, so the same command goes on to the bits of a run to which nothing happened."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_runs import STEPS, STRUCK, OnNode, on_node, recipe
from struck import same, write_corpus

from espalier.mechanisms.optimizer_node.mechanism import ModelOnNodes
from espalier.recipe.cache_dir import unwritable
from espalier.recipe.errors import EspalierError, UserError
from espalier.store.generations import Generations
from espalier.track.events import Event, Log
from espalier.train import rank_spec as launch
from espalier.train.mechanism import Build
from many_ranks.faults import Fault


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("luwu") / "corpus")


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> OnNode:
    asked = recipe(corpus)
    return OnNode(asked, 3, tmp_path_factory.mktemp("whole") / "run", plan=on_node(asked, 2)).run()


def refused(name: str, step: int, marker: Path) -> Callable[[launch.RankSpec], None]:
    """In a worker's process: the disk is full when the log's line of event `name` of `step` is written first."""

    def arm(place: launch.RankSpec) -> None:
        plain = Log.write

        def write(log: Log, event: str, **fields: Any) -> Event:
            if (event, fields.get("step")) == (name, step) and not marker.exists():
                marker.touch()
                raise unwritable(log.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            return plain(log, event, **fields)

        Log.write = write  # type: ignore[method-assign]

    return arm


def steps_of(run: OnNode) -> set[int]:
    """Of the files of the node and its standby."""
    found = set()
    for file in run.folder.glob("optimizer/*-0/state"):
        with Generations(file) as state:
            found.add(state.step)
    return found


HELPERS = [(), ("aggregator",), ("standby",), ("standby", "aggregator")]


@pytest.mark.slow
@pytest.mark.parametrize("helpers", HELPERS, ids="-".join)
def test_a_step_whose_line_the_log_refused_is_made_again(
    corpus: Path, tmp_path: Path, whole: OnNode, helpers: tuple[str, ...]
) -> None:
    asked = recipe(corpus)
    plan = on_node(asked, 2, *helpers)
    arm = refused("step", STRUCK, tmp_path / "refused")
    run = OnNode(asked, len(plan.ranks), tmp_path / "run", plan=plan, arm_worker=arm)
    with pytest.raises(UserError, match="No space left"):
        run.run()
    assert max(run.losses) == STRUCK - 1
    assert steps_of(run) <= {STRUCK - 1, STRUCK}
    assert same(run.run(), whole)
    assert [one["step"] for one in run.all("run")] == [0, STRUCK - 1]
    assert [one["step"] for one in run.all("step")] == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("helpers", HELPERS, ids="-".join)
@pytest.mark.parametrize("rank", [0, 1])
def test_no_step_is_made_without_a_worker_that_raised(
    corpus: Path, tmp_path: Path, whole: OnNode, helpers: tuple[str, ...], rank: int
) -> None:
    asked = recipe(corpus)
    plan, fault = on_node(asked, 2, *helpers), Fault(rank, STRUCK, "raise")
    run = OnNode(asked, len(plan.ranks), tmp_path / "run", (fault,), plan=plan, restarts=0)
    with pytest.raises(EspalierError, match="scripted failure"):
        run.run()
    assert max(run.losses) == STRUCK - 1
    assert steps_of(run) == {STRUCK - 1}
    assert same(run.run(), whole)
    assert [one["step"] for one in run.all("run")] == [0, STRUCK - 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["validation", "checkpoint"])
def test_figures_of_a_step_that_the_log_refused_are_made_again(
    corpus: Path, tmp_path: Path, whole: OnNode, name: str
) -> None:
    asked = recipe(corpus)
    run = OnNode(asked, 3, tmp_path / "run", plan=on_node(asked, 2), arm_worker=refused(name, 4, tmp_path / "refused"))
    with pytest.raises(UserError, match="No space left"):
        run.run()
    assert steps_of(run) <= {max(run.losses), max(run.losses) + 1}
    assert same(run.run(), whole)
    assert run.validated == whole.validated


@pytest.mark.slow
@pytest.mark.parametrize("served", ["optimizer", "aggregator"])
def test_a_process_killed_behind_the_last_step_when_a_worker_has_left_holds_nobody_up(
    corpus: Path, tmp_path: Path, whole: OnNode, served: str
) -> None:
    """Workers wait a minute for a node that cannot be reached, and this one is there again."""
    left, killed = tmp_path / "left", tmp_path / "killed"

    def arm(place: launch.RankSpec) -> None:
        if place.role == served and not killed.exists():
            (tmp_path / "pid").write_text(str(os.getpid()))

    def arm_worker(place: launch.RankSpec) -> None:
        close = ModelOnNodes.close

        def closed(mechanism: ModelOnNodes, context: Build) -> None:
            until = time.monotonic() + 30.0
            while place.rank and not left.exists() and time.monotonic() < until:
                time.sleep(0.01)
            if place.rank and not killed.exists():
                killed.touch()
                os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
            close(mechanism, context)
            left.touch()

        ModelOnNodes.close = closed  # type: ignore[method-assign]

    asked = recipe(corpus)
    plan = on_node(asked, 2, *(("aggregator",) if served == "aggregator" else ()))
    run = OnNode(asked, len(plan.ranks), tmp_path / "run", plan=plan, arm=arm, arm_worker=arm_worker).run()
    assert killed.exists()
    assert time.time() - killed.stat().st_mtime < 30.0
    assert same(run, whole)
    (incident,) = run.all("incident")
    assert incident["action"].startswith("start it again, the others stay")
