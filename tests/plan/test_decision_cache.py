"""A decision that was made once is read; whatever it rests on is part of its name."""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster
from espalier.plan import decision_cache
from espalier.plan.base import Plan
from espalier.plan.calibration import DATASHEET
from espalier.plan.decide import decide
from espalier.plan.request import Request
from espalier.plan.trials import Trials
from espalier.recipe import defaults, recipe_file
from espalier.train import request_from_recipe

CLUSTER = clusters.loads('[[nodes]]\ndevice = "A100-80GB"\ndevices = 8\n')


def asked(**train: Any) -> Request:
    table = {
        "model": {"shape": "gpt2-124m", "context": 1024},
        "data": {"path": "python:stdlib"},
        "train": {"steps": 10, "sequence": 1024, "batch_tokens": 64 * 1024, **train},
    }
    return request_from_recipe.of_recipe(defaults.resolve(recipe_file.from_table(table))[0])


def named(request: Request | None = None, cluster: Cluster = CLUSTER, code: str = "1", **trials: float) -> str:
    return decision_cache.key(request or asked(), cluster, DATASHEET, code, trials)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_kept_plan_is_read_as_it_was_decided() -> None:
    plan = decide(asked(), CLUSTER).taken
    assert decision_cache.read(named()) is None
    decision_cache.keep(named(), plan)
    assert decision_cache.read(named()) == plan


def test_every_part_of_the_question_changes_the_name() -> None:
    other = clusters.loads('[[nodes]]\ndevice = "A100-80GB"\ndevices = 4\n')
    request = asked()
    costly = request.changed(anatomy=lambda size, *rest: request.profile.anatomy(2 * size, *rest))
    packed = msgspec.structs.replace(request.recipe.data[0], packing="documents")
    names = [
        named(),
        named(request.changed(data=[packed])),
        named(asked(optimizer={"kind": "adamw"})),
        named(asked(batch_tokens=128 * 1024)),
        named(asked(precision="bf16")),
        named(request.changed(pin=msgspec.structs.replace(request.pin, ranks=2))),
        named(costly),
        named(cluster=other),
        named(code="2"),
        named(one=0.5),
        named(one=0.6),
        decision_cache.key(request, CLUSTER, DATASHEET, "1", None),
        decision_cache.key(request, CLUSTER, msgspec.structs.replace(DATASHEET, spread=0.1), "1", {}),
    ]
    assert len(set(names)) == len(names)
    assert named() == named(asked()), "the same question has the same name"


def test_what_only_the_training_depends_on_does_not_change_the_name() -> None:
    assert named() == named(asked(steps=20, seed=7))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("content", ["", "{", '{"unknown": 1}'])
def test_an_entry_that_cannot_be_read_is_decided_anew(content: str, tmp_path: Path) -> None:
    decision_cache.keep("one", decide(asked(), CLUSTER).taken)
    (tmp_path / "espalier" / "plans" / "one.json").write_text(content)
    assert decision_cache.read("one") is None


def test_the_newest_plans_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_cache, "KEPT", 3)
    plan = Plan()
    for number in range(5):
        decision_cache.keep(f"{number}", plan)
    assert {file.stem for file in (tmp_path / "espalier" / "plans").iterdir()} == {"2", "3", "4"}


def test_a_cache_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "espalier").write_text("a file, where the cache would be")
    decision_cache.keep("one", decide(asked(), CLUSTER).taken)
    assert decision_cache.read("one") is None


@pytest.mark.parametrize("steps", [10, 10**5, 3 * 10**5, 10**9])
@settings(max_examples=2)
@given(draw=st.randoms(use_true_random=False))
def test_trials_that_ran_decide_the_same_for_whoever_asks_next(draw: Random, steps: int) -> None:
    """So the plan may be kept under the name that it has after them, also where time did not allow all."""
    cluster = clusters.loads('[[nodes]]\ndevice = "cpu"\ncores = 4\nmemory = "16GiB"\n')
    table = {
        "model": {"depth": 2, "width": 64, "heads": 2, "vocabulary": 256},
        "train": {"steps": steps, "sequence": 32, "batch_tokens": 2048, "seed": 1},
    }
    recipe = defaults.resolve(recipe_file.from_table(table))[0]
    request = request_from_recipe.of_recipe(recipe)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        seconds = count(0.0, 0.5)
        patch.setattr("espalier.plan.trials.time.monotonic", lambda: next(seconds))
        noisy = Trials(recipe, cluster, lambda plan, fastest: 0.01 * (1 + 0.1 * draw.random()) / len(plan.ranks) ** 0.1)
        plan = decide(request, cluster, DATASHEET, noisy).taken
        assert bool(noisy.known()) == (steps > 10)
        assert decide(request, cluster, DATASHEET, Trials(recipe, cluster)).taken == plan
