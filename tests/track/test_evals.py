"""Curves of evaluations: one drawing per metric, a line per task, nothing of an attempt that was given up."""

from __future__ import annotations

from pathlib import Path

import made

from espalier.track import events, report
from espalier.track.run_tables import RunTables


def figure(run: Path, step: int, task: str, metric: str, value: float) -> None:
    events.append(
        run / "events.jsonl", "eval", step=step, task=task, metric=metric, value=value, records=9, seconds=1.0
    )


def test_the_report_draws_each_metric_with_a_line_for_each_task(tmp_path: Path) -> None:
    run = made.make(tmp_path, 400)
    for step in (400, 200):  # evaluated in any order
        figure(run, step, "facts", "accuracy", step / 1000)
        figure(run, step, "logic", "accuracy", 0.5)
        figure(run, step, "held-out", "perplexity", 9.0)
    found = report._evaluations(RunTables.read(run))
    assert [chart.title for chart in found] == ["Accuracy", "Perplexity"]
    assert [line.name for line in found[0].series] == ["facts", "logic"]
    assert found[0].series[0].x.tolist() == [200, 400]
    assert found[0].series[0].y.tolist() == [0.2, 0.4]
    assert "Perplexity" in report.write(run).read_text()


def test_a_run_without_evaluations_has_no_such_drawing(tmp_path: Path) -> None:
    assert report._evaluations(RunTables.read(made.make(tmp_path, 20))) == []


def test_evaluations_of_an_attempt_that_was_given_up_are_left_out(tmp_path: Path) -> None:
    run = made.make(tmp_path, 400, end="")
    for step in (400, 200):
        figure(run, step, "facts", "accuracy", 0.1)
    events.append(run / "events.jsonl", "run", step=200)
    figure(run, 400, "facts", "accuracy", 0.9)
    table = RunTables.read(run).evals
    assert list(zip(table["step"], table["value"], strict=True)) == [(200, 0.1), (400, 0.9)]
