"""Layouts, many at once: how ranks divide samples, tokens, matrices, layers and states. NumPy; no torch.

A replica of the model is `tp · sp · pp` ranks; `dp` replicas share the batch. Ranks are numbered tensor first, then
sequence, then replica, then stage, so that what talks most sits closest (Megatron-LM, arXiv 2104.04473, section 3). The
states of one stage are sharded over its `dp · sp` ranks of one tensor index, by factors that divide one another: each
shard of parameters holds whole shards of gradients, and each of those whole shards of optimizer states (AMSP, arXiv
2311.00257).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np

from espalier.errors import UserError
from espalier.plan.base import Layout
from espalier.shard.placement import ShardFactors

ALGORITHMS = ("data", "megatron", "fsp", "isp")
"""What tensor or sequence ranks do: nothing; Megatron's tensor and sequence parallelism; the same with only shards kept
for backward; tokens split everywhere and attention by all-to-all (DeepSpeed Ulysses, Buff's ISP)."""

MODES = ("none", "selective", "block")
"""Recomputation, from the least repeated work to the least memory."""


@dataclass(frozen=True)
class Layouts:
    """Layouts of one algorithm and one recomputation; every other field is an integer or an array [n] of them.

    `params`, `grads`, `optimizer`: over how many ranks each state is split. `micro_batch`: samples per replica.
    `hp`, `cp`: ranks that share a sequence's heads, and its tokens; `window`: of the latter, those of an inner ring.
    `chunks`: pieces of each stage (interleaved 1F1B). `threads`: of each rank on a processor.
    """

    algorithm: str = "data"
    recompute: str = "none"
    dp: Any = 1
    tp: Any = 1
    hp: Any = 1
    cp: Any = 1
    window: Any = 1
    pp: Any = 1
    params: Any = 1
    grads: Any = 1
    optimizer: Any = 1
    micro_batch: Any = 1
    chunks: Any = 1
    threads: int = 1

    @property
    def sp(self) -> Any:
        """Ranks that share a sequence."""
        return self.hp * self.cp

    @property
    def world(self) -> Any:
        """Ranks in all."""
        return self.dp * self.tp * self.sp * self.pp

    @property
    def shards(self) -> Any:
        """Ranks among which states can be split: `dp · sp`."""
        return self.dp * self.sp

    def __len__(self) -> int:
        return int(np.broadcast(*(np.asarray(getattr(self, name)) for name in NUMBERS)).size)

    def at(self, chosen: Any) -> Layouts:
        """The layouts at some indices (or one index) of the arrays."""
        arrays = np.broadcast_arrays(*(getattr(self, name) for name in NUMBERS))
        return replace(self, **{name: _plain(a.reshape(-1)[chosen]) for name, a in zip(NUMBERS, arrays, strict=True)})

    def each(self, chosen: Any) -> list[Layouts]:
        """The layouts at some indices, one by one."""
        arrays = np.broadcast_arrays(*(getattr(self, name) for name in NUMBERS))
        rows = zip(*(array.reshape(-1)[chosen].tolist() for array in arrays), strict=True)
        return [replace(self, **dict(zip(NUMBERS, row, strict=True))) for row in rows]

    def key(self) -> tuple[Any, ...]:
        """What orders equal plans. Fewer mechanisms (pipeline, cut matrices or tokens, sharded states), then less
        recomputation, then fewer states that are exchanged in every micro-batch."""
        mechanisms = (self.pp > 1) + (self.tp * self.sp > 1) + (self.optimizer > 1)
        return int(mechanisms), MODES.index(self.recompute), int(self.grads > 1) + int(self.params > 1)


NUMBERS = tuple(one.name for one in fields(Layouts) if one.name not in ("algorithm", "recompute", "threads"))
"""The fields that may be arrays."""


def _plain(value: Any) -> Any:
    return int(value) if np.ndim(value) == 0 else value


def view(layouts: Layouts, accumulate: int, precision: str) -> Layout:
    """One layout as people read it."""
    return Layout(
        dp=layouts.dp,
        tp=layouts.tp,
        sp=layouts.sp,
        cp=layouts.cp,
        window=layouts.window,
        pp=layouts.pp,
        algorithm=layouts.algorithm,
        shard={"params": layouts.params, "grads": layouts.grads, "optimizer": layouts.optimizer},
        micro_batch=layouts.micro_batch,
        accumulate=accumulate,
        recompute=layouts.recompute,
        precision=precision,
    )


def of_view(layout: Layout, chunks: int = 1) -> Layouts:
    """The layout that a view describes. Raises UserError naming what is not possible."""
    if layout.algorithm not in ALGORITHMS:
        raise UserError(f"layout.algorithm = {layout.algorithm!r} is not known.", do=f"one of {', '.join(ALGORITHMS)}")
    if layout.recompute not in MODES:
        raise UserError(f"layout.recompute = {layout.recompute!r} is not known.", do=f"one of {', '.join(MODES)}")
    if layout.accumulate < 1:
        raise UserError(f"layout.accumulate = {layout.accumulate} is not possible.", do="accumulate = 1 or more")
    sizes = {name: getattr(layout, name) for name in ("dp", "tp", "cp", "window", "pp", "micro_batch")}
    sizes["hp"] = layout.heads
    shard = {name: layout.shard.get(name, 1) for name in ("params", "grads", "optimizer")}
    for name, value in (*sizes.items(), *shard.items()):
        if value < 1:
            raise UserError(f"layout.{name} = {value} is not possible.", do=f"{name} = 1 or more")
    ShardFactors(**shard).check(layout.dp * layout.sp, "layout.shard")
    return Layouts(algorithm=layout.algorithm, recompute=layout.recompute, chunks=chunks, **sizes, **shard)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


@cache
def chains(ranks: int, per_node: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """All nested (params, grads, optimizer) factors of `ranks` [n, 3].

    Candidates (AMSP, section 2.2 of its reading): divisors of a node's `per_node` ranks, those times a divisor of the
    nodes, and all ranks.
    """
    inside = {d for d in divisors(ranks) if per_node % d == 0}
    node = max(inside)
    candidates = sorted(inside | {node * d for d in divisors(ranks // node)} | {ranks})
    found = [
        (params, grads, optimizer)
        for optimizer in candidates
        for grads in candidates
        if optimizer % grads == 0
        for params in candidates
        if grads % params == 0
    ]
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def grid(algorithm: str, world: int, per_node: int, limits: Limits) -> Iterator[Layouts]:
    """All layouts of an algorithm on `world` ranks, one batch of arrays for each recomputation."""
    rows: list[np.ndarray[Any, Any]] = []
    for pp in limits.stages(world):
        for tp, hp, cp, window in limits.cuts(algorithm, world // pp):
            sp = hp * cp
            dp = world // (pp * tp * sp)
            sizes = np.array(limits.micro_batches(dp), dtype=np.int64)
            if not len(sizes):
                continue
            factors = limits.factors(chains(dp * sp, max(1, per_node // tp)), dp * sp)
            if not len(factors):
                continue
            one = np.empty((len(factors), len(sizes), 10), dtype=np.int64)
            one[..., :6] = (dp, tp, hp, cp, window, pp)
            one[..., 6:9] = factors[:, None, :]
            one[..., 9] = sizes[None, :]
            # Sharded gradients are exchanged in every micro-batch, so the smallest share needs a sample for each.
            most, fewest = -(-limits.global_batch // dp), limits.global_batch // dp
            shared = (factors[:, None, 1] > 1) & (-(-most // sizes) > fewest)[None, :]
            rows.append(one[~shared])
    table = np.concatenate(rows).T if rows else np.empty((10, 0))
    if not table.size:
        return
    names = ("dp", "tp", "hp", "cp", "window", "pp", "params", "grads", "optimizer", "micro_batch")
    for mode in limits.modes:
        arrays: dict[str, Any] = dict(zip(names, table, strict=True))
        yield Layouts(algorithm=algorithm, recompute=mode, threads=limits.threads, **arrays)


@dataclass(frozen=True)
class Limits:
    """What a model, a batch and pins leave of the space.

    Attributes:
        heads, kv_heads, width: of a decoder; 0: a module that cannot be cut.
        layers: what stages are made of; global_batch: samples per step; sequence: tokens of one.
        modes: recomputations to consider; threads: of each rank.
        redundancy: ranks that must hold each optimizer shard.
        pins: names of `layout` -> the value asked for.
    """

    layers: int
    global_batch: int
    heads: int = 0
    kv_heads: int = 0
    width: int = 0
    sequence: int = 1
    modes: tuple[str, ...] = MODES
    threads: int = 1
    redundancy: int = 1
    pins: tuple[tuple[str, int], ...] = ()

    def _pinned(self, name: str, values: list[int]) -> list[int]:
        wanted = dict(self.pins).get(name)
        return values if wanted is None else [value for value in values if value == wanted]

    def stages(self, world: int) -> list[int]:
        """Numbers of pipeline stages."""
        most = self.layers if self.heads else 1
        return self._pinned("pp", [d for d in divisors(world) if d <= most])

    def cuts(self, algorithm: str, ranks: int) -> list[tuple[int, int, int, int]]:
        """(tensor, head, context ranks, ranks of an inner ring) of an algorithm."""
        if algorithm == "data":
            found = [(1, 1, 1, 1)]
        elif algorithm == "isp":
            found = [(1, d, 1, 1) for d in divisors(ranks) if d > 1 and self._heads(d) and self.sequence % d == 0]
        else:
            found = [(d, 1, 1, 1) for d in divisors(ranks) if d > 1 and self._heads(d) and self.sequence % d == 0]
        return [one for one in found if self._pinned("tp", [one[0]]) and self._pinned("sp", [one[1] * one[2]])]

    def _heads(self, ranks: int) -> bool:
        return bool(self.heads) and self.heads % ranks == 0 and self.width % ranks == 0

    def micro_batches(self, dp: int) -> list[int]:
        """Samples of a micro-batch: powers of two up to a replica's share, and the share itself."""
        if dp > self.global_batch or (dict(self.pins).get("dp") not in (None, dp)):
            return []
        share = -(-self.global_batch // dp)
        wanted, rounds = (dict(self.pins).get(name) for name in ("micro_batch", "accumulate"))
        if wanted is not None:
            sizes = [wanted] if wanted <= share else []
        elif rounds is not None:
            sizes = [-(-share // rounds)]
        else:
            sizes = sorted({*(2**k for k in range(share.bit_length()) if 2**k <= share), share})
        return [size for size in sizes if rounds is None or -(-share // size) == rounds]

    def factors(self, found: np.ndarray[Any, Any], ranks: int) -> np.ndarray[Any, Any]:
        """Of nested factors those that pins and redundancy allow."""
        keep = ranks // found[:, 2] >= self.redundancy
        for column, name in enumerate(("params", "grads", "optimizer")):
            wanted = dict(self.pins).get(name)
            if wanted is not None:
                keep = keep & (found[:, column] == wanted)
        return found[keep]
