"""Features on disk beside data parallelism, checkpoints, kills and memory limits: no bit of training changes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import forked, launched

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.cli import main as cli
from espalier.graph.data import synthetic
from espalier.graph.data.graph import divided
from espalier.graph.workload import GraphWorkload
from espalier.launch.ranks import agent
from espalier.mechanisms.disk_batches import disk_sampler as topology
from espalier.mechanisms.disk_batches import pack, rolling_pool
from espalier.mechanisms.disk_batches.disk_sampler import DiskSampler
from espalier.plan import base as plans
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import Interrupted
from espalier.train import rank_spec as launch
from espalier.train import trainer, worker
from espalier.train.rank_setup import RankSetup

STEPS = 9
SHARES = (0.6, 0.2, 0.2)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph") / "planted"
    synthetic.write(synthetic.parse("planted:nodes=400,degree=8,features=24,seed=3"), folder)
    return divided(synthetic.opened(folder), SHARES, 1)


def recipe_of(store=None, **train):
    table = {
        "model": {"kind": "sage", "width": 8, "dropout": 0.0},
        "data": {"path": "made"},
        "graph": {"fanout": [4, 3]},
        "train": {"steps": STEPS, "precision": "fp32", "batch_tokens": 64, **train},
        **({} if store is None else {"store": store}),
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


def train(recipe, graph, ranks=1, pack=True, folder=None, stop_after=None):
    """Of rank 0: losses by step, parameters at the end, bytes that each rank read."""
    workload = GraphWorkload(recipe, graph)
    cuts = [workload.global_batch * one // ranks for one in range(ranks + 1)]
    shares = tuple(plans.Rank(share=share) for share in itertools.pairwise(cuts))
    plan = plans.Plan(ranks=shares, micro_batch=20, precision="fp32")
    places = launch.places(plan)
    if recipe.store is not None and pack:
        workload.pack([RankSetup(recipe, plan, workload, place).shard for place in places])

    def life(place):
        losses, saved = [], None

        def emit(event, **fields):
            if event == "step":
                losses.append(fields["loss"])

        with worker.joined(place, 90.0) as channel:
            setting = RankSetup(recipe, plan, workload, place, folder, emit, stop_after=stop_after)
            one = trainer.Trainer(setting, channel)
            if folder is not None:
                saved = Checkpoints(folder / "checkpoints", keep=2, group=worker.saving_group(channel))
                one.restore(saved)
            try:
                one.run(saved)
            except Interrupted:
                assert stop_after is not None
            if saved is not None:
                saved.wait()
            kept = {name: value.clone() for name, value in one.built.model.state_dict().items()}
        features = getattr(workload.batching, "features", None)
        return losses, kept, features and (features.stats.packed, features.stats.batches)

    return agent.run(life, places)


@pytest.mark.parametrize(
    ("ranks", "disk"),
    [(3, "40KiB"), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, None), (3, None), (2, "40KiB")))],
)
def test_ranks_share_one_packed_set_and_change_no_bit(graph, tmp_path, ranks, disk):
    recipe = recipe_of({"path": str(tmp_path), "memory": "1MiB", **({"disk": disk} if disk else {})})
    packed, plain = train(recipe, graph, ranks), train(recipe, graph, ranks, pack=False)
    assert packed[0][0] == plain[0][0]
    assert all(torch.equal(value, plain[0][1][name]) for name, value in packed[0][1].items())
    alone = train(recipe, graph, pack=False)
    assert packed[0][0] == pytest.approx(alone[0][0], rel=1e-5)
    (folder,) = tmp_path.iterdir()
    assert (folder / "rows.extents").stat().st_size > 0
    assert all(read[2][1] >= STEPS for read in packed)


def test_stopped_and_resumed_on_another_budget_is_unbroken(graph, tmp_path):
    def recipe(memory):
        return recipe_of({"path": str(tmp_path / "packed"), "memory": memory})

    whole = train(recipe("1GiB"), graph, 2)
    run = tmp_path / "run"
    run.mkdir()
    before = train(recipe("600KiB"), graph, 2, folder=run, stop_after=5)
    after = train(recipe("1MiB"), graph, 2, folder=run)
    assert [*before[0][0], *after[0][0]] == whole[0][0]
    assert all(torch.equal(value, after[0][1][name]) for name, value in whole[0][1].items())


@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_edges_sampled_on_disk_change_no_bit(graph, tmp_path, weighted, monkeypatch):
    if weighted:
        np.save(tmp_path / "weights.npy", np.random.default_rng(0).random(graph.edges, np.float32))
        graph = replace(graph, weights=np.load(tmp_path / "weights.npy", mmap_mode="c"))
    found = []
    for on_disk in (True, False):
        monkeypatch.setattr(topology, "stays_on_disk", lambda graph, memory: on_disk)  # noqa: B023
        recipe = recipe_of({"path": str(tmp_path / f"{on_disk}"), "memory": "1MiB"})
        workload = GraphWorkload(recipe, graph)
        assert isinstance(workload.task.train.sampler, DiskSampler) == on_disk
        found.append(train(recipe, graph, 1))
    assert found[0][0][0] == found[1][0][0]
    assert all(torch.equal(value, found[1][0][1][name]) for name, value in found[0][0][1].items())


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
def test_ranks_share_one_rolling_pool_and_a_resumed_run_is_unbroken(graph, tmp_path, share, monkeypatch):
    monkeypatch.setattr(rolling_pool, "AHEAD", 8)

    def recipe(name):
        return recipe_of({"path": str(tmp_path / name), "memory": "1MiB", "resample": share}, steps=23)

    whole = train(recipe("one"), graph, 2)
    assert whole[0][0] != train(recipe_of({"path": str(tmp_path / "kept"), "memory": "1MiB"}, steps=23), graph, 2)[0][0]
    run = tmp_path / "run"
    run.mkdir()
    before = train(recipe("two"), graph, 2, folder=run, stop_after=10)
    after = train(recipe("two"), graph, 2, folder=run)
    assert [*before[0][0], *after[0][0]] == whole[0][0]
    assert all(torch.equal(value, after[0][1][name]) for name, value in whole[0][1].items())
    kept = [sorted(path.name for path in (tmp_path / name).glob("*/epoch-*")) for name in ("one", "two")]
    assert kept[0] == kept[1]
    assert len(kept[0]) < 23 // 4


# --- programs --------------------------------------------------------------------------------------------------------

RECIPE = """
[model]
kind = "sage"
width = 16
[data]
path = "planted:nodes=30000,degree=8,features=64,train=0.1"
[graph]
fanout = [5, 5]
[store]
memory = "{memory}"
path = {path}
resample = {resample}
[train]
steps = 24
batch_tokens = 256
[plan]
cluster = "machine.toml"
trial = false
[plan.pin]
ranks = {ranks}
[checkpoint]
every = 6
keep_best = false
"""
MACHINE = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n'


def written(folder: Path, ranks: int, resample: float = 0.0, path: str = '"packed"') -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machine.toml").write_text(MACHINE)
    given = {"memory": f"{6 + 4 * ranks}MiB", "ranks": ranks, "resample": resample, "path": path}
    (folder / "disk.toml").write_text(RECIPE.format(**given))


def started(folder: Path, ranks: int, resample: float) -> subprocess.Popen[str]:
    written(folder, ranks, resample)
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder.parent / "cache"), "COLUMNS": "100"}
    return subprocess.Popen(
        [sys.executable, "-m", "espalier", "train", "disk.toml"],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.slow
def test_ranks_that_torchrun_starts_hold_striped_hot_rows_once_and_train_as_local_ranks(tmp_path):
    def run() -> Any:
        plain = pack.PackedSet.map_hot

        def told(self):
            found = plain(self)
            maps = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
            (mapped,) = {one for one in maps if one.endswith(pack.HOT_ROWS)}
            Path(f"mapped-{os.environ['RANK']}").write_text(mapped)
            return found

        pack.PackedSet.map_hot = told
        return cli.main(["train", "disk.toml"])

    kinds = {"local": '"packed"', "torchrun": '["disk-a", "disk-b"]'}
    for name, path in kinds.items():
        written(tmp_path / name, 2, path=path)
    done = forked(tmp_path / "local", "train", "disk.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    for one in launched(tmp_path / "torchrun", run):
        assert one.returncode == 0, one.stdout + one.stderr
    local, torchrun = (losses(tmp_path / name / "runs" / "disk") for name in kinds)
    assert torchrun == local
    mapped = {(tmp_path / "torchrun" / f"mapped-{rank}").read_text() for rank in (0, 1)}
    assert len(mapped) == 1
    (packed,) = (tmp_path / "torchrun" / "disk-a").glob("packed-*")
    assert mapped == {str(packed / pack.HOT_ROWS)}
    rows = [
        path.stat().st_size
        for path in (tmp_path / "torchrun").glob("disk-*/*/rows.extents*")
        if ".index" not in path.name
    ]
    assert len(rows) == 2
    assert min(rows) > 0


def losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = {event["step"]: event["loss"] for event in events if event["event"] == "step"}
    return [found[step] for step in sorted(found)]


def containers(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "packed").rglob("*.extents"))}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "resample"), [(1, 0.0), (2, 0.5)])
def test_killed_while_packing_and_while_training_the_run_ends_as_unbroken(tmp_path, ranks, resample):
    whole = started(tmp_path / "whole", ranks, resample)
    assert whole.communicate(timeout=150)[1] is None
    assert whole.returncode == 0
    marks = iter(["pool.extents.index", "rows.extents", "manifest.json", "checkpoints/*", "checkpoints/*"])
    random, folder = np.random.default_rng(0), tmp_path / "killed"
    for mark in marks:
        run = started(folder, ranks, resample)
        pattern, deadline = f"**/{mark}", time.monotonic() + 60
        while run.poll() is None and time.monotonic() < deadline and not list(folder.glob(pattern)):
            time.sleep(0.01)
        time.sleep(float(random.random()) * 0.5)
        os.kill(run.pid, signal.SIGKILL)
        run.communicate(timeout=60)
    last = started(folder, ranks, resample)
    text = last.communicate(timeout=150)[0]
    assert last.returncode == 0, text
    assert losses(folder / "runs" / "disk") == losses(tmp_path / "whole" / "runs" / "disk")
    assert containers(folder) == containers(tmp_path / "whole")
