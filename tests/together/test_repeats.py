"""A run repeats itself bit for bit: undisturbed, and killed and taken up again from memory or disk, with every codec
and by every agreement."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from struck import Struck, plan_of, recipe_of, same, write_corpus

from espalier.plan import base as plans
from espalier.sync.choices import METHODS
from espalier.testing.faults import Fault

STEPS = 16
CODECS = ("bf16", "int8", "int4", "int1", "int8:stochastic", "topk:0.05", "zfp:8", "split", "mpc")
SOURCES = {"memory": 1 << 26, "disk": 0}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("repeats") / "corpus")


def recipe(corpus: Path, every: int) -> Any:
    train = {"steps": STEPS, "optimizer": {"kind": "adamw"}}
    return recipe_of(corpus, train=train, checkpoint={"every": every})


def by_codec(made: Any, name: str) -> plans.Plan:
    sent = plans.Exchange(traffic="gradients", codec=name)
    return plans.Plan(ranks=plan_of(made, 2).ranks, micro_batch=2, exchanges=(sent,))


def by_method(made: Any, name: str) -> plans.Plan:
    outer = plans.Outer(replicas=((0,), (1,)), method=name, steps=4, adapt=False)
    return plans.Plan(ranks=plan_of(made, 2).ranks, micro_batch=8, outer=outer)


def normal(chosen: bool) -> Any:
    return () if chosen else pytest.mark.slow


KINDS = [(by_codec, name) for name in CODECS] + [(by_method, name) for name in METHODS]
CASES = [
    pytest.param(made, name, source, marks=normal((name, source) == ("int4", "memory")), id=f"{name}-{source}")
    for made, name in KINDS
    for source in SOURCES
]


@pytest.mark.parametrize(("planned", "name", "source"), CASES)
def test_killed_and_taken_up_is_undisturbed(corpus: Path, tmp_path: Path, planned: Any, name: str, source: str) -> None:
    """The undisturbed run keeps copies at other steps than the killed one: how often follows measured times."""
    killed = Fault(1, random.Random(f"{name} {source}").randrange(6, STEPS), "kill")
    made = recipe(corpus, 100 if source == "memory" else 4)
    plan = planned(made, name)
    whole = Struck(recipe(corpus, 5), 2, tmp_path / "whole", plan=plan).run()
    run = Struck(made, 2, tmp_path / "run", (killed,), memory=SOURCES[source], plan=plan).run()
    assert same(run, whole)
    (recovered,) = run.all("recovered")
    assert recovered["step"] > 0
    assert recovered["source"] == source
