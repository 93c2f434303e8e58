"""Token shards: written whole or not at all, by one builder at a time, with a hash per file.

A store is a folder of little-endian token files of bounded size plus, for each split, where each document starts and
what it is called. It is built beside its place under a lock, synced, and renamed into it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import xxhash
from msgspec import Struct

from espalier.language.tokenizer import Ids, Tokenizer
from espalier.recipe import data_hash, serialization
from espalier.recipe.cache_dir import sync_folder, writing
from espalier.recipe.errors import RunFailed, UserError

CACHE = "data.cache = a folder on another disk"
"""What is advised where shards cannot be written."""
VERSION = 1
SHARD_TOKENS = 64 << 20
"""Tokens per shard file; every shard of a split but the last holds exactly this many."""

PATIENCE = 600.0
"""Seconds a waiting builder accepts without any sign of life from the one that holds the lock."""

BUILDING = ".building"
INDEX = "index.json"


class TokenFile(Struct, frozen=True):
    """One file of a store: its name, size in bytes and xxh3-128 hash."""

    name: str
    bytes: int
    hash: str


class SplitIndex(Struct, frozen=True):
    """One split: its shards in order, `starts` (int64 token position of each document's boundary), `names` (UTF-8)
    and `ends` (int64 end of each name)."""

    tokens: int
    documents: int
    bytes: int
    shards: tuple[TokenFile, ...]
    starts: TokenFile
    names: TokenFile
    ends: TokenFile

    @property
    def files(self) -> tuple[TokenFile, ...]:
        """All files of the split."""
        return (*self.shards, self.starts, self.names, self.ends)


class Index(Struct, frozen=True):
    """What `index.json` says. `skipped` holds the first thousand of `skipped_documents`."""

    version: int
    tokenizer: str
    dtype: str
    shard_tokens: int
    train: SplitIndex
    validation: SplitIndex
    fingerprint: str
    skipped: tuple[tuple[str, str], ...]
    skipped_documents: int
    notes: tuple[str, ...]


class Damaged(Exception):
    """A store that cannot be used; the text names the file at fault."""


class SplitWriter:
    """Writes one split of a store into `folder`. Has state: open files and running totals."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self._folder = folder
        self._name = name
        self._shard_tokens = shard_tokens
        self._dtype = tokenizer.dtype.newbyteorder("<")
        self._boundary = np.array([tokenizer.boundary], self._dtype)
        self._document_end = np.array(tokenizer.document_end, self._dtype)
        self._shards: list[TokenFile] = []
        self._shard: _Hashed | None = None
        self._room = 0
        self._starts = _Hashed(folder / f"{name}.starts")
        self._names = _Hashed(folder / f"{name}.names")
        self._ends = _Hashed(folder / f"{name}.ends")
        self.tokens = self.documents = self.bytes = 0

    def add(self, name: str, ids: Ids, size: int) -> None:
        """Appends a boundary, the document `name` of `size` bytes, and its end."""
        self._starts.write(self.tokens.to_bytes(8, "little", signed=True))
        self._names.write(name.encode("utf-8", "replace"))
        self._ends.write(self._names.bytes.to_bytes(8, "little", signed=True))
        for part in (self._boundary, ids, self._document_end):
            self._append(part)
        self.documents += 1
        self.bytes += size

    def finish(self) -> SplitIndex:
        """Syncs and closes every file."""
        self._finish_shard()
        files = (self._starts.finish(), self._names.finish(), self._ends.finish())
        return SplitIndex(self.tokens, self.documents, self.bytes, tuple(self._shards), *files)

    def close(self) -> None:
        """Closes what is still open, without finishing."""
        for file in (self._shard, self._starts, self._names, self._ends):
            if file:
                file.close()

    def _finish_shard(self) -> None:
        if self._shard:
            self._shards.append(self._shard.finish())

    def _append(self, ids: Ids) -> None:
        self.tokens += len(ids)
        while len(ids):
            if not self._room:
                self._finish_shard()
                self._shard = _Hashed(self._folder / f"{self._name}-{len(self._shards):05d}.bin")
                self._room = self._shard_tokens
            part = ids[: self._room]
            ids = ids[self._room :]
            assert self._shard
            self._shard.write(np.ascontiguousarray(part, self._dtype).data)
            self._room -= len(part)


class _Hashed:
    """A file that is hashed as it is written. Has state."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = open(path, "wb", buffering=1 << 20)  # noqa: SIM115 - closed by finish or close
        self._hash = xxhash.xxh3_128()
        self.bytes = 0

    def write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._hash.update(content)
        self.bytes += len(content) if isinstance(content, bytes) else content.nbytes

    def finish(self) -> TokenFile:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return TokenFile(self._path.name, self.bytes, self._hash.hexdigest())

    def close(self) -> None:
        with suppress(OSError):  # a full disk refuses the buffered rest, which is not wanted any more
            self._file.close()


def read_index(folder: Path) -> Index:
    """The index of the store in `folder`. Raises Damaged when there is none that can be read."""
    try:
        index: Index = serialization.from_json((folder / INDEX).read_bytes(), Index)
    except OSError as error:
        raise Damaged(f"{INDEX}: {error.strerror}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Damaged(f"{INDEX} is not valid: {error}") from None
    if index.version != VERSION:
        raise Damaged(f"{INDEX} has version {index.version}, not {VERSION}")
    return index


def check(folder: Path, index: Index, hashes: bool) -> None:
    """Compares the size of every file with the index, and its hash if asked. Raises Damaged naming the file."""
    for file in (*index.train.files, *index.validation.files):
        path = folder / file.name
        try:
            size = path.stat().st_size
            if size != file.bytes:
                raise Damaged(f"{file.name} has {size} bytes, not {file.bytes}")
            if hashes and data_hash.of_file(path) != file.hash:
                raise Damaged(f"{file.name} has changed content (its hash is not {file.hash})")
        except OSError as error:
            raise Damaged(f"{file.name}: {error.strerror}") from None


def fingerprint(tokenizer: Tokenizer, train: SplitIndex, validation: SplitIndex) -> str:
    """Hash of what a run can see of the data: tokenizer and tokens. Names, paths and times are not part of it."""
    splits = [[shard.hash for shard in split.shards] for split in (train, validation)]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([VERSION, tokenizer.fingerprint, splits]))


@contextmanager
def placed(final: Path) -> Iterator[Path]:
    """A fresh folder to build in, renamed to `final` when the block ends well and removed when it does not.

    The caller holds the lock of `final`. Raises UserError for a full disk or a folder that cannot be written.
    """
    temporary = final.with_name(final.name + BUILDING)
    try:
        with writing(final.parent, CACHE):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            yield temporary
            sync_folder(temporary)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(temporary, final)
            sync_folder(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def locked(final: Path, patience: float = PATIENCE) -> Iterator[Callable[[], None]]:
    """Holds the lock of `final` (a file beside it) against other processes and threads; yields a sign of life to call.

    Raises RunFailed when the holder gives no sign of life for `patience` seconds, UserError when no lock can be made.
    """
    path = final.with_name(final.name + ".lock")
    with writing(path.parent, CACHE):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    seen = -1
    since = time.monotonic()
    try:
        while not _try_lock(descriptor, path):
            alive = os.fstat(descriptor).st_mtime_ns
            if alive != seen:
                seen = alive
                since = time.monotonic()
            if time.monotonic() - since > patience:
                holder = path.read_text(errors="replace") or "another process"
                raise RunFailed(
                    f"Waited for {holder} to build {path.with_suffix('')}.",
                    why=f"it holds the lock and has given no sign of life for {patience:.0f} s",
                    do="end that process, or set data.cache to another folder",
                )
            time.sleep(0.05)
        with suppress(OSError):  # only for the message above; on a full disk it stays empty
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield lambda: os.utime(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, path: Path) -> bool:
    with writing(path.parent, CACHE):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def sweep(folder: Path) -> None:
    """Removes what killed builders left in `folder`; folders that somebody still builds are left alone."""
    for left in folder.glob("*" + BUILDING):
        path = left.with_name(left.name.removesuffix(BUILDING) + ".lock")
        with suppress(OSError, UserError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if _try_lock(descriptor, path):
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)
