"""`espalier train --hosts` and `espalier probe --hosts`: the same verbs on hosts that the user names. Loads no torch
here: the work is done on the hosts (`cli.host_worker`), this process starts them, hears them and ends them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from espalier.cli import run_trust
from espalier.launch.hosts import host_errors, hosts
from espalier.launch.hosts.host_rejoin import Returning
from espalier.launch.hosts.hosts import Host
from espalier.launch.hosts.remote_process import Far
from espalier.launch.hosts.ssh import Crowd
from espalier.launch.launchers import torchrun
from espalier.machine import cluster as clusters
from espalier.recipe import Recipe, mechanism_options, recipe_file, units, value_ranges
from espalier.recipe.errors import EspalierError, PeerLost, RunFailed, UserError
from espalier.recipe.terminal import say, say_progress
from espalier.track.events import logged
from espalier.track.progress import Forgiving, trouble
from espalier.track.startup import STARTUP
from espalier.train.failure import Failure, RestartBudget
from espalier.train.run_folder import path_of

MODULE = "espalier.cli.host_worker"
LOG = "hosts.log"
EVENTS = "events.jsonl"
AGAIN_SECONDS = 2.0
"""Between two starts of all supervisors, where a host does not answer yet."""


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb on the hosts."""
    sys.stdout = cast("TextIO", Forgiving(sys.stdout))
    if torchrun.place() is not None:
        raise UserError(
            "--hosts was given, and RANK and WORLD_SIZE are set.",
            why="either a launcher such as torchrun has started this rank, or --hosts starts the ranks",
            do="leave --hosts out under torchrun, or unset RANK and WORLD_SIZE",
        )
    named = hosts.parse(arguments.hosts)
    return _train(arguments, named) if arguments.verb == "train" else _probe(arguments, named)


def _train(arguments: argparse.Namespace, named: Sequence[Host]) -> int:
    recipe = run_trust.load(arguments.recipe, arguments.overrides, arguments.trust)
    value_ranges.check(recipe)
    chosen, leads = hosts.here_first(named)
    folder = path_of(recipe, arguments.run)
    message = {
        "is": "task",
        "task": "train",
        "recipe": mechanism_options.to_builtins(recipe),  # with what is None, which is not always the default
        "origin": str(arguments.recipe),
        "beside": str(Path(arguments.recipe).absolute().parent),
        "folder": os.getcwd(),
        "absolute": folder.is_absolute(),
        "run": str(folder),
        "quiet": arguments.json,
        "trust": arguments.trust,
        "entered": STARTUP.entered,
    }
    if not leads:
        log = folder / "logs" / LOG
        _say([f"The run is kept on host {chosen[0].name}: {folder.absolute()}. What all ranks write is in {log}."])
    budget = RestartBudget(None if recipe.faults.restarts == "auto" else recipe.faults.restarts)
    lost: EspalierError | None = None
    while isinstance(outcome := _attempt(recipe, chosen, message, lost), EspalierError):
        lost = outcome
        decision = budget.decide(_failure(outcome, folder / EVENTS))
        if not decision.restart:
            raise decision.last(outcome)
        again = decision.action("start supervisors and ranks again on all hosts")
        _say([trouble({"what": outcome.what, "action": again})])
        time.sleep(decision.wait)
    return outcome


def _attempt(
    recipe: Recipe, chosen: Sequence[Host], message: dict[str, Any], lost: EspalierError | None
) -> int | EspalierError:
    """Starts a supervisor on each host, which keeps its ranks alive, and waits for their end: the exit code, or why
    others may do better. Processes, store and addresses are new each time. A host other than the first is brought back
    while the others wait. `lost`: what ended the attempt before. Raises what the supervisors came to."""
    log = Path(message["run"]) / "logs" / LOG
    timeout = units.seconds(recipe.comm.timeout, "comm.timeout")
    with Crowd(recipe.launch, MODULE, _show, timeout) as crowd:
        if recipe.faults.restarts:
            crowd.returning = Returning(crowd, timeout, _say)
        _meet(crowd, chosen, message, lost)
        crowd.log_to(log)
        try:
            done = crowd.carry_out()
        except RunFailed as error:
            vanished = crowd.vanished
            shown = vanished or error
            why = f"{shown.why}; " if shown.why else ""
            shown_error = type(shown)(shown.what, why=f"{why}what all hosts wrote is in {log}", do=shown.do)
            if vanished is not None:
                return shown_error
            raise shown_error from None
    return int(done["code"])


def _meet(crowd: Crowd, chosen: Sequence[Host], message: dict[str, Any], lost: EspalierError | None) -> None:
    """Starts all supervisors, and has them open their data. After the run was `lost`, a host may boot, and lack its
    network, its name or its disks: all are asked again until `comm.timeout` is over. Raises UserError at the first
    start, else RunFailed, where a host does not do its part."""
    deadline = time.monotonic() + crowd.patience
    while True:
        try:
            _say(crowd.gather(chosen))
            crowd.prepare(message, "kept")
            return
        except UserError as error:
            if lost is None:
                raise
            if time.monotonic() >= deadline:
                away = [far.host for far in crowd.all if far.error or not (far.identity or far.messages)]
                why = f"{lost.what} For {crowd.patience:.0f} s all were asked to start again; {error.why}"
                raise RunFailed(error.what, why=why, do=host_errors.resume(chosen, away)) from None
        time.sleep(AGAIN_SECONDS)


def _failure(vanished: EspalierError, events: Path) -> Failure:
    """What the policy is asked about: a supervisor that went without a word. What ranks do is their supervisors' to
    judge. Steps are known where the run is kept on this host."""
    done = [event["step"] for event in logged(events) if event["event"] == "step"]
    kind: Literal["lost", "killed"] = "lost" if isinstance(vanished, PeerLost) else "killed"
    return Failure(kind, -1, vanished.what, vanished.why, max(done, default=0))


def _probe(arguments: argparse.Namespace, named: Sequence[Host]) -> int:
    options = _launch_options(arguments.overrides)
    chosen, _ = hosts.here_first(named)
    message = {"is": "task", "task": "probe", "folder": os.getcwd(), "absolute": True, "disk": arguments.disk}
    with Crowd(options.launch, MODULE, _show) as crowd:
        _say(crowd.gather(chosen))
        crowd.prepare(message)
        done = crowd.carry_out()
    from espalier.cli import printing

    remark = f": espalier plan RECIPE --cluster {arguments.out}"
    printing.write_cluster(clusters.loads(done["cluster"]), arguments.out, arguments.json, remark)
    return 0


def _launch_options(overrides: Sequence[str]) -> Recipe:
    """The options `launch.*` of a command line that has no recipe."""
    for text in overrides:
        if not text.strip().startswith("launch."):
            raise UserError(f"probe takes no option {text!r}.", do="launch.command, .interface, .port or .python")
    recipe = recipe_file.from_table({"model": {"kind": "gpt"}}, "the command line", overrides)
    value_ranges.check(recipe)
    return recipe


def _show(far: Far, stream: str, line: str) -> None:
    """The first rank speaks for all on the terminal; everything else is in the log."""
    if far.rank == 0:
        say(line, file=sys.stderr if stream == "err" else sys.stdout, flush=True)


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        say_progress(line)
