"""Run comparison: a list of the runs in a folder, and several runs side by side (figures, options that differ, curves).
Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from espalier.recipe import cache_dir
from espalier.recipe.errors import UserError
from espalier.recipe.units import show_count, show_seconds
from espalier.track import charts, page, report
from espalier.track.page import Figure
from espalier.track.run_tables import Run, open_run

NAME = "comparison.html"
METRICS = 3
"""Figures of the task that are compared."""


class Summary(NamedTuple):
    """A run in one row. `metrics`: the task's own figures of the last validation and the losses, by name."""

    run: Run
    name: str
    state: str
    step: int
    steps: int
    metrics: Mapping[str, float]


def runs_in(folder: str | Path) -> list[Summary]:
    """The runs in the folders of `folder`, the newest first. Raises UserError when there is none."""
    path = Path(folder)
    found = sorted({file.parent for name in ("run.toml", "events.jsonl") for file in path.glob(f"*/{name}")})
    if not found:
        raise UserError(
            f"There is no run in the folders of {path}.",
            do="espalier train RECIPE, name the folder of a run, or --trace FILE",
        )
    return sorted(map(summary, found), key=lambda one: -one.run.last_time)


def summary(folder: str | Path) -> Summary:
    """The run in `folder`. Raises UserError when there is none."""
    run = open_run(folder)
    steps = run.start.get("steps") or (run.recipe.get("train") or {}).get("steps") or 0
    found = {name: _last(run.validations[name]) for name in run.metrics()[:METRICS]}
    for label, table in (("validation loss", run.validations), ("loss", run.steps)):
        if "loss" in table:
            found[label] = _last(table["loss"])
    known = {name: value for name, value in found.items() if np.isfinite(value)}
    return Summary(run, str(folder), run.state, int(run.latest.get("step", 0)), int(steps), known)


def _last(values: Any) -> float:
    """The last finite value; NaN: there is none."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else float("nan")


def row(one: Summary) -> list[str]:
    """A line of a list of runs: name, state, steps, time, speed, and the first figure."""
    first = next(iter(one.metrics.items()), None)
    speed = one.run.speed()
    return [
        one.name, one.state, f"{one.step:,} of {one.steps:,}" if one.steps else f"{one.step:,}",
        show_seconds(one.run.seconds()), f"{show_count(speed)} {one.run.unit}/s" if speed else "",
        f"{first[0].replace('_', ' ')} {first[1]:.4g}" if first else "",
    ]  # fmt: skip


HEAD = ("run", "state", "step", "time", "speed", "result")


def figures(found: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """(name, of each run) of the figures that several runs are compared by."""
    names = dict.fromkeys(name for one in found for name in one.metrics)
    table = [(name.replace("_", " "), [_shown(one.metrics.get(name)) for one in found]) for name in names]
    took = [np.asarray(one.run.steps.get("seconds", np.empty(0)), float) for one in found]
    table.append(("seconds per step", [show_seconds(float(np.nanmedian(one))) if len(one) else "" for one in took]))
    table.append(("time in steps", [show_seconds(one.run.seconds()) for one in found]))
    return table


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def differences(found: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """(option, of each run) of the options that are not the same in all; "" where a run has none. The name is left
    out."""
    tables = [dict(report.flat(one.run.recipe)) for one in found]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [table.get(name, "") for table in tables]) for name in names if name != "name"]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def write(found: Sequence[Summary], folder: Path) -> Path:
    """Writes the page of several runs into `folder` and returns its path."""
    path = folder / NAME
    cache_dir.replace(path, render(found))
    return path


def render(found: Sequence[Summary]) -> str:
    """The page of several runs as text."""
    names = [one.name for one in found]
    return page.render(
        "track/run_comparison.html.j2",
        title="Comparison of runs", kind="comparison", state=f"{len(found)} runs", subtitle=names,
        figures=[Figure(Path(one.name).name, *_headline(one)) for one in found],
        names=names, tables=[("Figures", figures(found)), ("Options that differ", differences(found))],
        plots=_plots(found),
    )  # fmt: skip


def _headline(one: Summary) -> tuple[str, str]:
    name, value = next(iter(one.metrics.items()), ("no figure yet", None))
    return _shown(value) or "–", f"{name.replace('_', ' ')}, step {one.step:,}"


def _plots(found: Sequence[Summary]) -> list[tuple[str, str, Any]]:
    """(title, remark, drawing) of the losses and of the first figure of the task that all runs have."""
    shared = [name for name in found[0].run.metrics() if all(name in one.run.validations for one in found)][:1]
    wanted = [*((name, "validations") for name in shared), ("loss", "validations"), ("loss", "steps")]
    drawn = []
    for name, table in wanted:
        lines = [
            charts.Series(one.name, rows["step"], rows[name], colour=at % charts.COLOURS + 1)
            for at, one in enumerate(found)
            if name in (rows := one.run.table(table))
        ]
        held = "held out" if table == "validations" else "training"
        title = name.replace("_", " ")
        drawn.append(
            (title[0].upper() + title[1:], held, charts.line_chart(title, lines, lambda value: f"{value:.3g}"))
        )
    return [one for one in drawn if one[2]]
