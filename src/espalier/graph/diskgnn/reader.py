"""Pipelined reader of packed mini-batches: features from device, host, page cache, disk cache and packed extents.

After DiskGNN (arXiv 2405.05231, section 6): five stages (blocks and labels, positions, features, assembly, training)
joined by queues of two batches. Beyond it: pages of a segment's disk cache that the next batches use stay in memory by
Belady's rule, every packed extent is compared with its checksum, and one that is damaged is packed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import gcd
from typing import Self

import numpy as np
import torch
from torch import Tensor

from espalier.graph.data import Array
from espalier.graph.diskgnn.access import Split
from espalier.graph.diskgnn.pack import PackedSet
from espalier.graph.diskgnn.page_cache import PageCache, pages_of, read_pages
from espalier.graph.diskgnn.pipeline import BoundedQueue, Pipeline
from espalier.graph.diskgnn.pool import SampledBatch
from espalier.store.cost import PAGE, pages
from espalier.store.direct_io import aligned
from espalier.store.extents import DamagedExtent
from espalier.store.io_queue import IoQueue

WINDOW = 16
"""Batches ahead whose pages are known when it is decided which stay in memory, and that are read in the order of the
pool, so that batches of a segment follow one another."""
CHUNK = 1 << 20
"""Bytes of rows that are placed at once."""


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


@dataclass(frozen=True)
class ReaderOptions:
    """What a reader may hold. `buffers`: batches that are read at once; `ahead`: assembled batches that wait;
    `cache_pages`: of Belady's cache; `device_rows`: hot rows, the most used, that lie on `device`."""

    buffers: int = 3
    ahead: int = 2
    cache_pages: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    device_rows: int = 0


@dataclass
class ReadBatch:
    """A batch while it is read. Has state: each stage of the pipeline adds its part.

    Attributes:
        index: of the batch in the packed set. future: the batches that follow.
        sampled: seeds and blocks. split: where the rows come from.
        features: float32 [inputs, width], None until they are assembled.
    """

    index: int
    future: Sequence[int] = ()
    sampled: SampledBatch | None = None
    split: Split | None = None
    keys: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    buffer: Tensor | None = None
    features: Tensor | None = None


class FeatureBuffers:
    """Page-aligned memory of `size` bytes for each assembled batch; it comes back when the last tensor in it is gone.

    What malloc keeps of freed tensors of changing sizes would be several times the memory allowed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._unused: list[Tensor] = []

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
        self._memory, self._unused = memory, unused
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


class TieredFeatures:
    """Rows of batches from all tiers. Has state: hot rows, the page cache, buffers, and what was read.

    Ranks that are forked after it was made share its hot rows. It starts threads at the first read.
    """

    def __init__(
        self, packed: PackedSet, options: ReaderOptions = ReaderOptions(), repair: Repair | None = None
    ) -> None:
        self.packed, self.options, self.repair, self.stats = packed, options, repair, TierStats()
        self.row_bytes = packed.row.row_bytes
        hot = self._hot_rows()
        self.near = min(options.device_rows, len(hot))
        self.hot, self._near_rows = hot[self.near :], hot[: self.near]
        self._splits: dict[int, Split] = {}
        self._cache: PageCache | None = None
        self._queue: IoQueue | None = None
        self._free: BoundedQueue | None = None
        self._buffers = FeatureBuffers(0)
        rows = max(1, CHUNK // max(1, self.row_bytes))
        self._stored = torch.empty(rows, self.row_bytes, dtype=torch.uint8)
        self._values = torch.empty(rows, packed.row.width)

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
        assert work.features is not None
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
        self._splits = {one: known.get(one) or self._split(one) for one in (work.index, *work.future)}
        work.split = self._splits[work.index]
        return work

    def _split(self, index: int) -> Split:
        packed, batch = self.place(index)
        return packed.split(batch)

    def features(self, work: ReadBatch) -> ReadBatch:
        """Reads the batch's own extent and the pages of its disk cache."""
        assert work.split is not None
        queue, free = self._opened()
        work.buffer = free.get()
        packed, batch = self.place(work.index)
        if work.buffer.nbytes < packed.pages(batch) * PAGE:  # of a batch that was drawn later
            work.buffer = aligned(packed.pages(batch) * PAGE)
        cold = self._cold_bytes(work.index)
        waiting = self._read_cold(work, queue) if cold else None
        work.keys = self._keys(work.index, work.split)
        self._read_pages(work, work.buffer[pages(cold) :], queue)
        if waiting is not None:
            waiting.result()
            self._check(work)
        return work

    def assemble(self, work: ReadBatch) -> ReadBatch:
        """Puts all rows in their places."""
        split, packed, stats = work.split, self.packed, self.stats
        assert split is not None
        assert work.buffer is not None
        rows = sum(len(one) for one in (split.hot_at, split.shared_at, split.cold_at))
        x = self._buffers.matrix(rows, packed.row.width)
        near = split.hot_slots < self.near
        far = ~near
        self._place(x, split.hot_at[far], self.hot, split.hot_slots[far].astype(np.int64) - self.near)
        cold = self._cold_bytes(work.index)
        dense = work.buffer[:cold].view(-1, self.row_bytes)
        self._place(x, split.cold_at, dense, np.arange(len(split.cold_at)))
        self._place_shared(x, work, split)
        work.features = self._with_device_rows(x, split.hot_at[near], split.hot_slots[near])
        stats.host += int(far.sum()) * self.row_bytes
        stats.device += int(near.sum()) * self.row_bytes
        stats.batches += 1
        assert self._free is not None
        self._free.put(work.buffer)
        work.buffer = work.split = None
        return work

    def _hot_rows(self) -> Tensor:
        """The rows in memory, packed again where they are damaged."""
        try:
            return self.packed.load_hot()
        except DamagedExtent as error:
            self._repaired(self.packed, "hot", error)
            return self.packed.load_hot()

    # --- reading -----------------------------------------------------------------------------------------------------

    def _opened(self) -> tuple[IoQueue, BoundedQueue]:
        if self._queue is None or self._free is None:
            size = PAGE * max((self.packed.pages(one) for one in range(len(self.packed.pool))), default=0)
            self._queue, self._free = IoQueue(), BoundedQueue(self.options.buffers)
            self._cache = PageCache(self.options.cache_pages)
            self._near_rows = self._near_rows.to(self.options.device)
            self._buffers = FeatureBuffers(4 * self.packed.row.width * self.packed.pool.most_inputs)
            for _ in range(self.options.buffers):
                self._free.put(aligned(size))
        return self._queue, self._free

    def _cold_bytes(self, batch: int) -> int:
        packed, number = self.place(batch)
        name = f"cold/{number}"
        return packed.rows.bytes(name) if name in packed.rows else 0

    def _read_cold(self, work: ReadBatch, queue: IoQueue) -> Future[None]:
        assert work.buffer is not None
        packed, batch = self.place(work.index)
        size = self._cold_bytes(work.index)
        self.stats.packed += pages(size)
        return queue.read(packed.rows.file, packed.rows.offset(f"cold/{batch}"), work.buffer[: pages(size)], size)

    def _check(self, work: ReadBatch) -> None:
        """Packs the batch's extent again where it is not what was written. Raises DamagedExtent where that fails."""
        packed, batch = self.place(work.index)
        name = f"cold/{batch}"
        assert work.buffer is not None
        try:
            packed.rows.check(name, work.buffer)
        except DamagedExtent as error:
            self._repaired(packed, name, error)
            packed.rows.read_into(name, work.buffer)

    def _repaired(self, packed: PackedSet, name: str, error: DamagedExtent) -> None:
        if self.repair is None or packed is not self.packed:
            raise error
        self.repair(name, error)
        self.stats.repaired.append(name)

    def _keys(self, batch: int, split: Split) -> Array:
        """The pages of the batch's disk cache that hold its shared rows."""
        return pages_of(split.shared_slots, self._cache_start(batch), self.row_bytes)

    def _cache_start(self, batch: int) -> int:
        """Where the disk cache of the batch's segment begins in the file of rows."""
        packed, number = self.place(batch)
        return packed.rows.offset(f"segment/{packed.segment_of(number)}")

    def _read_pages(self, work: ReadBatch, buffer: Tensor, queue: IoQueue) -> None:
        """Fills `buffer` with the pages `work.keys`, from memory where the cache holds them."""
        keys, cache = work.keys, self._cache
        assert cache is not None
        if not len(keys):
            return
        out = buffer[: len(keys) * PAGE].view(-1, PAGE)
        held = cache.take(keys, out)
        read_pages((queue, self.place(work.index)[0].rows.file), keys, np.flatnonzero(~held), out)
        self.stats.disk_cache += int((~held).sum()) * PAGE
        self.stats.page_cache += int(held.sum()) * PAGE
        if cache.capacity:
            cache.keep(keys, out, [self._keys(one, self._splits[one]) for one in work.future if one in self._splits])

    # --- placing -----------------------------------------------------------------------------------------------------

    def _place(self, x: Tensor, at: Array, table: Tensor, slots: Array) -> None:
        """x[at] = the rows of `table` (uint8 [rows, row_bytes]) at `slots`, a chunk at a time."""
        for chunk in self._chunks(len(at)):
            rows = self._stored[: len(at[chunk])]
            torch.index_select(table, 0, torch.from_numpy(slots[chunk]), out=rows)
            self._decoded(x, at[chunk], rows)

    def _chunks(self, rows: int) -> Iterator[slice]:
        step = len(self._stored)
        return (slice(begin, begin + step) for begin in range(0, rows, step))

    def _decoded(self, x: Tensor, at: Array, rows: Tensor) -> None:
        places, row = torch.from_numpy(at.astype(np.int64)), self.packed.row
        plain = row.stored == x.dtype
        x.index_copy_(0, places, rows.view(x.dtype) if plain else row.decode(rows, self._values[: len(rows)]))

    def _place_shared(self, x: Tensor, work: ReadBatch, split: Split) -> None:
        """The rows of the disk cache, which may begin anywhere in a page: gathered in units that divide both."""
        if not len(split.shared_at):
            return
        assert work.buffer is not None
        unit = gcd(self.row_bytes, PAGE)
        held = work.buffer[pages(self._cold_bytes(work.index)) :][: len(work.keys) * PAGE].view(-1, unit)
        place = self._cache_start(work.index) + split.shared_slots.astype(np.int64) * self.row_bytes
        begin = np.searchsorted(work.keys, place // PAGE) * PAGE + place % PAGE
        each = torch.arange(self.row_bytes // unit)
        for chunk in self._chunks(len(begin)):
            units = (torch.from_numpy(begin[chunk] // unit)[:, None] + each).view(-1)
            rows = self._stored[: len(begin[chunk])]
            torch.index_select(held, 0, units, out=rows.view(-1, unit))
            self._decoded(x, split.shared_at[chunk], rows)

    def _with_device_rows(self, x: Tensor, at: Array, slots: Array) -> Tensor:
        """`x` on the device, with the rows that lie there."""
        x = x.to(self.options.device, non_blocking=True)
        if len(at):
            rows = self._near_rows[torch.from_numpy(slots.astype(np.int64)).to(x.device)]
            places = torch.from_numpy(at.astype(np.int64)).to(x.device)
            x.index_copy_(0, places, self.packed.row.decode(rows, x.new_empty(len(rows), x.shape[1])))
        return x

    def close_sets(self) -> None:
        """Closes the files that rows are read from."""
        self.packed.close()

    def interrupt(self) -> None:
        """Ends what waits for a buffer."""
        if self._free is not None:
            self._free.close()

    def close(self) -> None:
        """Ends its threads and gives its buffers back; nothing may be read meanwhile."""
        self.interrupt()
        if self._queue is not None:
            self._queue.close()
        self._queue = self._free = self._cache = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PackedBatches(Iterator[ReadBatch]):
    """The batches `order` of a packed set with their features, read ahead. Has state: the pipeline's threads."""

    def __init__(self, features: TieredFeatures, order: Iterable[int]) -> None:
        self.features = features
        window = WINDOW if features.options.cache_pages else 0
        stages = (features.sample, features.positions, features.features, features.assemble)
        self._pipeline = Pipeline(_with_future(order, window), stages, features.options.ahead)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _with_future(order: Iterable[int], window: int) -> Iterator[ReadBatch]:
    """Each of `order`, with the `window` that follow it."""
    waiting: list[int] = []
    for one in order:
        waiting.append(one)
        if len(waiting) > window:
            yield ReadBatch(waiting[0], tuple(waiting[1:]))
            del waiting[0]
    for at, one in enumerate(waiting):
        yield ReadBatch(one, tuple(waiting[at + 1 :]))
