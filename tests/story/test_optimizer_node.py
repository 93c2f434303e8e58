"""The example whose model is on an optimizer node: trained by one command, taken up again, and used."""

from __future__ import annotations

import json
from pathlib import Path

import programs
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
DISK = 'disks = [{ path = "/", write = 1e9, read = 1e9, iops = 1e4 }]\n'
SMALL = [
    "train.batch_tokens=1024",
    "train.sequence=128",
    "train.validate_tokens=1024",
    "model.depth=2",
    "model.width=64",
    "plan.cluster=machine.toml",
    "track.sample=def",
]


def losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return {event["step"]: event["loss"] for event in lines if event["event"] == "step"}


def test_one_command_trains_on_a_node_and_goes_on_where_it_stood(tmp_path: Path) -> None:
    recipe = str(EXAMPLES / "luwu.toml")
    data = f"data.path={EXAMPLES.parent / 'src' / 'espalier' / 'shard' / 'luwu'}"
    (tmp_path / "machine.toml").write_text(programs.MACHINE + DISK)
    more = [*SMALL, data]
    for name, steps, kind in (("node", 3, ""), ("node", 6, ""), ("plain", 6, "none")):
        pinned = [f"plan.pin.offload={kind}"] if kind else []
        ended = programs.forked(tmp_path, "train", recipe, *more, *pinned, f"train.steps={steps}", "--run", name)
        assert ended.returncode == 0, ended.stderr
    plan = json.loads((tmp_path / "node" / "plan.json").read_text())
    assert [one["role"] for one in plan["ranks"]] == ["trainer", "trainer", "optimizer"]
    found, expected = losses(tmp_path / "node"), losses(tmp_path / "plain")
    assert sorted(found) == list(range(1, 7))
    assert [found[step] for step in range(1, 4)] == pytest.approx([expected[step] for step in range(1, 4)], rel=1e-5)
    assert (tmp_path / "node" / "logs" / "optimizer-2.log").exists()
    ended = programs.forked(tmp_path, "export", "node", "--to", "hf")
    assert ended.returncode == 0, ended.stderr
    assert "after step 6" in ended.stdout
