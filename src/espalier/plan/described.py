"""Measured runs in words: the `model`, `cluster`, `layout`, `train` and `measured` of one JSON line. No torch.

The words are those of a recipe, a cluster file and a plan's `layout`. What is absent is derived; what is misspelled or
impossible is refused by name; what is not known here is left out and said in `notes`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import tomli_w

from espalier import cluster as clusters
from espalier import config
from espalier.cluster import Cluster
from espalier.config import derive, load, shapes
from espalier.config.shapes import Sizes
from espalier.errors import UserError, nearest
from espalier.plan import degrees, speed
from espalier.plan.calibrate import Measurement
from espalier.plan.degrees import Words, count, flag
from espalier.plan.layouts import Layouts
from espalier.plan.published import DOUBLE, MEGATRON, MIXED, Decoder
from espalier.plan.request import Request

PRECISIONS = ("fp16", "bf16", "fp32", "fp64")
OTHER_PRECISIONS = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
OPTIMIZERS = ("adamw", "muon")
VOCABULARIES = {True: 32_000, False: 50_257}
"""Tokens of a SwiGLU decoder (Llama 2's) and of one with two matrices (GPT-2's) whose row does not say."""

_MODEL = ("kind", *config.Moe.__struct_fields__)
_OWN = ("gated", "fused", "eager", "name")
"""What a row may say of a model beyond a recipe: SwiGLU or two matrices, attention without written scores, chains of
PyTorch operations instead of fused kernels, and what it is called."""
_TRAIN = (*config.Train.__struct_fields__, "attention")
_ROW = ("model", "cluster", "layout", "train", "measured")
_MEASURED = ("step_seconds", "peak_gib", "out_of_memory")


@dataclass(frozen=True)
class _Model:
    """A decoder as its row describes it, and what the row leaves open about its system."""

    size: Sizes
    gated: bool
    said: Words


class Descriptions:
    """Turns rows into measurements. Has state: what rows had in common, so that equal rows share one request and one
    cluster, and what was assumed on the way."""

    def __init__(self) -> None:
        self.notes: set[str] = set()
        self._models: dict[bytes, _Model] = {}
        self._clusters: dict[bytes, Cluster] = {}
        self._requests: dict[tuple[Hashable, ...], Request] = {}

    def measurement(self, row: Words, label: str) -> tuple[Measurement, tuple[Hashable, ...]]:
        """What a row measured, and the group in which its time can be compared. Raises UserError."""
        degrees.refuse_misspelled(set(), row, _ROW, "row")
        table = {name: _table(row, name) for name in _ROW}
        degrees.refuse_misspelled(self.notes, table["train"], _TRAIN, "train")
        model_text, cluster_text = _text(table["model"]), _text(table["cluster"])
        model = self._models.get(model_text) or self._models.setdefault(model_text, self._model(table["model"]))
        cluster = self._clusters.get(cluster_text) or self._clusters.setdefault(
            cluster_text, self._cluster(table["cluster"])
        )
        sequence = self._sequence(table["train"], model)
        layouts, samples = degrees.read(table["layout"], _batch(table["train"], sequence), cluster, self.notes)
        precision = self._precision(table["layout"].get("precision", table["train"].get("precision")), cluster)
        layouts = _recomputed(layouts, table["layout"], table["train"])
        _possible(model, cluster, layouts, precision)
        megatron = layouts.tp * layouts.pp > 1 and layouts.params == 1 and precision in ("fp16", "bf16")
        key = (model_text, samples, sequence, precision, megatron, *_system(table["train"], model))
        request = self._requests.get(key) or self._requests.setdefault(
            key, _request(model, samples, sequence, precision, table["train"])
        )
        if megatron and request.storage == MIXED:
            request = self._requests[key] = replace(request, storage=MEGATRON)
        degrees.refuse_misspelled(self.notes, table["measured"], _MEASURED, "measured")
        found = _measured(table["measured"])
        group = (model_text, samples, sequence, cluster_text, int(layouts.world))
        return Measurement(request, cluster, layouts, *found, label=label), group

    def _model(self, said: Words) -> _Model:
        degrees.refuse_misspelled(self.notes, said, (*_MODEL, *_OWN), "model")
        words = {key: value for key, value in said.items() if key in _MODEL}
        if words.get("kind", "gpt") not in ("gpt", "moe"):
            raise UserError(f"model.kind = {words['kind']!r} is not possible.", do='"gpt" or "moe"')
        if "depth" not in words and "shape" not in words:
            raise UserError("model.depth is missing.", do="model.depth, or model.shape")
        width, heads = words.get("width"), words.get("heads")
        plain = words.get("kv_heads", heads) == heads
        classic = plain and isinstance(width, int) and words.get("feed_forward") == 4 * width
        gated = flag(said, "gated", not classic, "model")
        if "vocabulary" not in words and "shape" not in words:
            words["vocabulary"] = VOCABULARIES[gated]
            self.notes.add(f"model.vocabulary is missing: {words['vocabulary']:,} assumed")
        words.setdefault("kind", "gpt")
        resolved, _ = derive.resolve(load.from_table({"model": words}, "the row"))
        assert isinstance(resolved.model, config.Gpt | config.Moe)
        return _Model(shapes.sizes(resolved.model), gated, said)

    def _cluster(self, said: Words) -> Cluster:
        words = _without_nothing(said)
        if isinstance(words.get("nodes"), dict):
            words["nodes"] = [words["nodes"]]
        try:
            text = tomli_w.dumps(words)
        except (TypeError, ValueError) as error:
            raise UserError(f"cluster cannot be read: {error}.", do="the tables of a cluster file") from None
        return clusters.loads(text, "cluster")

    def _precision(self, said: Any, cluster: Cluster) -> str:
        if said is None:
            flops = cluster.nodes[0].device.flops
            cuda = cluster.nodes[0].device.kind == "cuda"
            name = next((one for one in ("bf16", "fp16") if cuda and one in flops), "fp32")
            self.notes.add(f"precision is missing: {name} assumed")
            return name
        name = OTHER_PRECISIONS.get(str(said), str(said))
        if name not in PRECISIONS:
            near = nearest(name, PRECISIONS)
            raise UserError(f"precision = {said!r} is not known.", do=f'"{near or "bf16"}"; {", ".join(PRECISIONS)}')
        return name

    def _sequence(self, train: Words, model: _Model) -> int:
        if "sequence" in train:
            return count(train, "sequence", "train")
        if "context" in model.said or "shape" in model.said:
            self.notes.add("train.sequence is missing: the model's context assumed")
            return model.size.context
        raise UserError("train.sequence is missing.", do="tokens of one sample, such as train.sequence = 2048")


def _batch(train: Words, sequence: int) -> int | None:
    """Samples of a step; None when the row leaves that to its layout."""
    if "batch_tokens" not in train:
        return None
    tokens = count(train, "batch_tokens", "train")
    if tokens % sequence:
        raise UserError(
            f"train.batch_tokens = {tokens} is not a whole number of sequences.",
            why=f"train.sequence = {sequence}",
            do=f"train.batch_tokens = {max(1, round(tokens / sequence)) * sequence}",
        )
    return tokens // sequence


def _recomputed(layouts: Layouts, layout: Words, train: Words) -> Layouts:
    mode = layout.get("recompute", train.get("recompute", "none"))
    names = {"full": "block", True: "block", False: "none"}
    mode = names.get(mode, mode) if isinstance(mode, str | bool) else mode
    if mode not in ("none", "selective", "block"):
        near = nearest(str(mode), ("none", "selective", "block", "full"))
        raise UserError(f"recompute = {mode!r} is not known.", do=f'"{near or "none"}"; none, selective or block')
    return replace(layouts, recompute=mode)


def _possible(model: _Model, cluster: Cluster, layouts: Layouts, precision: str) -> None:
    if layouts.pp > model.size.layers:
        do = f"layout.pp = {model.size.layers} or fewer"
        raise UserError(f"layout.pp = {layouts.pp} is more than the model's {model.size.layers} layers.", do=do)
    for node in cluster.nodes:
        speed.peak(node.device, precision)  # raises UserError where the device has no such precision


def _system(train: Words, model: _Model) -> tuple[bool, bool, bool, str]:
    """(fused, eager, compiled, optimizer)."""
    compiled = flag(train, "compile", False, "train")
    fused = flag(model.said, "fused", train.get("attention") != "eager", "model")
    # Who says that nothing is compiled runs PyTorch's own operations; other systems bring fused kernels.
    eager = flag(model.said, "eager", model.gated and "compile" in train and not compiled, "model")
    optimizer = train.get("optimizer", "adamw")
    name = optimizer.get("kind", "adamw") if isinstance(optimizer, dict) else optimizer
    name = "adamw" if name == "adam" else name
    if name not in OPTIMIZERS:
        near = nearest(str(name), OPTIMIZERS)
        raise UserError(f"train.optimizer = {name!r} is not known.", do=f'"{near or "adamw"}"; adamw or muon')
    return fused, eager, compiled, name


def _request(model: _Model, samples: int, sequence: int, precision: str, train: Words) -> Request:
    fused, eager, compiled, optimizer = _system(train, model)
    decoder = Decoder(model.size, sequence, gated=model.gated, fused=fused, eager=eager)
    more: dict[str, Any] = {"compile": compiled}
    request = decoder.request(samples, precision, **more)
    if optimizer == "adamw":
        return request
    found = _matrices(model.size, model.gated)
    moved = sum(rows * columns * n for rows, columns, n in found)
    storage = request.storage or DOUBLE
    moments = storage.optimizer - (8 if precision == "fp64" else 4) * moved / request.parameters
    return decoder.request(
        samples, precision, **more | {
            "optimizer": "muon", "matrix_parameters": moved, "matrix_shapes": found,
            "storage": storage._replace(optimizer=moments),
        },
    )  # fmt: skip


# --- words and numbers -------------------------------------------------------------------------------------------


def _table(row: Words, name: str) -> Words:
    value = row.get(name)
    if value is None:
        if name in ("train", "measured"):
            return {}
        raise UserError(f"there is no {name!r}.", do=f'"{name}": {{…}}, as in docs/planner.md')
    if not isinstance(value, dict):
        raise UserError(f"{name} is not a table.", do=f'"{name}": {{…}}')
    return {key: one for key, one in value.items() if one is not None}


def _matrices(size: Sizes, gated: bool) -> tuple[tuple[int, int, int], ...]:
    """(rows, columns, count) of the hidden matrices, which Muon moves."""
    layers, experts = size.layers, size.layers * size.experts
    return (
        (size.width, size.width, 2 * layers),
        (size.kv_width, size.width, 2 * layers),
        (size.feed_forward, size.width, (2 if gated else 1) * experts),
        (size.width, size.feed_forward, experts),
    )


def _measured(words: Words) -> tuple[float | None, float | None, bool | None]:
    """(seconds, bytes, out of memory) of a row."""
    seconds, peak = _positive(words, "step_seconds"), _positive(words, "peak_gib")
    ended = None if "out_of_memory" not in words else flag(words, "out_of_memory", False, "measured")
    if ended is None and (seconds is not None or peak is not None):
        ended = False
    return seconds, None if peak is None else peak * 2**30, ended


def _positive(words: Words, key: str) -> float | None:
    value = words.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise UserError(f"measured.{key} = {value!r} is not possible.", do="a number above 0, or null")
    return float(value)


def _text(words: Words) -> bytes:
    return msgspec.json.encode(words, order="sorted")


def _without_nothing(value: Any) -> Any:
    """The value without keys that are null, which TOML does not have."""
    if isinstance(value, dict):
        return {key: _without_nothing(one) for key, one in value.items() if one is not None}
    return [_without_nothing(one) for one in value] if isinstance(value, list) else value
