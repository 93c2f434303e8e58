"""Belady's page cache: keeps the pages of disk caches that the next batches use soonest, which are known beforehand.

After Ginex (arXiv 2208.09151, section 4), on top of DiskGNN's layout. All pages of a batch are needed at once, so a
batch is one access: of the pages held and read, those used again soonest stay (Belady, IBM Systems Journal 1966).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.store.cost import PAGE
from espalier.store.direct_io import File, aligned
from espalier.store.io_queue import IoQueue

Array = NDArray[np.int64]
NEVER = np.iinfo(np.int64).max


def next_uses(keys: Array, future: Sequence[Array]) -> Array:
    """int64 [keys]: the first of the `future` accesses that uses each key, `NEVER` where none does."""
    positions = np.full(len(keys), NEVER)
    for at in range(len(future) - 1, -1, -1):
        positions[np.isin(keys, future[at], assume_unique=True)] = at
    return positions


class PageCache:
    """At most `capacity` pages in memory. Has state: the pages, and which they are."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pages = aligned(capacity * PAGE).view(capacity, PAGE)
        self.keys = np.zeros(0, np.int64)  # ascending
        self._slots = np.zeros(0, np.int64)  # of each key

    def take(self, keys: Array, out: Tensor) -> NDArray[np.bool_]:
        """Copies the pages held of `keys` (ascending, each once) into their rows of `out` [keys, PAGE]; bool [keys],
        those that are held."""
        if not len(self.keys):
            return np.zeros(len(keys), bool)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        hit: NDArray[np.bool_] = self.keys[at] == keys
        rows = torch.from_numpy(np.flatnonzero(hit))
        out.index_copy_(0, rows, self.pages[torch.from_numpy(self._slots[at[hit]])])
        return hit

    def keep(self, keys: Array, pages: Tensor, future: Sequence[Array]) -> None:
        """Decides what stays, now that all of `keys` (ascending) are in `pages` [keys, PAGE]; `future`: the keys of the
        accesses that follow."""
        every = np.union1d(self.keys, keys)
        uses = next_uses(every, future)
        soon = np.argsort(uses, kind="stable")[: self.capacity]
        kept_keys = np.sort(every[soon[uses[soon] < NEVER]])
        stays = np.isin(self.keys, kept_keys, assume_unique=True)
        free = np.setdiff1d(np.arange(self.capacity), self._slots[stays])
        fresh = kept_keys[~np.isin(kept_keys, self.keys, assume_unique=True)]
        slots = np.empty(len(kept_keys), np.int64)
        new = np.isin(kept_keys, fresh, assume_unique=True)
        slots[~new] = self._slots[stays]
        slots[new] = free[: len(fresh)]
        rows = torch.from_numpy(np.searchsorted(keys, fresh))
        self.pages.index_copy_(0, torch.from_numpy(slots[new]), pages[rows])
        self.keys = kept_keys
        self._slots = slots


def pages_of(slots: Array, start: int, row_bytes: int) -> Array:
    """int64, ascending: the pages of a file that hold the rows `slots` of a dense table that begins at byte `start`."""
    if not len(slots):
        return np.zeros(0, np.int64)
    begin = start + slots.astype(np.int64) * row_bytes
    first = begin // PAGE
    last = (begin + row_bytes - 1) // PAGE
    return np.unique(np.concatenate([np.minimum(first + at, last) for at in range(int((last - first).max()) + 1)]))


def read_pages(source: tuple[IoQueue, File], keys: Array, rows: Array, out: Tensor) -> list[Future[None]]:
    """Begins to read the pages `keys[rows]` into `out[rows]`, those that follow one another in both at once."""
    queue, file = source
    ends = np.flatnonzero((np.diff(rows) > 1) | (np.diff(keys[rows]) > 1)) + 1
    return [
        queue.read(file, int(keys[run[0]]) * PAGE, out[int(run[0]) : int(run[-1]) + 1].view(-1), 1)
        for run in np.split(rows, ends)
        if len(run)
    ]
