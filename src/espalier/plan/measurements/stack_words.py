"""Stack words: what a measured row says of the system that ran it, and what its name alone means. No torch.

`executor` names a system and stands for its habits; every habit may be said by itself. A row's `stack` is the name
under which its measurements are compared: a calibration on one stack is worth less on another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from espalier.plan.reference_models import FOREACH, LOSSES
from espalier.plan.request import Kernel, Request
from espalier.recipe import units
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError, nearest

Meanings = Mapping[Any, str]
"""Our word for each of a stack's."""

PRECISIONS: Meanings = {
    **{name: name for name in ("fp16", "bf16", "tf32", "fp32", "fp64")},
    **{"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"},
}
_TABLES = data_table(__file__)


def _spelled(words: Mapping[str, Sequence[str]]) -> Meanings:
    """Our word for each spelling of it."""
    return {spelling: word for word, spellings in words.items() for spelling in spellings}


KERNELS, UPDATES, MEMORIES = (_spelled(_TABLES[name]) for name in ("kernels", "updates", "memories"))
WHOLE = 2**40
"""Bytes of a bucket that holds all gradients."""


class Habits(NamedTuple):
    """How a system trains where a row does not say.

    Attributes:
        sequence_parallel, overlap, bucket, broadcast, slack, stall: as a request's.
        update: how the optimizer moves parameters. gradients: their dtype; None: that of values. states: the dtype of
            weights that the optimizer moves and of its moments. loss: one of `reference_models.LOSSES`, or empty.
        kernels: norms, activations and written scores are kernels of its own, `fused` ones where a SwiGLU keeps its
            inputs and its answer alone; empty: PyTorch's operations. graphs: dense operations are
            issued as CUDA graphs.
        keeps_shards, rotates: as `reference_models.ReferenceDecoder`'s. balances: stages are equal in cost, of which
            the head is a part, not in layers. fsdp: as a request's. flattens: an update copies its
            16-bit gradients to one piece before it casts them (DeepSpeed's and InternEvo's ZeRO).
    """

    overlap: bool = True
    bucket: int | None = None
    update: str = "foreach"
    gradients: str | None = None
    sequence_parallel: bool = True
    broadcast: bool = False
    loss: str = ""
    states: str = "fp32"
    kernels: Literal["", "kernels", "fused"] = ""
    keeps_shards: bool = True
    rotates: bool = False
    balances: bool = False
    fsdp: bool = True
    flattens: bool = False
    graphs: bool = False
    slack: float | None = None
    stall: float = 0.0


EXECUTORS: Mapping[str, Habits] = {name: Habits(**habits) for name, habits in _TABLES["executors"].items()}
SYSTEMS: Meanings = {**{name: name for name in EXECUTORS}, **_TABLES["aliases"]}
UNNAMED = Habits()

FLAGS = ("sequence_parallel", "overlap", "graphs")
KEYS = ("executor", *FLAGS, "bucket", "gradients", "states", "update", "attention", "loss")
"""What a row's `train` may say of its stack."""


@dataclass(frozen=True)
class Practice:
    """How the stack of a row trains: its name or nothing, its attention kernel, and what else it does."""

    executor: str = ""
    kernel: Kernel = "auto"
    habits: Habits = UNNAMED


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
    executor = "" if named is None else meant(f"{where}.executor", named, SYSTEMS)
    stated: dict[str, Any] = {
        key: meant(f"{where}.{key}", words[key], known) for key, known in _WORDS.items() if key in words
    }
    for key in FLAGS:
        if key in words:
            stated[key] = words[key]
            if not isinstance(words[key], bool):
                do = f"{where}.{key} = true or false"
                raise UserError(f"{where}.{key} = {words[key]!r} is not possible.", do=do)
    if "bucket" in words:
        stated["bucket"] = _bucket(words["bucket"], where)
    kernel: Kernel = stated.pop("attention", "auto")
    habits = EXECUTORS.get(executor, UNNAMED)._replace(**stated)
    if kernel == "written" and not habits.kernels and habits.gradients is None:
        habits = habits._replace(gradients="fp32")  # of fp32 weights: autocast
    return Practice(executor, kernel, habits)


_WORDS: Mapping[str, Meanings] = {
    "update": UPDATES,
    "gradients": PRECISIONS,
    "states": {name: meaning for name, meaning in PRECISIONS.items() if meaning in ("fp32", "bf16", "fp16")},
    "attention": KERNELS,
    "loss": {**{name: name for name in LOSSES}, "liger": "fused-chunked"},
}


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
    habits = practice.habits
    storage = request.system.storage
    if storage is not None:
        if request.low and habits.states != "fp32":  # nothing is kept beside the weights
            storage = storage._replace(optimizer=storage.optimizer * 4 / 12)
        if habits.gradients is not None:
            storage = storage._replace(grads=_BYTES[habits.gradients])
        if habits.update == "8bit":  # two moments of one byte, not four
            storage = storage._replace(optimizer=storage.optimizer - 6)
    return request.changed(
        storage=storage,
        temporaries=FOREACH * (habits.update == "foreach") + 2.0 * habits.flattens,
        fsdp=habits.fsdp,
        overlap=habits.overlap,
        bucket="auto" if habits.bucket is None else f"{habits.bucket}B",
        kernel=practice.kernel,
        refresh="broadcast" if habits.broadcast else request.system.refresh,
        slack=habits.slack,
        stall=habits.stall,
        adds=not habits.kernels,
    )


_BYTES = {"fp16": 2, "bf16": 2, "tf32": 4, "fp32": 4, "fp64": 8}
