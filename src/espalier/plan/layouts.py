"""Layouts, many at once: how ranks divide samples, tokens, matrices, layers and states. NumPy; no torch.

A replica of the model is `tp · sp · pp` ranks; `dp` replicas share the batch. Ranks are numbered tensor first, then
sequence, then replica, then stage, so that what talks most sits closest (Megatron-LM, arXiv 2104.04473, section 3). The
states of one stage are sharded over its `dp · sp` ranks of one tensor index, by factors that divide one another: each
shard of parameters holds whole shards of gradients, and each of those whole shards of optimizer states (AMSP, arXiv
2311.00257).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.plan.axes.placement import ShardFactors
from espalier.plan.base import Layout, Placement
from espalier.recipe import Pin
from espalier.recipe.cost import Profile
from espalier.recipe.errors import UserError

ALGORITHMS = ("data", "megatron", "fsp", "isp")
"""What tensor or sequence ranks do: nothing; Megatron's tensor and sequence parallelism; the same with only shards kept
for backward; tokens split everywhere and attention by all-to-all (DeepSpeed Ulysses, Buff's ISP)."""

MODES = ("none", "selective", "block")
"""Recomputation, from the least repeated work to the least memory."""


LONG = 8192
"""Tokens from which on sequences are cut by their tokens too (ring attention), and beside matrices. Below, attention is
a small part of a layer, and the space stays small."""


@dataclass(frozen=True)
class Layouts:
    """Layouts of one algorithm, recomputation and placement; every other field is one value or an array [n].

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
    placement: Placement = "head_first"
    schedule: Any = "1f1b"

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
        return int(np.broadcast(*(np.asarray(getattr(self, name)) for name in ARRAYS)).size)

    def at(self, chosen: Any) -> Layouts:
        """The layouts at some indices (or one index) of the arrays."""
        arrays = np.broadcast_arrays(*(getattr(self, name) for name in ARRAYS))
        picked = (array.reshape(-1)[chosen] for array in arrays)
        plain = (value.item() if np.ndim(value) == 0 else value for value in picked)
        return replace(self, **dict(zip(ARRAYS, plain, strict=True)))

    def each(self, chosen: Any) -> list[Layouts]:
        """The layouts at some indices, one by one."""
        arrays = np.broadcast_arrays(*(getattr(self, name) for name in ARRAYS))
        rows = zip(*(array.reshape(-1)[chosen].tolist() for array in arrays), strict=True)
        return [replace(self, **dict(zip(ARRAYS, row, strict=True))) for row in rows]

    def key(self) -> tuple[Any, ...]:
        """What orders equal plans. Fewer mechanisms (pipeline, cut matrices or tokens, sharded states), then less
        recomputation, then fewer states that are exchanged in every micro-batch."""
        nested = 1 < self.window < self.cp
        mechanisms = (
            (self.pp > 1)
            + (self.chunks > 1)
            + (self.schedule != "1f1b")
            + (self.tp > 1)
            + (self.hp > 1)
            + (self.cp > 1)
            + nested
            + (self.optimizer > 1)
        )
        return int(mechanisms), MODES.index(self.recompute), int(self.grads > 1) + int(self.params > 1)


ONE = ("algorithm", "recompute", "threads", "placement")
ARRAYS = tuple(field.name for field in fields(Layouts) if field.name not in ONE)
"""The fields that may be arrays."""


def stage_layers(layers: int, stages: int) -> list[tuple[int, int]]:
    """Layers `[first, last)` of each stage; the remainder goes to the last ones."""
    few, over = divmod(layers, stages)
    ends = [0, *itertools.accumulate(few + (index >= stages - over) for index in range(stages))]
    return list(itertools.pairwise(ends))


def view(layouts: Layouts, accumulate: int, precision: str) -> Layout:
    """One layout as people read it."""
    return Layout(
        dp=layouts.dp,
        tp=layouts.tp,
        sp=layouts.sp,
        cp=layouts.cp,
        window=layouts.window,
        placement=layouts.placement,
        schedule=layouts.schedule,
        interleave=layouts.chunks,
        pp=layouts.pp,
        algorithm=layouts.algorithm,
        shard={"params": layouts.params, "grads": layouts.grads, "optimizer": layouts.optimizer},
        micro_batch=layouts.micro_batch,
        accumulate=accumulate,
        recompute=layouts.recompute,
        precision=precision,
    )


def of_view(layout: Layout) -> Layouts:
    """The layout that a view describes. Raises UserError naming what is not possible."""
    if layout.algorithm not in ALGORITHMS:
        raise UserError(f"layout.algorithm = {layout.algorithm!r} is not known.", do=f"one of {', '.join(ALGORITHMS)}")
    if layout.recompute not in MODES:
        raise UserError(f"layout.recompute = {layout.recompute!r} is not known.", do=f"one of {', '.join(MODES)}")
    if layout.accumulate < 1:
        raise UserError(f"layout.accumulate = {layout.accumulate} is not possible.", do="accumulate = 1 or more")
    sizes: dict[str, Any] = {name: getattr(layout, name) for name in ("dp", "tp", "cp", "window", "pp", "micro_batch")}
    sizes |= {"hp": layout.heads, "chunks": layout.interleave}
    shard: dict[str, Any] = {name: layout.shard.get(name, 1) for name in ("params", "grads", "optimizer")}
    for name, value in (*sizes.items(), *shard.items()):
        if value < 1:
            raise UserError(f"layout.{name} = {value} is not possible.", do=f"{name} = 1 or more")
    ShardFactors(**shard).check(layout.dp * layout.sp, "layout.shard")
    words: dict[str, Any] = {"placement": layout.placement, "schedule": layout.schedule}
    return Layouts(algorithm=layout.algorithm, recompute=layout.recompute, **words, **sizes, **shard)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


@cache
def chains(ranks: int, per_node: int, few: bool = False) -> NDArray[np.int64]:
    """All nested (params, grads, optimizer) factors of `ranks` [n, 3].

    Candidates (AMSP, section 2.2 of its reading): divisors of a node's `per_node` ranks, those times a divisor of the
    nodes, and all ranks. `few`: only one rank, a node's, all, and one between these.
    """
    inside = {d for d in divisors(ranks) if per_node % d == 0}
    node = max(inside)
    candidates = sorted(inside | {node * d for d in divisors(ranks // node)} | {ranks})
    if few:
        larger = [factor for factor in candidates if factor >= node]
        candidates = sorted({1, node, larger[len(larger) // 2], ranks})
    nested = [
        (params, grads, optimizer)
        for optimizer in candidates
        for grads in candidates
        if optimizer % grads == 0
        for params in candidates
        if grads % params == 0
    ]
    return np.array(nested, dtype=np.int64).reshape(-1, 3)


def grid(algorithm: str, world: int, per_node: int, limits: Limits) -> Iterator[Layouts]:
    """All layouts of an algorithm on `world` ranks, one batch of arrays for each recomputation."""
    rows: list[NDArray[Any]] = []
    for pp in limits.stages(world):
        for tp, hp, cp, window in limits.cuts(algorithm, world // pp):
            sp = hp * cp
            dp = world // (pp * tp * sp)
            rows.append(_sharded((dp, tp, hp, cp, window, pp), limits.micro_batches(dp), per_node, limits))
    table = np.concatenate(rows).T if rows else np.empty((10, 0))
    if not table.size:
        return
    arrays: dict[str, Any] = dict(zip(COLUMNS, table, strict=True))
    only = limits.pin.placement
    placements: tuple[Placement, ...] = (only,) if only else ("head_first", "context_first")
    for placement in placements:
        # Which ranks are neighbours matters only where both heads and context are cut, or rings are nested.
        matter = (arrays["cp"] > 1) & ((arrays["hp"] > 1) | (placement == "interleaved") & (arrays["window"] > 1))
        nested = (placement != "interleaved") | (arrays["cp"] % (2 * arrays["window"]) == 0)
        distinct = np.flatnonzero((matter | (placement == placements[0])) & nested)
        chosen = {name: array[distinct] for name, array in arrays.items()}
        orders = list(limits.orders(chosen))
        if not orders:
            continue
        at = np.concatenate([indices for _, _, indices in orders])
        counts = [len(indices) for _, _, indices in orders]
        chosen = {name: array[at] for name, array in chosen.items()}
        chosen["schedule"] = np.repeat([schedule for schedule, _, _ in orders], counts)
        chosen["chunks"] = np.repeat([chunks for _, chunks, _ in orders], counts)
        for mode in limits.modes:
            yield Layouts(algorithm, mode, threads=limits.threads, placement=placement, **chosen)


COLUMNS = ("dp", "tp", "hp", "cp", "window", "pp", "params", "grads", "optimizer", "micro_batch")


def _sharded(degrees: tuple[int, ...], micro_batches: list[int], per_node: int, limits: Limits) -> NDArray[Any]:
    """`COLUMNS` of the layouts of these degrees (the first six) and micro-batches, with all factors [n, 10]."""
    dp, tp, hp, cp, _, _ = degrees
    ranks = dp * hp * cp
    batch = limits.profile.global_batch
    factors = limits.factors(chains(ranks, max(1, per_node // tp), limits.few), ranks)
    sizes = np.array(micro_batches, dtype=np.int64)
    block = np.empty((len(factors), len(sizes), 10), dtype=np.int64)
    block[..., :6] = degrees
    block[..., 6:9] = factors[:, None, :]
    block[..., 9] = sizes[None, :]
    # Sharded gradients and tokens of experts are exchanged in every micro-batch, so the smallest share needs a sample
    # for each.
    most = -(-batch // dp)
    fewest = batch // dp
    starved = (-(-most // sizes) > fewest)[None, :]
    return block[~(((factors[:, None, 1] > 1) | (limits.experts > 1)) & starved)]


def with_factors(cuts: Sequence[Layouts], per_node: int, limits: Limits) -> Layouts:
    """The layouts of some cuts of one algorithm, recomputation and placement, with all factors of their states."""
    tables = [
        _sharded(tuple(getattr(cut, name) for name in COLUMNS[:6]), [cut.micro_batch], per_node, limits) for cut in cuts
    ]
    counts = [len(table) for table in tables]
    arrays: dict[str, Any] = dict(zip(COLUMNS, np.concatenate(tables).T, strict=True))
    others: dict[str, Any] = {
        name: np.repeat([getattr(cut, name) for cut in cuts], counts) for name in ("schedule", "chunks")
    }
    return replace(cuts[0], **arrays, **others)


@dataclass(frozen=True)
class Limits:
    """What a model, a batch and pins leave of the space.

    Attributes:
        modes: recomputations to consider.
        threads: of each rank.
        per_node: ranks on one machine.
        redundancy: ranks that must hold each optimizer shard.
        experts: ranks of an expert group.
        few: only the factors that count most.
    """

    profile: Profile
    pin: Pin = field(default_factory=Pin)
    modes: tuple[str, ...] = MODES
    per_node: int = 1
    threads: int = 1
    redundancy: int = 1
    experts: int = 1
    few: bool = False

    def stages(self, world: int) -> list[int]:
        """Numbers of pipeline stages."""
        most = self.profile.layers if self.profile.heads else 1
        return [d for d in divisors(world) if d <= most and self.pin.pp in (None, d)]

    def orders(self, arrays: dict[str, Any]) -> Iterator[tuple[str, int, Any]]:
        """(schedule, stages on each rank, indices of the layouts that have them): 1F1B for all; for pipelines also with
        two stages on each rank, and zero bubble."""
        pinned = self.pin.interleave
        only = self.pin.schedule
        for schedule in (only,) if only else ("1f1b", "zero_bubble"):
            for chunks in (pinned,) if pinned else (1, 2) if schedule == "1f1b" else (1,):
                several = (arrays["pp"] > 1) & (arrays["pp"] * chunks <= self.profile.layers)
                plain = chunks == 1 and schedule in (only, "1f1b")
                indices = np.flatnonzero(several | (arrays["pp"] == 1) if plain else several)
                if len(indices):
                    yield schedule, chunks, indices

    def cuts(self, algorithm: str, ranks: int) -> list[tuple[int, int, int, int]]:
        """(tensor, head, context ranks, ranks of an inner ring) of an algorithm."""
        if algorithm == "data":
            all_degrees = [(1, 1, 1, 1)]
        elif not self.profile.heads:
            tensor = self.profile.tensor
            all_degrees = [(tensor, 1, 1, 1)] if ranks % tensor == 0 else []
        elif algorithm == "isp":
            all_degrees = [(1, *sequence) for sp in divisors(ranks) if sp > 1 for sequence in self._sequences(1, sp)]
        else:
            length = self.profile.tokens_per_sample
            all_degrees = [
                (tp, *sequence)
                for tp in divisors(ranks)
                if tp > 1 and self._heads(tp) and length % tp == 0
                for sp in (divisors(ranks // tp) if self._long and tp <= self.per_node else (1,))
                for sequence in self._sequences(tp, sp)
            ]
        pin = self.pin
        wanted = pin.tp, pin.hp, pin.cp, pin.window
        return [
            degrees
            for degrees in all_degrees
            if pin.sp in (None, degrees[1] * degrees[2])
            and all(value in (None, degree) for value, degree in zip(wanted, degrees, strict=True))
        ]

    @property
    def _long(self) -> bool:
        """Whether sequences are cut by their tokens too, and beside matrices."""
        pin = self.pin
        return self.profile.tokens_per_sample >= LONG or (pin.sp, pin.hp, pin.cp, pin.window) != (None,) * 4

    def _sequences(self, tp: int, sp: int) -> list[tuple[int, int, int]]:
        """(head ranks, context ranks, ranks of an inner ring) of `sp` ranks that share a sequence. Of head ranks the
        most, the most that stand in one machine, and one (LoongTrain, arXiv 2406.18485, section 4.5)."""
        if (length := self.profile.tokens_per_sample) % sp or length < 2 * tp * sp:
            return []
        possible = [hp for hp in divisors(sp) if self._heads(tp * hp)]
        if not self._long:
            return [(sp, 1, 1)] if sp in possible else []
        near = [hp for hp in possible if tp * hp <= self.per_node]
        pinned = self.pin.hp
        heads = sorted({max(possible), max(near, default=1), 1} if pinned is None else {pinned} & set(possible))
        return [(hp, sp // hp, window) for hp in heads for window in self._windows(tp, hp, sp // hp)]

    def _windows(self, tp: int, hp: int, cp: int) -> list[int]:
        """Ranks of an inner ring: all of the ring, and those that one machine holds."""
        if (pinned := self.pin.window) is not None:
            return [pinned] if cp % pinned == 0 else []
        inside = max(d for d in divisors(cp) if d == 1 or d * tp * hp <= self.per_node)
        return sorted({cp} | ({inside} if inside > 1 else set()))

    def _heads(self, ranks: int) -> bool:
        return self.profile.heads > 0 and self.profile.heads % ranks == self.profile.width % ranks == 0

    def micro_batches(self, dp: int) -> list[int]:
        """Samples of a micro-batch: powers of two up to a replica's share, and the share itself."""
        if dp > self.profile.global_batch or self.pin.dp not in (None, dp):
            return []
        share = -(-self.profile.global_batch // dp)
        wanted = self.pin.micro_batch
        rounds = self.pin.accumulate
        if wanted is not None:
            sizes = [wanted] if wanted <= share else []
        elif rounds is not None:
            sizes = [-(-share // rounds)]
        else:
            sizes = sorted({*(2**k for k in range(share.bit_length()) if 2**k <= share), share})
        return [size for size in sizes if rounds is None or -(-share // size) == rounds]

    def factors(self, factors: NDArray[Any], ranks: int) -> NDArray[Any]:
        """Of nested factors those that pins and redundancy allow."""
        keep = (ranks // factors[:, 2] >= self.redundancy) & (ranks % self.experts == 0)
        if self.few and self.experts > 1:  # many degrees of experts are searched: gradients as one of the others
            keep = keep & np.isin(factors[:, 1], (1, ranks)) & np.isin(factors[:, 0], (1, ranks))
        for column, name in enumerate(("params", "grads", "optimizer")):
            if (wanted := getattr(self.pin.shard, name, None)) is not None:
                keep = keep & (factors[:, column] == wanted)
        return factors[keep]
