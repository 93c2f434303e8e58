"""Small supervised runs that something happens to: what the kill matrix and its neighbours start."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from espalier.checkpoint.storage import Folder
from espalier.language.workload import open_language
from espalier.launch.ranks import supervisor as supervise
from espalier.launch.ranks.resize import RunShape
from espalier.plan import base as plans
from espalier.recipe import Recipe, defaults, recipe_file
from espalier.track.events import Log
from espalier.train import rank_spec as launch
from espalier.train import trainer, worker
from espalier.train.rank_setup import RankSetup
from many_ranks.faults import Fault, strike

STEPS, EVERY = 8, 3
PHASES = ("clean", "publish", "commit", "committed")


def write_corpus(folder: Path) -> Path:
    folder.mkdir()
    for number in range(12):
        text = "".join(f"def f{i * number}(x):\n    return x * {i} + {number}\n" for i in range(60))
        (folder / f"{number}.py").write_text(text)
    return folder


def recipe_of(corpus: Path, **tables: dict[str, Any]) -> Recipe:
    table: dict[str, Any] = {
        "model": {"depth": 1, "width": 32, "heads": 2, "feed_forward": 64},
        "data": {"path": str(corpus), "cache": str(corpus.parent / "cache"), "validation": 0.2},
        "train": {"steps": STEPS, "sequence": 32, "batch_tokens": 256, "validate_tokens": 512, "validate_every": 4},
        "checkpoint": {"every": EVERY},
    }
    for name, values in tables.items():
        table[name] = {**table.get(name, {}), **values}
    return defaults.resolve(recipe_file.from_table(table))[0]


def plan_of(recipe: Recipe, ranks: int) -> plans.Plan:
    samples = (recipe.train.batch_tokens or 0) // (recipe.train.sequence or 1)
    cuts = [samples * one // ranks for one in range(ranks + 1)]
    return plans.Plan(ranks=tuple(plans.Rank(share=(cuts[one], cuts[one + 1])) for one in range(ranks)), micro_batch=2)


@dataclass
class Struck:
    """One run in `folder`: what is to happen, and what is known afterwards."""

    recipe: Recipe
    world: int
    folder: Path
    faults: tuple[Fault, ...] = ()
    phase: tuple[int, str] | None = None
    """Rank and phase of the first checkpoint's writing in which that rank is killed."""
    orphans: bool = False
    """The fault's rank kills the supervisor instead."""
    asleep: tuple[int, str] | None = None
    """Rank and method of the workload whose first call sleeps for ever in that rank."""
    heartbeat: float = 0.4
    timeout: float = 30.0
    """Seconds, as `comm.timeout`."""
    restarts: int | None = None
    memory: int = 0
    plan: plans.Plan | None = None
    dead: tuple[int, int] | None = None
    """A seat, and a step that its rank never outlives (once what was saved before is). The run goes on without it."""
    stop_after: int | None = None
    stays: Literal["", "alike", "rounds"] = ""
    """Ranks that are left stay."""
    validating: bool = False
    """The faults happen while the state after their step is validated."""
    inside: tuple[type, str] | None = None
    """A class and its method: the faults happen where that is called, not where the loss is."""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)

    def run(self) -> Struck:
        """Trains to the end under a supervisor."""
        plan = self.plan or plan_of(self.recipe, self.world)
        self.folder.mkdir(exist_ok=True)
        places = launch.places(plan, self.folder / "logs")
        self.parameters = supervise.run(self.life(plan), places, self.care)[0]
        return self

    @property
    def care(self) -> supervise.RestartOptions:
        """How it is looked after."""
        plan = self.plan or plan_of(self.recipe, self.world)
        tell = Log(self.folder / "events.jsonl").write
        fewer = None if self.dead is None else Fewer(self, plan)
        return supervise.RestartOptions(self.restarts, self.heartbeat, self.memory, tell, fewer, self.stays)

    def life(self, plan: plans.Plan) -> launch.Entrypoint:
        """What each rank of `plan` does."""
        workload = open_language(self.recipe)

        def life(place: launch.RankSpec) -> Any:
            (self.folder / f"pid-{place.rank}").write_text(str(os.getpid()))
            with (self.folder / f"lives-{place.rank}").open("a") as lives:
                lives.write(f"{os.getpid()}\n")
            log = Log(self.folder / "events.jsonl") if place.rank == 0 else None
            self._arm(workload, place)
            emit = log.write if log else _mute
            setting = RankSetup(self.recipe, plan, workload, place, self.folder, emit, self.stop_after)
            with worker.joined(place, self.timeout) as channel:
                one = trainer.Trainer(setting, channel)
                self.trainer = one
                worker.live(one)
                one.built.sharding.summon()
                return {name: value.clone() for name, value in one.built.model.state_dict().items()}

        return life

    def _arm(self, workload: Any, place: launch.RankSpec) -> None:
        """Sets the faults in this rank, in the forward pass of their step."""
        plain, supervisor = workload.loss, os.getppid()

        def loss(model: Any, batch: Any) -> Any:
            if model.training:
                step = self.trainer.step + 1
                if self.orphans and any((one.rank, one.step) == (place.rank, step) for one in self.faults):
                    os.kill(supervisor, signal.SIGKILL)
                    time.sleep(30)  # what ends a rank without supervisor comes now: it ends no step before
                elif not (self.orphans or self.validating or self.inside):
                    strike(self.faults, place.rank, step, self.folder)
                if self.dead is not None and place.seat == self.dead[0] and step >= self.dead[1]:
                    until = time.monotonic() + 30
                    while not Folder(self.folder / "checkpoints").names() and time.monotonic() < until:
                        time.sleep(0.02)  # what was saved before this step is whole
                    time.sleep(0.3)
                    os.kill(os.getpid(), signal.SIGKILL)
            return plain(model, batch)

        workload.loss = loss
        if self.inside is not None:
            self._arm_inside(*self.inside, place)
        self._arm_validation(workload, place)
        if self.asleep is not None and self.asleep[0] == place.rank:
            _sleep_in(workload, self.asleep[1], self.folder / "slept")
        if self.phase is not None and self.phase[0] == place.rank:
            _kill_in(self.phase[1], self.folder / "killed-in-save")

    def _arm_inside(self, owner: type, name: str, place: launch.RankSpec) -> None:
        plain = getattr(owner, name)

        def struck(*arguments: Any, **options: Any) -> Any:
            if self.trainer.built.model.training:
                strike(self.faults, place.rank, self.trainer.step + 1, self.folder)
            return plain(*arguments, **options)

        setattr(owner, name, struck)

    def _arm_validation(self, workload: Any, place: launch.RankSpec) -> None:
        evaluate = workload.evaluate

        def evaluating(*arguments: Any) -> Any:
            if self.validating:
                strike(self.faults, place.rank, self.trainer.step, self.folder)
            return evaluate(*arguments)

        workload.evaluate = evaluating

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def losses(self) -> dict[int, float]:
        """By step; what was done again counts."""
        return {event["step"]: event["loss"] for event in self.all("step")}

    @property
    def validated(self) -> dict[int, float]:
        """Held-out losses by step; what was done again counts."""
        return {event["step"]: event["loss"] for event in self.all("validation")}


class Fewer:
    """`Shapes` of a struck run: equal shares on the ranks that are left."""

    planned_wait = None
    planned_work = ()
    plan = ""

    def __init__(self, run: Struck, plan: plans.Plan) -> None:
        self.run, self.current = run, plan
        self.steps = run.recipe.train.steps or 0

    def without(self, ranks: Collection[int]) -> RunShape:
        kept = tuple(rank for rank in range(len(self.current.ranks)) if rank not in ranks)
        plan = plan_of(self.run.recipe, len(kept))
        places = launch.places(plan, self.run.folder / "logs")
        return RunShape(self.run.life(plan), places, kept, True, 1.5, str(len(kept)), f"{len(kept)} ranks")

    def adopt(self, shape: RunShape) -> None:
        self.current = plan_of(self.run.recipe, len(shape.places))


def _mute(event: str, **fields: Any) -> None:
    """Other ranks than the first."""


def _sleep_in(workload: Any, name: str, marker: Path) -> None:
    plain = getattr(workload, name)

    def sleeping(*arguments: Any) -> Any:
        if not marker.exists():
            marker.touch()
            time.sleep(3600)
        return plain(*arguments)

    setattr(workload, name, sleeping)


def _kill_in(phase: str, marker: Path) -> None:
    name = "commit" if phase == "committed" else phase
    plain = getattr(Folder, name)

    def struck(self: Folder, *arguments: Any) -> Any:
        result = plain(self, *arguments) if phase == "committed" else None
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result if phase == "committed" else plain(self, *arguments)

    setattr(Folder, name, struck)


def same(one: Struck, other: Struck) -> bool:
    """Whether parameters and losses are the same, bit for bit."""
    names = one.parameters.keys() == other.parameters.keys()
    return (
        names
        and one.losses == other.losses
        and all(torch.equal(one.parameters[name], other.parameters[name]) for name in one.parameters)
    )
