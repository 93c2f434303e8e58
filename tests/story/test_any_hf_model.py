"""The example for families that `model.initial` does not read: trained on ranks with shards, exported, loaded again."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import MACHINE, forked

import espalier
from espalier.language import hf
from espalier.language.tokenizer import ByteTokenizer
from espalier.recipe.errors import UserError

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 0,
    "bos_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "GptOss": {
        "num_local_experts": 4, "sliding_window": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "Qwen3Next": {
        "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
COMPOSITE: dict[str, dict[str, Any]] = {
    "Gemma3": {"text_config": SIZE, "vision_config": VISION, "mm_tokens_per_image": 4},
    "Mistral3": {
        "text_config": {**SIZE, "model_type": "mistral"},
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8},
    },
}
"""Models that see pictures too, whose text part is trained."""


@pytest.mark.parametrize(
    ("family", "ranks", "rank"),
    [
        ("GptOss", 1, 2),
        pytest.param("Qwen3Next", 2, 2, marks=pytest.mark.slow),
        pytest.param("GptOss", 2, 0, marks=pytest.mark.slow),
        pytest.param("Gemma3", 1, 0, marks=pytest.mark.slow),
        pytest.param("Mistral3", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_a_family_that_is_not_read_is_trained_by_its_own_code(
    family: str, ranks: int, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}Config")(**(COMPOSITE.get(family) or {**SIZE, **FAMILIES[family]}))
    kind = "ForConditionalGeneration" if family in COMPOSITE else "ForCausalLM"
    base = getattr(transformers, f"{family}{kind}")(made).eval()
    base.save_pretrained(tmp_path / "base")
    ByteTokenizer().save(tmp_path / "base")
    with pytest.raises(UserError, match=r"any_hf_model\.py"):
        hf.options(tmp_path / "base")

    for name in ("any_hf_model.py", "any_hf_model.toml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    (tmp_path / "text.txt").write_text("a few words of text, again and again. " * 60)
    (tmp_path / "machine.toml").write_text(MACHINE)
    arguments = f'{{ name = "{tmp_path / "base"}", text = "{tmp_path / "text.txt"}", length = 32, rank = {rank} }}'
    run = (
        f"model.arguments={arguments}", "train.steps=3", "train.validate_tokens=32", "plan.cluster=machine.toml",
        "plan.trial=false", f"plan.pin.ranks={ranks}", f"plan.pin.shard.params={ranks}", "--run", "run",
        "train.optimizer.learning_rate=0.01",
    )  # fmt: skip
    done = forked(tmp_path, "train", "any_hf_model.toml", *run)
    assert done.returncode == 0, done.stdout + done.stderr

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where the key of the run is
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    import any_hf_model

    any_hf_model.export(tmp_path / "run", tmp_path / "exported")
    again = type(base).from_pretrained(tmp_path / "exported").eval()
    assert {*again.state_dict()} == {*base.state_dict()}
    sees = {name: value for name, value in base.state_dict().items() if "vision" in name or "multi_modal" in name}
    assert bool(sees) == (family in COMPOSITE)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in sees.items())
    tokens = torch.randint(256, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        trained = espalier.open(tmp_path / "run").model()(input_ids=tokens).logits.cpu()
        torch.testing.assert_close(again(tokens).logits, trained, rtol=0, atol=1e-4)
        assert float((trained - base(tokens).logits).abs().max()) > 1e-3
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert theirs("text").input_ids == transformers.AutoTokenizer.from_pretrained(tmp_path / "base")("text").input_ids
