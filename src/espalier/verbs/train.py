"""`espalier train RECIPE`: probe, plan, start the ranks, train, report. The same command again resumes."""

from __future__ import annotations

import argparse
import json
import platform
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from espalier import cluster as clusters
from espalier import rank, trainer
from espalier import run as runs
from espalier.config import load
from espalier.errors import EspalierError, Interrupted, UserError
from espalier.hardware import limits
from espalier.launch import base as launch
from espalier.launch import handshake, local, torchrun
from espalier.plan import base as plans
from espalier.plan.estimate import peak_flops
from espalier.track import report
from espalier.track.events import Log
from espalier.track.progress import Progress
from espalier.verbs import choose, ready, show
from espalier.workload import Workload


@dataclass(frozen=True)
class Job:
    """A run about to start: what was decided, and where it goes."""

    resolved: ready.Resolved
    workload: Workload
    cluster: clusters.Cluster
    plan: plans.Plan
    parameters: int
    folder: runs.RunFolder
    quiet: bool

    def setting(self, place: launch.Place) -> trainer.Setting:
        """What the rank at `place` needs to know."""
        recipe = self.resolved.recipe
        peak = peak_flops(self.cluster, len(self.plan.ranks), recipe.train.precision)
        return trainer.Setting(
            recipe, self.plan, self.workload, place, self.folder.path, about=_about(self), flops_per_second=peak
        )

    def identity(self) -> dict[str, str]:
        """What all ranks must have in common."""
        recipe = runs.hashed(load.to_table(self.resolved.recipe))
        return handshake.identity(recipe=recipe, data=self.workload.fingerprint())


def run(arguments: argparse.Namespace) -> int:
    """Trains to the end, or to Ctrl-C (exit code 130, state saved)."""
    torch.set_num_threads(1)  # ranks are forked from here; see launch.local
    place = torchrun.place()
    if place is not None:
        return _run_as_rank(arguments, place)
    job = _prepare(arguments)
    log = Log(job.folder.events)
    begun = time.monotonic()
    try:
        local.run(_rank(job), _places(job))
    except EspalierError as error:
        _stopped(job, log, error, time.monotonic() - begun)
        raise
    return _finished(job, log, time.monotonic() - begun, arguments.json)


# --- before ------------------------------------------------------------------------------------------------------


def _prepare(arguments: argparse.Namespace, world: int | None = None) -> Job:
    resolved = ready.resolve(arguments.recipe, arguments.overrides)
    recipe = resolved.recipe
    path = arguments.run or Path("runs") / recipe.name
    if (existing := runs.RunFolder(Path(path))).exists():
        runs.refuse_other_meaning(existing, recipe)
    workload = ready.open_workload(recipe)
    folder = runs.open_folder(path)
    cluster = ready.machines(recipe)
    plan = _resumed_plan(folder, resolved, cluster)
    if plan is None or (world is not None and len(plan.ranks) != world):
        plan = choose.choose(resolved, workload, cluster, world)
    if not arguments.json:
        show.notes(workload.notes())
        show.plan(plan, resolved.derivations)
    folder.write(recipe, cluster, plan)
    return Job(resolved, workload, cluster, plan, ready.parameters(recipe), folder, arguments.json)


def _resumed_plan(folder: runs.RunFolder, resolved: ready.Resolved, cluster: clusters.Cluster) -> plans.Plan | None:
    """The plan already in the run folder (perhaps edited), while recipe and machines still ask for the same."""
    if not folder.exists() or not folder.plan.exists() or not folder.cluster.exists():
        return None
    before, plan = folder.read()
    same_recipe = before.plan == resolved.recipe.plan and before.train.compile == resolved.recipe.train.compile
    same_machines = folder.cluster.read_text() == clusters.dumps(cluster)
    return plan if same_recipe and same_machines else None


def _about(job: Job) -> dict[str, Any]:
    """What the run's first event says of it."""
    derivations = job.resolved.derivations
    return {
        "name": job.resolved.recipe.name,
        "workload": type(job.workload).__name__.removesuffix("Workload").lower(),
        "parameters": job.parameters,
        "ranks": len(job.plan.ranks),
        "threads": job.plan.ranks[0].threads,
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__), "espalier": _version()},
        "host": {"name": socket.gethostname(), "system": platform.platform(), "processor": limits.processor()},
        "data": job.workload.fingerprint(),
        "derivations": [{"key": one.key, "value": one.value, "why": one.reason} for one in derivations],
    }


def _places(job: Job) -> list[launch.Place]:
    world = len(job.plan.ranks)
    return [
        launch.Place(
            rank=index,
            world=world,
            local_rank=index,
            role=rank.role,
            device=rank.device,
            threads=rank.threads,
            log=job.folder.logs / f"{rank.role}-{index}.log",
        )
        for index, rank in enumerate(job.plan.ranks)
    ]


# --- as one rank -------------------------------------------------------------------------------------------------


def _rank(job: Job) -> Callable[[launch.Place], Any]:
    def live(place: launch.Place) -> Any:
        setting = job.setting(place)
        if place.rank != 0:
            return rank.train(setting, job.identity())
        with Recording(job) as emit:
            return rank.train(replace(setting, emit=emit), job.identity())

    return live


class Recording:
    """Rank 0 writes the run log and feeds every live view from the same events."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.log = Log(job.folder.events)
        self.views: list[Any] = []

    def __enter__(self) -> Callable[..., None]:
        recipe = self.job.resolved.recipe
        if recipe.track.tensorboard:
            from espalier.track.tensorboard import TensorBoard

            self.views.append(TensorBoard(self.job.folder.path / "tensorboard"))

        def emit(event: str, **fields: Any) -> None:
            self.log.write(event, **fields)
            if event == "run" and not self.job.quiet:
                self.views.append(Progress(fields["steps"], first_step=fields["step"]))
            for view in self.views:
                view.event({"event": event, **fields})

        return emit

    def __exit__(self, *error: object) -> None:
        for view in self.views:
            view.close()


def _run_as_rank(arguments: argparse.Namespace, place: launch.Place) -> int:
    """Under torchrun and its like: rank 0 decides, the others take its plan from the store."""
    timeout = 600.0  # the first rank may still be building the token shards
    store = launch.store(place, timeout)
    device = f"cuda:{place.local_rank}" if torch.cuda.is_available() else "cpu"
    place = replace(place, device=device)
    if place.rank == 0:
        try:
            job = _prepare(arguments, world=place.world)
        except EspalierError as error:
            store.set("espalier/plan", b"!" + str(error.what).encode())
            raise
        store.set("espalier/plan", plans.dumps(job.plan))
        begun = time.monotonic()
        _rank(job)(place)
        return _finished(job, Log(job.folder.events), time.monotonic() - begun, arguments.json)
    text = store.get("espalier/plan")
    if text.startswith(b"!"):
        raise UserError(f"Rank 0 could not start: {text[1:].decode()}")
    resolved = ready.resolve(arguments.recipe, arguments.overrides)
    workload = ready.open_workload(resolved.recipe)
    folder = runs.RunFolder(Path(arguments.run or Path("runs") / resolved.recipe.name))
    job = Job(resolved, workload, ready.machines(resolved.recipe), plans.loads(text), 0, folder, True)
    rank.train(job.setting(place), job.identity())
    return 0


# --- after -------------------------------------------------------------------------------------------------------


def _stopped(job: Job, log: Log, error: EspalierError, seconds: float) -> None:
    if not isinstance(error, Interrupted):
        log.write("incident", kind=type(error).__name__, what=error.what, why=error.why, action="stop")
    log.write("end", reason="interrupted" if isinstance(error, Interrupted) else "failed", seconds=seconds)
    report.write(job.folder.path)


def _finished(job: Job, log: Log, seconds: float, as_json: bool) -> int:
    log.write("end", reason="finished", seconds=seconds, steps=job.resolved.recipe.train.steps)
    page = report.write(job.folder.path)
    if as_json:
        print(json.dumps({"run": str(job.folder.path), "report": str(page), **show.results(job.folder.path)}))
    else:
        show.finished(job.folder.path, page, seconds)
    sys.stdout.flush()
    return 0


def _version() -> str:
    from importlib.metadata import version

    return version("espalier")
