"""The page on graphs: its recipe is the example's, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / "graph.md").read_text(encoding="utf-8"), re.S)


def test_the_page_shows_the_example_as_it_is():
    assert blocks("toml")[0] == (ROOT / "examples" / "graph.toml").read_text(encoding="utf-8")


def test_the_ten_lines_run(capsys):
    (code,) = blocks("python")
    exec(code, {})
    nodes, edges = capsys.readouterr().out.rsplit("[", 1)
    assert nodes.startswith("[ 0 50")
    assert edges.strip() == "12, 4]"
