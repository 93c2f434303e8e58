"""Adapters beside frozen weights on an optimizer node: only the adapters are sent, and they train as without a node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import programs
import pytest

from espalier import recipe as config
from espalier.cli import export, plan, train  # noqa: F401
from espalier.language import gpt, hf
from espalier.language import workload_row as _language  # noqa: F401 - loaded once, before programs are forked
from espalier.language.tokenizer import ByteTokenizer
from espalier.recipe import defaults

RECIPE = """
[model]
initial = "base"

[tune]
kind = "lora"
rank = 4

[data]
path = "chats.jsonl"
validation = 0.2

[train]
steps = 4
sequence = 128
batch_tokens = 512
validate_tokens = 256
optimizer = { kind = "adamw" }

[plan]
trial = false
cluster = "machine.toml"

[plan.pin]
ranks = 1
offload = "node"
"""
DISK = 'disks = [{ path = "/", write = 1e9, read = 1e9, iops = 1e4 }]\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    size: dict[str, Any] = {"depth": 2, "width": 32, "heads": 4, "feed_forward": 48, "vocabulary": 256, "context": 512}
    options = defaults.resolve(config.Recipe(model=config.Gpt(**size)))[0].model
    assert isinstance(options, config.Gpt)
    model = gpt.GPT(options)
    gpt.initialise(model, 1)
    hf.export(model, ByteTokenizer(), tmp_path / "base")
    rows = [{"prompt": f"{one} + 1 = ?", "completion": f"It is {one + 1}."} for one in range(64)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "machine.toml").write_text(programs.MACHINE + DISK)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


def steps(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == "step"]


@pytest.mark.slow
def test_frozen_weights_send_no_byte_and_adapters_train_to_the_last_bit(home: Path) -> None:
    for name, where in (("node", "node"), ("plain", "none")):
        done = programs.forked(home, "train", "recipe.toml", f"plan.pin.offload={where}", "--run", name)
        assert done.returncode == 0, done.stderr
    found, expected = steps(home / "node"), steps(home / "plain")
    assert [one["loss"] for one in found] == [one["loss"] for one in expected]
    assert len(found) == 4
    columns = 2 * (4 * (32 + 32) + 3 * (32 + 48))  # of two layers: four matrices of attention, three of the rest
    adapters = 4 * 4 * columns
    assert [one["bytes"]["gradients"] for one in found] == [adapters] * 4
    # both layers stay in the window between forward and backward: each is pulled once
    assert [(one["node"]["pulled"], one["node"]["pushed"]) for one in found[1:]] == [(adapters, adapters)] * 3
    layers, *_ = json.loads((home / "node" / "optimizer" / "node-0" / "job.json").read_text())
    assert all(".lora_" in name for layer in layers for name, _ in layer["tensors"])
    done = programs.forked(home, "export", "node", "--to", "peft")
    assert done.returncode == 0, done.stderr


def test_pairs_of_answers_are_refused_on_a_node(home: Path) -> None:
    rows = [{"prompt": f"{one}?", "chosen": f"yes {one}", "rejected": f"no {one}"} for one in range(64)]
    (home / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    done = programs.forked(home, "train", "recipe.toml", "tune.kind=dpo")
    assert done.returncode == 2
    assert "GPT cannot be held in layers" in done.stderr
    assert "try: " in done.stderr
