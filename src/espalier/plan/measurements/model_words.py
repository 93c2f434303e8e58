"""Model words: the decoder that a measured row describes, and what of it is trained (`model` and `tune`). No torch.

A row's model ran on another system, so that heads need not divide the width and attention may be latent, as Espalier's
own decoders cannot be; keys of the latter are those of a Hugging Face config.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from espalier import recipe as config
from espalier.plan.measurements.row_table import RowTable
from espalier.plan.measurements.stack_words import Meanings, meant
from espalier.plan.reference_models import LatentAttention, LowRank
from espalier.recipe import decoder_shapes, defaults, recipe_file
from espalier.recipe.cost import VALUE_BYTES
from espalier.recipe.decoder_shapes import DecoderSizes
from espalier.recipe.errors import UserError

VOCABULARIES = {True: 32_000, False: 50_257}
"""Tokens of a SwiGLU decoder (Llama 2's) and of one with two matrices (GPT-2's) whose row does not say."""
RECIPE_MODEL = ("kind", *config.Moe.__struct_fields__)
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Columns of latent attention, in the order of `LatentAttention`."""
MODEL_KEYS = (*RECIPE_MODEL, "gated", "fused", "eager", "name", *LATENT)
"""Beyond a recipe's model: SwiGLU or two matrices, attention without written scores, chains of PyTorch operations
instead of fused kernels, what it is called, and latent attention."""
HEADS = ("heads", "kv_heads", "head_size")

TUNE_KEYS = ("kind", "rank", "targets", "frozen", "alpha", "rslora", "dora", "adapter")
TUNINGS: Meanings = {"full": "full", "lora": "lora", "qlora": "lora"}
TARGETS: Meanings = {
    **{name: name for name in ("query", "key", "value", "out", "gate", "up", "down")},
    **{"q-proj": "query", "k-proj": "key", "v-proj": "value", "o-proj": "out"},
    **{"gate-proj": "gate", "up-proj": "up", "down-proj": "down"},
}
FROZEN: Meanings = {
    **{name: name for name in ("fp32", "bf16", "fp16", "int8", "int4")}, "nf4": "int4", "fp4": "int4", "8bit": "int8",
    "4bit": "int4",
}  # fmt: skip
STORED = {**VALUE_BYTES, "int8": 1.0, "int4": 0.5625}
"""Bytes of a frozen parameter: 4 bits have a 32-bit scale for 64 columns."""


@dataclass(frozen=True)
class RowModel:
    """A decoder as its row describes it. `gated`: SwiGLU."""

    size: DecoderSizes
    gated: bool
    latent: LatentAttention | None
    words: RowTable


def row_model(model_words: RowTable, notes: set[str]) -> RowModel:
    """The decoder of a row's `model`; what was assumed goes to `notes`. Raises UserError."""
    words = {key: value for key, value in model_words.items() if key in RECIPE_MODEL}
    if words.get("kind", "gpt") not in ("gpt", "moe"):
        raise UserError(f"model.kind = {words['kind']!r} is not possible.", do='"gpt" or "moe"')
    if "depth" not in words and "shape" not in words:
        raise UserError("model.depth is missing.", do="model.depth, or model.shape")
    width = words.get("width")
    heads = words.get("heads")
    plain = words.get("kv_heads", heads) == heads
    classic = plain and isinstance(width, int) and words.get("feed_forward") == 4 * width
    gated = model_words.flag("gated", not classic)
    if "vocabulary" not in words and "shape" not in words:
        words["vocabulary"] = VOCABULARIES[gated]
        notes.add(f"model.vocabulary is missing: {words['vocabulary']:,} assumed")
    words.setdefault("kind", "moe" if "experts" in words else "gpt")
    has_heads = "heads" in words and "shape" not in words
    words = {key: 1 if has_heads and key in HEADS[:2] else value for key, value in words.items() if key != "head_size"}
    resolved, _ = defaults.resolve(recipe_file.from_table({"model": words}, "the row"))
    assert isinstance(resolved.model, config.Decoder)
    size = decoder_shapes.sizes(resolved.model)
    latent = None
    if any(key in model_words for key in LATENT):
        compressed = model_words.count(LATENT[0]) if LATENT[0] in model_words else 0
        latent = LatentAttention(compressed, *(model_words.count(key) for key in LATENT[1:]))
    return RowModel(_with_heads(size, model_words, has_heads, notes), gated, latent, model_words)


def _with_heads(size: DecoderSizes, words: RowTable, has_heads: bool, notes: set[str]) -> DecoderSizes:
    """The sizes with heads of any number and size. `has_heads`: the row says how many."""
    if has_heads:
        heads = words.count("heads")
        kv_heads = words.count("kv_heads", heads)
        if heads % kv_heads:
            why = f"model.heads = {heads} is not a multiple of it"
            do = f"model.kv_heads = {heads}"
            raise UserError(f"model.kv_heads = {kv_heads} does not divide the heads.", why=why, do=do)
        size = replace(size, heads=heads, kv_heads=kv_heads)
    if "head_size" in words:
        return replace(size, head=words.count("head_size"))
    if size.width % size.heads:
        size = replace(size, head=-(-size.width // size.heads))
        notes.add(f"model.head_size is missing: {size.head} assumed, as {size.heads} heads do not divide {size.width}")
    return size


def low_rank(tune: RowTable, precision: str) -> LowRank | None:
    """The adapters of a row's `tune`; None where all weights are trained. Raises UserError."""
    kind = meant("tune.kind", tune.get("kind", "lora"), TUNINGS) if tune else "full"
    if kind == "full":
        return None
    targets: Any = tune.get("targets", tuple(TARGETS.values())[:7])
    if not isinstance(targets, list | tuple):
        raise UserError(f"tune.targets = {targets!r} is not a list.", do='"targets": ["query", "value"]')
    four_bits = str(tune.get("kind")).lower() == "qlora"
    frozen = meant("tune.frozen", tune.get("frozen", "int4" if four_bits else precision), {**FROZEN, "tf32": "fp32"})
    names = sorted({meant("tune.targets", target, TARGETS) for target in targets})
    return LowRank(tune.count("rank", 16), tuple(names), STORED[frozen])
