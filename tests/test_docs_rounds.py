"""docs/rounds.md: its tables name every method and key, its recipe is the example's."""

from __future__ import annotations

import re
from pathlib import Path

from espalier.config import ByRounds, recipe_file
from espalier.sync.diloco_slowmo import METHODS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "rounds.md").read_text(encoding="utf-8")


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
