"""Experts that neither one device nor all of them hold wait in host memory, spread over the ranks of a machine."""

from __future__ import annotations

from typing import Any

import pytest

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster
from espalier.mechanisms.expert_parallel.state import ExpertParallelState
from espalier.plan.base import Offload, Plan
from espalier.plan.decide import decide
from espalier.plan.refusals import DoesNotFit
from espalier.plan.request import Request
from espalier.recipe import defaults, recipe_file
from espalier.train import table
from espalier.train.request_from_recipe import of_recipe

MIXTRAL = {
    "kind": "moe", "width": 4096, "depth": 32, "heads": 32, "kv_heads": 8, "feed_forward": 14336,
    "vocabulary": 32000, "experts": 8, "active": 2,
}  # fmt: skip
PARAMETERS = 46.7e9


def asked(tokens: int, **plan: Any) -> Request:
    train = {"sequence": 2048, "batch_tokens": tokens, "steps": 10, "optimizer": {"kind": "adamw"}, "precision": "bf16"}
    recipe = {"model": MIXTRAL, "data": {"path": "python:stdlib"}, "train": train, "plan": plan}
    return of_recipe(defaults.resolve(recipe_file.from_table(recipe))[0])


def machine(device: str = "RTX 4090", memory: str = "1TiB") -> Cluster:
    return clusters.loads(f'[[nodes]]\ndevice = "{device}"\ndevices = 8\nmemory = "{memory}"\n')


@pytest.fixture(scope="module")
def plan() -> Plan:
    return decide(asked(65536), machine()).taken


def test_mixtral_on_eight_rtx_4090_with_a_tebibyte_of_host_memory_has_a_plan_that_runs(plan: Plan) -> None:
    request = asked(65536)
    assert plan.executable
    assert plan.offload == Offload(optimizer="host", parameters="host")
    assert len(plan.state(ExpertParallelState).experts) == 8
    table.ordered(request.recipe, plan)  # raises where it cannot run


def test_what_waits_is_the_model_once_and_what_moves_is_on_the_links(plan: Plan) -> None:
    predicted = plan.predicted
    assert predicted is not None
    assert 8 * predicted.waiting_bytes["optimizer"] == pytest.approx(8 * PARAMETERS, rel=0.01)
    assert 8 * predicted.waiting_bytes["params"] == pytest.approx(4 * PARAMETERS, rel=0.01)
    # Experts are on the rank that computes with them; all else, a thirtieth, is gathered in forward and in backward.
    experts = 32 * 8 * 3 * 4096 * 14336
    others = PARAMETERS - experts
    assert predicted.sent_bytes["parameters"] == pytest.approx(2 * 4 * others * 7 / 8, rel=0.1)
    # The optimizer's step alone moves 16 bytes of each parameter to a GPU, over its sixteen lanes.
    assert predicted.terms["offload"] > 16 * PARAMETERS / 8 / 32e9
    assert predicted.memory_bytes["window"] == pytest.approx(6 * 4 * (experts / 32 / 8 + others / 32), rel=0.3)


def test_a_window_with_every_expert_on_each_rank_does_not_fit() -> None:
    whole = decide(asked(65536, pin={"ep": 1}), machine())
    assert not whole.fits


def test_inputs_of_layers_wait_beside_parameters_where_they_would_fill_the_device() -> None:
    """Four times the tokens: all micro-batches of a layer are computed before the next layer."""
    plan = decide(asked(262144), machine()).taken
    assert plan.offload == Offload(optimizer="host", parameters="host", activations="host")
    assert plan.predicted is not None
    assert plan.predicted.waiting_bytes["activations"] == 262144 / 8 * 4096 * 4 * 31
    table.ordered(asked(262144).recipe, plan)


def test_a_batch_whose_activations_the_host_does_not_hold_either_is_refused_with_one_that_fits() -> None:
    with pytest.raises(DoesNotFit, match=r"train\.batch_tokens=262144: 2 times as many steps") as caught:
        _ = decide(asked(524288), machine()).taken
    assert "activations on host" in str(caught.value.do)
