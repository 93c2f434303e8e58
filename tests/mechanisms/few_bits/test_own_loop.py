"""The page on few bits, in your own loop: the block that needs PyG (test_docs_commands.py runs the others)."""

from __future__ import annotations

import re
from typing import Any

import pytest
from doc_pages import PAGES

PAGE = PAGES["few-bits.md"].read_text(encoding="utf-8")
SECTION = PAGE.split("## In your own loop\n")[1].split("\n## ")[0]


def test_quantizers_stand_round_pygs_layers_as_printed() -> None:
    pytest.importorskip("torch_geometric")
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)[0], names)
    target = names["target"]
    assert target.bytes_at(target.shift()) <= target.target
    assert all((one.allocator.raw_step.grad != 0).any() for one in names["quantizers"])


def test_each_door_has_its_block() -> None:
    blocks = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    for block, name in zip(blocks, ("GCNConv", "package_file.read", "Counter"), strict=True):
        assert name in block
