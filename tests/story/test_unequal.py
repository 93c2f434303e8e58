"""The example of unequal devices as it stands, on any cores; what is left out is said while it trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from espalier.plan import base as plans

ROOT = Path(__file__).parents[2]


def trained(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "espalier", "train", "examples/unequal.toml", "--run", str(folder), *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170, check=False)


@pytest.mark.slow
def test_the_example_trains_as_it_stands_and_goes_on_under_equal_pipelines(tmp_path: Path) -> None:
    done = trained(tmp_path / "run", "train.steps=2", "train.validate_tokens=2048")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Devices differ, so layers and samples go by speed" in done.stdout
    plan = plans.read(tmp_path / "run" / "plan.json")
    assert plan.planner == "flashflex"
    again = trained(tmp_path / "run", "train.steps=3", "train.validate_tokens=2048", "plan.pin.pipelines=equal")
    assert again.returncode == 0, again.stdout + again.stderr
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [event["step"] for event in map(json.loads, lines) if event["event"] == "step"] == [1, 2, 3]


@pytest.mark.slow
def test_what_is_left_out_is_said_while_it_trains(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "unequal-cluster.toml").read_text()
    (tmp_path / "cluster.toml").write_text(text.replace("fp32 = 15e9", "fp32 = 1e8"))
    done = trained(
        tmp_path / "run", "train.steps=1", "train.validate_tokens=2048", f"plan.cluster={tmp_path / 'cluster.toml'}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "old laptop core is left out: with it a step takes" in done.stdout
