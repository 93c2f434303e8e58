"""An optimizer node beside what else a run may be made of: codecs, kills, micro-batches, rounds."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from struck import Struck, plan_of, recipe_of, same, write_corpus

from espalier import mechanisms, trainer, worker
from espalier.config import Recipe
from espalier.errors import UserError
from espalier.language.workload import open_language
from espalier.launch import base as launch
from espalier.plan import base as plans
from espalier.rank_setup import RankSetup
from espalier.store.generations import Generations
from espalier.testing.faults import Fault
from espalier.track.events import Log

STEPS, STRUCK = 10, 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("luwu") / "corpus")


def recipe(corpus: Path, **tables: Any) -> Recipe:
    train = {"steps": STEPS, "optimizer": {"kind": "adamw", "learning_rate": 0.002}} | tables.pop("train", {})
    return recipe_of(corpus, train=train, checkpoint={"every": 4}, **tables)


def on_node(recipe: Recipe, workers: int, **more: Any) -> plans.Plan:
    ranks = (*plan_of(recipe, workers).ranks, plans.Rank(role="optimizer"))
    return plans.Plan(ranks=ranks, micro_batch=2, precision="fp32", **more)


@dataclass
class OnNode(Struck):
    """`killed`: the node dies as it commits that step, or has: "before", "after"."""

    killed: tuple[int, str] | None = None

    def life(self, plan: plans.Plan) -> launch.Entrypoint:
        workload = open_language(self.recipe)

        def life(place: launch.RankSpec) -> Any:
            log = Log(self.folder / "events.jsonl") if place.rank == 0 else None
            emit = log.write if log else lambda event, **fields: None
            setting = RankSetup(self.recipe, plan, workload, place, self.folder, emit)
            with worker.joined(place, self.timeout) as channel:
                if place.role == "optimizer":
                    self._arm_node()
                    return worker.as_optimizer(setting, channel)
                self._arm(workload, place)
                self.trainer = one = trainer.Trainer(setting, channel)
                worker.live(one)
                one.built.sharding.detach()
                found = {name: value.clone() for name, value in one.built.model.state_dict().items()}
                one.built.close()
                return found

        return life

    def _arm_node(self) -> None:
        plain, marker, killed = Generations.commit, self.folder / "node-killed", self.killed

        def commit(state: Generations, step: int) -> None:
            due = killed is not None and step == killed[0] and not marker.exists()
            if due:
                marker.touch()
            if due and killed[1] == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            plain(state, step)
            if due:
                os.kill(os.getpid(), signal.SIGKILL)

        Generations.commit = commit  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> OnNode:
    asked = recipe(corpus)
    return OnNode(asked, 3, tmp_path_factory.mktemp("whole") / "run", plan=on_node(asked, 2)).run()


def test_a_run_on_a_node_is_data_parallel(corpus: Path, tmp_path: Path, whole: OnNode) -> None:
    asked = recipe(corpus)
    plain = plan_of(asked, 2)
    ranks = plans.Plan(ranks=plain.ranks, micro_batch=2, precision="fp32")
    run = Struck(asked, 2, tmp_path / "plain", plan=ranks)
    run.run()
    assert run.losses.keys() == whole.losses.keys()
    assert all(abs(run.losses[step] - loss) < 1e-5 * loss for step, loss in whole.losses.items())
    assert all(torch.allclose(run.parameters[name], one, atol=1e-5) for name, one in whole.parameters.items())


def test_a_killed_worker_changes_no_bit(corpus: Path, tmp_path: Path, whole: OnNode) -> None:
    asked = recipe(corpus)
    run = OnNode(asked, 3, tmp_path / "run", (Fault(1, STRUCK, "kill"),), plan=on_node(asked, 2)).run()
    assert same(run, whole)
    assert run.all("recovered")[0]["step"] >= STRUCK - 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_node_killed_as_it_commits_goes_on_from_a_whole_step(
    corpus: Path, tmp_path: Path, whole: OnNode, when: str
) -> None:
    asked = recipe(corpus)
    run = OnNode(asked, 3, tmp_path / "run", plan=on_node(asked, 2), killed=(STRUCK, when)).run()
    assert (tmp_path / "run" / "node-killed").exists()
    assert same(run, whole)


def test_gradients_in_int8_with_error_feedback_train_as_well(corpus: Path, tmp_path: Path, whole: OnNode) -> None:
    asked = recipe(corpus)
    exchanges = (plans.Exchange(traffic="gradients", codec="int8"),)
    run = OnNode(asked, 3, tmp_path / "run", plan=on_node(asked, 2, exchanges=exchanges)).run()
    assert run.losses != whole.losses
    assert abs(run.losses[STEPS] - whole.losses[STEPS]) < 0.02 * whole.losses[STEPS]


def test_a_codec_that_a_node_cannot_add_up_is_refused_by_name(corpus: Path) -> None:
    asked = recipe(corpus)
    exchanges = (plans.Exchange(traffic="gradients", codec="zfp:8"),)
    from espalier.shard.luwu.role import job_of

    with pytest.raises(UserError, match=r"cannot add up gradients in the codec 'zfp:8'"):
        job_of(asked, on_node(asked, 2, exchanges=exchanges), [])


def test_rounds_are_refused_by_name(corpus: Path) -> None:
    asked = recipe(corpus)
    outer = plans.Outer(replicas=((0,), (1,)), steps=4)
    with pytest.raises(UserError, match="luwu and outer_rounds cannot run together"):
        mechanisms.ordered(asked, on_node(asked, 2, outer=outer))
