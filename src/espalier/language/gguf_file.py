"""GGUF files in, by the `gguf` package: what llama.cpp and Ollama read (architectures `llama`, `qwen2`, `qwen3`).

A file that is read becomes a Hugging Face folder in the cache, so that all else reads one form. Rotary positions turn
pairs of columns: in llama.cpp's Llama neighbours, in Hugging Face's and in Qwen columns half a head apart, so the rows
of Llama's queries and keys are permuted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from espalier import cache_dir
from espalier.errors import UserError, missing_extra
from espalier.language import hf_config

SUFFIX = ".gguf"

# Theirs, Hugging Face's. `{}` stands for the number of a layer.
NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
}
_BIASES = {f"blk.{{}}.attn_{one}.bias": f"model.layers.{{}}.self_attn.{one}_proj.bias" for one in "qkv"}
_NORMS = {f"blk.{{}}.attn_{one}_norm.weight": f"model.layers.{{}}.self_attn.{one}_norm.weight" for one in "qk"}
ARCHITECTURES: Mapping[str, Mapping[str, str]] = {"llama": {}, "qwen2": _BIASES, "qwen3": _NORMS}
"""Those that are read and written, by the names of both worlds: their tensors beside `NAMES`."""
ALL_NAMES = NAMES | _BIASES | _NORMS
SCALINGS = ("linear", "yarn")
"""Stretched rotary positions that a file's fields can say."""
_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _split(pattern: str) -> dict[str, Any]:
    """Pre-tokenizers that split by `pattern` and then take bytes."""
    first = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [first, {**_LEVEL, "use_regex": False}]}


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, dict[str, Any]] = {
    "gpt-2": _LEVEL,
    "default": _LEVEL,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _LEVEL]},
    "llama-bpe": _split(_WORDS + r"\p{N}{1,3}" + _REST),
    "qwen2": _split(_WORDS + r"\p{N}" + _REST),
}
"""How text is split before byte-pair encoding, by llama.cpp's names (`llama-vocab.cpp`), as `tokenizers` says it."""


def library() -> Any:
    """The `gguf` package. Raises UserError naming the extra where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise missing_extra("gguf", "gguf", "a .gguf file") from None
    return gguf


# --- in ----------------------------------------------------------------------------------------------------------


def folder_of(file: Path) -> Path:
    """The Hugging Face folder that the GGUF `file` was made into, once, in the cache.

    Raises UserError for a file that is missing, damaged, or of an architecture, a type or a tokenizer that is not read.
    """
    try:
        status = file.stat()
    except OSError as error:
        raise UserError(f"model.initial = {str(file)!r} cannot be read: {error.strerror}.") from None
    key = cache_dir.hashed([1, str(file.absolute()), status.st_size, status.st_mtime_ns])
    folder = cache_dir.cache_folder() / "gguf" / key
    if not (folder / "config.json").is_file():
        cache_dir.replace_folder(folder, lambda partial: _convert(file, partial))
    return folder


def _convert(file: Path, folder: Path) -> None:
    fields, tensors = opened(file)
    config = _config(fields, file, {name for name, _ in tensors})
    _tokenizer(fields, file, folder)
    heads = permuted(config["model_type"], config["num_attention_heads"], config["num_key_value_heads"])
    found: dict[str, Tensor] = {}
    for name, value in tensors:
        found[renamed(name, file)] = in_order(name, value, heads)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def opened(file: Path) -> tuple[dict[str, Any], list[tuple[str, NDArray[Any]]]]:
    """The fields of a file, and its tensors as float32."""
    found = library()
    try:
        reader = found.GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise UserError(f"{file} is no GGUF file: {error}.", do="download it again") from None
    tensors = []
    for one in reader.tensors:
        try:
            value = found.quants.dequantize(one.data, one.tensor_type)
        except RuntimeError:  # a type without a reader
            kind = one.tensor_type.name
            raise UserError(
                f"{file} holds tensors of type {kind}, which is not read.",
                why=f"{one.name} is one of them",
                do="a file of F32, F16, BF16, Q8_0, Q4_0 or a K type",
            ) from None
        except ValueError as error:
            raise UserError(f"{file} is cut off: {error}.", do="download it again") from None
        tensors.append((one.name, value.reshape(tuple(int(size) for size in one.shape[::-1])).astype(np.float32)))
    return fields, tensors


def _config(fields: Mapping[str, Any], file: Path, names: set[str]) -> dict[str, Any]:
    kind = str(fields.get("general.architecture"))
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{file} holds a {kind!r} model.", why=f"of GGUF files {known} are read", do="another file")
    own = {name.removeprefix(f"{kind}."): value for name, value in fields.items()}
    try:
        heads, width = int(own["attention.head_count"]), int(own["embedding_length"])
        return {
            "architectures": [hf_config.FAMILIES[kind]],
            "model_type": kind,
            "num_hidden_layers": int(own["block_count"]),
            "hidden_size": width,
            "intermediate_size": int(own["feed_forward_length"]),
            "num_attention_heads": heads,
            "num_key_value_heads": int(own.get("attention.head_count_kv", heads)),
            "head_dim": int(own.get("attention.key_length", width // heads)),
            "vocab_size": len(fields["tokenizer.ggml.tokens"]),
            "max_position_embeddings": int(own["context_length"]),
            "tie_word_embeddings": "output.weight" not in names,
            "rope_theta": float(own.get("rope.freq_base", 10_000.0)),
            "rms_norm_eps": float(f"{own['attention.layer_norm_rms_epsilon']:.6g}"),
            "hidden_act": "silu",
            **_scaling(own),
        }
    except KeyError as missing:
        raise UserError(f"{file} does not say {missing}.", do="download it again") from None


def _scaling(own: Mapping[str, Any]) -> dict[str, Any]:
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    found = {"rope_type": kind, "factor": float(own["rope.scaling.factor"])}
    if "rope.scaling.original_context_length" in own:
        found["original_max_position_embeddings"] = int(own["rope.scaling.original_context_length"])
    return {"rope_scaling": found}


def permuted(kind: str, heads: int, kv_heads: int) -> dict[str, int]:
    """Tensors whose rows a file of the architecture `kind` has in another order, and their heads."""
    return {"attn_q": heads, "attn_k": kv_heads} if kind == "llama" else {}


def renamed(name: str, file: Path) -> str:
    """Hugging Face's name for the tensor `name` of `file`. Raises UserError for one that has no place."""
    parts = name.split(".")
    pattern = ".".join("{}" if one.isdigit() else one for one in parts)
    if pattern not in ALL_NAMES:
        raise UserError(f"{file} holds the tensor {name}, which this decoder does not have.", do="another model")
    return ALL_NAMES[pattern].format(*(one for one in parts if one.isdigit()))


def interleaved(weight: NDArray[Any], heads: int, back: bool = False) -> NDArray[Any]:
    """Rows of queries or keys [heads * size, in] as llama.cpp has them; `back`: as Hugging Face has them."""
    half = weight.shape[0] // heads // 2
    shape = (heads, half, 2, -1) if back else (heads, 2, half, -1)
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def in_order(name: str, value: NDArray[Any], heads: Mapping[str, int]) -> Tensor:
    """The tensor `name` of a file with its rows as Hugging Face has them."""
    part = name.split(".")[-2]
    return torch.from_numpy(
        np.ascontiguousarray(interleaved(value, heads[part], back=True) if part in heads else value)
    )


def _tokenizer(fields: Mapping[str, Any], file: Path, folder: Path) -> None:
    """Writes the tokenizer of the file, or the one beside it where the file's own is not read."""
    beside = file.with_name("tokenizer.json")
    model, split = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default"))
    if model == "gpt2" and split in SPLITS:
        table = _table(fields, SPLITS[split])
        (folder / "tokenizer.json").write_text(json.dumps(table, ensure_ascii=False), encoding="utf-8")
    elif beside.is_file():
        (folder / "tokenizer.json").write_bytes(beside.read_bytes())
    else:
        raise UserError(
            f"{file} has a tokenizer of the kind {model} ({split}), which is not read.",
            do=f"put the model's tokenizer.json beside it, as {beside}",
        )
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"}
    named = {name: fields.get(f"tokenizer.ggml.{key}") for name, key in ids.items()}
    stated: dict[str, Any] = {name: tokens[int(number)] for name, number in named.items() if number is not None}
    if "tokenizer.chat_template" in fields:
        stated["chat_template"] = fields["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(stated, ensure_ascii=False, indent=1), encoding="utf-8")


def _table(fields: Mapping[str, Any], split: dict[str, Any]) -> dict[str, Any]:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": number, "content": token, "special": int(kind) == 3, **flags}
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if int(kind) in (3, 4)  # control, user defined
    ]
    merges = [list(_halves(one)) for one in fields.get("tokenizer.ggml.merges", ())]
    level = {**_LEVEL, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": split,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges},
    }


def _halves(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
