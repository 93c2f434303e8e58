"""Stack words: what a measured row says of the system that ran it, and what its name alone means. No torch.

`executor` names a system and stands for its habits; every habit may be said by itself. A row's `stack` is the name
under which its measurements are compared: a calibration on one stack is worth less on another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from espalier.plan.axes.sharding import StateBytes
from espalier.plan.reference_models import FOREACH, LOSSES
from espalier.plan.request import Kernel, Request
from espalier.recipe import units
from espalier.recipe.errors import UserError, nearest

Meanings = Mapping[Any, str]
"""Our word for each of a stack's."""

PRECISIONS: Meanings = {
    **{name: name for name in ("fp16", "bf16", "tf32", "fp32", "fp64")},
    **{"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"},
}
KERNELS: Meanings = {
    **dict.fromkeys(("flash", "flash-attention", "flash-attn", "flash2", "flash-attention-2", "cudnn"), "flash"),
    **dict.fromkeys(("fused", "sdpa", "te", "transformer-engine"), "auto"),
    **dict.fromkeys(("efficient", "memory-efficient", "cutlass", "xformers"), "efficient"),
    **dict.fromkeys(("written", "unfused", "eager", "math", "core"), "written"),
    "auto": "auto",
}  # fmt: skip
"""Names of attention kernels: `flash`; `efficient`, which writes no scores either; `written`, which does; `auto`, the
best that the device has."""
UPDATES: Meanings = {
    "fused": "fused", "apex": "fused", "foreach": "foreach", "multi-tensor": "foreach", "loop": "loop",
    "for-loop": "loop", "8bit": "8bit", "bitsandbytes": "8bit",
}  # fmt: skip
MEMORIES: Meanings = {
    "allocated": "allocated", "max-allocated": "allocated", "reserved": "reserved", "max-reserved": "reserved",
    "device": "device", "nvidia-smi": "device", "smi": "device",
}  # fmt: skip
WHOLE = 2**40
"""Bytes of a bucket that holds all gradients."""


class Habits(NamedTuple):
    """How a system trains where a row does not say."""

    overlap: bool = True
    bucket: int | None = None
    update: str = "foreach"
    gradients: str | None = None
    sequence_parallel: bool = True
    broadcast: bool = False


EXECUTORS: Mapping[str, Habits] = {
    "megatron-lm": Habits(overlap=False, bucket=WHOLE, update="fused", gradients="fp32"),
    "nemo": Habits(update="fused", gradients="fp32"),
    "megatron-deepspeed": Habits(overlap=False, update="fused", sequence_parallel=False),
    "deepspeed": Habits(update="fused"),
    "ddp": Habits(bucket=25 * 2**20),
    "fsdp": Habits(),
    "torchtitan": Habits(update="fused"),
    "internevo": Habits(update="fused", broadcast=True),
    "espalier": Habits(),
}
ALIASES = {"megatron": "megatron-lm", "megatron-core": "nemo", "fsdp1": "fsdp", "fsdp2": "fsdp", "hybrid": "fsdp",
    "accelerate": "fsdp", "lightning": "fsdp", "internlm": "internevo", "zero": "deepspeed"}  # fmt: skip
UNNAMED = Habits()

KEYS = ("executor", "sequence_parallel", "overlap", "bucket", "gradients", "update", "attention", "loss")
"""What a row's `train` may say of its stack."""


@dataclass(frozen=True)
class Practice:
    """How the stack of a row trains.

    Attributes:
        executor: its name, or empty. sequence_parallel, overlap, bucket, broadcast: as a request's.
        update: how the optimizer moves parameters; None: not said. gradients: their dtype; None: not said.
        kernel: of attention; loss: one of `reference_models.LOSSES`, or empty.
    """

    executor: str = ""
    sequence_parallel: bool = True
    overlap: bool = True
    bucket: int | None = None
    update: str | None = None
    gradients: str | None = None
    kernel: Kernel = "auto"
    loss: str = ""
    broadcast: bool = False


def meant(name: str, value: Any, known: Meanings) -> str:
    """Our word for `value` in any of its spellings. Raises UserError with the nearest."""
    word = value.lower().replace("_", "-").replace(" ", "-") if isinstance(value, str) else value
    if isinstance(word, str | bool) and word in known:
        return known[word]
    ours = list(dict.fromkeys(known.values()))
    near = nearest(str(word), [spelling for spelling in known if isinstance(spelling, str)]) or ours[0]
    raise UserError(f"{name} = {value!r} is not known.", do=f'"{near}"; one of {", ".join(ours)}')


def practice(words: Mapping[str, Any], where: str = "train") -> Practice:
    """What `words` say, completed by the habits of the executor they name. Raises UserError."""
    named = words.get("executor")
    names = {**{name: name for name in EXECUTORS}, **ALIASES}
    executor = "" if named is None else meant(f"{where}.executor", named, names)
    habits = EXECUTORS.get(executor, UNNAMED)

    def flag(key: str, default: bool) -> bool:
        value = words.get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{where}.{key} = {value!r} is not possible.", do=f"{where}.{key} = true or false")
        return value

    def word(key: str, known: Meanings, default: str | None) -> str | None:
        return meant(f"{where}.{key}", words[key], known) if key in words else default

    kernel: Any = word("attention", KERNELS, "auto")
    return Practice(
        executor=executor,
        sequence_parallel=flag("sequence_parallel", habits.sequence_parallel),
        overlap=flag("overlap", habits.overlap),
        bucket=_bucket(words["bucket"], where) if "bucket" in words else habits.bucket,
        update=word("update", UPDATES, habits.update if executor else None),
        gradients=word("gradients", PRECISIONS, habits.gradients),
        kernel=kernel,
        loss=word("loss", {name: name for name in LOSSES}, "") or "",
        broadcast=habits.broadcast,
    )


def _bucket(value: Any, where: str) -> int | None:
    if value == "auto":
        return None
    if value in ("all", "whole"):
        return WHOLE
    if isinstance(value, bool) or not isinstance(value, int | str):
        do = f'{where}.bucket = "25MiB", "whole" or "auto"'
        raise UserError(f"{where}.bucket = {value!r} is not possible.", do=do)
    return units.size(value, f"{where}.bucket") if isinstance(value, str) else max(1, value)


def practised(request: Request, practice: Practice) -> Request:
    """The request as a stack with these habits carries it out."""
    storage, temporaries = request.system.storage, request.system.temporaries
    if storage is not None and practice.gradients is not None:
        storage = storage._replace(grads=_BYTES[practice.gradients])
    if practice.update is not None:
        temporaries = FOREACH if practice.update == "foreach" else 0.0
    if storage is not None and practice.update == "8bit":
        storage = StateBytes(storage.params, storage.grads, storage.optimizer - 6)  # two moments of one byte, not four
    return request.changed(
        storage=storage,
        temporaries=temporaries,
        overlap=practice.overlap,
        bucket="auto" if practice.bucket is None else f"{practice.bucket}B",
        kernel=practice.kernel,
        refresh="broadcast" if practice.broadcast else request.system.refresh,
    )


_BYTES = {"fp16": 2, "bf16": 2, "tf32": 4, "fp32": 4, "fp64": 8}
