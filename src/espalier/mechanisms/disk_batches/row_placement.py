"""Access plan of DiskGNN: which feature rows stay in memory, which a segment's batches share on disk, which are packed.

After DiskGNN (arXiv 2405.05231, section 4). Rows are ranked by the number of batches that use them; the first fill the
memory. Of the others, a row that a segment of consecutive batches uses twice lies once in that segment's disk cache,
and every other row lies with its batch, in one sequential extent. Deviations: the segment length is the shortest whose
rows fit the disk budget exactly (not by extrapolation from the first segment), found for all lengths in one pass; the
pages of a disk cache are counted for each order (node ids, MinHash, RCM++), and the order that reads fewest is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from espalier.graph.data.graph import Array
from espalier.recipe.errors import UserError

PAGE = 4096
RCM_ENTRIES = 1 << 24
"""Uses of shared rows in a segment above which RCM++ is not tried: its traversals hold the uses twice in memory."""
DENSE = 64
"""Nodes of the graph for each of those sorted, up to which a pass over all is faster."""

Batches = Sequence[Array]
"""The input nodes of each batch: int64, read when they are asked for."""


@dataclass(frozen=True)
class Limits:
    """What an access plan may use.

    Attributes:
        hot_rows: rows that stay in memory; or int64, the nodes whose rows do.
        disk_rows: rows that may lie on disk, in caches and batches together; None: as many as the batches use, so that
            no segment shares any.
        row_bytes: of a packed row.
        ranges: int64 [ranges + 1], the first node of each range of the feature file that packing reads at once. Rows
            of an extent are in the order of their ranges, so that one pass over the file fills it from start to end.
        seed: of MinHash's permutations.
    """

    hot_rows: int | Array
    disk_rows: int | None
    row_bytes: int
    ranges: Array
    seed: int = 0


class AccessSplit(NamedTuple):
    """Where the rows of a batch come from. int32; each position of the batch stands in exactly one of the `_at` lists.

    Attributes:
        hot_at, hot_slots: positions, and the rank of each one's row among the hot rows.
        shared_at, shared_slots: positions, and the place of each one's row in the segment's disk cache.
        cold_at: positions whose rows are the batch's own extent, in its order.
    """

    hot_at: Array
    hot_slots: Array
    shared_at: Array
    shared_slots: Array
    cold_at: Array


@dataclass(frozen=True, eq=False)
class AccessPlan:
    """Levels of all rows that the batches use: a pure function of the batches and the limits.

    Attributes:
        nodes: of the graph. limits: what it was made for.
        hot: int64, nodes in memory, the most used first.
        length: batches in a segment.
        segments: of each segment int64, the nodes in its disk cache, in page order.
        orders: of each segment the name of that order.
        shared, cold: int64 [batches], rows that a batch takes from its segment's cache and from its own extent.
        cache_pages: int64 [batches], pages of the cache that a batch reads.
    """

    nodes: int
    limits: Limits
    hot: Array
    length: int
    segments: tuple[Array, ...]
    orders: tuple[str, ...]
    shared: Array
    cold: Array
    cache_pages: Array

    @property
    def batches(self) -> int:
        return len(self.cold)

    @property
    def disk_rows(self) -> int:
        """Rows in disk caches and batches."""
        return sum(map(len, self.segments)) + int(self.cold.sum())

    @cached_property
    def pages(self) -> Array:
        """int64 [batches]: 4 KiB pages that each batch reads, of its segment's cache and of its own extent."""
        return self.cache_pages + -(-self.cold * self.limits.row_bytes // PAGE)


class Splitter:
    """Splits batches of one plan. Has state: tables of the nodes' places, one filled for a segment at a time."""

    def __init__(self, hot: Array, segments: Sequence[Array], length: int, nodes: int) -> None:
        self.segments = segments
        self.length = length
        self._place = np.full(nodes, -1, np.int32)  # slot of a hot row; -2 - slot of a shared row; -1
        self._place[hot] = np.arange(len(hot), dtype=np.int32)
        self._filled = -1
        self._met = np.zeros(nodes, bool)
        self._at = np.zeros(nodes, np.int32)

    def split(self, batch: int, nodes: Array) -> AccessSplit:
        """The levels of the rows of `nodes`, the input nodes of that batch."""
        self._fill(batch // self.length)
        place = self._place[nodes]
        hot, shared, cold = (np.flatnonzero(level).astype(np.int32) for level in (place >= 0, place < -1, place == -1))
        return AccessSplit(hot, place[hot], shared, -2 - place[shared], cold[self._ascending(nodes[cold])])

    def _ascending(self, ids: Array) -> Array:
        """The order in which `ids`, each there once, ascend: of many by a pass over all nodes, faster than sorting."""
        if len(self._met) > DENSE * len(ids):
            return np.argsort(ids)
        self._met[ids], self._at[ids] = True, np.arange(len(ids), dtype=np.int32)
        ascending = np.flatnonzero(self._met)
        self._met[ascending] = False
        return self._at[ascending]

    def _fill(self, segment: int) -> None:
        if segment == self._filled:
            return
        if self._filled >= 0:
            self._place[self.segments[self._filled]] = -1
        ids = self.segments[segment]
        self._place[ids] = -2 - np.arange(len(ids), dtype=np.int32)
        self._filled = segment


def plan(batches: Batches, nodes: int, limits: Limits) -> AccessPlan:
    """The levels of the rows that `batches` use. Raises UserError where the disk budget cannot hold them."""
    hot = limits.hot_rows
    if isinstance(hot, int):
        hot = ranked(use_counts(batches, nodes))[: max(0, hot)]
    waits = np.ones(nodes, bool)  # the row is not in memory
    waits[hot] = False
    length = 1
    if limits.disk_rows is not None and len(batches):
        length = segment_length(stored_rows((ids[waits[ids]] for ids in batches), len(batches), nodes), limits)
    caches: list[DiskCache] = []
    place = np.full(nodes, -1, np.int32)
    for start in range(0, len(batches), length):
        stop = min(start + length, len(batches))
        caches.append(_cached([ids[waits[ids]] for ids in (batches[at] for at in range(start, stop))], place, limits))
    none = np.zeros(0, np.int64)
    shared, cold, pages = (np.concatenate([none, *(c[at] for c in caches)]) for at in (2, 3, 4))
    return AccessPlan(
        nodes, limits, hot, length, tuple(c.ids for c in caches), tuple(c.order for c in caches), shared, cold, pages
    )


class DiskCache(NamedTuple):
    """What the batches of a segment share on disk: its nodes in page order, the name of the order, and by batch the
    rows taken from it, those that are not in it, and the pages read."""

    ids: Array
    order: str
    shared: Array
    cold: Array
    pages: Array


def _cached(batches: Sequence[Array], place: Array, limits: Limits) -> DiskCache:
    """The disk cache for the rows of `batches`. `place`: int32 -1 [nodes], the same afterwards."""
    ids = _used_twice(batches, place)
    place[ids] = np.arange(len(ids), dtype=np.int32)
    inside = [place[ids] for ids in batches]
    place[ids] = -1
    uses = [np.unique(places[places >= 0]).astype(np.int64) for places in inside]
    order, name = page_order(uses, ids, limits)
    slots = _inverse(order)
    pages = [page_reads(np.sort(slots[used]), limits.row_bytes) for used in uses]
    cold = [int((places < 0).sum()) for places in inside]
    shared = [len(places) - alone for places, alone in zip(inside, cold, strict=True)]
    return DiskCache(ids[order], name, *(np.array(counts, np.int64) for counts in (shared, cold, pages)))


# --- memory ----------------------------------------------------------------------------------------------------------


def use_counts(batches: Iterable[Array], nodes: int) -> Array:
    """int32 [nodes]: the batches that use each node's row."""
    counts = np.zeros(nodes, np.int32)
    for ids in batches:
        counts[ids] += 1  # a node that stands twice in a batch counts once
    return counts


def ranked(counts: Array) -> Array:
    """int64: the nodes that are used, the most used first, equal ones by their ids."""
    used = np.flatnonzero(counts)
    return used[np.argsort(-counts[used].astype(np.int64), kind="stable")]


# --- segments --------------------------------------------------------------------------------------------------------


def stored_rows(cold: Iterable[Array], batches: int, nodes: int) -> Array:
    """int64 [batches + 1]: rows on disk for every segment length (0: none), the same rows stored once per segment.

    A row is stored anew in a batch where its last use was in an earlier segment. With the last uses of a batch's rows
    counted by batch, each length needs one look at the sums: the batches are passed over once.
    """
    total = np.zeros(batches + 1, np.int64)
    last = np.full(nodes, -1, np.int32)
    lengths = np.arange(1, batches + 1)
    for at, ids in enumerate(cold):
        rows = np.unique(ids)
        before = np.bincount(last[rows] + 1, minlength=at + 1).cumsum()  # [b]: rows whose last use was before batch b
        total[1:] += before[(at // lengths) * lengths]
        last[rows] = at
    return total


def segment_length(stored: Array, limits: Limits) -> int:
    """The shortest segment whose rows fit the disk budget: the less is shared, the more is read in sequence."""
    assert limits.disk_rows is not None
    fits = np.flatnonzero(stored[1:] <= limits.disk_rows)
    if len(fits):
        return int(fits[0]) + 1
    least = int(stored[1:].min())
    raise UserError(
        f"store.disk holds {limits.disk_rows:,} feature rows of {limits.row_bytes} bytes, which is too few.",
        why=f"beside those in memory, the batches use {least:,} different rows",
        do=f"store.disk of at least {least * limits.row_bytes:,} bytes, more store.memory, or fewer bits in store.rows",
    )


def _used_twice(batches: Sequence[Array], place: Array) -> Array:
    """int64, ascending: nodes that stand at two places or more in `batches`. `place`: `_cached`'s."""
    joined = np.concatenate([np.zeros(0, np.int64), *batches])
    places = np.arange(len(joined), dtype=np.int32)
    place[joined] = places
    repeated = np.unique(joined[place[joined] != places])  # a later place was written over it
    place[joined] = -1
    return repeated


# --- pages -----------------------------------------------------------------------------------------------------------


def page_reads(slots: Array, row_bytes: int) -> int:
    """Pages that hold the rows at `slots` (ascending, each once) of a dense file, whatever the size of a row."""
    if not len(slots) or not row_bytes:
        return 0
    first = slots * row_bytes // PAGE
    last = ((slots + 1) * row_bytes - 1) // PAGE
    return int((last - first + 1).sum()) - int((first[1:] == last[:-1]).sum())


def page_order(uses: Sequence[Array], ids: Array, limits: Limits) -> tuple[Array, str]:
    """The order of a disk cache's rows that reads the fewest pages, and its name.

    Args:
        uses: of each batch of the segment, the rows it uses: places in `ids`, ascending.
        ids: int64, ascending, the nodes of the cache.
    """
    rows = len(ids)
    group = np.searchsorted(limits.ranges, ids, side="right")

    def orders() -> Iterator[tuple[Array, str]]:
        yield np.arange(rows), "ids"
        if rows and len(uses) > 1:
            yield np.lexsort((_minhash(uses, rows, limits.seed), group)), "minhash"
            if sum(map(len, uses)) <= RCM_ENTRIES:
                yield np.lexsort((_rcm(uses, rows), group)), "rcm++"

    return min(orders(), key=lambda order: _reads(order[0], uses, limits))


def _reads(order: Array, uses: Sequence[Array], limits: Limits) -> int:
    slots = _inverse(order)
    return sum(page_reads(np.sort(slots[used]), limits.row_bytes) for used in uses)


def _inverse(order: Array) -> Array:
    slots = np.empty(len(order), np.int64)
    slots[order] = np.arange(len(order))
    return slots


def _minhash(uses: Sequence[Array], rows: int, seed: int) -> Array:
    """int64 [rows]: two MinHash values of the set of batches that use a row; equal with its Jaccard similarity."""
    random = np.random.default_rng([seed, len(uses), rows])
    batches = len(uses)
    key = np.zeros(rows, np.int64)
    for _ in range(2):
        least = np.full(rows, batches, np.int64)
        for used, value in zip(uses, random.permutation(batches), strict=True):
            least[used] = np.minimum(least[used], value)
        key = key * batches + least
    return key


def _rcm(uses: Sequence[Array], rows: int) -> Array:
    """int64 [rows]: the place of each row in the RCM++ order of the graph whose edges join rows to their batches."""
    from espalier.sparse.rcmpp.cuthill_mckee import rcmpp

    counts = [len(used) for used in uses]
    indptr = np.concatenate([np.zeros(rows, np.int64), [0], np.cumsum(counts)]).astype(np.int64)
    indices = np.concatenate(uses).astype(np.int64)
    return _inverse(rcmpp(indptr, indices))[:rows]
