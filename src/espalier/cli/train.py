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

from espalier import recipe as config
from espalier.checkpoint.storage import open_place
from espalier.cli import prepare as ready
from espalier.cli import printing, run_data, run_plan, run_resizer, run_trust
from espalier.cli.run_start import RunStart, owner_of
from espalier.comm.rendezvous_wait import Deadline
from espalier.kernels import accelerator
from espalier.launch.launchers import detect_launcher
from espalier.launch.ranks import supervisor
from espalier.machine import cluster as clusters
from espalier.machine import probe
from espalier.parallel.workload import Workload
from espalier.plan import base as plans
from espalier.plan import checkpoint_cost
from espalier.plan.request import AUTO
from espalier.recipe import Constant, Recipe, graphs, model_kinds, recipe_file, units
from espalier.recipe.base import Derivation
from espalier.recipe.errors import EspalierError, Interrupted
from espalier.recipe.graphs import Batches
from espalier.recipe.terminal import line, say
from espalier.track.events import Log
from espalier.track.progress import Forgiving, Progress, trouble
from espalier.train import phases, rejoin_signal, table, worker, workload_registry
from espalier.train import rank_spec as launch
from espalier.train import run_folder as runs
from espalier.train.run_folder import RunFolder
from espalier.train.workload_row import Freezes

if TYPE_CHECKING:
    from espalier.launch.hosts.announcement import Announcement
    from espalier.plan.prediction_check import PredictionCheck

WAIT = 600.0
"""Seconds that ranks wait for the plan: the first one may still be building the token shards."""
PROBING = 300.0
"""Longest wait of one host for another while they are measured (seconds)."""


def run(arguments: argparse.Namespace) -> int:
    """Trains to the end, or to Ctrl-C (exit code 130, state saved)."""
    torch.set_num_threads(1)  # ranks are forked from here; see launch.agent
    sys.stdout = cast("TextIO", Forgiving(sys.stdout))
    place = detect_launcher.place()
    ranks = forked(lambda: prepared(arguments)) if place is None else _launched(arguments, place)
    return carry_out(ranks, arguments.json)


# --- one way through a run, wherever its ranks are ---------------------------------------------------------------


Begun = tuple[RunStart, Sequence[int]]
"""What was decided of a run, and the host of each rank (empty: as ranks were started)."""


@dataclass(frozen=True)
class Ranks:
    """The part of this process in a run whose ranks it forks (`forked`), of which it is one (`_launched`), or of whose
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
    """

    plan: str
    cluster: str
    hosts: tuple[int, ...]
    finished: bool


def carry_out(ranks: Ranks, as_json: bool) -> int:
    """A run from what is decided of it to its report; the exit code."""
    job, hosts = ranks.begin()
    if not ranks.first:
        return _follow(ranks, job, hosts)
    try:
        if job.finished:
            return _nothing_to_do(job, as_json)
        begun = time.monotonic()
        try:
            ranks.run(job, hosts)
        except EspalierError as error:
            _ended(job, Log(job.folder.events), error, time.monotonic() - begun)
            raise
        return _finished(job, Log(job.folder.events), time.monotonic() - begun, as_json)
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
    decided = Decided(plans.dumps(job.plan), clusters.dumps(job.cluster), tuple(hosts), job.finished)
    others.tell(msgspec.json.encode(decided))
    return job, hosts


def heard(opened: Callable[[], OpenedRun], others: Announcement) -> Begun:
    """What another process has decided. `opened`: opens the data, then."""
    decided = msgspec.json.decode(others.hear(WAIT), type=Decided)
    given, plan = opened(), plans.loads(decided.plan)
    resolved, workload = run_plan.with_batches(given.resolved, given.workload, ready.batches_of(plan))
    job = RunStart(
        resolved, workload, clusters.loads(decided.cluster), plan, 0,
        RunFolder(given.path), True, finished=decided.finished,
    )  # fmt: skip
    return job, decided.hosts


def forked(prepare: Callable[[], RunStart]) -> Ranks:
    """Ranks of this machine, phase by phase. `prepare`: plans the run."""
    return Ranks(lambda: (prepare(), ()), _fork)


def _fork(job: RunStart, hosts: Sequence[int]) -> bool:
    task, recipe = partial(life, forked=True), job.resolved.recipe
    for part in phased(job):
        if recipe.store is not None:
            part.pack()  # before ranks are forked, which then share the rows in memory
        shapes = run_resizer.RunResizer(part, task) if recipe.faults.restarts else None
        follows = part.workload.phases()[-1].stop < (recipe.train.steps or 0)
        care = replace(care_of(part), shapes=shapes, continues=follows)
        supervisor.run(task(part), launch.places(part.plan, job.folder.logs), care)
    return True


def _launched(arguments: argparse.Namespace, place: launch.RankSpec) -> Ranks:
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
        given = replace(asked(resolved, arguments.run, arguments.json), launched=True)
        nodes = [names.index(host) for host in hosts] if len(names) > 1 else None
        job = decided(given, lambda: measured or ready.machines(resolved.recipe), place.world, nodes)
        return replace(job, finished=False), ()  # they meet also where nothing is left to do

    def opened() -> OpenedRun:
        return joining(resolved, arguments.run)

    run = partial(_live, place, hosts)
    if place.world == 1:
        return Ranks(decide, run)
    # What an attempt before this one was told may be in the store still.
    key = f"espalier/{place.keys}/plan"
    others = Announcement(launch.store(place, timeout), key, "Rank 0", waiter=f"Rank {place.rank}")
    if place.rank == 0:
        return Ranks(lambda: announced(decide, others), run)
    return Ranks(lambda: heard(opened, others), run, first=False)


def _resolved(arguments: argparse.Namespace, place: launch.RankSpec | None) -> ready.Resolved:
    """The recipe of a command line. `place`: of this rank, where others are on other hosts, which may not have the
    run's folder."""
    if place is None:
        return ready.resolve(arguments.recipe, arguments.overrides, arguments.trust, arguments.run)
    recipe = run_trust.load(arguments.recipe, arguments.overrides, arguments.trust)
    run = None if place.rank else runs.path_of(recipe, arguments.run)
    timeout = units.seconds(recipe.comm.timeout, "comm.timeout")
    store, deadline = launch.store(place, timeout), Deadline(timeout, f"Rank {place.rank}")
    shared_files = run_data.shared(store, f"espalier/{place.keys}/kept", run, deadline)
    folder = Path(arguments.recipe).absolute().parent
    return workload_registry.settle(recipe, folder, ready.waiting, shared_files, arguments.trust)


def _live(place: launch.RankSpec, started: Sequence[str], job: RunStart, hosts: Sequence[int]) -> bool:
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
        Log(job.folder.events).write("incident", kind="lost", what=what, attempt=again, action=action)
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
            Log(job.folder.events).write("incident", **fields, action="stop")
        raise failure from error
    return True


def hosts_of(place: launch.RankSpec, timeout: float) -> list[str]:
    """The host of each rank, as the launcher numbers them. Raises PeerLost naming those that did not come."""
    from espalier.comm import multihost_probe

    name = multihost_probe.host()
    return [name] if place.world == 1 else launch.gathered(place, "host", name, timeout)


def _measured(place: launch.RankSpec, recipe: Recipe) -> clusters.Cluster:
    """The hosts of ranks that another launcher has started, and the links between them."""
    with worker.joined(replace(place, job=f"{place.job}-probe"), PROBING) as channel:
        return ready.machines_of(channel, place, recipe)


def seated(place: launch.RankSpec, timeout: float) -> launch.RankSpec:
    """With the device it computes on, and keys of its own where agents of torchrun count attempts each for itself.
    Raises PeerLost where the others do not come within `timeout` seconds."""
    from espalier.launch.hosts import announcement
    from espalier.launch.launchers import torchrun

    device = str(accelerator.of_rank(place.local_rank))
    place = replace(place, device=device)
    return announcement.named(place, timeout) if torchrun.restarts() is not None else place


def phased(job: RunStart) -> Iterator[RunStart]:
    """The job of each phase that is left, planned once the phase before has ended."""
    resolved, folder, whole = job.resolved, job.folder, job.opened or job.workload
    while True:
        (phase,) = job.workload.phases()
        if len(whole.phases()) > 1:
            with Log(folder.events) as log:
                log.write("phase", name=phase.name, step=phase.start, steps=phase.stop, parameters=job.parameters)
        yield job
        if phase.stop >= (resolved.recipe.train.steps or 0):
            return
        saved = phases.checkpoints(resolved.recipe, folder)
        workload = phases.enter(resolved.recipe, whole, saved)
        plan = run_plan.choose(resolved, workload, job.cluster)
        run_plan.refuse_elsewhere(plan, None)
        folder.write(resolved.recipe, job.cluster, plan)
        parameters = ready.parameters(resolved.recipe, workload)
        job = replace(job, workload=workload, plan=plan, parameters=parameters, new=False)


def care_of(job: RunStart) -> supervisor.RestartOptions:
    """How the recipe wants its run to be looked after."""
    recipe = job.resolved.recipe
    faults, free = recipe.faults, None if job.plan.offload == plans.RESIDENT else 0
    return supervisor.RestartOptions(
        restarts=None if faults.restarts == "auto" else faults.restarts,
        heartbeat=units.seconds(faults.heartbeat, "faults.heartbeat"),
        memory=free if faults.memory == "auto" else units.size(faults.memory, "faults.memory"),
        tell=partial(_tell, job),
        stays=table.recovery(recipe, job.plan),
    )


def _tell(job: RunStart, event: str, **fields: Any) -> None:
    """Into the run log, and to whoever watches. Opened each time: a rank killed while writing may have torn a line."""
    with Log(job.folder.events) as log:
        entry = log.write(event, **fields)
    if not job.quiet and not entry.get("action", "").startswith("stop"):  # what ends the run is its error, said once
        say(trouble(entry), file=sys.stderr, flush=True)


# --- before ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenedRun:
    """A recipe whose data is open, and where its run is to go; nothing is decided or written yet."""

    resolved: ready.Resolved
    workload: Workload
    path: Path
    before: config.Recipe | None
    """The recipe of the run that is taken up again."""
    quiet: bool
    launched: bool = False
    """Another launcher has started the ranks, which all train."""
    batches: Batches | None = None
    """What its steps train on, where the recipe leaves that open and the run has begun."""


def asked(resolved: ready.Resolved, run: str | None, quiet: bool) -> OpenedRun:
    """Opens the data of a recipe. Raises UserError when the run's folder holds another run."""
    recipe = resolved.recipe
    path = runs.path_of(recipe, run)
    before = None
    runs.refuse_links(path)
    batches = None
    if (existing := runs.RunFolder(path)).exists():
        if graphs.is_open(recipe) and existing.plan.exists():
            batches = ready.batches_of(plans.read(existing.plan))
        runs.refuse_other_meaning(existing, recipe if batches is None else graphs.with_batches(recipe, batches))
        before = existing.read()
    return OpenedRun(resolved, ready.open_workload(resolved), path, before, quiet, batches=batches)


def joining(resolved: ready.Resolved, run: str | None) -> OpenedRun:
    """Opens the data of a recipe on a rank that writes nothing."""
    path = runs.path_of(resolved.recipe, run)
    return OpenedRun(resolved, ready.open_workload(resolved), path, None, True)


def prepared(arguments: argparse.Namespace, world: int | None = None) -> RunStart:
    """The run of a command line, planned. `world`: ranks that there are already."""
    resolved = ready.resolve(arguments.recipe, arguments.overrides, arguments.trust, arguments.run)
    return decided(asked(resolved, arguments.run, arguments.json), lambda: ready.machines(resolved.recipe), world)


def decided(
    given: OpenedRun,
    machines: Callable[[], clusters.Cluster],
    world: int | None = None,
    nodes: Sequence[int] | None = None,
) -> RunStart:
    """Plans the run and opens its folder. `nodes`: the machine that each rank is on already."""
    recipe = given.resolved.recipe
    open_place(recipe.checkpoint.target or given.path)  # an unknown scheme is refused before anything is written
    cluster = machines()
    folder = runs.open_folder(given.path)
    try:
        saved = phases.checkpoints(recipe, folder)
        owner = owner_of(folder, recipe, given.workload.fingerprint(), saved)
        saved.run = owner.identity
        data = run_data.data_of(folder, recipe, given.workload)
        chosen, why = given.batches, ""
        if chosen is None and graphs.is_open(recipe):
            choose = partial(run_plan.choose, cluster=cluster, world=world)
            trials = partial(run_plan.trials_of, cluster=cluster, world=world)
            chosen, why = run_plan.batches(given.resolved, given.workload, choose, trials)
        resolved, workload = run_plan.with_batches(given.resolved, given.workload, chosen)
        given, recipe = replace(given, workload=workload), resolved.recipe
        workload = run_plan.entered(workload, recipe, saved, world)
        plan = run_plan.planned(folder, resolved, workload, cluster, world)
        plan = run_plan.with_chosen(plan, chosen, why)
        if given.launched:
            run_plan.refuse_roles(plan)
        if nodes is not None:
            plan = run_plan.on_hosts(nodes, plan, cluster)
        checkpoint_cost.refuse_full(plan, recipe.checkpoint, folder.checkpoints)
        entries = saved.entries()
        finished = bool(entries) and not entries[-1].why and entries[-1].step >= (recipe.train.steps or 0)
        begins = not finished or given.before is None
        if begins:
            owner.keep(folder, recipe)
    except BaseException:
        folder.discard_if_empty()
        folder.release()
        raise
    if recipe.train.precision == AUTO:
        by_plan = Derivation("train.precision", plan.precision, ready.PRECISION)
        resolved = replace(resolved, derivations=[*resolved.derivations, by_plan])
    if begins:
        row = workload_registry.row(recipe)
        freeze = partial(row.freeze, given.workload) if isinstance(row, Freezes) else None
        data.keep(folder, freeze, workload.notes())
        folder.write(recipe, cluster, plan)
        if not given.quiet:
            stretched = _stretched(given.before, recipe) if given.before else []
            for note in [*owner.notes, *workload.notes(), *data.notes, *stretched]:
                line(f"note: {note}")
            printing.plan(plan, resolved.derivations, recipe.train.steps, model_kinds.of(recipe.model).unit)
    parameters = ready.parameters(recipe, workload)
    new = given.before is None and not entries
    return RunStart(resolved, workload, cluster, plan, parameters, folder, given.quiet, given.workload, new, finished)


def _stretched(before: config.Recipe, recipe: config.Recipe) -> list[str]:
    """Says what growing the steps of a run does to its learning rate."""
    if before.train.steps == recipe.train.steps or isinstance(recipe.train.schedule, Constant):
        return []
    return [
        f"the schedule is stretched from {before.train.steps} to {recipe.train.steps} steps, so the learning rate "
        'rises again before it falls; train.schedule.kind = "constant" extends smoothly'
    ]


# --- as one rank -------------------------------------------------------------------------------------------------


Life = Callable[[launch.RankSpec], Any]


def life(job: RunStart, forked: bool = False, stop_after: int | None = None) -> Life:
    """What each rank of the job does. `forked`: all ranks of it come from this process, and need not compare.
    `stop_after`: raises Interrupted after so many steps."""

    def live(place: launch.RankSpec) -> Any:
        setting, identity = job.setting(place), None if forked else job.identity()
        setting.new = forked and job.new and place.attempt == 0
        setting.stop_after = stop_after
        if place.rank != 0:
            return worker.train(setting, identity)
        with recording(job.folder, job.resolved.recipe, job.quiet, job.plan.predicted) as emit:
            return worker.train(replace(setting, emit=emit), identity)

    return live


# --- after -------------------------------------------------------------------------------------------------------


def _nothing_to_do(job: RunStart, as_json: bool) -> int:
    steps = job.resolved.recipe.train.steps or 0
    if as_json:
        print(json.dumps({"run": str(job.folder.path), "finished": True, **printing.results(job.folder.path)}))
    else:
        say(f"{job.folder.path} is finished ({steps} of {steps} steps). To train further: train.steps={2 * steps}")
    return 0


def _ended(job: RunStart, log: Log, error: EspalierError, seconds: float) -> None:
    from espalier.track import report

    log.write("end", reason="interrupted" if isinstance(error, Interrupted) else "failed", seconds=seconds)
    report.write(job.folder.path)


def _finished(job: RunStart, log: Log, seconds: float, as_json: bool) -> int:
    from espalier.track import report

    log.write("end", reason="finished", seconds=seconds, steps=job.resolved.recipe.train.steps)
    page = report.write(job.folder.path)
    if as_json:
        print(json.dumps({"run": str(job.folder.path), "report": str(page), **printing.results(job.folder.path)}))
    else:
        printing.finished(job.folder.path, page, seconds)
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
    log, views = Log(folder.events), list[Any]()
    checks: list[PredictionCheck] = []
    with ExitStack() as open_views:
        for name in dict.fromkeys([*["tensorboard"] * recipe.track.tensorboard, *recipe.track.to]):
            from espalier.track import trackers

            views.append(open_views.enter_context(closing(trackers.opened(name, folder.path))))

        def emit(event: str, **fields: Any) -> None:
            log.write(event, **fields)
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
