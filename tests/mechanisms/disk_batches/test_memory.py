"""Memory of training from disk: anonymous memory grows by the budget, which a process limit then keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import gc, json, os, resource, sys, threading, time
from pathlib import Path

import numpy as np
import torch

from dataclasses import replace

from espalier.graph.data.graph import Graph
from espalier.graph.data.graph import DataSplit
from espalier.mechanisms.disk_batches import PrepareOptions, prepare

torch.set_num_threads(1)


def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def made(nodes, folder, train=None):
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    np.save(folder / "x.npy", random.standard_normal((nodes, 128), np.float32))
    graph = Graph.from_edges(*random.integers(0, nodes, (2, 4 * nodes)), features=np.zeros((nodes, 0), np.float32))
    if train:
        graph = replace(graph, parts=DataSplit(np.arange(train), np.arange(0), np.arange(0)))
    return graph, folder / "x.npy", folder / "packed"


def epoch(graph, features, folder, options):
    with prepare(graph, features, folder, options) as batches:
        rows = sum(len(batch.x) for batch in batches)
        return rows, batches.features.options


folder, memory = Path(sys.argv[1]), int(sys.argv[2])
epoch(*made(2000, folder / "small"), PrepareOptions(memory="64MiB", batch=100))  # what libraries take
nodes = (300_000, folder / "large") if len(sys.argv) < 5 else (10 * memory // 512 + 1, folder / "wide")
arguments = *made(*nodes, 24_000), PrepareOptions(fanout=(5, 5), batch=512, memory=memory)
if os.fork() == 0:  # packs; what that freed would hide what reading takes
    prepare(*arguments).close()
    os._exit(0)
assert os.wait()[1] == 0
gc.collect()
before, peak, ended = anonymous(), 0, threading.Event()
if len(sys.argv) > 4:
    sys.path.insert(0, sys.argv[4])
    __import__("memory_cgroup").join(int(sys.argv[3]))
elif len(sys.argv) > 3:
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]), int(sys.argv[3])))


def watch():
    global peak
    while not ended.wait(0.001):
        peak = max(peak, anonymous())


watcher = threading.Thread(target=watch)
watcher.start()
rows, options = epoch(*arguments)
ended.set()
watcher.join()
size = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmPeak"))
print(json.dumps({"grown": peak - before, "rows": rows, "address space": size, "queues": options.ahead}))
"""


def run(folder, *arguments):
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *map(str, arguments)],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.slow
def test_memory_grows_by_the_budget_and_is_kept_under_a_limit_of_the_address_space(tmp_path):
    """Within five per cent: stacks of threads and Python's own objects take 1 to 3 MiB whatever the budget."""
    memory = 64 << 20
    free = run(tmp_path, memory)
    assert 0.8 * memory <= free["grown"] <= 1.05 * memory
    assert free["rows"] * 512 > 2 * memory
    limited = run(tmp_path, memory, free["address space"])
    assert limited["rows"] == free["rows"]


@pytest.mark.slow
def test_reading_features_of_ten_times_the_memory_of_its_cgroup_ends(tmp_path):
    """The kernel kills what does not fit: the budget, five per cent, and 4 MiB of positions, blocks and stacks."""
    memory = 40 << 20
    group = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").is_dir() else Path("/sys/fs/cgroup")
    if not os.access(group, os.W_OK) or not list(group.glob("memory.*")):
        pytest.skip("no memory cgroup that this user may make groups in")
    bench = Path(__file__).parents[3] / "bench"
    found = run(tmp_path, memory, int(1.05 * memory) + (4 << 20), bench)
    assert (tmp_path / "wide" / "x.npy").stat().st_size > 10 * memory
    assert found["rows"] * 512 > 2 * memory
    killed = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(memory), str(memory // 2), str(bench)],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert killed.returncode == -9
