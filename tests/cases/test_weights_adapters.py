"""Weights and adapters of other programs: tensors and keys are used, named or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from weight_folders import Nothing, made, quietly

from espalier import recipe as config
from espalier.cli import eval as _eval  # noqa: F401 - loaded once, before programs are forked
from espalier.cli import export, open_run, plan, predict  # noqa: F401
from espalier.cli import train as _train  # noqa: F401
from espalier.language import gpt, hf
from espalier.language.decoder_workload import new_model
from espalier.language.tune import lora, peft
from espalier.recipe.errors import UserError

__all__ = ["quietly"]

# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with a table and a head."""
    folder = tmp_path_factory.mktemp("llama") / "base"
    hf.export(made(depth=2, tied=False), Nothing(), folder)
    return folder


def adapters_of(base: Path, folder: Path, **options: Any) -> Any:
    """Adapters that PEFT makes and saves, with values everywhere."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(whole, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **options)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return model


def read_adapters(base: Path, folder: Path) -> gpt.GPT:
    """Our model with them."""
    model = new_model(hf.options(base), 0, torch.device("cpu"))
    hf.load_into(model, base)
    adapted = lora.adapt(model, peft.with_options(config.Lora(adapter=str(folder)), folder), 1)
    peft.load(adapted, folder)
    return adapted.eval()


TARGETS: dict[str, Any] = {
    "all linear": {"target_modules": "all-linear"},
    "a pattern": {"target_modules": r".*\.(q_proj|down_proj)"},
    "short names": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "full names": {"target_modules": [f"model.layers.{n}.mlp.{one}_proj" for n in range(2) for one in ("up", "down")]},
    "lengths": {"target_modules": "all-linear", "use_dora": True},
    "one rank in a pattern": {
        "target_modules": ["q_proj"],
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"q_proj": 9},
    },
    "begun otherwise": {"target_modules": ["o_proj"], "init_lora_weights": "orthogonal", "lora_dropout": 0.1},
}


@pytest.mark.parametrize("form", TARGETS)
def test_adapters_of_peft_compute_what_they_do_there_however_their_layers_are_named(
    form: str, llama: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    theirs = adapters_of(llama, tmp_path / "adapter", **TARGETS[form])
    ours = read_adapters(llama, tmp_path / "adapter")
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    assert ("lora_dropout" in str(peft.notes(tmp_path / "adapter"))) == ("lora_dropout" in TARGETS[form])


@pytest.mark.parametrize("before", ["base_model.model.", "", "module.base_model.model.", "base_model.model._orig_mod."])
def test_modules_round_others_are_no_part_of_a_tensor_s_name(before: str, llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    adapters_of(llama, tmp_path / "adapter", target_modules=["q_proj"])
    wanted = read_adapters(llama, tmp_path / "adapter").state_dict()
    file = tmp_path / "adapter" / peft.WEIGHTS
    renamed = {
        before + name.removeprefix("base_model.model.").replace(".weight", ".default.weight"): value
        for name, value in load_file(file).items()
    }
    save_file(renamed, file)
    again = read_adapters(llama, tmp_path / "adapter").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "says modules_to_save"),
        ({"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"k_proj": 2}}, "says rank_pattern"),
        ({"target_modules": ["q_proj", "k_proj"], "alpha_pattern": {"k_proj": 2}}, "says alpha_pattern"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, "says layers_to_transform"),
        ({"target_modules": ["q_proj"], "bias": "lora_only"}, "says bias = 'lora_only'"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, "says lora_bias = True"),
        ({"target_modules": ["q_proj"], "init_lora_weights": "olora"}, "says init_lora_weights = 'olora'"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]}, "says trainable_token_indices"),
        ({"target_modules": ["q_proj", "lm_head"]}, "has adapters on 'lm_head'"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "'embed_tokens'"),
        ({"target_modules": r".*layers\.1.*q_proj"}, r"layers\.0\.self_attn\.q_proj\.lora_A\.weight is missing"),
    ],
)
def test_adapters_with_more_than_ours_are_refused_by_the_key_or_the_tensor(
    options: dict[str, Any], words: str, llama: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    adapters_of(llama, tmp_path / "adapter", **options)
    with pytest.raises(UserError, match=words):
        read_adapters(llama, tmp_path / "adapter")


# --- weights ---------------------------------------------------------------------------------------------------------


def theirs_computes(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_that_differs_from_a_tied_table_is_kept_as_its_own(equal: bool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    hf.export(made(tied=True), Nothing(), base)
    tensors = load_file(base / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": table.clone() if equal else -table}, base / "model.safetensors")
    options = hf.options(base)
    assert options.tied == equal
    assert bool(hf.notes(base)) != equal
    model = new_model(options, 0, torch.device("cpu"))
    hf.load_into(model, base)
    hf.export(model.eval(), Nothing(), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == equal
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        logits = model(tokens)
    torch.testing.assert_close(theirs_computes(tmp_path / "out", tokens), logits, rtol=1e-4, atol=1e-5)
    head = load_file(tmp_path / "out" / "model.safetensors").get("lm_head.weight", table)
    assert torch.equal(head, table if equal else -table)


def test_what_of_weights_is_not_used_is_named(tmp_path: Path) -> None:
    base = tmp_path / "base"
    hf.export(made(depth=2).to(torch.bfloat16), Nothing(), base)
    tensors = load_file(base / "model.safetensors")
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(2)}
    save_file(tensors | buffers, base / "model.safetensors")
    (base / "pytorch_model.bin").write_bytes(b"a pickle")
    table = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text("\ufeff" + json.dumps({**table, "attention_dropout": 0.1, "use_cache": True}))
    said = "\n".join(hf.notes(base))
    assert "not used: key 'attention_dropout' (config.json says 0.1)" in said
    assert "not used: tensor 'model.layers.{}.self_attn.rotary_emb.inv_freq' (2 layers)" in said
    assert "not used: file 'pytorch_model.bin'" in said
    assert "stored as BF16 and read as F32" in said
    assert "use_cache" not in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": {"bits": 4}}, "says quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}, "rope_parameters": None}, "longrope"),
        ({"logits_scaling": 8.0}, "says logits_scaling = 8.0"),
        ({"num_hidden_layers": 3}, "it has 2 layers, and its config.json says 3"),
        ({"num_hidden_layers": 1}, "it has 2 layers"),
        ({"num_hidden_layers": 10**9}, "it has 2 layers"),
        ({"hidden_size": 10**9}, "its config.json says"),
        ({"hidden_size": "64"}, "cannot be read: hidden_size = 64"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": float("nan")}}, "rope_theta = nan"),
        ({"num_key_value_heads": 3}, "cannot be read: 2 heads"),
    ],
)
def test_a_config_that_says_something_else_than_the_weights_is_refused(
    change: dict[str, Any], words: str, llama: Path
) -> None:
    table = json.loads((llama / "config.json").read_text())
    try:
        (llama / "config.json").write_text(json.dumps({**table, **change}))
        with pytest.raises(UserError, match=words):
            hf.options(llama)
    finally:
        (llama / "config.json").write_text(json.dumps(table))


@pytest.mark.parametrize("fault", ["missing", "twice", "elsewhere", "both", "integers", "strange"])
def test_shards_and_tensors_that_are_not_as_the_index_says_are_refused(fault: str, llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    half = dict(list(tensors.items())[:5])
    parts = {"a.safetensors": half, "b.safetensors": {k: v for k, v in tensors.items() if k not in half}}
    places = {name: file for file, part in parts.items() for name in part}
    name = next(iter(half))
    if fault == "twice":
        parts["b.safetensors"][name] = half[name].clone()
    if fault == "elsewhere":
        places[name] = "b.safetensors"
    if fault == "integers":
        half[name] = half[name].to(torch.int8)
    if fault == "strange":
        half["model.layers.0.self_attn.q_proj.weight_scale"] = torch.ones(1)
    for file, part in parts.items():
        if fault != "missing" or file == "a.safetensors":
            save_file(part, tmp_path / file)
    if fault == "both":
        save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": places}))
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    words = {
        "missing": "No weights at .*b.safetensors",
        "twice": "is in a.safetensors and b.safetensors",
        "elsewhere": "is in b.safetensors, where it is not",
        "both": "holds weights twice",
        "integers": "is I8, which is not read",
        "strange": "weight_scale is not known",
    }[fault]
    with pytest.raises(UserError, match=words):
        hf.options(tmp_path)
