"""Activation offload: inputs of blocks that are computed again wait on disk or in host memory between forward and
backward.

Where activations are computed again, autograd keeps the input of every block until its backward. `saved_tensors_hooks`
write what one block gives to the next to a place, and read it ahead while the block after is in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from espalier.mechanisms.offload.host_memory import Streams, streams_of
from espalier.mechanisms.offload.state_file import Done, TransferMeter, wait_for
from espalier.plan.axes.offload_tiers import PENDING
from espalier.recipe.cache_dir import writing
from espalier.store.cost import pages
from espalier.store.direct_io import DirectFile, aligned
from espalier.store.io_queue import IoQueue

Reading = tuple[Done, Tensor]
"""Ends when the tensor is filled."""


class HostPlaces:
    """Pinned memory of a GPU's host. Has state: the memory, by offset."""

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self._device = device
        self._streams = streams or streams_of(device)
        self._kept: dict[int, Tensor] = {}

    def write(self, offset: int, values: Tensor) -> Done:
        """Begins to write."""
        host = self._kept.get(offset)
        if host is None:
            pinned = self._device.type == "cuda"
            host = self._kept[offset] = torch.empty(pages(values.nbytes), dtype=torch.uint8, pin_memory=pinned)
        with self._streams.beside(1):
            host[: values.nbytes].view(values.dtype).view(values.shape).copy_(values, non_blocking=True)
        return partial(self._streams.wait, 1)

    def read(self, offset: int, size: int) -> Reading:
        """Begins to read. What is given, uint8 [size] on the device, is filled when that is done."""
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        with self._streams.beside(0):
            buffer.copy_(self._kept[offset], non_blocking=True)
        return partial(self._streams.wait, 0), buffer


class FilePlaces:
    """A file, which loses its name. A GPU's activations pass through host memory. Has state: the file and its queue."""

    def __init__(self, path: Path, device: torch.device) -> None:
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = DirectFile(path, "create")
        self._queue = IoQueue()
        self._device = device
        self._streams = streams_of(device)
        path.unlink()

    def write(self, offset: int, values: Tensor) -> Done:
        with self._streams.beside(1):
            host = values.to("cpu")
        return self._queue.write(self._file, offset, host).result

    def read(self, offset: int, size: int) -> Reading:
        host = aligned(size)
        arrived = self._queue.read(self._file, offset, host)
        if self._device.type == "cpu":
            return arrived.result, host
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)

        def there() -> None:
            arrived.result()
            with self._streams.beside(0):
                buffer.copy_(host)
            self._streams.wait(0)

        return there, buffer


Places = HostPlaces | FilePlaces
"""Where activations are kept: each at a byte offset, of whole pages."""


@dataclass(eq=False)
class SavedActivation:
    """An activation in the file. Has state: what is on its way.

    Attributes:
        before: what backward needs after it.
    """

    offset: int
    shape: torch.Size
    dtype: torch.dtype
    written: Done
    before: SavedActivation | None = None
    reading: Reading | None = None

    @property
    def bytes(self) -> int:
        """In the file."""
        return pages(self.shape.numel() * self.dtype.itemsize)


class ActivationStore:
    """What waits between forward and backward. Has state: free places, and what is on its way.

    Args:
        places: where it is kept.
        meter: counts bytes and waits.
    """

    def __init__(self, places: Places, meter: TransferMeter) -> None:
        self._places = places
        self._meter = meter
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._pending: list[Reading] = []

    def put(self, tensor: Tensor) -> SavedActivation:
        """Begins to write a tensor, which must not change any more."""
        while len(self._pending) >= PENDING:
            wait_for(self._pending.pop(0)[0], self._meter)
        values = tensor.detach().contiguous()
        size = pages(tensor.nbytes)
        place = self._free.get(size, [])
        offset = place.pop() if place else self._end
        self._end = max(self._end, offset + size)
        written = self._places.write(offset, values)
        self._meter.written_bytes += size
        self._pending.append((written, values))
        return SavedActivation(offset, tensor.shape, tensor.dtype, written)

    def begin(self, saved: SavedActivation) -> None:
        """Begins to read what was put."""
        if saved.reading is None:
            wait_for(saved.written, self._meter)
            self._meter.read_bytes += saved.bytes
            saved.reading = self._places.read(saved.offset, saved.bytes)

    def get(self, saved: SavedActivation) -> Tensor:
        """The values, once: their place is free again."""
        self.begin(saved)
        assert saved.reading is not None
        arrived, buffer = saved.reading
        wait_for(arrived, self._meter)
        saved.reading = saved.before = None
        self._free.setdefault(saved.bytes, []).append(saved.offset)
        return buffer[: saved.shape.numel() * saved.dtype.itemsize].view(saved.dtype).view(saved.shape)


class SavedActivations:
    """What blocks give, between forward and backward. Has state: what was given last.

    Args:
        store: where it waits.
        blocks: the model's, in the order in which they compute; what all but the last give is written.
    """

    def __init__(self, store: ActivationStore, blocks: Sequence[nn.Module]) -> None:
        self._store = store
        self._given: tuple[ref[Tensor], int] | None = None
        self._last: SavedActivation | None = None
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
        saved = self._store.put(tensor)
        saved.before = self._last
        self._last = saved
        return saved

    def _unpack(self, saved: Any) -> Tensor:
        """The values again; the block before's are read from now on."""
        if isinstance(saved, Tensor):
            return saved
        for following in (saved, saved.before):
            if following is not None:
                self._store.begin(following)
        return self._store.get(saved)
