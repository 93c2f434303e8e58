"""The examples of fine-tuning, one after the other, as their comments say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from programs import MACHINE, forked

from espalier import recipe as config
from espalier.cli import export, plan, predict, train  # noqa: F401
from espalier.cli.open_run import SavedRun
from espalier.language import gguf_file, hf, text_sources
from espalier.language import workload_row as _language  # noqa: F401 - loaded once, before programs are forked
from espalier.language.decoder_workload import new_model
from espalier.language.tokenizer import ByteTokenizer
from espalier.language.tune.workload import TuneWorkload
from espalier.recipe import defaults

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


def test_a_folder_of_chats_becomes_a_file_for_ollama_by_two_commands(tmp_path: Path) -> None:
    """The stranger's: files of two formats, weights of somebody, no recipe of their own."""
    size = {"depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "feed_forward": 64, "vocabulary": 256, "context": 512}
    options = defaults.resolve(config.Recipe(model=config.Gpt(**size)))[0].model  # type: ignore[arg-type]
    assert isinstance(options, config.Gpt)
    hf.export(new_model(options, 1, torch.device("cpu")), ByteTokenizer(), tmp_path / "weights")
    (tmp_path / "machine.toml").write_text(MACHINE)
    chats = tmp_path / "chats"
    chats.mkdir()
    for part in range(2):
        roles = ("human", "gpt") if part else ("user", "assistant")
        keys = ("conversations", "from", "value") if part else ("messages", "role", "content")
        rows = [
            {
                keys[0]: [
                    {keys[1]: who, keys[2]: f"{text} {n}"}
                    for who, text in zip(roles, ("what is", "it is"), strict=True)
                ]
            }
            for n in range(20 * part, 20 * part + 20)
        ]
        (chats / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ("model.initial=weights", "data.path=chats", "--run", "runs/mine")
    ran(tmp_path, "train", str(EXAMPLES / "chat.toml"), *given, *SHORT, "plan.cluster=machine.toml", "plan.pin.ranks=1")
    said = ran(tmp_path, "export", "runs/mine", "--to", "gguf", "--out", "ollama")
    assert "ollama create" in said
    file = tmp_path / "ollama" / "model.gguf"
    assert (tmp_path / "ollama" / "Modelfile").read_text().startswith("FROM ./model.gguf\n")

    trained = SavedRun.find(tmp_path / "runs" / "mine").trained()
    assert isinstance(trained.workload, TuneWorkload)
    theirs = new_model(hf.options(file), 0, torch.device("cpu")).eval()
    hf.load_into(theirs, file)
    asked = trained.workload.prompt([("user", "what is 3")])
    with torch.no_grad():
        ours, read = (model(torch.tensor([asked])) for model in (trained.model.eval(), theirs))
    torch.testing.assert_close(read, ours, rtol=1e-2, atol=1e-2)  # matrices are rounded to F16
    template = gguf_file.opened(file)[0]["tokenizer.chat_template"]
    assert template == trained.workload.chats.template.text


@pytest.mark.slow
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
