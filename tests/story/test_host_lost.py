"""Three hosts train, and one is lost in the middle: it comes back, and nobody can tell from the weights."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

RECIPE = """
[model]
depth = 1
width = 32
heads = 2

[data]
path = "corpus"
validation = 0.2
cache = "cache"

[train]
steps = 1000
sequence = 32
batch_tokens = 384
validate_tokens = 1024
validate_every = 100000

[checkpoint]
every = 100000

[plan]
trial = false
cluster = "machine.toml"

[plan.pin]
threads = 1

[comm]
codec = "exact"

[sync]
kind = "every_step"
"""
MACHINE = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n'
CONNECTION = """
import os, subprocess, sys
with open(f"{sys.argv[1]}-connections", "a") as file:
    file.write(f"{os.getpid()} ")
if os.path.exists("gone") and sys.argv[1] == "hostc":
    sys.exit("no route to host")
sys.exit(subprocess.call(["sh", "-c", f"echo $$ >> {sys.argv[1]}-supervisors; {sys.argv[2]}"]))
"""
"""Stands between the launcher and a host as ssh does: the supervisor lives on where only this is killed."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lost")
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "machine.toml").write_text(MACHINE)
    (folder / "connection.py").write_text(CONNECTION)
    (folder / "corpus").mkdir()
    for number in range(12):
        (folder / "corpus" / f"{number}.txt").write_text(f"The number {number} comes before {number + 1}.\n" * 40)
    return folder


def begin(home: Path, run: str, *more: str, hosts: str = "hosta,hostb,hostc") -> subprocess.Popen[str]:
    for file in [*home.glob("*-connections"), *home.glob("*-supervisors"), *home.glob("gone")]:
        file.unlink()
    command = f"launch.command={sys.executable} connection.py {{host}} {{command}}"
    arguments = ["train", "recipe.toml", "--hosts", hosts, f"name={run}", command, *more]
    environment = {**os.environ, "XDG_CACHE_HOME": str(home / "xdg")}
    return subprocess.Popen(
        [sys.executable, "-m", "espalier", *arguments], cwd=home, env=environment, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def events(home: Path, run: str, kind: str) -> list[dict[str, Any]]:
    file = home / "runs" / run / "events.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def reach(home: Path, run: str, process: subprocess.Popen[str], steps: int) -> None:
    deadline = time.monotonic() + 120
    while len(events(home, run, "step")) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def pids(home: Path, host: str, what: str) -> list[int]:
    return [int(word) for word in (home / f"{host}-{what}").read_text().split()]


def kill(*numbers: int) -> None:
    for pid in numbers:
        os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int, within: float = 15.0) -> bool:
    """Also where nobody has asked how it ended."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def with_its_ranks(home: Path) -> None:
    (supervisor,) = pids(home, "hostc", "supervisors")
    kill(supervisor, *children(supervisor))


def its_connection(home: Path) -> None:
    kill(*pids(home, "hostc", "connections"))


def weights(home: Path, run: str) -> dict[str, str]:
    """A hash of what each rank has saved of the end."""
    (last,) = (home / "runs" / run / "checkpoints").glob("step-00001000")
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in last.glob("*.distcp")}


@pytest.fixture(scope="module")
def unbroken(home: Path) -> dict[str, str]:
    process = begin(home, "whole")
    _, errors = process.communicate(timeout=250)
    assert process.returncode == 0, errors
    return weights(home, "whole")


@pytest.mark.parametrize("strike", [with_its_ranks, its_connection])
def test_a_lost_host_comes_back_and_no_bit_of_the_weights_differs(
    home: Path, unbroken: dict[str, str], strike: Callable[[Path], None]
) -> None:
    run = strike.__name__
    process = begin(home, run)
    reach(home, run, process, 60)
    before = {host: pids(home, host, "supervisors") for host in ("hosta", "hostb", "hostc")}
    strike(home)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert weights(home, run) == unbroken
    after = {host: pids(home, host, "supervisors") for host in ("hosta", "hostb", "hostc")}
    assert (after["hosta"], after["hostb"]) == (before["hosta"], before["hostb"])
    assert len(after["hostc"]) == 2
    assert gone(before["hostc"][0])
    (recovered,) = [one for one in events(home, run, "recovered") if one["source"] != "place"]  # merely starved
    assert (recovered["kind"], recovered["source"]) == ("lost", "memory")
    assert recovered["lost_steps"] <= 5
    incident = next(one for one in events(home, run, "incident") if not one["action"].startswith("wait"))
    assert (incident["kind"], incident["what"].split()[:2]) == ("lost", ["Host", "hostc"])
    assert "Host hostc is back after" in errors
    log = (home / "runs" / run / "logs" / "hosts.log").read_text()
    assert log


def stopped_with_its_connection(home: Path) -> list[int]:
    """As a machine without power: nothing is heard of it, and nothing ends. Who is stopped."""
    (supervisor,) = pids(home, "hostc", "supervisors")
    stopped = [*pids(home, "hostc", "connections"), supervisor, *children(supervisor)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    return stopped


def saved_step(home: Path, run: str) -> int:
    (checkpoint,) = (home / "runs" / run / "checkpoints").iterdir()
    return int(checkpoint.name.removeprefix("step-"))


@pytest.mark.parametrize("run", ["off", "unplugged"])
def test_where_a_host_stays_away_the_state_is_saved_and_the_others_resume(home: Path, run: str) -> None:
    process = begin(home, run, "train.steps=100000", "comm.timeout=8s")
    reach(home, run, process, 20)
    (home / "gone").touch()
    stopped = []
    if run == "off":
        with_its_ranks(home)
    else:
        stopped = stopped_with_its_connection(home)
    _, errors = process.communicate(timeout=100)
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            kill(pid)
    assert process.returncode == 1, errors
    assert "resume with --hosts hosta,hostb, or run the same command" in errors
    step = saved_step(home, run)
    assert f"The state after step {step} is saved." in errors
    done = events(home, run, "step")
    assert run == "unplugged" or step == done[-1]["step"], "what is left of the ranks was at its end"
    process = begin(home, run, "train.steps=100000", hosts="hosta,hostb")
    reach(home, run, process, len(done) + 10)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130, errors
    (resumed,) = events(home, run, "run")[1:]
    assert resumed["step"] == step


def test_a_host_that_stays_away_is_named_and_an_interrupt_ends_the_wait(home: Path) -> None:
    for run, more in (("away", ("comm.timeout=12s",)), ("waits", ())):
        process = begin(home, run, "train.steps=100000", *more)
        reach(home, run, process, 20)
        (home / "gone").touch()
        with_its_ranks(home)
        if run == "waits":
            time.sleep(6.0)
            process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        _, errors = process.communicate(timeout=100)
        assert time.monotonic() - begun < 40
        if run == "waits":
            assert process.returncode == 130, errors
        else:
            assert process.returncode == 1, errors
            assert "Host hostc was lost and did not come back within 12 s." in errors
            assert "Host hostc cannot be reached" in errors
