"""Whole processes of a run on an optimizer node: what they hold does not grow with the model."""

from __future__ import annotations

import importlib
import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from nodes import buffer_bytes
from tests.mechanisms.optimizer_node.test_window import plan, recipe

from espalier.language.workload import open_language
from espalier.launch.ranks import agent
from espalier.mechanisms.optimizer_node import role
from espalier.mechanisms.optimizer_node.client import CODING
from espalier.mechanisms.optimizer_node.node import OptimizerNode
from espalier.plan.axes.node_cost import WINDOW, Layers, window_bytes
from espalier.plan.axes.node_layout import CHUNK
from espalier.train import rank_spec as launch
from espalier.train import trainer, worker
from espalier.train.rank_setup import RankSetup

MIB = 2**20
DEPTH, WIDTH, SEQUENCE, SAMPLES = 112, 256, 32, 4


def status(name: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


class Peak:
    """The most anonymous memory of this process, looked at all the time. Has state."""

    def __init__(self) -> None:
        self.first = self.most = status("RssAnon")
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.most = max(self.most, status("RssAnon"))
            time.sleep(0.002)


class Held(NamedTuple):
    """Bytes that a process held more than when it began; of a worker also those of its window of layers, of all
    parameters and of activations, of a node those of its buffers."""

    peak: int
    own: int
    parameters: int = 0
    activations: int = 0
    layer: int = 0


def run(folder: Path, depth: int, width: int, limit: int = 0, groups: Sequence[int] = (), steps: int = 2) -> list[Held]:
    """Of two workers, and of their node. `limit`: bytes that the address space of a worker may grow by; `groups`: of
    the memory cgroup of each process."""
    folder.mkdir(exist_ok=True)
    model = {"depth": depth, "width": width, "heads": 4, "feed_forward": 4 * width}
    asked = recipe(folder / "data", steps=steps, model=model, sequence=SEQUENCE, batch_tokens=SAMPLES * SEQUENCE)
    how, workload = plan(SAMPLES, SAMPLES // 2, 2), open_language(asked)

    def life(place: launch.RankSpec) -> Any:
        setting, peak = RankSetup(asked, how, workload, place, folder=folder / "run"), Peak()
        if groups:
            made = memory_cgroup().join(groups[place.rank])
            (folder / f"group-{place.rank}").write_text(str(made))
        with worker.joined(place, 150.0) as channel:
            if place.role == "optimizer":
                with buffers() as found:
                    worker.as_optimizer(setting, channel)
                return peak.most - peak.first, *found
            made = trainer.Trainer(setting, channel)
            if limit:  # threads have their stacks and heaps now
                most = status("VmSize") + limit
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
            for step in range(steps):
                made.train_step(workload.batches(step, setting.shard))
            window = made.built.context.window
            assert window is not None
            numel = tuple(one.layer.numel for one in window.layers)
            held = window_bytes(Layers(numel, tuple(map(tuple, window.uses))), WINDOW)
            assert window.peak <= WINDOW * 4 * max(numel)
            made.built.close()
            inputs, one = 4 * SAMPLES // 2 * SEQUENCE * width, 4 * max(numel)
            return peak.most - peak.first, held, 4 * sum(numel), inputs * (depth + 40), one

    return [Held(*one) for one in agent.run(life, launch.places(how))]


@contextmanager
def buffers() -> Iterator[list[int]]:
    """Of the node that is served inside, for two workers."""
    found: list[int] = []
    start = OptimizerNode.start

    def started(node: OptimizerNode) -> Any:
        found.append(buffer_bytes(node, 2))
        return start(node)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(role.OptimizerNode, "start", started)
        yield found


def memory_cgroup() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(Path(__file__).parents[3] / "bench"))
        return importlib.import_module("memory_cgroup")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Held], list[Held]]:
    """Of a model of the same depth and next to no width, which shows what is loaded, and of a large one."""
    folder = tmp_path_factory.mktemp("measured")
    return run(folder / "thin", DEPTH, 32), run(folder / "large", DEPTH, WIDTH)


@pytest.mark.slow
def test_processes_of_a_run_hold_a_window_and_buffers_of_a_model_eight_times_as_large(
    measured: tuple[list[Held], list[Held]],
) -> None:
    """Beside what is loaded. A worker has three layers of parameters, the gradients of one that is computed and of
    those that are sent, and integers on their way."""
    thin, large = measured
    for loaded, found in zip(thin[:2], large[:2], strict=True):
        allowed = found.own + found.layer + CODING * min(found.layer, 4 * CHUNK) + found.activations
        assert found.peak - loaded.peak <= 1.05 * allowed, (found, loaded)
        assert found.parameters >= 8 * (found.peak - loaded.peak)
    assert large[2].peak - thin[2].peak <= 1.15 * large[2].own, (large[2], thin[2])


@pytest.mark.slow
def test_workers_train_in_an_address_space_that_may_grow_by_a_quarter_of_the_model(tmp_path: Path) -> None:
    limit = 96 * MIB
    for found in run(tmp_path, DEPTH, WIDTH, limit=limit)[:2]:
        assert found.parameters >= 4 * limit


GROUPS = Path("/sys/fs/cgroup/memory")


def used(folder: Path, rank: int) -> int:
    """Bytes that the cgroup of a process had at most, files that the kernel kept for it left out; the cgroup goes."""
    group = Path((folder / f"group-{rank}").read_text())
    kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    most = int((group / "memory.max_usage_in_bytes").read_text()) - int(kept["cache"])
    group.rmdir()
    return most


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not GROUPS.is_dir(), reason="memory cgroups (v1) need root")
def test_a_run_ends_in_memory_cgroups_of_an_eighth_of_the_model_for_workers_and_the_buffers_for_the_node(
    tmp_path: Path, measured: tuple[list[Held], list[Held]]
) -> None:
    """Beside what is loaded. The kernel ends a process that takes more."""
    run(tmp_path / "thin", DEPTH, 32, groups=(2**32,) * 3)
    more = [found.parameters // 8 for found in measured[1][:2]] + [int(1.15 * measured[1][2].own)]
    limits = [used(tmp_path / "thin", rank) + size for rank, size in enumerate(more)]
    run(tmp_path / "large", DEPTH, WIDTH, groups=limits)
    for rank, limit in enumerate(limits):
        assert used(tmp_path / "large", rank) <= limit
