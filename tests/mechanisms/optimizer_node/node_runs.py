"""Supervised runs of workers on an optimizer node that something happens to."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from struck import Fewer, Struck, plan_of, recipe_of

from espalier.language.workload import open_language
from espalier.launch.ranks import supervisor
from espalier.launch.ranks.resize import RunShape
from espalier.machine import cluster as clusters
from espalier.plan import base as plans
from espalier.plan import replan
from espalier.recipe import Recipe
from espalier.store.generations import Generations
from espalier.track.events import Log
from espalier.train import rank_spec as launch
from espalier.train import request_from_recipe, trainer, worker
from espalier.train.rank_setup import RankSetup

STEPS, STRUCK = 10, 6
MACHINE = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"'


def recipe(corpus: Path, **tables: Any) -> Recipe:
    train = {"steps": STEPS, "optimizer": {"kind": "adamw", "learning_rate": 0.002}} | tables.pop("train", {})
    return recipe_of(corpus, train=train, checkpoint={"every": 4}, **tables)


def on_node(recipe: Recipe, workers: int, *helpers: str, **more: Any) -> plans.Plan:
    served = tuple(plans.Rank(role=role) for role in ("optimizer", *helpers))
    ranks = (*plan_of(recipe, workers).ranks, *served)
    return plans.Plan(ranks=ranks, micro_batch=2, precision="fp32", **more)


class FewerOnNode(Fewer):
    """See there: workers of the node share the batch anew."""

    def without(self, ranks: Collection[int]) -> RunShape:
        kept = tuple(rank for rank in range(len(self.current.ranks)) if rank not in ranks)
        asked, machine = request_from_recipe.of_recipe(self.run.recipe), clusters.loads(MACHINE)
        self.made = replan.plan_on(asked, machine, self.current, kept, replan.equal(self.current))
        places = launch.places(self.made, self.run.folder / "logs")
        return RunShape(self.run.life(self.made), places, kept, True, 1.5, str(len(kept)), f"{len(kept)} ranks")

    def adopt(self, shape: RunShape) -> None:
        self.current = self.made


@dataclass
class OnNode(Struck):
    """`killed`: the node dies as it commits that step, or has: "before", "after". `arm`: is called in its process,
    `arm_worker` in those of the workers."""

    killed: tuple[int, str] | None = None
    arm: Callable[[launch.RankSpec], None] | None = None
    arm_worker: Callable[[launch.RankSpec], None] | None = None

    @property
    def care(self) -> supervisor.RestartOptions:
        fewer = None if self.dead is None else FewerOnNode(self, self.plan or on_node(self.recipe, self.world - 1))
        return replace(super().care, shapes=fewer)

    def life(self, plan: plans.Plan) -> launch.Entrypoint:
        workload = open_language(self.recipe)

        def life(place: launch.RankSpec) -> Any:
            if self.arm_worker is not None and place.role == "trainer":
                self.arm_worker(place)
            log = Log(self.folder / "events.jsonl") if place.rank == 0 else None
            emit = log.write if log else lambda event, **fields: None
            setting = RankSetup(self.recipe, plan, workload, place, self.folder, emit, self.stop_after)
            with worker.joined(place, self.timeout) as channel:
                if place.role != "trainer":
                    self._arm_node()
                    if self.arm is not None:
                        self.arm(place)
                    return worker.as_optimizer(setting, channel)
                self._arm(workload, place)
                self.trainer = one = trainer.Trainer(setting, channel)
                with one.built.closing():
                    worker.live(one)
                    one.built.sharding.detach()
                    return {name: value.clone() for name, value in one.built.model.state_dict().items()}

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
