"""The example of several tasks: planned in waves, trained on two ranks, taken up on one, evaluated and reported."""

from __future__ import annotations

import json
from pathlib import Path

import programs
import pytest

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "tasks.toml")


def done(folder: Path, *arguments: str) -> str:
    found = programs.forked(folder, *arguments)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.slow
def test_the_example_of_several_tasks_runs_as_it_stands(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    (tmp_path / "machine.toml").write_text(programs.MACHINE)
    small = ["plan.cluster=machine.toml", "train.steps=2", "plan.trial=false"]
    plan = json.loads(done(tmp_path, "plan", EXAMPLE, *small, "--json"))
    assert len(plan["ranks"]) == 2
    assert plan["choices"]["task_waves"]["waves"]
    done(tmp_path, "train", EXAMPLE, *small, "--run", "run")
    done(tmp_path, "train", EXAMPLE, *small, "train.steps=3", "plan.pin.ranks=1", "--run", "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    steps = [one for one in events if one["event"] == "step"]
    assert [one["step"] for one in steps] == [1, 2, 3]
    assert set(steps[-1]["tasks"]) == {"glyphs", "source", "packages"}
    assert "glyphs" in (tmp_path / "run" / "report.html").read_text()
    assert "glyphs.accuracy" in done(tmp_path, "eval", "run", "--json")
