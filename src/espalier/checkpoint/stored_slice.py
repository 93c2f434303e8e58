"""A slice of a tensor that is not in memory (optimizer states on disk): a checkpoint reads and writes it in pieces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from espalier.checkpoint.base import StateDict
from espalier.checkpoint.tensor_slice import Box, Slice


class Stored(Protocol):
    """Elements that are not in memory, in row-major order."""

    @property
    def cuts(self) -> Sequence[int]:
        """Where what is read at once begins; ascending, from 0 on."""

    def read(self, start: int, out: Tensor) -> None:
        """Fills `out` [any] with the elements from `start` on."""

    def write(self, start: int, values: Tensor) -> None:
        """Puts `values` [any], of whatever precision, at `start`."""


@dataclass(frozen=True, eq=False)
class StoredSlice(Slice):
    """A slice whose elements are `stored`; `local` is on the meta device. What is read of a checkpoint goes where the
    elements are at once."""

    stored: Stored = field(kw_only=True)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def of(self, local: Tensor) -> Slice:
        """The same part, read in another precision."""
        return replace(self, local=local.to("meta"))

    def values(self) -> Tensor:
        """1-D: all elements, in memory."""
        values = torch.empty(self.local.numel(), dtype=self.dtype)
        self.stored.read(0, values)
        return values

    def take(self, source: Tensor | Slice) -> None:
        """Copies elements from another tensor; nothing where `source` was read into this one."""
        if isinstance(source, Tensor):
            self.stored.write(0, self.taken_from(source))
        elif not isinstance(source, StoredSlice):
            self.stored.write(0, source.local)

    def read(self, box: Box, room: Callable[[int], Tensor]) -> Tensor:
        """A box that is written, read into `room(bytes)`."""
        out = room(math.prod(box.sizes) * self.dtype.itemsize).view(self.dtype)
        self.stored.read(box.first, out)
        return out.view(box.sizes)

    def put(self, box: Box, part: Box, values: Tensor) -> None:
        """Puts the `values` of a `part` of one of its boxes where they belong."""
        offsets = [at - begin for at, begin in zip(part.offsets, box.offsets, strict=True)]
        for first, run in _runs(box.sizes, offsets, values):
            self.stored.write(box.first + first, run)

    def written(self) -> list[Box]:
        """The boxes of what is read at once."""
        if not self.writes:
            return []
        count = self.local.numel()
        boxes = []
        for first, last in itertools.pairwise((*self.stored.cuts, count)):
            part = Slice(self.local[first:last], self.shape, self.start + first, part=self.part)
            boxes += [replace(box, first=box.first + first) for box in part.boxes()]
        return boxes or self.boxes()


def fill_slices(table: StateDict, state: StateDict) -> None:
    """Copies the values of `state` into the tensors and slices of `table`. Raises KeyError for a name that lacks."""
    with torch.no_grad():
        for name, target in table.items():
            source = state[name]
            if not isinstance(target, Slice):
                if isinstance(target, Tensor):
                    target.copy_(source)
            elif isinstance(target, StoredSlice):
                target.take(source)
            elif isinstance(source, Slice):
                if source.local.data_ptr() != target.local.data_ptr():
                    target.local.copy_(source.local)
            else:  # a whole tensor, from somewhere else
                target.local.copy_(target.taken_from(source))


def _runs(sizes: Sequence[int], offsets: Sequence[int], values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first element in a box of `sizes`, 1-D) of the contiguous runs of `values`, which begin at `offsets` of it."""
    if values.ndim == 0 or tuple(values.shape[1:]) == tuple(sizes[1:]):
        yield (0 if values.ndim == 0 else offsets[0] * math.prod(sizes[1:])), values.reshape(-1)
        return
    for index, position in enumerate(values):
        for first, part in _runs(sizes[1:], offsets[1:], position):
            yield (offsets[0] + index) * math.prod(sizes[1:]) + first, part
