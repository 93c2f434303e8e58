"""The small run that the tests of batch systems start: a recipe, its corpus and a machine that is not measured."""

from __future__ import annotations

from pathlib import Path

import pytest

RECIPE = """
name = "job"
[model]
depth = 1
width = 32
heads = 2
[data]
path = "corpus"
[train]
steps = {steps}
sequence = 32
batch_tokens = 256
validate_tokens = 64
validate_every = 1000
optimizer = {{ kind = "adamw" }}
[checkpoint]
every = {every}
[plan]
trial = false
cluster = "cluster.toml"
[plan.pin]
ranks = {ranks}
threads = 1
"""
CLUSTER = """
[[nodes]]
device = "cpu"
cores = 2
memory = "4GiB"
"""


def write(folder: Path, patch: pytest.MonkeyPatch, *, ranks: int, steps: int = 300, every: int = 1000) -> Path:
    """Writes it into `folder`, which becomes the current one, with a cache there. `every`: steps of checkpoints."""
    (folder / "recipe.toml").write_text(RECIPE.format(ranks=ranks, steps=steps, every=every))
    (folder / "cluster.toml").write_text(CLUSTER)
    (folder / "corpus").mkdir()
    for number in range(12):
        (folder / "corpus" / f"{number}.txt").write_text(f"The number {number} comes before {number + 1}.\n" * 40)
    patch.chdir(folder)
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return folder
