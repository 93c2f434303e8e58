"""A GGUF file holds the model that it was made from, and transformers reads it as we do."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from espalier import recipe as config
from espalier.language import gguf_export, gpt, hf
from espalier.language.decoder_workload import new_model
from espalier.language.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from espalier.recipe import decoder_shapes, defaults
from espalier.recipe.errors import UserError

TEXT = "def f(x): return 12 + x  # naïve 你好\n\n" * 4


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(vocabulary: int = 256, **changes: object) -> gpt.GPT:
    size = {"depth": 2, "width": 64, "heads": 4, "kv_heads": 2, "feed_forward": 96, "context": 64, "rope_theta": 5e4}
    kind = config.Moe if "experts" in changes else config.Gpt
    recipe = config.Recipe(model=kind(**{**size, "vocabulary": vocabulary, **changes}))  # type: ignore[arg-type]
    options = defaults.resolve(recipe)[0].model
    assert isinstance(options, config.Gpt | config.Moe)
    return new_model(options, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-pair tokenizer that splits as SmolLM's does."""
    import tokenizers

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    splits = tokenizers.pre_tokenizers
    inner.pre_tokenizer = splits.Sequence(
        [splits.Digits(individual_digits=True), splits.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=splits.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT], trainer)
    folder = tmp_path_factory.mktemp("words")
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return open_tokenizer(str(folder))


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_read_again_is_what_was_written_and_the_tokenizer_is_the_same(
    kind: str, tied: bool, words: Tokenizer, tmp_path: Path
) -> None:
    model = made(words.vocabulary, tied=tied).eval()
    apart = gguf_export.export(model, words.with_template("a template"), None, tmp_path / "out", kind)
    file = tmp_path / "out" / "model.gguf"
    assert hf.options(file) == hf.options_of(model.size)
    state = hf.load(file, torch.float32)[1]
    types = gguf.GGMLQuantizationType
    for name, value in model.state_dict().items():
        given = value.numpy()
        if given.ndim == 2:
            given = gguf.quants.dequantize(gguf.quants.quantize(given, types[kind]), types[kind])
        assert np.array_equal(state[name].numpy(), given), name
    again = gpt.GPT(hf.options_of(model.size)).eval()  # type: ignore[arg-type]
    hf.load_into(again, file)
    tokens = torch.randint(words.vocabulary, (1, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert float((again(tokens) - model(tokens)).abs().max()) == pytest.approx(apart)
    assert apart < {"F16": 2e-3, "Q8_0": 0.05, "Q4_0": 1.0}[kind]
    theirs = open_tokenizer(str(hf.tokenizer_of(file)))
    assert theirs.table() == words.table()
    assert theirs.encode(TEXT.encode()).tolist() == words.encode(TEXT.encode()).tolist()
    assert theirs.boundary == words.boundary
    assert (tmp_path / "out" / "Modelfile").read_text() == 'FROM ./model.gguf\nPARAMETER stop "<|im_end|>"\n'


KINDS: dict[str, dict[str, object]] = {
    "qwen2": {"family": "qwen2"},
    "qwen2 tied": {"family": "qwen2", "tied": True},
    "qwen3": {"family": "qwen3", "head_size": 128},
    "llama with wide heads": {"head_size": 32},
    "gemma": {"family": "gemma", "head_size": 32, "tied": True},
    "gemma2": {
        "family": "gemma2",
        "head_size": 256,
        "tied": True,
        "window": 16,
        "attention_cap": 50.0,
        "logit_cap": 30.0,
    },
    "mixtral": {"experts": 4, "active": 2},
    "qwen2moe": {
        "experts": 3,
        "active": 2,
        "family": "qwen2",
        "feed_forward": 1408,
        "shared": 5632,
        "normalized": False,
    },
    "qwen3moe": {"experts": 3, "active": 2, "family": "qwen3", "head_size": 128, "feed_forward": 768},
    "llama3": {"rope": decoder_shapes.Rope(kind="llama3", factor=8.0, original=32, low=1.0, high=4.0)},
    "linear": {"rope": decoder_shapes.Rope(kind="linear", factor=2.0)},
    "yarn": {"rope": decoder_shapes.Rope(kind="yarn", factor=4.0, original=32)},
    "llama with biases": {"attention_bias": True},
    "granite": {
        "family": "granite",
        "attention_bias": True,
        "attention_scale": 0.3,
        "embedding_scale": 12.0,
        "residual_scale": 0.5,
        "logit_scale": 0.125,
    },
    "smollm3": {"family": "smollm3", "depth": 5, "tied": True},
    "phi3": {"family": "phi3", "window": 16, "rotary": 0.5},
    "gemma3": {
        "family": "gemma3_text",
        "head_size": 32,
        "depth": 7,
        "tied": True,
        "window": 16,
        "local_theta": 100.0,
        "rope": decoder_shapes.Rope(kind="linear", factor=8.0),
    },
    "ministral3": {
        "family": "ministral3",
        "head_size": 32,
        "rope": decoder_shapes.Rope(kind="yarn", factor=4.0, original=16, attention=1.0, query=0.25),
    },
    "olmo2": {"family": "olmo2", "tied": False},
    "olmo3": {
        "family": "olmo3",
        "tied": False,
        "depth": 4,
        "window": 16,
        "rope": decoder_shapes.Rope(kind="yarn", factor=4.0, original=32),
    },
    "glm4": {"family": "glm4", "attention_bias": True, "rotary": 0.5, "head_size": 32},
}


UNREAD = {
    "gemma", "mixtral", "llama with biases", "granite", "smollm3", "phi3", "gemma3", "ministral3", "olmo2", "olmo3",
    "glm4",
}  # fmt: skip
"""Transformers has no reader of these, leaves biases and windows out, and takes Mixtral's for Llama's. It reads no
sizes of experts, nor Gemma 2's caps: those of `KINDS` are its defaults."""
NAMES = {"ministral3": "mistral3", "olmo3": "olmo2"}
"""Of architectures, where they differ from the kind."""


@pytest.mark.extremes
@pytest.mark.parametrize("kind", KINDS)
def test_other_families_are_read_as_they_were_written_and_as_transformers_reads_them(
    kind: str, words: Tokenizer, tmp_path: Path
) -> None:
    model = made(words.vocabulary, **KINDS[kind]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    gguf_export.export(model, words, None, tmp_path / "one", "F16")
    file = tmp_path / "one" / "model.gguf"
    assert hf.options(file) == hf.options_of(model.size)
    again = new_model(hf.options(file), 0, torch.device("cpu")).eval()
    hf.load_into(again, file)
    gguf_export.export(again, open_tokenizer(str(hf.tokenizer_of(file))), None, tmp_path / "two", "F16")
    assert (tmp_path / "two" / "model.gguf").read_bytes() == file.read_bytes()
    refuse_names_that_llama_cpp_does_not_know(file, NAMES.get(kind, kind))
    if "rope" in KINDS[kind] or kind in UNREAD:
        return  # transformers does not read these fields
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "one", gguf_file="model.gguf", dtype=torch.float32
        ).eval()
    tokens = torch.randint(words.vocabulary, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(again(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def refuse_names_that_llama_cpp_does_not_know(file: Path, kind: str) -> None:
    """By the tables of the `gguf` package: of tensors (but biases, which are optional), and of fields."""
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    name = str(fields["general.architecture"])
    if kind in gguf.MODEL_ARCH_NAMES.values():
        assert name == kind
    architecture = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    tensors = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[architecture]}
    written = {re.sub(r"blk\.\d+\.", "blk.{bid}.", tensor.name) for tensor in reader.tensors}
    assert {tensor.rpartition(".")[0] for tensor in written} <= tensors
    keys = {
        value.replace("{arch}", name)
        for group in vars(gguf.Keys).values()
        if isinstance(group, type)
        for value in vars(group).values()
        if isinstance(value, str)
    }
    assert {field for field in fields if field.startswith(f"{name}.")} <= keys


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"family": "gemma2", "tied": True}, "caps of scores"),
        ({"family": "gemma", "tied": False}, "a head of its own"),
        (
            {"family": "gemma2", "tied": True, "attention_cap": 5.0, "logit_cap": 3.0, "attention_scale": 0.5},
            "a scale of attention",
        ),
        ({"experts": 4, "family": "qwen3", "normalized": False}, "normalized otherwise"),
        ({"family": "olmo3", "tied": False, "window": 8, "local_theta": 5.0}, "a base of positions of its own"),
        ({"family": "gemma3_text", "tied": True}, "without the window"),
        ({"family": "olmo2", "tied": True}, "a head that is the table"),
        ({"family": "olmo2", "head_size": 32, "tied": False}, "heads of a size of their own"),
        ({"family": "qwen3", "attention_bias": True}, "biases of attention"),
        ({"family": "ministral3"}, "stretched positions"),
        ({"residual_scale": 0.5}, r"residual_scale = 0\.5"),
        ({"window": 8}, "a window of attention"),
        ({"experts": 4, "balancing": "bias"}, "picked with a bias"),
        ({"experts": 4, "shared": 32}, "no mixture has a shared expert"),
        ({"family": "mistral", "window": 8}, "a window of attention"),
        (
            {"family": "qwen2", "rope": decoder_shapes.Rope(kind="llama3", factor=2.0, original=32, high=4.0)},
            "stretched positions",
        ),
    ],
)
def test_what_no_field_can_say_is_not_written(
    changes: dict[str, object], said: str, words: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        gguf_export.export(made(words.vocabulary, **changes), words, None, tmp_path / "out", "F16")


def test_written_read_and_written_again_it_is_the_same_file(words: Tokenizer, tmp_path: Path) -> None:
    gguf_export.export(made(words.vocabulary), words, None, tmp_path / "one", "F16")
    file = tmp_path / "one" / "model.gguf"
    model = gpt.GPT(hf.options(file))  # type: ignore[arg-type]
    hf.load_into(model, file)
    gguf_export.export(model, open_tokenizer(str(hf.tokenizer_of(file))), None, tmp_path / "two", "F16")
    assert (tmp_path / "two" / "model.gguf").read_bytes() == file.read_bytes()


def test_transformers_reads_the_file_as_we_do(words: Tokenizer, tmp_path: Path) -> None:
    model = made(words.vocabulary).eval()
    gguf_export.export(model, words, None, tmp_path / "out", "F16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32
        ).eval()
    again = gpt.GPT(hf.options_of(model.size)).eval()  # type: ignore[arg-type]
    hf.load_into(again, tmp_path / "out" / "model.gguf")
    tokens = torch.randint(words.vocabulary, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(again(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_bytes_are_a_tokenizer_without_merges(tmp_path: Path) -> None:
    gguf_export.export(made(), ByteTokenizer(), None, tmp_path / "out", "F16")
    theirs = open_tokenizer(str(hf.tokenizer_of(tmp_path / "out" / "model.gguf")))
    assert theirs.encode(TEXT.encode()).tolist() == list(TEXT.encode())


def test_what_is_not_read_or_written_is_named(words: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        hf.options(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"no such thing" * 100)
    with pytest.raises(UserError, match="is no GGUF file"):
        hf.options(tmp_path / "bad.gguf")
    gguf_export.export(made(words.vocabulary), words, None, tmp_path / "out", "F16")
    whole = (tmp_path / "out" / "model.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"is no GGUF file|is cut off"):
        hf.options(tmp_path / "cut.gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "rwkv")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match="'rwkv' model"):
        hf.options(tmp_path / "other.gguf")


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama")
    values = np.zeros((2, 40), np.uint8)  # blocks of 32 numbers in 40 bytes
    writer.add_tensor("token_embd.weight", values, raw_dtype=gguf.GGMLQuantizationType.Q8_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="tensors of type Q8_1, which is not read") as told:
        hf.options(tmp_path / "odd.gguf")
    assert "token_embd.weight" in str(told.value)
