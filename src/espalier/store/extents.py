"""Extents: an append-only container of named tensors, each page-aligned and with a checksum; survives kill -9.

The container is a file of data (or several, striped) and beside it `<file>.index`, to which `commit` appends one record
per extent after the data are on the disk. A record that a crash has torn ends the index; what follows is written again,
at the same place, so that a resumed container equals an unbroken one byte for byte.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from espalier.recipe.cache_dir import sync_folder, write_atomic, writing
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import parsing
from espalier.recipe.resource import Resource
from espalier.store.cost import PAGE, pages
from espalier.store.direct_io import (
    ANOTHER,
    DirectFile,
    Where,
    aligned,
    bytes_of,
    checksum,
    flat_bytes,
    open_file,
)

MAGIC = b"espalier extents 1\n"
_FRAME = struct.Struct("<II")  # bytes of the record, its xxh32


PageHashes = bytes
"""Of the pages of an extent, four bytes each."""


class DamagedExtent(UserError):
    """An extent whose bytes are not those that were written. Exit code 2."""


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor lies in the container; `hash` is the XXH3 of its bytes, `pages` those of each of its pages
    (`page_hashes`) where single pages are read, else empty."""

    name: str
    offset: int
    bytes: int
    hash: int
    dtype: str
    shape: tuple[int, ...]
    pages: PageHashes = b""

    @property
    def end(self) -> int:
        """Where the next extent begins."""
        return self.offset + pages(self.bytes)


def damaged(path: Path, name: str, why: str, do: str = "") -> DamagedExtent:
    """The error for an extent that does not hold what was written."""
    do = do or f"write {name!r} again from its source; the rest is whole"
    return DamagedExtent(f"Extent {name!r} of {path} is damaged.", why=why, do=do)


def page_hashes(data: Tensor) -> PageHashes:
    """Four bytes for each page of `data`, the last of which may be short: the low half of its XXH3 hash."""
    view = bytes_of(data)
    hashes = [xxhash.xxh3_64_intdigest(view[at : at + PAGE]) & 0xFFFFFFFF for at in range(0, len(view), PAGE)]
    return struct.pack(f"<{len(hashes)}I", *hashes)


class ExtentFile(Resource):
    """Reads a container. Holds the index in memory and the file open.

    Args:
        where: the file, or the files of a striped container in their order.
        remedy: what users do about a damaged extent, for errors; a container that was written whole has one. Raises
            DamagedExtent then where its index does not end with a whole record.

    Attributes:
        file: what the extents lie in, for an IoQueue.
    """

    def __init__(self, where: Where, remedy: str = "") -> None:
        self.path = first_path(where)
        self.remedy = remedy
        self.file = open_file(where, "read")
        extents, whole = read_index(self.path, remedy)
        index = index_path(self.path)
        if remedy and whole != index.stat().st_size:
            raise DamagedExtent(
                f"{index} is damaged after its first {len(extents):,} extents.",
                why=f"from byte {whole:,} on",
                do=remedy,
            )
        self._index = {extent.name: extent for extent in extents}

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def extent(self, name: str) -> Extent:
        """Where `name` lies. Raises UserError when the container does not hold it."""
        if name not in self._index:
            raise UserError(
                f"{self.path} has no extent {name!r}; it has {len(self)}.",
                why="it was never written, or the writing was broken off",
                do="resume the writing",
            )
        return self._index[name]

    def offset(self, name: str) -> int:
        """Where `name` begins, a multiple of the page."""
        return self.extent(name).offset

    def bytes(self, name: str) -> int:
        """How many bytes `name` has."""
        return self.extent(name).bytes

    def read(self, name: str) -> Tensor:
        """The tensor `name`, in page-aligned memory of its own. Raises DamagedExtent."""
        extent = self.extent(name)
        buffer = aligned(extent.bytes)
        self.read_into(name, buffer)
        return buffer[: extent.bytes].view(getattr(torch, extent.dtype)).view(extent.shape)

    def read_into(self, name: str, buffer: Tensor) -> None:
        """Reads `name` into the first bytes of `buffer`, fastest where that is page-aligned. Raises DamagedExtent."""
        extent = self.extent(name)
        assert buffer.nbytes >= extent.bytes, f"{buffer.nbytes} bytes for {extent.bytes}"
        room = flat_bytes(buffer)[: min(buffer.nbytes, pages(extent.bytes))]
        if self.file.size < extent.offset + extent.bytes:
            raise self.damaged_extent(name, "the file ends before the extent does")
        self.file.read_into(room, extent.offset, extent.bytes)
        self.check(name, room)

    def check(self, name: str, buffer: Tensor) -> None:
        """Compares the first bytes of `buffer`, which an IoQueue has read, with what was written as `name`."""
        extent = self.extent(name)
        if checksum(flat_bytes(buffer)[: extent.bytes]) != extent.hash:
            raise self.damaged_extent(name, "its checksum does not match")

    def check_pages(self, name: str, keys: NDArray[np.int64], data: Tensor, rows: NDArray[np.int64]) -> None:
        """Compares pages of the extent `name`, those `keys` of the file, in `data[rows]` [n, PAGE], with what was
        written. Raises DamagedExtent with the first page that differs."""
        extent = self.extent(name)
        view = bytes_of(data)
        hashes = np.frombuffer(extent.pages, "<u4")
        first = extent.offset // PAGE
        for page, row in zip((keys - first).tolist(), rows.tolist(), strict=True):
            size = min(PAGE, extent.bytes - page * PAGE)
            if xxhash.xxh3_64_intdigest(view[row * PAGE : row * PAGE + size]) & 0xFFFFFFFF != hashes[page]:
                raise self.damaged_extent(name, f"the checksum of its page {page} (of {len(hashes):,}) does not match")

    def damaged_extent(self, name: str, why: str) -> DamagedExtent:
        """The error for an extent that does not hold what was written."""
        return damaged(self.path, name, why, self.remedy)

    def damaged(self) -> list[str]:
        """Reads everything; names of the extents that do not hold what was written."""
        names = []
        for name in self:
            try:
                self.read(name)
            except DamagedExtent:
                names.append(name)
        return names

    def close(self) -> None:
        self.file.close()


class ExtentWriter(Resource):
    """Appends tensors to a container. Holds two files and the extents not yet committed.

    A name that is appended again replaces its first tensor for readers.

    Args:
        where: the file, or the files of a striped container, one per disk.
        resume: go on after the last whole extent of what a killed writer left; else begin anew.

    Attributes:
        end: bytes of the container so far.
    """

    def __init__(self, where: Where, resume: bool = False) -> None:
        self.path = first_path(where)
        self._index = index_path(self.path)
        self.extents: dict[str, Extent] = {}
        self._fresh: list[Extent] = []
        there = all(path.exists() for path in (self._index, *all_paths(where)))
        extents, whole = read_index(self.path) if resume and there else ([], 0)
        if not whole:
            with suppress(FileNotFoundError):
                self._index.unlink()  # before the data, which it would describe wrongly
        self._file = open_file(where, "write" if whole else "create")
        while extents and extents[-1].end > self._file.size:
            extents.pop()  # the index reached the disk and the data did not: a power failure without a working flush
        self.extents = {extent.name: extent for extent in extents}
        self.end = max((extent.end for extent in extents), default=0)
        self._file.truncate(self.end)  # what a killed writer had not committed
        with DirectFile(self._index, "write" if whole else "create"):  # the same errors as those of the data
            self._log = open(self._index, "r+b", buffering=0)  # noqa: SIM115 - closed by close()
        head = MAGIC + b"".join(map(_record, extents))
        self._log.write(head)
        self._log.truncate()
        sync_folder(self.path.parent)

    def __contains__(self, name: object) -> bool:
        return name in self.extents

    def append(self, name: str, data: Tensor) -> Extent:
        """Writes a contiguous CPU tensor; it belongs to the container after `commit`. Raises DiskFull."""
        dtype = str(data.dtype).removeprefix("torch.")
        extent = Extent(name, self.end, data.nbytes, checksum(data), dtype, tuple(data.shape))
        self._file.write_from(flat_bytes(data), extent.offset)
        self.end = extent.end
        self._fresh.append(extent)
        self.extents[name] = extent
        return extent

    def commit(self) -> None:
        """Returns when everything appended so far survives a crash."""
        if not self._fresh:
            return
        self._file.sync()
        records = b"".join(map(_record, self._fresh))
        with writing(self._index, ANOTHER):
            if self._log.write(records) != len(records):
                raise OSError(28, "No space left on device")
            os.fdatasync(self._log.fileno())
        self._fresh.clear()

    def close(self) -> None:
        """Commits and closes the files."""
        self.commit()
        self.abandon()

    def abandon(self) -> None:
        """Closes the files without committing."""
        self._log.close()
        self._file.close()


def index_path(path: Path) -> Path:
    """The index of the container at `path`."""
    return path.with_name(path.name + ".index")


def write_index(where: Where, extents: Sequence[Extent]) -> None:
    """Makes a container of data that lie in place and are durable: its index, whole or not at all."""
    index = index_path(first_path(where))
    with writing(index, ANOTHER):
        write_atomic(index, MAGIC + b"".join(map(_record, extents)))
        sync_folder(index.parent)


def first_path(where: Where) -> Path:
    """The file beside which the index lies."""
    return all_paths(where)[0]


def all_paths(where: Where) -> Sequence[Path]:
    """The files of a container."""
    return (where,) if isinstance(where, Path) else where


def _record(extent: Extent) -> bytes:
    text = msgspec.msgpack.encode(extent)
    return _FRAME.pack(len(text), xxhash.xxh32_intdigest(text)) + text


def read_index(path: Path, remedy: str = "") -> tuple[list[Extent], int]:
    """The whole records of a container's index, and the bytes they take; 0 where there is no index at all."""
    index = index_path(path)
    with parsing(index, remedy or "write the container anew"):
        text = index.read_bytes()
    if not text.startswith(MAGIC):
        if MAGIC.startswith(text):  # killed before its first line was whole
            return [], 0
        do = remedy or "name the file that an ExtentWriter has made"
        raise UserError(f"{index} is not the index of a container.", do=do)
    extents = []
    at = len(MAGIC)
    decoder = msgspec.msgpack.Decoder(Extent)
    while at + _FRAME.size <= len(text):
        size, check = _FRAME.unpack_from(text, at)
        record = text[at + _FRAME.size : at + _FRAME.size + size]
        if len(record) < size or xxhash.xxh32_intdigest(record) != check:
            break
        extents.append(decoder.decode(record))
        at += _FRAME.size + size
    return extents, at
