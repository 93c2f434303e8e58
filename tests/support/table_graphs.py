"""Graphs of tables as runs open them, and how well a few steps learn from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from espalier.graph.data import kept_graph
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.parallel.workload import Shard
from espalier.recipe import defaults, recipe_file


def opened(path: Path, run: kept_graph.KeptGraph | None = None, model: Any = None, **options: Any) -> GraphWorkload:
    recipe = {
        "model": {"kind": "gcn", "width": 16, **(model or {})},
        "data": {"path": str(path)},
        "graph": {"order": "none", **options},
        "train": {"precision": "fp32"},
    }
    return open_graph(defaults.resolve(recipe_file.from_table(recipe))[0], run_graph=run)


def reopened(workload: GraphWorkload, folder: Path) -> kept_graph.KeptGraph:
    """What a run of `workload` keeps of its graph, as it is read again."""
    folder.mkdir()
    workload.freeze(folder, workload.graph)
    return kept_graph.read(folder)


def accuracy(workload: GraphWorkload, steps: int = 60) -> float:
    model = workload.build(torch.device("cpu"), torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        total, weight = workload.loss(model, workload.task.batch(workload.task.parts.train, step))
        (total / weight).backward()
        optimizer.step()
    hits, count = workload.evaluate(model.eval(), Shard(0, workload.validation_samples(), 1))["test_accuracy"]
    return hits / count
