"""What DiskGNN costs: sizes of the levels, seconds of packing and of an epoch, epochs after which packing pays.

Before anything is sampled, how often a node is used is estimated from the degrees alone: a draw ends at a node in
proportion to its degree, and whatever was met draws again in the next layer. Where the mean number of input nodes of a
batch is known (one drawn batch says it), the estimate is fitted to it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

import espalier.store.cost as store
from espalier.machine.cluster import Disk

Array = Any
TOGETHER = 16
"""Batches that are drawn at once where the edges lie on disk (hyperbatches)."""
LENGTHS = 64
"""Segment lengths that are tried between one batch and all of them."""


@dataclass(frozen=True, eq=False)
class Draws:
    """How batches are drawn.

    Attributes:
        degrees: int [nodes], edges of each node. items: training nodes. batch: of which a batch asks for so many.
        fanouts: neighbours per node, the layer next to the seeds first; -1: all.
        inputs: mean number of input nodes of a batch; None: as estimated.
    """

    degrees: Array
    items: int
    batch: int
    fanouts: tuple[int, ...]
    inputs: float | None = None

    @property
    def batches(self) -> int:
        """Of an epoch."""
        return -(-self.items // self.batch)

    @cached_property
    def groups(self) -> tuple[Array, Array]:
        """The different degrees, the largest first, and how many nodes have each."""
        degrees, counts = np.unique(np.asarray(self.degrees), return_counts=True)
        return degrees[::-1].astype(np.float64), counts[::-1].astype(np.float64)

    @cached_property
    def chance(self) -> Array:
        """float64 [groups]: the chance that a batch uses a node of that degree."""
        degrees, counts = self.groups
        edges, nodes = max(1.0, float(degrees @ counts)), counts.sum()
        seeds, share = min(1.0, self.batch / nodes), degrees / edges
        met = self._met(seeds, share)
        low, high = 0.0, max(1.0, met) * 1e3
        for _ in range(60 if self.inputs is not None else 0):  # the more is met, the more nodes are used
            met = (low + high) / 2
            low, high = (met, high) if _chance(seeds, met, share) @ counts < self.inputs else (low, met)
        return _chance(seeds, met, share)

    @property
    def used(self) -> float:
        """Input nodes of a batch, in the mean."""
        return float(self.chance @ self.groups[1])

    @property
    def edges(self) -> float:
        """Edges of a batch, in the mean; those that two layers share are counted once."""
        degrees, counts = self.groups
        return self._met(min(1.0, self.batch / counts.sum()), degrees / max(1.0, float(degrees @ counts)))

    def _met(self, seeds: float, share: Array) -> float:
        """Edges that all layers follow, each once: a node that draws again in the next layer meets some neighbours
        anew, and one of its neighbours is whom it was met by."""
        degrees, counts = self.groups
        cohorts: list[tuple[Array, Array]] = []  # nodes of each degree by the layer they were met in; not yet drawn
        met, known = 0.0, np.zeros_like(share)
        for fanout in self.fanouts:
            chance = _chance(seeds, met, share)
            fresh = np.maximum(degrees - 1, 0) if cohorts else degrees
            cohorts.append((counts * (chance - known), fresh))
            known = chance
            drawn = np.ones_like(degrees) if fanout < 0 else np.minimum(1, fanout / np.maximum(1, degrees))
            met += sum(float(many @ (left * drawn)) for many, left in cohorts)
            cohorts = [(many, left * (1 - drawn)) for many, left in cohorts]
        return met


def _chance(seeds: float, met: float, share: Array) -> Array:
    return 1 - (1 - seeds) * np.exp(-met * share)


@dataclass(frozen=True)
class StoredFeatures:
    """Features that wait on disk, as a plan is told of them.

    Attributes:
        draws: of the whole batches, with the input nodes of one that was drawn.
        row: a `RowFormat`; row_bytes: of a packed row. file_bytes: of the feature file.
        memory, disk: bytes that a machine may take of each; None: what the fastest layout takes.
        device: bytes that a rank may take of its GPU; None: half of what is free there.
        folder: where they are packed. edge_bytes: of edges that are sampled where they lie; 0: they are in memory.
        inferred: with so many bytes of memory, what rows of each layer but the first take when all nodes are inferred
            (`condensed_file.Foretold`); None: the network takes the graph as a whole.
    """

    draws: Draws
    row: Any
    row_bytes: int
    file_bytes: int
    memory: int
    disk: int | None
    folder: str
    edge_bytes: int = 0
    inferred: Callable[[int], Sequence[Any]] | None = field(default=None, repr=False, compare=False)
    device: int | None = None

    def sampling(self, disk: Disk) -> tuple[float, float]:
        """Bytes that drawing the pool reads of the edges, `TOGETHER` batches at once, and its seconds."""
        degrees, many = self.draws.degrees, -(-self.draws.batches // TOGETHER)
        edges = float(self.draws.groups[0] @ self.draws.groups[1])
        drawn = min(edges, self.draws.used * min(TOGETHER, self.draws.batches))
        row = max(1, round(self.edge_bytes / max(1.0, edges)))
        pages = many * float(store.pages_of_rows(drawn, edges, row) + store.pages_of_rows(drawn, len(degrees), 8))
        return pages * store.PAGE, float(store.read_seconds(disk, pages * store.PAGE, pages))


@dataclass(frozen=True)
class Levels:
    """Rows by level, and what an epoch reads of them.

    Attributes:
        row_bytes: of a packed row. batches: of an epoch. inputs: rows that they use together.
        hot: rows in memory. length: batches of a segment.
        cache: rows in the disk caches of all segments; packed: rows in the batches' own extents.
        shared: rows that an epoch takes from the caches; cache_pages: 4 KiB pages that it reads for them.
    """

    row_bytes: int
    batches: int
    inputs: float
    hot: float
    length: int
    cache: float
    packed: float
    shared: float
    cache_pages: float

    @property
    def hot_bytes(self) -> float:
        """In memory."""
        return self.hot * self.row_bytes

    @property
    def cache_bytes(self) -> float:
        """On disk, shared by the batches of a segment."""
        return self.cache * self.row_bytes

    @property
    def packed_bytes(self) -> float:
        """On disk, by batch, in whole pages."""
        return self.packed * self.row_bytes + self.batches * store.PAGE / 2

    @property
    def disk_bytes(self) -> float:
        """On disk, the rows in memory included: they are loaded from there."""
        return self.hot_bytes + self.cache_bytes + self.packed_bytes

    @property
    def epoch_bytes(self) -> float:
        """Read from disk in an epoch."""
        return self.packed_bytes + self.cache_pages * store.PAGE


def expected(draws: Draws, hot_rows: int, disk_rows: int | None, row_bytes: int) -> Levels:
    """The levels to expect before anything is sampled.

    Args:
        hot_rows: rows that memory holds. disk_rows: rows that may lie on disk (see `access.Limits`).
    """
    chance, counts = draws.chance, draws.groups[1]
    before = np.concatenate([[0.0], np.cumsum(counts)[:-1]])
    hot = np.clip(hot_rows - before, 0, counts)  # of each degree, the largest first
    cold = counts - hot
    lengths = np.unique(np.geomspace(1, draws.batches, LENGTHS).astype(np.int64))
    never = (1 - chance) ** lengths[:, None]
    segments = draws.batches / lengths
    stored = segments * ((1 - never) @ cold)
    fits = np.flatnonzero(stored <= disk_rows) if disk_rows is not None else [0]
    at = int(fits[0]) if len(fits) else len(lengths) - 1
    length = int(lengths[at])
    once = length * chance * (1 - chance) ** (length - 1)
    in_cache = float((1 - never[at] - once) @ cold)  # used by two batches of a segment, or more
    shared = float((chance - once / length) @ cold)  # of those, what one batch takes
    pages = float(store.pages_of_rows(min(shared, in_cache), in_cache, row_bytes)) if in_cache > 1 else 0.0
    return Levels(
        row_bytes,
        draws.batches,
        float(chance @ counts) * draws.batches,
        float(hot.sum()),
        length,
        in_cache * float(segments[at]),
        float(once @ cold) * float(segments[at]),
        shared * draws.batches,
        pages * draws.batches,
    )


def packing_seconds(levels: Levels, feature_bytes: float, disk: Disk) -> float:
    """One pass over the features, and all rows written."""
    read = store.read_seconds(disk, feature_bytes)
    return float(read + store.write_seconds(disk, levels.disk_bytes))


def epoch_seconds(levels: Levels, disk: Disk) -> float:
    """Of the disk, for the rows of an epoch from a packed set: hidden where computing takes longer."""
    packed = store.read_seconds(disk, levels.packed_bytes, levels.batches)
    return float(packed + store.read_seconds(disk, levels.cache_pages * store.PAGE, levels.cache_pages))


def gather_seconds(levels: Levels, nodes: int, disk: Disk) -> float:
    """Of the disk, for the same rows read from the feature file page by page, the same rows in memory."""
    cold = (levels.packed + levels.shared) / max(1, levels.batches)
    pages = float(store.pages_of_rows(min(cold, nodes), nodes, levels.row_bytes)) * levels.batches
    return float(store.read_seconds(disk, pages * store.PAGE, pages))


def break_even(levels: Levels, nodes: int, feature_bytes: float, disk: Disk) -> float:
    """Epochs after which packing and reading have taken less than reading the feature file; infinite: never."""
    saved = gather_seconds(levels, nodes, disk) - epoch_seconds(levels, disk)
    return packing_seconds(levels, feature_bytes, disk) / saved if saved > 0 else float("inf")
