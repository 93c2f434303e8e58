"""`espalier train --ray [ADDRESS]`: the same verb with its ranks as actors of a Ray cluster, one of a placement group
each. Ray starts an actor that was lost again; then all ranks go on from the newest checkpoint. Loads no torch.

Ray's driver is a child of this process: Ray ends it without a word where its head is lost, and this process says so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.cli.input_check import train_command
from espalier.comm import rendezvous_wait
from espalier.comm.rendezvous_wait import Deadline
from espalier.launch.ranks import rank_process
from espalier.recipe import Recipe, recipe_file, units, value_ranges
from espalier.recipe.errors import Interrupted, RunFailed, UserError, missing_extra
from espalier.recipe.terminal import say
from espalier.train import run_folder as runs
from espalier.train.rank_spec import RankSpec
from espalier.train.signal_handling import handling

ROOM = 60.0
"""Seconds that Ray may take for starting again an actor that was lost."""
STOPPING = 120.0
"""Seconds that ranks have to save and end."""
LEAVING = 10.0
"""Seconds that ranks have to end where one was lost: without it they can save nothing."""
AUTO = 3
"""Attempts in a row that save nothing before the run is given up, where `faults.restarts` is `"auto"`."""
BOUND = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])
os._exit(1)"""
"""A program that runs another, which the kernel kills with the thread that started it (PR_SET_PDEATHSIG, prctl(2)).
Ray's actors have threads, so this cannot be done between fork and exec."""
_MISTAKE = 2
_INTERRUPTED = 130


@dataclass(frozen=True)
class RayJob:
    """What every rank runs: the command, in this folder; the run's folder and its ranks (None: as the cluster says)."""

    command: tuple[str, ...]
    folder: str
    run: Path
    ranks: int | None
    attempts: int
    patience: float


def run(arguments: argparse.Namespace) -> int:
    """Trains on the cluster; exit code."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise missing_extra("ray", "ray", "--ray") from None
    recipe = recipe_file.load(arguments.recipe, arguments.overrides)
    value_ranges.check(recipe)
    job = _job(arguments, recipe)
    driver = rank_process.fork(lambda place: drive(arguments.ray, job), RankSpec())

    def pass_on(number: int, frame: object) -> None:
        driver.signal(signal.SIGINT)

    with handling(pass_on, signal.SIGINT, signal.SIGTERM):
        driver.reap()
    if driver.error is not None:
        raise driver.error
    if driver.failed:
        raise RunFailed(
            f"Ray's head was lost ({arguments.ray}).",
            why="Ray ended this run's driver, as it does where the head does not answer",
            do="start Ray's head again, then the same command: the run goes on from its newest checkpoint",
        )
    return int(driver.returned)


def _job(arguments: argparse.Namespace, recipe: Recipe) -> RayJob:
    folder = runs.path_of(recipe, arguments.run).absolute()
    restarts = recipe.faults.restarts
    return RayJob(
        tuple(train_command(arguments, str(folder))),
        os.getcwd(),
        folder,
        recipe.plan.pin.ranks,
        AUTO if restarts == "auto" else restarts + 1,
        units.seconds(recipe.comm.timeout, "comm.timeout"),
    )


# --- the driver --------------------------------------------------------------------------------------------------


def drive(address: str, job: RayJob) -> int:
    """Attempts until one ends. Raises UserError where there is no cluster or no room, RunFailed where nothing helps."""
    import ray

    _reach(address, job.patience)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"There is no Ray cluster at {address}.",
            why=str(error).splitlines()[0],
            do="ray start --head on one host, ray start --address=HEAD:6379 on the others; --ray local for this one",
        ) from None
    try:
        group, asked, count = _placed(ray, job)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        seat = ray.remote(max_restarts=-1, max_task_retries=0, max_concurrency=3)(Seat)
        actors = [
            seat.options(
                num_cpus=asked.get("CPU", 0), num_gpus=asked.get("GPU", 0), scheduling_strategy=strategy(group, index)
            ).remote()
            for index in range(count)
        ]
        return _attempts(ray, actors, job)
    finally:
        ray.shutdown()


def _reach(address: str, seconds: float) -> None:
    """Returns once Ray's head answers at `address`, where that names a host. Raises PeerLost."""
    match = re.fullmatch(r"(?:ray://)?\[?([^/\]]+)\]?:(\d+)", address)
    if match is None:
        return
    place = match[1], int(match[2])

    def connect(seconds: float) -> bool:
        socket.create_connection(place, seconds).close()
        return True

    rendezvous_wait.reached(place, "--ray", "Ray's head", Deadline(seconds, "This machine"), connect)


def _placed(ray: Any, job: RayJob) -> tuple[Any, dict[str, float], int]:
    """The placement group, what each rank has of it, and how many ranks there are."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    count = job.ranks or gpus or len(nodes)
    each = -(-count // max(1, len(nodes)))
    cpus = max(1, int(min(node.get("CPU", 0) for node in nodes)) // each)
    asked: dict[str, float] = {"CPU": cpus, **({"GPU": 1} if gpus else {})}
    group = ray.util.placement_group([asked] * count, strategy="PACK" if gpus else "SPREAD")
    say(Deadline(job.patience, "Ray").first_line(f"room for {units.plural(count, 'rank')}"), file=sys.stderr)
    if not group.wait(job.patience):
        there = ", ".join(f"{int(node.get('CPU', 0))} CPUs and {int(node.get('GPU', 0))} GPUs" for node in nodes)
        raise UserError(
            f"Ray has no room for {count} ranks of {cpus} CPUs{' and 1 GPU' * bool(gpus)}.",
            why=f"its hosts have {there}, and others may use them",
            do=f"wait for them, or plan.pin.ranks={max(1, count // 2)}",
        )
    return group, asked, count


def _attempts(ray: Any, actors: Sequence[Any], job: RayJob) -> int:
    follow = LogFollower(job.run / "logs" / "ray-0.log")
    number = fruitless = 0
    while True:
        before = _saved(job.run)
        codes = _attempt(ray, actors, job, number, follow)
        worst = next((code for code in codes if code), 0)
        if not worst:
            return 0
        if _INTERRUPTED in codes:
            raise Interrupted("Stopped and saved.", do="the same command goes on from there")
        if _MISTAKE in codes:
            return _MISTAKE  # the rank's own words were printed
        fruitless = 0 if _saved(job.run) != before else fruitless + 1
        if fruitless >= job.attempts:
            raise RunFailed(
                f"Ranks were lost in {number + 1} attempts; nothing was saved in the last {fruitless}.",
                why=f"their exit codes are {', '.join(map(str, codes))}",
                do=f"look into {job.run}/logs/ray-*.log",
            )
        number += 1
        say(f"Ranks were lost ({', '.join(map(str, codes))}); attempt {number + 1} goes on from the newest checkpoint.")


def _attempt(ray: Any, actors: Sequence[Any], job: RayJob, number: int, follow: LogFollower) -> list[int]:
    """The exit codes of all ranks; -1 of one whose actor was lost."""
    places = [_asked(ray, actor.place.remote) for actor in actors]
    (host, _), port = places[0], _asked(ray, actors[0].free_port.remote)
    seen: dict[str, int] = {}
    locals_ = [seen[node] for _, node in places if seen.update({node: seen.get(node, -1) + 1}) is None]
    running = {}
    for rank, (actor, (_, node)) in enumerate(zip(actors, places, strict=True)):
        variables = {
            "RANK": rank, "WORLD_SIZE": len(actors), "LOCAL_RANK": locals_[rank], "LOCAL_WORLD_SIZE": seen[node] + 1,
            "MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": number,
        }  # fmt: skip
        log = str(job.run / "logs" / f"ray-{rank}.log")
        texts = {name: str(value) for name, value in variables.items()}
        running[actor.run.remote(list(job.command), job.folder, texts, log)] = rank
    return _ended(ray, actors, running, follow)


def _ended(ray: Any, actors: Sequence[Any], running: dict[Any, int], follow: LogFollower) -> list[int]:
    """Waits for all ranks; the first that fails, and Ctrl-C, stop the others."""
    codes = [0] * len(running)
    deadline = float("inf")
    left = list(running)
    while left:
        try:
            done, left = ray.wait(left, timeout=0.3)
            for task in done:
                codes[running[task]] = _code(ray, task)
            if any(codes) and left and deadline == float("inf"):
                deadline = time.monotonic() + LEAVING
                _stop(ray, [actors[running[task]] for task in left], signal.SIGTERM)
            if time.monotonic() > deadline:
                deadline = float("inf")
                _stop(ray, [actors[running[task]] for task in left], signal.SIGKILL)
        except KeyboardInterrupt:
            deadline = time.monotonic() + STOPPING
            _stop(ray, actors, signal.SIGTERM)
        follow.show()
    return codes


def _code(ray: Any, done: Any) -> int:
    try:
        return int(ray.get(done))
    except ray.exceptions.RayError:
        return -1


def _stop(ray: Any, actors: Sequence[Any], number: int) -> None:
    for actor in actors:
        with contextlib.suppress(ray.exceptions.RayError):
            actor.signalled.remote(int(number))


def _asked(ray: Any, ask: Callable[[], Any]) -> Any:
    """What an actor answers, which Ray may be starting again. Raises RunFailed where it does not answer in time."""
    deadline = time.monotonic() + ROOM
    while True:
        try:
            return ray.get(ask(), timeout=ROOM)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            if time.monotonic() > deadline:
                raise RunFailed(
                    "Ray did not start a lost rank again.",
                    why=f"{type(error).__name__} for {ROOM:.0f} s; its host may be lost, and no other has room",
                    do="add a host to the cluster, then the same command: the run goes on from its newest checkpoint",
                ) from None
            time.sleep(0.5)


def _saved(run: Path) -> list[str]:
    folder = runs.RunFolder(run).checkpoints
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


class LogFollower:
    """Prints what is added to a file. Has state: how far it was read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0

    def show(self) -> None:
        """What is new."""
        with contextlib.suppress(OSError), self._path.open(encoding="utf-8", errors="replace") as file:
            file.seek(self._at)
            text = file.read()
            self._at = file.tell()
            if text:
                sys.stdout.write(text)
                sys.stdout.flush()


class Seat:
    """One rank's actor: runs its program, which ends with it. Has state: the program."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def place(self) -> tuple[str, str]:
        """(address, identity) of its host."""
        import ray

        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def free_port(self) -> int:
        """A TCP port that nobody uses now."""
        with socket.create_server(("", 0)) as server:
            return int(server.getsockname()[1])

    def run(self, command: list[str], folder: str, variables: dict[str, str], log: str) -> int:
        """Its exit code, negative where a signal ended it."""
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOUND, str(os.getpid()), *command],
                cwd=folder,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        return self._process.wait()

    def signalled(self, number: int) -> None:
        """Sends its program a signal."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
