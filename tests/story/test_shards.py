"""A user pins how states are sharded, stops, and goes on under other shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import forked

RECIPE = """
[model]
depth = 2
width = 32
heads = 2
feed_forward = 64

[data]
path = "corpus"
validation = 0.2

[train]
steps = 4
sequence = 32
batch_tokens = 256
validate_tokens = 512

[plan]
cluster = "machine.toml"
"""
MACHINE = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shards")
    (made / "recipe.toml").write_text(RECIPE)
    (made / "machine.toml").write_text(MACHINE)
    (made / "corpus").mkdir()
    for number in range(9):
        (made / "corpus" / f"{number}.txt").write_text(
            "".join(f"{number} plus {i} is {number + i}\n" for i in range(80))
        )
    return made


def espalier(folder: Path, *arguments: str) -> Any:
    done = forked(folder, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_pinned_shards_train_and_resume_under_other_shards(folder: Path) -> None:
    sharded = [f"plan.pin.shard.{name}=2" for name in ("params", "grads", "optimizer")]
    first = espalier(folder, "train", "recipe.toml", "plan.pin.ranks=2", *sharded, "train.steps=2", "--json")
    plan = json.loads((folder / "runs" / "recipe" / "plan.json").read_text())
    assert plan["layout"]["shard"] == {"params": 2, "grads": 2, "optimizer": 2}
    assert plan["units"][0]["whole"], "Muon is the default, and it moves whole matrices"
    second = espalier(folder, "train", "recipe.toml", "plan.pin.ranks=2", "plan.pin.shard.optimizer=2", "--json")
    plan = json.loads((folder / "runs" / "recipe" / "plan.json").read_text())
    assert plan["layout"]["shard"] == {"params": 1, "grads": 1, "optimizer": 2}
    assert second["loss"] < first["loss"]
    found = espalier(folder, "eval", "runs/recipe", "--json")
    assert found["loss"] == pytest.approx(second["validation_loss"], rel=1e-4)
