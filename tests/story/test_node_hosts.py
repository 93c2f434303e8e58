"""Workers and an optimizer node on hosts of their own: who is lost is replaced, and the node moves to another host."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root"),
]
STEPS, STRUCK = 120, 40

HOSTS = ("hosta", "hostb", "hostc", "hostd")
RECIPE = """
[model]
depth = 1
width = 32
heads = 2

[data]
path = "corpus"
validation = 0.2

[train]
steps = 120
sequence = 32
batch_tokens = 256
validate_tokens = 512
validate_every = 100000
optimizer = { kind = "adamw" }
schedule = { kind = "constant" }

[plan]
trial = false
cluster = "served.toml"

[plan.pin]
threads = 1
offload = "node"
"""
SERVED = """
[[nodes]]
count = 2
device = "cpu"
cores = 2
memory = "4GiB"

[[nodes]]
device = "cpu"
cores = 1
memory = "4GiB"
role = "optimizer"
disks = [{ path = "/", write = 1e9, read = 1e9, iops = 1e4 }]

[links]
between = "1Gbit/s"
"""
CONNECTION = """
import os, subprocess, sys
home, host, command = sys.argv[1:]
mount = f"mount --bind {home}/{host} {home}/disk"
sys.exit(subprocess.call(["unshare", "-m", "sh", "-c", f"{mount} && echo $$ >> {home}/{host}-supervisors; {command}"]))
"""
"""Stands between the launcher and a host as ssh does; every host has a disk of its own."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "connection.py").write_text(CONNECTION)
    (folder / "corpus").mkdir()
    for number in range(12):
        (folder / "corpus" / f"{number}.txt").write_text(f"The number {number} comes before {number + 1}.\n" * 40)
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "served.toml").write_text(SERVED)
    (folder / "fewer.toml").write_text(SERVED.replace("count = 2", "count = 1"))
    for host in (*HOSTS, "disk"):
        (folder / host).mkdir()
    return folder


def begin(home: Path, run: str, *more: str, hosts: str = "hosta,hostb,hostc") -> subprocess.Popen[str]:
    for host in HOSTS:
        (home / f"{host}-supervisors").unlink(missing_ok=True)
    command = f"launch.command={sys.executable} {home}/connection.py {home} {{host}} {{command}}"
    arguments = [
        "train",
        "recipe.toml",
        "--hosts",
        hosts,
        "--run",
        f"runs/{run}",
        f"store.path=disk/{run}",
        command,
        *more,
    ]
    environment = {**os.environ, "XDG_CACHE_HOME": str(home / "cache")}
    return subprocess.Popen(
        [sys.executable, "-m", "espalier", *arguments], cwd=home, env=environment, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=250)
    return process.returncode, errors


def events(home: Path, run: str, kind: str) -> list[dict[str, Any]]:
    file = home / "runs" / run / "events.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def losses(home: Path, run: str) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(home, run, "step")}


def reach(home: Path, run: str, process: subprocess.Popen[str], steps: int) -> None:
    deadline = time.monotonic() + 150
    while len(events(home, run, "step")) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def supervisor(home: Path, host: str) -> int:
    return int((home / f"{host}-supervisors").read_text().split()[0])


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ranks(home: Path, host: str) -> list[int]:
    found = children(supervisor(home, host))
    return [pid for pid in found if Path(f"/proc/{pid}/comm").read_text().strip() != "espalier-store"]


def node_folder(home: Path, host: str, run: str) -> Path:
    return home / host / run / "node-0"


@pytest.fixture(scope="module")
def unbroken(home: Path) -> dict[int, float]:
    code, errors = ended(begin(home, "whole"))
    assert code == 0, errors
    assert (node_folder(home, "hostc", "whole") / "state").exists()
    assert not node_folder(home, "hosta", "whole").exists()
    found = losses(home, "whole")
    assert len(found) == STEPS
    return found


def a_worker(home: Path) -> None:
    (pid,) = ranks(home, "hostb")
    os.kill(pid, signal.SIGKILL)


def the_host_of_a_worker(home: Path) -> None:
    for pid in (supervisor(home, "hostb"), *children(supervisor(home, "hostb"))):
        os.kill(pid, signal.SIGKILL)


def the_node(home: Path) -> None:
    (pid,) = ranks(home, "hostc")
    os.kill(pid, signal.SIGKILL)


def the_host_of_the_node(home: Path) -> None:
    for pid in (supervisor(home, "hostc"), *children(supervisor(home, "hostc"))):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("lost", [a_worker, the_host_of_a_worker, the_node, the_host_of_the_node])
def test_who_is_lost_on_another_host_is_replaced_and_no_bit_changes(
    home: Path, unbroken: dict[int, float], lost: Callable[[Path], None]
) -> None:
    run = lost.__name__
    process = begin(home, run)
    reach(home, run, process, STRUCK)
    lost(home)
    code, errors = ended(process)
    assert code == 0, errors
    assert losses(home, run) == unbroken
    assert events(home, run, "incident")


def test_a_worker_that_always_dies_is_left_out_with_its_host_and_the_others_go_on_from_the_nodes_step(
    home: Path, unbroken: dict[int, float]
) -> None:
    process = begin(home, "mortal", "faults.restarts=1")
    reach(home, "mortal", process, STRUCK)
    while "left out" not in "".join(one["action"] for one in events(home, "mortal", "incident")):
        assert process.poll() is None, process.communicate()
        for pid in ranks(home, "hostb"):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    code, errors = ended(process)
    assert code == 0, errors
    assert "On host hostb: Rank 1 was killed" in errors
    found, begun = losses(home, "mortal"), events(home, "mortal", "run")[-1]
    assert begun["ranks"] == events(home, "mortal", "run")[0]["ranks"] - 1
    assert found.keys() == unbroken.keys()
    assert begun["step"] >= STRUCK - 1
    for step in range(1, min(begun["step"] + 10, STEPS) + 1):
        assert found[step] == pytest.approx(unbroken[step], rel=1e-4)
    code, errors = ended(begin(home, "mortal", f"train.steps={STEPS + 5}"))  # with all hosts again
    assert code == 0, errors
    assert max(losses(home, "mortal")) == STEPS + 5


def test_a_node_goes_on_at_another_host_from_files_that_were_copied_there(
    home: Path, unbroken: dict[int, float]
) -> None:
    process = begin(home, "moved")
    reach(home, "moved", process, STRUCK)
    process.send_signal(signal.SIGINT)
    code, errors = ended(process)
    assert code == 130, errors
    made = max(losses(home, "moved"))
    code, errors = ended(begin(home, "moved", hosts="hosta,hostb,hostd"))
    assert code == 2, errors
    assert "optimizer node" in errors
    assert max(losses(home, "moved")) == made
    shutil.rmtree(node_folder(home, "hostd", "moved"), ignore_errors=True)
    shutil.copytree(node_folder(home, "hostc", "moved"), node_folder(home, "hostd", "moved"))
    code, errors = ended(begin(home, "moved", hosts="hosta,hostb,hostd"))
    assert code == 0, errors
    assert losses(home, "moved") == unbroken


def test_the_same_command_without_the_host_of_a_worker_goes_on_from_the_nodes_step(
    home: Path, unbroken: dict[int, float]
) -> None:
    """What the error of a worker that always dies says (`tests/together/test_luwu_hosts.py`)."""
    process = begin(home, "fewer")
    reach(home, "fewer", process, STRUCK)
    process.send_signal(signal.SIGINT)
    code, errors = ended(process)
    assert code == 130, errors
    code, errors = ended(begin(home, "fewer", "plan.cluster=fewer.toml", hosts="hosta,hostc"))
    assert code == 0, errors
    found = losses(home, "fewer")
    assert found.keys() == unbroken.keys()
    begun = events(home, "fewer", "run")[-1]["step"]
    assert STRUCK <= begun < STEPS
    for step in range(1, min(begun + 10, STEPS) + 1):  # sums of floats, no more of integers: rounding grows from there
        assert found[step] == pytest.approx(unbroken[step], rel=1e-4)
    assert len(events(home, "fewer", "run")) == 2
