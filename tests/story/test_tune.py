"""The examples of fine-tuning, one after the other, as their comments say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import MACHINE, forked

from espalier.language import text_sources
from espalier.language import workload_row as _language  # noqa: F401 - loaded once, before programs are forked
from espalier.verbs import export, load_run, plan, predict, train  # noqa: F401

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = (
    "train.steps=2",
    "train.sequence=256",
    "train.batch_tokens=1024",
    "train.validate_tokens=512",
    "plan.trial=false",
)


def ran(folder: Path, *words: str) -> str:
    done = forked(folder, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_chat_model_is_tuned_by_adapters_and_preferences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = text_sources.Listing("stdlib", text_sources._stdlib().entries[:40])
    monkeypatch.setattr(text_sources, "_stdlib", lambda: few)  # reading all of it takes ten seconds
    (tmp_path / "machine.toml").write_text(MACHINE)
    more = (*SHORT, "plan.cluster=machine.toml", "plan.pin.ranks=1")
    said = ran(tmp_path, "train", str(EXAMPLES / "chat.toml"), *more, "model.width=32", "model.depth=1")
    assert "espalier predict runs/chat --chat" in said
    assert "Write the docstring of this Python function." in said
    ran(tmp_path, "export", "runs/chat")
    for name in ("lora", "dpo"):
        ran(tmp_path, "train", str(EXAMPLES / f"{name}.toml"), *more)
    ran(tmp_path, "export", "runs/lora", "--to", "peft")
    answer = json.loads(ran(tmp_path, "predict", "runs/dpo", "def f(x):", "--tokens", "8", "--json"))
    assert answer["prompt"] == "def f(x):"
