"""A rank that becomes slow while a run goes on in waves: named, and planned round where that pays."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_tasks
import torch

from espalier.cli import start_run, train
from espalier.mechanisms.task_waves import wave_schedule as spindle
from espalier.recipe import recipe_file
from espalier.train import worker

STEPS = 60
MACHINE = """[[nodes]]
name = "here"
device = "cpu"
cores = 1
memory = "8GiB"
"""


def prepared(folder: Path) -> Any:
    """A run on three ranks about to begin."""
    shutil.copy(Path(tiny_tasks.__file__), folder)
    (folder / "cluster.toml").write_text(3 * MACHINE)
    table = tiny_tasks.table(
        train={"steps": STEPS, "validate_every": STEPS, "precision": "fp64"},
        plan={"cluster": str(folder / "cluster.toml"), "trial": False, "pin": {"threads": 1}},
        faults={"heartbeat": "0.1s"},
    )
    path = folder / "recipe.toml"
    path.write_text(recipe_file.dump(recipe_file.from_table(table, "recipe")))
    arguments = argparse.Namespace(
        recipe=path, overrides=[], run=str(folder / "run"), json=True, trust=True, frozen=False
    )
    return start_run.of_command(arguments)


def told(monkeypatch: pytest.MonkeyPatch, folder: Path, slow: int | None) -> list[dict[str, Any]]:
    """The events of a run whose rank `slow` waits in its slices, by their operators and samples."""
    folder.mkdir()
    job, plain, begun = prepared(folder), spindle.WaveSchedule._forward, worker.train
    assert len(job.plan.ranks) == 3
    seat: list[int] = []

    def forward(schedule: Any, step: Any, number: int, fields: Any) -> None:
        one = schedule.slices.all[number]
        low, high = schedule._rows(number, spindle._samples(fields))
        if torch.is_grad_enabled() and seat == [slow]:
            time.sleep(0.006 * (high - low) * (one.last - one.first))
        plain(schedule, step, number, fields)

    def armed(setting: Any, identity: Any) -> Any:
        seat[:] = [setting.place.seat]
        return begun(setting, identity)

    monkeypatch.setattr(train.worker, "train", armed)
    monkeypatch.setattr(spindle.WaveSchedule, "_forward", forward)
    torch.set_num_threads(1)
    try:
        train.carry_out(train.Ranks(lambda: (job, ()), train.fork), as_json=True)
        return [json.loads(line) for line in job.folder.events.read_text().splitlines()]
    finally:
        job.folder.release()
        monkeypatch.undo()


@pytest.mark.slow
def test_a_straggler_in_a_wave_is_named_and_planned_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    events = told(monkeypatch, tmp_path / "slow", 1)
    incidents = [event for event in events if event["event"] == "incident"]
    assert [event.get("rank") for event in incidents if event["kind"] == "slow"][:1] == [1]
    (switch,) = [event for event in incidents if event["kind"] == "replanned"]
    assert "waves of the tasks' parts" in switch["what"]
    assert switch["predicted"] < 0.9 * switch["before"]
    (recovered,) = [event for event in events if event["event"] == "recovered"]
    assert (recovered["kind"], recovered["lost_steps"]) == ("replanned", 0)
    steps = {event["step"]: event for event in events if event["event"] == "step"}
    assert sorted(steps) == list(range(1, STEPS + 1))
    after = sorted(steps[step]["seconds"] for step in steps if step > switch["step"] + 3)
    assert after[len(after) // 2] < 0.9 * switch["before"]
    whole = {
        event["step"]: event["loss"] for event in told(monkeypatch, tmp_path / "even", None) if event["event"] == "step"
    }
    assert [steps[step]["loss"] for step in whole] == pytest.approx(list(whole.values()), rel=1e-6)
