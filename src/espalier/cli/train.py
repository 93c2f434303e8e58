"""`espalier train RECIPE`: probe, plan, start the ranks, train, report. The same command again resumes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import msgspec
import torch

from espalier.checkpoint import in_memory
from espalier.checkpoint.shared_memory import SharedMemory
from espalier.cli import (
    finished_run,
    printing,
    resolve_recipe,
    run_data,
    run_plan,
    run_resizer,
    run_trust,
    split_runs,
    start_run,
)
from espalier.cli.start_run import RunInputs, RunStart
from espalier.comm.rendezvous_wait import Deadline
from espalier.kernels import accelerator
from espalier.launch.launchers import detect_launcher
from espalier.launch.ranks import supervisor
from espalier.launch.ranks.supervisor import RestartOptions
from espalier.machine import cluster as clusters
from espalier.machine import probe
from espalier.plan import base as plans
from espalier.plan import checkpoint_cost
from espalier.recipe import Recipe, graphs, recipe_file, units
from espalier.recipe.errors import EspalierError, Interrupted
from espalier.recipe.terminal import say, say_progress
from espalier.track import events
from espalier.track.events import Log
from espalier.track.progress import Forgiving, Progress, trouble, waiting
from espalier.track.startup import STARTUP
from espalier.train import phases, rejoin_signal, table, worker, workload_registry
from espalier.train import rank_spec as launch
from espalier.train import run_folder as runs
from espalier.train.rank_spec import RankSpec
from espalier.train.run_folder import RunFolder
from espalier.train.workload_registry import Resolved

if TYPE_CHECKING:
    from espalier.launch.hosts.announcement import Announcement
    from espalier.plan.prediction_check import PredictionCheck

WAIT = 600.0
"""Seconds that ranks wait for the plan: the first one may still be building the token shards."""
PROBING = 300.0
"""Longest wait of one host for another while they are measured (seconds)."""


def run(arguments: argparse.Namespace) -> int:
    """Trains to the end, or to Ctrl-C (exit code 130, state saved)."""
    if graphs.has_all_splits(recipe_file.load(arguments.recipe, arguments.overrides)):
        return split_runs.run(arguments, run)
    torch.set_num_threads(1)  # ranks are forked from here; see launch.agent
    sys.stdout = cast("TextIO", Forgiving(sys.stdout))
    place = detect_launcher.place()
    if place is None or not place.rank:
        STARTUP.stages = []
        STARTUP.ended("Loading PyTorch")
    local_ranks = Ranks(lambda: (start_run.of_command(arguments), ()), fork)
    ranks = local_ranks if place is None else _launched(arguments, place)
    return carry_out(ranks, arguments.json)


# --- one way through a run, wherever its ranks are ---------------------------------------------------------------


Begun = tuple[RunStart, Sequence[int]]
"""What was decided of a run, and the host of each rank (empty: as ranks were started)."""


@dataclass(frozen=True)
class Ranks:
    """The part of this process in a run whose ranks it forks (`fork`), of which it is one (`_launched`), or of whose
    hosts it supervises one (`host_supervisor`).

    Attributes:
        begin: decides on the run (and tells the others, `announced`), or hears what was decided (`heard`).
        run: runs its ranks to their end; whether they got there, or else the first process says why not.
        first: whether it decides, and reports on the run.
    """

    begin: Callable[[], Begun]
    run: Callable[[RunStart, Sequence[int]], bool]
    first: bool = True


@dataclass(frozen=True)
class Decided:
    """What the first process tells the others.

    Attributes:
        plan, cluster: the plan and the machines, as files hold them.
        hosts: see `Begun`.
        finished: there is nothing to do.
        target: `checkpoint.target`, the folder of this run.
    """

    plan: str
    cluster: str
    hosts: tuple[int, ...]
    finished: bool
    target: str | None


def carry_out(ranks: Ranks, as_json: bool) -> int:
    """A run from what is decided of it to its report; the exit code."""
    job, hosts = ranks.begin()
    if not ranks.first:
        return _follow(ranks, job, hosts)
    try:
        if job.finished:
            finished_run.tell(job.folder.path, job.resolved.recipe.train.steps or 0, as_json)
            return 0
        try:
            ranks.run(job, hosts)
        except EspalierError as error:
            from espalier.track import report

            _ended(job, error)
            report.write(job.folder.path)
            raise
        return _finished(job, as_json)
    finally:
        job.folder.release()


def _follow(ranks: Ranks, job: RunStart, hosts: Sequence[int]) -> int:
    try:
        return 0 if job.finished or ranks.run(job, hosts) else 1
    except Interrupted as error:
        return error.exit_code  # the first says it


def announced(decide: Callable[[], Begun], others: Announcement) -> Begun:
    """What this process decides, which the others are told, or why nothing is."""
    try:
        job, hosts = decide()
    except EspalierError as error:
        others.refuse(error)
        raise
    target = job.resolved.recipe.checkpoint.target
    decided = Decided(plans.dumps(job.plan), clusters.dumps(job.cluster), tuple(hosts), job.finished, target)
    others.tell(msgspec.json.encode(decided))
    return job, hosts


def heard(opened: Callable[[], RunInputs], others: Announcement) -> Begun:
    """What another process has decided. `opened`: opens the data, then."""
    decided = msgspec.json.decode(others.hear(WAIT), type=Decided)
    inputs = opened()
    plan = plans.loads(decided.plan)
    resolved, workload = run_plan.with_batches(inputs.resolved, inputs.workload, run_plan.batches_of(plan))
    checkpoint = resolved.recipe.checkpoint.changed(target=decided.target)
    resolved = replace(resolved, recipe=resolved.recipe.changed(checkpoint=checkpoint))
    job = RunStart(
        resolved, workload, clusters.loads(decided.cluster), plan, 0,
        RunFolder(inputs.path), True, finished=decided.finished,
    )  # fmt: skip
    return job, decided.hosts


def fork(job: RunStart, hosts: Sequence[int] = ()) -> bool:
    """Ranks of this machine, phase by phase."""
    task = partial(life, forked=True)
    recipe = job.resolved.recipe
    for part in phased(job):
        if recipe.store is not None:
            part.pack()  # before ranks are forked, which then share the rows in memory
        shapes = run_resizer.RunResizer(part, task) if recipe.faults.restarts else None
        follows = part.workload.phases()[-1].stop < (recipe.train.steps or 0)
        care = replace(care_of(part), shapes=shapes, continues=follows)
        supervisor.run(task(part), launch.places(part.plan, job.folder.logs), care)
        STARTUP.stages = None  # those of the first phase alone
    return True


def _launched(arguments: argparse.Namespace, place: RankSpec) -> Ranks:
    """Ranks that torchrun or its like has started; this process is the one at `place`."""
    from espalier.launch.hosts.announcement import Announcement

    recipe = recipe_file.load(arguments.recipe, arguments.overrides)
    timeout = units.seconds(recipe.comm.timeout, "comm.timeout")
    place = seated(place, timeout)
    hosts = hosts_of(place, timeout)
    names = list(dict.fromkeys(hosts))
    resolved = _resolved(arguments, place if len(names) > 1 else None)
    measures = len(names) > 1 and resolved.recipe.plan.cluster is None
    measured = _measured(place, resolved.recipe) if measures else None

    def decide() -> Begun:
        inputs = replace(start_run.open_inputs(resolved, arguments.run, arguments.json), launched=True)
        nodes = [names.index(host) for host in hosts] if len(names) > 1 else None
        machines = partial(resolve_recipe.machines, resolved.recipe)
        job = start_run.start_run(inputs, lambda: measured or machines(), place.world, nodes)
        return replace(job, finished=False), ()  # they meet also where nothing is left to do

    def opened() -> RunInputs:
        return start_run.open_inputs(resolved, arguments.run, quiet=True, writes=False)

    run = partial(_live, place, hosts)
    if place.world == 1:
        return Ranks(decide, run)
    # What an attempt before this one was told may be in the store still.
    key = f"espalier/{place.keys}/plan"
    others = Announcement(launch.store(place, timeout), key, "Rank 0", waiter=f"Rank {place.rank}")
    if place.rank == 0:
        return Ranks(lambda: announced(decide, others), run)
    return Ranks(lambda: heard(opened, others), run, first=False)


def _resolved(arguments: argparse.Namespace, place: RankSpec | None) -> Resolved:
    """The recipe of a command line. `place`: of this rank, where others are on other hosts, which may not have the
    run's folder."""
    if place is None:
        return resolve_recipe.resolve(arguments.recipe, arguments.overrides, arguments.trust, arguments.run)
    recipe = run_trust.load(arguments.recipe, arguments.overrides, arguments.trust)
    run = None if place.rank else runs.path_of(recipe, arguments.run)
    timeout = units.seconds(recipe.comm.timeout, "comm.timeout")
    store = launch.store(place, timeout)
    deadline = Deadline(timeout, f"Rank {place.rank}")
    shared_files = run_data.shared(store, f"espalier/{place.keys}/kept", run, deadline)
    folder = Path(arguments.recipe).absolute().parent
    return workload_registry.settle(recipe, folder, waiting, shared_files, arguments.trust)


def _live(place: RankSpec, started: Sequence[str], job: RunStart, hosts: Sequence[int]) -> bool:
    """The life of this process's rank, one of those `started` on these hosts. What ends the first one is told by it:
    nobody here watches it."""
    from espalier.launch.launchers import torchrun
    from espalier.launch.ranks import rank_assignment, rank_process

    # Which rank of the plan it is: what launchers put on one machine need not follow one another.
    order = rank_assignment.numbered(started, [rank.node for rank in job.plan.ranks])
    place = replace(place, rank=order.index(place.rank))
    if place.rank == 0 and (again := torchrun.restarts()):
        what = "Ranks were lost; whoever started them has started them again."
        action = "go on from the newest checkpoint"
        events.write(job.folder.events, "incident", kind="lost", what=what, attempt=again, action=action)
    try:
        life(job)(place)
    except Exception as error:
        if place.rank and not rejoin_signal.is_loss(error):
            raise
        failure = error if isinstance(error, EspalierError) else rank_process.explained(error, place)
        if place.rank:
            raise failure from None
        if not isinstance(failure, Interrupted):
            fields = {"kind": type(failure).__name__, "what": failure.what, "why": failure.why}
            events.write(job.folder.events, "incident", **fields, action="stop")
        raise failure from error
    return True


def hosts_of(place: RankSpec, timeout: float) -> list[str]:
    """The host of each rank, as the launcher numbers them. Raises PeerLost naming those that did not come."""
    from espalier.comm import multihost_probe

    name = multihost_probe.host()
    return [name] if place.world == 1 else launch.gathered(place, "host", name, timeout)


def _measured(place: RankSpec, recipe: Recipe) -> clusters.Cluster:
    """The hosts of ranks that another launcher has started, and the links between them."""
    with worker.joined(replace(place, job=f"{place.job}-probe"), PROBING) as channel:
        return resolve_recipe.machines_of(channel, place, recipe)


def seated(place: RankSpec, timeout: float) -> RankSpec:
    """With the device it computes on, and keys of its own where agents of torchrun count attempts each for itself.
    Raises PeerLost where the others do not come within `timeout` seconds."""
    from espalier.launch.hosts import announcement
    from espalier.launch.launchers import torchrun

    device = str(accelerator.of_rank(place.local_rank))
    place = replace(place, device=device)
    return announcement.named(place, timeout) if torchrun.restarts() is not None else place


def phased(job: RunStart) -> Iterator[RunStart]:
    """The job of each phase that is left, planned once the phase before has ended."""
    resolved = job.resolved
    folder = job.folder
    whole = job.opened or job.workload
    while True:
        (phase,) = job.workload.phases()
        if len(whole.phases()) > 1:
            about = {"name": phase.name, "step": phase.start, "steps": phase.stop, "parameters": job.parameters}
            events.write(folder.events, "phase", **about)
        yield job
        if phase.stop >= (resolved.recipe.train.steps or 0):
            return
        saved = phases.checkpoints(resolved.recipe, folder)
        workload = phases.enter(resolved.recipe, whole, saved)
        plan = run_plan.choose(resolved, workload, job.cluster)
        run_plan.refuse_elsewhere(plan, None)
        folder.write(resolved.recipe, job.cluster, plan)
        parameters = resolve_recipe.parameters(resolved.recipe, workload)
        job = replace(job, workload=workload, plan=plan, parameters=parameters, new=False)


def care_of(job: RunStart) -> RestartOptions:
    """How the recipe wants its run to be looked after."""
    recipe = job.resolved.recipe
    faults = recipe.faults
    free = None if job.plan.offload == plans.RESIDENT else 0
    stays = table.recovery(recipe, job.plan)
    return RestartOptions(
        restarts=None if faults.restarts == "auto" else faults.restarts,
        heartbeat=units.seconds(faults.heartbeat, "faults.heartbeat"),
        memory=free if faults.memory == "auto" else units.size(faults.memory, "faults.memory"),
        tell=partial(_tell, job),
        stays=stays,
        expected=checkpoint_cost.first(job.plan)[1],
        salvage=partial(_salvage, job) if stays == "alike" else None,
    )


def _salvage(job: RunStart, copies: Sequence[SharedMemory]) -> None:
    """Of ranks that all hold the same, where the run ends without them."""
    with Log(job.folder.events) as log:
        saved = worker.checkpoints(job.resolved.recipe, job.folder.path, None, log.write)
        step = in_memory.salvage(copies, saved)
    if step >= 0:
        say_progress(f"The state after step {step} is saved.")


def _tell(job: RunStart, event: str, **fields: Any) -> None:
    """Into the run log, and to whoever watches."""
    entry = events.write(job.folder.events, event, **fields)
    if not job.quiet and not entry.get("action", "").startswith("stop"):  # what ends the run is its error, said once
        say_progress(trouble(entry))


# --- as one rank -------------------------------------------------------------------------------------------------


Life = Callable[[RankSpec], Any]


def life(job: RunStart, forked: bool = False, stop_after: int | None = None) -> Life:
    """What each rank of the job does. `forked`: all ranks of it come from this process, and need not compare.
    `stop_after`: raises Interrupted after so many steps."""
    worker.warm(job.plan)

    def live(place: RankSpec) -> Any:
        setting = job.setting(place)
        identity = None if forked else job.identity()
        setting.new = forked and job.new and place.attempt == 0
        setting.stop_after = stop_after
        if place.rank != 0:
            return worker.train(setting, identity)
        if place.attempt:
            STARTUP.stages = None
        with recording(job.folder, job.resolved.recipe, job.quiet, job.plan.predicted) as emit:
            return worker.train(replace(setting, emit=emit), identity)

    return live


# --- after -------------------------------------------------------------------------------------------------------


def _ended(job: RunStart, error: EspalierError | None, **fields: Any) -> float:
    """Writes how the run ended; the seconds from when it was entered."""
    reason = "interrupted" if isinstance(error, Interrupted) else "failed" if error else "finished"
    seconds = time.time() - STARTUP.entered
    entry = events.write(job.folder.events, "end", reason=reason, seconds=seconds, **fields)
    return float(entry["time"]) - STARTUP.entered


def _finished(job: RunStart, as_json: bool) -> int:
    from espalier.track import report
    from espalier.track.run_tables import RunTables

    seconds = _ended(job, None, steps=job.resolved.recipe.train.steps)
    run = RunTables.read(job.folder.path)
    page = report.write(run)
    if as_json:
        print(json.dumps({"run": str(job.folder.path), "report": str(page), **printing.results(run)}))
    else:
        printing.finished(run, page, seconds)
    sys.stdout.flush()
    return 0


def _doubt(folder: RunFolder, recipe: Recipe, ratio: float) -> None:
    """Forgets trials that promised another time than steps take, by this `ratio`: the machine was busy then, or is. So
    is a measurement of this machine forgotten that was taken while it was busy, where steps are faster."""
    from espalier.plan.prediction_check import OFF
    from espalier.plan.trials import Trials

    if 1 / OFF < ratio < OFF or not folder.cluster.exists():
        return
    Trials(recipe, clusters.read(folder.cluster)).forget()
    if ratio < 1 and recipe.plan.cluster is None:
        probe.forget_busy()


# --- the run log -----------------------------------------------------------------------------------------------------


@contextmanager
def recording(
    folder: RunFolder, recipe: Recipe, quiet: bool, predicted: plans.Predicted | None = None
) -> Iterator[Callable[..., None]]:
    """Gives what writes an event into the run log and shows it in every live view; these end with the block. After
    some steps it compares them with what is `predicted`."""
    log = Log(folder.events)
    views = list[Any]()
    checks: list[PredictionCheck] = []
    with ExitStack() as open_views:
        for name in dict.fromkeys([*["tensorboard"] * recipe.track.tensorboard, *recipe.track.to]):
            from espalier.track import trackers

            views.append(open_views.enter_context(closing(trackers.opened(name, folder.path))))

        def emit(event: str, **fields: Any) -> None:
            if event == "run":
                STARTUP.ended("Starting the ranks", None if quiet else sys.stdout)  # a rank's standard error is a log
                fields |= {"entered": STARTUP.entered, "stages": STARTUP.stages}
                STARTUP.stages = None
            entry = log.write(event, **fields)
            if event == "incident" and not (quiet or any(isinstance(view, Progress) for view in views)):
                say(trouble(entry), flush=True)
            if event == "run" and not quiet:
                progress = Progress(fields["steps"], first_step=fields["step"])
                views.append(open_views.enter_context(closing(progress)))
            for view in views:
                view.event({"event": event, **fields})
            if event == "step" and predicted is not None:
                if not checks:
                    from espalier.plan.prediction_check import PredictionCheck

                    checks.append(PredictionCheck(predicted))
                if comparison := checks[0].event(fields):
                    emit("prediction", **comparison)
                    _doubt(folder, recipe, comparison["measured"] / comparison["predicted"])

        yield emit
