"""Extent filler: extents of known sizes, filled piece by piece in any turn, each from its start to its end.

One pass over a large file that is dealt out to many extents (batched packing) writes them so. The places of all extents
are fixed at the start, pieces are written past the page cache as they come, and the index that makes a container of
them is written at the end. `commit` makes durable what was filled so far; a killed filler goes on at its last commit,
reads what lies there once to hash it again, and ends with the same bytes as an unbroken one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from espalier.recipe.resource import Resource
from espalier.store.cost import PAGE, pages
from espalier.store.direct_io import Where, aligned, bytes_of, open_file
from espalier.store.extents import Extent, first_path, index_path, page_hashes, write_index
from espalier.store.io_queue import IoQueue

PIECE = 8 << 20
"""Bytes read at once where what lies there is hashed again."""
_NOTHING = torch.empty(0, dtype=torch.uint8)


class ExtentRoom(NamedTuple):
    """Memory for the next bytes of an extent: `data` is to be filled, and lies in the whole pages `memory`."""

    memory: Tensor
    data: Tensor


class ExtentFiller(Resource):
    """Fills the extents of one container. Holds the file, a hash and the last partial page of each extent.

    Args:
        where: the file, or the files of a striped container.
        sizes: bytes of each extent, in the order in which they lie.
        filled: bytes that the last commit left in each extent; None: begins anew. Raises DiskFull then, and not later.
        queue: writes in the background where it is given; in_flight: bytes that wait there, beyond which a caller does.
    """

    def __init__(
        self,
        where: Where,
        sizes: Mapping[str, int],
        filled: Mapping[str, int] | None = None,
        queue: IoQueue | None = None,
        in_flight: int = 64 << 20,
    ) -> None:
        self.where = where
        self.sizes = dict(sizes)
        self._queue = queue
        self._in_flight = in_flight
        self._offsets = {}
        end = 0
        for name, size in self.sizes.items():
            self._offsets[name] = end
            end += pages(size)
        self.bytes = end
        self.filled = dict.fromkeys(self.sizes, 0)
        self._tails: dict[str, Tensor] = {}
        self._pages: dict[str, bytes] = {}
        self._hashes = {name: xxhash.xxh3_64() for name in self.sizes}
        self._last: dict[str, Future[None]] = {}  # the write of an extent's partial page, which may not have ended
        self._writes: deque[tuple[Future[None], int]] = deque()
        self._waiting, self._unused = 0, list[Tensor]()  # bytes of the writes; memory that no write uses
        if filled is None:
            index_path(first_path(where)).unlink(missing_ok=True)
        self._file = open_file(where, "create" if filled is None else "write", end)
        for name, size in (filled or {}).items():
            self._restore(name, size)

    def _restore(self, name: str, size: int) -> None:
        """Hashes the first `size` bytes of `name` anew."""
        room = aligned(min(size, PIECE))
        for at in range(0, size, PIECE):
            piece = room[: pages(min(PIECE, size - at))]
            self._file.read_into(piece, self._offsets[name] + at, min(PIECE, size - at))
            self._hashes[name].update(bytes_of(piece)[: size - at])
            if size - at <= PIECE and size % PAGE:
                self._tails[name] = piece[(size - at) // PAGE * PAGE : size - at].clone()
        self.filled[name] = size

    def hash_pages(self, names: Iterable[str]) -> None:
        """Gives every page of these extents a checksum, as single ones of them will be read. Called before any is
        filled; reads what a killed filler left."""
        for name in names:
            self._pages[name] = b""
            for at in range(0, self._whole(name, self.filled[name]), PIECE):
                size = min(PIECE, self._whole(name, self.filled[name]) - at)
                piece = aligned(size)
                self._file.read_into(piece, self._offsets[name] + at, size)
                self._pages[name] += page_hashes(piece[:size])

    def _whole(self, name: str, filled: int) -> int:
        """Bytes of the first `filled` that are in pages which nothing is added to."""
        return filled if filled == self.sizes[name] else filled // PAGE * PAGE

    def room(self, name: str, size: int) -> ExtentRoom:
        """Memory for the next `size` bytes of `name`; taken again once they are written, so that its pages stay."""
        tail = self._tails.get(name, _NOTHING)
        end = len(tail) + size
        memory = self._memory(pages(end))
        memory[: len(tail)] = tail
        memory[end : pages(end)] = 0
        return ExtentRoom(memory, memory[len(tail) : end])

    def _memory(self, size: int) -> Tensor:
        while self._unused:
            memory = self._unused.pop()
            if len(memory) >= size:
                return memory
        return aligned(1 << (size - 1).bit_length())

    def extend(self, name: str, room: ExtentRoom, more: bool = False) -> None:
        """Writes the next bytes of `name`, which `room` has taken; `more`: others follow before the next checkpoint,
        and their write has the page that both share."""
        memory, data = room
        if not len(data):
            return
        before = self.filled[name]
        after = self.filled[name] + len(data)
        assert after <= self.sizes[name], f"{after} bytes for {name!r} of {self.sizes[name]}"
        self._hashes[name].update(bytes_of(data))
        self.filled[name] = after
        end = before % PAGE + len(data)
        whole = end // PAGE * PAGE
        if name in self._pages:
            self._pages[name] += page_hashes(memory[: end if after == self.sizes[name] else whole])
        self._tails.pop(name, None)
        if after % PAGE and after < self.sizes[name]:
            self._tails[name] = memory[whole:end].clone()
        if name in self._last:  # the page that both have comes from the later one
            self._last.pop(name).result()
        partial = end > whole and not (more and after < self.sizes[name])
        write = self._write(self._offsets[name] + before - before % PAGE, memory, pages(end) if partial else whole)
        if partial and write is not None:
            self._last[name] = write

    def _write(self, offset: int, memory: Tensor, size: int) -> Future[None] | None:
        """Writes the first `size` bytes of `memory`, which is free afterwards."""
        if self._queue is None:
            self._file.write_from(memory[:size], offset)
            self._unused.append(memory)
            return None
        write = self._queue.write(self._file, offset, memory[:size])
        write.add_done_callback(lambda _: self._unused.append(memory))
        self._writes.append((write, len(memory)))
        self._waiting += len(memory)
        while self._waiting > self._in_flight:
            first, written = self._writes.popleft()
            self._waiting -= written
            first.result()
        return write

    def checkpoint(self) -> Callable[[], None]:
        """What makes durable what was filled so far; another thread may call it while more is filled."""
        writes = [write for write, _ in self._writes]

        def commit() -> None:
            for write in writes:
                write.result()
            self._file.sync()

        return commit

    def commit(self) -> None:
        """Returns when everything filled so far survives a crash."""
        self.checkpoint()()

    def finish(self) -> None:
        """Writes the index: readers find the container from now on. Every extent is full."""
        self.commit()
        short = [name for name, size in self.sizes.items() if self.filled[name] != size]
        assert not short, f"{short[0]!r} has {self.filled[short[0]]} bytes"
        write_index(
            self.where,
            [
                Extent(name, at, size, self._hashes[name].intdigest(), "uint8", (size,), self._pages.get(name, b""))
                for (name, size), at in zip(self.sizes.items(), self._offsets.values(), strict=True)
            ],
        )

    def close(self) -> None:
        """Closes the file, once no transfer uses it."""
        wait([write for write, _ in self._writes])
        self._file.close()
