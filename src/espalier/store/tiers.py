"""Tiers: where rows wait, in device memory, host memory, single pages of a file or whole extents, behind one interface.

Rows are bytes, asked for by their slots in a tier. A batch takes its rows from several tiers (`TierRows`): `fetch`
begins all transfers into one buffer, `place_rows` puts every row where it belongs once they have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.store.cost import PAGE, pages
from espalier.store.extents import ExtentFile
from espalier.store.io_queue import IoQueue
from espalier.store.page_cache import PageCache, pages_of, read_pages

CHUNK = 1 << 20
"""Bytes of rows that are decoded at once."""
Array = NDArray[np.int64]
Decode = Callable[[Tensor, Tensor], object]
"""Turns stored rows (uint8 [n, row bytes]) into values (float32 [n, width], filled)."""


@dataclass(frozen=True)
class Fetched:
    """Rows on their way: the k-th begins at byte `begins[k]` of `memory` once `wait` has returned.

    Attributes:
        wait: raises DamagedExtent where what was read is not what was written.
        bytes: by the name of the tier that they come from.
    """

    memory: Tensor
    begins: Array
    wait: Callable[[], None]
    bytes: Mapping[str, int]


class TierRows(NamedTuple):
    """The rows at `slots` of a tier, which belong at `places` of the result."""

    tier: Tier
    slots: Array
    places: Array


class MemoryTier:
    """Rows that are a tensor, uint8 [rows, row bytes], on any device. `slots`: where each one lies, if not in order."""

    def __init__(self, name: str, rows: Tensor, slots: Array | None = None) -> None:
        self.name = name
        self.rows = rows
        self.slots = slots

    def buffer_bytes(self, slots: Array) -> int:
        """Bytes, whole pages, of the buffer that `fetch` needs for these rows."""
        return 0

    def fetch(self, slots: Array, buffer: Tensor) -> Fetched:
        """Begins to bring the rows at `slots`; `buffer` (uint8, page-aligned) is the tier's until they are placed."""
        size = self.rows.shape[1]
        at = slots if self.slots is None else self.slots[slots]
        return Fetched(self.rows.view(-1), at.astype(np.int64) * size, _nothing, {self.name: len(slots) * size})


@dataclass(frozen=True)
class ExtentTier:
    """All rows of one extent, read in sequence and compared with its checksum."""

    file: ExtentFile
    extent: str
    row_bytes: int
    queue: IoQueue

    def buffer_bytes(self, slots: Array) -> int:
        return pages(self.file.bytes(self.extent)) if len(slots) else 0

    def fetch(self, slots: Array, buffer: Tensor) -> Fetched:
        room = buffer[: self.buffer_bytes(slots)]
        if not len(room):
            return Fetched(room, slots, _nothing, {})
        read = self.queue.read(self.file.file, self.file.offset(self.extent), room, self.file.bytes(self.extent))

        def wait() -> None:
            read.result()
            self.file.check(self.extent, room)

        return Fetched(room, slots * self.row_bytes, wait, {"packed": len(room)})


@dataclass(frozen=True)
class PageTier:
    """Single rows of one extent, by the pages that hold them, each compared with its checksum. Pages that the accesses
    of `future` (their page numbers) use next stay in `cache`."""

    file: ExtentFile
    extent: str
    row_bytes: int
    queue: IoQueue
    cache: PageCache
    future: Sequence[Array] = ()

    def keys(self, slots: Array) -> Array:
        """int64, ascending: the pages of the file that hold the rows."""
        return pages_of(slots, self.file.offset(self.extent), self.row_bytes) if len(slots) else slots

    def buffer_bytes(self, slots: Array) -> int:
        return len(self.keys(slots)) * PAGE

    def fetch(self, slots: Array, buffer: Tensor) -> Fetched:
        keys = self.keys(slots)
        out = buffer[: len(keys) * PAGE].view(-1, PAGE)
        cached = self.cache.take(keys, out)
        missing = np.flatnonzero(~cached)
        reads = read_pages((self.queue, self.file.file), keys, missing, out)

        def wait() -> None:
            for read in reads:
                read.result()
            self.file.check_pages(self.extent, keys[missing], out, missing)
            if self.cache.capacity:
                self.cache.keep(keys, out, self.future)

        begin = self.file.offset(self.extent) + slots * self.row_bytes if len(slots) else slots
        place = np.searchsorted(keys, begin // PAGE) * PAGE + begin % PAGE
        moved = {"disk_cache": len(missing) * PAGE, "page_cache": (len(keys) - len(missing)) * PAGE}
        return Fetched(out.view(-1), place, wait, moved)


Tier = MemoryTier | ExtentTier | PageTier
"""Rows in one kind of memory."""


def _nothing() -> None:
    """Rows in memory are there."""


def place_rows(fetched: Fetched, out: Tensor, places: Array, row_bytes: int, decode: Decode | None = None) -> None:
    """out[places] = the rows; `decode` where their bytes are not those of a row of `out`, which is contiguous.

    By one thread in host memory, as torch's threads would spin beside transfers.
    """
    if not len(places) or not row_bytes:
        return
    if out.device.type != "cpu" or fetched.memory.device.type != "cpu":
        device = fetched.memory.device
        rows = fetched.memory.view(-1, row_bytes)[torch.from_numpy(fetched.begins // row_bytes).to(device)]
        values = out.new_empty(len(rows), *out.shape[1:])
        if decode is None:
            values.copy_(rows.view(out.dtype).view(values.shape))
        else:
            decode(rows, values)
        out.index_copy_(0, torch.from_numpy(places).to(out.device), values)
        return
    from espalier.store.row_kernels import scatter_rows

    assert out.is_contiguous()
    if decode is None:
        scatter_rows(fetched.memory.data_ptr(), fetched.begins, places, out.data_ptr(), row_bytes)
        return
    step = max(1, CHUNK // row_bytes)
    stored = torch.empty(min(step, len(places)), row_bytes, dtype=torch.uint8)
    values = torch.empty(len(stored), *out.shape[1:], dtype=out.dtype)
    for at in range(0, len(places), step):
        begins = np.ascontiguousarray(fetched.begins[at : at + step])
        count = np.arange(len(begins))
        scatter_rows(fetched.memory.data_ptr(), begins, count, stored.data_ptr(), row_bytes)
        decode(stored[: len(begins)], values[: len(begins)])
        chosen = np.ascontiguousarray(places[at : at + step])
        scatter_rows(values.data_ptr(), count * values[0].nbytes, chosen, out.data_ptr(), values[0].nbytes)
