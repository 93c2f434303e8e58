"""Four hosts on slow links, each a network namespace: measured, planned for, trained on, killed and gone on with."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from espalier.machine import cluster as clusters

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

RATE, DELAY = 50e6, 0.005
RECIPE = """
[model]
depth = 1
width = 32
heads = 2

[data]
path = "corpus"
validation = 0.2

[train]
steps = 4
sequence = 32
batch_tokens = 256
validate_tokens = 1024

[plan]
trial = false

[plan.pin]
threads = 1

[comm]
codec = "exact"

[sync]
kind = "every_step"

[launch]
command = "ip netns exec {host} sh -c {command}"
"""


def netlab_of() -> Any:
    """The module of bench/netlab.py."""
    file = Path(__file__).parents[2] / "bench" / "netlab.py"
    spec = importlib.util.spec_from_file_location("netlab", file)
    assert spec is not None
    assert spec.loader is not None
    netlab = sys.modules["netlab"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(netlab)
    return netlab


@pytest.fixture(scope="module")
def lab() -> Iterator[str]:
    """Four namespaces at 50 Mbit/s and 5 ms; their names with commas."""
    netlab = netlab_of()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with netlab.Lab(netlab.Shape(nodes=4, hosts=1, rate=RATE, delay=DELAY)) as made:
            yield ",".join(made._host(index) for index in range(4))
    except RuntimeError as error:
        pytest.skip(str(error))
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "corpus").mkdir()
    for number in range(12):
        (folder / "corpus" / f"{number}.txt").write_text(f"The number {number} comes before {number + 1}.\n" * 40)
    return folder


@pytest.fixture(scope="module")
def measured(lab: str, home: Path) -> clusters.Cluster:
    command = "launch.command=ip netns exec {host} sh -c {command}"
    done = espalier(home, "probe", "--hosts", lab, command, "--out", "four.toml")
    assert done.returncode == 0, done.stderr
    return clusters.read(home / "four.toml")


def command_line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "espalier", *arguments]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(home / "cache"), "COLUMNS": "100"}


def espalier(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command_line(*arguments), cwd=home, env=environment(home), capture_output=True, text=True, timeout=400,
        check=False,
    )  # fmt: skip


def events(home: Path, run: str, kind: str) -> list[dict[str, Any]]:
    file = home / "runs" / run / "events.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def processes(lab: str) -> list[str]:
    """What still runs in the namespaces."""
    found = []
    for host in lab.split(","):
        listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=False)
        found += listed.stdout.split()
    return found


def none_left(lab: str, within: float = 15.0) -> bool:
    deadline = time.monotonic() + within
    while processes(lab) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not processes(lab)


def test_the_links_between_the_hosts_are_measured_as_they_are(measured, home) -> None:
    assert measured.machines == 4
    assert len(measured.pairs) == 6
    for pair in measured.pairs:
        assert pair.bandwidth == pytest.approx(RATE / 8, rel=0.2)
        assert DELAY <= pair.latency < 4 * DELAY
    assert measured.between is not None
    planned = espalier(home, "plan", "recipe.toml", "--cluster", "four.toml", "plan.pin.ranks=4", "--json")
    assert planned.returncode == 0, planned.stderr
    assert [rank["node"] for rank in json.loads(planned.stdout)["ranks"]] == [0, 1, 2, 3]


def test_four_hosts_train_as_four_local_ranks_do(lab, home, measured) -> None:
    far = espalier(home, "train", "recipe.toml", "--hosts", lab, "plan.cluster=four.toml", "name=far")
    assert far.returncode == 0, far.stdout + far.stderr
    near = espalier(home, "train", "recipe.toml", "plan.pin.ranks=4", "name=near")
    assert near.returncode == 0, near.stdout + near.stderr
    expected = [event["loss"] for event in events(home, "near", "step")]
    assert [event["loss"] for event in events(home, "far", "step")] == pytest.approx(expected, rel=1e-5)
    assert len(expected) == 4
    assert far.stdout.count("step 1/4") == 1
    assert none_left(lab)


def begun(home: Path, run: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 100
    while len(events(home, run, "step")) < 3 and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def endless(home: Path, lab: str, run: str) -> subprocess.Popen[str]:
    every = ("train.steps=100000", "train.validate_every=100000", "checkpoint.every=100000")
    arguments = ("train", "recipe.toml", "--hosts", lab, "plan.cluster=four.toml", f"name={run}", *every)
    process = subprocess.Popen(
        command_line(*arguments), cwd=home, env=environment(home), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    begun(home, run, process)
    return process


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_killed_rank_is_named_with_its_host_and_all_go_on(lab, home, measured) -> None:
    process = endless(home, lab, "killed")
    third = lab.split(",")[2]
    listed = subprocess.run(["ip", "netns", "pids", third], capture_output=True, text=True, check=True)
    pids = [int(word) for word in listed.stdout.split()]
    children = [
        pid for pid in pids if parent(pid) in pids
    ]  # of the host's supervisor: a rank, and the way to the store
    (victim,) = (pid for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() != "espalier-store")
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 100
    while not events(home, "killed", "recovered") and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    (incident,) = [one for one in events(home, "killed", "incident") if one["kind"] != "lost"]
    assert incident["what"] == f"On host {third}: Rank 2 was killed (SIGKILL)."
    assert incident["what"] in errors
    assert none_left(lab)


def test_an_interrupt_saves_and_the_same_command_resumes(lab, home, measured) -> None:
    process = endless(home, lab, "long")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, output + errors
    assert "run the same command again to go on" in errors
    assert none_left(lab)
    reached = len(events(home, "long", "step"))
    process = subprocess.Popen(
        process.args, cwd=home, env=environment(home), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 100
    while len(events(home, "long", "step")) < reached + 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.kill()  # the launcher dies: its ranks notice, save and end
    process.communicate(timeout=60)
    assert none_left(lab)
    steps = [event["step"] for event in events(home, "long", "step")]
    assert steps == list(range(1, len(steps) + 1))


def test_four_hosts_agree_by_rounds_that_were_planned_for_their_links(lab, home, measured) -> None:
    asked = ("sync.kind=co2", "train.steps=24", "train.validate_every=12", "checkpoint.every=12", "model.width=128")
    arguments = ("train", "recipe.toml", "--hosts", lab, "plan.cluster=four.toml", "name=rounds", *asked)
    done = espalier(home, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "local steps hide that in full precision" in done.stdout.replace("\n", " ")
    plan = json.loads((home / "runs" / "rounds" / "plan.json").read_text())
    assert plan["choices"]["local_rounds"]["replicas"] == [[0], [1], [2], [3]]
    assert plan["choices"]["local_rounds"]["steps"] > 1
    losses = [event["loss"] for event in events(home, "rounds", "validation")]
    assert len(losses) >= 2
    assert losses[-1] < losses[0]
    traffic = [event["bytes"] for event in events(home, "rounds", "step")]
    assert any(sent.get("outer_step") for sent in traffic)
    assert not any(sent.get("gradients") for sent in traffic)
    assert none_left(lab)


SERVED = """
[[nodes]]
device = "cpu"
cores = 2
memory = "4GiB"

[[nodes]]
count = 2
device = "cpu"
cores = 1
memory = "4GiB"
role = "optimizer"
disks = [{ path = "/", write = 1e9, read = 1e9, iops = 1e4 }]

[links]
between = "50Mbit/s"
"""


def test_workers_reach_two_nodes_on_other_hosts_through_the_aggregator_of_theirs(lab, home) -> None:
    """Two workers behind one link, an optimizer node on each of two other hosts: as many ranks on one machine."""
    (home / "served.toml").write_text(SERVED)
    first, second, third, _ = lab.split(",")
    adamw = "train.optimizer.kind=adamw"
    on_nodes = [adamw, "plan.cluster=served.toml", "plan.pin.offload=node", "--run", "runs/served"]
    done = espalier(home, "train", "recipe.toml", *on_nodes, "--hosts", f"{first}:2,{second},{third}")
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = json.loads((home / "runs" / "served" / "plan.json").read_text())["ranks"]
    roles = [(one["role"], one.get("node", 0)) for one in ranks[2:]]
    assert roles == [("optimizer", 1), ("optimizer", 2), ("aggregator", 0)]
    plain = espalier(home, "train", "recipe.toml", adamw, "plan.pin.ranks=2", "--run", "runs/together")
    assert plain.returncode == 0, plain.stderr
    served, together = ([one["loss"] for one in events(home, run, "step")] for run in ("served", "together"))
    assert len(served) == 4
    assert served == pytest.approx(together, rel=1e-5)
    assert len(list((home / "runs" / "served" / "optimizer").glob("node-*/state"))) == 2
    assert none_left(lab)


SUMMED = """
[[nodes]]
count = 2
device = "cpu"
cores = 1
memory = "4GiB"
between = "10Mbit/s"

[[nodes]]
device = "cpu"
cores = 1
memory = "4GiB"
between = "10Mbit/s"
role = "optimizer"
disks = [{ path = "/", write = 1e9, read = 1e9, iops = 1e4 }]

[[nodes]]
device = "cpu"
cores = 1
memory = "4GiB"
role = "aggregator"

[links]
between = "50Mbit/s"
"""


def test_an_aggregator_on_a_host_of_its_own_changes_no_bit(lab, home) -> None:
    (home / "summed.toml").write_text(SUMMED)
    fixed = ["train.optimizer.kind=adamw", "plan.cluster=summed.toml", "plan.pin.offload=node", "plan.pin.ranks=2"]
    for run, roles in (("summed", '["aggregator"]'), ("direct", "[]")):
        asked = [*fixed, f"plan.pin.roles={roles}", "comm.codec=int8", "--run", f"runs/{run}"]
        done = espalier(home, "train", "recipe.toml", *asked, "--hosts", lab)
        assert done.returncode == 0, done.stdout + done.stderr
    ranks = json.loads((home / "runs" / "summed" / "plan.json").read_text())["ranks"]
    assert [(one["role"], one.get("node", 0)) for one in ranks[2:]] == [("optimizer", 2), ("aggregator", 3)]
    summed, direct = ([one["loss"] for one in events(home, run, "step")] for run in ("summed", "direct"))
    assert len(summed) == 4
    assert summed == direct
    assert none_left(lab)


PACKED = """
[model]
kind = "sage"
width = 16

[data]
path = "planted:nodes=20000,degree=8,features=64,train=0.1"

[graph]
fanout = [5, 5]

[store]
memory = "9MiB"
path = "packed"
resample = 0.5

[train]
steps = 20
batch_tokens = 256
validate_every = 20

[plan]
trial = false

[plan.pin]
threads = 1

[comm]
codec = "exact"

[sync]
kind = "every_step"

[launch]
command = "ip netns exec {host} sh -c {command}"
"""
HOSTS = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "4GiB"\n'


def test_two_hosts_train_on_packed_batches_as_as_many_local_ranks_do(lab, home) -> None:
    """Two ranks on the first share a set, and the second packs its own; half of each is drawn anew for every epoch."""
    (home / "packed.toml").write_text(PACKED)
    (home / "two.toml").write_text(HOSTS + HOSTS + '[links]\nbetween = "50Mbit/s"\n')
    (home / "one.toml").write_text(HOSTS)
    first, second, *_ = lab.split(",")
    pinned = ["plan.pin.ranks=3", "plan.cluster=two.toml", "--run", "runs/apart"]
    done = espalier(home, "train", "packed.toml", *pinned, "--hosts", f"{first}:2,{second}")
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = json.loads((home / "runs" / "apart" / "plan.json").read_text())["ranks"]
    assert [one.get("node", 0) for one in ranks] == [0, 0, 1]
    sets = list((home / "packed").glob("packed-*"))
    assert len(sets) == 2
    assert all(list(one.glob("epoch-*")) for one in sets)
    pinned = ["plan.pin.ranks=3", "plan.cluster=one.toml", "store.memory=16MiB", "--run", "runs/beside"]
    local = espalier(home, "train", "packed.toml", *pinned)
    assert local.returncode == 0, local.stderr
    apart, beside = ([one["loss"] for one in events(home, run, "step")] for run in ("apart", "beside"))
    assert len(apart) == 20
    period = -(-2000 // 256)
    assert apart[:period] == pytest.approx(beside[:period], rel=1e-5)
    read = [event["store"]["packed"] for event in events(home, "apart", "step")]
    assert sum(read) > len(apart) * 86 * 64 * 4  # batches are read ahead, so steps count them together
    assert none_left(lab)
