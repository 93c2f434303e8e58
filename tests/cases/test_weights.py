"""Special tokens, GGUF files and exports: what is in a folder is used, named or refused."""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
from pathlib import Path
from typing import Any

import programs
import pytest
import tokenizers
import torch
from gguf_files import PLAIN, TENSORS, gguf_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.readers.model_inputs import TOKENIZER
from weight_folders import CHAT, TEMPLATES, TOKENIZERS, base_of, begun, made, quietly, theirs_of, workload_of

from espalier import recipe as config
from espalier.checkpoint import weight_files
from espalier.cli import eval as _eval  # noqa: F401 - loaded once, before programs are forked
from espalier.cli import export, plan, predict  # noqa: F401
from espalier.cli import train as _train  # noqa: F401
from espalier.cli.open_run import SavedRun
from espalier.language import gguf_export, gguf_file, gpt, hf, token_store, workload_row
from espalier.language.decoder_workload import new_model
from espalier.language.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer, prefix_note
from espalier.language.tune import peft
from espalier.language.tune import workload as tuning
from espalier.language.tune.chat_template import open_template
from espalier.language.tune.conversations import Turn
from espalier.language.tune.workload import TuneWorkload
from espalier.machine import resource_limits
from espalier.recipe import serialization
from espalier.recipe.errors import UserError

__all__ = ["quietly"]


@pytest.mark.extremes
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_in_training_after_a_resume_in_predict_and_of_every_export_are_those_of_the_base(
    kind: str, template: str, tmp_path: Path
) -> None:
    base = base_of(tmp_path / "base", kind, TEMPLATES[template])
    theirs = theirs_of(base)
    wanted = theirs.apply_chat_template(CHAT)["input_ids"]
    asked = theirs.apply_chat_template(CHAT[:3], add_generation_prompt=True)["input_ids"]

    workload = workload_of(base, open_tokenizer(str(base)), None, config.Lora(rank=2))
    trained = workload.chats.held_out
    assert trained.tokens[: trained.starts[1]].tolist() == wanted
    (tmp_path / "kept").mkdir()
    workload.freeze(tmp_path / "kept")
    resumed = tuning.thaw(workload.recipe, tmp_path / "kept")
    again = workload_of(base, resumed.tokenizer, tmp_path / "kept", config.Lora(rank=2))
    assert again.fingerprint() == workload.fingerprint()
    assert again.chats.template.tokens == workload.chats.template.tokens
    evaluated = TuneWorkload(workload.recipe, resumed)
    turns = [(turn["role"], turn["content"]) for turn in CHAT[:3]]
    assert workload.prompt(turns) == evaluated.prompt(turns) == asked == wanted[: len(asked)]

    model = workload.build(torch.device("cpu"), torch.float32)
    assert isinstance(model, gpt.GPT)
    workload_row.ROW.exports["hf"](evaluated, model, tmp_path / "hf")
    peft.export(evaluated, model, tmp_path / "peft")
    for folder in (tmp_path / "hf", tmp_path / "peft"):
        exported = theirs_of(folder)
        assert exported.apply_chat_template(CHAT)["input_ids"] == wanted
        assert exported.special_tokens_map == theirs.special_tokens_map
        assert exported("the wall").input_ids == theirs("the wall").input_ids
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (base / name).read_bytes()
    given = (base / "generation_config.json").read_text()
    known = json.loads(given)["eos_token_id"]
    ends = [end[0] for end in workload.endings if len(end) == 1 and end[0] != known]
    exported = (tmp_path / "hf" / "generation_config.json").read_text()
    if ends:  # such as the unknown token, which an end of a turn is where a tokenizer lacks it
        assert json.loads(exported) == {**json.loads(given), "eos_token_id": [known, *ends]}
    else:
        assert exported == given
    ids = [json.loads((folder / "config.json").read_text()) for folder in (base, tmp_path / "hf")]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert ids[0][name] == ids[1][name]


@pytest.mark.extremes
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", ["byte level", "begun with bos", "without bos"])
def test_a_gguf_file_says_the_special_tokens_of_the_base(kind: str, template: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", kind, TEMPLATES[template])
    workload = workload_of(base, open_tokenizer(str(base)), None, config.Full())
    theirs = theirs_of(base)
    model = workload.build(torch.device("cpu"), torch.float32)
    said = workload_row._to_gguf("F16", workload, model, tmp_path / "out")
    fields = gguf_file.opened(tmp_path / "out" / "model.gguf")[0]
    assert fields.get("tokenizer.ggml.bos_token_id") == theirs.bos_token_id
    assert fields["tokenizer.ggml.eos_token_id"] == theirs.eos_token_id
    in_config = json.loads((base / "config.json").read_text())["pad_token_id"]
    pad = in_config if theirs.pad_token_id is None else theirs.pad_token_id  # as llama.cpp's converter
    assert fields["tokenizer.ggml.padding_token_id"] == pad
    assert fields["tokenizer.chat_template"] == TEMPLATES[template]
    chats_begin = "bos_token" in TEMPLATES[template]  # llama.cpp drops one of two, and adds one to a chat without
    assert fields["tokenizer.ggml.add_bos_token"] == (kind == "begun with bos" and chats_begin)
    assert ("puts '<s>' before" in said) == fields["tokenizer.ggml.add_bos_token"]
    again = open_tokenizer(str(hf.tokenizer_of(tmp_path / "out" / "model.gguf")))
    text = open_template(None, again).render([Turn(turn["role"], turn["content"]) for turn in CHAT])
    assert again.encode_marked([text])[0][0].tolist() == theirs.apply_chat_template(CHAT)["input_ids"]


# --- GGUF ------------------------------------------------------------------------------------------------------------


def model_of(folder: Path) -> gpt.GPT:
    """What every reader of weights does."""
    options = hf.options(folder)
    model = new_model(options, 0, torch.device("cpu"))
    hf.load_into(model, folder)
    hf.notes(folder)
    if (file := hf.tokenizer_of(folder)) is not None:
        words = open_tokenizer(str(file))
        open_template(None, words).render([Turn("user", "a")])
        words.encode_marked(["a text"])
    return model


def test_a_plain_gguf_file_of_the_builder_is_read(tmp_path: Path) -> None:
    assert model_of(gguf_of(tmp_path / "m.gguf", PLAIN, TENSORS)).size.feed_forward == 16


DEEP = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 20_000 + struct.pack("<IQ", 4, 0)
ODD: dict[str, tuple[Any, str]] = {
    "llama.attention.head_count": (0, "head_count = 0: Expected `int` >= 1"),
    "llama.embedding_length": ("eight", "embedding_length = eight: Expected `int`"),
    "llama.block_count": (2**31, "it has 1 layers"),
    "llama.feed_forward_length": (2**31 - 1, r"is \[16, 8\], and its config.json says"),
    "llama.attention.head_count_kv": ([1, 2], r"head_count_kv = \[1, 2\]"),
    "llama.attention.layer_norm_rms_epsilon": (float("nan"), "Expected `float` > 0"),
    "llama.context_length": (2**31, r"max_position_embeddings. does not fit into memory"),
    "llama.rope.scaling.type": (3, "Expected `str`"),
    "llama.rope.dimension_count": (2, "rope.dimension_count = 2"),
    "llama.logit_scale": (8.0, "logit_scale = 8.0"),
    "llama.attention.sliding_window": (16, "sliding_window = 16"),
    "tokenizer.ggml.tokens": (3, "Expected `"),
    "tokenizer.ggml.token_type": ([1, 1], "3 tokens and 2 types"),
    "tokenizer.ggml.bos_token_id": (10**9, "bos_token_id = 1000000000, and it has 3 tokens"),
    "tokenizer.ggml.eos_token_id": ("two", "Expected `int`"),
    "tokenizer.ggml.merges": ([1], "Expected `"),
    "tokenizer.ggml.model": (["gpt2"], "Expected `str`"),
    "tokenizer.chat_template": (7, "Expected `str`"),
    "general.architecture": (4, "holds a '4' model"),
    "general.alignment": (0, "general.alignment is 0"),
    "deep": (DEEP, "nested too deeply"),
    "long": (struct.pack("<IIQ", 9, 4, 2**62), "more than it can hold"),
    "long text": (struct.pack("<IQ", 8, 2**63), "more than it can hold"),
    "no type": (struct.pack("<I", 99), "it lacks 99"),
    "no text": (struct.pack("<IQ", 8, 1) + b"\xff", "is not UTF-8"),
}


@pytest.mark.parametrize("key", ODD)
def test_an_odd_field_of_a_gguf_file_is_one_sentence(key: str, tmp_path: Path) -> None:
    value, words = ODD[key]
    file = gguf_of(tmp_path / "m.gguf", {**PLAIN, key: value}, TENSORS)
    with pytest.raises(UserError, match=words):
        model_of(file)


@pytest.mark.parametrize("shape", [(3, 8, 0), (2**40, 2**40), (3, 9), (8, 3)])
def test_an_odd_shape_of_a_tensor_is_one_sentence(shape: tuple[int, ...], tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    gguf_of(file, PLAIN, TENSORS)
    content = file.read_bytes()
    old, new = (struct.pack(f"<I{len(one)}Q", len(one), *one[::-1]) for one in ((3, 8), shape))
    file.write_bytes(content.replace(old, new, 1))
    with pytest.raises(UserError):
        model_of(file)


def test_a_gguf_file_larger_than_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = gguf_of(tmp_path / "m.gguf", PLAIN, TENSORS)
    for name in ("free_memory", "memory"):
        monkeypatch.setattr(resource_limits, name, lambda: 1000)
    with pytest.raises(UserError, match="does not fit into memory"):
        hf.options(file)


def test_tensors_of_a_gguf_file_that_overlap_are_refused(tmp_path: Path) -> None:
    """Each of them alone lies in the file."""
    file = gguf_of(tmp_path / "m.gguf", PLAIN, TENSORS, overlapping=True)
    with pytest.raises(UserError, match="is cut off, or its tensors overlap"):
        model_of(file)


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small file of each kind, with all that is read together with it."""
    home = tmp_path_factory.mktemp("folders")
    model = made(256)
    hf.export(model, ByteTokenizer(), home / "hf")
    inner = begun()
    inner.save(str(home / "hf" / "tokenizer.json"))
    (home / "hf" / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": True}, "chat_template": "{{ 1 }}"})
    )
    gguf_export.export(model, ByteTokenizer().with_template("{{ 2 }}"), None, home / "gguf", "F16")
    return {
        "config.json": home / "hf",
        "tokenizer.json": home / "hf",
        "tokenizer_config.json": home / "hf",
        "generation_config.json": home / "hf",
        "model.safetensors": home / "hf",
        "model.gguf": home / "gguf",
    }


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
        "model.safetensors",
        "model.gguf",
    ],
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.floats(0, 0.999), st.binary(min_size=1, max_size=6)), min_size=1, max_size=3))
def test_no_damage_does_more_than_be_refused(
    name: str, changes: list[tuple[float, bytes]], folders: dict[str, Path]
) -> None:
    folder = folders[name]
    file = folder / name
    whole = file.read_bytes()
    head = min(len(whole), 6000)  # the part that says what the rest is
    content = bytearray(whole)
    for place, part in changes:
        start = int(place * head)
        content[start : start + len(part)] = part
    try:
        file.write_bytes(bytes(content))
        with contextlib.suppress(UserError):
            model_of(file if file.suffix == ".gguf" else folder)
    finally:
        file.write_bytes(whole)


def test_damaged_configs_are_refused_whatever_type_a_value_has(folders: dict[str, Path]) -> None:
    values = ([], {}, "x", -1, 0, float("nan"), None, True, 2**70, [[1]], "\ud800", 1.5, [None])
    for name in ("config.json", "tokenizer_config.json"):
        file = folders[name] / name
        whole = file.read_text()
        table = json.loads(whole)
        try:
            for number, key in enumerate(table):
                for value in (values[number % len(values)], values[(number + 5) % len(values)]):
                    file.write_text(json.dumps({**table, key: value}))
                    with contextlib.suppress(UserError):
                        model_of(folders[name])
        finally:
            file.write_text(whole)


# --- exports and runs ------------------------------------------------------------------------------------------------


def test_files_of_weights_are_the_same_bytes_whenever_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    metadata = {f"key {number} ä": str(number) for number in range(6)}
    contents = set()
    for _ in range(8):
        save_file({"a": torch.arange(6.0), "b": torch.ones(2, dtype=torch.bfloat16)}, file, metadata=metadata)
        serialization.sort_metadata(file)
        contents.add(file.read_bytes())
    assert len(contents) == 1
    assert load_file(file)["a"].tolist() == list(range(6))
    with weight_files.opened(file) as content:
        assert content.metadata() == metadata


def test_a_tokenizer_with_more_tokens_than_the_table_is_refused(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "byte level", None)
    inner = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json"))
    inner.add_tokens([f"<extra_{number}>" for number in range(40)])
    inner.save(str(base / "tokenizer.json"))
    count = inner.get_vocab_size()
    with pytest.raises(UserError, match=f"has {count} tokens, and the model's table has {count - 37}"):
        workload_of(base, open_tokenizer(str(base)), None, config.Full())


def test_documents_of_a_tokenizer_that_begins_texts_with_bos_end_with_eos(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "begun with bos", None)
    words = open_tokenizer(str(base))
    assert (words.boundary, words.document_end) == (0, (1,))
    assert words.byte_lengths[[0, 1]].tolist() == [0, 0]
    plain = open_tokenizer(str(base_of(tmp_path / "plain", "byte level", None)))
    assert (plain.boundary, plain.document_end) == (1, ())
    text = tmp_path / "texts"
    text.mkdir()
    for number in range(30):
        (text / f"{number}.txt").write_text(f"the wall {number}")
    store = token_store.build_all([config.Data(path=str(text), tokenizer=str(base), validation=0.2)])[0]
    ids = store.train.read(0, store.train.tokens).tolist()
    starts = [at for at, token in enumerate(ids) if token == 0]
    assert starts[0] == 0
    assert all(ids[at - 1] == 1 for at in starts[1:])
    assert ids[-1] == 1


RECIPE = """
[model]
initial = "base"
[tune]
kind = "full"
[data]
path = "chats.jsonl"
validation = 0.3
[train]
steps = 4
sequence = 64
batch_tokens = 128
validate_tokens = 64
schedule.kind = "constant"
[plan]
cluster = "machine.toml"
trial = false
pin.ranks = 1
pin.threads = 1
"""


def test_a_chat_run_with_bos_resumes_to_the_same_bits_and_says_which_checkpoint_it_reads(tmp_path: Path) -> None:
    base_of(tmp_path / "base", "begun with bos", TEMPLATES["llama2"])
    rows = [{"messages": [{**CHAT[0], "content": f"help {n}"}, CHAT[1]]} for n in range(12)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "machine.toml").write_text(programs.MACHINE)
    (tmp_path / "r.toml").write_text(RECIPE)

    def ran(*words: str) -> subprocess.CompletedProcess[str]:
        done = programs.forked(tmp_path, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    ran("train", "r.toml", "--run", "whole")
    for steps in (2, 4):
        ran("train", "r.toml", f"train.steps={steps}", "--run", "parts")
    whole, parts = (SavedRun.find(tmp_path / name).trained().model.state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())

    newest = max((tmp_path / "parts" / "checkpoints").iterdir())
    file = max(newest.iterdir(), key=lambda one: one.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    for words in (
        ["predict", "parts", "help 3", "--tokens", "2"],
        ["export", "parts", "--out", "out"],
        ["eval", "parts"],
    ):
        said = ran(*words)
        assert f"read the checkpoint of step 2: {newest.name} is newer, but cannot be used" in said.stderr
        told = json.loads(ran(*words, "--json").stdout)
        assert told["step"] == 2
        assert told["skipped"][0]["checkpoint"] == newest.name
        assert "checksum" in told["skipped"][0]["why"]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "base" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("kind", ["begun with bos", "byte level", "of bytes"])
def test_what_an_exported_tokenizer_puts_before_a_text_can_be_left_out(kind: str, tmp_path: Path) -> None:
    tokenizer: Tokenizer = ByteTokenizer()
    if kind != "of bytes":
        tokenizer = open_tokenizer(str(base_of(tmp_path / "base", kind, TEMPLATES["llama3"])))
    for name, exported in (("as it is", tokenizer), ("without", tokenizer.without_prefix())):
        (tmp_path / name).mkdir()
        exported.save(tmp_path / name)
    ids = {name: theirs_of(tmp_path / name)("vines").input_ids for name in ("as it is", "without")}
    assert ids["without"] == tokenizer.encode(b"vines").tolist()
    prefix = [tokenizer.boundary] if tokenizer.adds_boundary else []
    assert ids["as it is"][: len(prefix)] == prefix
    assert "puts nothing before a text" in prefix_note(tokenizer.without_prefix())
    assert not tokenizer.without_prefix().with_template(TEMPLATES["llama3"]).adds_boundary


# --- tokenizers whose library panics ---------------------------------------------------------------------------------

HOSTILE: dict[str, dict[str, Any]] = {
    "no map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8AAAAA"}},
    "no such token": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "q", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
    "stripped too far": {"decoder": {"type": "Strip", "content": "a", "start": 10**12, "stop": 10**12}},
    "pieces of nothing": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "nothing replaced": {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    "far id": {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}},
    "no pattern": {"normalizer": {"type": "Replace", "pattern": {"Regex": "(("}, "content": "x"}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_on_which_its_library_panics_is_one_sentence(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER | HOSTILE[name]))
    with pytest.raises(UserError, match=r"data\.tokenizer = ") as refusal:
        open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert refusal.value.why
    assert refusal.value.do
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; os.abort()", "exit code -6"),
        ("while True: pass", "longer than"),
        ("raise ValueError('a: b')", "a: b"),
    ],
)
def test_a_library_that_aborts_or_never_ends_does_so_in_another_process(
    program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.language.tokenizer._TRIAL", program)
    monkeypatch.setattr("espalier.language.tokenizer._TRIAL_SECONDS", 1 if "while" in program else 60)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    with pytest.raises(UserError, match=f"tokenizer.json(.|\n)*{reason}"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))
    monkeypatch.undo()
    assert open_tokenizer(str(tmp_path / "tokenizer.json")).vocabulary == 7
