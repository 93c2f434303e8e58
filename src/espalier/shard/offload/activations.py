"""Activation offload: inputs of blocks that are computed again wait on disk between forward and backward.

Where activations are computed again, autograd keeps the input of every block until its backward. `saved_tensors_hooks`
write what one block gives to the next to a file, and read it ahead while the block after is in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from espalier.cache_dir import unwritable
from espalier.shard.offload.cost import PENDING
from espalier.shard.offload.state_file import TransferMeter, wait_for
from espalier.store.cost import pages
from espalier.store.direct_io import DirectFile, aligned
from espalier.store.io_queue import IoQueue


@dataclass(eq=False)
class _Saved:
    """An activation in the file. Has state: what is on its way.

    Attributes:
        before: what backward needs after it.
    """

    offset: int
    shape: torch.Size
    dtype: torch.dtype
    before: _Saved | None
    written: Future[None]
    reading: tuple[Future[None], Tensor] | None = None

    @property
    def bytes(self) -> int:
        """In the file."""
        return pages(self.shape.numel() * self.dtype.itemsize)


class ActivationFile:
    """What blocks give, between forward and backward. Has state: the file, its free space, and what is on its way.

    Args:
        path: of the file, which loses its name.
        blocks: the model's, in the order in which they compute; what all but the last give is written.
        meter: counts bytes and waits.
    """

    def __init__(self, path: Path, blocks: Sequence[nn.Module], meter: TransferMeter) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(str(path.parent), error) from error
        self._file, self._queue, self._meter = DirectFile(path, "create"), IoQueue(), meter
        path.unlink()
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._given: tuple[ref[Tensor], int] | None = None
        self._pending: list[tuple[Future[None], Tensor]] = []
        self._last: _Saved | None = None
        for block in blocks[:-1]:
            block.register_forward_hook(self._made)

    def _made(self, block: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            self._given = ref(output), output.data_ptr()  # hooks see another tensor with its memory

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Surrounds forward passes."""
        self._last = None  # backward ends with this pass's first
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        """Of what a block gave: where it is written. Others are kept as they are."""
        made = self._given
        if made is None or made[0]() is None or made[1] != tensor.data_ptr() or not tensor.is_contiguous():
            return tensor
        self._given = None
        while len(self._pending) >= PENDING:
            wait_for([self._pending.pop(0)[0]], self._meter)
        values, size = tensor.detach(), pages(tensor.nbytes)
        place = self._free.get(size, [])
        offset = place.pop() if place else self._end
        self._end = max(self._end, offset + size)
        written = self._queue.write(self._file, offset, values)
        self._meter.written_bytes += size
        self._pending.append((written, values))
        self._last = _Saved(offset, tensor.shape, tensor.dtype, self._last, written)
        return self._last

    def _unpack(self, saved: Any) -> Tensor:
        """The values again; the block before's are read from now on."""
        if isinstance(saved, Tensor):
            return saved
        self._read(saved)
        assert saved.reading is not None
        if saved.before is not None:
            self._read(saved.before)
        arrived, buffer = saved.reading
        wait_for([arrived], self._meter)
        saved.reading = saved.before = None
        self._free.setdefault(saved.bytes, []).append(saved.offset)
        return buffer[: saved.shape.numel() * saved.dtype.itemsize].view(saved.dtype).view(saved.shape)

    def _read(self, saved: _Saved) -> None:
        if saved.reading is None:
            wait_for([saved.written], self._meter)
            buffer = aligned(saved.bytes)
            self._meter.read_bytes += saved.bytes
            saved.reading = self._queue.read(self._file, saved.offset, buffer), buffer
