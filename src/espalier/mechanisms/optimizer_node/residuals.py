"""Residuals of 8-bit pushes: what rounding has left of a worker's gradients, for its next push.

A worker holds them in memory, and in a file with two generations, of the last two steps. The nodes go on from one of
these, whatever process is killed at whatever moment, so a run that goes on sends the bits of an unbroken one. The file
is written through the page cache and not synced: a machine that loses power may lose it, which its checksums tell.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from espalier.plan.axes.node_layout import NodeJob
from espalier.recipe.cache_dir import writing
from espalier.store.direct_io import bytes_of, reserve

_HASH = 8
"""Bytes of the hash before the values of a layer."""
_PART = 1 << 28
_DO = "comm.codec=exact, which leaves nothing"


def _parts(content: memoryview) -> Iterator[tuple[int, memoryview]]:
    """What is read and written in one call, and where it begins."""
    return ((start, content[start : start + _PART]) for start in range(0, len(content), _PART))


class PushResiduals:
    """The residuals of a worker's layers. Has state: memory for those that were pushed, and a file, until `close`.

    Args:
        job: what is pushed.
        rank: of the worker.
        file: None: they are in memory only, and a step that is made again begins with what is there.

    Raises UserError where the file cannot be written.
    """

    def __init__(self, job: NodeJob, rank: int = 0, file: Path | None = None) -> None:
        self._sizes = [4 * layer.numel for layer in job.layers]
        self._starts = [sum(self._sizes[:layer]) + _HASH * layer for layer in range(len(self._sizes) + 1)]
        self._key = xxhash.xxh3_64_intdigest(repr((rank, job.workers, job.push, job.layers)).encode())
        self._values: dict[int, Tensor] = {}
        self._steps: dict[int, int] = {}
        self._file = -1
        self._path = file
        if file is not None:
            with writing(file, _DO):
                file.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                reserve(self._file, 2 * self._starts[-1])

    def of(self, layer: int, step: int) -> Tensor:
        """[numel] what the steps before `step` have left of a layer, to be rewritten and given to `keep`."""
        values = self._values.get(layer)
        if self._steps.get(layer) != step and (self._file >= 0 or values is None):
            values = self._read(layer, step)
        if values is None:
            values = torch.zeros(self._sizes[layer] // 4)
        self._values[layer] = values
        self._steps[layer] = -1
        return values

    def keep(self, layer: int, step: int, values: Tensor) -> None:
        """`values` are what the steps before `step` have left. Raises UserError where they cannot be written."""
        if self._values.get(layer) is not values:  # of a push that is made again
            return
        if self._file >= 0 and self._path is not None:
            content = bytes_of(values)
            at = self._at(layer, step)
            with writing(self._path, _DO):
                os.pwrite(self._file, self._hash(content, step), at)
                for start, part in _parts(content):
                    if os.pwrite(self._file, part, at + _HASH + start) < len(part):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._steps[layer] = step

    def lacking(self, step: int) -> bool:
        """Whether something of what the steps before `step` have left is not there."""
        return step > 0 and any(self._read(layer, step) is None for layer in range(len(self._sizes)))

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _read(self, layer: int, step: int) -> Tensor | None:
        if self._file < 0:
            return None
        at = self._at(layer, step)
        values = torch.zeros(self._sizes[layer] // 4)
        content = bytes_of(values)
        for start, part in _parts(content):
            os.preadv(self._file, [part], at + _HASH + start)
        return values if os.pread(self._file, _HASH, at) == self._hash(content, step) else None

    def _at(self, layer: int, step: int) -> int:
        return step % 2 * self._starts[-1] + self._starts[layer]

    def _hash(self, content: memoryview, step: int) -> bytes:
        """Of the values, for this worker and step alone."""
        return xxhash.xxh3_64_digest(content, seed=(self._key + step) % 2**64)
