"""Job report of a cluster's trace: tables for people, plain values for programs, and one HTML page of plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from espalier.ops.job_trace import Characters, JobGroup
from espalier.recipe import cache_dir
from espalier.recipe.errors import UserError
from espalier.recipe.terminal import rows, say
from espalier.recipe.units import show_count, show_seconds
from espalier.track import charts, page
from espalier.track.charts import BarShare, Chart, Series
from espalier.track.page import Figure

SHOWN = 12
"""Rows of a table."""
HEAD = ("", "jobs", "share", "of GPU time", "GPUs", "median run", "mean run", "median wait", "95 % wait")
FAILURES = ("failed by", "jobs", "share", "of lost GPU time", *HEAD[4:])


def as_dict(characters: Characters) -> dict[str, Any]:
    """Plain values; NaN as null, the curves left to the page."""
    table = {key: value for key, value in vars(characters).items() if not isinstance(value, np.ndarray)}
    table |= {
        "mean_in_use": characters.mean_in_use,
        "queue_percentiles": _marks(characters.waits),
        "run_percentiles": _marks(characters.runs),
    }
    return dict(msgspec.json.decode(msgspec.json.encode(table)))


def _marks(values: Any) -> dict[str, float]:
    return {f"p{mark}": float(values[mark]) for mark in (25, 50, 75, 90, 95, 99)} if len(values) else {}


def seconds(value: float) -> str:
    """A time, a dash where it is not told."""
    return show_seconds(value) if math.isfinite(value) else "–"


# --- tables ----------------------------------------------------------------------------------------------------------


def tell(characters: Characters) -> None:
    """The tables."""
    say(
        f"{characters.source}: {characters.jobs:,} GPU jobs, {show_count(characters.gpu_seconds / 3600)} GPU hours"
        + (f", and {characters.cpu_jobs:,} jobs without GPUs" if characters.cpu_jobs else "")
    )
    if characters.span:
        use = f"{characters.mean_in_use:,.0f} GPUs in use on average, {characters.most:,.0f} at the highest moment"
        say(f"over {show_seconds(characters.span)}: {use}")
    if characters.left_out[0]:
        say(f"note: {characters.left_out[0]:,} rows were left out ({characters.left_out[1]})")
    for head, groups in ((HEAD, characters.kinds), (HEAD, characters.states), (FAILURES, characters.causes)):
        if groups and not (len(groups) == 1 and groups[0].name in ("all", "UNKNOWN")):
            say()
            rows(head, [_cells(group) for group in groups[:SHOWN]], cut=True)
    for title, values in (("\nwaits", characters.waits), ("runs", characters.runs)):
        if len(values):
            marks = ", ".join(f"{name[1:]} % within {seconds(value)}" for name, value in _marks(values).items())
            say(f"{title}: {marks}")


def _cells(group: JobGroup) -> tuple[str, ...]:
    """A group as a row."""
    times = map(seconds, (group.duration, group.mean_duration, group.queue, group.long_queue))
    return (
        group.name,
        f"{group.jobs:,}",
        f"{group.share:.1%}",
        f"{group.time_share:.1%}",
        f"{group.gpus:,.1f}",
        *times,
    )


# --- page ------------------------------------------------------------------------------------------------------------


def write(path: Path, characters: Characters) -> Path:
    """Writes the page of a trace; in the current folder where that of the trace may not be written.

    Raises:
        UserError: neither can be written.
    """
    text = render(characters)
    do = "call it in a folder that may be written to"
    try:
        cache_dir.replace(path, text, do)
    except UserError:
        path = Path(path.name)
        cache_dir.replace(path, text, do)
    return path


def render(characters: Characters) -> str:
    """The page as text."""
    tables = [
        ("By type", characters.kinds),
        ("By final state", characters.states),
        ("Failures by cause", characters.causes),
    ]
    return page.render(
        "ops/job_report.html.j2",
        title=Path(characters.source).name,
        kind="jobs",
        state="jobs of a cluster",
        found=characters,
        figures=_figures(characters),
        plots=_plots(characters),
        shares=[
            _shares(title, groups)
            for title, groups in (("type", characters.kinds), ("state", characters.states))
            if groups
        ],
        tables=[(title, groups) for title, groups in tables if groups],
        seconds=seconds,
    )


def _figures(characters: Characters) -> list[Figure]:
    figures = [
        Figure(
            "GPU jobs", f"{characters.jobs:,}", f"{characters.cpu_jobs:,} without GPUs" if characters.cpu_jobs else ""
        ),
        Figure("GPU hours", show_count(characters.gpu_seconds / 3600)),
    ]
    if characters.span:
        figures.append(Figure("in use", f"{characters.mean_in_use:,.0f} GPUs", f"{characters.most:,.0f} at most"))
    medians = (("median wait", characters.waits), ("median run", characters.runs))
    return figures + [Figure(title, show_seconds(float(values[50]))) for title, values in medians if len(values)]


def _plots(characters: Characters) -> list[Chart]:
    in_use = Series("GPUs in use", characters.hours, characters.in_use)
    times = [
        (title, remark, Series(title.lower(), np.arange(len(values))[:100], np.maximum(values[:100], 1.0)))
        for title, remark, values in (
            ("Waits", "in the queue", characters.waits),
            ("Runs", "from start to end", characters.runs),
        )
    ]
    return charts.charts(
        Chart("GPUs in use", "over the hours of the trace", [in_use], "count", along="hour", zero=True),
        *(Chart(title, remark, [line], "seconds", along="percentile", log=True) for title, remark, line in times),
    )


def _shares(title: str, groups: Sequence[JobGroup]) -> tuple[str, list[BarShare], list[BarShare]]:
    """Parts of the jobs and of the GPU time by what `title` says."""
    jobs = [
        BarShare(group.name, group.share, f"{group.share:.1%} of jobs, {group.time_share:.1%} of GPU time")
        for group in groups
    ]
    return title, jobs, [BarShare(group.name, group.time_share, f"{group.time_share:.1%}") for group in groups]
