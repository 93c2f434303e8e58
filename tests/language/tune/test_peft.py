"""Adapters in PEFT's form: what is written is read again, and PEFT computes with it what we compute."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from espalier import recipe as config
from espalier.language import gpt
from espalier.language.tune import peft
from espalier.language.tune.workload import TuneWorkload
from espalier.recipe.errors import UserError

Opened = Callable[..., TuneWorkload]
KINDS = [
    config.Lora(rank=4),
    config.Lora(rank=3, rslora=True, targets=("query", "down")),
    config.Lora(rank=4, dora=True),
]


def stirred(workload: TuneWorkload, seed: int = 5) -> gpt.GPT:
    model = workload.build(torch.device("cpu"), torch.float32)
    assert isinstance(model, gpt.GPT)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("tune", KINDS)
def test_what_is_written_is_read_again(opened: Opened, tune: config.Lora, tmp_path: Path) -> None:
    workload = opened(tune)
    model = stirred(workload)
    peft.export(workload, model, tmp_path / "out")
    again = stirred(workload, seed=6)
    peft.load(again, tmp_path / "out")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    told = json.loads((tmp_path / "out" / peft.CONFIG).read_text())
    assert (told["r"], told["use_rslora"], told["use_dora"]) == (tune.rank, tune.rslora, tune.dora)
    names = set(load_file(tmp_path / "out" / peft.WEIGHTS))
    assert "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight" in names
    assert all(any(f".{target}." in name for target in told["target_modules"]) for name in names)


@pytest.mark.parametrize("tune", KINDS)
def test_peft_computes_the_same(opened: Opened, tune: config.Lora, base: Path, tmp_path: Path) -> None:
    theirs = pytest.importorskip("peft")
    workload = opened(tune)
    model = stirred(workload)
    peft.export(workload, model, tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        adapted = theirs.PeftModel.from_pretrained(whole, tmp_path / "out").eval()
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), adapted(tokens).logits, rtol=1e-4, atol=1e-5)


def test_adapters_of_another_model_are_refused_by_name(opened: Opened, tmp_path: Path) -> None:
    workload = opened(KINDS[0])
    peft.export(workload, stirred(workload), tmp_path / "out")
    with pytest.raises(UserError, match=r"is \[4, 32\], here \[2, 32\]"):
        peft.load(stirred(opened(config.Lora(rank=2))), tmp_path / "out")
    with pytest.raises(UserError, match="is not known"):
        peft.load(stirred(opened(config.Lora(rank=4, targets=("query",)))), tmp_path / "out")
    with pytest.raises(UserError, match="holds no adapters"):
        peft.load(stirred(workload), tmp_path / "none")


def test_a_recipe_s_open_options_are_those_of_the_adapters_it_goes_on_from(opened: Opened, tmp_path: Path) -> None:
    for tune in KINDS:
        workload = opened(tune)
        model, folder = stirred(workload), tmp_path / str(KINDS.index(tune))
        peft.export(workload, model, folder)
        found = peft.with_options(config.Lora(adapter=str(folder)), folder)
        alpha = 2.0 * tune.rank if tune.alpha is None else tune.alpha
        assert found == msgspec.structs.replace(tune, alpha=alpha, adapter=str(folder))
        again = opened(found).build(torch.device("cpu"), torch.float32)
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    with pytest.raises(UserError, match=r"tune\.rank = 2, but 4 there"):
        peft.with_options(config.Lora(rank=2), tmp_path / "0")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "LOHA"}, "says peft_type = 'LOHA'"),
        ({"modules_to_save": ["lm_head"]}, "says modules_to_save"),
        ({"rank_pattern": {"q_proj": 3}}, "says rank_pattern"),
        ({"target_modules": ["q_proj", "c_attn"]}, "has adapters on 'c_attn'"),
        ({"alpha_pattern": {"q_proj": 3}}, "says alpha_pattern"),
        ({"init_lora_weights": "pissa"}, "says init_lora_weights = 'pissa'"),
        ({"lora_bias": True}, "says lora_bias = True"),
    ],
)
def test_adapters_that_are_not_ours_are_refused_by_name(
    opened: Opened, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    workload = opened(KINDS[0])
    peft.export(workload, stirred(workload), tmp_path / "out")
    file = tmp_path / "out" / peft.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=words):
        peft.with_options(config.Lora(), tmp_path / "out")


def test_adapters_of_another_base_of_the_same_shape_are_refused_by_its_name(opened: Opened, tmp_path: Path) -> None:
    workload = opened(KINDS[0])
    model = stirred(workload)
    peft.export(workload, model, tmp_path / "out")
    with torch.no_grad():
        model.embedding.weight[3, 4] += 1e-3
    with pytest.raises(UserError, match=f"do not fit b: they were trained on {workload.options.initial}"):
        peft.load(model, tmp_path / "out", "b")


@pytest.mark.parametrize(
    ("initial", "named"),
    [
        ("models/base", "models/base"),
        ("hf:ORG/NAME", "ORG/NAME"),
        ("/mnt/huggingface/hub/models--ORG--NAME-2/snapshots/0ab1", "ORG/NAME-2"),
        ("hub/models--gpt2/snapshots/0ab1/model.gguf", "gpt2"),
    ],
)
def test_the_base_is_the_one_that_the_run_began_with(opened: Opened, initial: str, named: str) -> None:
    workload = opened(KINDS[0])
    frozen = TuneWorkload(workload.recipe, workload.chats, initial)
    assert frozen.options.initial != initial
    assert peft.config_of(frozen, [])["base_model_name_or_path"] == named


def test_a_model_without_adapters_has_none_to_write(opened: Opened, tmp_path: Path) -> None:
    workload = opened(config.Full())
    with pytest.raises(UserError, match="no adapters"):
        peft.export(workload, workload.build(torch.device("cpu"), torch.float32), tmp_path / "out")
