"""Runs in a list and side by side: states, figures, the options that differ, one page."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import made
import pytest

from espalier.cli import main as cli
from espalier.track import run_comparison
from espalier.track.run_tables import RunTables


def charts_of(page: str) -> list[dict[str, Any]]:
    return [json.loads(html.unescape(data)) for data in re.findall(r'data-chart="([^"]*)"', page)]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three runs; the second has another width, the third was interrupted."""
    monkeypatch.chdir(tmp_path)
    for name, steps, end in (("a", 300, "finished"), ("b", 200, "finished"), ("c", 100, "interrupted")):
        made.make(tmp_path / "runs" / name, steps=steps, end=end)
    recipe = tmp_path / "runs" / "b" / "run.toml"
    recipe.write_text(recipe.read_text().replace("width = 192", "width = 256").replace('"language"', '"b"'))
    return ["runs/a", "runs/b", "runs/c"]


def test_without_a_run_report_lists_all_of_them(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "step", "time", "speed", "result"]
    found = {line.split()[0]: line for line in lines[1:]}
    assert set(found) == set(runs)
    assert "300 of" in found["runs/a"]
    assert "interrupted" in found["runs/c"]


def test_the_list_as_json_has_the_numbers_of_the_logs(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "--json"]) == 0
    table = {one["run"]: one for one in json.loads(capsys.readouterr().out)}
    for name in runs:
        run = RunTables.read(name)
        assert table[name]["step"] == run.steps["step"][-1]
        assert table[name]["loss"] == run.steps["loss"][-1]
        validated = run.validations.get("loss", [])
        assert table[name].get("validation_loss") == (validated[-1] if len(validated) else None)


def test_the_newest_run_comes_first(runs: list[str]) -> None:
    found = run_comparison.runs_in("runs")
    times = [one.run.last_time for one in found]
    assert times == sorted(times, reverse=True)


def test_runs_are_compared_by_what_differs(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", *runs]) == 0
    said = capsys.readouterr().out
    assert "model.width" in said
    assert "model.depth" not in said, "the same in all"
    page = (Path("runs") / run_comparison.NAME).read_text()
    assert all(name in page for name in (*runs, "model.width", "Options that differ"))
    (loss,) = [chart for chart in charts_of(page) if chart["title"] == "Loss"]
    assert [line["name"] for line in loss["series"]] == runs, "each can be switched off by its name"
    assert [line["run"] for line in loss["series"]] == [0, 1, 2]


def test_one_seed_twice_differs_in_nothing(runs: list[str]) -> None:
    one = run_comparison.summary(runs[0])
    assert run_comparison.differences([one, one]) == []
    assert all(len(set(values)) == 1 for _, values in run_comparison.figures([one, one]))


def test_a_run_without_steps_is_listed(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (Path("runs/new")).mkdir()
    Path("runs/new/run.toml").write_text(made.RECIPE)
    assert cli.main(["report"]) == 0
    assert "waiting" in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("runs/new"))
    assert cli.main(["report", "runs/new", "runs/a"]) == 0


def test_what_cannot_be_compared_is_said(
    runs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["report", "runs/a", "runs/x"]) == 2
    assert "runs/x" in capsys.readouterr().err
    assert cli.main(["report", "--serve", "runs/a", "runs/b"]) == 2
    assert "one run, not 2" in capsys.readouterr().err
    monkeypatch.chdir("runs/a")
    assert cli.main(["report"]) == 2
    assert "There is no run" in capsys.readouterr().err
