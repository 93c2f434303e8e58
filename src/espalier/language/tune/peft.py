"""Adapters as PEFT stores them: `adapter_config.json` and `adapter_model.safetensors`, out and in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from espalier import cache_dir
from espalier.config import Adapters, Lora
from espalier.errors import UserError
from espalier.language import gpt, hf
from espalier.language.decoder_workload import DecoderWorkload
from espalier.language.tune import lora
from espalier.workload import Workload

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BASE = "base"
"""In the metadata of the weights: `fingerprint` of the model they were trained with."""
_BEFORE = "base_model.model."
_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector.weight"}


def export(workload: Workload, model: nn.Module, folder: Path) -> str:
    """Writes the adapters of `model`, reloads and compares them. Raises UserError where there are none, or the folder
    cannot be written."""
    assert isinstance(model, gpt.GPT)
    adapted = lora.layers(model)
    if not isinstance(workload, DecoderWorkload) or not adapted:
        raise UserError("The run has no adapters.", why='tune.kind = "lora" trains them', do="espalier export --to hf")
    tensors = tensors_of(model)

    def fill(partial: Path) -> None:
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt", _BASE: fingerprint(model)})
        (partial / CONFIG).write_text(json.dumps(config_of(workload), indent=2) + "\n", encoding="utf-8")
        workload.exported_tokenizer.save(partial)
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


def fingerprint(model: gpt.GPT) -> str:
    """Of the model under the adapters: of what is never adapted, its token table and norms, as fp32."""
    digest = xxhash.xxh3_128()
    for name, value in model.named_parameters():
        if name.endswith(("embedding.weight", "norm.weight")):
            digest.update(value.detach().cpu().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def config_of(workload: DecoderWorkload) -> dict[str, Any]:
    """`adapter_config.json`."""
    tune = workload.recipe.tune
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


# --- in ----------------------------------------------------------------------------------------------------------


def with_options(tune: Lora, folder: Path) -> Lora:
    """`tune` with what the adapters in `folder` say of themselves where it leaves that open.

    Raises UserError for a folder of something else, for adapters that we do not have, and for options that contradict.
    """
    table = _config(folder)
    _refuse_foreign(table, folder)
    named = {hf.renamed(f"blocks.0.{part}.{name}.weight").split(".")[-2]: name for part, name in _layers(Lora())}
    targets = table.get("target_modules") or []
    unknown = [one for one in targets if one not in named] if isinstance(targets, list) else [targets]
    if unknown or not targets:
        raise UserError(
            f"{folder}/{CONFIG} has adapters on {unknown[0] if unknown else 'no layer'!r}.",
            why=f"adapters on {', '.join(named)} are read",
            do="adapters of these layers",
        )
    theirs = tuple(name for one, name in named.items() if one in targets)
    found = {
        "rank": table.get("r"),
        "alpha": float(table.get("lora_alpha", 0)),
        "targets": () if len(theirs) == len(named) else theirs,
        "rslora": bool(table.get("use_rslora")),
        "dora": bool(table.get("use_dora")),
    }
    plain = Lora()
    own = {name: getattr(tune, name) for name in found if getattr(tune, name) != getattr(plain, name)}
    differing = [
        f"tune.{name} = {value!r}, but {found[name]!r} there" for name, value in own.items() if value != found[name]
    ]
    if differing:
        raise UserError(
            f"The adapters in {folder} are others than the recipe's.", why="; ".join(differing), do="leave them out"
        )
    return msgspec.structs.replace(tune, **found)


def _config(folder: Path) -> dict[str, Any]:
    try:
        table = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} holds no adapters: {error}.", do=f"tune.adapter = a folder with {CONFIG} and {WEIGHTS}"
        ) from None
    return table if isinstance(table, dict) else {}


def _refuse_foreign(table: dict[str, Any], folder: Path) -> None:
    plain = {
        "peft_type": "LORA",
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "layers_to_transform": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    for name, value in plain.items():
        given = table.get(name) or value
        if given != value:
            raise UserError(
                f"{folder}/{CONFIG} says {name} = {given!r}.", why="plain LoRA adapters are read", do="other adapters"
            )


def load(model: gpt.GPT, folder: Path, initial: str = "the model") -> None:
    """Fills the adapters of `model` from a folder of PEFT's. `initial`: the base of `model`, for messages.

    Raises UserError for another base, rank or target.
    """
    try:
        given = load_file(folder / WEIGHTS)
        with safe_open(folder / WEIGHTS, "pt") as opened:
            base = (opened.metadata() or {}).get(_BASE)
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
    if not differing and base not in (None, fingerprint(model)):
        differing = ["the token table or a norm has other values"]
    if differing:
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        theirs = _config(folder).get("base_model_name_or_path")
        raise UserError(
            f"The adapters in {folder} do not fit {initial}: they were trained on {theirs}.",
            why=differing[0] + more,
            do="model.initial, tune.rank and tune.targets as they were trained",
        )
    with torch.no_grad():
        for name, layer in lora.layers(model).items():
            theirs = _BEFORE + hf.renamed(f"{name}.weight").removesuffix("weight")
            for ours, part in _PARTS.items():
                if (value := getattr(layer, ours)) is not None:
                    value.copy_(given[theirs + part])
