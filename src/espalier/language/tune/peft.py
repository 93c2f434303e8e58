"""Adapters as PEFT stores them: `adapter_config.json` and `adapter_model.safetensors`, out and in."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from espalier.checkpoint import weight_files
from espalier.checkpoint.weight_files import StoredTensor
from espalier.language import gpt, hf, hf_config
from espalier.language.decoder_workload import DecoderWorkload
from espalier.language.tune import lora
from espalier.recipe import Adapters, Lora, cache_dir, serialization
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import JsonObject, parsing, printable, read_table, unused

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_BASE = "base"
"""In the metadata of the weights: `fingerprint` of the model they were trained with."""
_MERGED = "espalier export --to hf, with the adapters merged"
_BEFORE = "base_model.model."
_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector.weight"}


def export(workload: DecoderWorkload, model: gpt.GPT, folder: Path) -> str:
    """Writes the adapters of `model`, reloads and compares them. Raises UserError where there are none, or the folder
    cannot be written."""
    adapted = lora.layers(model)
    if not adapted:
        raise UserError("The run has no adapters.", why='tune.kind = "lora" trains them', do="espalier export --to hf")
    tensors = tensors_of(model)

    def fill(partial: Path) -> None:
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt", _BASE: fingerprint(model)})
        serialization.sort_metadata(partial / WEIGHTS)
        hf.write_json(partial / CONFIG, config_of(workload, tensors))
        workload.exported_tokenizer.save(partial)
        weight_files.refuse_changed([partial / WEIGHTS], tensors)

    cache_dir.export(folder, CONFIG, fill)
    return f"peft.PeftModel.from_pretrained(model, {str(folder)!r}) puts them on the model they were trained with."


def tensors_of(model: gpt.GPT) -> dict[str, Tensor]:
    """The adapters by PEFT's names."""
    return {name: value.detach().cpu().contiguous() for name, value in _places(model).items()}


def _places(model: gpt.GPT) -> dict[str, Tensor]:
    """The parameters of the adapters by PEFT's names."""
    kind = hf_config.kind_of(model.size)
    if kind in hf.FUSED:
        raise UserError(
            f"PEFT has no adapters of {kind}'s matrices as they are trained here.",
            why="its folders join query, key and value, or gate and up, in one matrix",
            do=_MERGED,
        )
    places: dict[str, Tensor] = {}
    for name, layer in lora.layers(model).items():
        theirs = _BEFORE + hf.renamed(f"{name}.weight", kind).removesuffix("weight")
        parts = {part: getattr(layer, ours) for ours, part in _PARTS.items()}
        places |= {theirs + part: value for part, value in parts.items() if value is not None}
    return places


def fingerprint(model: gpt.GPT) -> str:
    """Of the model under the adapters: of what is never adapted, its token table and norms, as fp32."""
    digest = xxhash.xxh3_128()
    for name, value in model.named_parameters():
        if name.endswith(("embedding.weight", "norm.weight")):
            digest.update(value.detach().cpu().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def config_of(workload: DecoderWorkload, tensors: Iterable[str]) -> dict[str, Any]:
    """`adapter_config.json` of adapters whose `tensors` have these names."""
    tune = workload.recipe.tune
    assert isinstance(tune, Adapters)
    model: Any = workload.recipe.model
    if model.layers is not None:
        raise UserError(f"Adapters of the {model.layers} layers do not fit the whole {model.initial}.", do=_MERGED)
    base = workload.initial or ""
    revision = ""
    if base.startswith(hf.HUB):
        base, _, revision = base.removeprefix(hf.HUB).partition("@")
    cached = re.search(r"/models--([^/]+)/snapshots/", base)
    names = {name.split(".")[-3] for name in tensors if name.endswith(_PARTS["lora_a"])}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": (cached[1].replace("--", "/") if cached else base) or None,
        "revision": revision or None,
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


# --- in ----------------------------------------------------------------------------------------------------------


class _Adapters(NamedTuple):
    """What the `CONFIG` of a folder says, and its tensors by the names that they have without wrappers, each with its
    stored name."""

    folder: Path
    table: JsonObject
    tensors: Mapping[str, tuple[str, StoredTensor]]

    @property
    def modules(self) -> dict[str, int]:
        """Module that has adapters to their rank."""
        end = "." + _PARTS["lora_a"]
        return {
            name.removesuffix(end): place.shape[0] for name, (_, place) in self.tensors.items() if name.endswith(end)
        }


_TABLES = data_table(__file__)
_STORED = re.compile(r"(.*)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.(?!weight$)[^.]+)?(?:\.weight)?")
_TARGETS = _TABLES["targets"]
_DEFAULTS = {"r": 8, "lora_alpha": 8}
_NEUTRAL = _TABLES["neutral"]
_MERGE = "other adapters, or merge these with PEFT (merge_and_unload) and start from the merged model"


def with_options(tune: Lora, folder: Path) -> Lora:
    """`tune` with what the adapters in `folder` say of themselves where it leaves that open.

    Raises UserError for a folder of something else, for adapters that we do not have, and for options that contradict.
    """
    adapters = _opened(folder)
    parts = {name.rpartition(".")[2] for name in adapters.modules}
    theirs = {_TARGETS.get(part, part) for part in parts}
    targets = tuple(name for name in lora.TARGETS if name in theirs)
    _refuse_targets(adapters, theirs - {*lora.TARGETS})
    rank, alpha = _rank_and_alpha(adapters)
    options = {
        "rank": rank,
        "alpha": alpha,
        "targets": () if len(targets) == len(lora.TARGETS) else targets,
        "rslora": bool(adapters.table.get("use_rslora")),
        "dora": bool(adapters.table.get("use_dora")),
    }
    plain = Lora()
    differing = [
        f"tune.{name} = {getattr(tune, name)!r}, but {value!r} there"
        for name, value in options.items()
        if getattr(tune, name) not in (value, getattr(plain, name))
    ]
    if differing:
        raise UserError(
            f"The adapters in {folder} are others than the recipe's.", why="; ".join(differing), do="leave them out"
        )
    return tune.changed(**options)


def notes(folder: Path) -> list[str]:
    """What of adapters is not used, or read as something else."""
    adapters = _opened(folder)
    sentences = [
        unused("key", name, f"{CONFIG} says {printable(value, 60)}")
        for name, value in sorted(adapters.table.items())
        if value and name not in _TABLES["read"] and name not in _NEUTRAL
    ]
    types = sorted({place.dtype for _, place in adapters.tensors.values()} - {"F32"})
    return sentences + ([f"the adapters in {folder} are stored as {', '.join(types)} and read as F32"] if types else [])


def _opened(folder: Path) -> _Adapters:
    """Raises UserError for a folder of something else, and naming the first key or tensor that is not ours."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} holds no adapters: {name} is missing.",
                do=f"tune.adapter = a folder with {CONFIG} and {WEIGHTS}",
            )
    table = read_table(folder / CONFIG, "adapters of PEFT")
    for name, neutral in _NEUTRAL.items():
        value = table.get(name)
        if value and value not in neutral:
            raise UserError(
                f"{folder}/{CONFIG} says {name} = {printable(repr(value))}.",
                why="plain LoRA adapters are read",
                do=_MERGE,
            )
    stored = weight_files.stored([folder / WEIGHTS])
    tensors = {_unwrapped(name): (name, place) for name, place in stored.items()}
    if len(tensors) < len(stored):
        raise UserError(f"{folder} holds tensors twice: those of two adapters.", do="save one of them alone")
    if strange := [name for name, place in stored.items() if place.dtype not in hf.DTYPES or not place.shape]:
        raise UserError(f"{folder}: {printable(strange[0])} is no weight of fp32, fp16 or bf16.", do=_MERGE)
    return _Adapters(folder, table, tensors)


def _unwrapped(name: str) -> str:
    """A tensor's name as the decoder has it, without the modules round it and without the name of the adapter."""
    match = _STORED.fullmatch(name)
    if match is None:
        return name
    parts = match[1].split(".")
    start = parts.index("layers") if "layers" in parts else len(parts)
    if start == len(parts) or {*parts[:start]} - {*_TABLES["wrappers"]}:
        return f"{match[1]}.{match[2]}.weight"
    return ".".join(["model", *(part for part in parts[start:] if part not in _TABLES["wrappers"]), match[2], "weight"])


def _refuse_targets(adapters: _Adapters, unknown: set[str]) -> None:
    """Raises UserError for adapters on what is no linear layer of a block, and for targets without adapters."""
    named = adapters.table.get("target_modules")
    modules = [f".{module}" for module in adapters.modules]
    listed = [str(name) for name in named] if isinstance(named, list) else []
    idle = {
        name
        for name in listed
        if not any(f".{name}".endswith(module) or module.endswith(f".{name}") for module in modules)
    }
    if unknown or idle or not modules:
        raise UserError(
            f"{adapters.folder}/{CONFIG} has adapters on {printable(min(unknown or idle, default='no layer'))!r}.",
            why=f"adapters on {', '.join(_TARGETS)} are read, each of which has to have tensors",
            do="adapters of these layers",
        )


def _rank_and_alpha(adapters: _Adapters) -> tuple[int, float]:
    """The rank of all adapters and the alpha that scales them. Raises UserError where they differ."""
    table = _DEFAULTS | {name: value for name, value in adapters.table.items() if value}
    with parsing(adapters.folder / CONFIG, "adapters of PEFT"):
        forms = {
            (
                rank,
                int(_of_module(table, "rank_pattern", "r", module)),
                float(_of_module(table, "alpha_pattern", "lora_alpha", module)),
            )
            for module, rank in adapters.modules.items()
        }
        rank, wording, alpha = min(forms)
        if len(forms) > 1 or rank != wording or not math.isfinite(alpha):
            key = next((name for name in ("rank_pattern", "alpha_pattern") if name in table), "r")
            raise UserError(
                f"{adapters.folder}/{CONFIG} says {key} = {printable(table[key])}.",
                why=f"adapters of one rank and one scale are read, and the tensors have rank {rank}",
                do=_MERGE,
            )
    return rank, alpha


def _of_module(table: JsonObject, patterns: str, otherwise: str, module: str) -> Any:
    """What one of two keys says of a module, as PEFT matches it."""
    matching = (value for key, value in table.get(patterns, {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(matching, table[otherwise])


def load(model: gpt.GPT, folder: Path, initial: str = "the model") -> None:
    """Fills the adapters of `model` from a folder of PEFT's. `initial`: the base of `model`, for messages.

    Raises UserError for another base, rank or target.
    """
    adapters = _opened(folder)
    wanted = {_unwrapped(name): value for name, value in _places(model).items()}
    given = {name: place for name, (_, place) in adapters.tensors.items()}
    differing = [*hf.differences(given, {name: tuple(value.shape) for name, value in wanted.items()}, "here")]
    with weight_files.opened(folder / WEIGHTS) as content:
        base = (content.metadata() or {}).get(_BASE)
        if not differing and base not in (None, fingerprint(model)):
            differing = ["the token table or a norm has other values"]
        if differing:
            more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
            theirs = printable(adapters.table.get("base_model_name_or_path"))
            raise UserError(
                f"The adapters in {folder} do not fit {initial}: they were trained on {theirs}.",
                why=differing[0] + more,
                do="model.initial, tune.rank and tune.targets as they were trained",
            )
        with torch.no_grad():
            for name, value in wanted.items():
                value.copy_(content.get_tensor(adapters.tensors[name][0]))
