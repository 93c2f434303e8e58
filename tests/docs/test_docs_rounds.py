"""The page on rounds: its tables name every method and key, its recipe is the example's."""

from __future__ import annotations

import re
from pathlib import Path

from doc_pages import PAGES

from espalier.machine import cluster as clusters
from espalier.mechanisms.local_rounds.options import ByRounds
from espalier.optim.diloco_slowmo import METHODS
from espalier.plan.decide import decide
from espalier.recipe import defaults, recipe_file
from espalier.train import request_from_recipe

ROOT = Path(__file__).parents[2]
TEXT = PAGES["local-rounds.md"].read_text(encoding="utf-8")


def test_the_tables_name_every_method_and_key() -> None:
    assert all(f"| `{name}` |" in TEXT for name in (*METHODS, "every_step"))
    assert set(re.findall(r"`sync\.(\w+)`", TEXT)) - {"kind"} == set(ByRounds.__struct_fields__)


def test_its_recipe_is_the_example() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    example = (ROOT / "examples" / "slow-links.toml").read_text(encoding="utf-8")
    assert example.endswith(block)
    assert (
        recipe_file.load(ROOT / "examples" / "slow-links.toml").sync
        == recipe_file.from_table({"model": {"kind": "gpt"}, "sync": {"kind": "eager"}}).sync
    )


def test_to_try_it_takes_minutes() -> None:
    """The second command of the example's head, as the planner predicts it for two slow cores."""
    example = ROOT / "examples" / "slow-links.toml"
    (words,) = re.findall(
        r"espalier train examples/slow-links.toml (\S+=[^#]*?)  ", example.read_text(encoding="utf-8")
    )
    recipe = defaults.resolve(recipe_file.load(example, words.split()))[0]
    cluster = clusters.loads('[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n')
    predicted = decide(request_from_recipe.of_recipe(recipe, lambda: None), cluster).plan.predicted
    assert recipe.train.steps * predicted.step_seconds < 300
