"""Folders of other programs: tiny models with tokenizers and chat templates of each kind."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from espalier import recipe as config
from espalier.cli import eval as _eval  # noqa: F401 - loaded once, before programs are forked
from espalier.cli import export, open_run, plan, predict  # noqa: F401
from espalier.cli import train as _train  # noqa: F401
from espalier.language import gpt, hf
from espalier.language.decoder_workload import new_model
from espalier.language.tokenizer import Tokenizer
from espalier.language.tune import workload as tuning
from espalier.language.tune.workload import TuneWorkload
from espalier.recipe import defaults

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


def base_of(folder: Path, kind: str, template: str | None, **changes: Any) -> Path:
    """A model of one layer with a tokenizer of somebody else."""
    make, stated = TOKENIZERS[kind]
    inner = make()
    model = made(inner.get_vocab_size() + 3, **changes)
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
