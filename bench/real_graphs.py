"""Graphs of words that benchmarks train on: examples/text_graphs.py writes them into the cache folder, once."""

from __future__ import annotations

import sys
from pathlib import Path

from espalier.recipe.cache_dir import cache_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import text_graphs

NAMES = {"debian:packages": "packages", "debian:wordnet": "wordnet"}
"""By what the rows of their tables say."""


def path_of(name: str) -> str:
    """`data.path` of such a graph; any other path as it is."""
    if name not in NAMES:
        return name
    file = cache_folder() / "graphs" / f"{NAMES[name]}.npz"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        text_graphs.written(NAMES[name], file)
    return str(file)
