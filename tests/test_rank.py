"""One rank's life: what it says when memory runs out under it."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from espalier import config, mechanisms, rank, trainer
from espalier.config import derive, load
from espalier.errors import RunFailed
from espalier.language.workload import open_language
from espalier.launch import base as launch
from espalier.launch import local
from espalier.plan import base as plans

MIB = 2**20


def test_a_rank_that_runs_out_of_memory_says_what_it_held_and_what_would_fit(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{i} plus {i} is {2 * i}\n" for i in range(30_000)))
    table = {
        "model": {"depth": 2, "width": 256, "heads": 2, "feed_forward": 512},
        "data": {"path": str(tmp_path / "text.txt"), "cache": str(tmp_path / "cache")},
        "train": {"steps": 2, "sequence": 256, "batch_tokens": 256 * 512},
    }
    recipe = derive.resolve(load.from_table(table))[0]
    workload = open_language(recipe)
    plan = plans.Plan(ranks=(plans.Rank(share=(0, 512)),), micro_batch=512)

    def life(place: launch.Place) -> Any:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + 700 * MIB, now + 700 * MIB))
        return rank.train(trainer.Setting(recipe, plan, workload, place), {})

    with pytest.raises(RunFailed, match="Rank 0 ran out of memory at") as caught:
        local.run(life, launch.places(plan))
    assert "parameters not known, 5" in caught.value.why
    assert "plan.pin.micro_batch=256" in caught.value.do


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "alike"),
        ({"ranks": (plans.Rank(device="cuda:0"), plans.Rank(device="cuda:1"))}, ""),
        ({"units": (plans.Unit(optimizer=(0, 1)),)}, ""),
        ({"exchanges": (plans.Exchange("gradients", codec="int8"),)}, ""),
        ({"exchanges": (plans.Exchange("gradients"),)}, "alike"),
        ({"stages": (plans.Stage(ranks=(0, 1), tensor=2),)}, ""),
        ({"outer": plans.Outer(replicas=((0,), (1,)))}, "rounds"),
        ({"outer": plans.Outer(replicas=((0, 1),))}, ""),
    ],
)
def test_which_plans_let_ranks_stay(changes: dict[str, Any], why: str) -> None:
    plan = plans.Plan(**{"ranks": (plans.Rank(), plans.Rank()), **changes})
    assert mechanisms.recovery(config.Recipe(model=config.Gpt()), plan) == why
