"""The examples whose model is cut over ranks: planned, trained, taken up again under another cut, and used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import programs
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "long": ["train.steps=3", "train.sequence=512", "train.batch_tokens=2048", "train.validate_tokens=4096"],
    "pipeline": [
        "train.steps=3",
        "train.batch_tokens=1024",
        "train.validate_tokens=1024",
        "model.width=64",
        "plan.pin.interleave=2",
    ],
}
COMMON = [
    f"data.path={EXAMPLES.parent / 'src' / 'espalier' / 'mechanisms' / 'sharding'}",
    "plan.cluster=machine.toml",
    "plan.trial=false",
    "train.optimizer.kind=adamw",
]
OTHERWISE = {
    "long": ["plan.pin.hp=1", "plan.pin.cp=4", "plan.pin.window=2"],
    "pipeline": ["plan.pin.schedule=zero_bubble"],
}


def losses(run: Path) -> list[float]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event["loss"] for event in map(json.loads, lines) if event["event"] == "step"]


def planned(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "plan.json").read_text())
    return found


@pytest.mark.parametrize("name", ["long", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_an_example_trains_as_one_rank_does_and_however_else_it_is_cut(name: str, tmp_path: Path) -> None:
    recipe, small = str(EXAMPLES / f"{name}.toml"), [*SMALL[name], *COMMON]
    (tmp_path / "machine.toml").write_text(programs.MACHINE)
    alone = [
        "plan.pin.ranks=1",
        "plan.pin.threads=1",
        "plan.pin.hp=1",
        "plan.pin.cp=1",
        "plan.pin.pp=1",
        "plan.pin.interleave=1",
    ]
    said: dict[str, str] = {}
    for run, more in (("cut", []), ("otherwise", OTHERWISE[name]), ("alone", alone)):
        ended = programs.forked(tmp_path, "train", recipe, *small, *more, "--run", run)
        assert ended.returncode == 0, ended.stderr
        said[run] = ended.stdout
    assert len(planned(tmp_path / "cut")["ranks"]) == {"long": 4, "pipeline": 2}[name]
    assert {"long": "heads 2, context 2", "pipeline": "pp 2"}[name] in said["cut"]
    for run in ("cut", "otherwise"):
        assert losses(tmp_path / run) == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    for verb in (["predict", "cut", "def ", "--tokens", "9"], ["export", "cut", "--to", "hf"]):
        ended = programs.forked(tmp_path, *verb)
        assert ended.returncode == 0, ended.stderr
