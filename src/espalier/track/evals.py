"""Curves of a run's evaluations for its report: one drawing per metric, one line per task."""

from __future__ import annotations

from typing import Any

import numpy as np

from espalier.track import draw
from espalier.track.tables import Run

COLOURS = 8
"""Series of different colours that `draw` has, from 1."""


def charts(run: Run) -> list[tuple[str, str, Any]]:
    """(title, remark, drawing) for each metric that `espalier eval --watch` found."""
    table = run.evals
    if not len(table["step"]):
        return []
    latest: dict[str, dict[str, dict[int, float]]] = {}
    for step, task, metric, value in zip(*(table[name] for name in ("step", "task", "metric", "value")), strict=True):
        latest.setdefault(str(metric), {}).setdefault(str(task), {})[int(step)] = float(value)
    drawn = []
    for metric, tasks in latest.items():
        title = metric.replace("_", " ")
        series = [_line(name, points, at) for at, (name, points) in enumerate(tasks.items())]
        chart = draw.line_chart(title, series, lambda value: f"{value:.3g}")
        drawn.append((title[0].upper() + title[1:], "of checkpoints, evaluated beside training", chart))
    return drawn


def _line(name: str, points: dict[int, float], at: int) -> draw.Series:
    steps = sorted(points)
    x, y = np.array(steps, np.float64), np.array([points[step] for step in steps], np.float64)
    return draw.Series(name, x, y, "dots" if len(steps) <= 60 else "line", at % COLOURS + 1)
