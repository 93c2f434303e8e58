"""What unequal plans say of memory beside what PyTorch's memory tracker counts of the same stages."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
import torch
from tests.mechanisms.unequal_pipelines.test_unequal import processors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from espalier.language import gpt
from espalier.mechanisms.unequal_pipelines import unequal_plan as unequal
from espalier.mechanisms.unequal_pipelines.cost import EngineCosts
from espalier.mechanisms.unequal_pipelines.pipeline_solver import Slot, UnequalLayout
from espalier.parallel.action_list import Pipeline
from espalier.parallel.model_stages import ModelStages, Placed
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import UserError
from espalier.train import request_from_recipe

SEQUENCE, DEPTH, WIDTH = 64, 8, 96
TABLE = {
    "model": {"depth": DEPTH, "width": WIDTH, "heads": 2, "tied": False},
    "data": {"path": "python:stdlib"},
    "train": {"sequence": SEQUENCE, "batch_tokens": 16 * SEQUENCE, "precision": "fp32", "optimizer": {"kind": "adamw"}},
    "plan": {"pin": {"pipelines": "unequal"}},
}
RECIPE = defaults.resolve(recipe_file.from_table(TABLE))[0]
REQUEST = request_from_recipe.of_recipe(RECIPE)


@functools.cache
def tracked(layers: tuple[int, int], flying: int, size: int, recompute: str) -> int:
    """Bytes that a stage of these layers holds at its worst moment with so many micro-batches on their way: parameters,
    gradients, AdamW's moments, activations. 1F1B; nothing is computed."""
    cuts = tuple(itertools.pairwise(sorted({0, *layers, DEPTH})))
    at = cuts.index(layers)
    first, last = at == 0, at == len(cuts) - 1
    waiting: list[Any] = []
    with FakeTensorMode():
        model: Any = gpt.GPT(RECIPE.model)  # type: ignore[arg-type]
        gpt.recompute(model, recompute)
        stages = ModelStages(model, model.pieces, Placed(Pipeline(tuple((n,) for n in range(len(cuts))), 8), cuts), at)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tokens, targets = torch.zeros(2, size, SEQUENCE, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)

        def forward() -> None:
            tracker.memory_tracking.clear()  # of modules, which it keeps for one pass
            x = None if first else torch.zeros(size, SEQUENCE, WIDTH, requires_grad=True)
            given = stages.given((tokens,), {"targets": targets} if last else {})
            out = stages.compute(at, x, given, (tokens,), {})
            waiting.append(out.sum() if last else out)

        def backward() -> None:
            out = waiting.pop(0)
            out.backward(torch.zeros_like(out))

        with tracker:
            for _ in range(flying + 2):
                if len(waiting) == flying:
                    backward()
                forward()
            while waiting:
                backward()
            optimizer.step()
        (most,) = tracker.get_tracker_snapshot("peak").values()
    return int(most["Total"])


def drawn(count: int, seed: int) -> list[tuple[EngineCosts, UnequalLayout]]:
    """So many plans of random clusters, some of which are so small that memory bounds their layers."""
    draw, found = random.Random(seed), list[tuple[EngineCosts, UnequalLayout]]()
    while len(found) < count:
        cores = [(draw.choice([1e9, 1e10, 4e10]), draw.randint(262, 330) * 2**20) for _ in range(draw.randint(2, 4))]
        recompute = draw.choice(["none", "none", "block"])
        costs = EngineCosts(REQUEST, processors(*cores), draw.choice([1, 2, 4]), recompute=recompute)
        try:
            found.append((costs, unequal.flashflex.place(costs.classes, costs, whole=draw.random() < 0.5)))
        except UserError:  # refused: nothing holds the model
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("count", "seed"), [(1, 11), *(pytest.param(25, seed, marks=pytest.mark.slow) for seed in range(100, 108))]
)
def test_no_stage_of_a_plan_really_holds_more_than_its_device_may(count: int, seed: int) -> None:
    """Nor more than the plan says, for 200 plans in all; what the process itself takes is added to what is tracked."""
    stages = 0
    for costs, layout in drawn(count, seed):
        for one in layout.pipelines:
            ends = [0, *itertools.accumulate(stage.layers for stage in one.stages)]
            for number, stage in enumerate(one.stages):
                held, limit = costs.held(stage.group, Slot(number, len(one.stages)), stage.layers)
                flying = min(len(one.stages) - number, one.micro_batches)
                real = tracked((ends[number], ends[number + 1]), flying, costs.size, costs.recompute)
                assert real <= float(sum(held.values())) - float(held["runtime"]), (number, one)
                assert real + float(held["runtime"]) <= limit
                stages += 1
    assert stages > count
