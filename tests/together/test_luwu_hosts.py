"""Workers and an optimizer node on three hosts: who is killed on one of them is named with it, and no bit differs."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from abroad import Abroad
from node_runs import STEPS, STRUCK, FewerOnNode, OnNode, on_node, recipe
from struck import same, write_corpus

from espalier.launch.ranks.resize import RunShape
from espalier.launch.ranks.supervisor import RestartOptions
from espalier.mechanisms.optimizer_node.client import Client
from espalier.plan import base as plans
from espalier.recipe.errors import RunFailed
from espalier.train import rank_spec as launch
from espalier.train.rank_spec import RankSpec
from many_ranks.faults import Fault


@dataclass
class Apart(OnNode, Abroad):
    """A worker on each of two hosts, and the node on a third."""

    hosts: tuple[int, ...] = (0, 1, 2)


class Mortal(Apart):
    """One worker never outlives a step."""

    def _arm(self, workload: Any, place: RankSpec) -> None:
        super()._arm(workload, place)
        plain = workload.loss

        def loss(model: Any, batch: Any) -> Any:
            if place.rank == 1 and model.training and self.trainer.step + 1 == STRUCK:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(model, batch)

        workload.loss = loss


class FewerApart(FewerOnNode):
    """See there: the others stay on their hosts."""

    def without(self, ranks: Collection[int]) -> RunShape:
        shape = super().without(ranks)
        hosts = tuple(self.run.hosts[rank] for rank in shape.previous_ranks)
        return dataclasses.replace(
            shape, hosts=hosts, encoded=json.dumps([plans.dumps(self.made), hosts]), copies=False
        )


class Abandoned(Mortal):
    """The others go on without that worker."""

    @property
    def care(self) -> RestartOptions:
        plan = self.plan or on_node(self.recipe, self.world - 1)

        def heard(told: str) -> RunShape:
            text, hosts = json.loads(told)
            made = plans.loads(text)
            return RunShape(self.life(made), launch.places(made), (), False, 1.0, "", "", tuple(hosts), told)

        return dataclasses.replace(super().care, shapes=FewerApart(self, plan), heard=heard)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("luwu") / "corpus")


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> OnNode:
    asked = recipe(corpus)
    return OnNode(asked, 3, tmp_path_factory.mktemp("whole") / "run", plan=on_node(asked, 2)).run()


@pytest.mark.slow
def test_a_worker_that_is_killed_in_a_push_is_replaced_on_its_host(corpus: Path, tmp_path: Path, whole: OnNode) -> None:
    asked, faults = recipe(corpus), (Fault(1, STRUCK, "kill"),)
    run = Apart(asked, 3, tmp_path / "run", faults, plan=on_node(asked, 2), inside=(Client, "encode")).run()
    assert same(run, whole), run.said()
    incident = next(one for one in run.all("incident") if one["kind"] == "killed")
    assert incident["what"].startswith("On host there: Rank 1 was killed")
    assert run.all("recovered")[0]["step"] >= STRUCK - 2


@pytest.mark.slow
def test_a_node_that_is_killed_on_its_host_is_started_again_there_and_the_workers_stay(
    corpus: Path, tmp_path: Path, whole: OnNode
) -> None:
    asked = recipe(corpus)
    run = Apart(asked, 3, tmp_path / "run", plan=on_node(asked, 2), killed=(STRUCK, "before")).run()
    assert same(run, whole), run.said()
    (incident,) = (one for one in run.all("incident") if one["kind"] == "killed")
    assert incident["what"].startswith("On host yonder: Rank 2 was killed")
    assert (incident["rank"], incident["action"]) == (2, "start it again, the others stay")
    assert len(run.all("run")) == 1


@pytest.mark.slow
def test_a_worker_that_always_dies_on_its_host_ends_the_run_which_names_the_host_and_how_to_go_on_without_it(
    corpus: Path, tmp_path: Path
) -> None:
    asked = recipe(corpus)
    run = Mortal(asked, 3, tmp_path / "run", plan=on_node(asked, 2), restarts=1).run()
    error = run.outcome(0)
    assert isinstance(error, RunFailed), run.said()
    assert error.what.startswith("On host there: Rank 1 was killed")
    assert "came back after 1 restart with no step gained" in error.why
    assert "repair there, or go on without it: the same command with the other hosts in --hosts" in error.do


@pytest.mark.slow
def test_a_worker_that_always_dies_on_its_host_is_left_out_and_the_others_go_on_from_the_nodes_step(
    corpus: Path, tmp_path: Path, whole: OnNode
) -> None:
    asked = recipe(corpus)
    run = Abandoned(asked, 3, tmp_path / "run", plan=on_node(asked, 2), restarts=1).run()
    assert isinstance(run.outcome(0), list), run.said()
    assert run.outcome(1) == [], "its host has no rank any more, and all went well"
    last = [one for one in run.all("incident") if one["kind"] == "killed"][-1]
    assert last["what"].startswith("On host there: Rank 1 was killed")
    assert "rank 1 (place 0), which is left out from now on: 2 ranks" in last["action"]
    assert run.all("run")[-1]["step"] >= STRUCK - 1
    assert run.losses.keys() == whole.losses.keys()
    assert len(whole.losses) == STEPS
    assert all(abs(run.losses[step] - loss) < 1e-4 * loss for step, loss in whole.losses.items())
