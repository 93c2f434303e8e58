"""GGUF files in, by the `gguf` package: what llama.cpp and Ollama read (`ARCHITECTURES`).

A file that is read becomes a Hugging Face folder in the cache, so that all else reads one form. Rotary positions turn
pairs of columns: in llama.cpp's Llama neighbours, in Hugging Face's and in Qwen columns half a head apart, so the rows
of Llama's queries and keys are permuted. The conventions are those of llama.cpp's `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from espalier import cache_dir
from espalier.errors import UserError, missing_extra
from espalier.language import hf_config

SUFFIX = ".gguf"

# Theirs, Hugging Face's. `{}` stands for the number of a layer; a second one for that of an expert, whose matrices are
# one tensor in GGUF.
_COMMON = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
}
_THREE = ("gate", "up", "down")
_DENSE = {f"blk.{{}}.ffn_{one}.weight": f"model.layers.{{}}.mlp.{one}_proj.weight" for one in _THREE}
_BIASES = {f"blk.{{}}.attn_{one}.bias": f"model.layers.{{}}.self_attn.{one}_proj.bias" for one in "qkv"}
_NORMS = {f"blk.{{}}.attn_{one}_norm.weight": f"model.layers.{{}}.self_attn.{one}_norm.weight" for one in "qk"}
_GEMMA2 = {
    "blk.{}.ffn_norm.weight": "model.layers.{}.pre_feedforward_layernorm.weight",
    "blk.{}.post_attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.post_ffw_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
}
_ROUTER = "blk.{}.ffn_gate_inp.weight"
_MIXTRAL = {_ROUTER: "model.layers.{}.block_sparse_moe.gate.weight"} | {
    f"blk.{{}}.ffn_{one}_exps.weight": f"model.layers.{{}}.block_sparse_moe.experts.{{}}.{name}.weight"
    for one, name in zip(_THREE, ("w1", "w3", "w2"), strict=True)
}
_QWEN_MOE = {_ROUTER: "model.layers.{}.mlp.gate.weight"} | {
    f"blk.{{}}.ffn_{one}_exps.weight": f"model.layers.{{}}.mlp.experts.{{}}.{one}_proj.weight" for one in _THREE
}
_SHARED_GATE = "blk.{}.ffn_gate_inp_shexp.weight"
_SHARED = {_SHARED_GATE: "model.layers.{}.mlp.shared_expert_gate.weight"} | {
    f"blk.{{}}.ffn_{one}_shexp.weight": f"model.layers.{{}}.mlp.shared_expert.{one}_proj.weight" for one in _THREE
}
FREQUENCIES = "rope_freqs.weight"
"""By what each rate of Llama 3's rotary positions is divided."""
WHOLE_FLOATS = (_ROUTER, FREQUENCIES)
"""Tensors that are fp32 in files of any type."""


class Architecture(NamedTuple):
    """GGUF's name of a kind of decoder, and its tensors by both names."""

    name: str
    names: Mapping[str, str]


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _COMMON | _DENSE),
    "mixtral": Architecture("llama", _COMMON | _MIXTRAL),
    "qwen2": Architecture("qwen2", _COMMON | _DENSE | _BIASES),
    "qwen2_moe": Architecture("qwen2moe", _COMMON | _BIASES | _QWEN_MOE | _SHARED),
    "qwen3": Architecture("qwen3", _COMMON | _DENSE | _NORMS),
    "qwen3_moe": Architecture("qwen3moe", _COMMON | _NORMS | _QWEN_MOE),
    "gemma": Architecture("gemma", _COMMON | _DENSE),
    "gemma2": Architecture("gemma2", _COMMON | _DENSE | _GEMMA2),
}
"""Those that are read and written, by Hugging Face's `model_type`; a file of Mistral's is Llama's."""
LARGEST_GEMMA2 = 46
"""Layers of the Gemma 2 whose scores llama.cpp scales by width / heads instead of the size of a head."""
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
    config = _config(fields, file, dict(tensors))
    _tokenizer(fields, file, folder)
    order = Order(config["model_type"], config["num_attention_heads"], config["num_key_value_heads"])
    found = {name: value for given, stored in tensors for name, value in order.split(given, stored, file)}
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


def _config(fields: Mapping[str, Any], file: Path, tensors: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    name = str(fields.get("general.architecture"))
    own = {key.removeprefix(f"{name}."): value for key, value in fields.items()}
    kind = "mixtral" if name == "llama" and own.get("expert_count") else _KINDS.get(name)
    if kind is None:
        known = ", ".join(_KINDS)
        raise UserError(f"{file} holds a {name!r} model.", why=f"of GGUF files {known} are read", do="another file")
    try:
        heads, width = int(own["attention.head_count"]), int(own["embedding_length"])
        found = {
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
            "tie_word_embeddings": "output.weight" not in tensors,
            "rope_theta": float(own.get("rope.freq_base", 10_000.0)),
            "rms_norm_eps": float(f"{own['attention.layer_norm_rms_epsilon']:.6g}"),
            "hidden_act": "silu",
            **_scaling(own),
        }
        found |= _experts(kind, own, tensors) if "expert_count" in own else {}
        found |= _gemma2(own, found) if kind == "gemma2" else {}
    except KeyError as missing:
        raise UserError(f"{file} does not say {missing}.", do="download it again") from None
    if FREQUENCIES in tensors:
        found["rope_scaling"] = _llama3(tensors[FREQUENCIES], own, found, file)
    return found


_KINDS = {one.name: kind for kind, one in ARCHITECTURES.items() if kind != "mixtral"}


def _experts(kind: str, own: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    count, active = int(own["expert_count"]), int(own["expert_used_count"])
    if kind == "mixtral":
        return {"num_local_experts": count, "num_experts_per_tok": active}
    inner = int(tensors["blk.0.ffn_up_exps.weight"].shape[1])
    found = {"num_experts": count, "num_experts_per_tok": active, "moe_intermediate_size": inner}
    if kind == "qwen2_moe":
        found["shared_expert_intermediate_size"] = int(tensors["blk.0.ffn_up_shexp.weight"].shape[0])
    return found | {"norm_topk_prob": kind == "qwen3_moe"}


def _gemma2(own: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    large = found["num_hidden_layers"] == LARGEST_GEMMA2
    return {
        "query_pre_attn_scalar": found["hidden_size"] / found["num_attention_heads"] if large else found["head_dim"],
        "attn_logit_softcapping": _short(own.get("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": _short(own.get("final_logit_softcapping", 30.0)),
        "sliding_window": int(own.get("attention.sliding_window", 4096)),
    }


def _short(value: float) -> float:
    """A float32 as it was before it was rounded."""
    return float(f"{value:.7g}")


def _scaling(own: Mapping[str, Any]) -> dict[str, Any]:
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    found = {"rope_type": kind, "factor": float(own["rope.scaling.factor"])}
    if "rope.scaling.original_context_length" in own:
        found["original_max_position_embeddings"] = int(own["rope.scaling.original_context_length"])
    return {"rope_scaling": found}


def _llama3(table: NDArray[Any], own: Mapping[str, Any], found: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The options of Llama 3's positions whose factors are `table`; its ramp is a line over turns. Raises UserError."""
    original = int(own.get("rope.scaling.original_context_length", 8192))
    factor = float(table.max())
    half = len(table)
    turns = original * found["rope_theta"] ** (-np.arange(half) / half) / (2 * np.pi)
    kept = (1 / table.astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    inside = np.flatnonzero((kept > 1e-6) & (kept < 1 - 1e-6))
    low, high = 1.0, 4.0
    if len(inside) > 1:
        slope, offset = np.polyfit(turns[inside], kept[inside], 1)
        low, high = (float(f"{(edge - offset) / slope:.4g}") for edge in (0.0, 1.0))
    share = ((turns - low) / (high - low)).clip(0, 1)
    if factor <= 1 or not np.allclose(1 / ((1 - share) / factor + share), table, rtol=1e-4):
        raise UserError(
            f"{file} turns positions at rates that no option says.", why=f"see {FREQUENCIES}", do="another model"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


class Order(NamedTuple):
    """How the tensors of a decoder of a `kind` (Hugging Face's name) lie in a file: experts are stacked, rows of
    Llama's queries and keys permuted, Gemma's norms counted from 0."""

    kind: str
    heads: int
    kv_heads: int

    @property
    def permuted(self) -> dict[str, int]:
        """Matrices whose rows have another order, and their heads."""
        both = {"attn_q": self.heads, "attn_k": self.kv_heads}
        return both if ARCHITECTURES[self.kind].name == "llama" else {}

    @property
    def norm_offset(self) -> float:
        """What norms have more in a file."""
        return 1.0 if self.kind.startswith("gemma") else 0.0

    def split(self, name: str, value: NDArray[Any], file: Path) -> list[tuple[str, Tensor]]:
        """The tensors, by Hugging Face's names, that are `name` in `file`. Raises UserError for one without a place."""
        if name == FREQUENCIES:
            return []
        parts, pattern = name.split("."), _pattern(name)
        theirs = ARCHITECTURES[self.kind].names.get(pattern)
        if theirs is None:
            raise UserError(f"{file} holds the tensor {name}, which this decoder does not have.", do="another model")
        layer, own = [one for one in parts if one.isdigit()], parts[-2]
        if theirs.count("{}") > 1:
            return [(theirs.format(*layer, at), torch.from_numpy(one.copy())) for at, one in enumerate(value)]
        if own in self.permuted and value.ndim > 1:
            value = interleaved(value, self.permuted[own], back=True)
        if own.endswith("norm") and self.norm_offset:
            value = value - np.float32(self.norm_offset)
        if pattern == _SHARED_GATE:
            value = value.reshape(1, -1)
        return [(theirs.format(*layer), torch.from_numpy(np.ascontiguousarray(value)))]

    def joined(self, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """What `split` takes apart, from float32 `tensors` by Hugging Face's names. Raises KeyError for a name without
        a place."""
        ours = {theirs: name for name, theirs in ARCHITECTURES[self.kind].names.items()}
        found: dict[str, NDArray[Any]] = {}
        stacks: dict[str, list[NDArray[Any]]] = {}
        for theirs, value in tensors.items():
            numbers, name = [one for one in theirs.split(".") if one.isdigit()], ours[_pattern(theirs)]
            own = name.split(".")[-2]
            name = name.format(*numbers[:1])
            if len(numbers) > 1:
                stacks.setdefault(name, []).append(value)
                found[name] = value  # keeps the place
                continue
            if own in self.permuted and value.ndim > 1:
                found[name] = interleaved(value, self.permuted[own])
            elif own.endswith("norm") and self.norm_offset:
                found[name] = value + np.float32(self.norm_offset)
            else:
                found[name] = value.reshape(-1) if _pattern(name) == _SHARED_GATE else value
        return found | {name: np.stack(parts) for name, parts in stacks.items()}


def _pattern(name: str) -> str:
    return ".".join("{}" if one.isdigit() else one for one in name.split("."))


def interleaved(weight: NDArray[Any], heads: int, back: bool = False) -> NDArray[Any]:
    """Rows of queries or keys [heads * size, in] as llama.cpp has them; `back`: as Hugging Face has them."""
    half = weight.shape[0] // heads // 2
    shape = (heads, half, 2, -1) if back else (heads, 2, half, -1)
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


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
