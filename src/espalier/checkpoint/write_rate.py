"""Write rate of checkpoints: limited where others use the same disk or network, and measured.

A limited writer hands over a piece at a time, lets the disk take what it has, and sleeps as long as the piece should
have taken: the page cache then never holds more than `SYNCED` bytes of a checkpoint that the disk has not.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from typing import IO, Any

PIECE = 4 << 20
"""Bytes that are written at once."""
SYNCED = 16 << 20
"""Bytes after which the disk has to have them."""


class WriteLimit:
    """Bytes per second that a rank writes at most, over all its files. Has state: when the next byte may follow.

    Args:
        rate: bytes/s; infinite: as fast as it goes.
    """

    def __init__(self, rate: float = math.inf) -> None:
        self.rate = rate
        self._due = 0.0
        self._unsynced = 0

    def write(self, stream: IO[bytes], data: Any) -> int:
        """Writes `data`, in as many seconds as the rate allows. Bytes written."""
        left = memoryview(data).cast("B")
        for at in range(0, len(left), PIECE):
            piece = left[at : at + PIECE]
            begun = time.monotonic()
            stream.write(piece)
            self._sync(stream, len(piece))
            self._due = max(self._due, begun) + len(piece) / self.rate
            time.sleep(max(0.0, self._due - time.monotonic()))
        return len(left)

    def copy(self, source: IO[bytes], target: IO[bytes]) -> None:
        """Writes all of `source` to `target`."""
        while data := source.read(PIECE):
            self.write(target, data)

    def _sync(self, stream: IO[bytes], size: int) -> None:
        self._unsynced += size
        if self._unsynced >= SYNCED:
            stream.flush()
            with suppress(OSError, AttributeError):  # what has no descriptor is no file of a disk here
                os.fdatasync(stream.fileno())
            self._unsynced = 0


class LimitedStream:
    """A file for writing, at the rate of a `WriteLimit`; else the file's own. Has state: theirs."""

    def __init__(self, stream: IO[bytes], limit: WriteLimit) -> None:
        self._stream = stream
        self._limit = limit

    def write(self, data: Any) -> int:
        return self._limit.write(self._stream, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
