"""Measured steps of a file or an earlier run, for the planner to calibrate on or to be scored by (`--score`)."""

from __future__ import annotations

import json
import statistics
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from espalier.cli import resolve_recipe
from espalier.cli.open_run import SavedRun
from espalier.machine import cluster as clusters
from espalier.plan import base as plans
from espalier.plan.calibration import DATASHEET, Calibration, Measurement, calibrate, own_stack
from espalier.plan.layouts import of_view
from espalier.recipe import Recipe, cache_dir, defaults, units
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError
from espalier.recipe.terminal import rows, say, say_progress
from espalier.track import events
from espalier.track.progress import waiting
from espalier.train import run_folder as runs

if TYPE_CHECKING:
    from espalier.plan.measurements.score import Scores
    from espalier.plan.measurements.table import MeasuredTable

WARMING = 0.1
"""Share of a run's steps left out at its beginning: the first ones allocate, compile and fill caches."""
PATIENCE = 2.0


def measurements(path: str | Path) -> list[Measurement]:
    """The measured steps in a file (see `plan.measurements`) or of a run's folder. Raises UserError, also for times or
    peaks in other units."""
    if Path(path).is_dir():
        return [from_run(path)]
    return _read(path).measurements


def _read(path: str | Path) -> MeasuredTable:
    from espalier.plan.measurements import score, table

    measured = table.read(path)
    score.check_units(measured)
    return measured


def calibration(recipe: Recipe, path: str | None = None) -> Calibration:
    """What measured runs say of the planner's coefficients: of `path`, else of `plan.calibration`, else nothing."""
    named = path or recipe.plan.calibration
    return DATASHEET if named is None else calibrated(named)


def calibrated(path: str | Path) -> Calibration:
    """The calibration on a file or a run's folder. Raises UserError."""
    measured = measurements(path)
    with patiently(f"Calibrating on {path} ({len(measured)} rows) …"):
        return calibrate(measured, source=f"calibrated on {path}")


@contextmanager
def patiently(text: str) -> Iterator[None]:
    """Says `text` on standard error once two seconds have passed."""
    timer = threading.Timer(PATIENCE, say_progress, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def from_run(path: str | Path) -> Measurement:
    """What an earlier run measured: its median step and its largest memory. Raises UserError when it has no step."""
    folder = runs.find(path)
    recipe = folder.read()
    cluster = clusters.read(folder.cluster)
    plan = plans.read(folder.plan)
    last = {event["step"]: event for event in events.read(folder.events) if event["event"] == "step"}
    steps = [last[number] for number in sorted(last)]
    steps = steps[int(len(steps) * WARMING) :]
    if not steps:
        raise UserError(f"The run in {path} has no measured step.", do="let it train longer, or name another run")
    whole, _ = defaults.resolve(recipe)
    return Measurement(
        request=resolve_recipe.request(SavedRun(folder, whole).resolve()).changed(precision=plan.precision),
        cluster=cluster,
        layout=replace(of_view(plan.layout), threads=plan.ranks[plan.trainers[0]].threads),
        step_seconds=statistics.median(step["seconds"] for step in steps),
        peak_bytes=max(step["memory"] for step in steps),
        label=str(path),
        stack=own_stack(cluster),
    )


# --- espalier plan --score FILE --------------------------------------------------------------------------------------


WORTH_SAYING = 0.02
"""A calibrated factor nearer to 1 is not shown."""


def run(score: str, calibrate_on: str | None, out: str | None, as_json: bool) -> int:
    """Scores the rows of a file and writes them with predictions beside.

    Args:
        score: the file of measurements (see `plan.measurements`).
        calibrate_on: a file, or a run's folder, to fit the coefficients to first.
        out: where the rows go; None: beside the file, with `.scored` before its suffix.
        as_json: print one JSON object.

    Returns:
        0. Raises UserError.
    """
    from espalier.plan.measurements import score as scoring

    target = _target(Path(score), out)
    table = _read(score)
    calibration = calibrated(calibrate_on) if calibrate_on is not None else DATASHEET
    with waiting("Predicting") as progress:
        predictions = scoring.predict(table.measurements, calibration.factors, progress)
    scores = scoring.score(table.rows, calibration, predictions)
    cache_dir.replace(target, scoring.with_predictions(table, predictions, calibration))
    notes = [*table.notes, *_doubts(score, calibrate_on), *_foreign(table, calibration)]
    if as_json:
        summary = {"file": score, "out": str(target), "scores": msgspec.to_builtins(scores)}
        print(json.dumps(summary | {"calibration": msgspec.to_builtins(calibration), "notes": notes}, indent=2))
        return 0
    for note in notes:
        say_progress(f"note: {note}")
    _tell(table, scores, calibration)
    say(f"\nThe rows with their predictions: {target}")
    return 0


def _target(file: Path, out: str | None) -> Path:
    """Where the scored rows go. Raises UserError before anything is computed for nothing."""
    target = Path(out) if out is not None else file.with_name(f"{file.stem}.scored{file.suffix}")
    if target.is_dir():
        raise UserError(f"--out {target} is a folder.", do=f"--out {target / file.name}")
    if not target.parent.is_dir():
        raise UserError(f"There is no folder {target.parent} for --out.", do=f"mkdir -p {target.parent}")
    if file.exists() and target.resolve() == file.resolve():
        raise UserError(f"--out {target} is the file of measurements itself.", do="another name")
    return target


def _doubts(score: str, calibrate_on: str | None) -> list[str]:
    if calibrate_on is None or Path(calibrate_on).resolve() != Path(score).resolve():
        return []
    return ["calibrated on the rows it is scored on: the errors are smaller than those of rows not seen"]


def _foreign(table: MeasuredTable, calibration: Calibration) -> list[str]:
    """What is scored of stacks that were not measured."""
    stacks = Counter(row.stack for row in table.measurements if calibration.foreign(row.stack))
    return [f"{units.plural(count, 'row')}: {calibration.doubt(name)}" for name, count in sorted(stacks.items())]


def _tell(table: MeasuredTable, scores: Scores, calibration: Calibration) -> None:
    source = f"{calibration.source} ({calibration.rows} rows, scatter {calibration.spread:.1%})"
    say(f"{table.path}: {scores.rows} rows; {source if calibration.rows else calibration.source}\n")
    rows(("score", "value", "of"), _lines(scores))
    moved = msgspec.structs.asdict(calibration.factors)
    factors = [f"{name} {value:.2f}" for name, value in moved.items() if abs(value - 1) > WORTH_SAYING]
    if factors:
        say(f"\nCoefficients, as multiples of the datasheets': {', '.join(factors)}")


def _lines(scores: Scores) -> list[tuple[str, str, str]]:
    known = msgspec.structs.asdict(scores)
    lines = []
    for row in data_table(__file__)["scores"]:
        value = known[row["value"]]
        if known.get(row.get("where"), True):
            lines.append(
                (row["score"], "-" if value is None else row["shown"].format(value), row["of"].format_map(known))
            )
    return lines
