"""The degrees of parallelism of a layout in words, as other systems write them: what is absent derived. No torch.

Megatron-LM's sequence parallelism has the group of its tensor parallelism, so it may be written as `tp`, as `sp`, or as
both; our `tp` is that group. DeepSpeed's and Buff's all-to-all parallelism is our `sp`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from espalier.cluster import Cluster
from espalier.errors import UserError, nearest
from espalier.plan.base import Layout
from espalier.plan.layouts import ALGORITHMS, Layouts, of_view

Words = Mapping[str, Any]

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

KEYS = ("dp", "tp", "sp", "pp", "algorithm", "shard", "micro_batch", "accumulate", "recompute", "precision", "chunks")


def read(words: Words, samples: int | None, cluster: Cluster, notes: set[str]) -> tuple[Layouts, int]:
    """The layout that `words` say on `cluster`, and the samples of a step.

    Args:
        words: of a plan's `layout`; `chunks` beside them.
        samples: of a step; None: as many as the layout's micro-batches hold.
        cluster: whose devices a missing `dp` is derived from.
        notes: takes what was left out.

    Raises:
        UserError: naming the key.
    """
    refuse_misspelled(notes, words, KEYS, "layout")
    algorithm, sharded = _algorithm(words)
    devices, gpus = _devices(cluster)
    dp, tp, sp, pp = _degrees(words, algorithm, devices)
    algorithm = algorithm or ("megatron" if tp > 1 else "isp" if sp > 1 else "data")
    if gpus and dp * tp * sp * pp > devices:
        raise UserError(
            f"layout: dp x tp x sp x pp = {dp} x {tp} x {sp} x {pp} = {dp * tp * sp * pp} ranks.",
            why=f"the cluster has {devices} devices",
            do=f"layout.dp = {devices // (tp * sp * pp)}" if devices >= tp * sp * pp else "a larger cluster",
        )
    micro_batch, samples = _batch(words, samples, dp, notes)
    names = dict.fromkeys(STATES, 1) | dict.fromkeys(sharded, dp * sp)
    view = Layout(
        dp=dp, tp=tp, sp=sp, pp=pp, algorithm=algorithm, shard=_shard(words, names, dp * sp), micro_batch=micro_batch
    )
    found = of_view(view, count(words, "chunks", "layout", 1))
    return (found if gpus else _with_threads(found, cluster)), samples


def refuse_misspelled(notes: set[str], words: Words, known: Iterable[str], where: str) -> None:
    """Raises UserError for a misspelled key; a foreign one is left out, and said in `notes`."""
    for key in (key for key in words if key not in known):
        close = difflib.get_close_matches(key, [one for one in known if one not in words], n=1, cutoff=0.8)
        if close:
            raise UserError(f"unknown key {where}.{key}.", do=f"did you mean {where}.{close[0]}?")
        notes.add(f"{where}.{key} is not known here and was left out")


def count(words: Words, key: str, where: str, default: int | None = None) -> int:
    """The whole number above 0 at a key. Raises UserError."""
    value = words.get(key, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**53:
        raise UserError(f"{where}.{key} = {value!r} is not possible.", do=f"{where}.{key} = a whole number, 1 or more")
    return value


def flag(words: Words, key: str, default: bool, where: str) -> bool:
    """The truth value at a key. Raises UserError."""
    value = words.get(key, default)
    if not isinstance(value, bool):
        raise UserError(f"{where}.{key} = {value!r} is not possible.", do=f"{where}.{key} = true or false")
    return value


def _algorithm(words: Words) -> tuple[str | None, tuple[str, ...]]:
    """Our name of the algorithm (None: not said), and the states it splits by itself."""
    said = words.get("algorithm")
    if said is None:
        return None, ()
    name = str(said).lower().replace("_", "-").replace(" ", "-")
    if name not in NAMES:
        near = nearest(name, NAMES)
        raise UserError(
            f"layout.algorithm = {said!r} is not known.",
            why=f"the algorithms are {', '.join(ALGORITHMS)}; names of other systems: "
            + ", ".join(other for other in NAMES if other not in ALGORITHMS),
            do=f'layout.algorithm = "{near}"' if near else "leave it out",
        )
    algorithm, sharded = NAMES[name]
    # "FSDP" with tensor or sequence ranks says how states are kept, not what those ranks do.
    both = algorithm == "data" and any(count(words, axis, "layout", 1) > 1 for axis in ("tp", "sp"))
    return (None if both else algorithm), sharded


def _degrees(words: Words, algorithm: str | None, devices: int) -> tuple[int, int, int, int]:
    tp, sp, pp = (count(words, axis, "layout", 1) for axis in ("tp", "sp", "pp"))
    if tp == sp > 1 and _same_group(words, algorithm, devices):
        sp = 1
    if algorithm == "isp" and sp == 1:
        tp, sp = 1, tp
    if algorithm in ("megatron", "fsp") and tp == 1:
        tp, sp = sp, 1
    if "dp" in words:
        return count(words, "dp", "layout"), tp, sp, pp
    if devices < tp * sp * pp:
        why = f"tp x sp x pp = {tp * sp * pp}, and the cluster has {devices} devices"
        raise UserError("layout.dp is missing and cannot be derived.", why=why, do="a larger cluster, or fewer ranks")
    return devices // (tp * sp * pp), tp, sp, pp


def _same_group(words: Words, algorithm: str | None, devices: int) -> bool:
    """Whether `sp` and `tp` name one group: counted twice, the layout has more ranks than there are devices."""
    tp, pp = count(words, "tp", "layout"), count(words, "pp", "layout", 1)
    if "dp" not in words:
        return algorithm in ("megatron", "fsp") or devices < tp * tp * pp
    dp = count(words, "dp", "layout")
    return dp * tp * pp <= devices < dp * tp * tp * pp


def _shard(words: Words, default: dict[str, int], ranks: int) -> dict[str, int]:
    """Over how many ranks each state is split: what is absent, as little as nesting allows."""
    said = words.get("shard")
    if said is None:
        return default
    if not isinstance(said, dict):
        do = '"shard": {"params": 1, "grads": 1, "optimizer": 8}'
        raise UserError(f"layout.shard = {said!r} is not a table.", do=do)
    refuse_misspelled(set(), said, STATES, "layout.shard")
    # Ranks that were counted twice (see `_same_group`) are no shards of their own.
    given = {state: count(said, state, "layout.shard") for state in STATES if said.get(state) is not None}
    twice = ranks * count(words, "sp", "layout", 1)
    given = {state: ranks if value == twice else value for state, value in given.items()}
    found, least = {}, 1
    for state in STATES:
        least = found[state] = given.get(state, least)
    return found


def _batch(words: Words, samples: int | None, dp: int, notes: set[str]) -> tuple[int, int]:
    """(samples of a micro-batch, samples of a step)."""
    accumulate = count(words, "accumulate", "layout", 1)
    if "micro_batch" not in words:
        if samples is None:
            do = "train.batch_tokens, or layout.micro_batch and layout.accumulate"
            raise UserError("Nothing says how many samples a step has.", do=do)
        return max(1, -(-samples // (dp * accumulate))), samples
    micro_batch = count(words, "micro_batch", "layout")
    if samples is None:
        return micro_batch, dp * micro_batch * accumulate
    if dp > samples:
        raise UserError(
            f"layout.dp = {dp} is more than the batch of {samples} samples.", do=f"layout.dp = {samples} or fewer"
        )
    if "accumulate" in words and accumulate != -(-samples // (dp * micro_batch)):
        notes.add("layout.accumulate contradicts the batch, which was believed")
    return micro_batch, samples


def _devices(cluster: Cluster) -> tuple[int, bool]:
    """Devices that ranks sit on, and whether they are GPUs."""
    gpus = sum(node.count * node.devices for node in cluster.nodes if node.device.kind == "cuda")
    return (gpus, True) if gpus else (sum(node.count * node.devices for node in cluster.nodes), False)


def _with_threads(found: Layouts, cluster: Cluster) -> Layouts:
    """The layout on processors: each rank has its share of a device's cores as threads."""
    node, devices = cluster.nodes[0], _devices(cluster)[0]
    return replace(found, threads=max(1, node.cores // -(-int(found.world) // devices)))
