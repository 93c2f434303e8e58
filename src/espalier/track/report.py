"""Run report: one self-contained `report.html`, made from the run folder alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from espalier.recipe import cache_dir
from espalier.recipe.foreign_files import parsing
from espalier.recipe.units import plural, show_count, show_seconds, show_size
from espalier.track import charts, curves, page
from espalier.track.charts import Chart, Series
from espalier.track.page import Figure
from espalier.track.run_tables import VALIDATION, RunTables

NAME = "report.html"


METRICS = 3
"""Figures of the task among the headline figures, and in a comparison."""
DOTS = 60
"""Validations up to which they are not joined."""
MARKS = 200
"""Attempts at most, of the latest, whose beginnings are marked."""


class Measured(NamedTuple):
    """What the steps of the latest attempt took: medians, and the peak of memory. NaN: not known."""

    seconds: float
    speed: float
    mfu: float
    peak: float


class ComparedRow(NamedTuple):
    """One line of predicted beside measured. `error` is measured / predicted - 1, or None."""

    label: str
    predicted: str
    measured: str
    error: float | None


def write(run: RunTables | str | Path) -> Path:
    """Writes `report.html` into the folder of a run and returns its path.

    Raises UserError when there is no run in that folder, or it cannot be written.
    """
    run = run if isinstance(run, RunTables) else RunTables.read(run)
    path = run.folder / NAME
    cache_dir.replace(path, render(run))
    return path


def render(run: RunTables, live: bool = False) -> str:
    """The page as text. A `live` one renews itself while the run goes on. Raises UserError for a recipe or a plan that
    is none."""
    with parsing(run.folder, "restore its run.toml and plan.json from a backup"):
        return page.render("track/report.html.j2", run=run, live=live, **_context(run))


def _context(run: RunTables) -> dict[str, Any]:
    predicted = run.plan.get("predicted") or {}
    return {
        "title": run.start.get("name") or run.recipe.get("name") or run.folder.absolute().name,
        "kind": run.state,
        "state": run.state,
        "mood": run.state,
        "figures": _figures(run),
        "plots": _plots(run),
        "clocks": clocks(run),
        "memory": _memory(run, predicted),
        "time": charts.shares(predicted.get("terms") or {}, show_seconds),
        "step_seconds": predicted.get("step_seconds") or 0.0,
        "spent": charts.shares(run.account.parts, show_seconds),
        "traffic": _traffic(run, predicted),
        **{table: _means(run, table) for table in ("saved", "coding", "lost", "experts", "dispatch")},
        "compared": _compared(run, predicted),
        "plan": run.plan,
        "incidents": _rows(run, "incident"),
        "account": run.account,
        "samples": [_drawn(row) for row in _rows(run, "sample")[-6:][::-1]],
        "checkpoints": _rows(run, "checkpoint")[::-1],
        "derivations": run.start.get("derivations") or [],
        "notes": run.start.get("notes") or [],
        "about": {**(run.start.get("versions") or {}), **(run.start.get("host") or {})},
        "recipe": flat(run.recipe),
    }


def _figures(run: RunTables) -> list[Figure]:
    latest, wanted = run.latest, run.start.get("steps") or (run.recipe.get("train") or {}).get("steps")
    measured = _measured(run)
    figures = _metrics(run)
    figures.append(Figure("step", f"{latest.get('step', 0):,}", f"of {wanted:,}" if wanted else ""))
    if latest.get("loss") is not None:
        figures.append(Figure("training loss", f"{latest['loss']:.3f}"))
    figures += _validated(run)
    if math.isfinite(measured.speed):
        figures.append(Figure(f"{run.unit} per second", show_count(measured.speed)))
    if math.isfinite(measured.mfu) and latest.get("mfu"):
        figures.append(Figure("MFU", f"{measured.mfu:.1%}"))
    if measured.peak:
        figures.append(Figure("memory", show_size(measured.peak), f"peak, per rank: {_kind(run)}"))
    if latest.get("skipped"):
        figures.append(Figure("steps left out", f"{latest['skipped']:,}", "gradients too large for fp16"))
    if latest.get("store"):
        steps, read = run.of_attempt, sum(latest["store"].get(tier) or 0 for tier in ("disk_cache", "packed"))
        share = steps["waited"].total / max(1e-9, steps["seconds"].total)
        figures.append(Figure("features from disk", show_size(read), f"the latest step; {share:.1%} of time waiting"))
    attempts = f"in {run.attempts} attempts" if run.attempts > 1 else ""
    figures.append(Figure("time", show_seconds(run.seconds()), attempts))
    if run.account.failures:
        failures = run.account.failures
        figures.append(Figure("goodput", f"{run.account.goodput:.1%}", f"{plural(failures, 'failure')}"))
    return figures


def _validated(run: RunTables) -> list[Figure]:
    if not run.best:
        return []
    loss, step = run.best
    last = run.newest("validation")[-1]
    note = "held out" if step == last["step"] else f"best {loss:.3f} at {step:,}"
    return [Figure("validation loss", f"{_or_nan(last.get('loss')):.3f}", note)]


def _metrics(run: RunTables) -> list[Figure]:
    """What the task is judged by, of the last validation; the test part's beside it."""
    figures = []
    for row in run.newest("validation"):
        for name in run.metrics()[:METRICS]:
            last, test = _or_nan(row.get(name)), _or_nan(row.get(f"test_{name}"))
            note = f"validation; test {test:.3f}" if math.isfinite(test) else "held out"
            if math.isfinite(last):
                shown = f"{last:.3f}" if last == 0 or abs(last) > 0.01 else f"{last:.3g}"
                figures.append(Figure(name.replace("_", " "), shown, note))
    return figures


def _or_nan(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _measured(run: RunTables) -> Measured:
    steps = run.of_attempt
    seconds = curves.median(steps["seconds"]) or math.nan
    work = curves.median(steps["mfu"], steps["seconds"])  # of the peak, so that it agrees with the seconds
    return Measured(seconds, curves.median(steps["tokens"]) / seconds, work / seconds, steps["memory"].peak)


def _plots(run: RunTables) -> list[Chart]:
    """Those that have something to show."""
    per = "per token, in nats" if run.unit == "tokens" else "on training and held-out data"
    losses = [curve(run, "loss", "training", smoothed=True), curve(run, f"{VALIDATION}loss", "validation")]
    tiers = [
        curve(run, name, name.removeprefix("store.").replace("_", " "))
        for name in run.curves
        if name.startswith("store.") and run.curves[name].total
    ]
    return charts.charts(
        *(_metric(run, name) for name in run.metrics()[:1]),
        Chart("Loss", per, losses),
        Chart("Speed", f"{run.unit} per second", [curve(run, "speed", smoothed=True)], "count", zero=True),
        Chart("Memory", _apart(run), [curve(run, "memory")], "size", zero=True),
        Chart("Features by tier", "bytes read a step", tiers, "size", zero=True),
        Chart("Waiting for batches", "seconds of a step", [curve(run, "waited")] * bool(tiers), "seconds", zero=True),
        Chart("Gradient norm", "before clipping", [curve(run, "gradient_norm", smoothed=True)], zero=True),
        Chart("Learning rate", "", [curve(run, "learning_rate")], zero=True),
        *_evaluations(run),
    )


def curve(run: RunTables, name: str, label: str = "", smoothed: bool = False, number: int = 0) -> Series:
    """A column of a run as a line, which is called `label` or by its name; `number`: of the run among those of a page.
    `smoothed`: the mean of neighbours, with the values round it."""
    columns = run.curves
    x = columns[f"{VALIDATION * name.startswith(VALIDATION)}step"].sample
    y, low, high = columns[name].means, columns[name].least, columns[name].greatest
    good = np.isfinite(y)
    x, y, low, high = x[good], y[good], low[good], high[good]
    label = label or name.replace("_", " ")
    dots = name.startswith(VALIDATION) and len(x) <= DOTS
    if smoothed and len(y) >= 20:
        return Series(label, x, charts.smooth(y, max(5, len(y) // 60)), low, high, run=number)
    bounds = {"low": low, "high": high} if (low < high).any() else {}
    return Series(label, x, y, **bounds, dots=dots, run=number)


def clocks(*runs: RunTables) -> str:
    """As JSON, for charts.js: after how many hours each run was at which step, and where attempts began."""
    table = []
    for run in runs:
        steps, times = run.curves["step"].sample, run.curves["time"].sample
        good = np.isfinite(steps) & np.isfinite(times)
        hours = (times[good] - run.curves["time"].lowest) / 3600
        table.append({"clock": [steps[good], hours], "resumed": run.resumed[-MARKS:]})
    return charts.as_json(table)


def _metric(run: RunTables, name: str) -> Chart:
    title = name.replace("_", " ")
    parts = (("validation", VALIDATION + name), ("test", f"{VALIDATION}test_{name}"))
    return Chart(title[:1].upper() + title[1:], "of held-out data", [curve(run, key, part) for part, key in parts])


def _evaluations(run: RunTables) -> list[Chart]:
    """One for each metric that `espalier eval --watch` has computed, with a line for each task."""
    metrics: dict[str, dict[str, dict[int, float]]] = {}
    for row in run.newest("eval"):
        metrics.setdefault(row["metric"], {}).setdefault(row["task"], {})[row["step"]] = row["value"]
    plots = []
    for metric, tasks in metrics.items():
        title = metric.replace("_", " ")
        lines = [
            Series(task, *np.array(sorted(points.items())).T, dots=len(points) <= DOTS)  # type: ignore[misc]
            for task, points in tasks.items()
        ]
        plots.append(Chart(title[:1].upper() + title[1:], "of checkpoints, evaluated beside training", lines))
    return plots


def _memory(run: RunTables, predicted: Mapping[str, Any]) -> dict[str, Any]:
    kinds = dict(predicted.get("memory_bytes") or {})
    whole = kinds.pop("peak", 0.0) or sum(kinds.values())
    peak, limit = _measured(run).peak, predicted.get("memory_limit") or 0.0
    return {
        "kinds": charts.shares(kinds, show_size),
        "predicted": whole,
        "measured": peak,
        "whole": max(whole, sum(kinds.values()), peak),
        "limit": limit if math.isfinite(limit) else 0.0,
    }


def _traffic(run: RunTables, predicted: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """(class, predicted, measured) bytes per step and rank, largest first."""
    measured = _means(run, "bytes")
    expected = predicted.get("sent_bytes") or {}
    names = [name for name in {**expected, **measured} if expected.get(name) or measured.get(name)]
    rows = [(name.replace("_", " "), float(expected.get(name, 0)), measured.get(name, 0.0)) for name in names]
    return sorted(rows, key=lambda row: -max(row[1:]))


def _means(run: RunTables, table: str) -> dict[str, float]:
    """The means of what the latest attempt's steps have in a table, by name."""
    named = (name.partition(".") for name in run.of_attempt)
    return {name: run.of_attempt[f"{table}.{name}"].average for prefix, _, name in named if name and prefix == table}


def _compared(run: RunTables, predicted: Mapping[str, Any]) -> list[ComparedRow]:
    """Of the latest attempt alone: an earlier one may have had another plan."""
    if not predicted or "step" not in run.of_attempt:
        return []
    seconds, speed, mfu, peak = _measured(run)
    sent = sum(row[2] for row in _traffic(run, predicted))
    return [
        _row("Seconds per step", predicted.get("step_seconds"), seconds, show_seconds),
        _row(f"{run.unit.capitalize()} per second", predicted.get("tokens_per_second"), speed, show_count),
        _row("MFU", predicted.get("mfu"), mfu, lambda value: f"{value:.1%}"),
        _row(f"Memory at the peak ({_kind(run)})", (predicted.get("memory_bytes") or {}).get("peak"), peak, show_size),
        _row("Bytes sent per step", sum((predicted.get("sent_bytes") or {}).values()), sent, show_size),
    ]


def _row(label: str, predicted: float | None, measured: float, show: Any) -> ComparedRow:
    if predicted is None or not math.isfinite(measured):
        return ComparedRow(label, "–" if predicted is None else show(predicted), "–", None)
    error = measured / predicted - 1 if predicted else (0.0 if not measured else None)
    return ComparedRow(label, show(predicted), show(measured), error)


def _apart(run: RunTables) -> str:
    """What the figure of memory counts, and beside it what the allocator holds and the files that are mapped."""
    words_by_size = {
        "fragmentation": "reserved beyond that (fragmentation)",
        "page_cache": "of files in the page cache apart",
    }
    sizes = [f"; {show_size(size)} {words}" for name, words in words_by_size.items() if (size := run.latest.get(name))]
    return f"peak, per rank: {_kind(run)}{''.join(sizes)}"


def _kind(run: RunTables) -> str:
    """Which memory a run's figure is of."""
    ranks = run.plan.get("ranks") or [{}]
    return (
        "allocated on the GPU" if str(ranks[0].get("device", "cpu")).startswith("cuda") else "anonymous, shared pages"
    )


def _drawn(sample: dict[str, Any]) -> dict[str, Any]:
    """With its chart, where it is a curve."""
    if sample["kind"] != "curve" or not sample["rows"]:
        return sample
    try:
        (along, *names), *rows = sample["rows"]
        values = np.array(rows, float).reshape(len(rows), len(names) + 1)
    except (TypeError, ValueError, OverflowError):
        return sample  # cells of a log of somebody else
    lines = [Series(str(name), values[:, 0], values[:, at]) for at, name in enumerate(names, start=1)]
    drawn = charts.charts(Chart(sample["text"], "", lines, along=str(along)))
    return {**sample, "chart": drawn[0] if drawn else ""}


def _rows(run: RunTables, kind: str) -> list[dict[str, Any]]:
    """The newest events of a kind, with something under every name that the page asks for."""
    words = ("what", "action", "kind", "category", "reason", "why", "suspect", "text", "image", "chart")
    empty = dict.fromkeys(words, "") | {"step": None, "rows": None}
    return [empty | {name: value for name, value in row.items() if value is not None} for row in run.newest(kind)]


def flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(option with its sections, value as text) of a recipe; the tables of a list are numbered."""
    rows: list[tuple[str, str]] = []
    for key, value in table.items():
        if isinstance(value, dict):
            rows += flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for index, item in enumerate(value):
                rows += flat(item, f"{prefix}{key}[{index}].")
        else:
            rows.append((prefix + key, str(value)))
    return rows
