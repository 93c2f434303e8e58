"""Unequal pipelines as plans of recipes: what is chosen, what is held, what is said."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from espalier import cluster as clusters
from espalier.cluster import Cluster
from espalier.config import defaults, recipe_file
from espalier.errors import UserError
from espalier.plan import base as plans
from espalier.plan import request_from_recipe, unequal
from espalier.plan.calibrate import DATASHEET
from espalier.plan.decide import decide
from espalier.plan.request import Request

ROOT = Path(__file__).parents[2]


def asked(pipelines: str | None = "unequal", **model: int) -> Request:
    table = {
        "model": {"depth": 8, "width": 96, "heads": 2} | model,
        "data": {"path": "python:stdlib"},
        "train": {"sequence": 128, "batch_tokens": 2048, "precision": "fp32", "optimizer": {"kind": "adamw"}},
        "plan": {"pin": {} if pipelines is None else {"pipelines": pipelines}},
    }
    return request_from_recipe.of_recipe(defaults.resolve(recipe_file.from_table(table))[0])


def processors(*cores: tuple[float, int], bandwidth: str = "1Gbit/s") -> Cluster:
    """(FLOP/s, bytes of memory) of each processor, all in one machine."""
    tables = [
        f'[[nodes]]\nname = "here"\ncores = 1\nmemory = {memory}\n'
        f'inside = {{ bandwidth = "{bandwidth}", latency = "100us", launch = "100us" }}\n'
        f'[nodes.device]\nname = "core {number}"\nkind = "cpu"\nmemory = {memory}\nmemory_bandwidth = 1e10\n'
        f"flops = {{ fp32 = {flops} }}\npeak = false\n"
        for number, (flops, memory) in enumerate(cores)
    ]
    return clusters.loads("\n".join(tables))


GIB = 2**30


def test_slow_devices_get_fewer_layers_or_samples() -> None:
    plan = decide(asked(), processors((4e10, GIB), (1e10, GIB)), DATASHEET).taken
    plans.check(plan, 16)
    work = [0.0, 0.0]
    for stage in plan.stages:
        start, stop = plan.ranks[stage.ranks[0]].share
        work[stage.ranks[0]] += (stop - start) * (stage.layers[1] - stage.layers[0])
    assert work[0] > 2 * work[1]
    assert plan.planner == "flashflex"
    assert plan.predicted is not None
    assert sum(plan.predicted.terms.values()) == pytest.approx(plan.predicted.step_seconds)
    assert any("Devices differ" in why for why in plan.why)


def test_what_does_not_help_is_left_out_and_it_is_said() -> None:
    slow = processors((4e10, GIB), (4e10, GIB), (1e8, GIB))
    plan = decide(asked(), slow, DATASHEET).taken
    assert len(plan.ranks) == 2
    told = [why for why in plan.why if "core 2 is left out" in why]
    assert told
    assert "with it a step takes" in told[0]


def test_equal_devices_are_planned_as_before() -> None:
    same = processors((4e10, GIB), (4e10, GIB))
    assert decide(asked(None), same, DATASHEET).taken.planner == "search"
    assert unequal.asked(asked("equal"), processors((4e10, GIB), (1e10, GIB)))
    assert decide(asked("equal"), processors((4e10, GIB), (1e10, GIB)), DATASHEET).taken.planner == "search"


def test_no_plan_holds_more_than_its_devices_may() -> None:
    """200 random clusters, some of which are too small for any plan."""
    draw, made = random.Random(3), 0
    request = asked()
    for _ in range(200):
        count = draw.randint(1, 3)
        cores = [(draw.choice([1e9, 1e10, 4e10]), draw.randint(262, 330) * 2**20) for _ in range(count)]
        costs = unequal.EngineCosts(request, processors(*cores), draw.choice([1, 2, 4]))
        try:
            layout = unequal.flashflex.place(costs.classes, costs)
        except UserError:  # refused: nothing holds the model
            continue
        made += 1
        for one in layout.pipelines:
            for number, stage in enumerate(one.stages):
                slot = unequal.Slot(number, len(one.stages))
                held, limit = costs.held(stage.group.kind, slot, stage.layers)
                assert float(sum(held.values())) <= limit
    assert 50 < made < 200


def test_the_example_is_planned_with_unequal_stages() -> None:
    recipe, _ = defaults.resolve(recipe_file.load(ROOT / "examples" / "unequal.toml", []))
    cluster = clusters.read(ROOT / "examples" / "unequal-cluster.toml")
    plan = decide(request_from_recipe.of_recipe(recipe), cluster, DATASHEET).taken
    assert plan.planner == "flashflex"
    layers = [stage.layers[1] - stage.layers[0] for stage in plan.stages]
    assert len(set(layers)) > 1
