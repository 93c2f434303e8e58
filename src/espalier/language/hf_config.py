"""`config.json` of Hugging Face's decoders, in and out (`FAMILIES`).

A setting that is left out has the value that transformers gives it (its configuration classes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from espalier import recipe as config
from espalier.recipe import decoder_shapes
from espalier.recipe.data_table import data_table
from espalier.recipe.decoder_shapes import MIXTURES, DecoderSizes, Rope
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import JsonObject, parsing, printable, unused

CONFIG = "config.json"
_GELU = "gelu_pytorch_tanh"
_TABLES = data_table(__file__)
FAMILIES: Mapping[str, str] = _TABLES["families"]
"""`model_type` and class."""
QWEN_MOE = {"qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}
"""Family to `model_type`."""
DOOR = "train it as a module by its own code (examples/any_hf_model.py), or start from another model"
"""What to do about a model of another kind."""
_DEFAULTS: Mapping[str, JsonObject] = _TABLES["defaults"]


# --- out ---------------------------------------------------------------------------------------------------------


def table_of(size: DecoderSizes, token_ids: JsonObject, dtype: str) -> dict[str, Any]:
    """`config.json` of a decoder of `size` whose weights are `dtype`. `token_ids`: `bos_token_id` and such."""
    kind = kind_of(size)
    table = {
        "architectures": [FAMILIES[kind]],
        "model_type": kind,
        **{theirs: getattr(size, ours) for theirs, ours in _TABLES["sizes"].items()},
        "rope_parameters": _rope_table(size),
        "hidden_act": _GELU if size.blocks.gemma else "silu",
        "attention_dropout": 0.0,
        **token_ids,
        "torch_dtype": dtype,
    }
    more = _variants(size)
    return table | {key: more[key] for key in _TABLES["written"][kind] if key not in table}


def _variants(size: DecoderSizes) -> dict[str, Any]:
    """Settings that some kinds have."""
    scalar = size.head_size if size.attention_scale is None else round(size.attention_scale**-2, 6)
    differs = [size.differs(layer) for layer in range(size.layers)]
    return {
        **_CONSTANTS,
        **{theirs: getattr(size, ours) for theirs, ours in _TABLES["some_sizes"].items()},
        "pad_token_id": None,  # else transformers takes that of the family, which no table of another size has
        "sliding_window": size.window or (size.context if size.blocks.period else None),  # of no layer
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "layer_types": [_KINDS[full or size.window is None] for full in differs],
        "rope_local_base_freq": size.local_theta or size.rope_theta,
        "no_rope_layers": [int(not without) for without in differs],
        "logits_scaling": round(1 / size.logit_scale, 9),
        "attention_multiplier": size.head_size**-0.5 if size.attention_scale is None else size.attention_scale,
    }


def kind_of(size: DecoderSizes | config.Decoder) -> str:
    """The `model_type` of a decoder: mixtures are Mixtral's or Qwen's."""
    if getattr(size, "experts", 1) == 1:
        return size.family
    return QWEN_MOE.get(size.family, "mixtral")


def mixture_refusal(size: DecoderSizes) -> str | None:
    """Why a mixture of `size` has no `model_type`; None: it has one."""
    kind = kind_of(size)
    family = size.family
    if size.experts == 1:
        return None
    if size.bias:
        return "experts are picked with a bias, which no format has: without it other experts would be picked"
    if size.max_iterations is not None:
        return "experts are picked by a search that ends early, which no format has"
    if family not in MIXTURES:
        return f"the family {family} has no mixture"
    if bool(size.shared) != (kind == "qwen2_moe"):
        return f"of the family {family}, {'no' if size.shared else 'each'} mixture has a shared expert"
    return None if size.normalized or kind != "mixtral" else "Mixtral's weights of experts add up to 1"


def _rope_table(size: DecoderSizes) -> dict[str, Any]:
    rope = size.rope
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": size.rope_theta}
    if size.rotary != 1.0:
        table["partial_rotary_factor"] = size.rotary
    if size.family == "ministral3":  # in which both are read whatever the type
        table |= {"original_max_position_embeddings": size.context, "llama_4_scaling_beta": 0.0}
    if rope is not None:
        table |= {
            "rope_type": rope.kind,
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original,
            "attention_factor": rope.attention,
        }
        low, high = _EDGES[rope.kind]
        table |= {low: rope.low, high: rope.high} if low else {}
        table |= {"llama_4_scaling_beta": rope.query} if size.family == "ministral3" else {}
    table = {name: value for name, value in table.items() if value is not None}
    if not size.blocks.local_positions:
        return table
    local = {"rope_type": "default", "rope_theta": size.local_theta or size.rope_theta}
    return {_KINDS[True]: table, _KINDS[False]: local}


# --- in ----------------------------------------------------------------------------------------------------------


_CONSTANTS = _TABLES["constants"]
_SCALES = _TABLES["scales"]
_FOREIGN = _TABLES["foreign"]
_KINDS = {True: "full_attention", False: "sliding_attention"}
"""Of layers, by whether they see all tokens."""
_EDGES = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast"), "linear": ("", "")}
"""What the edges of the ramp of rates are called."""


def unused_keys(table: JsonObject) -> list[str]:
    """Notes on the keys of a `config.json` that are not used; those whose value is empty are left out."""
    return [
        unused("key", name, f"{CONFIG} says {printable(table[name], 60)}")
        for name in sorted(table)
        if table[name] and name not in (*_TABLES["used"], *_SCALES, *_FOREIGN)
    ]


Whole = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Real = Annotated[float, msgspec.Meta(gt=0, lt=1e30)]


def _typed(kind: Any, name: str, value: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name} = {printable(value)} ({error})") from None


def _whole(table: JsonObject, name: str) -> int:
    return int(_typed(Whole, name, table[name]))


def options(table: JsonObject, folder: str) -> config.Decoder:
    """The model options that `table` says, every one of them set; its `model_type` is one of `FAMILIES`.

    Raises UserError naming a setting that this decoder does not have.
    """
    kind = table["model_type"]
    table = {**_DEFAULTS.get(kind, {}), **table}
    with parsing(f"{folder}/{CONFIG}", "download the folder again"):
        try:
            _refuse_foreign(table, kind, folder)
            width = _whole(table, "hidden_size")
            heads = _whole(table, "num_attention_heads")
            head = _whole(table, "head_dim") if table.get("head_dim") else width // heads
            kv_heads = _whole(table, "num_key_value_heads") if table.get("num_key_value_heads") else heads
            if heads % kv_heads or head < 2 or head % 2:
                raise ValueError(f"{heads} heads of {head} columns, {kv_heads} of keys")
            wholes = ("layers", "width", "heads", "feed_forward", "vocabulary", "context")
            given = {ours: theirs for theirs, ours in _TABLES["sizes"].items() if ours in wholes}
            shared: dict[str, Any] = {
                **{ours: _whole(table, theirs) for ours, theirs in given.items()},
                "kv_heads": kv_heads,
                "tied": bool(table.get("tie_word_embeddings", False)),
                "rope_theta": _typed(
                    Real, "rope_theta", _rope(table).get("rope_theta", table.get("rope_theta", 10_000.0))
                ),
                "norm_epsilon": _typed(Real, "rms_norm_eps", table.get("rms_norm_eps", 1e-6)),
                "rope": _rope_options(table),
                "head_size": head if head * heads != width else None,
                "attention_bias": bool(table.get("attention_bias")),
            }
            shared["depth"] = shared.pop("layers")
            return _with_experts(kind, table, shared) or config.Gpt(**_with_variants(kind, table, shared, head))
        except KeyError as missing:
            raise UserError(f"{folder}/{CONFIG} does not say {missing}.") from None


def _with_experts(kind: str, table: JsonObject, shared: dict[str, Any]) -> config.Moe | None:
    """The options of a mixture of experts; None: the kind has none."""
    if "num_experts_per_tok" not in _TABLES["written"][kind]:
        return None
    count = "num_local_experts" if table.get("num_local_experts") else "num_experts"
    shared |= {"experts": _whole(table, count), "active": _whole(table, "num_experts_per_tok")}
    if kind in QWEN_MOE.values():
        shared["feed_forward"] = _whole(table, "moe_intermediate_size")
        shared["normalized"] = bool(table.get("norm_topk_prob", False))
        shared["family"] = kind.removesuffix("_moe")
        shared["shared"] = _whole(table, "shared_expert_intermediate_size") if kind == "qwen2_moe" else 0
    return config.Moe(**shared)


def _with_variants(kind: str, table: JsonObject, shared: dict[str, Any], head: int) -> dict[str, Any]:
    """The options of a dense decoder: windows, periods, positions, scales and caps."""
    written = _TABLES["written"][kind]
    blocks = decoder_shapes.FAMILIES[kind]
    whole = blocks.period > 0 and _sees_all(table, shared["depth"], blocks)
    windowed = "sliding_window" in written and not whole
    window = _typed(Whole | None, "sliding_window", table.get("sliding_window")) if windowed else None
    shared |= {"family": kind, "window": window, **_scales(table, written, head)}
    if blocks.local_positions:
        if windowed and not window:
            raise ValueError("no sliding_window, but layers with one")
        given = _rope(table, _KINDS[False]).get("rope_theta", table["rope_local_base_freq"])
        theta = _typed(Real, "rope_local_base_freq", given)
        shared["local_theta"] = None if theta == shared["rope_theta"] else theta
    if "partial_rotary_factor" in written:
        share = _rope(table).get("partial_rotary_factor", table.get("partial_rotary_factor", 1.0))
        shared["rotary"] = _typed(Annotated[float, msgspec.Meta(gt=0, le=1)], "partial_rotary_factor", share)
        if (columns := int(head * shared["rotary"])) % 2 or not columns:
            raise ValueError(f"partial_rotary_factor = {share} of heads of {head} columns")
    return shared


def _scales(table: JsonObject, written: Sequence[str], head: int) -> dict[str, Any]:
    """What embeddings, answers, scores and logits are multiplied by, and what scores and logits are kept within."""
    given = {
        ours: _typed(Real | None, theirs, table.get(theirs))
        for ours, theirs in _TABLES["scalars"].items()
        if theirs in written
    }
    if "logit_scale" in given:
        given["logit_scale"] = 1 / given["logit_scale"]
    if scalar := given.pop("query_scalar", None):
        given["attention_scale"] = scalar**-0.5
    if given.get("attention_scale") == head**-0.5:
        given["attention_scale"] = None
    return given


def _sees_all(table: JsonObject, depth: int, blocks: decoder_shapes.Blocks) -> bool:
    """Whether all layers are those that see all tokens. Raises ValueError where they are in another order than that of
    the family."""
    given = table.get("no_rope_layers") if blocks.plain_positions else table.get("layer_types")
    interval = table["no_rope_layer_interval" if blocks.plain_positions else "sliding_window_pattern"]
    if given:
        differs = [layer in (0, _KINDS[True]) for layer in given[:depth]]
        if len(differs) != depth:
            raise ValueError(f"{depth} layers, but {len(differs)} kinds of them")
        if all(differs) and not blocks.plain_positions:
            return True
        interval = blocks.period if differs == [(layer + 1) % blocks.period == 0 for layer in range(depth)] else None
    if interval != blocks.period:
        raise ValueError(f"layers of two kinds in another order than one of each {blocks.period}")
    return False


def _rope(table: JsonObject, layers: str = "full_attention") -> JsonObject:
    """What is said of the rotary positions, where it differs of those `layers`; in this order, as transformers."""
    scaling = table.get("rope_scaling") or {}
    given = table.get("rope_parameters") or {}
    if any(name in given for name in _KINDS.values()):
        return (given.get(layers) or {}) | (scaling if layers == _KINDS[True] else {})
    return (scaling or given) if layers == _KINDS[True] else {}


def _rope_kind(table: JsonObject, layers: str = "full_attention") -> str:
    rope = _rope(table, layers)
    return str(rope.get("rope_type", rope.get("type", "default")))


def _rope_options(table: JsonObject) -> Rope | None:
    kind = _rope_kind(table)
    given = _rope(table)
    if kind == "default":
        return None
    original = given.get("original_max_position_embeddings") or table.get("original_max_position_embeddings")
    low, high = _EDGES[kind]
    factor = _typed(Real, "factor", given["factor"])
    attention = given.get("attention_factor")
    sharper = [float(given.get(name) or 0) for name in ("mscale", "mscale_all_dim")]
    if attention is None and all(sharper):
        over, under = (0.1 * scale * math.log(max(factor, 1.0)) + 1 for scale in sharper)
        attention = over / under
    return Rope(
        kind=kind,  # type: ignore[arg-type]
        factor=factor,
        low=float(given.get(low) or 1.0),
        high=None if given.get(high) is None else float(given[high]),
        attention=None if attention is None else float(attention),
        original=_typed(Whole | None, "original_max_position_embeddings", original),
        query=float(given.get("llama_4_scaling_beta") or 0.0),
    )


def _refuse_foreign(table: JsonObject, kind: str, folder: str) -> None:
    """Settings this decoder does not have."""
    written = _TABLES["written"][kind]
    gelu = "hidden_activation" in written
    rope = _rope(table)
    rope_kind = _rope_kind(table)
    acts = {table.get("hidden_activation") or _GELU, _GELU} if gelu else {table.get("hidden_act", "silu"), "silu"}
    types = set(table.get("layer_types") or [])
    known = ("default",) if kind == "phi3" else ("default", "linear", "llama3", "yarn")
    known_keys = set(written) - set(_CONSTANTS)
    refused = {
        "hidden_activation" if gelu else "hidden_act": len(acts) > 1,
        "sliding_window": bool(table.get("sliding_window")) and kind in ("llama", "mixtral"),
        "qkv_bias": table.get("qkv_bias") is False,
        "layer_types": types - set(_KINDS.values()) or (len(types) > 1 and "layer_types" not in written),
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0
        and "partial_rotary_factor" not in known_keys,
        "rope_parameters": rope_kind not in known
        or _rope_kind(table, _KINDS[False]) != "default"
        or rope.get("truncate") is False
        or ("llama_4_scaling_beta" in rope and kind != "ministral3")
        or (rope_kind == "default" and rope.get("factor") not in (None, 1))
        or (rope_kind == "default" and rope.get("llama_4_scaling_beta") not in (None, 0)),
        **{name: table.get(name) not in (None, 1) for name in _SCALES if name not in known_keys},
        **{name: bool(table.get(name)) for name in _FOREIGN if name not in known_keys},
    }
    for name, foreign in refused.items():
        if foreign:
            value = printable(repr(dict(rope) if name == "rope_parameters" else table.get(name, rope.get(name))))
            why = "this decoder has no such thing"
            raise UserError(f"{folder}/{CONFIG} says {name} = {value}.", why=why, do=DOOR)
