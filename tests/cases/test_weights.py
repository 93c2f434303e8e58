"""Special tokens, weights and adapters of other programs: what is in a folder is used, named or refused."""

from __future__ import annotations

import contextlib
import filecmp
import json
import struct
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from espalier import config, weight_files
from espalier.config import defaults
from espalier.errors import UserError
from espalier.language import gguf_export, gguf_file, gpt, hf, token_store, workload_row
from espalier.language.decoder_workload import new_model
from espalier.language.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from espalier.language.tune import lora, peft
from espalier.language.tune import workload as tuning
from espalier.language.tune.chat_template import open_template
from espalier.language.tune.conversations import Turn
from espalier.language.tune.workload import TuneWorkload
from espalier.verbs import eval as _eval  # noqa: F401 - loaded once, before programs are forked
from espalier.verbs import export, load_run, plan, predict  # noqa: F401
from espalier.verbs import train as _train  # noqa: F401

TEMPLATES = {
    "llama2": (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token }}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'] + ' ' }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{% for m in messages %}{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}{{ '<|start_header_id|>' + m['role']"
        " + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else "
        "m['role']) + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "qwen": (
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}
WORDS = ["the vines climb the wall user assistant system what is that , help me you are helpful INST model"] * 4
QUIET: dict[str, Any] = {"show_progress": False}


def byte_level(*special: str) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=300, special_tokens=[*special], initial_alphabet=alphabet, **QUIET)
    )
    return inner


def sentencepiece() -> tokenizers.Tokenizer:
    bytes_of = [f"<0x{number:02X}>" for number in range(256)]
    table = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *bytes_of, *"▁helpmthwauvins"])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=table, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return inner


def unigram() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.Unigram())
    inner.normalizer, inner.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    special = ["<unk>", "<pad>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>", **QUIET)
    inner.train_from_iterator(WORDS, trainer)
    return inner


def word_pieces() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    inner.train_from_iterator(WORDS, trainers.WordPieceTrainer(vocab_size=90, special_tokens=special, **QUIET))
    inner.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return inner


def begun() -> tokenizers.Tokenizer:
    inner = byte_level("<s>", "</s>", "<pad>")
    inner.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", special_tokens=[("<s>", 0)]),
        ]
    )
    return inner


TOKENIZERS: dict[str, tuple[Callable[[], tokenizers.Tokenizer], dict[str, Any]]] = {
    "byte level": (lambda: byte_level("<s>", "</s>"), {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}),
    "sentencepiece": (
        sentencepiece,
        {
            "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "special": True},
            "eos_token": "</s>",
            "unk_token": "<unk>",
        },
    ),
    "unigram": (unigram, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}),
    "word pieces": (word_pieces, {"bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "[UNK]"}),
    "begun with bos": (begun, {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<pad>"]}),
    "without bos": (lambda: byte_level("<|endoftext|>"), {"bos_token": None, "eos_token": "<|endoftext|>"}),
}
CHAT = [
    {"role": "user", "content": "help me"},
    {"role": "assistant", "content": "the wall"},
    {"role": "user", "content": "what is that"},
    {"role": "assistant", "content": "vines"},
]


@pytest.fixture(autouse=True)
def quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


def base_of(folder: Path, kind: str, template: str | None) -> Path:
    """A model of one layer with a tokenizer of somebody else."""
    make, stated = TOKENIZERS[kind]
    inner = make()
    model = made(inner.get_vocab_size() + 3)
    hf.export(model, Nothing(), folder)
    inner.save(str(folder / "tokenizer.json"))
    table = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 77, **stated}
    table |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(table, indent=3))
    ids = {f"{role}_id": inner.token_to_id(text_of(stated.get(role))) for role in ("bos_token", "eos_token")}
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, **ids, "pad_token_id": 3}))
    (folder / "generation_config.json").write_text(json.dumps({**ids, "temperature": 0.6, "do_sample": True}, indent=3))
    return folder


def text_of(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


class Nothing:
    """A tokenizer of no files."""

    def save(self, folder: Path) -> None:
        """Writes none."""


def made(vocabulary: int = 64, seed: int = 1, **changes: Any) -> gpt.GPT:
    size = {"depth": 1, "width": 32, "heads": 2, "kv_heads": 1, "feed_forward": 32, "context": 512, **changes}
    options = defaults.resolve(config.Recipe(model=config.Gpt(**size, vocabulary=vocabulary)))[0].model
    assert isinstance(options, config.Gpt)
    return new_model(options, seed, torch.device("cpu"))


def workload_of(base: Path, tokenizer: Tokenizer, kept: Path | None, tune: config.Tuning) -> TuneWorkload:
    data = base.parent / "chats.jsonl"
    if not data.exists():
        data.write_text("".join(json.dumps({"messages": CHAT, "n": number}) + "\n" for number in range(4)))
    train = config.Train(sequence=300, batch_tokens=600, steps=1, validate_tokens=64)
    model = hf.options(base)
    recipe = config.Recipe(
        model=config.Gpt(**{name: getattr(model, name) for name in model.__struct_fields__} | {"initial": str(base)}),
        data=(config.Data(path=str(data), tokenizer=str(base), validation=0.5),),
        tune=tune,
        train=train,
    )
    recipe = defaults.resolve(recipe)[0]
    return TuneWorkload(recipe, tuning.chats_of(recipe, tuning.read(recipe, tokenizer, kept, None)))


def theirs_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


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
    tuning.freeze(workload, tmp_path / "kept")
    resumed = tuning.thaw(workload.recipe, tmp_path / "kept")
    again = workload_of(base, resumed.tokenizer, tmp_path / "kept", config.Lora(rank=2))
    assert again.fingerprint() == workload.fingerprint()
    assert again.chats.template.tokens == workload.chats.template.tokens
    evaluated = TuneWorkload(workload.recipe, resumed)
    turns = [(turn["role"], turn["content"]) for turn in CHAT[:3]]
    assert workload.prompt(turns) == evaluated.prompt(turns) == asked == wanted[: len(asked)]

    model = workload.build(torch.device("cpu"), torch.float32)
    assert isinstance(model, gpt.GPT)
    tuning.export(evaluated, model, tmp_path / "hf")
    peft.export(evaluated, model, tmp_path / "peft")
    for folder in (tmp_path / "hf", tmp_path / "peft"):
        exported = theirs_of(folder)
        assert exported.apply_chat_template(CHAT)["input_ids"] == wanted
        assert exported.special_tokens_map == theirs.special_tokens_map
        assert exported("the wall").input_ids == theirs("the wall").input_ids
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (base / name).read_bytes()
    ids = [json.loads((folder / "config.json").read_text()) for folder in (base, tmp_path / "hf")]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert ids[0][name] == ids[1][name]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", ["byte level", "begun with bos", "without bos"])
def test_a_gguf_file_says_the_special_tokens_of_the_base(kind: str, template: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    base = base_of(tmp_path / "base", kind, TEMPLATES[template])
    workload = workload_of(base, open_tokenizer(str(base)), None, config.Full())
    theirs = theirs_of(base)
    model = workload.build(torch.device("cpu"), torch.float32)
    said = workload_row._to_gguf("F16", workload, model, tmp_path / "out")
    fields = gguf_file.opened(tmp_path / "out" / "model.gguf")[0]
    assert fields.get("tokenizer.ggml.bos_token_id") == theirs.bos_token_id
    assert fields["tokenizer.ggml.eos_token_id"] == theirs.eos_token_id
    assert fields.get("tokenizer.ggml.padding_token_id") == theirs.pad_token_id
    assert fields["tokenizer.chat_template"] == TEMPLATES[template]
    chats_begin = "bos_token" in TEMPLATES[template]  # llama.cpp drops one of two, and adds one to a chat without
    assert fields["tokenizer.ggml.add_bos_token"] == (kind == "begun with bos" and chats_begin)
    assert ("puts '<s>' before" in said) == fields["tokenizer.ggml.add_bos_token"]
    again = open_tokenizer(str(hf.tokenizer_of(tmp_path / "out" / "model.gguf")))
    text = open_template(None, again).render([Turn(turn["role"], turn["content"]) for turn in CHAT])
    assert again.encode_marked([text])[0][0].tolist() == theirs.apply_chat_template(CHAT)["input_ids"]


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with a table and a head."""
    folder = tmp_path_factory.mktemp("llama") / "base"
    hf.export(made(depth=2, tied=False), Nothing(), folder)
    return folder


def adapters_of(base: Path, folder: Path, **options: Any) -> Any:
    """Adapters that PEFT makes and saves, with values everywhere."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(whole, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **options)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return model


def read_adapters(base: Path, folder: Path) -> gpt.GPT:
    """Our model with them."""
    model = new_model(hf.options(base), 0, torch.device("cpu"))
    hf.load_into(model, base)
    adapted = lora.adapt(model, peft.with_options(config.Lora(adapter=str(folder)), folder), 1)
    peft.load(adapted, folder)
    return adapted.eval()


TARGETS: dict[str, Any] = {
    "all linear": {"target_modules": "all-linear"},
    "a pattern": {"target_modules": r".*\.(q_proj|down_proj)"},
    "short names": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "full names": {"target_modules": [f"model.layers.{n}.mlp.{one}_proj" for n in range(2) for one in ("up", "down")]},
    "lengths": {"target_modules": "all-linear", "use_dora": True},
    "one rank in a pattern": {
        "target_modules": ["q_proj"],
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"q_proj": 9},
    },
    "begun otherwise": {"target_modules": ["o_proj"], "init_lora_weights": "orthogonal", "lora_dropout": 0.1},
}


@pytest.mark.parametrize("form", TARGETS)
def test_adapters_of_peft_compute_what_they_do_there_however_their_layers_are_named(
    form: str, llama: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    theirs = adapters_of(llama, tmp_path / "adapter", **TARGETS[form])
    ours = read_adapters(llama, tmp_path / "adapter")
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    assert ("lora_dropout" in str(peft.notes(tmp_path / "adapter"))) == ("lora_dropout" in TARGETS[form])


@pytest.mark.parametrize("before", ["base_model.model.", "", "module.base_model.model.", "base_model.model._orig_mod."])
def test_modules_round_others_are_no_part_of_a_tensor_s_name(before: str, llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    adapters_of(llama, tmp_path / "adapter", target_modules=["q_proj"])
    wanted = read_adapters(llama, tmp_path / "adapter").state_dict()
    file = tmp_path / "adapter" / peft.WEIGHTS
    renamed = {
        before + name.removeprefix("base_model.model.").replace(".weight", ".default.weight"): value
        for name, value in load_file(file).items()
    }
    save_file(renamed, file)
    again = read_adapters(llama, tmp_path / "adapter").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "says modules_to_save"),
        ({"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"k_proj": 2}}, "says rank_pattern"),
        ({"target_modules": ["q_proj", "k_proj"], "alpha_pattern": {"k_proj": 2}}, "says alpha_pattern"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, "says layers_to_transform"),
        ({"target_modules": ["q_proj"], "bias": "lora_only"}, "says bias = 'lora_only'"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, "says lora_bias = True"),
        ({"target_modules": ["q_proj"], "init_lora_weights": "olora"}, "says init_lora_weights = 'olora'"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]}, "says trainable_token_indices"),
        ({"target_modules": ["q_proj", "lm_head"]}, "has adapters on 'lm_head'"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "'embed_tokens'"),
        ({"target_modules": r".*layers\.1.*q_proj"}, r"layers\.0\.self_attn\.q_proj\.lora_A\.weight is missing"),
    ],
)
def test_adapters_with_more_than_ours_are_refused_by_the_key_or_the_tensor(
    options: dict[str, Any], words: str, llama: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    adapters_of(llama, tmp_path / "adapter", **options)
    with pytest.raises(UserError, match=words):
        read_adapters(llama, tmp_path / "adapter")


# --- weights ---------------------------------------------------------------------------------------------------------


def theirs_computes(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_that_differs_from_a_tied_table_is_kept_as_its_own(equal: bool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    hf.export(made(tied=True), Nothing(), base)
    tensors = load_file(base / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": table.clone() if equal else -table}, base / "model.safetensors")
    options = hf.options(base)
    assert options.tied == equal
    assert bool(hf.notes(base)) != equal
    model = new_model(options, 0, torch.device("cpu"))
    hf.load_into(model, base)
    hf.export(model.eval(), Nothing(), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == equal
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        logits = model(tokens)
    torch.testing.assert_close(theirs_computes(tmp_path / "out", tokens), logits, rtol=1e-4, atol=1e-5)
    head = load_file(tmp_path / "out" / "model.safetensors").get("lm_head.weight", table)
    assert torch.equal(head, table if equal else -table)


def test_what_of_weights_is_not_used_is_named(tmp_path: Path) -> None:
    base = tmp_path / "base"
    hf.export(made(depth=2).to(torch.bfloat16), Nothing(), base)
    tensors = load_file(base / "model.safetensors")
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(2)}
    save_file(tensors | buffers, base / "model.safetensors")
    (base / "pytorch_model.bin").write_bytes(b"a pickle")
    table = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text("\ufeff" + json.dumps({**table, "attention_dropout": 0.1, "use_cache": True}))
    said = "\n".join(hf.notes(base))
    assert "not used: key 'attention_dropout' (config.json says 0.1)" in said
    assert "not used: tensor 'model.layers.{}.self_attn.rotary_emb.inv_freq' (2 layers)" in said
    assert "not used: file 'pytorch_model.bin'" in said
    assert "stored as BF16 and read as F32" in said
    assert "use_cache" not in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": {"bits": 4}}, "says quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}, "rope_parameters": None}, "longrope"),
        ({"logits_scaling": 8.0}, "says logits_scaling = 8.0"),
        ({"num_hidden_layers": 3}, "it has 2 layers, and its config.json says 3"),
        ({"num_hidden_layers": 1}, "it has 2 layers"),
        ({"num_hidden_layers": 10**9}, "it has 2 layers"),
        ({"hidden_size": 10**9}, "its config.json says"),
        ({"hidden_size": "64"}, "invalid value: hidden_size = 64"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": float("nan")}}, "rope_theta = nan"),
        ({"num_key_value_heads": 3}, "invalid value"),
    ],
)
def test_a_config_that_says_something_else_than_the_weights_is_refused(
    change: dict[str, Any], words: str, llama: Path
) -> None:
    table = json.loads((llama / "config.json").read_text())
    try:
        (llama / "config.json").write_text(json.dumps({**table, **change}))
        with pytest.raises(UserError, match=words):
            hf.options(llama)
    finally:
        (llama / "config.json").write_text(json.dumps(table))


@pytest.mark.parametrize("fault", ["missing", "twice", "elsewhere", "both", "integers", "strange"])
def test_shards_and_tensors_that_are_not_as_the_index_says_are_refused(fault: str, llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    half = dict(list(tensors.items())[:5])
    parts = {"a.safetensors": half, "b.safetensors": {k: v for k, v in tensors.items() if k not in half}}
    places = {name: file for file, part in parts.items() for name in part}
    name = next(iter(half))
    if fault == "twice":
        parts["b.safetensors"][name] = half[name].clone()
    if fault == "elsewhere":
        places[name] = "b.safetensors"
    if fault == "integers":
        half[name] = half[name].to(torch.int8)
    if fault == "strange":
        half["model.layers.0.self_attn.q_proj.weight_scale"] = torch.ones(1)
    for file, part in parts.items():
        if fault != "missing" or file == "a.safetensors":
            save_file(part, tmp_path / file)
    if fault == "both":
        save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": places}))
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    words = {
        "missing": "No weights at .*b.safetensors",
        "twice": "is in a.safetensors and b.safetensors",
        "elsewhere": "is in b.safetensors, where it is not",
        "both": "holds weights twice",
        "integers": "is I8, which is not read",
        "strange": "weight_scale is not known",
    }[fault]
    with pytest.raises(UserError, match=words):
        hf.options(tmp_path)


# --- GGUF ------------------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def coded(value: Any) -> bytes:
    """The type and the value of a field."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    parts = [coded(part) for part in value]
    return struct.pack("<I", 9) + parts[0][:4] + struct.pack("<Q", len(parts)) + b"".join(part[4:] for part in parts)


PLAIN: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.attention.head_count": 2,
    "llama.embedding_length": 8,
    "llama.block_count": 1,
    "llama.feed_forward_length": 16,
    "llama.context_length": 32,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.ggml.token_type": [1, 1, 1],
}
TENSORS = {
    "token_embd.weight": (3, 8),
    "output_norm.weight": (8,),
    **{f"blk.0.{name}_norm.weight": (8,) for name in ("attn", "ffn")},
    **{f"blk.0.attn_{name}.weight": (8, 8) for name in ("q", "k", "v", "output")},
    **{f"blk.0.ffn_{name}.weight": (16, 8) for name in ("gate", "up")},
    "blk.0.ffn_down.weight": (8, 16),
}


def gguf_of(file: Path, fields: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> Path:
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    header += b"".join(text(name) + coded(value) for name, value in fields.items())
    start = 0
    for name, shape in tensors.items():
        header += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], 0, start)
        start += -(-int(np.prod(shape)) * 4 // 32) * 32
    file.write_bytes(header + bytes(-len(header) % 32) + bytes(start))
    return file


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
    pytest.importorskip("gguf")
    assert model_of(gguf_of(tmp_path / "m.gguf", PLAIN, TENSORS)).size.feed_forward == 16


DEEP = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 20_000 + struct.pack("<IQ", 4, 0)
ODD: dict[str, tuple[Any, str]] = {
    "llama.attention.head_count": (0, "head_count = 0: Expected `int` >= 1"),
    "llama.embedding_length": ("eight", "embedding_length = eight: Expected `int`"),
    "llama.block_count": (2**31, "it has 1 layers"),
    "llama.feed_forward_length": (2**31 - 1, r"is \[16, 8\], and its config.json says"),
    "llama.attention.head_count_kv": ([1, 2], r"head_count_kv = \[1, 2\]"),
    "llama.attention.layer_norm_rms_epsilon": (float("nan"), "Expected `float` > 0"),
    "llama.context_length": (2**31, r"max_position_embeddings. do not fit into memory"),
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
    "no type": (struct.pack("<I", 99), "cannot be read: 99"),
    "no text": (struct.pack("<IQ", 8, 1) + b"\xff", "is not UTF-8"),
}


@pytest.mark.parametrize("key", ODD)
def test_an_odd_field_of_a_gguf_file_is_one_sentence(key: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    value, words = ODD[key]
    file = gguf_of(tmp_path / "m.gguf", {**PLAIN, key: value}, TENSORS)
    with pytest.raises(UserError, match=words):
        model_of(file)


@pytest.mark.parametrize("shape", [(3, 8, 0), (2**40, 2**40), (3, 9), (8, 3)])
def test_an_odd_shape_of_a_tensor_is_one_sentence(shape: tuple[int, ...], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
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
    pytest.importorskip("gguf")
    file = gguf_of(tmp_path / "m.gguf", PLAIN, TENSORS)
    monkeypatch.setattr(gguf_file, "free_memory", lambda: 1000)
    with pytest.raises(UserError, match="does not fit into memory"):
        hf.options(file)


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small file of each kind, with all that is read together with it."""
    pytest.importorskip("gguf")
    home = tmp_path_factory.mktemp("folders")
    model = made(256)
    hf.export(model, ByteTokenizer(), home / "hf")
    inner = begun()
    inner.save(str(home / "hf" / "tokenizer.json"))
    (home / "hf" / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": True}, "chat_template": "{{ 1 }}"})
    )
    gguf_export.export(model, ByteTokenizer(), "{{ 2 }}", home / "gguf", "F16")
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
        weight_files.sort_metadata(file)
        contents.add(file.read_bytes())
    assert len(contents) == 1
    assert load_file(file)["a"].tolist() == list(range(6))
    with weight_files.opened(file) as content:
        assert content.metadata() == metadata


def test_exports_are_the_same_bytes_whenever_they_are_written(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    base = base_of(tmp_path / "base", "begun with bos", TEMPLATES["llama3"])
    workload = workload_of(base, open_tokenizer(str(base)), None, config.Lora(rank=2))
    model = workload.build(torch.device("cpu"), torch.float32)
    assert isinstance(model, gpt.GPT)
    for number in "12":
        tuning.export(workload, model, tmp_path / number / "hf")
        peft.export(workload, model, tmp_path / number / "peft")
        workload_row._to_gguf("Q8_0", workload, model, tmp_path / number / "gguf")
    names = [str(file.relative_to(tmp_path / "1")) for file in (tmp_path / "1").rglob("*") if file.is_file()]
    assert len(names) == 11
    assert filecmp.cmpfiles(tmp_path / "1", tmp_path / "2", names, shallow=False)[0] == names


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
    whole, parts = (load_run.trained(tmp_path / name).model.state_dict() for name in ("whole", "parts"))
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
