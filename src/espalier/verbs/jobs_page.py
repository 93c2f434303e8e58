"""The plots of a cluster's jobs: one HTML file of a run report's look; no script, no outside resource."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from espalier.errors import UserError
from espalier.resilience.acme.characterise import Characters, Group
from espalier.track import draw, report
from espalier.units import show_count, show_seconds
from espalier.verbs import plan_page


def write(path: Path, found: Characters) -> Path:
    """Writes the page of a trace; in the current folder where that of the trace may not be written.

    Raises:
        UserError: neither can be written.
    """
    text = render(found)
    for target in (path, Path(path.name)):
        unfinished = target.with_name(target.name + ".tmp")
        try:
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, target)
        except OSError as error:
            last = error
        else:
            return target
    raise UserError(
        f"Cannot write {path.name}, neither beside the trace nor here.",
        why=last.strerror or str(last),
        do="call it in a folder that may be written to",
    )


def render(found: Characters) -> str:
    """The page as text."""
    template = plan_page.environment().get_template("jobs_page.html.j2")
    return str(
        template.render(
            title=Path(found.source).name,
            style=plan_page.style(),
            found=found,
            figures=_figures(found),
            charts=_charts(found),
            shares=[
                _shares(title, groups) for title, groups in (("type", found.kinds), ("state", found.states)) if groups
            ],
            tables=[
                (title, groups)
                for title, groups in (
                    ("By type", found.kinds),
                    ("By final state", found.states),
                    ("Failures by cause", found.causes),
                )
                if groups
            ],
            draw=draw,
            seconds=lambda value: show_seconds(value) if math.isfinite(value) else "–",
        )
    )


def _figures(found: Characters) -> list[report.Figure]:
    figures = [
        report.Figure("GPU jobs", f"{found.jobs:,}", f"{found.cpu_jobs:,} without GPUs" if found.cpu_jobs else ""),
        report.Figure("GPU hours", show_count(found.gpu_seconds / 3600)),
    ]
    if found.span:
        figures.append(report.Figure("in use", f"{found.mean_in_use:,.0f} GPUs", f"{found.most:,.0f} at most"))
    if len(found.waits):
        figures.append(report.Figure("median wait", show_seconds(float(found.waits[50]))))
    if len(found.runs):
        figures.append(report.Figure("median run", show_seconds(float(found.runs[50]))))
    return figures


def _charts(found: Characters) -> list[tuple[str, str, Any]]:
    charts = []
    if len(found.hours):
        line = draw.Series("GPUs in use", found.hours, found.in_use, along="hour")
        charts.append(
            (
                "GPUs in use",
                "over the hours of the trace",
                draw.line_chart("GPUs in use", [line], show_count, zero=True),
            )
        )
    for title, remark, values in (("Waits", "in the queue", found.waits), ("Runs", "from start to end", found.runs)):
        if len(values):
            line = draw.Series(
                title.lower(), np.arange(100), np.log10(np.maximum(values[:100], 1.0)), colour=3, along="percentile"
            )
            charts.append((title, f"{remark}; the scale is logarithmic", draw.line_chart(title, [line], _power)))
    return charts


def _power(value: float) -> str:
    return show_seconds(10.0**value)


def _shares(title: str, groups: Sequence[Group]) -> tuple[str, Markup, Markup, Markup]:
    """Bars of jobs and of GPU time by what `title` says, and what their colours mean."""
    jobs = [
        draw.Share(one.name, one.share, f"{one.share:.1%} of jobs, {one.time_share:.1%} of GPU time") for one in groups
    ]
    time = [draw.Share(one.name, one.time_share, f"{one.time_share:.1%}") for one in groups]
    return title, draw.stacked("jobs", jobs, 1.0, ""), draw.stacked("GPU time", time, 1.0, ""), draw.keys(jobs)
