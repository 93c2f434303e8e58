"""Three unlike hosts, end to end: namespaces with slow links, control groups of 1.0, 0.5 and 0.25 of a core.

A user describes them, looks at the plan, trains on all of them by one command, and gets the losses of one rank. One
host is lost in the middle of a step, another becomes slow: the run goes on by another plan.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.story.programs import MACHINE
from tests.story.test_hosts import RECIPE, command_line, environment, espalier, events, netlab_of, none_left, processes

from espalier.plan import base as plans

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
CORES = (1.0, 0.5, 0.25)
GROUPS = Path("/sys/fs/cgroup/cpu")
ENTER = """#!/bin/sh
[ -e gone-$1 ] && exit 1
echo $$ > {groups}/$1/cgroup.procs || exit 1
exec ip netns exec "$1" sh -c "$2"
"""
UNEQUAL = ("recipe.toml", "plan.pin.pipelines=unequal")
PARTS = {
    "waves": ("tasks.toml", "plan.pin.ranks=3"),
    "dispatch": (
        "recipe.toml",
        "model.kind=moe",
        "model.depth=2",
        "model.experts=6",
        "plan.pin.ep=3",
        "plan.pin.ranks=3",
    ),
}
"""Runs whose ranks wait for one another within a step."""
HOST = """
[[nodes]]
name = "{name}"
cores = 1
memory = "2GiB"
[nodes.device]
name = "core"
kind = "cpu"
memory = 2147483648
memory_bandwidth = {bandwidth}
flops = {{ fp32 = {flops} }}
peak = false
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[str]:
    """Three namespaces at 200 Mbit/s, each with a control group of its name; their names with commas."""
    if os.geteuid() or not GROUPS.is_dir():
        pytest.skip("needs root and control groups")
    netlab, before, made = netlab_of(), signal.getsignal(signal.SIGTERM), list[Path]()
    try:
        with netlab.Lab(netlab.Shape(nodes=3, hosts=1, rate=200e6)) as network:
            names = [network._host(index) for index in range(3)]
            for name, cores in zip(names, CORES, strict=True):
                made.append(GROUPS / name)
                made[-1].mkdir()
                (made[-1] / "cpu.cfs_period_us").write_text("20000")
                (made[-1] / "cpu.cfs_quota_us").write_text(str(int(20000 * cores)))
            yield ",".join(names)
    except RuntimeError as error:
        pytest.skip(str(error))
    finally:
        signal.signal(signal.SIGTERM, before)
        for group in made:
            group.rmdir()


@pytest.fixture(scope="module")
def home(lab: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unlike")
    enter = folder / "enter"
    enter.write_text(ENTER.format(groups=GROUPS))
    enter.chmod(0o755)
    recipe = RECIPE.replace("ip netns exec {host} sh -c {command}", f"{enter} {{host}} {{command}}")
    recipe = recipe.replace("depth = 1", "depth = 6").replace("steps = 4", "steps = 6")
    (folder / "recipe.toml").write_text(recipe.replace("width = 32", "width = 64"))
    tasks = (Path(__file__).parents[2] / "examples" / "tasks.toml").read_text()
    (folder / "tasks.toml").write_text(tasks.split("[train]")[0] + "[plan]" + recipe.split("[plan]")[1])
    (folder / "corpus").mkdir()
    for number in range(12):
        (folder / "corpus" / f"{number}.txt").write_text(f"The number {number} comes before {number + 1}.\n" * 40)
    hosts = (
        HOST.format(name=name, flops=40e9 * cores, bandwidth=1e10 * cores)
        for name, cores in zip(lab.split(","), CORES, strict=True)
    )
    links = '\n[links]\nbetween = { bandwidth = "200Mbit/s", latency = "100us", launch = "100us" }\n'
    (folder / "three.toml").write_text("".join(hosts) + links)
    (folder / "one.toml").write_text(MACHINE)
    return folder


def test_three_unlike_hosts_are_planned_by_speed_and_train_as_one_rank_does(lab: str, home: Path) -> None:
    unequal = "plan.pin.pipelines=unequal"
    told = espalier(home, "plan", "recipe.toml", "--cluster", "three.toml", unequal)
    assert told.returncode == 0, told.stderr
    assert "Devices differ, so layers and samples go by speed" in told.stdout
    arguments = ("recipe.toml", "--hosts", lab, "plan.cluster=three.toml", unequal, "plan.pin.ranks=3")
    done = espalier(home, "train", *arguments, "name=unlike")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Devices differ, so layers and samples go by speed" in done.stdout
    plan = plans.read(home / "runs" / "unlike" / "plan.json")
    assert plan.planner == "flashflex"
    assert sorted(rank.node for rank in plan.ranks) == [0, 1, 2]
    work = dict.fromkeys(range(3), 0)
    for stage in plan.stages:
        start, stop = plan.ranks[stage.ranks[0]].share
        work[plan.ranks[stage.ranks[0]].node] += (stop - start) * (stage.layers[1] - stage.layers[0])
    assert work[0] > work[1] >= work[2] > 0, "layers and samples follow the speed of the host"
    near = espalier(home, "train", "recipe.toml", "plan.pin.ranks=1", "name=near")
    assert near.returncode == 0, near.stdout + near.stderr
    expected = [event["loss"] for event in events(home, "near", "step")]
    assert len(expected) == 6
    assert [event["loss"] for event in events(home, "unlike", "step")] == pytest.approx(expected, rel=1e-4)
    assert (home / "runs" / "unlike" / "report.html").exists()
    assert none_left(lab)


def test_the_run_goes_on_under_another_plan_of_the_same_hosts(lab: str, home: Path) -> None:
    """What was cut unequally is taken up by one rank, under its own plan."""
    command = [sys.executable, "-m", "espalier", "train", "recipe.toml", "name=unlike", "train.steps=8"]
    done = subprocess.run(
        [*command, "plan.pin.ranks=1"], cwd=home, env=environment(home), capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [event["step"] for event in events(home, "unlike", "step")][-2:] == [7, 8]


# --- what is lost or stays slow ---


def begun(
    home: Path, lab: str, run: str, step: int, *more: str, start: Sequence[str] = UNEQUAL
) -> subprocess.Popen[str]:
    """A run on all hosts that has made so many steps. `start`: its recipe, and what it is pinned to."""
    arguments = ("--hosts", lab, "plan.cluster=three.toml", f"name={run}", *more)
    process = subprocess.Popen(
        command_line("train", *start, *arguments), cwd=home, env=environment(home), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 150
    while len(events(home, run, "step")) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def expected(home: Path, run: str, steps: int, *more: str) -> list[float]:
    """Losses of one rank."""
    alone = ("plan.pin.ranks=1", "plan.cluster=one.toml")
    done = espalier(home, "train", "recipe.toml", *alone, f"name={run}", f"train.steps={steps}", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return [event["loss"] for event in events(home, run, "step")]


def last_losses(home: Path, run: str) -> list[float]:
    """Of each step, as it was made last."""
    made = {event["step"]: event["loss"] for event in events(home, run, "step")}
    return [made[step] for step in sorted(made)]


def test_the_others_go_on_without_a_host_that_is_lost_in_a_step(lab: str, home: Path) -> None:
    lost = lab.split(",")[2]
    process = begun(home, lab, "lost", 12, "train.steps=40", "checkpoint.every=5", "comm.timeout=16s")
    before = plans.read(home / "runs" / "lost" / "plan.json")
    assert {rank.node for rank in before.ranks} == {0, 1, 2}
    (home / f"gone-{lost}").touch()
    for pid in processes(lost):
        os.kill(int(pid), signal.SIGKILL)
    output, errors = process.communicate(timeout=200)
    (home / f"gone-{lost}").unlink()
    assert process.returncode == 0, output + errors
    incident = next(one for one in events(home, "lost", "incident") if "go on without it" in one["action"])
    assert incident["what"].startswith(f"Host {lost} was not heard for")
    assert "2 of 3 ranks" in incident["action"]
    after = plans.read(home / "runs" / "lost" / "plan.json")
    assert {rank.node for rank in after.ranks} == {0, 1}
    (recovered,) = events(home, "lost", "recovered")
    assert (recovered["kind"], recovered["source"]) == ("lost", "disk")
    assert last_losses(home, "lost") == pytest.approx(expected(home, "lost-near", 40), rel=1e-3)
    assert none_left(lab)


def test_a_host_that_stays_slow_is_planned_round(lab: str, home: Path) -> None:
    slow = lab.split(",", maxsplit=1)[0]
    options = ("train.steps=400", "faults.heartbeat=0.5s", "checkpoint.every=1000", "plan.pin.ranks=3")
    process = begun(home, lab, "slow", 20, *options)
    before = work_of_the_first_host(home)
    (GROUPS / slow / "cpu.cfs_quota_us").write_text("3000")  # as another user's job would
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        (GROUPS / slow / "cpu.cfs_quota_us").write_text("20000")
    assert process.returncode == 0, output + errors
    told = next(one for one in events(home, "slow", "incident") if one["kind"] == "replanned")
    assert told["predicted"] < told["before"]
    assert work_of_the_first_host(home) < before
    assert len(last_losses(home, "slow")) == 400
    assert none_left(lab)


def work_of_the_first_host(home: Path) -> int:
    """Layers times samples, by the plan as it is now."""
    plan = plans.read(home / "runs" / "slow" / "plan.json")
    found = 0
    for stage in plan.stages:
        start, stop = plan.ranks[stage.ranks[0]].share
        if plan.ranks[stage.ranks[0]].node == 0:
            found += (stop - start) * (stage.layers[1] - stage.layers[0])
    return found


def test_a_host_that_was_left_out_is_taken_in_again_when_it_is_back(lab: str, home: Path) -> None:
    lost = lab.split(",")[1]
    model = ("model.width=128", "train.batch_tokens=1024")  # large enough, so that it pays to have it back
    slowly = ("train.schedule.kind=constant", "train.optimizer.learning_rate=1e-4")  # rounding grows less
    faults = ("checkpoint.every=5", "comm.timeout=12s", "faults.heartbeat=0.5s")
    process = begun(home, lab, "back", 12, "train.steps=150", *faults, *model, *slowly)
    before = plans.read(home / "runs" / "back" / "plan.json")
    (home / f"gone-{lost}").touch()
    for pid in processes(lost):
        os.kill(int(pid), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not any("go on without it" in one["action"] for one in events(home, "back", "incident")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (home / f"gone-{lost}").unlink()  # its machine can be reached again
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, output + errors
    (told,) = [one for one in events(home, "back", "incident") if one["kind"] == "replanned"]
    assert told["why"] == f"host {lost}, which was left out, is there again"
    assert "all 3 ranks with" in told["what"]
    assert f"Host {lost} is back after" in errors
    assert plans.read(home / "runs" / "back" / "plan.json").ranks == before.ranks
    out, again = events(home, "back", "recovered")
    assert (out["kind"], again["kind"], again["lost_steps"]) == ("lost", "replanned", 0)
    assert [one["ranks"] for one in events(home, "back", "run")] == [3, 2, 3]
    assert sorted({one["step"] for one in events(home, "back", "step")}) == list(range(1, 151))
    near = range(1, again["step"] + 11)
    found, whole = last_losses(home, "back"), expected(home, "back-near", again["step"] + 10, *model, *slowly)
    assert [found[step - 1] for step in near] == pytest.approx([whole[step - 1] for step in near], rel=1e-3)
    assert none_left(lab)


@pytest.mark.parametrize("part", PARTS)
def test_a_host_lost_amid_waves_or_a_dispatch_is_started_again_and_no_loss_changes(
    lab: str, home: Path, part: str
) -> None:
    options = ("train.steps=40", "checkpoint.every=5", "faults.heartbeat=0.5s")
    lost = lab.split(",")[1]
    process = begun(home, lab, part, 12, *options, start=PARTS[part])
    before = (home / "runs" / part / "plan.json").read_text()
    for pid in processes(lost):
        os.kill(int(pid), signal.SIGKILL)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, output + errors
    assert f"Host {lost} is back after" in errors
    (recovered,) = events(home, part, "recovered")
    assert recovered["kind"] == "lost"
    assert (home / "runs" / part / "plan.json").read_text() == before
    undisturbed = begun(home, lab, f"{part}-whole", 1, *options, start=PARTS[part])
    output, errors = undisturbed.communicate(timeout=200)
    assert undisturbed.returncode == 0, output + errors
    assert last_losses(home, part) == last_losses(home, f"{part}-whole")
    assert none_left(lab)
