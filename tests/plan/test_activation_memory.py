"""Activations that a rank keeps between forward and backward are those of the plan's formula, within 5 per cent.

Live bytes are counted as tensors are made and freed. What embedding, head and loss keep drops out of the difference
between a deeper and a shallower model.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from espalier.cli import resolve_recipe
from espalier.language.workload import open_language
from espalier.launch.ranks import agent
from espalier.machine import cluster
from espalier.plan import base as plans
from espalier.plan import collective_time, memory_model
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.layouts import Layouts, stage_layers
from espalier.recipe import defaults, recipe_file
from espalier.recipe.cost import Cut
from espalier.train import rank_spec as launch
from espalier.train import worker
from espalier.train.rank_setup import RankSetup
from espalier.train.trainer import Trainer
from espalier.train.workload_registry import Resolved

SEQUENCE, SAMPLES = 256, 4


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made inside it that are still there. Has state."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs `func` and notes what it made."""
        found = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in given:
                self._note(one.untyped_storage())
        return found

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def freed(_: Any) -> None:
            del self._known[key]
            self.total -= size

        self._known[key] = weakref.ref(storage, freed)
        self.total += size


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(8):
        text = "".join(f"def f{i * number}(x):\n    return x * {i} + {number}\n" for i in range(200))
        (folder / f"{number}.py").write_text(text)
    return folder


def recipe_of(corpus: Path, depth: int) -> Any:
    table = {
        "model": {"depth": depth, "width": 64, "heads": 4, "kv_heads": 2, "feed_forward": 160},
        "data": {"path": str(corpus), "cache": str(corpus.parent / "cache"), "validation": 0.2},
        "train": {
            "steps": 2, "sequence": SEQUENCE, "batch_tokens": SEQUENCE * SAMPLES, "precision": "fp32",
            "optimizer": {"kind": "adamw"},
        },
    }  # fmt: skip
    return defaults.resolve(recipe_file.from_table(table))[0]


def kept(recipe: Any, plan: plans.Plan) -> list[int]:
    """Most bytes that were live at the end of a rank's last block in the forward passes of a step, by rank."""
    workload = open_language(recipe)

    def life(place: Any) -> int:
        with worker.joined(place, 90.0) as channel:
            one = Trainer(RankSetup(recipe, plan, workload, place), channel)
            shard, live, seen = one.setting.shard, LiveBytes(), []
            one.train_step(workload.batches(0, shard))
            batches = workload.batches(1, shard)
            blocks = [block for block in one.built.model.blocks if any(True for _ in block.parameters())]
            hook = blocks[-1].register_forward_hook(lambda *_: seen.append(live.total))
            with live:
                one.train_step(batches)
            hook.remove()
        return max(seen[: len(batches)])  # later ones are of recomputation

    return agent.run(life, launch.places(plan))


def per_layer(corpus: Path, made: Any) -> float:
    """Bytes that one more layer keeps on the first rank. `made`: (layers) -> plan."""
    shallow, deep = (kept(recipe_of(corpus, depth), made(depth))[0] for depth in (2, 6))
    return (deep - shallow) / 4


CUTS = {"heads": (4, 1, 1), "context": (1, 4, 2), "both": (2, 2, 2)}
OFTEN = [("heads", "none"), ("context", "selective"), ("both", "block")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("cut", "mode"),
    [
        pytest.param(cut, mode, marks=() if (cut, mode) in OFTEN else pytest.mark.slow)
        for cut in CUTS
        for mode in ("none", "selective", "block")
    ],
)
def test_of_cut_sequences(corpus: Path, cut: str, mode: str) -> None:
    heads, context, window = CUTS[cut]

    def plan(depth: int) -> plans.Plan:
        stage = plans.Stage(ranks=(0, 1, 2, 3), layers=(0, depth), heads=heads, context=context, window=window)
        ranks = (plans.Rank(share=(0, SAMPLES)),) * 4
        return plans.Plan(ranks=ranks, stages=(stage,), micro_batch=SAMPLES, algorithm="isp", recompute=mode)

    request = resolve_recipe.request(Resolved(recipe_of(corpus, 2)))
    wanted = request.profile.anatomy(SAMPLES, mode, "fp32", Cut(sequence=4, heads=heads)).layer.saved
    assert per_layer(corpus, plan) == pytest.approx(float(wanted), rel=0.05)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_of_pipelines(corpus: Path, mode: str) -> None:
    """The first of two stages keeps two of four micro-batches."""

    def plan(depth: int) -> plans.Plan:
        layers = stage_layers(depth, 2)
        stages = tuple(plans.Stage(ranks=(n,), layers=layers[n], micro_batches=SAMPLES) for n in range(2))
        ranks = (plans.Rank(share=(0, SAMPLES)),) * 2
        return plans.Plan(ranks=ranks, stages=stages, micro_batch=1, recompute=mode)

    def wanted(depth: int) -> float:
        request = resolve_recipe.request(Resolved(recipe_of(corpus, depth)))
        on = collective_time.fleet(cluster.loads('[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n'), 2)
        step = CostInputs(request, on, on.kinds[0], Layouts(pp=2, recompute=mode))
        return float(memory_model.ends(step, 1, SAMPLES)[0]["activations"])

    assert per_layer(corpus, plan) == pytest.approx((wanted(6) - wanted(2)) / 4, rel=0.05)
