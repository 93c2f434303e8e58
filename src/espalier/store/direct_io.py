"""Direct I/O: files read and written past the page cache (O_DIRECT), on one disk or striped over several.

Where a file system refuses O_DIRECT (tmpfs, some network file systems), transfers go through the page cache; what is
read and what lies in the file are the same.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from espalier.recipe.cache_dir import DiskFull, disk_full, free_bytes
from espalier.recipe.errors import UserError
from espalier.recipe.resource import Resource
from espalier.recipe.units import show_size
from espalier.store.cost import PAGE, pages

BLOCK = 4 << 20
"""Bytes of the buffer through which unaligned memory is copied, at most; one per thread."""
HUGE = 2 << 20
"""Buffers of so many bytes lie in huge pages where they can: transfers have fewer pieces then, and take half the time.
"""
STRIPE = 4 << 20
"""Bytes that a striped file keeps together on one disk."""

Mode = Literal["read", "write", "create"]
Where = Path | Sequence[Path]
"""A file, or the files that a striped file consists of (one on each disk)."""


def aligned(size: int) -> Tensor:
    """Page-aligned memory of `size` bytes, rounded up to whole pages, as uint8; all zeros. Freed with its last view."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    room = pages(size) + (HUGE if size >= HUGE else 0)  # what stays untouched takes no memory
    try:
        memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise UserError(
            f"There is no memory for a buffer of {show_size(size)}: {error.strerror}.",
            why="the machine has no more, or a limit of the process (`ulimit -v`) is reached",
            do="lower the memory that the store may take, or raise the limit",
        ) from None
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    if size < HUGE:
        return buffer
    begin = -buffer.data_ptr() % HUGE
    whole = pages(size) // HUGE * HUGE
    with suppress(OSError, AttributeError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, begin, whole)
        memory.madvise(mmap.MADV_NOHUGEPAGE, begin + whole)  # the last would take more than was asked for
    return buffer[begin:][: pages(size)]


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; valid while the tensor lives.

    Unlike `Tensor.numpy`, this does not forbid that the tensor's storage is resized later.
    """
    assert tensor.device.type == "cpu", f"a tensor on {tensor.device}"
    assert tensor.is_contiguous(), "a tensor with gaps"
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def checksum(tensor: Tensor) -> int:
    """The XXH3 hash (64 bits) of a contiguous CPU tensor's bytes."""
    return xxhash.xxh3_64_intdigest(bytes_of(tensor))


def check_room(folder: Path, size: int, what: str) -> None:
    """Raises DiskFull when the disk under `folder` has less than `size` bytes free for `what`."""
    missing = size - free_bytes(folder)
    if missing > 0:
        raise disk_full(folder, missing, f"{what} takes {show_size(size)}", ANOTHER)


def reserve(file: int, size: int) -> None:
    """Allocates `size` bytes from the start of the open `file`. Raises OSError where the disk has fewer, and takes
    nothing then, not even for a moment, from other programs that write there."""
    filesystem = os.fstatvfs(file)
    if size > filesystem.f_bavail * filesystem.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(file, 0, size)


def open_file(where: Where, mode: Mode, size: int = 0) -> File:
    """A DirectFile for one path, a StripedFile for several."""
    if isinstance(where, Path):
        return DirectFile(where, mode, size)
    return StripedFile(where, mode, size)


class DirectFile(Resource):
    """One file, past the page cache where the file system allows it (`direct`). Holds a file descriptor.

    Args:
        path: the file.
        mode: "read" and "write" open an existing file, "create" makes an empty one in place of any other.
        size: bytes to reserve on the disk when the file is created; DiskFull is raised then and not later.
    """

    def __init__(self, path: Path, mode: Mode, size: int = 0) -> None:
        self.path = path
        self.direct = True
        self.fd = -1
        flags = {"read": os.O_RDONLY, "write": os.O_RDWR, "create": os.O_RDWR | os.O_CREAT | os.O_TRUNC}[mode]
        try:
            self.fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _refused(path, mode, error) from None
        if mode == "create" and size:
            self._reserve(size)
        try:
            self._set_direct(True)
        except OSError:
            self.direct = False

    def _reserve(self, size: int) -> None:
        try:
            reserve(self.fd, size)
        except OSError as error:
            self.close()
            with suppress(OSError):
                self.path.unlink()
            raise _write_error(self.path, error, 0, size) from None

    def _set_direct(self, on: bool) -> None:
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        self.direct = on

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def read_into(self, buffer: Tensor, offset: int, needed: int | None = None) -> None:
        """Fills `buffer` from `offset` on; with `needed`, the bytes after that many may lie beyond the end.

        Raises UserError when the file is too short.
        """
        view = bytes_of(buffer)
        at = 0
        needed = len(view) if needed is None else needed
        straight = offset % PAGE == 0 and buffer.data_ptr() % PAGE == 0
        body = len(view) // PAGE * PAGE if straight else 0
        if not self.direct:
            body = len(view)
        if body and self._read(view[:body], offset) < min(body, needed):
            raise self._short(offset, needed)
        at = body
        while at < len(view):
            at = self._read_through(view, offset, at, needed)

    def _read_through(self, view: memoryview, offset: int, at: int, needed: int) -> int:
        """Reads the pages round one piece into this thread's buffer and copies what belongs to `view[at:]`."""
        begin = (offset + at) % PAGE
        count = min(len(view) - at, BLOCK - begin)
        scratch = _scratch(begin + count)
        count_read = self._read(scratch[: pages(begin + count)], offset + at - begin) - begin
        if count_read < min(count, needed - at):
            raise self._short(offset, needed)
        count_read = max(0, min(count_read, count))
        view[at : at + count_read] = scratch[begin : begin + count_read]
        return at + count

    def _read(self, view: memoryview, offset: int) -> int:
        """Reads until `view` is full or the file ends; returns the bytes read."""
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self.fd, [view[done:]], offset + done)
            except OSError as error:
                if self._refuses_direct(error):
                    continue
                raise UserError(
                    f"{self.path} cannot be read at byte {offset + done}: {error.strerror}.",
                    do="check the disk and its cables with `dmesg`, or restore the file from a copy",
                ) from None
            done += count
            if count == 0 or (self.direct and done % PAGE):  # a direct read stops inside a page at the end only
                break
        return done

    def write_from(self, buffer: Tensor, offset: int) -> None:
        """Writes `buffer` at `offset`, a multiple of the page; the rest of its last page becomes zeros.

        Raises DiskFull with the number of bytes that are missing.
        """
        assert offset % PAGE == 0, f"a write at {offset}"
        view = bytes_of(buffer)
        body = len(view) // PAGE * PAGE if buffer.data_ptr() % PAGE == 0 or not self.direct else 0
        if body:
            self._write(view[:body], offset)
        for at in range(body, len(view), BLOCK):
            piece = view[at : at + BLOCK]
            scratch = _scratch(len(piece))
            scratch[: len(piece)] = piece
            end = pages(len(piece))
            scratch[len(piece) : end] = bytes(end - len(piece))
            self._write(scratch[:end], offset + at)

    def _write(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.pwritev(self.fd, [view[done:]], offset + done)
                count -= count % PAGE if done + count < len(view) else 0  # so that the next one is aligned
                if count == 0:
                    raise OSError(errno.ENOSPC, "nothing could be written")
                done += count
            except OSError as error:
                if not self._refuses_direct(error):
                    raise _write_error(self.path, error, offset + done, len(view) - done) from None

    def _refuses_direct(self, error: OSError) -> bool:
        """True when a transfer may be tried again: some file systems take O_DIRECT and refuse the transfer."""
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or not self.direct:
            return False
        self._set_direct(False)
        return True

    def parts(self, offset: int, size: int) -> Iterator[tuple[DirectFile, int, int]]:
        """The pieces of a transfer that lie on one disk each, in order: (file, offset there, bytes)."""
        yield self, offset, size

    def split_runs(self, runs: NDArray[np.int64]) -> Iterator[tuple[DirectFile, NDArray[np.int64]]]:
        """Many reads [n, 3] (offset, bytes, place in a buffer), by the disk they lie on."""
        yield self, runs

    def truncate(self, size: int) -> None:
        """Cuts off what lies beyond `size` bytes; a shorter file stays as it is."""
        if self.size > size:
            os.ftruncate(self.fd, size)

    def sync(self) -> None:
        """Returns when everything written is on the disk."""
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            raise _write_error(self.path, error, self.size, 0) from None

    def close(self) -> None:
        """Ends the use of the file. May be called twice."""
        fd = self.fd
        self.fd = -1
        if fd >= 0:
            os.close(fd)

    def _short(self, offset: int, needed: int) -> UserError:
        missing = offset + needed - self.size
        return UserError(
            f"{self.path} is too short: bytes {offset} to {offset + needed} are read, and it has {self.size}.",
            why=f"{missing} bytes are missing; it was cut, or is still being written",
            do="copy the file again, or make it anew",
        )

    def __str__(self) -> str:
        return str(self.path)

    def __del__(self) -> None:
        self.close()


class StripedFile(Resource):
    """One file in pieces of `STRIPE` bytes on several disks in turn: `paths` names a file on each."""

    def __init__(self, paths: Sequence[Path], mode: Mode, size: int = 0) -> None:
        share = -(-size // (STRIPE * len(paths))) * STRIPE
        self.files = [DirectFile(path, mode, share) for path in paths]
        self.direct = all(file.direct for file in self.files)

    @property
    def size(self) -> int:
        """Bytes from the first to the last that some file has."""
        last = 0
        for number, file in enumerate(self.files):
            row, rest = divmod(file.size, STRIPE)
            if rest:
                last = max(last, (row * len(self.files) + number) * STRIPE + rest)
            elif row:
                last = max(last, ((row - 1) * len(self.files) + number + 1) * STRIPE)
        return last

    def parts(self, offset: int, size: int) -> Iterator[tuple[DirectFile, int, int]]:
        while size > 0:
            piece, begin = divmod(offset, STRIPE)
            row, number = divmod(piece, len(self.files))
            count = min(size, STRIPE - begin)
            yield self.files[number], row * STRIPE + begin, count
            offset += count
            size -= count

    def split_runs(self, runs: NDArray[np.int64]) -> Iterator[tuple[DirectFile, NDArray[np.int64]]]:
        offset, size, place = runs.T
        first = offset // STRIPE
        count = (offset + size - 1) // STRIPE - first + 1
        run = np.repeat(np.arange(len(runs)), count)
        piece = first[run] + np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
        begin = np.maximum(offset[run], piece * STRIPE)
        end = np.minimum((offset + size)[run], (piece + 1) * STRIPE)
        row, number = np.divmod(piece, len(self.files))
        pieces = np.stack([row * STRIPE + begin % STRIPE, end - begin, place[run] + begin - offset[run]], axis=1)
        for disk, file in enumerate(self.files):
            yield file, np.ascontiguousarray(pieces[number == disk])

    def read_into(self, buffer: Tensor, offset: int, needed: int | None = None) -> None:
        flat = flat_bytes(buffer)
        at = 0
        needed = buffer.nbytes if needed is None else needed
        for file, place, count in self.parts(offset, buffer.nbytes):
            file.read_into(flat[at : at + count], place, max(0, min(count, needed - at)))
            at += count

    def write_from(self, buffer: Tensor, offset: int) -> None:
        flat = flat_bytes(buffer)
        at = 0
        for file, place, count in self.parts(offset, buffer.nbytes):
            file.write_from(flat[at : at + count], place)
            at += count

    def truncate(self, size: int) -> None:
        row, rest = divmod(size, STRIPE * len(self.files))
        for number, file in enumerate(self.files):
            file.truncate(row * STRIPE + max(0, min(STRIPE, rest - number * STRIPE)))

    def sync(self) -> None:
        for file in self.files:
            file.sync()

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __str__(self) -> str:
        return " + ".join(map(str, self.files))


File = DirectFile | StripedFile
"""What a store reads and writes. Several threads may read and write at once."""


def flat_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as uint8 [bytes]."""
    # the strides of one element, or of none, may be anything
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


_threads = threading.local()


def _scratch(size: int) -> memoryview:
    """This thread's page-aligned buffer, of at least `size` bytes."""
    if size > getattr(_threads, "size", 0):
        _threads.memory = aligned(max(16 * PAGE, 1 << (size - 1).bit_length()))
        _threads.scratch, _threads.size = bytes_of(_threads.memory), len(_threads.memory)
    scratch: memoryview = _threads.scratch
    return scratch


ANOTHER = "remove files there, or name a folder on a larger disk"


def _write_error(path: Path, error: OSError, offset: int, size: int) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        why = "the quota is used up" if error.errno == errno.EDQUOT else "no space is left on the device"
        return disk_full(path, max(PAGE, size - free_bytes(path)), why, ANOTHER)
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        missing = offset + size - limit if limit != resource.RLIM_INFINITY else size
        return DiskFull(
            f"{path} may not grow: {missing:,} bytes more ({show_size(missing)}) are needed.",
            why="the limit on the size of a file (RLIMIT_FSIZE, `ulimit -f`) is reached",
            do="raise the limit with `ulimit -f unlimited`",
        )
    return UserError(
        f"{path} cannot be written at byte {offset}: {error.strerror}.",
        do="check the disk with `dmesg`, or name another folder",
    )


def _refused(path: Path, mode: Mode, error: OSError) -> UserError:
    if error.errno == errno.ENOENT:
        what = path if mode != "create" else path.parent
        return UserError(f"{what} does not exist.", do="check the path, or make it first")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        act = "read" if mode == "read" else "written"
        return UserError(
            f"{path} cannot be {act}: {error.strerror}.",
            do=f"name a folder that this user may {'read' if mode == 'read' else 'write to'}",
        )
    return UserError(f"{path} cannot be opened: {error.strerror}.", do="check the path and its disk")
