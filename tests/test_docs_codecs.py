"""The examples of docs/codecs.md run as they stand, and its table names every codec."""

from __future__ import annotations

import re
from pathlib import Path

from espalier.comm.codecs import FAMILIES

PAGE = Path(__file__).parent.parent / "docs" / "codecs.md"


def test_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})


def test_the_table_names_every_codec() -> None:
    named = set(re.findall(r"`([a-z0-9]+)[:\w.]*`", PAGE.read_text(encoding="utf-8").split("Lossy codecs")[0]))
    assert set(FAMILIES) <= named
