"""What a `config.json` says and leaves out is taken as transformers takes it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from espalier.language import hf_config
from espalier.recipe.errors import UserError

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DEFAULT = {"rope_type": "default", "rope_theta": 7.0}
CONFIGS = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "mixtral": "MixtralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma": "GemmaConfig",
    "gemma2": "Gemma2Config",
    "qwen2_moe": "Qwen2MoeConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "gemma3_text": "Gemma3TextConfig",
    "ministral3": "Ministral3Config",
    "phi3": "Phi3Config",
    "granite": "GraniteConfig",
    "smollm3": "SmolLM3Config",
    "olmo2": "Olmo2Config",
    "olmo3": "Olmo3Config",
    "glm4": "Glm4Config",
}


def transformers_config(kind: str, table: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, CONFIGS[kind])(**table)


@pytest.mark.parametrize("kind", CONFIGS)
def test_keys_that_a_config_leaves_out_are_those_of_transformers(kind: str) -> None:
    theirs = transformers_config(kind, SIZES)
    ours = hf_config.options({"model_type": kind, **SIZES}, "a")
    rope = theirs.rope_parameters
    full = rope.get("full_attention", rope)
    assert ours.rope_theta == full["rope_theta"]
    assert (ours.local_theta or ours.rope_theta) == rope.get("sliding_attention", full)["rope_theta"]
    assert ours.rotary == full.get("partial_rotary_factor", 1.0)
    biased = getattr(theirs, "attention_bias", False)
    assert ours.attention_bias == biased
    assert ours.window == (getattr(theirs, "sliding_window", None) if kind not in ("qwen2", "qwen2_moe") else None)
    assert ours.norm_epsilon == theirs.rms_norm_eps
    assert ours.tied == theirs.tie_word_embeddings
    assert getattr(ours, "experts", None) == getattr(theirs, "num_local_experts", getattr(theirs, "num_experts", None))
    assert getattr(ours, "active", None) == getattr(theirs, "num_experts_per_tok", None)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": LLAMA3, "rope_parameters": DEFAULT},
        {"rope_scaling": LLAMA3, "rope_theta": 5.0},
        {"rope_parameters": DEFAULT, "rope_theta": 5.0},
        {"rope_scaling": None, "rope_theta": 5.0},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": DEFAULT},
    ],
)
def test_of_two_keys_on_positions_the_one_counts_that_transformers_takes(rope: dict[str, Any]) -> None:
    ours = hf_config.options({"model_type": "llama", **SIZES, **rope}, "a")
    copied = {key: dict(value) if isinstance(value, dict) else value for key, value in rope.items()}
    theirs = transformers_config("llama", {**SIZES, **copied}).rope_parameters
    assert ours.rope_theta == theirs["rope_theta"]
    assert (ours.rope.kind if ours.rope else "default") == theirs["rope_type"]
    assert (ours.rope.factor if ours.rope else None) == theirs.get("factor")


def test_a_factor_of_positions_without_its_kind_is_refused() -> None:
    with pytest.raises(UserError, match="rope_parameters"):
        hf_config.options({"model_type": "llama", **SIZES, "rope_scaling": {"factor": 4.0}}, "a")
