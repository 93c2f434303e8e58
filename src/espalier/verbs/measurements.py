"""Measurements for the planner, from a file or from the folder of an earlier run."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from espalier import cluster as clusters
from espalier import run as runs
from espalier.config import derive
from espalier.errors import UserError
from espalier.plan import base as plans
from espalier.plan.calibrate import Calibration, Measurement, calibrate
from espalier.plan.layouts import of_view
from espalier.plan.measurements import score, table
from espalier.track import events
from espalier.verbs import ready
from espalier.verbs.trained import resolved

WARMING = 0.1
"""Share of a run's steps left out at its beginning: the first ones allocate, compile and fill caches."""
PATIENCE = 2.0


def measurements(path: str | Path) -> list[Measurement]:
    """The measured steps in a file (see `plan.measurements`) or of a run's folder. Raises UserError, also for times or
    peaks in other units."""
    if Path(path).is_dir():
        return [from_run(path)]
    found = table.read(path)
    score.check_units(found)
    return found.measurements


def calibrated(path: str | Path) -> Calibration:
    """The calibration on a file or a run's folder. Raises UserError."""
    found = measurements(path)
    with patiently(f"Calibrating on {path} ({len(found)} rows) …"):
        return calibrate(found, source=f"calibrated on {path}")


@contextmanager
def patiently(text: str) -> Iterator[None]:
    """Says `text` on standard error once two seconds have passed."""
    timer = threading.Timer(PATIENCE, ready.say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def from_run(path: str | Path) -> Measurement:
    """What an earlier run measured: its median step and its largest memory. Raises UserError when it has no step."""
    folder = runs.find(path)
    recipe, cluster, plan = folder.read(), clusters.read(folder.cluster), plans.read(folder.plan)
    last = {event["step"]: event for event in events.read(folder.events) if event["event"] == "step"}
    steps = [last[number] for number in sorted(last)]
    steps = steps[int(len(steps) * WARMING) :]
    if not steps:
        raise UserError(f"The run in {path} has no measured step.", do="let it train on, or name another run")
    whole, _ = derive.resolve(recipe)
    return Measurement(
        request=ready.request(resolved(folder, whole)),
        cluster=cluster,
        layout=replace(of_view(plan.layout), threads=plan.ranks[plan.trainers[0]].threads),
        step_seconds=statistics.median(step["seconds"] for step in steps),
        peak_bytes=max(step["memory"] for step in steps),
        label=str(path),
    )
