"""Rows on disk: a table in a file, read by row numbers; pages that rows share are read once, neighbours in one read.

Rows may have any size. They lie one behind the other (`stride` = bytes of a row), or padded so that no row straddles a
page (`padded`). Reading uses a fixed amount of memory besides eight bytes per id.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.recipe.errors import UserError
from espalier.recipe.resource import Resource
from espalier.store import base
from espalier.store.cost import PAGE, pages
from espalier.store.direct_io import File, Where, aligned, bytes_of, open_file
from espalier.store.io_queue import IoQueue

MEMORY = 8 << 20
"""Bytes of the two buffers that pages are read into in turn."""
LONGEST = 256
"""Pages of one read; longer runs are cut, so that several are in flight."""
Array = NDArray[np.int64]


def padded(size: int) -> int:
    """The least stride for rows of `size` bytes of which none straddles a page: divides a page, or is whole pages."""
    return pages(size) if size > PAGE // 2 else 1 << max(0, size - 1).bit_length()


@dataclass(frozen=True)
class RowLayout:
    """How `rows` rows lie in a file: from `offset` on, `stride` bytes apart (0: one behind the other)."""

    rows: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0
    stride: int = 0

    @cached_property
    def row_bytes(self) -> int:
        return base.row_bytes(self.dtype, self.shape)

    @cached_property
    def step(self) -> int:
        """Bytes from one row to the next."""
        return self.stride or self.row_bytes

    @cached_property
    def end(self) -> int:
        """Bytes of the file up to the end of the last row."""
        return self.offset + (self.rows - 1) * self.step + self.row_bytes if self.rows else self.offset


@dataclass(frozen=True)
class _Group:
    """Rows ids[order[start : start + len(places)]], by the reads that bring them."""

    start: int
    runs: Array
    places: Array
    pages: int

    def copy(self, buffer: Tensor, order: Array, out: Tensor) -> None:
        """Copies the rows from the pages in `buffer` to where they belong in `out`."""
        from espalier.store.row_kernels import scatter_rows

        group_order = order[self.start : self.start + len(self.places)]
        scatter_rows(buffer.data_ptr(), self.places, group_order, out.data_ptr(), out[0].nbytes)


class RowFile(Resource):
    """A table in a file. Holds the file and two buffers; threads that read at once take turns.

    Args:
        file: an open file (or where one is, which is then closed with the table).
        layout: how the rows lie in it. Raises UserError when the file is shorter than that.
        queue: does the reads; without one the table makes its own.
        memory: bytes of its buffers.
    """

    def __init__(
        self, file: File | Where, layout: RowLayout, queue: IoQueue | None = None, memory: int = MEMORY
    ) -> None:
        self._owned: list[Any] = []
        self._file: File = self._own(open_file(file, "read")) if isinstance(file, Path | Sequence) else file
        self.layout = layout
        self.dtype = layout.dtype
        self.shape = layout.shape
        if self._file.size < layout.end:
            raise UserError(
                f"{self._file} is too short for {layout.rows:,} rows of {layout.row_bytes} bytes: "
                f"{layout.end - self._file.size:,} bytes are missing.",
                why=f"it has {self._file.size:,} bytes",
                do="check the number of rows, their dtype and shape, or copy the file again",
            )
        self._queue = queue or self._own(IoQueue())
        most_of_a_row = pages(layout.row_bytes) // PAGE + 1
        self._room = max(memory // 2 // PAGE, most_of_a_row)
        self._lock = threading.Lock()

    def _own(self, opened: Any) -> Any:
        self._owned.insert(0, opened)
        return opened

    def __len__(self) -> int:
        return self.layout.rows

    @property
    def row_bytes(self) -> int:
        return self.layout.row_bytes

    @cached_property
    def _most_rows(self) -> int:
        """Rows that are placed at a time."""
        return max(1024, min(1 << 16, self._room * PAGE // max(1, self.row_bytes)))

    def read(self, ids: Tensor, out: Tensor) -> None:
        base.check_request(self, ids, out)
        if len(ids) == 0 or self.row_bytes == 0:
            return
        numbers, order = _ascending(ids)
        assert out.is_contiguous()
        with self._lock:
            self._read(numbers, order, out)

    def _read(self, numbers: Array, order: Array, out: Tensor) -> None:
        """Reads pages into one buffer while rows are copied out of the other."""
        flying: deque[Future[None]] = deque()
        try:
            before = None
            for turn, group in enumerate(self._groups(numbers, order)):
                flying.append(self._queue.read_runs(self._file, group.runs, self._buffers[turn % 2], self.layout.end))
                if before is not None:
                    flying.popleft().result()
                    before.copy(self._buffers[(turn - 1) % 2], order, out)
                before = group
                last = turn
            if before is not None:
                flying.popleft().result()
                before.copy(self._buffers[last % 2], order, out)
        finally:
            wait(flying)  # after an error: the buffers are the next reader's

    def pages(self, ids: Tensor) -> int:
        """How many pages `read` of these ids reads."""
        numbers, order = _ascending(ids)
        return sum(group.pages for group in self._groups(numbers, order))

    @cached_property
    def _buffers(self) -> tuple[Tensor, Tensor]:
        return aligned(self._room * PAGE), aligned(self._room * PAGE)

    def _groups(self, numbers: Array, order: Array) -> Iterator[_Group]:
        """The reads, as many at a time as a buffer holds."""
        from espalier.store.row_kernels import merge_rows

        where = (self.layout.offset, self.layout.step, self.row_bytes)
        room = [(np.empty((self._room, 3), np.int64), np.empty(self._most_rows, np.int64)) for _ in range(2)]
        start = turn = 0
        while start < len(order):
            runs, places = room[turn % 2]
            rows, count, used = merge_rows(numbers, order, start, *where, LONGEST, runs, places)
            yield _Group(start, runs[:count], places[:rows], used)
            start += rows
            turn += 1

    def close(self) -> None:
        """Closes what the table opened."""
        for opened in self._owned:
            opened.close()


class RowWriter(Resource):
    """Writes a table from its first row to its last. Holds the file and one buffer.

    Args:
        where: the file to make, in place of any other; room for all rows is reserved. Raises DiskFull.
        layout: of the table; `offset` is a multiple of the page.
    """

    def __init__(self, where: Where, layout: RowLayout, memory: int = MEMORY) -> None:
        assert layout.offset % PAGE == 0, f"the first row at {layout.offset}"
        self.layout = layout
        self.rows = 0
        self._file = open_file(where, "create", pages(layout.end))
        self._buffer = aligned(max(memory, pages(layout.step) + PAGE))
        self._bytes = self._buffer.numpy()
        self._at = layout.offset
        self._filled = 0

    def append(self, data: Tensor) -> None:
        """The next rows, [n, *shape]."""
        assert data.dtype == self.layout.dtype
        assert tuple(data.shape[1:]) == self.layout.shape
        assert self.rows + len(data) <= self.layout.rows
        step = self.layout.step
        size = self.layout.row_bytes
        flat = np.asarray(bytes_of(data)).reshape(len(data), size)
        done = 0
        while done < len(data):
            count = min(len(data) - done, (len(self._buffer) - self._filled) // step)
            place = self._bytes[self._filled : self._filled + count * step].reshape(count, step)
            place[:, :size] = flat[done : done + count]  # NumPy's copy: torch's threads would spin beside the transfers
            place[:, size:] = 0
            self._filled = self._filled + count * step
            done += count
            if len(self._buffer) - self._filled < step:
                self._flush(self._filled // PAGE * PAGE)
        self.rows += len(data)

    def _flush(self, size: int) -> None:
        self._file.write_from(self._buffer[:size], self._at)
        self._at, rest = self._at + size, max(0, self._filled - size)
        self._bytes[:rest] = self._bytes[size : size + rest]
        self._filled = rest

    def close(self) -> None:
        """Returns when the table is on the disk."""
        self._flush(self._filled)
        self._file.sync()
        self._file.close()

    def abandon(self) -> None:
        """Closes the file as it is."""
        self._file.close()


def _ascending(ids: Tensor) -> tuple[Array, Array]:
    """The ids, and the order in which they ascend."""
    numbers = ids.contiguous().numpy()
    ordered = len(numbers) < 2 or bool((numbers[1:] >= numbers[:-1]).all())
    return numbers, np.arange(len(numbers)) if ordered else np.argsort(numbers)
