"""`espalier report --trace FILE`: what the jobs of a cluster are like, as tables here and as plots in a page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from espalier.resilience.acme import jobs as traces
from espalier.resilience.acme.characterise import Characters, Group, characterise
from espalier.resilience.acme.diagnose import diagnose
from espalier.resilience.acme.taxonomy import NO_FAILURE
from espalier.terminal import say
from espalier.track.tables import open_run
from espalier.units import show_count, show_seconds
from espalier.verbs import jobs_page, show

SHOWN = 12
"""Rows of a table."""
STATES = {
    "finished": "COMPLETED",
    "interrupted": "CANCELLED",
    "failed": "FAILED",
    "running": "RUNNING",
    "silent": "FAILED",
}
"""Of runs, as schedulers call them."""


def run(trace: str, as_json: bool) -> int:
    """Reads the trace, prints its tables, writes the page beside it. Raises UserError."""
    path = Path(trace)
    found = characterise(traces.of_runs(path, job_of) if path.is_dir() else traces.read(path))
    page = jobs_page.write(path / "trace.html" if path.is_dir() else path.with_name(f"{path.stem}.html"), found)
    if as_json:
        print(json.dumps({"trace": trace, "report": str(page), **as_dict(found)}))
        return 0
    tell(found)
    say(f"\nPlots: {page}")
    return 0


def job_of(folder: Path) -> Mapping[str, Any]:
    """A run as a row of a trace; the cause of one that failed is diagnosed from its logs."""
    run = open_run(folder)
    state = STATES.get(run.state, "UNKNOWN")
    began = float(run.start.get("time") or math.nan)
    told = diagnose(folder)[0].reason if state == "FAILED" else ""
    return {
        "gpus": float(run.start.get("ranks") or 1),
        "kind": str((run.recipe.get("model") or {}).get("kind") or run.start.get("workload") or "run"),
        "state": state,
        "cause": "not told" if told == NO_FAILURE else told,
        "submitted": began,
        "started": began,
        "seconds": max(0.0, run.last_time - began),
        "queued": math.nan,
    }


def as_dict(found: Characters) -> dict[str, Any]:
    """Plain values; NaN as null, the curves left to the page."""
    table = {key: value for key, value in asdict(found).items() if not isinstance(value, np.ndarray)}
    table |= {
        "mean_in_use": found.mean_in_use,
        "queue_percentiles": _marks(found.waits),
        "run_percentiles": _marks(found.runs),
    }
    cleaned: dict[str, Any] = _plain(table)
    return cleaned


def _marks(values: Any) -> dict[str, float]:
    return {f"p{mark}": float(values[mark]) for mark in (25, 50, 75, 90, 95, 99)} if len(values) else {}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tell(found: Characters) -> None:
    """The tables."""
    say(
        f"{found.source}: {found.jobs:,} GPU jobs, {hours(found.gpu_seconds)} GPU hours"
        + (f", and {found.cpu_jobs:,} jobs without GPUs" if found.cpu_jobs else "")
    )
    if found.span:
        use = f"{found.mean_in_use:,.0f} GPUs in use on average, {found.most:,.0f} at the highest moment"
        say(f"over {show_seconds(found.span)}: {use}")
    if found.left_out[0]:
        say(f"note: {found.left_out[0]:,} rows were left out ({found.left_out[1]})")
    for title, groups in (("type", found.kinds), ("final state", found.states), ("cause of failure", found.causes)):
        if groups and not (len(groups) == 1 and groups[0].name in ("all", "UNKNOWN")):
            say()
            show.rows(
                HEAD if title != "cause of failure" else FAILURES, [cells(one) for one in groups[:SHOWN]], cut=True
            )
    for title, values in (("waits", found.waits), ("runs", found.runs)):
        if len(values):
            said = ", ".join(f"{name[1:]} % within {seconds(value)}" for name, value in _marks(values).items())
            say(f"\n{title}: {said}" if title == "waits" else f"{title}: {said}")


HEAD = ("", "jobs", "share", "of GPU time", "GPUs", "median run", "mean run", "median wait", "95 % wait")
FAILURES = ("failed by", "jobs", "share", "of lost GPU time", *HEAD[4:])


def cells(one: Group) -> tuple[str, ...]:
    """A group as a row."""
    wait = seconds(one.queue), seconds(one.long_queue)
    took = seconds(one.duration), seconds(one.mean_duration)
    return (one.name, f"{one.jobs:,}", f"{one.share:.1%}", f"{one.time_share:.1%}", f"{one.gpus:,.1f}", *took, *wait)


def hours(gpu_seconds: float) -> str:
    """GPU time in hours."""
    return show_count(gpu_seconds / 3600)


def seconds(value: float) -> str:
    """A time, a dash where it is not told."""
    return show_seconds(value) if math.isfinite(value) else "–"
