"""After twenty steps the prediction is compared with them, once; what is slower is named, and what to do."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from espalier.cli import train
from espalier.plan.base import Predicted
from espalier.plan.prediction_check import STEPS, WARM, PredictionCheck
from espalier.recipe import Gpt, Recipe
from espalier.track.events import read
from espalier.train.run_folder import RunFolder

PREDICTED = Predicted(
    step_seconds=0.04, tokens_per_second=1.0, tokens_per_second_per_device=1.0, mfu=0.1,
    terms={"forward": 0.02, "backward": 0.015, "all_reduce": 0.005}, memory_bytes={}, memory_limit=1.0, sent_bytes={},
)  # fmt: skip


def told(seconds: float, exposed: float) -> dict[str, Any]:
    check, found = PredictionCheck(PREDICTED), []
    for step in range(3 * STEPS):
        slow = 50.0 if step < WARM else 1.0  # the first steps do not count
        found.append(check.event({"event": "step", "step": step + 1, "seconds": slow * seconds, "exposed": exposed}))
    (said,) = [one for one in found if one is not None]
    assert said["step"] == WARM + STEPS
    return said


@pytest.mark.parametrize(
    ("seconds", "exposed", "part", "words"),
    [
        (0.042, 0.005, "", "(+5%)"),
        (0.03, 0.0, "", "(-25%)"),
        (3.2, 3.1, "exchanges", "80.0 times as long"),
        (0.12, 0.006, "computation", "3.0 times as long"),
    ],
)
def test_what_is_slower_is_named(seconds: float, exposed: float, part: str, words: str) -> None:
    said = told(seconds, exposed)
    assert said["part"] == part
    assert words in said["what"]
    assert ("Try: " in said["what"]) == bool(part)


class Step(dict[str, Any]):
    """An event that can be looked for."""


def test_what_comes_after_is_not_kept() -> None:
    """A run has steps without end."""
    check, steps = PredictionCheck(PREDICTED), []
    for step in range(3 * STEPS):
        event = Step(event="step", step=step + 1, seconds=1.0, exposed=0.0)
        check.event(event)
        steps.append(weakref.ref(event))
    del event
    assert sum(step() is not None for step in steps) == WARM + STEPS


def test_it_is_a_line_on_the_terminal_and_an_event(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path)
    with train.recording(folder, Recipe(model=Gpt()), False, PREDICTED) as emit:
        emit("run", steps=100, step=0)
        for step in range(1, 61):
            emit("step", step=step, seconds=3.2, exposed=3.1, loss=1.0)
    (event,) = [one for one in read(folder.events) if one["event"] == "prediction"]
    assert event["part"] == "exchanges"
    assert capsys.readouterr().out.count("espalier probe") == 1
