"""The planned peak of a rank, allocator and libraries aside, is within a twentieth of what its tensors take at most."""

from __future__ import annotations

import random
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.mechanisms.pipeline.runs import corpus
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import espalier
from espalier.language.workload import open_language
from espalier.launch.ranks import agent
from espalier.machine import cluster as clusters
from espalier.mechanisms.expert_parallel import mechanism as expert_parallel
from espalier.mechanisms.expert_parallel.flashmoe import shared_memory
from espalier.mechanisms.pipeline import mechanism as pipeline
from espalier.mechanisms.sharding import async_collectives
from espalier.plan.axes import offload
from espalier.plan.base import RESIDENT, Offload, Plan
from espalier.recipe import Recipe, defaults, recipe_file
from espalier.train import rank_spec, trainer, worker
from espalier.train.rank_setup import RankSetup

BEYOND = ("peak", "runtime", "slack", "staging")
"""Kinds of memory that are no tensors."""
BOUND = 0.05
SHARED = 0.1
"""The bound where states, matrices, sequences or experts are shared: not a twentieth yet."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return corpus(tmp_path_factory.mktemp("corpus"))


class MostTensorBytes(TorchDispatchMode):
    """Counts the most bytes that tensors made inside it took at once, as their storages are after each operation. Has
    state."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known[storage._cdata] = weakref.ref(
                        storage, lambda _, key=storage._cdata: self._known.pop(key)
                    )
        storages = [known() for known in [*self._known.values()]]
        self.most = max(self.most, sum(storage.nbytes() for storage in storages if storage is not None))
        return result


def allocated(recipe: Recipe, plan: Plan) -> int:
    """Bytes of tensors at the worst moment of two steps, on the rank that has most."""
    opened = open_language(recipe)

    def life(place: Any) -> int:
        with worker.joined(place, 90.0) as channel, MostTensorBytes() as counted:
            made = trainer.Trainer(RankSetup(recipe, plan, opened, place), channel)
            made.run()
            made.built.close()
            return counted.most

    return max(agent.run(life, rank_spec.places(plan)))


def planned(plan: Plan) -> float:
    """Bytes of tensors, of the tightest rank."""
    assert plan.predicted is not None
    return sum(size for kind, size in plan.predicted.memory_bytes.items() if kind not in BEYOND)


class PeakCase(NamedTuple):
    """A small model, what is pinned of its plan, and what waits on disk."""

    model: dict[str, Any]
    pins: dict[str, Any]
    away: Offload = RESIDENT
    ranks: int = 1
    precision: str = "fp32"


STATES, WINDOW = Offload(optimizer="disk"), Offload(optimizer="disk", parameters="disk")
AWAY = (RESIDENT, STATES, WINDOW, WINDOW.changed(activations="disk"))


def drawn(seed: int) -> PeakCase:
    """Experts or none, on one rank, in memory or waiting in each way in turn."""
    draw, away = random.Random(seed), AWAY[seed % len(AWAY)]
    width, mixture = draw.choice((48, 64)), draw.random() < 0.5
    model = {"depth": 5, "width": width, "heads": 4, "kv_heads": 2}
    model |= {"kind": "gpt", "feed_forward": 2 * width}
    model |= {"kind": "moe", "feed_forward": width, "experts": 2, "active": 1} if mixture else {}
    window = away.parameters != "device"  # layers are then computed again without being told so
    pins = {"micro_batch": draw.choice((1, 2, 4)), "recompute": "block" if window else draw.choice(("none", "block"))}
    return PeakCase(model, pins, away)


def staged(seed: int) -> PeakCase:
    """Dense layers over the stages of a pipeline."""
    draw = random.Random(seed)
    pp, width = draw.choice((2, 2, 4)), draw.choice((48, 64))
    model = {"kind": "gpt", "depth": 2 * pp, "width": width, "heads": 4, "kv_heads": 2, "feed_forward": 2 * width}
    pins = {"pp": pp, "schedule": ("1f1b", "zero_bubble")[seed % 2], "micro_batch": draw.choice((2, 4))}
    return PeakCase(model, pins | {"recompute": draw.choice(("none", "block"))}, ranks=pp)


KINDS = ("replicated", "zero_1", "zero_2", "zero_3", "hybrid", "tensor", "tensor_sharded", "ulysses", "ring", "experts")


def spread(seed: int) -> PeakCase:
    """A decoder of up to four layers, over two or four ranks in each way in turn."""
    draw, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    width, ranks = draw.choice((64, 128, 256)), draw.choice((2, 4))
    model = {"kind": "gpt", "depth": draw.choice((2, 3, 4)), "width": width, "heads": 4, "kv_heads": 4}
    model["feed_forward"] = draw.choice((2, 3)) * width
    pins: dict[str, Any] = {
        "micro_batch": draw.choice((2, 4)),
        "recompute": draw.choice(("none", "selective", "block")),
    }
    ranks = 4 if kind in ("hybrid", "tensor_sharded") else ranks
    factors = {
        "zero_1": (1, 1, ranks), "zero_2": (1, ranks, ranks), "zero_3": (ranks, ranks, ranks),
        "hybrid": (2, 2, draw.choice((2, 4))), "tensor_sharded": (2, 2, 2),
    }.get(kind, (1, 1, 1))  # fmt: skip
    pins["shard"] = dict(zip(("params", "grads", "optimizer"), factors, strict=True))
    if kind in ("ulysses", "ring"):
        pins |= {"hp" if kind == "ulysses" else "cp": ranks, "algorithm": "isp"}
    if kind.startswith("tensor"):
        pins |= {"tp": 2 if kind == "tensor_sharded" else ranks, "algorithm": draw.choice(("megatron", "fsp"))}
    if kind == "experts":
        model |= {"kind": "moe", "feed_forward": width, "experts": 8, "active": draw.choice((1, 2))}
        pins["ep"] = ranks
    precision = (
        "fp32" if kind == "replicated" else draw.choice(("fp32", "bf16"))
    )  # else copies of what is cast come and go
    return PeakCase(model, pins, ranks=ranks, precision=precision)


def as_late_as_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """No exchange arrives before it is waited for; tokens go to all experts alike, through no more memory than rows."""

    def even(self: Any, x: Any, chosen: Any, weights: Any, experts: Any) -> Any:
        count = sum(map(len, self.route.expert_map.ranks))
        return route(self, x, (torch.arange(chosen.numel()) % count).view_as(chosen), weights, experts)

    route = expert_parallel.ExpertGroup.__call__
    monkeypatch.setattr(async_collectives.Chain, "arrived", lambda self: self._work is None)
    monkeypatch.setattr(shared_memory, "CHUNK", 2**12)
    monkeypatch.setattr(expert_parallel.ExpertGroup, "__call__", even)


def peaks(folder: Path, case: PeakCase, monkeypatch: pytest.MonkeyPatch) -> tuple[float, int]:
    """Planned and allocated."""
    monkeypatch.setattr(offload, "ways", lambda *_: [case.away])
    table = {
        "model": case.model,
        "data": {"path": str(folder), "cache": str(folder.parent / "cache"), "validation": 0.2},
        "train": {
            "steps": 2, "sequence": 64, "batch_tokens": 2048, "precision": case.precision,
            "optimizer": {"kind": "adamw"}, "validate_every": 100,
        },
        "faults": {"memory": 0},
    }  # fmt: skip
    recipe = defaults.resolve(recipe_file.from_table(table))[0]
    disk = 'disks = [{ path = "/d", write = 8e9, read = 8e9, iops = 1e4 }]\n'
    cluster = clusters.loads(f'[[nodes]]\ndevice = "cpu"\ncores = {case.ranks}\nmemory = "8GiB"\n{disk}')
    pinned = "none" if case.away == RESIDENT else "disk"
    plan = espalier.make_plan(recipe, cluster, ranks=case.ranks, offload=pinned, **case.pins)
    assert plan.offload == case.away
    return planned(plan), allocated(recipe, plan)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed not in (4, 14) else ()) for seed in range(40)]
)
def test_the_planned_peak_is_the_allocated_one(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    foretold, most = peaks(folder, drawn(seed), monkeypatch)
    assert foretold == pytest.approx(most, rel=BOUND), drawn(seed)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed != 1 else ()) for seed in range(12)]
)
def test_the_planned_peak_of_a_pipeline_is_the_allocated_one(
    folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without forward passes ahead, which take memory that the plan leaves."""
    monkeypatch.setattr(pipeline, "ahead", lambda *_: [])
    foretold, most = peaks(folder, staged(seed), monkeypatch)
    assert foretold == pytest.approx(most, rel=BOUND), staged(seed)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed != 1 else ()) for seed in range(40)]
)
def test_the_planned_peak_of_shared_states_is_the_allocated_one(
    folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the latest that exchanges may end."""
    as_late_as_they_may(monkeypatch)
    foretold, most = peaks(folder, spread(seed), monkeypatch)
    assert foretold == pytest.approx(most, rel=SHARED), spread(seed)
