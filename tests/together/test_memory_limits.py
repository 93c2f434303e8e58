"""Whole runs of `espalier train` that the kernel holds to a memory limit: a cgroup, and the address space."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BENCH = Path(__file__).parents[2] / "bench"
DISK = '[[nodes.disks]]\npath = "/"\nread = 1e9\nwrite = 1e9\niops = 1e4\niops_parallel = 5e4\ndirect = true\n'
GROUPS = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").is_dir() else Path("/sys/fs/cgroup")
PROGRAM = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import memory_cgroup
from espalier.cli import main as cli
memory_cgroup.join(int(sys.argv[2]))
if space := int(sys.argv[3]):
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
sys.exit(cli.main(sys.argv[4:]))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    if not os.access(GROUPS, os.W_OK) or not list(GROUPS.glob("memory.*")):
        pytest.skip("no memory cgroup that this user may make groups in")
    return tmp_path_factory.mktemp("limits")


class Done(NamedTuple):
    """A run that has ended: what it said, its events, the most anonymous bytes of its cgroup, and the largest address
    space of one of its processes."""

    code: int
    text: str
    events: list[dict[str, Any]]
    anonymous: int
    space: int

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "step"]


def run(home: Path, name: str, recipe: str, memory: str = "8GiB", cgroup: int = 8 << 30, space: int = 0) -> Done:
    (home / f"{name}.toml").write_text(recipe.replace("CLUSTER", f"{name}-cluster.toml"))
    machine = f'[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "{memory}"\n'
    (home / f"{name}-cluster.toml").write_text(machine + DISK)
    environment = {**os.environ, "XDG_CACHE_HOME": str(home / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(BENCH), str(cgroup), str(space), "train", f"{name}.toml"]
    found, said = {"anonymous": 0, "space": 0}, home / f"{name}.txt"
    with said.open("w") as out:
        process = subprocess.Popen(command, cwd=home, env=environment, stdout=out, stderr=out)
        while process.poll() is None:
            with suppress(OSError, StopIteration):
                watch(next(GROUPS.rglob(f"espalier-bench-{process.pid}")), found)
            time.sleep(0.02)
    log = home / "runs" / name / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return Done(process.returncode, said.read_text(), events, **found)


def watch(group: Path, found: dict[str, int]) -> None:
    counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    found["anonymous"] = max(found["anonymous"], int(counts.get("rss", counts.get("anon", 0))))
    for process in (group / "cgroup.procs").read_text().split():
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        size = next(int(line.split()[1]) for line in lines if line.startswith("VmPeak"))
        found["space"] = max(found["space"], 1024 * size)


# --- offload ---------------------------------------------------------------------------------------------------------

DECODER = """
[model]
kind = "gpt"
depth = 10
width = 512
heads = 8
tied = false
[data]
path = "corpus"
[train]
steps = 2
sequence = 32
batch_tokens = 128
validate_tokens = 128
precision = "fp32"
optimizer = { kind = "adamw" }
[checkpoint]
every = 1
keep_best = false
[plan]
cluster = "CLUSTER"
trial = false
[plan.pin]
ranks = 1
micro_batch = 1
"""
"""The micro-batch is pinned: with less memory the planner takes a smaller one, whose gradients are summed in another
order."""


@pytest.fixture(scope="module")
def resident(home):
    """Of the decoder, without limits."""
    (home / "corpus").mkdir()
    for number in range(9):
        lines = "".join(f"{number} plus {i} is {number + i}\n" for i in range(400))
        (home / "corpus" / f"{number}.txt").write_text(lines)
    done = run(home, "resident", DECODER)
    assert done.code == 0, done.text
    return done


@pytest.mark.parametrize(("memory", "kinds"), [(760, {"optimizer"}), (540, {"optimizer", "params", "grads"})])
def test_a_model_larger_than_its_cgroup_trains_from_disk_as_the_plan_says_by_itself(home, resident, memory, kinds):
    assert max(event["memory"] for event in resident.steps) > 1.1 * memory * 2**20
    done = run(home, f"within-{memory}", DECODER, f"{memory}MiB", memory << 20)
    assert done.code == 0, done.text
    predicted = next(event["predicted"] for event in done.events if event["event"] == "plan")
    assert {kind for kind, size in predicted["waiting_bytes"].items() if size} == kinds
    assert [event["loss"] for event in done.steps] == [event["loss"] for event in resident.steps]
    assert any(event["event"] == "checkpoint" for event in done.events)


def test_a_model_larger_than_its_address_space_trains_from_disk(home, resident):
    """The limit is that of `ulimit -v`: with everything in memory the same run does not end."""
    space = resident.space - (160 << 20)
    done = run(home, "narrow-540", DECODER, "540MiB", space=space)
    assert done.code == 0, done.text
    assert [event["loss"] for event in done.steps] == [event["loss"] for event in resident.steps]
    beyond = run(home, "beyond-540", DECODER + "[faults]\nrestarts = 0\n", space=space)
    assert beyond.code != 0


# --- graphs on disk --------------------------------------------------------------------------------------------------

NODES, BUDGET = 200_000, 10
GRAPH = f"""
[model]
kind = "sage"
width = 16
[data]
path = "planted:nodes=NODES,degree=6,features=128,train=TRAIN"
[graph]
fanout = [5, 5]
[store]
memory = "{BUDGET}MiB"
path = "packed-NODES"
[train]
steps = 40
batch_tokens = 128
validate_every = 40
[plan]
cluster = "CLUSTER"
trial = false
[plan.pin]
ranks = 1
"""


def graph(nodes: int, train: float, memory: str = f"{BUDGET}MiB") -> str:
    changed = GRAPH.replace("NODES", str(nodes)).replace("TRAIN", str(train))
    return changed.replace(f"{BUDGET}MiB", memory)


def test_a_graph_whose_features_are_ten_times_its_memory_trains_within_a_cgroup_and_an_address_space(home):
    """Beside the memory of a run on a small graph, which its budget holds whole: 40 MiB of edges, labels and tables."""
    for name, nodes, train in (("small", 20_000, 0.3), ("made", NODES, 0.03)):  # generates it, and compiles kernels
        made = run(home, name, graph(nodes, train))
        assert made.code == 0, made.text
    small = run(home, "small again", graph(20_000, 0.3))
    features = NODES * 128 * 4
    assert features > 9.7 * BUDGET * 2**20
    limit = small.anonymous + (40 << 20)
    within = run(home, "within", graph(NODES, 0.03), cgroup=limit)
    assert within.code == 0, within.text
    assert within.anonymous < limit < made.anonymous + features // 2
    assert [event["loss"] for event in within.steps] == [event["loss"] for event in made.steps]
    beyond = run(home, "beyond", graph(NODES, 0.03, "1GiB") + "[faults]\nrestarts = 0\n", cgroup=limit)
    assert beyond.code != 0
    narrow = run(home, "narrow", graph(NODES, 0.03), space=small.space + 2 * features + (128 << 20))
    assert narrow.code == 0, narrow.text
