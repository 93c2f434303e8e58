"""Adapters as PEFT stores them: `adapter_config.json` and `adapter_model.safetensors`, out and in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from espalier import cache_dir
from espalier.config import Adapters
from espalier.errors import UserError
from espalier.language import gpt, hf
from espalier.language.tune import lora
from espalier.language.tune.workload import TuneWorkload
from espalier.workload import Workload

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BEFORE = "base_model.model."
_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector.weight"}


def export(workload: Workload, model: nn.Module, folder: Path) -> str:
    """Writes the adapters of `model`, reloads and compares them. Raises UserError where there are none, or the folder
    cannot be written."""
    assert isinstance(model, gpt.GPT)
    adapted = lora.layers(model)
    if not isinstance(workload, TuneWorkload) or not adapted:
        raise UserError("The run has no adapters.", why='tune.kind = "lora" trains them', do="espalier export --to hf")
    assert isinstance(workload.tune, Adapters)
    tensors = tensors_of(model)

    def fill(partial: Path) -> None:
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(config_of(workload), indent=2) + "\n", encoding="utf-8")
        workload.tokenizer.save(partial)
        again = load_file(partial / WEIGHTS)
        if again.keys() != tensors.keys() or any(not torch.equal(again[name], tensors[name]) for name in tensors):
            raise OSError("the adapters were read back changed")

    cache_dir.export(folder, CONFIG, fill)
    return f"peft.PeftModel.from_pretrained(model, {str(folder)!r}) puts them on the model they were trained with."


def tensors_of(model: gpt.GPT) -> dict[str, Tensor]:
    """The adapters by PEFT's names."""
    found = {}
    for name, layer in lora.layers(model).items():
        theirs = _BEFORE + hf.renamed(f"{name}.weight").removesuffix("weight")
        for ours, part in _PARTS.items():
            value = getattr(layer, ours)
            if value is not None:
                found[theirs + part] = value.detach().cpu().contiguous()
    return found


def config_of(workload: TuneWorkload) -> dict[str, Any]:
    """`adapter_config.json`."""
    tune = workload.tune
    assert isinstance(tune, Adapters)
    names = {hf.renamed(f"blocks.0.{part}.{name}.weight").split(".")[-2] for part, name in _layers(tune)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": workload.recipe.model.initial,  # type: ignore[attr-defined]
        "r": tune.rank,
        "lora_alpha": 2.0 * tune.rank if tune.alpha is None else tune.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(names),
        "use_rslora": tune.rslora,
        "use_dora": tune.dora,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _layers(tune: Adapters) -> list[tuple[str, str]]:
    where = dict.fromkeys(("query", "key", "value", "out"), "attention")
    return [(where.get(name, "feed_forward"), name) for name in tune.targets or lora.TARGETS]


def load(model: gpt.GPT, folder: Path) -> None:
    """Fills the adapters of `model` from a folder of PEFT's. Raises UserError for another base, rank or target."""
    try:
        given = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} holds no adapters: {error}.", do=f"a folder with {CONFIG} and {WEIGHTS}") from None
    wanted = tensors_of(model)
    differing = [
        *(f"{name} is missing" for name in wanted if name not in given),
        *(f"{name} is not known" for name in given if name not in wanted),
        *(
            f"{name} is {list(given[name].shape)}, here {list(wanted[name].shape)}"
            for name in wanted
            if name in given and given[name].shape != wanted[name].shape
        ),
    ]
    if differing:
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise UserError(
            f"The adapters in {folder} do not fit the model.",
            why=differing[0] + more,
            do="model.initial, tune.rank and tune.targets as they were trained",
        )
    with torch.no_grad():
        for name, layer in lora.layers(model).items():
            theirs = _BEFORE + hf.renamed(f"{name}.weight").removesuffix("weight")
            for ours, part in _PARTS.items():
                if (value := getattr(layer, ours)) is not None:
                    value.copy_(given[theirs + part])
