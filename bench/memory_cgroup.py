"""Memory cgroup of a process: what it allocates and what the kernel caches of its files from then on, limited together.

For contestants that map files, whose cache nothing else bounds. Needs write access to the cgroup file system (root in
most containers); imports the standard library alone, for processes of other environments.
"""

from __future__ import annotations

import atexit
import mmap
import os
from pathlib import Path
from typing import Any

ROOT = Path("/sys/fs/cgroup")


def join(limit: int) -> Path:
    """Puts this process into a cgroup of `limit` bytes, which goes when it ends (by `atexit`), and returns its folder.
    Raises OSError where it may not."""
    first = (ROOT / "memory").is_dir()  # cgroup v1
    root = ROOT / "memory" if first else ROOT
    before = root / _own(first).lstrip("/")
    group = root / f"espalier-bench-{os.getpid()}"
    group.mkdir()
    (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit))
    (group / "cgroup.procs").write_text(str(os.getpid()))

    def leave() -> None:
        (before if before.is_dir() else root).joinpath("cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()

    atexit.register(leave)
    return group


def _own(first: bool) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names == ("memory" if first else ""):
            return path
    return "/"


def at_random(mapped: Any) -> Any:
    """The memory-mapped NumPy array, whose pages are read one by one from then on: with read-ahead, which may be
    megabytes, random rows cost even more."""
    mapped._mmap.madvise(mmap.MADV_RANDOM)
    return mapped


def forget_file(path: str) -> None:
    """Drops what the kernel caches of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
