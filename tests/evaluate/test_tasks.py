"""Held-out data record by record is the workload's own evaluation, of text and of graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from espalier.evaluate.tasks import HeldOut, means
from espalier.graph.data.graph import DataSplit, Graph
from espalier.graph.workload import GraphWorkload
from espalier.language.workload import open_language
from espalier.parallel.workload import Shard, Workload
from espalier.recipe import defaults, recipe_file


def text(folder: Path) -> Workload:
    (folder / "corpus").mkdir()
    for number in range(12):
        (folder / "corpus" / f"{number}.txt").write_text(f"The number {number} is not {number + 1}.\n" * 30)
    table = {
        "model": {"depth": 1, "width": 16, "heads": 2, "feed_forward": 24},
        "data": {"path": str(folder / "corpus"), "cache": str(folder / "cache"), "validation": 0.3},
        "train": {"steps": 2, "sequence": 32, "batch_tokens": 64, "validate_tokens": 1200},
    }
    return open_language(defaults.resolve(recipe_file.from_table(table))[0])


def graph(folder: Path) -> Workload:
    draw = np.random.default_rng(0)
    parts = DataSplit(np.arange(20), np.arange(20, 40), np.arange(40, 60))
    made = Graph.from_edges(
        *draw.integers(0, 60, (2, 200)), features=draw.normal(size=(60, 5)), labels=draw.integers(0, 3, 60), parts=parts
    )
    table = {"model": {"kind": "gcn", "depth": 2, "width": 8}, "data": {"path": "made"}, "train": {"steps": 2}}
    return GraphWorkload(defaults.resolve(recipe_file.from_table(table))[0], made)


@pytest.mark.parametrize("opened", [text, graph])
def test_all_records_together_are_the_workloads_own_evaluation(opened, tmp_path: Path) -> None:
    workload = opened(tmp_path)
    model = workload.build(torch.device("cpu"), torch.float32).eval()
    samples = workload.validation_samples()
    task = HeldOut(workload)
    assert task.records == (1 if opened is graph else -(-samples // 16))
    with torch.no_grad():
        found = task.summary(means([task.evaluate(model, record) for record in range(task.records)]))
        whole = workload.evaluate(model, Shard(0, samples, 16))
    expected = workload.summary({name: total / weight for name, (total, weight) in whole.items()})
    assert found == pytest.approx(expected)


def test_other_data_is_another_task(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert HeldOut(text(tmp_path / "a")).content != HeldOut(graph(tmp_path)).content
