"""`python -m espalier.verbs.hosted`: one rank that `--hosts` has started. It says who it is before it loads torch."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from espalier.errors import EspalierError, Interrupted, UserError
from espalier.launch import hosted
from espalier.launch.base import Place
from espalier.launch.hosted import Launcher, Told

if TYPE_CHECKING:
    import torch.distributed as dist

    from espalier.cluster import Cluster
    from espalier.config import Recipe

PROBING = 300.0
"""Longest wait of one host for another while they are measured (seconds)."""


def main() -> int:
    """The life of this process; its exit code."""
    from espalier.track.progress import Forgiving  # a launcher that is gone reads nothing

    sys.stdout, sys.stderr = cast("TextIO", Forgiving(sys.stdout)), cast("TextIO", Forgiving(sys.stderr))
    launcher = Launcher()
    place = Place()
    try:
        hosted.hello(launcher)
        found = hosted.meet(launcher)
        if found is None:
            return 1
        place = found
        asked = launcher.hear()
        done = TASKS[asked["task"]](launcher, place, asked)
        launcher.tell("done", **done)
        launcher.hear()  # the store lives as long as the first rank: nobody leaves before the launcher says so
    except EspalierError as error:
        launcher.refuse(error)
        return error.exit_code
    except KeyboardInterrupt:
        launcher.refuse(Interrupted("Stopped before the first step."))
        return Interrupted.exit_code
    except Exception as error:
        from espalier.launch import child

        sys.stderr.write(traceback.format_exc())
        launcher.refuse(child.explained(error, place))
        return 1
    return 0


def _train(launcher: Launcher, place: Place, asked: Told) -> Told:
    """Opens the data, says what it is, and once all hosts agree measures, plans and trains."""
    import torch

    from espalier import rank
    from espalier import run as runs
    from espalier.config import load
    from espalier.launch.handshake import identity
    from espalier.verbs import ready, train

    torch.set_num_threads(1)
    _enter(place, asked)
    with _naming_the_folder(asked):
        resolved = ready.settle(load.from_table(asked["recipe"], asked["origin"]), Path(asked["beside"]))
        run = asked["run"]
        first = place.rank == 0
        given = train.asked(resolved, run, asked["quiet"]) if first else train.joining(resolved, run)
    recipe = resolved.recipe
    own = identity(data=given.workload.fingerprint(), recipe=runs.hashed(load.to_table(recipe)))
    launcher.tell("ready", identity={key: own[key] for key in ("data", "recipe")})
    launcher.hear()
    with rank.joined(place, PROBING) as channel:
        cluster = _machines(channel, place, recipe)
    place = _seated(replace(place, attempt=1), recipe)
    if place.rank == 0:
        prepare = lambda: train.decided(given, lambda: cluster, place.world, asked["nodes"])  # noqa: E731
        return {"code": train.lead(prepare, place, asked["quiet"])}
    return {"code": train.follow(given, cluster, train.heard(place), place)}


def _probe(launcher: Launcher, place: Place, asked: Told) -> Told:
    """Measures this host anew, and the links to the others."""
    import torch

    from espalier import cluster as clusters
    from espalier import rank
    from espalier.hardware import hosts, probe
    from espalier.verbs import crossing, ready

    torch.set_num_threads(1)
    _enter(place, asked)
    launcher.tell("ready", identity={})
    launcher.hear()

    def measure() -> Cluster:
        found = crossing.measured(probe.probe(progress=ready.say, disk=Path(asked["disk"])))
        probe.save(found, say=ready.say)
        return found

    with rank.joined(place, PROBING) as channel:
        found = measure() if channel is None else hosts.probe_ranks(channel, place.local_rank, measure)
        if channel is not None:
            hosts.keep(found, hosts.key(channel))
    return {"cluster": clusters.dumps(found)} if place.rank == 0 else {}


TASKS: dict[str, Callable[[Launcher, Place, Told], Told]] = {"train": _train, "probe": _probe}


def _enter(place: Place, asked: Told) -> None:
    """Goes to the folder of the same path as the launcher's, where the first host keeps the run."""
    folder = Path(asked["folder"])
    if folder.is_dir():
        os.chdir(folder)
    elif place.rank == 0 and not asked.get("absolute"):
        raise UserError(
            f"There is no folder {folder}, where the run is to be kept.",
            do="make it there, or name another place with --run and an absolute path",
        )


@contextlib.contextmanager
def _naming_the_folder(asked: Told) -> Any:
    """What is not found because this host lacks the launcher's folder is said to be so."""
    try:
        yield
    except UserError as error:
        if Path(asked["folder"]).is_dir():
            raise
        why = f"this host has no folder {asked['folder']}, where paths of the recipe start"
        raise UserError(error.what, why=why, do="put recipe's data at the same path on every host") from None


def _machines(channel: dist.ProcessGroup | None, place: Place, recipe: Recipe) -> Cluster:
    """The recipe's cluster file as the first host has it, else the hosts as they were measured together, once."""
    import torch.distributed as dist

    from espalier import cluster as clusters
    from espalier.hardware import hosts, probe
    from espalier.verbs import ready

    if channel is None:
        return ready.machines(recipe)
    key = hosts.key(channel)
    known: list[Any] = [None]
    if place.rank == 0:
        found = clusters.read(recipe.plan.cluster) if recipe.plan.cluster else hosts.kept(key)
        known = [clusters.dumps(found) if found is not None else None]
        if found is None:
            ready.say("Measuring the hosts and the links between them (once).")
    dist.broadcast_object_list(known, 0, group=channel)
    if known[0] is not None:
        return clusters.loads(known[0])
    measured = hosts.probe_ranks(channel, place.local_rank, lambda: probe.ready(say=ready.say))
    hosts.keep(measured, key)
    return measured


def _seated(place: Place, recipe: Recipe) -> Place:
    """With the device it computes on, and the threads that the recipe pins."""
    import torch

    device = f"cuda:{place.local_rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    return replace(place, device=device, threads=recipe.plan.pin.threads or place.threads)


if __name__ == "__main__":
    sys.exit(main())
