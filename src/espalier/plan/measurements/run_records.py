"""Run records: the `model`, `cluster`, `layout`, `train` and `measured` of one JSON line. No torch.

The words are those of a recipe, a cluster file and a plan's `layout`, with other systems' names of algorithms. What is
absent is derived; what is misspelled or impossible is refused by name; what is not known is left out and noted.
Megatron-LM's sequence parallelism has the group of its tensor parallelism, so it may be written as `tp`, as `sp`, or as
both; our `tp` is that group. DeepSpeed's and Buff's all-to-all parallelism is our `sp`.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import tomli_w

from espalier import recipe as config
from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster
from espalier.plan import device_model
from espalier.plan.base import Layout
from espalier.plan.calibration import Measurement
from espalier.plan.collective_time import gpus
from espalier.plan.layouts import ALGORITHMS, Layouts, of_view
from espalier.plan.measurements import stack_words
from espalier.plan.measurements.stack_words import PRECISIONS, Meanings, Practice, meant
from espalier.plan.precision import fast
from espalier.plan.reference_models import DOUBLE, MEGATRON, ReferenceDecoder
from espalier.plan.request import AUTO, Request
from espalier.recipe import Muon, decoder_shapes, defaults, recipe_file
from espalier.recipe.decoder_shapes import DecoderSizes
from espalier.recipe.errors import UserError, nearest

RECOMPUTES: Meanings = {
    "none": "none", "selective": "selective", "block": "block", "full": "block", True: "block", False: "none",
}  # fmt: skip
OPTIMIZERS: Meanings = {"adamw": "adamw", "muon": "muon", "adam": "adamw"}
VOCABULARIES = {True: 32_000, False: 50_257}
"""Tokens of a SwiGLU decoder (Llama 2's) and of one with two matrices (GPT-2's) whose row does not say."""

STATES = ("params", "grads", "optimizer")
NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name, ()) for name in ALGORITHMS},
    **dict.fromkeys(("ddp", "dp"), ("data", ())),
    **dict.fromkeys(("fsdp", "fsdp1", "fsdp2", "zero-3", "zero3"), ("data", STATES)),
    **dict.fromkeys(("zero-2", "zero2"), ("data", STATES[1:])),
    **dict.fromkeys(("zero", "zero-1", "zero1", "distributed-optimizer"), ("data", STATES[2:])),
    **dict.fromkeys(("tp", "tensor", "mtp", "msp", "megatron-lm", "megatron-sp", "3d"), ("megatron", ())),
    **dict.fromkeys(("ulysses", "deepspeed-ulysses", "sp", "sequence", "intern"), ("isp", ())),
}
"""Other systems' names: the algorithm each means, and the states it splits over all replicas unless `shard` says."""

CHUNKS = ("chunks", "vp", "interleave")
"""Names of the number of stages that each rank of a pipeline holds."""
_RECIPE_MODEL = ("kind", *config.Moe.__struct_fields__)
_KEYS = {
    # Beyond a recipe's model: SwiGLU or two matrices, attention without written scores, chains of PyTorch operations
    # instead of fused kernels, and what it is called.
    "model": (*_RECIPE_MODEL, "gated", "fused", "eager", "name"),
    "layout": (*("dp", "tp", "sp", "cp", "pp", "ep", "algorithm", "shard", "micro_batch", "accumulate", "recompute"),
               *("precision", *CHUNKS), *stack_words.KEYS),
    "train": (*config.Train.__struct_fields__, *stack_words.KEYS),
    "measured": ("step_seconds", "peak_gib", "out_of_memory", "memory"),
}  # fmt: skip
_TABLES = ("model", "cluster", "layout", "train", "measured")


class _Words(dict[str, Any]):
    """One table of a row, without what is null. `where`: its name in errors."""

    where: str

    @classmethod
    def of(cls, row: Mapping[str, Any], where: str) -> _Words:
        """The row's table of that name. Raises UserError."""
        value = row.get(where)
        if value is None and where not in ("train", "measured"):
            raise UserError(f"there is no {where!r}.", do=f'"{where}": {{…}}, as in docs/planner.md')
        if value is not None and not isinstance(value, dict):
            raise UserError(f"{where} is not a table.", do=f'"{where}": {{…}}')
        words = cls((key, entry) for key, entry in (value or {}).items() if entry is not None)
        words.where = where
        return words

    @property
    def text(self) -> bytes:
        """The same for equal tables."""
        return msgspec.json.encode(dict(self), order="sorted")

    def count(self, key: str, default: int | None = None) -> int:
        """The whole number above 0 at a key. Raises UserError."""
        value = self.get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**53:
            raise self._impossible(key, f"{self.where}.{key} = a whole number, 1 or more")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """The truth value at a key. Raises UserError."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._impossible(key, f"{self.where}.{key} = true or false")
        return value

    def number(self, key: str) -> float | None:
        """The number above 0 at a key; None where there is none. Raises UserError."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
            raise self._impossible(key, "a number above 0, or null")
        return float(value)

    def _impossible(self, key: str, do: str) -> UserError:
        return UserError(f"{self.where}.{key} = {self.get(key)!r} is not possible.", do=do)


def refuse_misspelled(words: Mapping[str, Any], known: Iterable[str], where: str, notes: set[str]) -> None:
    """Raises UserError for a misspelled key; a foreign one is left out, and said in `notes`."""
    for key in (key for key in words if key not in known):
        close = difflib.get_close_matches(key, [name for name in known if name not in words], n=1, cutoff=0.8)
        if close:
            raise UserError(f"unknown key {where}.{key}.", do=f"did you mean {where}.{close[0]}?")
        notes.add(f"{where}.{key} is not known here and was left out")


# --- model, cluster, training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Model:
    """A decoder as its row describes it. `gated`: SwiGLU."""

    size: DecoderSizes
    gated: bool
    words: _Words


class Descriptions:
    """Turns rows into measurements. Has state: what rows had in common, so that equal rows share one request and one
    cluster, and what was assumed on the way."""

    def __init__(self) -> None:
        self.notes: set[str] = set()
        self._models: dict[bytes, _Model] = {}
        self._clusters: dict[bytes, Cluster] = {}
        self._requests: dict[Hashable, Request] = {}

    def measurement(self, row: Mapping[str, Any], label: str) -> tuple[Measurement, tuple[Hashable, ...]]:
        """What a row measured, and the group in which its time can be compared. Raises UserError."""
        refuse_misspelled(row, (*_TABLES, "stack"), "row", set())
        model_words, cluster_words, layout, train, measured = (_Words.of(row, name) for name in _TABLES)
        for words in (train, model_words, layout, measured):
            refuse_misspelled(words, _KEYS[words.where], words.where, self.notes)
        model_text, cluster_text = model_words.text, cluster_words.text
        model = self._models.get(model_text) or self._models.setdefault(model_text, self._model(model_words))
        cluster = self._clusters.get(cluster_text) or self._clusters.setdefault(cluster_text, _cluster(cluster_words))
        sequence = self._sequence(train, model)
        layouts, samples = _layout(layout, _batch(train, sequence), cluster, self.notes)
        precision = self._precision(layout.get("precision", train.get("precision")), cluster)
        recompute = layout.get("recompute", train.get("recompute", "none"))
        layouts = replace(layouts, recompute=meant("recompute", recompute, RECOMPUTES))
        _check_possible(model, cluster, layouts, precision)
        practice = stack_words.practice({key: words[key] for words in (layout, train) for key in words})
        request = self._request(model, train, layouts, (samples, sequence, precision), practice)
        seconds, peak = measured.number("step_seconds"), measured.number("peak_gib")
        ended = measured.flag("out_of_memory", False) if "out_of_memory" in measured else None
        if ended is None and (seconds is not None or peak is not None):
            ended = False
        peak = None if peak is None else peak * 2**30
        kind = meant("measured.memory", measured.get("memory", "device"), stack_words.MEMORIES)
        stack = str(row.get("stack") or f"{practice.executor or 'unnamed'} on {cluster.nodes[0].device.name}")
        group = (model_text, samples, sequence, cluster_text, int(layouts.world))
        return Measurement(request, cluster, layouts, seconds, peak, ended, label, stack, kind), group

    def _request(
        self, model: _Model, train: _Words, layouts: Layouts, step: tuple[int, int, str], practice: Practice
    ) -> Request:
        """Of a step of (samples, tokens of each, precision)."""
        samples, sequence, precision = step
        compiled = train.flag("compile", False)
        fused = model.words.flag("fused", practice.kernel != "written")
        # Who says that nothing is compiled runs PyTorch's own operations; other systems bring fused kernels.
        eager = model.words.flag("eager", model.gated and "compile" in train and not compiled)
        decoder = ReferenceDecoder(
            model.size, sequence, gated=model.gated, fused=fused, eager=eager,
            sequence_parallel=practice.sequence_parallel, loss=practice.loss,
        )  # fmt: skip
        given = train.get("optimizer", "adamw")
        optimizer = meant(
            "train.optimizer", given.get("kind", "adamw") if isinstance(given, dict) else given, OPTIMIZERS
        )
        megatron = layouts.tp * layouts.pp > 1 and layouts.params == 1 and precision in ("fp16", "bf16")
        key = (decoder, samples, precision, compiled, optimizer, megatron, practice)
        if key not in self._requests:
            made = decoder.request(samples, precision, compile=compiled)
            if optimizer == "muon":
                made = _with_muon(made, decoder)
            elif megatron:
                made = made.changed(storage=MEGATRON)
            kernel = practice.kernel if fused else "written"
            self._requests[key] = stack_words.practised(made, replace(practice, kernel=kernel))
        return self._requests[key]

    def _model(self, model_words: _Words) -> _Model:
        words = {key: value for key, value in model_words.items() if key in _RECIPE_MODEL}
        if words.get("kind", "gpt") not in ("gpt", "moe"):
            raise UserError(f"model.kind = {words['kind']!r} is not possible.", do='"gpt" or "moe"')
        if "depth" not in words and "shape" not in words:
            raise UserError("model.depth is missing.", do="model.depth, or model.shape")
        width, heads = words.get("width"), words.get("heads")
        plain = words.get("kv_heads", heads) == heads
        classic = plain and isinstance(width, int) and words.get("feed_forward") == 4 * width
        gated = model_words.flag("gated", not classic)
        if "vocabulary" not in words and "shape" not in words:
            words["vocabulary"] = VOCABULARIES[gated]
            self.notes.add(f"model.vocabulary is missing: {words['vocabulary']:,} assumed")
        words.setdefault("kind", "gpt")
        resolved, _ = defaults.resolve(recipe_file.from_table({"model": words}, "the row"))
        assert isinstance(resolved.model, config.Decoder)
        return _Model(decoder_shapes.sizes(resolved.model), gated, model_words)

    def _precision(self, precision: Any, cluster: Cluster) -> str:
        if precision not in (None, AUTO):
            return meant("precision", str(precision), PRECISIONS)
        name = fast(cluster.nodes[0].device)[0]
        self.notes.add(f"precision is missing: {name} assumed")
        return name

    def _sequence(self, train: _Words, model: _Model) -> int:
        if "sequence" in train:
            return train.count("sequence")
        if "context" in model.words or "shape" in model.words:
            self.notes.add("train.sequence is missing: the model's context assumed")
            return model.size.context
        raise UserError("train.sequence is missing.", do="tokens of one sample, such as train.sequence = 2048")


def _cluster(cluster_words: _Words) -> Cluster:
    words = recipe_file.without_none(dict(cluster_words))
    if isinstance(words.get("nodes"), dict):
        words["nodes"] = [words["nodes"]]
    try:
        text = tomli_w.dumps(words)
    except (TypeError, ValueError) as error:
        raise UserError(f"cluster cannot be read: {error}.", do="the tables of a cluster file") from None
    return clusters.loads(text, "cluster")


def _batch(train: _Words, sequence: int) -> int | None:
    """Samples of a step; None when the row leaves that to its layout."""
    if "batch_tokens" not in train:
        return None
    tokens = train.count("batch_tokens")
    if tokens % sequence:
        raise UserError(
            f"train.batch_tokens = {tokens} is not a whole number of sequences.",
            why=f"train.sequence = {sequence}",
            do=f"train.batch_tokens = {max(1, round(tokens / sequence)) * sequence}",
        )
    return tokens // sequence


def _check_possible(model: _Model, cluster: Cluster, layouts: Layouts, precision: str) -> None:
    if layouts.pp > model.size.layers:
        do = f"layout.pp = {model.size.layers} or fewer"
        raise UserError(f"layout.pp = {layouts.pp} is more than the model's {model.size.layers} layers.", do=do)
    for node in cluster.nodes:
        device_model.peak(node.device, precision)  # raises UserError where the device has no such precision


def _with_muon(request: Request, decoder: ReferenceDecoder) -> Request:
    size, layers = decoder.size, decoder.size.layers
    matrices = Counter({(size.width, size.width): 2 * layers})
    matrices[size.kv_width, size.width] += 2 * layers
    matrices[size.feed_forward, size.width] += (2 if decoder.gated else 1) * layers * size.experts
    matrices[size.width, size.feed_forward] += layers * size.experts
    request = request.changed(optimizer=Muon(), matrices=matrices)
    storage = request.system.storage or DOUBLE
    moments = storage.optimizer - request.bytes_each * request.profile.hidden / request.profile.parameters
    return request.changed(storage=storage._replace(optimizer=moments))


# --- layout ------------------------------------------------------------------------------------------------------


def _layout(words: _Words, samples: int | None, cluster: Cluster, notes: set[str]) -> tuple[Layouts, int]:
    """The layout that `words` say on `cluster`, and the samples of a step (None: as many as its micro-batches hold)."""
    algorithm, sharded = _algorithm(words)
    devices = gpus(cluster) or len(cluster.devices())
    dp, tp, sp, pp = _degrees(words, algorithm, devices)
    cp, chunks = words.count("cp", 1), max(words.count(name, 1) for name in CHUNKS)
    if sp % cp:
        raise UserError(f"layout.cp = {cp} does not divide layout.sp = {sp}.", do=f"layout.sp = {cp * sp}")
    ranks = dp * tp * sp * pp
    if gpus(cluster) and ranks > devices:
        raise UserError(
            f"layout: dp x tp x sp x pp = {dp} x {tp} x {sp} x {pp} = {ranks} ranks.",
            why=f"the cluster has {devices} devices",
            do=f"layout.dp = {devices // (tp * sp * pp)}" if devices >= tp * sp * pp else "a larger cluster",
        )
    micro_batch, samples = _micro_batch(words, samples, dp, notes)
    view = Layout(
        dp=dp, tp=tp, sp=sp, pp=pp, algorithm=algorithm or ("megatron" if tp > 1 else "isp" if sp > 1 else "data"),
        shard=_shard(words, dict.fromkeys(STATES, 1) | dict.fromkeys(sharded, dp * sp), dp * sp),
        micro_batch=micro_batch, cp=cp, interleave=chunks,
    )  # fmt: skip
    layouts = of_view(view)
    if words.count("ep", 1) > 1:
        notes.add("layout.ep: experts are priced as if every rank held all of them")
    if gpus(cluster):
        return layouts, samples
    return replace(layouts, threads=max(1, cluster.nodes[0].cores // -(-ranks // devices))), samples


def _algorithm(words: _Words) -> tuple[str | None, tuple[str, ...]]:
    """Our name of the algorithm (None: not said), and the states it splits by itself."""
    given = words.get("algorithm")
    if given is None:
        return None, ()
    name = str(given).lower().replace("_", "-").replace(" ", "-")
    if name not in NAMES:
        near = nearest(name, NAMES)
        raise UserError(
            f"layout.algorithm = {given!r} is not known.",
            why=f"the algorithms are {', '.join(ALGORITHMS)}; names of other systems: "
            + ", ".join(other for other in NAMES if other not in ALGORITHMS),
            do=f'layout.algorithm = "{near}"' if near else "leave it out",
        )
    algorithm, sharded = NAMES[name]
    # "FSDP" with tensor or sequence ranks says how states are kept, not what those ranks do.
    both = algorithm == "data" and any(words.count(axis, 1) > 1 for axis in ("tp", "sp"))
    return (None if both else algorithm), sharded


def _degrees(words: _Words, algorithm: str | None, devices: int) -> tuple[int, int, int, int]:
    tp, sp, pp = (words.count(axis, 1) for axis in ("tp", "sp", "pp"))
    if tp == sp > 1 and _same_group(words, algorithm, devices):
        sp = 1
    if algorithm == "isp" and sp == 1:
        tp, sp = 1, tp
    if algorithm in ("megatron", "fsp") and tp == 1:
        tp, sp = sp, 1
    if sp == 1:
        sp = words.count("cp", 1)  # a plan's `sp` holds the ranks of rings, other systems' does not
    if "dp" in words:
        return words.count("dp"), tp, sp, pp
    if devices < tp * sp * pp:
        why = f"tp x sp x pp = {tp * sp * pp}, and the cluster has {devices} devices"
        raise UserError("layout.dp is missing and cannot be derived.", why=why, do="a larger cluster, or fewer ranks")
    return devices // (tp * sp * pp), tp, sp, pp


def _same_group(words: _Words, algorithm: str | None, devices: int) -> bool:
    """Whether `sp` and `tp` name one group: counted twice, the layout has more ranks than there are devices."""
    tp, pp = words.count("tp"), words.count("pp", 1)
    if "dp" not in words:
        return algorithm in ("megatron", "fsp") or devices < tp * tp * pp
    dp = words.count("dp")
    return dp * tp * pp <= devices < dp * tp * tp * pp


def _shard(words: _Words, default: dict[str, int], ranks: int) -> dict[str, int]:
    """Over how many ranks each state is split: what is absent, as little as nesting allows."""
    given = words.get("shard")
    if given is None:
        return default
    if not isinstance(given, dict):
        do = '"shard": {"params": 1, "grads": 1, "optimizer": 8}'
        raise UserError(f"layout.shard = {given!r} is not a table.", do=do)
    shard = _Words.of({"layout.shard": given}, "layout.shard")
    refuse_misspelled(shard, STATES, "layout.shard", set())
    # Ranks that were counted twice (see `_same_group`) are no shards of their own.
    twice = ranks * words.count("sp", 1)
    shards, least = {}, 1
    for state in STATES:
        value = shard.count(state, least)
        least = shards[state] = ranks if value == twice and state in shard else value
    return shards


def _micro_batch(words: _Words, samples: int | None, dp: int, notes: set[str]) -> tuple[int, int]:
    """(samples of a micro-batch, samples of a step)."""
    accumulate = words.count("accumulate", 1)
    if "micro_batch" not in words:
        if samples is None:
            do = "train.batch_tokens, or layout.micro_batch and layout.accumulate"
            raise UserError("The number of samples in a step is missing.", do=do)
        return max(1, -(-samples // (dp * accumulate))), samples
    micro_batch = words.count("micro_batch")
    if samples is None:
        return micro_batch, dp * micro_batch * accumulate
    if dp > samples:
        raise UserError(
            f"layout.dp = {dp} is more than the batch of {samples} samples.", do=f"layout.dp = {samples} or fewer"
        )
    if "accumulate" in words and accumulate != -(-samples // (dp * micro_batch)):
        notes.add("layout.accumulate contradicts the batch, which was believed")
    return micro_batch, samples
