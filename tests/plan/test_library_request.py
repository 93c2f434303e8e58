"""The planner as library calls: a recipe, its path and a bare module; pins by name; what cannot be is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from asked import decoder, gpus, processor

import espalier
from espalier.plan import Calibration, calibrate, estimate
from espalier.plan.base import Layout
from espalier.plan.calibration import Measurement
from espalier.plan.calibration_factors import CostFactors
from espalier.plan.layouts import Layouts
from espalier.recipe.errors import UserError

RECIPE = """
[model]
kind = "gpt"
shape = "gpt2-124m"
[data]
path = "python:stdlib"
[train]
steps = 10
sequence = 1024
batch_tokens = 65536
precision = "bf16"
"""


def test_a_recipe_and_its_path_give_the_same_plan(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    plans = [espalier.make_plan(model, gpus(devices=4)) for model in (path, str(path), espalier.load(path))]
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].layout.dp == 4
    assert plans[0].why


def test_a_bare_module_is_planned_by_its_parameters() -> None:
    model = torch.nn.Linear(1000, 1000)
    plan = espalier.make_plan(model, gpus(devices=2), batch=64, shard={"params": 1, "grads": 1, "optimizer": 2})
    assert plan.layout.shard["optimizer"] == 2
    assert plan.predicted is not None
    assert plan.predicted.memory_bytes["grads"] == 4 * 1_001_000
    assert plan.predicted.memory_bytes["optimizer"] == 8 * 1_001_000 / 2


def test_a_module_of_a_hundred_times_the_size_needs_shards() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(32768, 32768) for _ in range(8)))
    plan = espalier.make_plan(model, gpus(devices=8), batch=64)
    assert plan.layout.shard["optimizer"] > 1
    assert plan.executable


def test_pins_bind_and_a_slip_is_named() -> None:
    model = torch.nn.Linear(100, 100)
    assert espalier.make_plan(model, processor(cores=4), batch=8, ranks=2).layout.dp == 2
    with pytest.raises(UserError, match="micro_batch"):
        espalier.make_plan(model, gpus(), batch=8, micro_bach=2)
    with pytest.raises(UserError, match="batch"):
        espalier.make_plan(model, gpus())
    with pytest.raises(UserError, match="Linear does not say how ranks may share its matrices"):
        espalier.make_plan(model, gpus(), batch=8, tp=2)
    with pytest.raises(UserError, match="pp = 2: only decoders of kind gpt and moe are cut by the planner"):
        espalier.make_plan(model, gpus(), batch=8, pp=2)
    with pytest.raises(UserError, match="not a model"):
        espalier.make_plan(3, gpus(), batch=8)


def test_what_fits_nowhere_is_an_error() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(200_000, 200_000)
    with pytest.raises(UserError, match="missing"):
        espalier.make_plan(model, gpus(devices=1), batch=8)


def test_an_estimate_takes_a_layout_as_a_plan_shows_it() -> None:
    request, cluster = decoder(2048, 8, 1024, 64), gpus(count=2)
    plan = espalier.make_plan(request, cluster)
    found = estimate(request, cluster, plan.layout)
    assert plan.predicted is not None
    assert found.step_seconds == pytest.approx(plan.predicted.step_seconds)
    assert found.memory_bytes["peak"] == pytest.approx(plan.predicted.memory_bytes["peak"])


def test_an_estimate_obeys_its_calibration() -> None:
    request, layout = decoder(4096, 8, 2048, 64), Layout(dp=8, micro_batch=8)
    plain = estimate(request, gpus(), layout)
    slower = estimate(request, gpus(), layout, Calibration(factors=CostFactors(product=2.0), spread=0.1))
    assert 1.3 < slower.terms["forward"] / plain.terms["forward"] < 2.0
    assert slower.spread == 0.1


def test_a_layout_that_does_not_nest_or_has_no_devices_is_refused() -> None:
    request = decoder(batch=64)
    with pytest.raises(UserError, match="params = 3"):
        estimate(request, gpus(), Layout(dp=8, shard={"params": 3, "grads": 8, "optimizer": 8}))
    with pytest.raises(UserError, match="16 devices"):
        estimate(request, gpus(), Layout(dp=16))


def test_calibration_learns_a_slower_device() -> None:
    request, cluster = decoder(4096, 8, 2048, 64), gpus()
    rows = []
    for size in (1, 2, 4, 8):
        truth = estimate(request, cluster, Layout(dp=8, micro_batch=size, accumulate=8 // size))
        rows.append(Measurement(request, cluster, Layouts(dp=8, micro_batch=size), 1.2 * truth.step_seconds))
    known = calibrate(rows)
    again = estimate(request, cluster, Layout(dp=8, micro_batch=4, accumulate=2), known)
    truth = estimate(request, cluster, Layout(dp=8, micro_batch=4, accumulate=2))
    assert again.step_seconds == pytest.approx(1.2 * truth.step_seconds, rel=0.05)
    assert known.rows == 4


def test_pins_join_those_of_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE + '[train.optimizer]\nkind = "adamw"\n[plan.pin]\ntp = 2\n')
    layout = espalier.make_plan(path, gpus(devices=4), micro_batch=2).layout
    assert (layout.tp, layout.micro_batch) == (2, 2)


def test_a_plan_says_where_adamw_would_take_less(tmp_path: Path) -> None:
    """Of small batches, whose computing does not outweigh Muon's products."""
    path, sentences = tmp_path / "recipe.toml", {}
    for kind, batch in (("muon", 4096), ("muon", 2**22), ("adamw", 4096)):
        recipe = RECIPE.replace("65536", str(batch))
        path.write_text(f'{recipe}[train.optimizer]\nkind = "{kind}"\n')
        plan = espalier.make_plan(path, gpus(devices=4))
        assert plan.predicted is not None
        named = [sentence for sentence in plan.why if sentence.startswith("train.optimizer.kind=adamw would")]
        sentences[kind, batch] = plan.predicted.step_seconds, named
    seconds, [sentence] = sentences["muon", 4096]
    under_adamw, none = sentences["adamw", 4096]
    less = float(re.findall(r"(\d+)% less", sentence)[0]) / 100
    assert none == sentences["muon", 2**22][1] == []
    assert under_adamw == pytest.approx((1 - less) * seconds, rel=0.05)


def test_a_pin_that_train_cannot_run_says_why(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE + "compile = true\n[plan.pin]\ntp = 2\n")
    with pytest.raises(UserError, match=r"plan\.pin\.tp = 2 cannot run") as caught:
        espalier.make_plan(path, gpus(devices=4))
    assert "compiles blocks" in caught.value.why


@pytest.mark.parametrize(
    "pins",
    [
        {"algorithm": "megatrom"},
        {"recompute": "full"},
        {"shard": {"param": 8}},
        {"shard": "8"},
        {"dp": "8"},
        {"dp": True},
        {"micro_batch": 0},
        {"ranks": -1},
        {"batch": 64.5},
        {"batch": 0},
    ],
)
def test_what_is_no_pin_is_the_user_s_error(pins: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        espalier.make_plan(torch.nn.Linear(100, 100), gpus(), **{"batch": 64, **pins})


@pytest.mark.parametrize("cluster", [7, None, "no such file.toml"])
def test_what_is_no_cluster_is_the_user_s_error(cluster: Any) -> None:
    with pytest.raises(UserError):
        espalier.make_plan(torch.nn.Linear(100, 100), cluster, batch=8)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(recompute="foo"),
        Layout(accumulate=0),
        Layout(tp=3, algorithm="megatron"),
        Layout(pp=64),
        {"dp": 8},
    ],
)
def test_what_is_no_layout_is_the_user_s_error(layout: Any) -> None:
    with pytest.raises(UserError):
        estimate(decoder(batch=64), gpus(count=8), layout)


def test_what_is_no_measurement_is_the_user_s_error() -> None:
    with pytest.raises(UserError):
        calibrate([1, 2])  # type: ignore[list-item]
