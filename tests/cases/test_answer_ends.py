"""Answers of an exported model end where those of the run do, and its tokenizer splits as training did."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from weight_folders import TEMPLATES, TOKENIZERS, base_of, byte_level, made, quietly, theirs_of, workload_of

import llama_cpp
from espalier import recipe as config
from espalier.language import gguf_export, gguf_file, gpt, hf, workload_row
from espalier.language.auto_tokenizer import differences
from espalier.language.tokenizer import ByteTokenizer, open_tokenizer
from espalier.language.tune.workload import TuneWorkload
from espalier.train.workload_row import Sampling

__all__ = ["quietly"]

ENDS = {
    "llama2": "</s>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "chatml": "<|im_end|>",
    "qwen": "<|im_end|>",
}
MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>")
STATED = {"bos_token": "<s>", "eos_token": "</s>"}
ROW: Any = workload_row.ROW


@pytest.fixture(autouse=True)
def turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that has the marks of turns as tokens."""
    monkeypatch.setitem(TOKENIZERS, "turns", (lambda: byte_level("<s>", "</s>", *MARKS), STATED))


def one_way(model: gpt.GPT, tokens: list[int]) -> None:
    """Makes the model write each of `tokens` after the one before."""
    table, head = model.embedding.weight, model.head
    assert head is not None
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("attention.out.weight", "feed_forward.down.weight")):
                weight.zero_()
        table.copy_(torch.nn.functional.normalize(torch.randn(table.shape, generator=torch.Generator().manual_seed(0))))
        head.weight.zero_()
        for before, after in pairwise(tokens):
            head.weight[after] = table[before]


def written(workload: TuneWorkload, model: gpt.GPT, prompt: list[int]) -> tuple[str, int, str | None]:
    pieces = list(ROW.writer(workload, model).write([prompt], [Sampling(tokens=9)]))
    return "".join(piece.text for piece in pieces), sum(piece.tokens for piece in pieces), pieces[-1].finish


@pytest.mark.parametrize("last", ["of an answer", "of a text"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_transformers_predict_and_a_gguf_file_end_an_answer_at_the_same_tokens(
    template: str, last: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    base = base_of(tmp_path / "base", "turns", TEMPLATES[template], tied=False)
    words = open_tokenizer(str(base))
    ids = words.table()
    end = ids[ENDS[template] if last == "of an answer" else "</s>"]
    workload = workload_of(base, words, None, config.Full())
    model: Any = workload.build(torch.device("cpu"), torch.float32)
    prompt = workload.prompt([("user", "help")])
    one_way(model, [prompt[-1], ids["q"], ids["z"], end, ids["j"], ids["j"]])
    ROW.exports["hf"](workload, model, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    asked = torch.tensor([prompt])
    made = theirs.generate(asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=9)
    assert made[0, len(prompt) :].tolist() == [ids["q"], ids["z"], end]
    assert written(workload, model, prompt) == ("qz", 3, "stop")

    ROW.exports["gguf"](workload, model, tmp_path / "gguf")
    file = tmp_path / "gguf" / "model.gguf"
    fields = gguf_file.opened(file)[0]
    ends = {fields.get(gguf_file.SPECIAL[role]) for role in ("eos", "eot", "eom")} - {None}
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    listed = generation.pop("eos_token_id")
    assert ends == ({*listed} if isinstance(listed, list) else {listed}) == {ids[ENDS[template]], ids["</s>"]}
    assert {*open_tokenizer(str(hf.tokenizer_of(file))).ends()} == ends
    modelfile = (tmp_path / "gguf" / "Modelfile").read_text()
    assert all(f'PARAMETER stop "{name}"\n' in modelfile for name in (ENDS[template], "</s>"))
    before = json.loads((base / "generation_config.json").read_text())
    assert {**generation, "eos_token_id": before["eos_token_id"]} == before


def test_llama_cpp_ends_an_answer_at_the_same_tokens(tmp_path: Path) -> None:
    for template in TEMPLATES:
        base = base_of(tmp_path / template, "turns", TEMPLATES[template], tied=False)
        words = open_tokenizer(str(base))
        ids = words.table()
        workload = workload_of(base, words, None, config.Full())
        prompt = workload.prompt([("user", "help")])
        for end in (ids[ENDS[template]], ids["</s>"]):
            model = workload.build(torch.device("cpu"), torch.float32)
            one_way(model, [prompt[-1], ids["q"], ids["z"], end, ids["j"], ids["j"]])
            folder = tmp_path / f"{template}-{end}"
            ROW.exports["gguf"](workload, model, folder)
            assert llama_cpp.greedy(folder / "model.gguf", prompt, 9) == [ids["q"], ids["z"], end]


def test_a_generation_config_that_ends_answers_is_exported_byte_for_byte(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "turns", TEMPLATES["chatml"])
    words = open_tokenizer(str(base))
    given = json.dumps({"top_p": 0.9, "eos_token_id": [1, words.table()["<|im_end|>"]]}, indent=5)
    (base / "generation_config.json").write_text(given)
    workload = workload_of(base, open_tokenizer(str(base)), None, config.Full())
    ROW.exports["hf"](workload, workload.build(torch.device("cpu"), torch.float32), tmp_path / "hf")
    assert (tmp_path / "hf" / "generation_config.json").read_text() == given


def test_an_end_of_several_tokens_is_said_and_stands_in_the_modelfile(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "byte level", TEMPLATES["chatml"])
    workload = workload_of(base, open_tokenizer(str(base)), None, config.Full())
    model = workload.build(torch.device("cpu"), torch.float32)
    count = len(workload.endings[0])
    assert count > 1
    assert f"Answers end with '<|im_end|>', which is {count} tokens" in ROW.exports["hf"](
        workload, model, tmp_path / "o"
    )
    ROW.exports["gguf"](workload, model, tmp_path / "gguf")
    assert 'PARAMETER stop "<|im_end|>"\n' in (tmp_path / "gguf" / "Modelfile").read_text()


def test_a_base_of_bytes_keeps_its_own_template(tmp_path: Path) -> None:
    words = ByteTokenizer()
    hf.export(made(256), words, tmp_path / "plain")
    hf.export(made(256), words.with_template("{{ messages[0].content }}"), tmp_path / "chats")
    recipe = config.Recipe(model=config.Gpt(), data=(config.Data(path="chats.jsonl"),))
    named = {name: workload_row._initial_tokenizer(recipe, str(tmp_path / name), 256) for name in ("plain", "chats")}
    assert named == {"plain": "bytes", "chats": str(tmp_path / "chats" / "tokenizer.json")}
    template = open_tokenizer(named["chats"]).files.template
    assert template == "{{ messages[0].content }}"


def test_a_tokenizer_that_transformers_splits_otherwise_is_said(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for number, words in enumerate((ByteTokenizer(), ByteTokenizer().without_prefix())):
        assert not [*differences(words, saved(words, tmp_path / str(number)))]
    base = base_of(tmp_path / "base", "byte level", None)
    inner = byte_level("<s>", "</s>")
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), inner.pre_tokenizer])
    inner.save(str(base / "tokenizer.json"))
    for name, words in (
        ("PreTrainedTokenizerFast", ""),
        ("Qwen2Tokenizer", "makes it a Qwen2Tokenizer, which splits"),
        ("GemmaTokenizer", "does not load its tokenizer"),
    ):
        stated = json.loads((base / "tokenizer_config.json").read_text()) | {"tokenizer_class": name}
        (base / "tokenizer_config.json").write_text(json.dumps(stated))
        tokenizer = open_tokenizer(str(base))
        message = " ".join(differences(tokenizer, saved(tokenizer, tmp_path / name)))
        assert words in message
        assert bool(message) == bool(words)


def test_a_bos_that_transformers_puts_otherwise_is_said(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for kind, adds, words in (
        ("begun with bos", None, ""),
        ("begun with bos", False, "puts a token there"),
        ("byte level", True, "puts nothing there"),
    ):
        base = base_of(tmp_path / f"{kind} {adds}", kind, None)
        stated = json.loads((base / "tokenizer_config.json").read_text()) | {"add_bos_token": adds}
        (base / "tokenizer_config.json").write_text(json.dumps(stated))
        message = " ".join(differences(open_tokenizer(str(base)), base))
        assert words in message
        assert bool(message) == bool(words)


def saved(tokenizer: Any, folder: Path) -> Path:
    folder.mkdir()
    tokenizer.save(folder)
    return folder


def test_a_tokenizer_folder_says_bos_and_eos_of_a_model_trained_from_nothing(tmp_path: Path) -> None:
    folder = base_of(tmp_path / "base", "begun with bos", None)
    stated = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).unlink()
    words = open_tokenizer(str(folder))
    hf.export(made(words.vocabulary), words, tmp_path / "out")
    ids = {"bos_token_id": 0, "eos_token_id": 2}
    for name in ("config.json", "generation_config.json"):
        table = json.loads((tmp_path / "out" / name).read_text())
        assert {key: table[key] for key in ids} == ids
    gguf_export.export(made(words.vocabulary), words, None, tmp_path / "gguf", "F16")
    fields = gguf_file.opened(tmp_path / "gguf" / "model.gguf")[0]
    said = [fields[f"tokenizer.ggml.{name}"] for name in ("bos_token_id", "eos_token_id", "add_bos_token")]
    assert said == [0, 2, True]
    assert theirs_of(tmp_path / "out")("vines").input_ids == [0, *words.encode(b"vines").tolist()]
    assert words.document_end == (2,)
