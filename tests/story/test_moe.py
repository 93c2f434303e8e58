"""The example of experts: planned as it stands, trained with its experts over two ranks, evaluated and exported."""

from __future__ import annotations

import json
from pathlib import Path

import programs
from safetensors.torch import load_file

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "moe.toml")


def done(folder: Path, *arguments: str) -> str:
    found = programs.forked(folder, *arguments)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_example_of_experts_runs_and_is_exported_whole(tmp_path: Path, tokens: Path) -> None:
    (tmp_path / "machine.toml").write_text(programs.MACHINE)
    programs.with_tokens(tmp_path, tokens)
    small = ["plan.cluster=machine.toml", "plan.trial=false", "train.steps=2", "train.batch_tokens=512"]
    small += ["model.depth=2", "model.width=32", "train.validate_tokens=512"]
    plan = json.loads(done(tmp_path, "plan", EXAMPLE, *small, "--json"))
    assert "expert_parallel" not in plan.get("choices", {})  # two ranks of one processor gain nothing
    spread = ["plan.pin.ranks=2", "plan.pin.ep=2", "comm.experts=int8"]
    done(tmp_path, "train", EXAMPLE, *small, *spread, "--run", "run")
    run = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert sorted(one for held in run["choices"]["expert_parallel"]["experts"] for one in held) == list(range(8))
    assert [one["codec"] for one in run["exchanges"] if one["traffic"] == "experts"] == ["int8"]
    done(tmp_path, "export", "run", "--to", "hf")
    weights = load_file(tmp_path / "run" / "export-hf" / "model.safetensors")
    names = {int(name.split(".")[5]) for name in weights if ".experts." in name}
    assert names == set(range(8))
