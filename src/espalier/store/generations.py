"""Generations: extents of fixed size that are rewritten step by step; a crash leaves one whole step, never a mixture.

Every extent has as many places as there are generations. A write goes to a place that no committed step uses; `commit`
syncs the data, then writes one of two headers, which says for each extent which place holds it. Headers alternate and
carry checksums, so a torn header leaves the other in force.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec
import xxhash
from torch import Tensor

from espalier.recipe.cache_dir import sync_folder
from espalier.recipe.errors import UserError
from espalier.recipe.resource import Resource
from espalier.recipe.serialization import Value
from espalier.store.cost import PAGE, pages
from espalier.store.direct_io import File, Where, aligned, bytes_of, checksum, flat_bytes, open_file
from espalier.store.extents import DamagedExtent, damaged, first_path

MAGIC = b"espalier generations 1\n"
_GO_BACK = "run the same command again: it goes on from the step before, if that is whole"
_PLACE_BYTES = 32
"""Upper bound of what a header says of one extent: its place and its checksum as msgpack."""


class _GenerationTable(Value, frozen=True):
    """What never changes: sizes by name, places for each extent."""

    sizes: dict[str, int]
    generations: int


class _Header(Value, frozen=True):
    """One committed step: for each extent its place (-1: never written) and the XXH3 of its bytes."""

    sequence: int
    step: int
    places: tuple[int, ...]
    hashes: tuple[int, ...]


class Generations(Resource):
    """Rewritten extents. Has state: the file, and what is written and not committed.

    Threads may read and write different extents at once; `commit` and `rollback` are called when no write runs.

    Args:
        where: the file made by `create`, or the files of a striped one.
        verify: read and check everything; where the last step is damaged, go back to the step before, if it is whole.

    Attributes:
        sizes: bytes of each extent by name.
        step: the last committed step; -1 before the first.
        restored: what was damaged in the step that was given up; empty when all is well.
        read_bytes, written_bytes: from and to the disk so far, whole pages.
    """

    def __init__(self, where: Where, verify: bool = False) -> None:
        self.path = first_path(where)
        self._file = open_file(where, "write")
        self._lock = threading.Lock()
        self.restored = ""
        self.read_bytes = self.written_bytes = 0
        table = _read_table(self.path, self._file)
        self.sizes = table.sizes
        self._count = table.generations
        self._layout = _FileLayout(table)
        headers = self._layout.headers(self._file)
        if not headers:
            raise UserError(
                f"{self.path} holds no whole step: both headers are damaged.", do="restore it from a checkpoint"
            )
        if self._file.size < self._layout.end:
            missing = self._layout.end - self._file.size
            raise UserError(f"{self.path} is too short: {missing} bytes are missing.", do="restore it from a copy")
        self._use(headers[0])
        if verify:
            if len(headers) < 2 and self._layout.written(self._file) > 1:
                self.restored = f"{self.path} is damaged: the header of the step after {self.step} is not whole."
            self._choose(headers)

    def _use(self, header: _Header) -> None:
        self._header = header
        self._clean = True
        self._pending: dict[str, tuple[int, int]] = {}
        self._committed = dict(zip(self.sizes, zip(header.places, header.hashes, strict=True), strict=True))

    def _choose(self, headers: list[_Header]) -> None:
        """Uses the newest step that is whole."""
        damaged = []
        for header in headers:
            self._use(header)
            try:
                self._check_all()
            except DamagedExtent as error:
                damaged.append(error)
            else:
                if damaged:
                    self.restored = damaged[0].what
                    # in the place of the damaged step's header, so that it never comes back in force
                    self._write_header(header.changed(sequence=header.sequence + 1))
                return
        why = ", and ".join(str(error.why) for error in damaged) + "; no step is whole"
        raise DamagedExtent(damaged[0].what, why=why, do="put back a copy of the file, or start a new run")

    def _check_all(self) -> None:
        for name, size in self.sizes.items():
            if self.written(name):
                self.read(name, aligned(size))

    @classmethod
    def create(cls, where: Where, sizes: Mapping[str, int], generations: int = 2) -> Generations:
        """A new file with room for all generations of all extents, of `sizes` bytes. Raises DiskFull.

        With one generation extents are rewritten in place: half the disk, and a crash may leave a mixture.
        """
        assert generations >= 1
        table = _GenerationTable(dict(sizes), generations)
        layout = _FileLayout(table)
        path = first_path(where)
        file = open_file(where, "create", layout.end)
        file.write_from(_padded(MAGIC + _frame(table), layout.table_bytes), 0)
        empty = _Header(0, -1, (-1,) * len(sizes), (0,) * len(sizes))
        file.write_from(layout.header_pages(empty), layout.header_at(empty))
        file.sync()
        file.close()
        sync_folder(path.parent)
        return cls(where)

    @property
    def step(self) -> int:
        """The last committed step; -1 before the first."""
        return self._header.step

    def written(self, name: str, pending: bool = False) -> bool:
        """Whether some committed step holds `name`; `pending`: or it was written since."""
        return self._place(name, pending)[0] >= 0

    def _place(self, name: str, pending: bool) -> tuple[int, int]:
        with self._lock:
            return (self._pending.get(name) if pending else None) or self._committed[name]

    def read(self, name: str, buffer: Tensor, pending: bool = False) -> None:
        """Reads `name` of the last committed step into the first bytes of `buffer`; fastest where that is page-aligned.

        `pending`: what was written since, if anything. Raises DamagedExtent.
        """
        place, expected = self._place(name, pending)
        size = self.sizes[name]
        assert buffer.nbytes >= size, f"{buffer.nbytes} bytes for {size}"
        if place < 0:
            raise UserError(f"{name!r} of {self.path} was never written.", do="write it before the first step")
        self._file.read_into(flat_bytes(buffer)[: min(buffer.nbytes, pages(size))], self._layout.at(name, place), size)
        with self._lock:
            self.read_bytes += pages(size)
        if checksum(flat_bytes(buffer)[:size]) != expected:
            step = f" in step {self.step}" if self.step >= 0 else ""
            raise damaged(self.path, name, f"its checksum does not match{step}", _GO_BACK)

    def write(self, name: str, buffer: Tensor) -> None:
        """Writes the first bytes of `buffer` as `name`, in place of what was written since the last commit."""
        size = self.sizes[name]
        assert buffer.nbytes >= size, f"{buffer.nbytes} bytes for {size}"
        data = flat_bytes(buffer)[:size]
        with self._lock:
            self._clean = False
            place = (self._committed[name][0] + 1) % self._count
        self._file.write_from(data, self._layout.at(name, place))
        with self._lock:
            self._pending[name] = (place, checksum(data))
            self.written_bytes += pages(size)

    def commit(self, step: int) -> None:
        """Makes everything written since the last commit part of `step`; extents not written stay as they were."""
        self._file.sync()
        self._committed.update(self._pending)
        places, hashes = zip(*self._committed.values(), strict=True) if self._committed else ((), ())
        self._write_header(_Header(self._header.sequence + 1, step, places, hashes))

    def _write_header(self, header: _Header) -> None:
        head = self._layout.header_pages(header)
        self._file.write_from(head, self._layout.header_at(header))
        self._file.sync()
        self.written_bytes += head.nbytes
        self._use(header)

    def rollback(self) -> None:
        """Forgets what was written since the last commit."""
        assert self._count > 1, "one generation is rewritten in place"
        self._pending.clear()

    def revert(self, verify: bool = False) -> None:
        """Goes back to the step before the last one, which is there as long as nothing was written since its commit.

        `verify`: read and check it first. Raises DamagedExtent, and stays, where it is not whole.
        """
        assert self._count > 1, "one generation is rewritten in place"
        before = [header for header in self._layout.headers(self._file) if header.sequence == self._header.sequence - 1]
        if not before or not self._clean:
            raise UserError(f"{self.path} no longer holds the step before {self.step}.", do="restore a checkpoint")
        if verify:
            newest = self._header
            self._use(before[0])
            try:
                self._check_all()
            finally:
                self._use(newest)
        self._write_header(before[0].changed(sequence=self._header.sequence + 1))

    def close(self) -> None:
        """Closes the file; what is not committed is lost."""
        self._file.close()


class _FileLayout:
    """Where things lie: the table, two headers, then the places of all extents."""

    def __init__(self, table: _GenerationTable) -> None:
        self._count = len(table.sizes)
        self.table_bytes = pages(len(MAGIC) + len(_frame(table)))
        self._header_bytes = pages(128 + _PLACE_BYTES * self._count)
        self._at: dict[str, int] = {}
        at = self.table_bytes + 2 * self._header_bytes
        self._stride = sum(map(pages, table.sizes.values()))
        for name, size in table.sizes.items():
            self._at[name] = at
            at += pages(size)
        self.end = at + (table.generations - 1) * self._stride

    def at(self, name: str, place: int) -> int:
        return self._at[name] + place * self._stride

    def header_at(self, header: _Header) -> int:
        return self.table_bytes + header.sequence % 2 * self._header_bytes

    def header_pages(self, header: _Header) -> Tensor:
        return _padded(_frame(header), self._header_bytes)

    def headers(self, file: File) -> list[_Header]:
        """The whole headers, newest first."""
        texts = [_framed(slot) for slot in self._slots(file)]
        headers = [msgspec.msgpack.decode(text, type=_Header) for text in texts if text is not None]
        return sorted(headers, key=lambda header: -header.sequence)

    def written(self, file: File) -> int:
        """How many headers were ever written."""
        return sum(map(any, self._slots(file)))

    def _slots(self, file: File) -> list[bytes]:
        page = aligned(self._header_bytes)
        texts = []
        for slot in range(2):
            file.read_into(page, self.table_bytes + slot * self._header_bytes)
            texts.append(bytes(bytes_of(page)))
        return texts


def _read_table(path: Path, file: File) -> _GenerationTable:
    page = aligned(PAGE)
    if file.size >= PAGE:
        file.read_into(page, 0)
    head = bytes(bytes_of(page))
    if not head.startswith(MAGIC):
        raise UserError(f"{path} holds no generations.", do="name a file made by Generations.create")
    size = len(MAGIC) + 16 + int.from_bytes(head[len(MAGIC) : len(MAGIC) + 8], "little")
    whole = aligned(min(size, file.size))
    file.read_into(whole, 0)
    text = _framed(bytes(bytes_of(whole))[len(MAGIC) :])
    if text is None:
        raise UserError(f"The table at the beginning of {path} is damaged.", do="restore the file from a copy")
    return msgspec.msgpack.decode(text, type=_GenerationTable)


def _frame(value: Value) -> bytes:
    """As msgpack, behind its length and a checksum."""
    text = msgspec.msgpack.encode(value)
    return len(text).to_bytes(8, "little") + xxhash.xxh3_64_digest(text) + text


def _framed(data: bytes) -> bytes | None:
    """What stands behind a length and a checksum; None when it is not whole."""
    size = int.from_bytes(data[:8], "little")
    text = data[16 : 16 + size]
    whole = size > 0 and len(text) == size and xxhash.xxh3_64_digest(text) == data[8:16]
    return text if whole else None


def _padded(data: bytes, size: int) -> Tensor:
    page = aligned(size)
    bytes_of(page)[: len(data)] = data
    return page
