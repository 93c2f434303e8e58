"""FlashFlex's own JSON as a plan: what it says is what the plan has; what cannot be is refused by name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier.machine import cluster as clusters
from espalier.plan import base as plans
from espalier.plan.calibration import DATASHEET
from espalier.plan.decide import decide
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import UserError
from espalier.train import request_from_recipe

NOTE = clusters.loads("""
nodes = [
    { device = "A100-80GB", devices = 3 },
    { device = "RTX 4090", devices = 3 },
    { device = "RTX 3090", devices = 2 },
]
links = { between = "10Gbit/s" }
""")
RELEASED = {
    "hetero_configs": [[1, 1, 1, 2, 1, 1, 1]],
    "layer_partitions": [[2, 2, 2, 15, 7, 2, 2]],
    "devices_id": [[[1], [1], [1], [0, 0], [0], [2], [2]]],
}
"""What the released scheduler prints for LLaMA-7B on this cluster."""
Planned = Callable[..., plans.Plan]


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    def plan(file: dict[str, Any], depth: int = 32) -> plans.Plan:
        path = tmp_path / "pipelines.json"
        path.write_text(json.dumps(file))
        model = {"depth": depth, "width": 4096, "heads": 32, "feed_forward": 11008, "vocabulary": 32000, "tied": False}
        table = {
            "model": model,
            "data": {"path": "python:stdlib"},
            "train": {"sequence": 4096, "batch_tokens": 24 * 4096, "precision": "bf16", "optimizer": {"kind": "adamw"}},
            "plan": {"pin": {"pipelines": str(path)}},
        }
        recipe, _ = defaults.resolve(recipe_file.from_table(table))
        made = decide(request_from_recipe.of_recipe(recipe), NOTE, DATASHEET).taken
        return plans.check(made, 24)

    return plan


def layers(plan: plans.Plan) -> list[int]:
    return [last - first for first, last in (one.layers for one in plan.stages)]


def test_the_plan_of_the_released_scheduler_is_taken_as_it_is_and_priced(planned: Planned) -> None:
    plan = planned(RELEASED)
    assert layers(plan) == RELEASED["layer_partitions"][0]
    assert [one.tensor for one in plan.stages] == RELEASED["hetero_configs"][0]
    nodes = [[plan.ranks[rank].node for rank in one.ranks] for one in plan.stages]
    assert nodes == RELEASED["devices_id"][0]
    assert plan.predicted is not None
    assert plan.predicted.step_seconds > 1
    assert plan.algorithm == "megatron"


def test_samples_and_micro_batches_of_the_file_are_kept(planned: Planned) -> None:
    file = {"hetero_configs": [[1, 1], [1, 1]], "layer_partitions": [[4, 4], [7, 1]], "global_bsz": [16, 8]}
    plan = planned(file | {"chunks": [8, 4], "devices_id": [[[0], [0]], [[0], [1]]]}, depth=8)
    shares = {plan.ranks[one.ranks[0]].share for one in plan.stages}
    assert shares == {(0, 16), (16, 24)}
    assert plan.micro_batch == 2
    assert [one.micro_batches for one in plan.stages] == [8, 8, 4, 4]


@pytest.mark.extremes
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"layer_partitions": [[2, 2, 2, 15, 7, 2]]}, "pipelines of 7 stages, layer_partitions of 6"),
        ({"layer_partitions": [[2, 2, 2, 15, 7, 2, 3]]}, "hold 2, 2, 2, 15, 7, 2, 3 layers, and the model has 32"),
        ({"layer_partitions": [[0, 4, 2, 15, 7, 2, 2]]}, "hold 0, 4, 2, 15, 7, 2, 2 layers"),
        ({"layer_partitions": [[14, 2, 2, 3, 7, 2, 2]]}, "has 14 layers, and RTX 4090 of machine 1 holds"),
        (
            {"devices_id": [[[1], [1], [1], [0, 2], [0], [2], [2]]]},
            "stage 3 of pipeline 0 needs 2 devices of machine 0, 2",
        ),
        ({"devices_id": [[[1], [1], [1], [0, 0], [0], [2], [7]]]}, "needs 1 devices of machine 7"),
        ({"devices_id": [[[1], [1]]]}, "does not name one machine for each rank"),
        ({"global_bsz": [12]}, "12 samples, and a step has 24"),
        ({"global_bsz": [24], "chunks": [7]}, "micro-batches of 3.42857 samples"),
        ({"hetero_configs": [[]]}, "has no stage"),
        ({"hetero_configs": "[[1]]"}, "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_by_name(planned: Planned, change: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        planned(RELEASED | change)


def test_a_file_that_is_not_there_and_a_word_that_is_none_are_refused() -> None:
    table = {"model": {"kind": "gpt"}, "data": {"path": "python:stdlib"}}
    for value, what in (("nowhere.json", "cannot be read"), ("uneven", "'uneven' is not possible")):
        recipe, _ = defaults.resolve(recipe_file.from_table(table | {"plan": {"pin": {"pipelines": value}}}))
        request = request_from_recipe.of_recipe(recipe)
        with pytest.raises(UserError, match=what):
            decide(request, clusters.loads('[[nodes]]\ndevice = "RTX 3090"\ndevices = 2'), DATASHEET)


def test_devices_are_taken_in_order_where_the_file_names_none(planned: Planned) -> None:
    plan = planned({"hetero_configs": [[2, 1, 1, 1]], "layer_partitions": [[17, 9, 3, 3]]})
    assert [plan.ranks[one.ranks[0]].node for one in plan.stages] == [0, 0, 1, 1]
    assert list(itertools.accumulate(layers(plan))) == [17, 26, 29, 32]
