"""Fine-tuning from the command line: chats in, a chat, adapters and a GGUF file out, on another machine too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from programs import MACHINE, forked

import espalier
from espalier import recipe as config
from espalier.cli import eval as _eval  # noqa: F401
from espalier.cli import export, open_run, plan, predict, train  # noqa: F401
from espalier.language import gpt, hf
from espalier.language import workload_row as _language  # noqa: F401 - loaded once, before programs are forked
from espalier.language.tokenizer import ByteTokenizer
from espalier.recipe import defaults

RECIPE = """
[model]
initial = "base"
[tune]
kind = "{kind}"
{more}
[data]
path = "{data}"
validation = 0.2
[train]
steps = {steps}
sequence = 128
batch_tokens = 512
validate_tokens = 256
[checkpoint]
every = 2
[plan]
trial = false
cluster = "machine.toml"
[plan.pin]
ranks = {ranks}
"""


def recipe(home: Path, name: str, kind: str, more: str = "", steps: int = 4, ranks: int = 1) -> None:
    data = "pairs.jsonl" if kind == "dpo" else "chats.jsonl"
    text = RECIPE.format(kind=kind, more=more, data=data, steps=steps, ranks=ranks)
    (home / f"{name}.toml").write_text(text)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("tune")
    size = {"depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "feed_forward": 48, "vocabulary": 256, "context": 128}
    options = defaults.resolve(config.Recipe(model=config.Gpt(**size)))[0].model  # type: ignore[arg-type]
    model = gpt.GPT(options)  # type: ignore[arg-type]
    gpt.initialise(model, 1)
    hf.export(model, ByteTokenizer(), home / "base")
    chats = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]} for n in range(30)
    ]
    (home / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)) + '\n{"messages": []}\n')
    pairs = [{"prompt": f"{n}?", "chosen": "yes", "rejected": f"no {n % 4}"} for n in range(30)]
    (home / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (home / "machine.toml").write_text(MACHINE)
    return home


def ran(folder: Path, *words: str, typed: str = "") -> str:
    done = forked(folder, *words, typed=typed)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def state(run: Path) -> dict[str, torch.Tensor]:
    return espalier.open(run).model().state_dict()


SLOW = pytest.mark.slow
CONSTANT = "train.schedule.kind=constant"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("lora", "rank = 2"),
        ("lora", 'rank = 2\nfrozen = "bf16"\ntargets = ["query", "value"]'),
        pytest.param("full", "", marks=SLOW),
        pytest.param("dpo", "rank = 2", marks=SLOW),
        pytest.param("dpo", "rank = 0", marks=SLOW),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_bits_and_works_elsewhere(
    home: Path, tmp_path: Path, kind: str, more: str
) -> None:
    shutil.rmtree(home / "runs" / kind, ignore_errors=True)
    recipe(home, kind, kind, more)
    said = ran(home, "train", f"{kind}.toml", CONSTANT)
    assert ("1 conversations are left out" in said) == (kind != "dpo")
    assert "⟦yes<|im_end|>⟧" in said
    for steps in (2, 4):
        ran(home, "train", f"{kind}.toml", f"train.steps={steps}", CONSTANT, "--run", "runs/parts")
    whole, parts = state(home / "runs" / kind), state(home / "runs" / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(value, parts[key]) for key, value in whole.items())
    shutil.rmtree(home / "runs" / "parts")

    shutil.copytree(home / "runs" / kind, tmp_path / "model")
    if kind == "lora":
        data = (home / "chats.jsonl").read_text()
        (home / "chats.jsonl").write_text(data.replace("29?", "thirty?"))
        done = forked(home, "train", "lora.toml", CONSTANT, "train.steps=6")
        assert done.returncode == 2
        assert "chats.jsonl has changed since" in done.stderr
        (home / "chats.jsonl").write_text(data)
    here = json.loads(ran(home, "predict", f"runs/{kind}", "3?", "--tokens", "8", "--json"))
    (home / "base").rename(home / "away")
    try:
        there = json.loads(ran(tmp_path, "predict", "model", "3?", "--tokens", "8", "--json"))
        assert there == here
        elsewhere = state(tmp_path / "model")
        assert all(torch.equal(value, elsewhere[key]) for key, value in whole.items())
        lines = ran(
            tmp_path, "predict", "model", "--chat", "--json", "--tokens", "4", typed="3?\n4?\n\n3?\n"
        ).splitlines()
        answers = [json.loads(line) for line in lines]
        assert [one["question"] for one in answers] == ["3?", "4?", "3?"]
        assert answers[0]["text"] == answers[2]["text"]
        ran(tmp_path, "export", "model", "--to", "hf")
        ran(tmp_path, "eval", "model", "--json")
    finally:
        (home / "away").rename(home / "base")
    exported = hf.load(tmp_path / "model" / "export-hf", torch.float32)[1]
    assert set(exported) == set(hf.load(home / "base", torch.float32)[1])
    assert (tmp_path / "model" / "export-hf" / "chat_template.jinja").read_text().startswith("{% for message")


def test_frozen_weights_are_neither_sent_nor_saved(home: Path) -> None:
    recipe(home, "two", "lora", "rank = 2", steps=2, ranks=2)
    ran(home, "train", "two.toml")
    adapters = sum(value.numel() for value in state(home / "runs" / "two").values())
    events = [json.loads(line) for line in (home / "runs" / "two" / "events.jsonl").read_text().splitlines()]
    sent = [event["bytes"]["gradients"] for event in events if event["event"] == "step"]
    assert sent
    assert all(4 * adapters <= one < 4 * adapters * 1.1 + 4096 for one in sent), (adapters, sent)
    newest = max((home / "runs" / "two" / "checkpoints").iterdir())
    names = dcp.FileSystemReader(newest).read_metadata().state_dict_metadata
    assert any("lora_a" in name for name in names)
    frozen = {f"model/{name}" for name in gpt.GPT(hf.options(home / "base")).state_dict()}  # type: ignore[arg-type]
    assert not frozen & set(names)
    recipe(home, "one", "lora", "rank = 2", steps=2)
    ran(home, "train", "one.toml")
    alone, both = state(home / "runs" / "one"), state(home / "runs" / "two")
    for key, value in alone.items():
        torch.testing.assert_close(both[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_states_of_adapters_are_divided_over_ranks_and_a_run_goes_on_from_adapters(home: Path) -> None:
    recipe(home, "whole", "lora", "rank = 2", steps=2, ranks=2)
    recipe(home, "shares", "lora", "rank = 2", steps=2, ranks=2)
    shards = ("plan.pin.shard.params=1", "plan.pin.shard.grads=2", "plan.pin.shard.optimizer=2")
    ran(home, "train", "whole.toml")
    ran(home, "train", "shares.toml", *shards)
    whole, shares = (state(home / "runs" / name) for name in ("whole", "shares"))
    for key, value in whole.items():
        torch.testing.assert_close(shares[key], value, rtol=1e-5, atol=1e-7)
    ran(home, "export", "runs/whole", "--to", "peft", "--out", "adapters")
    recipe(home, "more", "lora", 'adapter = "adapters"', steps=1)
    ran(home, "train", "more.toml", "train.optimizer.learning_rate=1e-12")
    shutil.rmtree(home / "adapters")
    for key, value in state(home / "runs" / "more").items():
        torch.testing.assert_close(value, whole[key], rtol=0, atol=1e-9)
    ran(home, "export", "runs/more", "--merge", "--out", "merged")
    plain = gpt.GPT(hf.options(home / "merged"))  # type: ignore[arg-type]
    hf.load_into(plain, home / "merged")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens), espalier.open(home / "runs" / "more").model()(tokens))
    done = forked(home, "export", "runs/more", "--merge", "--to", "peft")
    assert done.returncode == 2
    assert "writes adapters alone" in done.stderr
    done = forked(home, "train", "more.toml", "--run", "runs/other")
    assert done.returncode == 2
    assert "holds no adapters" in done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["gguf", "gguf-q8_0", "peft"])
def test_a_run_is_exported_for_other_programs(home: Path, form: str) -> None:
    recipe(home, "small", "lora", "rank = 2", steps=1)
    ran(home, "train", "small.toml")
    said = ran(home, "export", "runs/small", "--to", form)
    assert "checked by reloading" in said
    folder = home / "runs" / "small" / f"export-{form}"
    assert (folder / ("adapter_model.safetensors" if form == "peft" else "model.gguf")).is_file()
    if form == "peft":
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(home / "base")
    assert "Answers end with '<|im_end|>', which is 10 tokens" in said
    tokenizer = espalier.open(home / "runs" / "small").tokenizer()
    assert tokenizer.encode(b"what").tolist() == [*b"what"]


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        ("lora", "rank = 0", "tune.rank = 0"),
        ("lora", "rank = 64", "more than model.width"),
        ("lora", 'dora = true\nfrozen = "int8"', "tune.dora is not possible"),
        ("dpo", "beta = 0", "tune.beta = 0"),
        ("full", 'template = "none.jinja"', "tune.template"),
        ("lora", 'targets = ["head"]', "targets"),
    ],
)
def test_a_mistake_is_named_before_anything_is_trained(home: Path, kind: str, more: str, words: str) -> None:
    recipe(home, "mistake", kind, more)
    done = forked(home, "train", "mistake.toml")
    assert done.returncode == 2
    assert words in done.stderr
    assert not (home / "runs" / "mistake").exists()


def test_adapters_without_a_model_and_text_without_turns_are_refused(home: Path) -> None:
    recipe(home, "alone", "lora")
    done = forked(home, "train", "alone.toml", "model.initial=nowhere")
    assert done.returncode == 2
    (home / "plain.toml").write_text('[model]\nkind = "gpt"\n[tune]\nkind = "lora"\n[data]\npath = "chats.jsonl"\n')
    done = forked(home, "train", "plain.toml")
    assert done.returncode == 2
    assert "no model to start from" in done.stderr
