"""Pipelined reader of packed mini-batches: features from device, host, page cache, disk cache and packed extents.

After DiskGNN (arXiv 2405.05231, section 6): five stages (blocks and labels, positions, features, assembly, training)
joined by queues of two batches. Beyond it: pages of a segment's disk cache that the next batches use stay in memory by
Belady's rule, everything read is compared with its checksum, and an extent that is damaged is packed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from espalier.graph.data.graph import Array
from espalier.mechanisms.disk_batches.batch_pool import Pool, SampledBatch
from espalier.mechanisms.disk_batches.pack import PackedSet
from espalier.mechanisms.disk_batches.row_placement import AccessSplit
from espalier.recipe.resource import Resource
from espalier.store.budget import Budget
from espalier.store.cost import PAGE
from espalier.store.direct_io import aligned
from espalier.store.extents import DamagedExtent
from espalier.store.io_queue import IoQueue
from espalier.store.page_cache import PageCache, pages_of
from espalier.store.prefetch import BoundedQueue, PrefetchPipeline
from espalier.store.tiers import ExtentTier, Fetched, MemoryTier, PageTier, TierRows, place_rows

WINDOW = 16
"""Batches ahead whose pages are known when it is decided which stay in memory, and that are read in the order of the
pool, so that batches of a segment follow one another."""


def batch_order(batches: int, epoch: int, seed: int) -> Array:
    """int64 [batches]: the order of the pool's batches in an epoch. In the first it is the pool's own, in which they
    were drawn; later it is random, and ascending inside windows. Memory and disk budgets do not change it."""
    if epoch == 0:
        return np.arange(batches)
    order = np.random.default_rng([seed, 0xD15C, epoch]).permutation(batches)
    return np.concatenate([np.sort(order[at : at + WINDOW]) for at in range(0, batches, WINDOW)] or [order])


@dataclass
class TierStats:
    """What was read since the reader was opened: bytes by tier, batches, seconds that training waited, and extents that
    were damaged and packed again."""

    batches: int = 0
    device: int = 0
    host: int = 0
    page_cache: int = 0
    disk_cache: int = 0
    packed: int = 0
    stalled: float = 0.0
    repaired: list[str] = field(default_factory=list)

    def bytes(self) -> dict[str, int]:
        """Read from each tier."""
        return {name: getattr(self, name) for name in TIERS}


TIERS = ("device", "host", "page_cache", "disk_cache", "packed")


class LargestBatch(NamedTuple):
    """Of a pool: input nodes, and bytes of the blocks as they are read."""

    inputs: int
    blocks: int = 0

    @classmethod
    def of(cls, pool: Pool) -> Self:
        """Of one that was sampled."""
        return cls(pool.most_inputs, pool.most_blocks)

    def positions(self, batches: int) -> int:
        """Bytes of where the rows of so many batches come from, as it lies on disk."""
        return 8 * self.inputs * batches


@dataclass(frozen=True)
class ReaderOptions:
    """What a reader may hold.

    Attributes:
        buffers: batches that are read at once. ahead: assembled batches that wait. in_use: those that training holds.
        cache_pages: of Belady's cache.
        memory: bytes of all that, hot rows included; None: no limit.
        shared: whether hot rows are mapped from the packed set, so that all processes of a machine hold them once.
    """

    buffers: int = 3
    ahead: int = 2
    in_use: int = 2
    cache_pages: int = 0
    memory: int | None = None
    shared: bool = False

    def sizes(self, largest: LargestBatch, read: int, width: int) -> dict[str, int]:
        """Bytes that batches on their way take at most, by what they are. `read`: bytes of the buffer of each; `width`:
        values of a row.

        Blocks, whose int32 is widened, are there from the first stage until training has ended; positions are widened
        when rows are read.
        """
        waiting = self.in_use + self.ahead + 1
        blocks = 2 * largest.blocks * (self.in_use + self.buffers + 3 * (self.ahead + 1))
        positions = 1 + self.ahead + 3 * self.buffers + (WINDOW if self.cache_pages else 0)
        return {
            "blocks and positions of batches": blocks + largest.positions(positions),
            f"{self.buffers} batches that are read": self.buffers * read,
            f"{waiting} batches that are assembled": waiting * 4 * largest.inputs * width,
            "pages of disk caches": self.cache_pages * PAGE,
        }


@dataclass
class ReadBatch:
    """A batch while it is read. Has state: each stage of the pipeline adds its part.

    Attributes:
        index: of the batch in the packed set. future: the batches that follow.
        sampled: seeds and blocks. split: where the rows come from. pages: that the batches that follow use.
        fetched: its rows on their way, which lie in `buffer` or in memory.
        features: float32 [inputs, width], once they are assembled.
    """

    index: int
    future: Sequence[int] = ()
    sampled: SampledBatch = field(init=False)
    split: AccessSplit | None = None
    pages: Sequence[Array] = ()
    fetched: Sequence[tuple[TierRows, Fetched]] = ()
    buffer: Tensor = field(init=False)
    features: Tensor = field(init=False)


@dataclass
class FeatureBuffers:
    """Page-aligned memory of `size` bytes for each assembled batch; it comes back when the last tensor in it is gone.

    What malloc keeps of freed tensors of changing sizes would be several times the memory allowed.
    """

    size: int
    _unused: list[Tensor] = field(default_factory=list)

    def matrix(self, rows: int, width: int) -> Tensor:
        """float32 [rows, width], not filled."""
        memory = self._unused.pop() if self._unused else aligned(self.size)
        if memory.nbytes < 4 * rows * width:  # of a batch that was drawn later
            memory = aligned(4 * rows * width)
        lease = _Lease(memory, self._unused)
        return torch.from_numpy(np.asarray(lease)[: 4 * rows * width].view(np.float32).reshape(rows, width))


class _Lease:
    """Owns the memory of an array; NumPy and torch keep it as long as they need that."""

    def __init__(self, memory: Tensor, unused: list[Tensor]) -> None:
        self._memory = memory
        self._unused = unused
        self.__array_interface__ = {
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }

    def __del__(self) -> None:
        self._unused.append(self._memory)


Repair = Callable[[str, DamagedExtent], None]
"""Writes an extent that is damaged again; the error says what was found."""


class TieredFeatures(Resource):
    """Rows of batches from all tiers. Has state: hot rows, the page cache, buffers, and what was read.

    Ranks that are forked after it was made share its hot rows. It starts threads at the first read. `budget` says what
    is held; UserError is raised where that is more than `options.memory`.
    """

    def __init__(
        self, packed: PackedSet, options: ReaderOptions = ReaderOptions(), repair: Repair | None = None
    ) -> None:
        self.packed, self.options, self.repair, self.stats = packed, options, repair, TierStats()
        self.budget = Budget(1 << 62 if options.memory is None else options.memory)
        self.row_bytes = packed.row.row_bytes
        self.budget.take(packed.hot_rows * self.row_bytes, "hot rows")
        self._hot = self._hot_rows()
        self.device = torch.device("cpu")
        self.keep_near(0)
        self._decode = None if packed.row.stored == torch.float32 else packed.row.decode
        self._splits: dict[int, tuple[AccessSplit, Array]] = {}
        self._open = ExitStack()
        self._queue: IoQueue | None = None
        self._cache = PageCache(0)
        self._free = BoundedQueue(options.buffers)
        self._buffers = FeatureBuffers(0)

    def keep_near(self, size: int) -> None:
        """The most used of the hot rows, `size` bytes of them at most, lie on `device` from the first read on."""
        hot, slots = self._hot
        self.near = min(size // self.row_bytes, self.packed.hot_rows)
        near = hot[: self.near] if slots is None else hot[torch.from_numpy(slots[: self.near])]
        far = hot[self.near :] if slots is None else hot
        self._near = MemoryTier("device", near)
        self._far = MemoryTier("host", far, None if slots is None else slots[self.near :])

    def order(self, entries: Iterable[tuple[int, int]], last: int | None = None) -> Iterator[int]:
        """What `place` is asked for each (epoch, batch); `last`: the last epoch that will be read, None: not known."""
        return (batch for _, batch in entries)

    def place(self, index: int) -> tuple[PackedSet, int]:
        """The set that holds a batch, and its number there."""
        return self.packed, index

    def read(self, batch: int) -> Tensor:
        """float32 [inputs, width]: the features of the input nodes of `batch`, in the order of its first block."""
        work = ReadBatch(batch)
        for stage in (self.positions, self.features, self.assemble):
            work = stage(work)
        return work.features

    # --- the stages --------------------------------------------------------------------------------------------------

    def sample(self, work: ReadBatch) -> ReadBatch:
        """Blocks and seeds."""
        packed, batch = self.place(work.index)
        work.sampled = packed.pool[batch]
        return work

    def positions(self, work: ReadBatch) -> ReadBatch:
        """Where each row comes from, now and in the batches that follow."""
        known = self._splits
        self._splits = {batch: known.get(batch) or self._split(batch) for batch in (work.index, *work.future)}
        work.split = self._splits[work.index][0]
        work.pages = [self._splits[batch][1] for batch in work.future]
        return work

    def _split(self, index: int) -> tuple[AccessSplit, Array]:
        """Of a batch, and the pages that it reads of its segment's disk cache."""
        packed, batch = self.place(index)
        split = packed.split(batch)
        return split, self._keys(index, split)

    def _keys(self, index: int, split: AccessSplit) -> Array:
        packed, batch = self.place(index)
        start = packed.rows.offset(f"segment/{packed.segment_of(batch)}")
        return pages_of(split.shared_slots, start, self.row_bytes)

    def features(self, work: ReadBatch) -> ReadBatch:
        """Reads the batch's own extent and the pages of its disk cache."""
        self._opened()
        parts = self._parts(work)
        at = 0
        sizes = [part.tier.buffer_bytes(part.slots) for part in parts]
        work.buffer = self._free.get()
        if work.buffer.nbytes < sum(sizes):  # of a batch that was drawn later
            work.buffer = aligned(sum(sizes))
        rooms = []
        for size in sizes:
            rooms.append(work.buffer[at : at + size])
            at += size
        begun = [part.tier.fetch(part.slots, room) for part, room in zip(parts, rooms, strict=True)]
        for number, (part, room) in enumerate(zip(parts, rooms, strict=True)):
            try:
                begun[number].wait()
            except DamagedExtent as error:
                assert isinstance(part.tier, ExtentTier | PageTier)
                self._repaired(self.place(work.index)[0], part.tier.extent, error)
                begun[number] = part.tier.fetch(part.slots, room)
                begun[number].wait()
            for name, size in begun[number].bytes.items():
                setattr(self.stats, name, getattr(self.stats, name) + size)
        work.fetched = list(zip(parts, begun, strict=True))
        return work

    def assemble(self, work: ReadBatch) -> ReadBatch:
        """Puts all rows in their places, those of the device on the device."""
        row = self.packed.row
        x = self._buffers.matrix(sum(len(part.places) for part, _ in work.fetched), row.width)
        near, *others = work.fetched
        for part, fetched in others:
            place_rows(fetched, x, part.places, self.row_bytes, self._decode)
        x = x.to(self.device, non_blocking=True)
        place_rows(near[1], x, near[0].places, self.row_bytes, self._decode)
        self.stats.batches += 1
        self._free.put(work.buffer)
        work.features, work.split, work.fetched = x, None, ()
        del work.buffer
        return work

    def _parts(self, work: ReadBatch) -> list[TierRows]:
        """What the batch takes of each tier, the device first."""
        assert work.split is not None
        assert self._queue is not None
        split, (packed, batch) = work.split, self.place(work.index)
        slots = _wide(split.hot_slots)
        places = _wide(split.hot_at)
        near = slots < self.near
        cold = ExtentTier(packed.rows, f"cold/{batch}", self.row_bytes, self._queue)
        segment = f"segment/{packed.segment_of(batch)}"
        shared = PageTier(packed.rows, segment, self.row_bytes, self._queue, self._cache, work.pages)
        return [
            TierRows(self._near, slots[near], places[near]),
            TierRows(cold, np.arange(len(split.cold_at)), _wide(split.cold_at)),
            TierRows(shared, _wide(split.shared_slots), _wide(split.shared_at)),
            TierRows(self._far, slots[~near] - self.near, places[~near]),
        ]

    def _hot_rows(self) -> tuple[Tensor, Array | None]:
        """Hot rows, and where each lies, None: by rank. They are packed again where they are damaged."""
        mapped = self.options.shared and self.packed.hot_rows
        load = self.packed.map_hot if mapped else lambda: (self.packed.load_hot(), None)
        try:
            return load()
        except DamagedExtent as error:
            self._repaired(self.packed, "hot", error)
            return load()

    def _repaired(self, packed: PackedSet, name: str, error: DamagedExtent) -> None:
        if self.repair is None or packed is not self.packed:
            raise error
        self.repair(name, error)
        self.stats.repaired.append(name)

    # --- what is held ------------------------------------------------------------------------------------------------

    def _opened(self) -> None:
        """Takes the memory that batches are read into, and starts the threads that read."""
        if self._queue is not None:
            return
        options = self.options
        width = self.packed.row.width
        largest = LargestBatch.of(self.packed.pool)
        size = PAGE * int(self.packed.pages[:, 1].max(initial=0))
        for what, taken in options.sizes(largest, size, width).items():
            self._open.enter_context(self.budget.take(taken, what))
        self._queue = self._open.enter_context(IoQueue())
        self._free = BoundedQueue(options.buffers)
        self._cache = PageCache(options.cache_pages)
        self._near.rows = self._near.rows.to(self.device)
        self._buffers = FeatureBuffers(4 * largest.inputs * width)
        for _ in range(options.buffers):
            self._free.put(aligned(size))

    def close_sets(self) -> None:
        """Closes the files that rows are read from."""
        self.packed.close()

    def interrupt(self) -> None:
        """Ends what waits for a buffer."""
        self._free.close()

    def close(self) -> None:
        """Ends its threads and gives its buffers back; nothing may be read meanwhile."""
        self.interrupt()
        self._open.close()
        self._queue = None
        self._cache = PageCache(0)
        self._buffers = FeatureBuffers(0)


def _wide(numbers: Array) -> Array:
    return numbers.astype(np.int64)


class PackedBatches(Iterator[ReadBatch], Resource):
    """The batches `order` of a packed set with their features, read ahead. Has state: the pipeline's threads."""

    def __init__(self, features: TieredFeatures, order: Iterable[int]) -> None:
        self.features = features
        window = WINDOW if features.options.cache_pages else 0
        stages = (features.sample, features.positions, features.features, features.assemble)
        self._pipeline = PrefetchPipeline(_with_future(order, window), stages, features.options.ahead)

    def __next__(self) -> ReadBatch:
        """The next batch. Raises what happened while it was read."""
        begun = time.perf_counter()
        try:
            return next(self._pipeline)
        finally:
            self.features.stats.stalled += time.perf_counter() - begun

    def close(self) -> None:
        """Ends reading."""
        self.features.interrupt()
        self._pipeline.close()
        self.features.close()


def _with_future(order: Iterable[int], window: int) -> Iterator[ReadBatch]:
    """Each of `order`, with the `window` that follow it."""
    waiting: list[int] = []
    for batch in order:
        waiting.append(batch)
        if len(waiting) > window:
            yield ReadBatch(waiting[0], tuple(waiting[1:]))
            del waiting[0]
    for at, batch in enumerate(waiting):
        yield ReadBatch(batch, tuple(waiting[at + 1 :]))
