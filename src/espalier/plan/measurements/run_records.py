"""Run records: the `model`, `cluster`, `layout`, `train`, `tune` and `measured` of one JSON line. No torch.

The words are those of a recipe, a cluster file and a plan's `layout`, with other systems' names of algorithms. What is
absent is derived; what is misspelled or impossible is refused by name; what is not known is left out and noted; what
is known and changes neither seconds nor bytes is named in the row's result (`UNPRICED`).
Megatron-LM's sequence parallelism has the group of its tensor parallelism, so it may be written as `tp`, as `sp`, or as
both; our `tp` is that group. DeepSpeed's and Buff's all-to-all parallelism is our `sp`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import tomli_w

from espalier import recipe as config
from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster, Device
from espalier.plan import device_model
from espalier.plan.base import Layout
from espalier.plan.calibration import Measurement
from espalier.plan.collective_time import gpus
from espalier.plan.layouts import ALGORITHMS, Layouts, of_view
from espalier.plan.measurements import stack_words
from espalier.plan.measurements.model_words import MODEL_KEYS, TUNE_KEYS, RowModel, low_rank, row_model
from espalier.plan.measurements.row_table import RowTable, refuse_misspelled
from espalier.plan.measurements.stack_words import PRECISIONS, Meanings, Practice, meant
from espalier.plan.precision import fast
from espalier.plan.reference_models import DOUBLE, MEGATRON, ReferenceDecoder
from espalier.plan.request import AUTO, Request
from espalier.recipe import Muon, recipe_file
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError, nearest

_DATA = data_table(__file__)
RECOMPUTES: Meanings = {**_DATA["recomputes"], True: "block", False: "none"}
OPTIMIZERS: Meanings = _DATA["optimizers"]
PLACEMENTS: Meanings = _DATA["placements"]
SCHEDULES: Meanings = _DATA["schedules"]
STATES = ("params", "grads", "optimizer")
NAMES: dict[str, tuple[str, list[str]]] = {name: (name, []) for name in ALGORITHMS} | {
    name: (row["algorithm"], row["states"]) for row in _DATA["systems"] for name in row["names"]
}
"""Other systems' names: the algorithm each means, and the states it splits over all replicas unless `shard` says."""

CHUNKS = ("chunks", "vp", "interleave")
"""Names of the number of stages that each rank of a pipeline holds."""
FP8 = "fp8"
_KEYS = {
    "model": MODEL_KEYS,
    "layout": (*_DATA["keys"]["layout"], *CHUNKS, *stack_words.KEYS),
    "train": (*config.Train.__struct_fields__, *stack_words.KEYS),
    "tune": TUNE_KEYS,
    "measured": _DATA["keys"]["measured"],
}
_TABLES = ("model", "cluster", "layout", "train", "tune", "measured")
UNPRICED: dict[str, list[str]] = _DATA["unpriced"]
"""Keys that change neither the seconds nor the bytes that are predicted, by table."""


class RunRecord(NamedTuple):
    """What a row measured, the group in which its time can be compared, and its keys that nothing is predicted from."""

    measurement: Measurement
    group: tuple[Hashable, ...]
    unpriced: tuple[str, ...]


# --- model, cluster, training ------------------------------------------------------------------------------------


class Descriptions:
    """Turns rows into measurements. Has state: what rows had in common, so that equal rows share one request and one
    cluster, and what was assumed on the way."""

    def __init__(self) -> None:
        self.notes: set[str] = set()
        self._models: dict[bytes, RowModel] = {}
        self._clusters: dict[bytes, Cluster] = {}
        self._requests: dict[Hashable, Request] = {}

    def measurement(self, row: Mapping[str, Any], label: str) -> RunRecord:
        """What a row measured. Raises UserError."""
        refuse_misspelled(row, (*_TABLES, "stack", "predicted"), "row", self.notes)
        tables = {name: RowTable.of(row, name) for name in _TABLES}
        model_words, cluster_words, layout, train, _, measured = tables.values()
        for name, known in _KEYS.items():
            refuse_misspelled(tables[name], known, name, self.notes)
        model_text = model_words.text
        cluster_text = cluster_words.text
        model = self._models.get(model_text) or self._models.setdefault(model_text, row_model(model_words, self.notes))
        cluster = self._clusters.get(cluster_text) or self._clusters.setdefault(cluster_text, _cluster(cluster_words))
        sequence = self._sequence(train, model)
        layouts, samples = _layout(layout, _batch(train, sequence), cluster, self.notes)
        cluster, precision = self._precision(layout.get("precision", train.get("precision")), cluster)
        recompute = layout.get("recompute", train.get("recompute", "none"))
        layouts = replace(layouts, recompute=meant("recompute", recompute, RECOMPUTES))
        _check_possible(model, cluster, layouts, precision)
        practice = self._practice(row, {key: words[key] for words in (layout, train) for key in words})
        request = self._request(model, tables, layouts, (samples, sequence, precision), practice)
        seconds = measured.number("step_seconds")
        peak = measured.number("peak_gib")
        ended = measured.flag("out_of_memory", False) if "out_of_memory" in measured else None
        if ended is None and (seconds is not None or peak is not None):
            ended = False
        peak = None if peak is None else peak * 2**30
        kind = meant("measured.memory", measured.get("memory", "device"), stack_words.MEMORIES)
        stack = str(row.get("stack") or f"{practice.executor or 'unnamed'} on {cluster.nodes[0].device.name}")
        group = (model_text, samples, sequence, cluster_text, int(layouts.world))
        unpriced = [
            f"{name}.{key}"
            for name, keys in UNPRICED.items()
            for key in keys
            if key in tables[name] and not (key == "context" and "sequence" not in train)
        ]
        if isinstance(given := train.get("optimizer"), dict):
            unpriced += [f"train.optimizer.{key}" for key in given if key != "kind"]
        nodes = cluster_words["nodes"]
        for key in ("price", "disks", "mtbf"):
            unpriced += [f"cluster.nodes.{key}"] * any(
                key in node for node in ([nodes] if "device" in nodes else nodes)
            )
        made = Measurement(request, cluster, layouts, seconds, peak, ended, label, stack, kind)
        return RunRecord(made, group, tuple(unpriced))

    def _practice(self, row: Mapping[str, Any], words: dict[str, Any]) -> Practice:
        """How the row's system trains: a stack that begins with a system's name, or FSDP, has its habits."""
        first = str(row.get("stack") or "").partition(" ")[0]
        stack, algorithm = (
            stack_words.SYSTEMS.get(str(name).lower().replace("_", "-")) for name in (first, words.get("algorithm"))
        )
        system = stack or (algorithm if algorithm == "fsdp" else None)
        if "executor" not in words and system is not None:
            words["executor"] = system
            self.notes.add(f"train.executor is missing: {system} assumed, from the row's stack or algorithm")
        return stack_words.practice(words)

    def _request(
        self,
        model: RowModel,
        tables: Mapping[str, RowTable],
        layouts: Layouts,
        step: tuple[int, int, str],
        practice: Practice,
    ) -> Request:
        """Of a step of (samples, tokens of each, precision)."""
        (samples, sequence, precision), layout, train = step, tables["layout"], tables["train"]
        habits = practice.habits
        compiled = train.flag("compile", False)
        fused = model.words.flag("fused", practice.kernel != "written")
        # Who says that nothing is compiled runs PyTorch's own operations; other systems bring fused kernels.
        eager = model.words.flag("eager", model.gated and "compile" in train and not compiled)
        ep = self._experts(layout, layouts, model)
        decoder = ReferenceDecoder(
            model.size, sequence, spread=max(1, ep), graphs=habits.graphs, gated=model.gated, fused=fused, eager=eager,
            sequence_parallel=habits.sequence_parallel, keeps_shards=habits.keeps_shards, rotates=habits.rotates,
            operations=habits.kernels or ("compiled" if compiled else "eager"), loss=habits.loss,
            latent=model.latent, adapters=low_rank(tables["tune"], precision),
        )  # fmt: skip
        given = train.get("optimizer", "adamw")
        optimizer = meant(
            "train.optimizer", given.get("kind", "adamw") if isinstance(given, dict) else given, OPTIMIZERS
        )
        megatron = layouts.tp * layouts.pp > 1 and layouts.params == 1 and precision in ("fp16", "bf16")
        more: dict[str, Any] = {
            "ep": ep,
            "stages": _stages(layout, layouts, decoder, practice),
        }
        if decoder.adapters is not None:
            more["cut"] = int(layouts.tp * layouts.pp), int(layouts.params)
        key = (decoder, samples, precision, compiled, optimizer, megatron, practice, *more.values())
        if key not in self._requests:
            made = decoder.request(samples, precision, compile=compiled, ep=more["ep"], stages=more["stages"])
            if decoder.adapters is not None:
                made = made.changed(frozen=_frozen_on_rank(made, *more["cut"]))
            if optimizer == "muon":
                made = _with_muon(made, decoder)
            elif megatron:
                made = made.changed(storage=MEGATRON)
            kernel = practice.kernel if fused else "written"
            self._requests[key] = stack_words.practised(made, replace(practice, kernel=kernel))
        return self._requests[key]

    def _experts(self, layout: RowTable, layouts: Layouts, model: RowModel) -> int:
        """Ranks over which experts are spread; 0: none."""
        ep = layout.count("ep", 1)
        most = math.gcd(int(layouts.shards), model.size.experts)
        if ep == 1 or most % ep == 0:
            return ep if ep > 1 else 0
        priced = math.gcd(ep, most)
        self.notes.add(f"layout.ep = {ep} is priced as {priced}, which divides dp x sp and the experts")
        return priced if priced > 1 else 0

    def _precision(self, precision: Any, cluster: Cluster) -> tuple[Cluster, str]:
        """The cluster and the precision in which values are kept: products in fp8 are bf16's at another rate."""
        if precision not in (None, AUTO):
            name = meant("precision", str(precision), {**PRECISIONS, FP8: FP8, "float8": FP8})
            if name != FP8:
                return cluster, name
            self.notes.add("precision = fp8: the device's fp8 rate in dense products, everything else as in bf16")
            return cluster.changed(
                nodes=tuple(node.changed(device=_at_fp8(node.device)) for node in cluster.nodes)
            ), "bf16"
        name = fast(cluster.nodes[0].device)[0]
        self.notes.add(f"precision is missing: {name} assumed")
        return cluster, name

    def _sequence(self, train: RowTable, model: RowModel) -> int:
        if "sequence" in train:
            return train.count("sequence")
        if "context" in model.words or "shape" in model.words:
            self.notes.add("train.sequence is missing: the model's context assumed")
            return model.size.context
        raise UserError("train.sequence is missing.", do="tokens of one sample, such as train.sequence = 2048")


def _cluster(cluster_words: RowTable) -> Cluster:
    words = recipe_file.without_none(dict(cluster_words))
    if isinstance(words.get("nodes"), dict):
        words["nodes"] = [words["nodes"]]
    try:
        text = tomli_w.dumps(words)
    except (TypeError, ValueError) as error:
        raise UserError(f"cluster cannot be read: {error}.", do="the tables of a cluster file") from None
    return clusters.loads(text, "cluster")


def _batch(train: RowTable, sequence: int) -> int | None:
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


def _check_possible(model: RowModel, cluster: Cluster, layouts: Layouts, precision: str) -> None:
    if layouts.pp > model.size.layers:
        do = f"layout.pp = {model.size.layers} or fewer"
        raise UserError(f"layout.pp = {layouts.pp} is more than the model's {model.size.layers} layers.", do=do)
    for node in cluster.nodes:
        device_model.peak(node.device, precision)  # raises UserError where the device has no such precision


def _at_fp8(device: Device) -> Device:
    """The device with its fp8 rate in place of bf16's in products, not in attention. Raises UserError."""
    rate = device.flops.get(FP8)
    bf16 = device.flops.get("bf16")
    if rate is None or bf16 is None:
        why = f"{device.name} has no rate for it"
        do = "the device as a table with flops = { fp8 = 1979e12, bf16 = ... }"
        raise UserError("precision = 'fp8' is not possible.", why=why, do=do)
    attention = device_model.share(device, "attention") * bf16 / rate
    return device.changed(flops={**device.flops, "bf16": rate}, sustained={**device.sustained, "attention": attention})


def _frozen_on_rank(request: Request, ranks: int, shards: int) -> int:
    """Bytes of frozen weights on one of `ranks` that share a replica, sharded over so many replicas: two layers are
    gathered at a time."""
    profile = request.profile
    whole = (profile.frozen or 0) / ranks
    return int(whole / shards + (2 * whole / profile.layers if shards > 1 else 0))


def _stages(words: RowTable, layouts: Layouts, decoder: ReferenceDecoder, practice: Practice) -> tuple[int, ...]:
    """Layers of each rank of a pipeline where the row or its system divides them unequally. Raises UserError."""
    layers = decoder.size.layers
    pp = int(layouts.pp)
    chunks = int(layouts.chunks)
    given = words.get("stages")
    if given is None:
        head = decoder.size.vocabulary * decoder.size.width
        balanced = practice.habits.balances and chunks == 1 < pp
        return by_cost(layers, decoder.layer_parameters, head, pp) if balanced else ()
    parts: Any = given if isinstance(given, list) else str(given).split("-")
    stages = [int(part) for part in parts if not isinstance(part, bool) and str(part).isdecimal()]
    if len(stages) != len(parts):
        raise UserError(f"layout.stages = {given!r} is not possible.", do='layers of each stage: [4, 4, 3], or "4-4-3"')
    if len(stages) != pp * chunks or sum(stages) != layers:
        why = f"{len(stages)} stages with {sum(stages)} layers"
        do = f"layout.stages = {pp * chunks} numbers whose sum is {layers}"
        raise UserError("layout.stages contradicts the layout.", why=why, do=do)
    return tuple(sum(stages[rank::pp]) for rank in range(pp))


def by_cost(layers: int, layer: float, head: float, pp: int) -> tuple[int, ...]:
    """Layers of each stage as nanotron divides them: a stage ends with the layer by which all before have reached its
    share of the cost, of which the head is a part."""
    stages = [0] * pp
    done = 0.0
    share = (layers * layer + head) / pp
    at = 0
    for _ in range(layers):
        stages[at] += 1
        done += layer
        at += at < pp - 1 and done > (at + 1) * share
    return tuple(stages)


def _with_muon(request: Request, decoder: ReferenceDecoder) -> Request:
    size = decoder.size
    matrices = Counter[tuple[int, int]]()
    for rows, columns, count, part in decoder.matrices:
        matrices[columns, rows] += count * size.layers
        if part == "attention" and decoder.latent is None:  # three matrices, one product
            matrices[columns, rows] -= count * size.layers
            matrices[size.query_width, rows] += size.layers
            matrices[size.kv_width, rows] += 2 * size.layers
    request = request.changed(optimizer=Muon(), matrices=matrices)
    storage = request.system.storage or DOUBLE
    moments = storage.optimizer - request.bytes_each * request.profile.hidden / request.profile.parameters
    return request.changed(storage=storage._replace(optimizer=moments))


# --- layout ------------------------------------------------------------------------------------------------------


def _layout(words: RowTable, samples: int | None, cluster: Cluster, notes: set[str]) -> tuple[Layouts, int]:
    """The layout that `words` say on `cluster`, and the samples of a step (None: as many as its micro-batches hold)."""
    algorithm, sharded = _algorithm(words)
    devices = gpus(cluster) or len(cluster.devices())
    dp, tp, sp, pp = _degrees(words, algorithm, devices)
    cp = words.count("cp", 1)
    chunks = max(words.count(name, 1) for name in CHUNKS)
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
    placement: Any = meant("layout.placement", words.get("placement", "head_first"), PLACEMENTS)
    view = Layout(
        dp=dp, tp=tp, sp=sp, pp=pp, algorithm=algorithm or ("megatron" if tp > 1 else "isp" if sp > 1 else "data"),
        shard=_shard(words, dict.fromkeys(STATES, 1) | dict.fromkeys(sharded, dp * sp), dp * sp),
        micro_batch=micro_batch, cp=cp, interleave=chunks, window=words.count("window", 1),
        placement=placement,
        schedule=meant("layout.schedule", words.get("schedule", "1f1b"), SCHEDULES),
    )  # fmt: skip
    layouts = of_view(view)
    if gpus(cluster):
        return layouts, samples
    return replace(layouts, threads=max(1, cluster.nodes[0].cores // -(-ranks // devices))), samples


def _algorithm(words: RowTable) -> tuple[str | None, list[str]]:
    """Our name of the algorithm (None: not said), and the states it splits by itself."""
    given = words.get("algorithm")
    if given is None:
        return None, []
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


def _degrees(words: RowTable, algorithm: str | None, devices: int) -> tuple[int, int, int, int]:
    tp, sp, pp = (words.count(axis, 1) for axis in ("tp", "sp", "pp"))
    if tp == sp > 1 and _same_group(words, algorithm, devices):
        sp = 1
    if algorithm == "isp" and sp == 1:
        tp, sp = 1, tp
    if algorithm in ("megatron", "fsp") and tp == 1:
        tp = sp
        sp = 1
    if sp == 1:
        sp = words.count("cp", 1)  # a plan's `sp` holds the ranks of rings, other systems' does not
    if "dp" in words:
        return words.count("dp"), tp, sp, pp
    if devices < tp * sp * pp:
        why = f"tp x sp x pp = {tp * sp * pp}, and the cluster has {devices} devices"
        raise UserError("layout.dp is missing and cannot be derived.", why=why, do="a larger cluster, or fewer ranks")
    return devices // (tp * sp * pp), tp, sp, pp


def _same_group(words: RowTable, algorithm: str | None, devices: int) -> bool:
    """Whether `sp` and `tp` name one group: counted twice, the layout has more ranks than there are devices."""
    tp = words.count("tp")
    pp = words.count("pp", 1)
    if "dp" not in words:
        return algorithm in ("megatron", "fsp") or devices < tp * tp * pp
    dp = words.count("dp")
    return dp * tp * pp <= devices < dp * tp * tp * pp


def _shard(words: RowTable, default: dict[str, int], ranks: int) -> dict[str, int]:
    """Over how many ranks each state is split: what is absent, as little as nesting allows."""
    given = words.get("shard")
    if given is None:
        return default
    if not isinstance(given, dict):
        do = '"shard": {"params": 1, "grads": 1, "optimizer": 8}'
        raise UserError(f"layout.shard = {given!r} is not a table.", do=do)
    shard = RowTable.of({"layout.shard": given}, "layout.shard")
    refuse_misspelled(shard, STATES, "layout.shard", set())
    # Ranks that were counted twice (see `_same_group`) are no shards of their own.
    twice = ranks * words.count("sp", 1)
    shards = {}
    least = 1
    for state in STATES:
        value = shard.count(state, least)
        least = shards[state] = ranks if value == twice and state in shard else value
    return shards


def _micro_batch(words: RowTable, samples: int | None, dp: int, notes: set[str]) -> tuple[int, int]:
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
