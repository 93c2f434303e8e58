"""`config.json` of Hugging Face's decoders, in and out: Llama, Mistral, Qwen 2 and 3, Gemma 1 and 2, Mixtral,
Qwen 2 and 3 MoE.

A setting that is left out has the value that transformers gives it (its configuration classes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from espalier import recipe as config
from espalier.recipe.data_table import data_table
from espalier.recipe.decoder_shapes import DecoderSizes, Rope
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import JsonObject, parsing, printable, unused

CONFIG = "config.json"
_GELU = "gelu_pytorch_tanh"
_TABLES = data_table(__file__)
FAMILIES: Mapping[str, str] = _TABLES["families"]
"""`model_type` and class."""
QWEN_MOE = {"qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}
"""Family to `model_type`."""
_DEFAULTS: Mapping[str, JsonObject] = _TABLES["defaults"]


# --- out ---------------------------------------------------------------------------------------------------------


def table_of(size: DecoderSizes, token_ids: JsonObject, dtype: str) -> dict[str, Any]:
    """`config.json` of a decoder of `size` whose weights are `dtype`. `token_ids`: `bos_token_id` and such."""
    kind = kind_of(size)
    table = {
        "architectures": [FAMILIES[kind]],
        "model_type": kind,
        "hidden_size": size.width,
        "intermediate_size": size.feed_forward,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_size,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": size.context,
        "rms_norm_eps": size.norm_epsilon,
        "rope_theta": size.rope_theta,
        "rope_parameters": _rope_table(size),
        "hidden_act": _GELU if size.gemma else "silu",
        "attention_dropout": 0.0,
        "tie_word_embeddings": size.tied,
        **token_ids,
        "torch_dtype": dtype,
    }
    if kind not in ("qwen2", "mistral", "qwen2_moe"):
        table["attention_bias"] = False
    if kind == "llama":
        table["mlp_bias"] = False
    if kind in ("mistral", "gemma2", "mixtral"):
        table["sliding_window"] = size.window
    if kind in ("qwen2", "qwen3", *QWEN_MOE.values()):
        table["use_sliding_window"] = False
    if size.gemma:
        table["hidden_activation"] = _GELU
    if kind == "gemma2":
        scalar = float(size.head_size) if size.attention_scale is None else round(size.attention_scale**-2, 6)
        kinds = ["sliding_attention", "full_attention"] if size.window else ["full_attention"] * 2
        table |= {
            "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
            "attn_logit_softcapping": size.attention_cap,
            "final_logit_softcapping": size.logit_cap,
            "layer_types": [kinds[layer % 2] for layer in range(size.layers)],
        }
    if kind == "mixtral":
        experts = {"num_local_experts": size.experts, "num_experts_per_tok": size.active}
        table |= experts | {"router_aux_loss_coef": size.balance}
    if kind in QWEN_MOE.values():
        table |= {"shared_expert_intermediate_size": size.shared} if size.shared else {}
        table |= {
            "moe_intermediate_size": size.feed_forward,
            "num_experts": size.experts,
            "num_experts_per_tok": size.active,
            "norm_topk_prob": size.normalized,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": size.balance,
        }
    return table


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
    if size.gemma:
        return f"the family {family} has no mixture"
    if bool(size.shared) != (kind == "qwen2_moe"):
        return f"of the family {family}, {'no' if size.shared else 'each'} mixture has a shared expert"
    return None if size.normalized or kind != "mixtral" else "Mixtral's weights of experts add up to 1"


def _rope_table(size: DecoderSizes) -> dict[str, Any]:
    rope = size.rope
    if rope is None:
        return {"rope_type": "default", "rope_theta": size.rope_theta}
    table = {
        "rope_type": rope.kind,
        "rope_theta": size.rope_theta,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original,
        "attention_factor": rope.attention,
    }
    if rope.kind == "llama3":
        table |= {"low_freq_factor": rope.low, "high_freq_factor": rope.high}
    if rope.kind == "yarn":
        table |= {"beta_slow": rope.low, "beta_fast": rope.high}
    return {name: value for name, value in table.items() if value is not None}


# --- in ----------------------------------------------------------------------------------------------------------


_SCALES = _TABLES["scales"]
_FOREIGN = _TABLES["foreign"]
_OF_GEMMA2 = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")


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
            shared: dict[str, Any] = {
                "depth": _whole(table, "num_hidden_layers"),
                "width": width,
                "heads": heads,
                "kv_heads": kv_heads,
                "feed_forward": _whole(table, "intermediate_size"),
                "vocabulary": _whole(table, "vocab_size"),
                "context": _whole(table, "max_position_embeddings"),
                "tied": bool(table.get("tie_word_embeddings", False)),
                "rope_theta": _typed(
                    Real, "rope_theta", _rope(table).get("rope_theta", table.get("rope_theta", 10_000.0))
                ),
                "norm_epsilon": _typed(Real, "rms_norm_eps", table.get("rms_norm_eps", 1e-6)),
                "rope": _rope_options(table),
                "head_size": head if head * heads != width else None,
            }
            if kind == "mixtral":
                experts = _whole(table, "num_local_experts")
                active = _whole(table, "num_experts_per_tok")
                return config.Moe(**shared, experts=experts, active=active)
            if kind in QWEN_MOE.values():
                shared |= {"feed_forward": _whole(table, "moe_intermediate_size"), "family": kind.removesuffix("_moe")}
                return config.Moe(
                    **shared,
                    experts=_whole(table, "num_local_experts" if table.get("num_local_experts") else "num_experts"),
                    active=_whole(table, "num_experts_per_tok"),
                    normalized=bool(table.get("norm_topk_prob", False)),
                    shared=_whole(table, "shared_expert_intermediate_size") if kind == "qwen2_moe" else 0,
                )
            if kind in ("mistral", "gemma2"):
                kinds = table.get("layer_types") or ["sliding_attention"]
                window = table.get("sliding_window") if "sliding_attention" in kinds else None
                shared["window"] = _typed(Whole | None, "sliding_window", window)
            if kind == "gemma2":
                scalar = _typed(Real, "query_pre_attn_scalar", table["query_pre_attn_scalar"])
                shared["attention_scale"] = None if scalar == head else scalar**-0.5
                caps = {"attention_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}
                shared |= {ours: _typed(Real | None, name, table[name]) for ours, name in caps.items()}
            return config.Gpt(**shared, family=kind)
        except KeyError as missing:
            raise UserError(f"{folder}/{CONFIG} does not say {missing}.") from None


def _rope(table: JsonObject) -> JsonObject:
    return table.get("rope_scaling") or table.get("rope_parameters") or {}  # in this order, as transformers


def _rope_kind(table: JsonObject) -> str:
    return str(_rope(table).get("rope_type", _rope(table).get("type", "default")))


def _rope_options(table: JsonObject) -> Rope | None:
    kind = _rope_kind(table)
    given = _rope(table)
    if kind == "default":
        return None
    low, high = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
    attention = given.get("attention_factor")
    original = given.get("original_max_position_embeddings") or table.get("original_max_position_embeddings")
    return Rope(
        kind=kind,  # type: ignore[arg-type]
        factor=_typed(Real, "factor", given["factor"]),
        original=_typed(Whole | None, "original_max_position_embeddings", original),
        low=float(given.get(low) or 1.0),
        high=None if given.get(high) is None else float(given[high]),
        attention=None if attention is None else float(attention),
    )


def _refuse_foreign(table: JsonObject, kind: str, folder: str) -> None:
    """Settings this decoder does not have."""
    gelu = kind in ("gemma", "gemma2")
    rope = _rope(table)
    acts = {table.get("hidden_activation") or _GELU, _GELU} if gelu else {table.get("hidden_act", "silu"), "silu"}
    types = table.get("layer_types") or []
    alternate = [("sliding_attention", "full_attention")[layer % 2] for layer in range(len(types))]
    same = len(set(types)) < 2 and (kind != "gemma2" or "sliding_attention" not in types)
    refused = {
        "attention_bias": bool(table.get("attention_bias")),
        "mlp_bias": bool(table.get("mlp_bias")),
        "hidden_activation" if gelu else "hidden_act": len(acts) > 1,
        "sliding_window": table.get("sliding_window") is not None and kind in ("llama", "mixtral"),
        "qkv_bias": table.get("qkv_bias") is False,
        "decoder_sparse_step": table.get("decoder_sparse_step", 1) != 1,
        "mlp_only_layers": bool(table.get("mlp_only_layers")),
        "use_sliding_window": bool(table.get("use_sliding_window")),
        "layer_types": not same and (kind != "gemma2" or types != alternate),
        "use_bidirectional_attention": bool(table.get("use_bidirectional_attention")),
        "partial_rotary_factor": rope.get("partial_rotary_factor", table.get("partial_rotary_factor", 1.0)) != 1.0,
        "rope_parameters": _rope_kind(table) not in ("default", "linear", "llama3", "yarn")
        or any(rope.get(name) for name in ("mscale", "mscale_all_dim"))
        or rope.get("truncate") is False
        or (_rope_kind(table) == "default" and rope.get("factor") not in (None, 1)),
        **{name: table.get(name) not in (None, 1) for name in _SCALES},
        **{name: bool(table.get(name)) for name in _FOREIGN if kind != "gemma2" or name not in _OF_GEMMA2},
    }
    for name, foreign in refused.items():
        if foreign:
            value = printable(repr(dict(rope) if name == "rope_parameters" else table.get(name, rope.get(name))))
            why = "this decoder has no such thing"
            raise UserError(f"{folder}/{CONFIG} says {name} = {value}.", why=why, do="start from another model")
