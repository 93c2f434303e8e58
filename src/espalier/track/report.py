"""Run report: one self-contained `report.html`, made from the run folder alone. No script."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from espalier.recipe import cache_dir
from espalier.recipe.foreign_files import parsing
from espalier.recipe.units import plural, show_count, show_seconds, show_size
from espalier.track import charts, page
from espalier.track.page import Figure
from espalier.track.run_tables import RunTables

NAME = "report.html"


METRICS = 3
"""Figures of the task among the headline figures."""
MOVED = {"offload": "states", "activations": "activations", "frozen": "frozen weights"}
"""What waits on other tiers, by the field of a step's event."""


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


def write(folder: str | Path) -> Path:
    """Writes `report.html` into the run folder and returns its path.

    Raises UserError when there is no run in `folder`, or it cannot be written.
    """
    path = Path(folder) / NAME
    cache_dir.replace(path, render(RunTables.read(folder)))
    return path


def render(run: RunTables, live: bool = False) -> str:
    """The page as text. `live` adds the few lines of script that renew it while the run goes on. Raises UserError for a
    recipe or a plan that is none."""
    with parsing(run.folder, "restore its run.toml and plan.json from a backup"):
        return page.render("track/report.html.j2", run=run, live=live, **_context(run))


def _context(run: RunTables) -> dict[str, Any]:
    predicted = run.plan.get("predicted") or {}
    return {
        "title": run.start.get("name") or run.recipe.get("name") or run.folder.absolute().name,
        "kind": run.state,
        "state": run.state,
        "mood": run.state,
        "subtitle": _subtitle(run),
        "figures": _figures(run),
        "plots": _plots(run),
        "memory": _memory(run, predicted),
        "time": charts.shares(predicted.get("terms") or {}, show_seconds),
        "step_seconds": predicted.get("step_seconds") or 0.0,
        "spent": charts.shares(run.account.parts, show_seconds),
        "traffic": _traffic(run, predicted),
        "encoded": _encoded(run),
        "experts": _experts(run),
        "compared": _compared(run, predicted),
        "plan": run.plan,
        "layout": _layout(run.plan),
        "incidents": _rows(run.incidents),
        "account": run.account,
        "samples": [_drawn(row) for row in _rows(run.samples)[-6:][::-1]],
        "checkpoints": _rows(run.checkpoints)[-5:][::-1],
        "derivations": run.start.get("derivations") or [],
        "notes": run.start.get("notes") or [],
        "about": {**(run.start.get("versions") or {}), **(run.start.get("host") or {})},
        "recipe": flat(run.recipe),
    }


def _subtitle(run: RunTables) -> list[str]:
    start, model = run.start, run.recipe.get("model") or {}
    words = [str(model["kind"])] if "kind" in model else []
    if start.get("parameters"):
        words.append(f"{show_count(start['parameters'])} parameters")
    if start.get("ranks"):
        ranks, threads = start["ranks"], start.get("threads") or 1
        words.append(f"{plural(ranks, 'rank')} × {plural(threads, 'thread')}")
    host = start.get("host") or {}
    words += [str(host[key]) for key in ("cpu", "device") if host.get(key)][:1]
    return words + ([page.moment(start["time"])] if start.get("time") else [])


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
    figures += _offloaded(latest)
    if latest.get("store"):
        steps, read = run.attempt, sum(latest["store"].get(tier) or 0 for tier in ("disk_cache", "packed"))
        share = float(np.nansum(steps.get("waited", 0.0)) / max(1e-9, np.nansum(steps.get("seconds", 0.0))))
        figures.append(Figure("features from disk", show_size(read), f"the latest step; {share:.1%} of time waiting"))
    attempts = f"in {run.attempts} attempts" if run.attempts > 1 else ""
    figures.append(Figure("time", show_seconds(run.seconds()), attempts))
    if run.account.failures:
        failures = run.account.failures
        figures.append(Figure("goodput", f"{run.account.goodput:.1%}", f"{plural(failures, 'failure')}"))
    return figures


def _offloaded(latest: Mapping[str, Any]) -> list[Figure]:
    """What the latest step moved from and to other tiers than the device, and how long it waited for that."""
    figures = []
    for what, waiting in MOVED.items():
        for tier, moved in (latest.get(what) or {}).items():
            size = f"{show_size(moved['read'])} read, {show_size(moved['written'])} written"
            note = f"a step, which waited {show_seconds(moved['stalled'])} for them"
            figures.append(Figure(f"{waiting} on {tier}", size, note))
    if node := latest.get("node"):
        size = f"{show_size(node['pulled'])} pulled, {show_size(node['pushed'])} pushed"
        figures.append(Figure("model on nodes", size, f"a step, which waited {show_seconds(node['stalled'])} for them"))
        size = f"{show_size(node.get('read', 0))} read, {show_size(node.get('written', 0))} written"
        figures.append(Figure("disks of nodes", size, "a step, of all optimizer nodes"))
    return figures


def _validated(run: RunTables) -> list[Figure]:
    table = run.validations
    values = table.get("loss", np.empty(0))
    if not np.isfinite(values).any():
        return []
    best = int(np.nanargmin(values))
    note = "held out" if best == len(values) - 1 else f"best {values[best]:.3f} at {table['step'][best]:,}"
    return [Figure("validation loss", f"{values[-1]:.3f}", note)]


def _metrics(run: RunTables) -> list[Figure]:
    """What the task is judged by, of the last validation; the test part's beside it."""
    table, figures = run.validations, []
    for name in run.metrics()[:METRICS]:
        column = table.get(f"test_{name}", np.empty(0))
        test = column[-1] if column.dtype == np.float64 and len(column) else math.nan
        note, last = f"validation; test {test:.3f}" if math.isfinite(test) else "held out", table[name][-1]
        if math.isfinite(last):
            figures.append(
                Figure(name.replace("_", " "), f"{last:.3f}" if last == 0 or abs(last) > 0.01 else _three(last), note)
            )
    return figures


def _measured(run: RunTables) -> Measured:
    steps = run.attempt

    def median(values: Any) -> float:
        return float(np.nanmedian(values)) if np.isfinite(values).any() else math.nan

    empty = np.empty(0)
    took, tokens, mfu = (steps.get(name, empty) for name in ("seconds", "tokens", "mfu"))
    seconds = median(took) or math.nan
    work = median(mfu * took) if len(mfu) == len(took) else math.nan  # of the peak, so that it agrees with the seconds
    return Measured(seconds, median(tokens) / seconds, work / seconds, _peak(steps))


def _plots(run: RunTables) -> list[tuple[str, str, Any]]:
    """(title, remark, drawing) of each chart that has something to show."""
    steps, x = run.steps, run.steps.get("step", np.empty(0))
    plots = [_metric(run, name) for name in run.metrics()[:1]]
    per = "per token, in nats" if run.unit == "tokens" else "on training and held-out data"
    plots += [("Loss", per, charts.line_chart("Loss", _losses(run), _three))]
    if "tokens" in steps and "seconds" in steps:
        speed = steps["tokens"] / np.maximum(steps["seconds"], 1e-9)
        plots.append(("Speed", f"{run.unit} per second", _trend("Speed", x, speed, show_count)))
    if "memory" in steps:
        unit = 1024.0 ** math.floor(math.log(max(_peak(steps), 1.0), 1024))
        line = charts.Series("memory", x, steps["memory"], colour=3)
        chart = charts.line_chart("Memory", [line], show_size, zero=True, unit=unit)
        plots.append(("Memory", _apart(run), chart))
    plots += _tiers(steps)
    if "gradient_norm" in steps:
        plots.append(("Gradient norm", "before clipping", _trend("Gradient norm", x, steps["gradient_norm"], _three)))
    if "learning_rate" in steps:
        series = charts.Series("learning rate", x, steps["learning_rate"], colour=5)
        plots.append(
            ("Learning rate", "", charts.line_chart("Learning rate", [series], lambda v: f"{v:.2g}", zero=True))
        )
    return [plot for plot in (*plots, *_evaluations(run)) if plot[2]]


def _tiers(steps: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Features of a [store] by the tier that they came from, and how long training waited for its batches."""
    columns = {name: np.nan_to_num(steps[name]) for name in steps if name.startswith("store.")}
    columns = {name: values for name, values in columns.items() if values.any()}
    if not columns:
        return []
    x, unit = (
        steps["step"],
        1024.0 ** math.floor(math.log(max(float(column.max()) for column in columns.values()), 1024)),
    )
    series = [
        charts.Series(name.removeprefix("store.").replace("_", " "), x, values, colour=1 + at)
        for at, (name, values) in enumerate(columns.items())
    ]
    waited = charts.line_chart(
        "Waited", [charts.Series("waited", x, steps.get("waited", 0.0 * x), colour=2)], show_seconds, zero=True
    )
    return [
        ("Features by tier", "bytes read a step", charts.line_chart("Features by tier", series, show_size, True, unit)),
        ("Waiting for batches", "seconds of a step", waited),
    ]


def _metric(run: RunTables, name: str) -> tuple[str, str, Any]:
    title, table = name.replace("_", " "), run.validations
    series = [
        charts.Series(part, table["step"], table[key], "dots" if len(table["step"]) <= 60 else "line", colour)
        for part, key, colour in (("validation", name, 4), ("test", f"test_{name}", 2))
        if key in table
    ]
    return title[:1].upper() + title[1:], "of held-out data", charts.line_chart(title, series, _three)


def _losses(run: RunTables) -> list[charts.Series]:
    steps, validations = run.steps, run.validations
    series = []
    if "loss" in steps:
        series += _smoothed("training", steps["step"], steps["loss"])
    if "loss" in validations:
        kind = "dots" if len(validations["loss"]) <= 60 else "line"
        series.append(charts.Series("validation", validations["step"], validations["loss"], kind, 4))
    return series


def _trend(title: str, x: Any, y: Any, show: Any) -> Any:
    return charts.line_chart(title, _smoothed(title.lower(), x, y), show, zero=True)


def _smoothed(name: str, x: Any, y: Any) -> list[charts.Series]:
    good = np.isfinite(y)
    x, y = x[good], y[good]
    if len(x) < 20:
        return [charts.Series(name, x, y)]
    window = max(5, len(y) // 60)
    return [charts.Series(name, x, y, "thin"), charts.Series(f"{name} (smoothed)", x, charts.smooth(y, window))]


def _evaluations(run: RunTables) -> list[tuple[str, str, Any]]:
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
        series = []
        for at, (name, points) in enumerate(tasks.items()):
            steps = sorted(points)
            kind = "dots" if len(steps) <= 60 else "line"
            y = np.array([points[step] for step in steps])
            series.append(charts.Series(name, np.array(steps), y, kind, at % charts.COLOURS + 1))
        chart = charts.line_chart(title, series, _three)
        drawn.append((title[:1].upper() + title[1:], "of checkpoints, evaluated beside training", chart))
    return drawn


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
    measured = _means(run.attempt, "bytes")
    expected = predicted.get("sent_bytes") or {}
    names = [name for name in {**expected, **measured} if expected.get(name) or measured.get(name)]
    rows = [(name.replace("_", " "), float(expected.get(name, 0)), measured.get(name, 0.0)) for name in names]
    return sorted(rows, key=lambda row: -max(row[1:]))


def _encoded(run: RunTables) -> list[tuple[str, float, float, float]]:
    """(class, bytes saved, seconds in codecs, share kept for the next step) of encoded classes, per step and rank."""
    saved, coding, lost = (_means(run.steps, what) for what in ("saved", "coding", "lost"))
    return [(kind.replace("_", " "), size, coding.get(kind, 0.0), lost.get(kind, 0.0)) for kind, size in saved.items()]


def _experts(run: RunTables) -> dict[str, Any]:
    """Of experts over ranks: (number, rows a step, times an even share) of each, the busiest first, and what ranks
    waited for them a step. Empty: there are none."""
    experts = _means(run.attempt, "experts")
    loads_by_expert = [(int(name), rows) for name, rows in experts.items() if name.isdecimal()]
    if not loads_by_expert:
        return {}
    even = max(1e-9, sum(rows for _, rows in loads_by_expert) / len(loads_by_expert))
    loads = sorted(((expert, rows, rows / even) for expert, rows in loads_by_expert), key=lambda load: -load[1])
    waits = _means(run.attempt, "dispatch")
    return {"loads": loads, "waited": waits.get("waited", 0.0), "longest": waits.get("longest", 0.0)}


def _means(table: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """The means of the columns `prefix.NAME` that have numbers, by name."""
    columns = {name: column for name, column in table.items() if name.startswith(f"{prefix}.")}
    return {
        name.removeprefix(f"{prefix}."): float(np.nanmean(column))
        for name, column in columns.items()
        if column.dtype == np.float64 and np.isfinite(column).any()
    }


def _compared(run: RunTables, predicted: Mapping[str, Any]) -> list[ComparedRow]:
    """Of the latest attempt alone: an earlier one may have had another plan."""
    if not predicted or not len(run.attempt["step"]):
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


def _peak(steps: Mapping[str, Any]) -> float:
    memory = steps.get("memory", np.empty(0))
    return float(np.nanmax(memory)) if np.isfinite(memory).any() else 0.0


def _apart(run: RunTables) -> str:
    """What the figure of memory counts, and beside it the files that the rank has mapped."""
    cached = run.latest.get("page_cache")
    apart = f"; {show_size(cached)} of files in the page cache apart" if cached else ""
    return f"peak, per rank: {_kind(run)}{apart}"


def _kind(run: RunTables) -> str:
    """Which memory a run's figure is of."""
    ranks = run.plan.get("ranks") or [{}]
    return (
        "allocated on the GPU" if str(ranks[0].get("device", "cpu")).startswith("cuda") else "anonymous, shared pages"
    )


def _layout(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    layout = {"planner": plan["planner"]} if "planner" in plan else {}
    layout |= plan.get("layout") or {}

    def shown(value: Any) -> str:
        return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)

    return [(key.replace("_", " "), shown(value)) for key, value in layout.items()]


def _drawn(sample: dict[str, Any]) -> dict[str, Any]:
    """With its chart, where it is a curve."""
    if sample["kind"] != "curve" or not sample["rows"]:
        return sample
    try:
        (along, *names), *rows = sample["rows"]
        values = np.array(rows, float).reshape(len(rows), len(names) + 1)
    except (TypeError, ValueError, OverflowError):
        return sample  # cells of a log of somebody else
    lines = [
        charts.Series(str(name), values[:, 0], values[:, at], "line", at, str(along))
        for at, name in enumerate(names, start=1)
    ]
    return {**sample, "chart": charts.line_chart(sample["text"], lines, _three)}


def _rows(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = list(table)
    words = ("what", "action", "kind", "category", "reason", "why", "suspect", "text", "image", "chart")
    empty = dict.fromkeys(words, "") | {"step": None, "rows": None}
    rows = zip(*(table[name].tolist() for name in names), strict=True)
    return [empty | dict(zip(names, row, strict=True)) for row in rows]


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


def _three(value: float) -> str:
    return f"{value:.3g}"
