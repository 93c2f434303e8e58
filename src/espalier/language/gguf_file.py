"""GGUF files in, by the `gguf` package: what llama.cpp and Ollama read (`ARCHITECTURES`).

A file that is read becomes a Hugging Face folder in the cache, so that all else reads one form. Rotary positions turn
pairs of columns: in llama.cpp's Llama neighbours, in Hugging Face's and in Qwen columns half a head apart, so the rows
of Llama's queries and keys are permuted. The conventions are those of llama.cpp's `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from espalier.language import gguf_header, hf_config
from espalier.language.gguf_header import AGAIN, Array, GgufFields, TensorPlace
from espalier.language.hf_config import Real, Whole
from espalier.language.tokenizer import prefix_processor
from espalier.language.tokenizer_files import CONFIG, EOS, GENERATION, TOKENIZER, formatted
from espalier.machine.resource_limits import refuse_large
from espalier.recipe import cache_dir
from espalier.recipe.data_table import data_table
from espalier.recipe.decoder_shapes import FAMILIES
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import JsonObject, parsing, printable, unused

SUFFIX = ".gguf"
NOTES = "notes.json"
"""Of a folder in the cache: what of the file was not used."""
_VERSION = 3
"""Of the folders that files are made into."""

_ROUTER = "blk.{}.ffn_gate_inp.weight"
_SHARED_GATE = "blk.{}.ffn_gate_inp_shexp.weight"
FREQUENCIES = "rope_freqs.weight"
"""By what each rate of Llama 3's rotary positions is divided."""
WHOLE_FLOATS = (_ROUTER, FREQUENCIES)
"""Tensors that are fp32 in files of any type."""


class Architecture(NamedTuple):
    """GGUF's name of a kind of decoder, its tensors by both names, the fields that it has besides those of all, and
    whether rows of queries and keys are permuted."""

    name: str
    names: Mapping[str, str]
    fields: Mapping[str, str]
    permuted: bool


_TABLES = data_table(__file__)
_WHOLE_FIELDS: Mapping[str, str] = _TABLES["fields"]["wholes"]
COMMON_FIELDS: Mapping[str, str] = {**_WHOLE_FIELDS, **_TABLES["fields"]["common"]}


def _joined(table: str, groups: Sequence[str]) -> dict[str, str]:
    return {theirs: name for group in groups for theirs, name in _TABLES[table][group].items()}


ARCHITECTURES = {
    kind: Architecture(
        row["name"],
        _joined("tensors", row["tensors"]),
        _joined("fields", row.get("fields", ())),
        row.get("permuted", False),
    )
    for kind, row in _TABLES["architectures"].items()
}
"""Those that are read and written, by Hugging Face's `model_type`."""
LARGEST_GEMMA = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the Gemma 2 and 3 whose scores llama.cpp scales by width / heads instead of the size of a head."""
_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


SPLITS: Mapping[str, dict[str, Any]] = _TABLES["splits"]


# --- in ----------------------------------------------------------------------------------------------------------


def folder_of(file: Path) -> Path:
    """The Hugging Face folder that the GGUF `file` was made into, once, in the cache.

    Raises UserError for a file that is missing, damaged, or of an architecture, a type or a tokenizer that is not read.
    """
    with parsing(file, "name another file as model.initial"):
        status = file.stat()
    key = cache_dir.hashed([_VERSION, str(file.absolute()), status.st_size, status.st_mtime_ns])
    folder = cache_dir.cache_folder() / "gguf" / key
    if not (folder / "config.json").is_file():
        with cache_dir.writing(folder, cache_dir.CACHE, lambda: status.st_size):
            cache_dir.replace_folder(folder, lambda partial: _convert(file, partial))
    return folder


def _convert(file: Path, folder: Path) -> None:
    with parsing(file, AGAIN):
        fields, tensors = opened(file)
        config, notes = _config(fields, file, dict(tensors))
        files = _tokenizer(GgufFields(file, fields, "tokenizer"), file)
        order = Order(config["model_type"], config["num_attention_heads"], config["num_key_value_heads"])
        split = {name: value for given, stored in tensors for name, value in order.split(given, stored, file)}
    save_file(split, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in {**files, NOTES: notes, "config.json": config}.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else formatted(content))


def opened(file: Path) -> tuple[JsonObject, list[tuple[str, Array]]]:
    """The fields of a file, and its tensors as float32. Raises UserError."""
    import gguf

    header = gguf_header.read(file)
    refuse_large(printable(file), sum(math.prod(place.shape) for place in header.tensors) * 8)
    if sum(_stored_size(place, gguf) for place in header.tensors) > len(header.content):
        raise UserError(f"{printable(file)} is cut off, or its tensors overlap.", do=AGAIN)
    return header.fields, [(place.name, _values(file, place, header.content, gguf)) for place in header.tensors]


def _stored_size(place: TensorPlace, library: Any) -> int:
    """Bytes that a tensor has in its file; 0 for a type that is not known."""
    block, size = library.GGML_QUANT_SIZES.get(place.kind, (1, 0))
    return math.prod(place.shape) // block * size


def _values(file: Path, place: TensorPlace, content: NDArray[np.uint8], library: Any) -> Array:
    kind: Any = place.kind
    try:
        kind = library.GGMLQuantizationType(kind)
        end = place.start + _stored_size(place, library)
        if place.shape[-1] % library.GGML_QUANT_SIZES[kind][0] or end > len(content):
            raise UserError(f"{file} is cut off: {printable(place.name)} ends after it.", do=AGAIN)
        stored = content[place.start : end].reshape(math.prod(place.shape[:-1]), -1)
        value = library.quants.dequantize(stored, kind)
    except (RuntimeError, ValueError):  # a type that is not known, or without a reader
        raise UserError(
            f"{file} holds tensors of type {getattr(kind, 'name', kind)}, which is not read.",
            why=f"{printable(place.name)} is one of them",
            do="a file of F32, F16, BF16, Q8_0, Q4_0 or a K type",
        ) from None
    return np.asarray(value.reshape(place.shape).astype(np.float32))


def _config(fields: JsonObject, file: Path, tensors: Mapping[str, Array]) -> tuple[dict[str, Any], list[str]]:
    """`config.json`, and what of the fields was not used."""
    name = str(fields.get("general.architecture"))
    metadata = GgufFields(file, fields, name)
    kind = "mixtral" if name == "llama" and "expert_count" in metadata else _KINDS.get(name)
    kind = "olmo3" if kind == "olmo2" and metadata.get("attention.sliding_window", int, 0) else kind
    if kind is None:
        known = ", ".join(_KINDS)
        raise UserError(
            f"{file} holds a {printable(name)!r} model.", why=f"of GGUF files {known} are read", do="another file"
        )
    heads = metadata.get("attention.head_count", Whole)
    width = metadata.get("embedding_length", Whole)
    head = metadata.get("attention.key_length", Whole, max(1, width // heads))
    usual = {"attention.head_count_kv": heads}
    config = {
        "architectures": [hf_config.FAMILIES[kind]],
        "model_type": kind,
        **{key: metadata.get(field, Whole, usual.get(field)) for field, key in _WHOLE_FIELDS.items()},
        "head_dim": head,
        "vocab_size": len(GgufFields(file, fields, "tokenizer").get("ggml.tokens", list[str])),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": metadata.get("rope.freq_base", Real, 10_000.0),
        "rms_norm_eps": float(f"{metadata.get('attention.layer_norm_rms_epsilon', Real):.6g}"),
        "hidden_act": "silu",
        **_scaling(metadata),
    }
    config |= _variants(kind, metadata, config, tensors)
    if FREQUENCIES in tensors:
        config["rope_scaling"] = _llama3(tensors[FREQUENCIES], metadata, config, file)
    return config, _rest(metadata, kind, config)


def _rest(metadata: GgufFields, kind: str, config: JsonObject) -> list[str]:
    """Notes on the fields that were not read. Raises UserError for one that changes the meaning of others."""
    period = FAMILIES[kind].period if kind in FAMILIES else 0
    pattern = [(layer + 1) % period > 0 for layer in range(config["num_hidden_layers"])] if period else []
    neutral = {
        **_TABLES["neutral"],
        "rope.dimension_count": (config["head_dim"],),
        "attention.value_length": (config["head_dim"],),
        "attention.sliding_window_pattern": (period, pattern),
    }
    if "attention.sliding_window" not in {key.removeprefix(metadata.prefix) for key in metadata.used}:
        neutral["attention.sliding_window"] = (0,)
    notes = []
    for key, value in metadata.fields.items():
        short = key.removeprefix(metadata.prefix)
        if short == key or key in metadata.used or short in _SAID_OTHERWISE:
            continue
        if short not in neutral:
            notes.append(unused("key", key))
        elif value not in neutral[short]:
            raise UserError(
                f"{metadata.file} says {key} = {printable(value)}.",
                why="this decoder has no such thing",
                do="start from another model",
            )
    return notes


_SAID_OTHERWISE = ("vocab_size", "expert_feed_forward_length", "expert_shared_feed_forward_length")
"""Sizes that tensors have."""
_KINDS = {architecture.name: kind for kind, architecture in ARCHITECTURES.items() if kind not in ("mixtral", "olmo3")}


def _variants(kind: str, metadata: GgufFields, config: JsonObject, tensors: Mapping[str, Array]) -> dict[str, Any]:
    """Experts, windows, scales and caps, biases, and the share of columns that turn."""
    head = config["head_dim"]
    values: dict[str, Any] = {
        "attention_bias": kind not in _QWEN2 and "blk.0.attn_q.bias" in tensors,
        "norm_topk_prob": kind == "qwen3_moe",
    }
    if kind in ("glm4", "phi3"):
        values["partial_rotary_factor"] = metadata.get("rope.dimension_count", Whole, head) / head
    for field, key in ARCHITECTURES[kind].fields.items():
        if key in _STORED_SIZES:
            tensor, dim = _STORED_SIZES[key]
            if tensor not in tensors:
                raise UserError(f"{metadata.file} does not hold {tensor}.", do=AGAIN)
            values[key] = int(tensors[tensor].shape[dim])
        elif kind == "granite" or field.startswith("expert") or field in metadata:
            value = metadata.get(field, int | float)
            values[key] = _short(value) if isinstance(value, float) else value
    if kind == "olmo3":
        values["rope_local_base_freq"] = config["rope_theta"]
    if kind in LARGEST_GEMMA:
        large = config["num_hidden_layers"] == LARGEST_GEMMA[kind]
        values["query_pre_attn_scalar"] = config["hidden_size"] / config["num_attention_heads"] if large else head
    return values


_STORED_SIZES = {
    "moe_intermediate_size": ("blk.0.ffn_up_exps.weight", 1),
    "shared_expert_intermediate_size": ("blk.0.ffn_up_shexp.weight", 0),
}
_QWEN2 = ("qwen2", "qwen2_moe")
"""Kinds that always have biases."""


def _short(value: float) -> float:
    """A float32 as it was before it was rounded."""
    return float(f"{value:.7g}")


def _scaling(metadata: GgufFields) -> dict[str, Any]:
    kind = metadata.get("rope.scaling.type", str, "none")
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": metadata.get("rope.scaling.factor", Real)}
    if (field := "rope.scaling.original_context_length") in metadata:
        scaling["original_max_position_embeddings"] = metadata.get(field, Whole)
    if (field := "attention.temperature_scale") in metadata:
        scaling |= {"llama_4_scaling_beta": _short(metadata.get(field, Real)), "attention_factor": 1.0}
    return {"rope_scaling": scaling}


def _llama3(table: Array, metadata: GgufFields, config: JsonObject, file: Path) -> dict[str, Any]:
    """The options of Llama 3's positions whose factors are `table`; its ramp is a line over turns. Raises UserError."""
    original = metadata.get("rope.scaling.original_context_length", Whole, 8192)
    factor = float(table.max())
    half = len(table)
    turns = original * config["rope_theta"] ** (-np.arange(half) / half) / (2 * np.pi)
    with np.errstate(all="ignore"):
        unstretched = (1 / table.astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    inside = np.flatnonzero((unstretched > 1e-6) & (unstretched < 1 - 1e-6))
    low = 1.0
    high = 4.0
    if len(inside) > 1:
        slope, offset = np.polyfit(turns[inside], unstretched[inside], 1)
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
        return both if ARCHITECTURES[self.kind].permuted else {}

    @property
    def norm_offset(self) -> np.float32:
        """What norms have more in a file."""
        return np.float32(self.kind.startswith("gemma"))

    def split(self, name: str, value: Array, file: Path) -> list[tuple[str, Tensor]]:
        """The tensors, by Hugging Face's names, that are `name` in `file`. Raises UserError for one without a place."""
        if name == FREQUENCIES:
            return []
        parts = name.split(".")
        pattern = _pattern(name)
        theirs = ARCHITECTURES[self.kind].names.get(pattern)
        if theirs is None:
            raise UserError(
                f"{printable(file)} holds the tensor {printable(name)}, which this decoder does not have.",
                do="another model",
            )
        layer = [part for part in parts if part.isdigit()]
        parent = parts[-2]
        if theirs.count("{}") > 1:
            return [(theirs.format(*layer, at), torch.from_numpy(expert.copy())) for at, expert in enumerate(value)]
        if parent in self.permuted:
            value = interleaved(value, self.permuted[parent], back=True)
        if parent.endswith("norm") and self.norm_offset:
            value = value - self.norm_offset
        if pattern == _SHARED_GATE:
            value = value.reshape(1, -1)
        return [(theirs.format(*layer), torch.from_numpy(np.ascontiguousarray(value)))]

    def joined(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """What `split` takes apart, from float32 `tensors` by Hugging Face's names. Raises KeyError for a name without
        a place."""
        ours = {theirs: name for name, theirs in ARCHITECTURES[self.kind].names.items()}
        joined: dict[str, Array] = {}
        stacks: dict[str, list[Array]] = {}
        for theirs, value in tensors.items():
            numbers = [part for part in theirs.split(".") if part.isdigit()]
            name = ours[_pattern(theirs)]
            parent = name.split(".")[-2]
            name = name.format(*numbers[:1])
            if len(numbers) > 1:
                stacks.setdefault(name, []).append(value)
                joined[name] = value  # keeps the place
                continue
            if parent in self.permuted:
                joined[name] = interleaved(value, self.permuted[parent])
            elif parent.endswith("norm") and self.norm_offset:
                joined[name] = value + self.norm_offset
            else:
                joined[name] = value.reshape(-1) if _pattern(name) == _SHARED_GATE else value
        return joined | {name: np.stack(parts) for name, parts in stacks.items()}


def _pattern(name: str) -> str:
    return ".".join("{}" if part.isdigit() else part for part in name.split("."))


def interleaved(weight: Array, heads: int, back: bool = False) -> Array:
    """Rows of queries or keys [heads * size, in] as llama.cpp has them; `back`: as Hugging Face has them."""
    half = weight.shape[0] // heads // 2
    shape = (heads, half, 2, -1) if back else (heads, 2, half, -1)
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


SPECIAL: Mapping[str, str] = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
    "eom": "tokenizer.ggml.eom_token_id",
    "eot": "tokenizer.ggml.eot_token_id",
}
"""Role of a special token to the field that says its id."""
MORE_ENDS = ("eot", "eom")
"""Roles of the tokens, besides eos, that end an answer."""
_ADDS_BOS = ("llama-bpe",)
"""Kinds of splits for which llama.cpp puts the first token before a text where the file does not say."""


def _tokenizer(fields: GgufFields, file: Path) -> dict[str, Any]:
    """Name and content of the files of the tokenizer: that of `file`, or where it is not read the one beside it."""
    tokenizer_file = file.with_name(TOKENIZER)
    model = fields.get("ggml.model", str)
    split = fields.get("ggml.pre", str, "default")
    tokens = fields.get("ggml.tokens", list[str])
    ids: dict[str, int] = {}
    for role, name in SPECIAL.items():
        if name in fields.fields:
            ids[role] = fields.get(name.removeprefix(fields.prefix), Annotated[int, msgspec.Meta(ge=0)])
            if ids[role] >= len(tokens):
                raise UserError(f"{file} says {name} = {ids[role]}, and it has {len(tokens)} tokens.", do=AGAIN)
    stated: dict[str, Any] = {f"{role}_token": tokens[number] for role, number in ids.items() if role not in MORE_ENDS}
    ends = [number for role, number in ids.items() if role in ("eos", *MORE_ENDS)]
    files: dict[str, Any] = {GENERATION: {EOS: ends}} if len(ends) > 1 else {}
    if model == "gpt2" and split in SPLITS:
        files[TOKENIZER] = table = _table(fields, SPLITS[split])
        if "bos_token" in stated and fields.get("ggml.add_bos_token", bool, split in _ADDS_BOS):
            table["post_processor"] = prefix_processor(stated["bos_token"], tokens.index(stated["bos_token"]))
    elif tokenizer_file.is_file():
        files[TOKENIZER] = tokenizer_file.read_bytes()
    else:
        raise UserError(
            f"{file} has a tokenizer of the kind {printable(model)} ({printable(split)}), which is not read.",
            do=f"put the model's tokenizer.json beside it, as {tokenizer_file}",
        )
    if "chat_template" in fields:
        stated["chat_template"] = fields.get("chat_template", str)
    return files | {CONFIG: stated | {"tokenizer_class": "PreTrainedTokenizerFast"}}


def _table(fields: GgufFields, split: dict[str, Any]) -> dict[str, Any]:
    tokens = fields.get("ggml.tokens", list[str])
    kinds = fields.get("ggml.token_type", list[int])
    if len(kinds) != len(tokens):
        raise UserError(f"{fields.file} has {len(tokens)} tokens and {len(kinds)} types of them.", do=AGAIN)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": number, "content": token, "special": kind == 3, **flags}
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (3, 4)  # control, user defined
    ]
    merges = [list(merge.partition(" ")[::2]) for merge in fields.get("ggml.merges", list[str], [])]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": split,
        "decoder": _LEVEL,
        "model": {"type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges},
    }
