"""How fast is a disk? Sequential writes and reads, and random 4 KiB reads, past the page cache where it can be."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from espalier.machine.cluster import Disk

BLOCK = 8 * 2**20
"""Bytes per sequential transfer; on ext4 with O_DIRECT, 8 MiB blocks move about twice what 1 MiB blocks do."""
PAGE = 4096
THREADS = 16


def measure(folder: Path, size: int = 64 * 2**20, seconds: float = 0.2) -> tuple[Disk | None, tuple[str, ...]]:
    """The disk under `folder` and what there is to say about it; None when nothing can be written there.

    Writes and removes one file of `size` bytes, then reads at random for about `seconds`, twice.
    """
    try:
        free = shutil.disk_usage(folder).free
        if free < 4 * size:
            return None, (f"disk: {folder} has only {free} bytes free, not measured",)
        with _scratch(folder) as file:
            return _measure(file, folder, size, seconds)
    except OSError as error:
        return None, (f"disk: {folder} cannot be measured: {error.strerror or error}",)


def _measure(file: Path, folder: Path, size: int, seconds: float) -> tuple[Disk, tuple[str, ...]]:
    direct = _allows_direct(file)
    notes = () if direct else (f"disk: {folder} refuses O_DIRECT, measured through the page cache",)
    extra = os.O_DIRECT if direct else 0
    write = _sequential(file, size, os.O_WRONLY | os.O_CREAT | extra, os.pwrite)
    if not direct:
        _forget(file)
    read = _sequential(file, size, os.O_RDONLY | extra, lambda fd, block, at: os.preadv(fd, [block], at))
    if not direct:
        _forget(file)
    iops = _random(file, size, extra, seconds, threads=1)
    parallel = _random(file, size, extra, seconds, threads=THREADS)
    disk = Disk(path=str(folder.resolve()), write=write, read=read, iops=iops, iops_parallel=parallel, direct=direct)
    return disk, notes


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A file whose bytes are freed however the process ends: where the system has /proc, it has no name."""
    handle, name = tempfile.mkstemp(prefix=".espalier-probe-", dir=folder)
    nameless = Path(f"/proc/self/fd/{handle}")
    try:
        if nameless.exists():
            os.unlink(name)
            yield nameless
        else:
            yield Path(name)
    finally:
        os.close(handle)
        with suppress(OSError):
            os.unlink(name)


def _allows_direct(file: Path) -> bool:
    """Tries one aligned write: some file systems accept the flag and refuse the transfer."""
    block = mmap.mmap(-1, PAGE)
    try:
        fd = os.open(file, os.O_WRONLY | os.O_DIRECT)
    except (OSError, AttributeError):
        return False
    try:
        return os.pwrite(fd, block, 0) == PAGE
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        os.close(fd)


def _sequential(file: Path, size: int, flags: int, move: Callable[[int, mmap.mmap, int], int]) -> float:
    """Bytes/s over the whole file, the final flush of a write included."""
    block = mmap.mmap(-1, BLOCK)
    block.write(os.urandom(BLOCK))  # a disk that compresses must not look faster
    fd = os.open(file, flags)
    try:
        begin = time.perf_counter()
        for at in range(0, size, BLOCK):
            moved = move(fd, block, at)
            if moved != BLOCK:
                raise OSError(errno.EIO, f"a transfer of {BLOCK} bytes moved {moved}")
        if flags & os.O_WRONLY:
            os.fsync(fd)
        return size / (time.perf_counter() - begin)
    finally:
        os.close(fd)


def _random(file: Path, size: int, extra: int, seconds: float, threads: int) -> float:
    """4 KiB reads per second at uniform places, by `threads` threads at once."""

    def reads(seed: int) -> int:
        block, place, done = mmap.mmap(-1, PAGE), random.Random(seed), 0
        while time.perf_counter() < end:
            os.preadv(fd, [block], place.randrange(size // PAGE) * PAGE)
            done += 1
        return done

    fd = os.open(file, os.O_RDONLY | extra)
    try:
        begin = time.perf_counter()
        end = begin + seconds
        with ThreadPoolExecutor(threads) as pool:
            done = sum(pool.map(reads, range(threads)))
        return max(1, done) / (time.perf_counter() - begin)
    finally:
        os.close(fd)


def _forget(file: Path) -> None:
    """Asks the kernel to drop the file from the page cache."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
