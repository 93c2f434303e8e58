"""io_uring: a ring of reads in flight, by the kernel's own system calls; needs Linux 6.1 and no library.

(The binding `liburing` reads into bytearrays only, which are not page-aligned, and takes the GIL for every read.)

A probe reads a page through a real ring: containers and old kernels refuse the call, and threads read instead.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

SETUP, SINGLE_ISSUER, DEFER_TASKRUN = 425, 1 << 12, 1 << 13
ENTRIES_AT = 0x10000000
DEPTH = 128
"""Reads in flight."""


def _fields(names: str, rest: int) -> list[Any]:
    """Words called `names`, and as many as `rest` that are not read."""
    return [*((name, ctypes.c_uint32) for name in names.split()), ("rest", ctypes.c_uint32 * rest)]


class _Submission(ctypes.Structure):
    _fields_ = _fields("head tail mask entries flags dropped array", 3)


class _Completion(ctypes.Structure):
    _fields_ = _fields("head tail mask entries overflow events flags", 3)


class _Params(ctypes.Structure):
    _fields_ = _fields("submissions completions flags cpu idle features", 4)
    _fields_ += [("submit", _Submission), ("complete", _Completion)]


class Ring:
    """One io_uring of `depth` reads in flight, for the thread that makes it. Holds a file descriptor and mappings."""

    def __init__(self, depth: int = DEPTH) -> None:
        params = _Params(flags=SINGLE_ISSUER | DEFER_TASKRUN)
        fd = ctypes.CDLL(None, use_errno=True).syscall(SETUP, depth, ctypes.byref(params))
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._fd = fd
        submit = params.submit
        complete = params.complete
        size = max(submit.array + 4 * params.submissions, complete.events + 16 * params.completions)
        self._shared = np.frombuffer(mmap.mmap(fd, size), np.uint32)
        entries = mmap.mmap(fd, 64 * params.submissions, offset=ENTRIES_AT)
        self._entries: NDArray[Any] = np.frombuffer(entries, np.uint64).reshape(-1, 8)
        places = (submit.tail, submit.mask, submit.array, complete.head, complete.tail, complete.mask, complete.events)
        self._places = np.array(places, np.uint32) // 4

    def read(self, fd: int, base: int, runs: NDArray[Any], missed: NDArray[Any]) -> int:
        from espalier.store.read_kernels import uring_runs

        failed = uring_runs(self._fd, fd, base, runs, missed, self._shared, self._places, self._entries)
        return int(failed)

    def close(self) -> None:
        fd = self._fd
        self._fd = -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


@cache
def available() -> bool:
    """Whether a ring reads here what plain reads do."""
    try:
        ring = Ring(2)
    except (OSError, AttributeError, ValueError):
        return False
    with tempfile.TemporaryFile() as file:
        file.write(bytes(range(256)) * 4)
        file.flush()
        content = np.zeros(1024, np.uint8)
        runs = np.array([[at, 256, at] for at in range(0, 1024, 256)])
        failed = ring.read(file.fileno(), content.ctypes.data, runs, np.zeros(4, np.int64))
        ring.close()
        return failed == 0 and bool((content == np.arange(1024) % 256).all())
