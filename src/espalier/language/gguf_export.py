"""GGUF files out: what llama.cpp and Ollama load. A file is read again, and its logits are compared."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espalier.language import gguf_file, gpt, hf, hf_config
from espalier.language.attention_variants import FAST, SLOW, rates
from espalier.language.decoder_workload import new_model
from espalier.language.gguf_header import Array
from espalier.language.tokenizer import text_of
from espalier.language.tokenizer_files import TOKENIZER
from espalier.recipe import cache_dir
from espalier.recipe.decoder_shapes import DecoderSizes, Rope
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import JsonObject, decoded

_BLOCK = 32
"""Columns that share a scale in Q8_0 and Q4_0."""
_PROBE = 32
"""Tokens whose logits are compared."""


def export(model: gpt.GPT, tokenizer: Any, ends: Sequence[str] | None, target: Path, kind: str) -> float:
    """Writes `model.gguf` of `kind` (F16, Q8_0, Q4_0) and a `Modelfile` into the folder `target`, reads the file again
    and compares its logits. Returns the largest difference from those of `model`.

    `ends`: texts at which the `Modelfile` stops; None: the tokens that end a text.

    Raises UserError for a tokenizer that GGUF cannot hold, a folder of something else or a full disk.
    """
    _refuse_foreign(model.size)
    words = _words(tokenizer)
    wanted = _exported(model, kind)
    differences: list[float] = []

    def fill(partial: Path) -> None:
        _write(partial / "model.gguf", model, words, tokenizer.files.template, wanted)
        differences.append(_compare(partial / "model.gguf", model, wanted))
        texts = [text_of(tokenizer, [number]) for number in tokenizer.ends()] if ends is None else ends
        stops = [f'PARAMETER stop "{text}"\n' for text in texts if text.isprintable()]
        (partial / "Modelfile").write_text("".join(["FROM ./model.gguf\n", *stops]), encoding="utf-8")

    cache_dir.export(target, "model.gguf", fill)
    return differences[0]


def _refuse_foreign(size: DecoderSizes) -> None:
    """What the fields of the architectures that are written cannot say."""
    gemma2 = size.family == "gemma2"
    kind = _kind(size)
    scale = size.head_size if size.attention_scale is None else size.attention_scale**-2
    large = gguf_file.LARGEST_GEMMA.get(kind) == size.layers
    fixed = size.width / size.heads if large else size.head_size
    known_fields = gguf_file.ARCHITECTURES[kind].fields
    foreign = {
        f"this mixture of experts: {hf_config.mixture_refusal(size)}": hf_config.mixture_refusal(size) is not None,
        "weights of experts that are normalized otherwise": size.experts > 1
        and size.normalized == (kind == "qwen2_moe"),
        "a window of attention": size.window is not None and "attention.sliding_window" not in known_fields,
        "a base of positions of its own in some layers": hf.options_of(size).local_theta is not None
        and "rope.freq_base_swa" not in known_fields,
        "blocks without the window of their family": size.blocks.local_positions and size.window is None,
        "caps of scores": [cap is not None for cap in (size.attention_cap, size.logit_cap)] != [gemma2] * 2,
        "a head of its own beside Gemma's blocks": size.blocks.gemma and not size.tied,
        "a head that is the table beside OLMo's blocks": not size.blocks.input_norms and size.tied,
        "heads of a size of their own": size.query_width != size.width and kind in _FIXED_HEADS,
        "biases of attention": size.attention_bias and "blk.{}.attn_q.bias" not in gguf_file.ARCHITECTURES[kind].names,
        "stretched positions of this kind": _stretched_otherwise(size),
        "a scale of attention of its own": abs(scale - fixed) > 1e-3 and kind != "granite",
    }
    for what, there in foreign.items():
        if there:
            known = sorted({architecture.name for architecture in gguf_file.ARCHITECTURES.values()})
            raise UserError(
                f"No GGUF file is written of {what}.",
                why=f"the fields of {', '.join(known)} do not say it",
                do="espalier export --to hf, then llama.cpp's convert_hf_to_gguf.py",
            )


_FIXED_HEADS = ("phi3", "olmo2", "olmo3")
"""Kinds whose heads are width / heads wide."""


def _stretched_otherwise(size: DecoderSizes) -> bool:
    """Whether positions are stretched as no field says."""
    rope = size.rope
    if size.family == "ministral3":  # whose file is always of YaRN, that sharpens nothing
        return rope is None or (rope.kind, rope.attention, rope.high or FAST, rope.low) != ("yarn", 1.0, FAST, SLOW)
    if rope is None or rope.kind == "llama3":
        return rope is not None and architecture(size) != "llama"
    usual = 0.1 * math.log(rope.factor) + 1
    attention = usual if rope.attention is None else rope.attention
    return rope.query != 0 or abs(attention - usual) > 1e-6 or (rope.high or FAST, rope.low) != (FAST, SLOW)


def _kind(size: DecoderSizes) -> str:
    """Hugging Face's name for the kind of decoder whose file is written; Mistral's is Llama's."""
    kind = hf_config.kind_of(size)
    return "llama" if kind == "mistral" else kind


def architecture(size: DecoderSizes) -> str:
    """GGUF's name for a decoder's kind."""
    return gguf_file.ARCHITECTURES[_kind(size)].name


def _order(size: DecoderSizes) -> gguf_file.Order:
    return gguf_file.Order(_kind(size), size.heads, size.kv_heads)


def _exported(model: gpt.GPT, kind: str) -> dict[str, tuple[Array, Any]]:
    """GGUF's name to (the values as stored, their type)."""
    import gguf as library

    size = model.size
    types = library.GGMLQuantizationType
    state = {name: value.float().cpu() for name, value in model.state_dict().items()}
    given = {name: value.numpy() for name, value in hf.to_theirs(state, size).items()}
    arrays = _order(size).joined(given)
    if size.rope is not None and size.rope.kind == "llama3":
        plain, _ = rates(replace(size, rope=None))
        arrays[gguf_file.FREQUENCIES] = (plain / rates(size)[0]).float().numpy()
    exported = {}
    for name, array in arrays.items():
        whole = array.ndim == 1 or name.endswith(gguf_file.WHOLE_FLOATS)
        array_type = types.F32 if whole else types[kind] if array.shape[-1] % _BLOCK == 0 else types.F16
        exported[name] = library.quants.quantize(np.ascontiguousarray(array), array_type), array_type
    return exported


def _words(tokenizer: Any) -> dict[str, Any]:
    """What GGUF says of a byte-level BPE: tokens, types, merges, special tokens, and how text is split."""
    table = json.loads(decoded(tokenizer.files.contents[TOKENIZER], TOKENIZER))
    model = table["model"]
    split = _plain(table.get("pre_tokenizer"))
    known = next((name for name, known in gguf_file.SPLITS.items() if _plain(known) == split), None)
    if not model.get("merges") and model.get("type") == "BPE":
        known = "gpt-2"  # without merges it does not matter where text is split
    if model.get("type") != "BPE" or known is None:
        raise UserError(
            f"GGUF has no name for the tokenizer {tokenizer.name}.",
            why="byte-level BPE is written, split as GPT-2, SmolLM, Llama 3 or Qwen 2 do",
            do="espalier export --to hf, then llama.cpp's convert_hf_to_gguf.py",
        )
    tokens = {number: token for token, number in model["vocab"].items()}
    added = {token["id"]: token for token in table.get("added_tokens", ())}
    tokens |= {number: token["content"] for number, token in added.items()}
    count = max(tokens) + 1
    ids = {text: number for number, text in tokens.items()}
    named = {role.removesuffix("_token"): ids.get(text) for role, text in tokenizer.files.special_tokens.items()}
    stated = {role.removesuffix("_token_id"): number for role, number in tokenizer.token_ids().items()}
    roles = {role: number for role, number in [*stated.items(), *named.items()] if isinstance(number, int)}
    roles.setdefault("eos", tokenizer.boundary)
    others = [number for number in reversed(tokenizer.ends()) if number != roles["eos"]]
    return {
        "tokens": [tokens.get(number, f"[PAD{number}]") for number in range(count)],
        "types": [
            5 if number not in tokens else 1 if number not in added else 3 if added[number]["special"] else 4
            for number in range(count)
        ],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        "split": known,
        "ids": {**roles, **dict(zip(gguf_file.MORE_ENDS, others, strict=False))},
        "adds_bos": tokenizer.adds_boundary,
    }


def _plain(split: Any) -> Any:
    """How text is split, without what is as it is by default."""
    if isinstance(split, dict):
        return {key: _plain(part) for key, part in split.items() if key != "trim_offsets" and part is not None}
    return [*map(_plain, split)] if isinstance(split, list) else split


def _write(
    file: Path,
    model: gpt.GPT,
    words: JsonObject,
    template: str | None,
    tensors: Mapping[str, tuple[Array, Any]],
) -> None:
    import gguf

    size = model.size
    writer = gguf.GGUFWriter(file, architecture(model.size))
    table = hf.config_of(size, {}, "float32")
    for field, key in {**gguf_file.COMMON_FIELDS, **gguf_file.ARCHITECTURES[_kind(size)].fields}.items():
        if (value := table[key]) is not None:
            add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            add(f"{writer.arch}.{field}", value)
    writer.add_rope_dimension_count(size.rotary_columns)
    if size.query_width != size.width or size.blocks.gemma:
        writer.add_key_length(size.head_size)
        writer.add_value_length(size.head_size)
    if size.rope is not None:
        _write_positions(writer, size.rope)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words["split"])
    missing = size.vocabulary - len(words["tokens"])
    writer.add_token_list([*words["tokens"], *(f"[PAD{number}]" for number in range(missing))])
    writer.add_token_types([*words["types"], *[5] * missing])
    writer.add_token_merges(words["merges"])
    for role, key in gguf_file.SPECIAL.items():
        if role in words["ids"]:
            writer.add_uint32(key, words["ids"][role])
    writer.add_add_bos_token(words["adds_bos"])
    if template is not None:
        writer.add_chat_template(template)
    for name, (value, kind) in tensors.items():
        writer.add_tensor(name, value, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_positions(writer: Any, rope: Rope) -> None:
    if rope.kind != "llama3":  # whose rates are a tensor
        writer.add_string(f"{writer.arch}.rope.scaling.type", rope.kind)
        writer.add_rope_scaling_factor(rope.factor)
    if rope.original is not None:
        writer.add_rope_scaling_orig_ctx_len(rope.original)
    if rope.query:
        writer.add_attn_temperature_scale(rope.query)
        writer.add_rope_scaling_yarn_log_mul(1.0)


@torch.no_grad()
def _compare(file: Path, model: gpt.GPT, wanted: Mapping[str, tuple[Array, Any]]) -> float:
    """Reads the file back. Raises OSError where logits are not those of what was written."""
    import gguf as library

    _, tensors = gguf_file.opened(file)
    given = {name: library.quants.dequantize(value, kind) for name, (value, kind) in wanted.items()}
    for name, value in tensors:
        if not np.array_equal(value, given[name].reshape(value.shape)):
            raise OSError(f"{name} was read back changed")
    if {name for name, _ in tensors} != set(wanted):
        raise OSError("the file was read back with other tensors")
    size = model.size
    order = _order(size)
    again = new_model(hf.options_of(size), 0, torch.device("cpu"))
    state: dict[str, torch.Tensor] = {}
    for name, value in tensors:
        for theirs, part in order.split(name, value, file):
            state |= hf.to_ours(theirs, part, size)
    again.load_state_dict(state)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(size.vocabulary, (1, min(_PROBE, size.context)), generator=generator)
    ours, theirs = (logits_of.eval()(tokens).float() for logits_of in (model.to("cpu").float(), again))
    return float((ours - theirs).abs().max())
