"""Recorded runs: run folders of an earlier version open, report, evaluate and resume as that version did.

`recorded_runs.tar.xz` holds three runs of 8 steps, recorded by commit c1c60a9 (plans and hashes rewritten in the form
of today), and in `expected.json` what that commit made of them next: its evaluation, the steps 9 to 12 and the
evaluation after these. `residuals`: two ranks, gradients
as int8 with error feedback (recorded with SMALL = 0, so that a model this small is encoded); `rounds`: two replicas,
CO2, an exchange under way; `sampled`: a graph network on drawn neighbours.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from programs import MACHINE, forked

import espalier
from espalier.comm import compressed_collectives
from espalier.mechanisms.sharding.sharded_state_dict import Residuals

RUNS = ("residuals", "rounds", "sampled")
CLOSE = 1e-3
"""Of losses and norms: processors multiply matrices in different orders."""


@pytest.fixture(params=RUNS)
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a recorded run, with the texts that it read."""
    with tarfile.open(Path(__file__).parent / "recorded_runs.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / request.param
    (folder / "machine.toml").write_text(MACHINE)
    if request.param != "sampled":
        (folder / "corpus").mkdir()
        for number in range(6):
            text = f"The number {number} comes before {number + 1}.\n" * 40
            (folder / "corpus" / f"{number}.txt").write_text(text)
        data = folder / "run" / "data.json"
        table = json.loads(data.read_text())
        hashes = {str(folder / name): digest for name, digest in table["hashes"].items()}
        data.write_text(json.dumps({**table, "hashes": hashes}))
    return folder


def carried_out(folder: Path, *command: str) -> str:
    done = forked(folder, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def evaluated(folder: Path) -> dict[str, float]:
    return without_name(json.loads(carried_out(folder, "eval", "run", "--json")))


def without_name(figures: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in figures.items() if key != "run"}


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "step"]


def no_hand_over(self: Residuals, flat: object) -> None:
    raise AssertionError("residuals were summed up, as if they had been saved under another layout")


def test_a_recorded_run_goes_on_as_it_did(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_collectives, "SMALL", 0)
    monkeypatch.setattr(Residuals, "_hand_over", no_hand_over)
    expected = json.loads((recorded / "expected.json").read_text())

    assert evaluated(recorded) == pytest.approx(without_name(expected["eval_before"]), rel=CLOSE)
    carried_out(recorded, "train", "recipe.toml", "--run", "run", "train.steps=12", "plan.cluster=machine.toml")
    found = steps_of(recorded)
    assert [step["step"] for step in found] == list(range(1, 13))
    for step, known in zip(found, expected["steps"], strict=True):
        assert (step["tokens"], step["learning_rate"]) == (known["tokens"], pytest.approx(known["learning_rate"]))
        assert step["loss"] == pytest.approx(known["loss"], rel=CLOSE), step["step"]
        assert step["gradient_norm"] == pytest.approx(known["gradient_norm"], rel=10 * CLOSE), step["step"]
        assert step["bytes"].get("gradients") == known["bytes"].get("gradients")
    assert evaluated(recorded) == pytest.approx(without_name(expected["eval_after"]), rel=CLOSE)


def test_a_recorded_run_is_reported_and_opened(recorded: Path) -> None:
    expected = json.loads((recorded / "expected.json").read_text())
    carried_out(recorded, "report", "run")
    page = (recorded / "run" / "report.html").read_text()
    run = espalier.open(recorded / "run")
    assert list(run.steps["loss"]) == [step["loss"] for step in expected["steps"][:8]]
    assert ("1 rank" if recorded.name == "sampled" else "2 ranks") in page
    assert f"{expected['steps'][7]['loss']:.3f}"[:4] in page
