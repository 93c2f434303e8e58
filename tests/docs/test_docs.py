"""What the documents show is true: their recipes load, their example runs as written."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from doc_pages import PAGES

from espalier.module import open_module
from espalier.parallel.workload import Shard
from espalier.recipe import defaults, recipe_file

ROOT = Path(__file__).parents[2]


def fences(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_every_page_is_looked_at():
    assert sum(bool(fences(page, "toml")) for page in PAGES.values()) >= 4


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_every_recipe_shown_loads(page):
    for text in fences(page, "toml"):
        table = tomllib.loads(text)
        if "model" in table and page.name not in ("cluster.md", "workloads.md"):  # with their own tests
            recipe_file.from_table(table, page.name)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The folder that a reader of docs/module.md has after copying its first two blocks."""
    (toml,), (code, *_) = fences(ROOT / "docs" / "module.md", "toml"), fences(ROOT / "docs" / "module.md", "python")
    (tmp_path / "module.toml").write_text(toml, encoding="utf-8")
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_the_module_example_is_the_one_in_the_examples_folder(written):
    for name in ("module.toml", "mine.py"):
        assert (written / name).read_text() == (ROOT / "examples" / name).read_text()


def test_the_module_example_learns_as_written(written):
    recipe, _ = defaults.resolve(recipe_file.load(written / "module.toml"))
    workload = open_module(recipe, written)
    assert workload.validation_samples() > 0
    model = workload.build(torch.device("cpu"), torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(60):
        (batch,) = workload.batches(step, Shard(0, workload.global_batch, workload.global_batch))
        total, weight = workload.loss(model, batch)
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        losses.append(float(total.detach() / weight))
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    with torch.no_grad():
        summed, count = workload.evaluate(model, Shard(0, workload.validation_samples(), 64))["loss"]
    assert count == workload.validation_samples()
    assert summed / count < losses[0]
