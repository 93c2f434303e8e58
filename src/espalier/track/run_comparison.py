"""Run comparison: a list of the runs in a folder, and several runs side by side (figures, options that differ, curves).
Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from espalier.recipe import cache_dir
from espalier.recipe.errors import UserError
from espalier.recipe.units import show_count, show_seconds
from espalier.track import charts, curves, page, report
from espalier.track.charts import Chart
from espalier.track.page import Figure
from espalier.track.run_tables import VALIDATION, RunTables

NAME = "comparison.html"
REPEATED = ("train.seed", "graph.split", "checkpoint.target")
"""Options in which runs differ that repeat one experiment."""


class Summary(NamedTuple):
    """A run in one row. `metrics`: the task's own figures of the last validation and the losses, by name."""

    run: RunTables
    name: str
    state: str
    step: int
    steps: int
    metrics: Mapping[str, float]


def runs_in(folder: str | Path) -> list[Summary]:
    """The runs in the folders of `folder`, the newest first. Raises UserError when there is none."""
    path = Path(folder)
    folders = sorted({file.parent for name in ("run.toml", "events.jsonl") for file in path.glob(f"*/{name}")})
    if not folders:
        raise UserError(
            f"There is no run in the folders of {path}.",
            do="espalier train RECIPE, name the folder of a run, or --trace FILE",
        )
    return sorted(map(summary, folders), key=lambda entry: -entry.run.last_time)


def summary(folder: str | Path) -> Summary:
    """The run in `folder`. Raises UserError when there is none."""
    run = RunTables.read(folder)
    steps = run.start.get("steps") or (run.recipe.get("train") or {}).get("steps") or 0
    names = {name: VALIDATION + name for name in run.metrics()[: report.METRICS]}
    names |= {"validation loss": f"{VALIDATION}loss", "loss": "loss"}
    metrics = {label: last for label, name in names.items() if (last := run.curves[name].last) is not None}
    return Summary(run, str(folder), run.state, int(run.latest.get("step", 0)), int(steps), metrics)


def row(entry: Summary) -> list[str]:
    """A line of a list of runs: name, state, steps, time, speed, and the first figure."""
    first = next(iter(entry.metrics.items()), None)
    speed = entry.run.speed()
    return [
        entry.name, entry.state, f"{entry.step:,} of {entry.steps:,}" if entry.steps else f"{entry.step:,}",
        show_seconds(entry.run.seconds()), f"{show_count(speed)} {entry.run.unit}/s" if speed else "",
        f"{first[0].replace('_', ' ')} {first[1]:.4g}" if first else "",
    ]  # fmt: skip


HEAD = ("run", "state", "step", "time", "speed", "result")


def figures(runs: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """(name, of each run) of the figures that several runs are compared by."""
    names = dict.fromkeys(name for entry in runs for name in entry.metrics)
    table = [(name.replace("_", " "), [_shown(entry.metrics.get(name)) for entry in runs]) for name in names]
    took = [curves.median(entry.run.curves["seconds"]) for entry in runs]
    table.append(("seconds per step", [show_seconds(seconds) if np.isfinite(seconds) else "" for seconds in took]))
    table.append(("time in steps", [show_seconds(entry.run.curves["seconds"].total) for entry in runs]))
    return table


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def differences(runs: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """(option, of each run) of the options that are not the same in all; "" where a run has none. The name is left
    out."""
    tables = [dict(report.flat(entry.run.recipe)) for entry in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [table.get(name, "") for table in tables]) for name in names if name != "name"]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


class Repeated(NamedTuple):
    """A figure of runs that repeat one experiment: of each, their mean and their sample standard deviation."""

    values: list[float]
    mean: float
    deviation: float


def repeated(runs: Sequence[Summary]) -> dict[str, Repeated]:
    """The figures of the last validations, such as `validation_accuracy` and `test_accuracy`; empty where the runs do
    not repeat one experiment (`REPEATED`)."""
    if len(runs) < 2 or any(name not in REPEATED for name, _ in differences(runs)):
        return {}
    figures = {}
    for name in [*runs[0].run.metrics()[: report.METRICS], "loss"]:
        for part, curve in (("validation_", VALIDATION + name), ("test_", f"{VALIDATION}test_{name}")):
            if all(curve in entry.run.curves for entry in runs):
                row = np.array([entry.run.curves[curve].last for entry in runs], np.float64)
                figures[part + name] = Repeated(row.tolist(), float(row.mean()), float(row.std(ddof=1)))
    return figures


def spread(runs: Sequence[Summary]) -> list[tuple[str, str]]:
    """(figure, mean ± deviation) of runs that repeat one experiment."""
    figures = repeated(runs).items()
    return [(name.replace("_", " "), f"{figure.mean:.4g} ± {figure.deviation:.2g}") for name, figure in figures]


def write(runs: Sequence[Summary], folder: Path) -> Path:
    """Writes the page of several runs into `folder` and returns its path."""
    path = folder / NAME
    cache_dir.replace(path, render(runs))
    return path


def render(runs: Sequence[Summary]) -> str:
    """The page of several runs as text."""
    names = [entry.name for entry in runs]
    return page.render(
        "track/run_comparison.html.j2",
        title="Comparison of runs", kind="comparison", state=f"{len(runs)} runs", subtitle=names,
        figures=[
            *(Figure(name, text, f"mean ± standard deviation, {len(runs)} runs") for name, text in spread(runs)),
            *(Figure(Path(entry.name).name, *headline(entry)) for entry in runs),
        ],
        names=names, tables=[("Figures", figures(runs)), ("Options that differ", differences(runs))],
        plots=_plots(runs), clocks=report.clocks(*(entry.run for entry in runs)),
    )  # fmt: skip


def headline(entry: Summary) -> tuple[str, str]:
    """(the first figure's value, its name and the step)."""
    name, value = next(iter(entry.metrics.items()), ("no figure yet", None))
    return _shown(value) or "–", f"{name.replace('_', ' ')}, step {entry.step:,}"


def _plots(runs: Sequence[Summary]) -> list[Chart]:
    """The first figure of the task that all runs have, and the losses."""
    shared = [name for name in runs[0].run.metrics() if all(VALIDATION + name in entry.run.curves for entry in runs)]
    wanted = [*((name, VALIDATION + name, "held out") for name in shared[:1])]
    wanted += [("validation loss", f"{VALIDATION}loss", "held out"), ("loss", "loss", "training")]
    return charts.charts(
        *(
            Chart(
                title[:1].upper() + title[1:].replace("_", " "),
                group,
                [report.curve(entry.run, name, entry.name, number=number) for number, entry in enumerate(runs)],
            )
            for title, name, group in wanted
        )
    )
