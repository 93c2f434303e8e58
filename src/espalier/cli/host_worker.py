"""`python -m espalier.cli.host_worker`: what `--hosts` starts on a host, the supervisor of its ranks. It says who it
is before it loads torch."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO, cast

from espalier.cli import run_data
from espalier.launch.hosts import host_agent
from espalier.launch.hosts.host_agent import Launcher, Told
from espalier.recipe.errors import EspalierError, Interrupted, UserError
from espalier.track.startup import STARTUP
from espalier.train.rank_spec import RankSpec


def main() -> int:
    """The life of this process; its exit code."""
    from espalier.track.progress import Forgiving  # a launcher that is gone reads nothing

    sys.stdout, sys.stderr = cast("TextIO", Forgiving(sys.stdout)), cast("TextIO", Forgiving(sys.stderr))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a stop comes as one; under `nohup … &` it is ignored
    launcher = Launcher()
    place = RankSpec()
    try:
        host_agent.hello(launcher)
        met = host_agent.meet(launcher)
        if met is None:
            return 1
        place = met
        asked = launcher.hear()
        done = _carry_out(launcher, place, asked)
        launcher.tell("done", **done)
        launcher.hear()  # the store lives as long as the first rank: nobody leaves before the launcher says so
    except EspalierError as error:
        launcher.refuse(error)
        return error.exit_code
    except KeyboardInterrupt:
        launcher.refuse(Interrupted("Stopped before the first step."))
        return Interrupted.exit_code
    except Exception as error:
        from espalier.launch.ranks import rank_process

        sys.stderr.write(traceback.format_exc())
        launcher.refuse(rank_process.explained(error, place))
        return 1
    return 0


def _carry_out(launcher: Launcher, place: RankSpec, asked: Told) -> Told:
    """Trains as the supervisor of this host's ranks, or measures this host anew and the links to the others."""
    _enter(place, asked)
    trains = asked["task"] == "train"
    if trains and not place.rank:
        launcher.tell("kept", kept=run_data.packed(Path(asked["run"])))
    STARTUP.entered = STARTUP.since = min(asked["entered"], time.time())  # by the launcher's clock
    STARTUP.stages = None if place.rank else []
    from espalier.cli import host_supervisor

    if not trains:
        return host_supervisor.probed(launcher, place, asked)
    STARTUP.ended("Reaching the hosts, loading PyTorch")
    with _naming_the_folder(asked):
        given = host_supervisor.opened(place, asked)
    return host_supervisor.supervise(launcher, place, asked, given)


def _enter(place: RankSpec, asked: Told) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
