"""Logits of every family are transformers' on random weights; an export that is read and exported again is the same."""

from __future__ import annotations

import filecmp
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier import recipe as config
from espalier.language import generate, gpt, hf
from espalier.language.decoder_workload import new_model
from espalier.language.tokenizer import ByteTokenizer
from espalier.language.tune import lora
from espalier.recipe import decoder_shapes
from espalier.recipe.errors import UserError

COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
}  # fmt: skip
THETA = {"rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3 | THETA, "head_dim": 16}),
    "yarn": ("Llama", {"rope_parameters": YARN | THETA}),
    "yarn by hand": ("Llama", {"rope_parameters": YARN | THETA | {"beta_fast": 8.0, "attention_factor": 1.2}}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0} | THETA}),
    "mistral": ("Mistral", {"sliding_window": 11, "head_dim": 8}),
    "mistral whole": ("Mistral", {"sliding_window": None, "head_dim": 8, "rope_parameters": YARN | THETA}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 11, "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0,
         "attn_logit_softcapping": 2.0},
    ),
    "qwen2 moe": (
        "Qwen2Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 40},
    ),
    "qwen2 moe, normalized": (
        "Qwen2Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
         "shared_expert_intermediate_size": 16},
    ),
    "qwen3 moe, not normalized": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "norm_topk_prob": False},
    ),
    "llama with biases": ("Llama", {"attention_bias": True, "head_dim": 16}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3, "logits_scaling": 3.0},
    ),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True, "num_hidden_layers": 5, "pad_token_id": 0}),
    "olmo2": ("Olmo2", {"pad_token_id": 0}),
    "olmo3": (
        "Olmo3",
        {"num_hidden_layers": 4, "sliding_window": 11, "pad_token_id": 0, "eos_token_id": 0,
         "rope_scaling": YARN | {"attention_factor": 1.2}},
    ),
    "phi3": ("Phi3", {"pad_token_id": 0, "eos_token_id": 0}),
    "phi3, partly turned": (
        "Phi3",
        {"sliding_window": 11, "pad_token_id": 0, "eos_token_id": 0, "hidden_size": 48,
         "rope_parameters": THETA | {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "num_hidden_layers": 7, "sliding_window": 11, "query_pre_attn_scalar": 24,
         "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "gemma3 whole": (
        "Gemma3", {"head_dim": 16, "final_logit_softcapping": 3.0, "layer_types": ["full_attention"] * 3},
    ),
    "ministral3": (
        "Ministral3",
        {"head_dim": 16, "pad_token_id": 0,
         "rope_parameters": YARN | THETA
         | {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
    ),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0, "eos_token_id": 0}),
    "glm4 without biases": (
        "Glm4",
        {"head_dim": 16, "pad_token_id": 0, "eos_token_id": 0, "attention_bias": False,
         "rope_parameters": THETA | {"rope_type": "default", "partial_rotary_factor": 0.25}},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "head_dim": 8}),
    "qwen3 moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "norm_topk_prob": True},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(params=list(FAMILIES))
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A model of transformers with weights that are no defaults, in a folder of its own."""
    transformers = pytest.importorskip("transformers")
    name, more = FAMILIES[request.param]
    config_name = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    made = getattr(transformers, config_name)(**{**COMMON, **more}, attn_implementation="eager")
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "theirs")
    return model


def loaded(folder: Path) -> gpt.GPT:
    options = hf.options(folder)
    model = new_model(options, 0, torch.device("cpu"))
    hf.load_into(model, folder)
    return model.eval()


def test_logits_are_those_of_transformers_and_an_export_is_read_and_written_again_unchanged(
    theirs: Any, tmp_path: Path
) -> None:
    ours = loaded(tmp_path / "theirs")
    tokens = torch.randint(256, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = theirs(tokens).logits
        assert wanted.std() > 0.1
        torch.testing.assert_close(ours(tokens), wanted, rtol=0, atol=1e-5)
    ids = tokens[0, :30].tolist()
    made = list(generate.generate(ours, ids, tokens=12))
    with torch.no_grad():
        for number, token in enumerate(made):
            assert int(ours(torch.tensor([ids + made[:number]]))[0, -1].argmax()) == token  # with a cache and without

    hf.export(ours, ByteTokenizer(), tmp_path / "one")
    again = loaded(tmp_path / "one")
    hf.export(again, ByteTokenizer(), tmp_path / "two")
    names = [file.name for file in (tmp_path / "one").iterdir()]
    assert {"config.json", "model.safetensors"} <= set(names)
    assert filecmp.cmpfiles(tmp_path / "one", tmp_path / "two", names, shallow=False)[0] == names

    import transformers

    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one", attn_implementation="eager")
    assert type(back) is type(theirs)
    assert hf.options(tmp_path / "one") == hf.options(tmp_path / "theirs")
    with torch.no_grad():
        torch.testing.assert_close(back.eval()(tokens).logits, wanted, rtol=1e-5, atol=1e-5)


def test_adapters_and_parameter_counts_hold_for_every_family(theirs: Any, tmp_path: Path) -> None:
    ours = loaded(tmp_path / "theirs")
    options = hf.options(tmp_path / "theirs")
    assert decoder_shapes.parameter_count(options) == sum(one.numel() for one in ours.parameters())
    tokens = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = ours(tokens)
        adapted = lora.adapt(ours, config.Lora(rank=2), 1)
        assert torch.equal(adapted(tokens), before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}}, "longrope"),
        ({"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_parameters"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0"),
        ({"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma3_text", "sliding_window": None}, "no sliding_window"),
        (
            {"model_type": "olmo3", "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
            "in another order than one of each 4",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 1]}, "in another order"),
        ({"model_type": "smollm3", "no_rope_layers": [0, 1]}, "3 layers, but 2 kinds"),
        ({"model_type": "glm4", "partial_rotary_factor": 0.01}, "partial_rotary_factor = 0.01"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2}}, "rope_parameters"),
        ({"sliding_window": 8}, "sliding_window = 8"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "qwen2_moe", "qkv_bias": False}, "qkv_bias = False"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": True, "decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": True, "mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window = True"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
)
def test_what_this_decoder_does_not_have_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **COMMON, **change}))
    with pytest.raises(UserError, match=words):
        hf.options(tmp_path)


def test_an_architecture_that_this_decoder_does_not_express_is_refused_by_its_module(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(made).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"holds a 'gpt2' model") as told:
        hf.options(tmp_path)
    assert "transformer.h.0.attn.c_attn is no module of this decoder" in str(told.value)
