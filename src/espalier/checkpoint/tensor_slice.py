"""A rank's slice of a tensor that is cut in its flat (row-major) order, for torch.distributed.checkpoint.

A contiguous run of elements is a few boxes of the tensor: the end of a row, whole rows, the beginning of another. So
the file holds plain tensors of their full shape, whatever cut them, and any other cut reads what it needs.
torch.distributed.checkpoint, which takes half a second, is imported by the methods it calls: plans import this file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


@dataclass(frozen=True)
class Box:
    """A box of a tensor, and where its elements lie in a run that begins at `first` of the slice."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int = 0

    def inside(self, outer: Box) -> Box:
        """This box, whose offsets count from the first element of `outer`, in the tensor."""
        return replace(self, offsets=tuple(a + b for a, b in zip(self.offsets, outer.offsets, strict=True)))


def boxes(shape: Sequence[int], start: int, stop: int, first: int = 0) -> Iterator[Box]:
    """The boxes that elements `[start, stop)` of a tensor's row-major order fill, in that order."""
    if start >= stop:
        return
    if not shape:
        yield Box((), (), first)
        return
    row = math.prod(shape[1:])
    top, into = divmod(start, row)
    if into or stop - start < row:
        end = min(stop - top * row, row)
        for box in boxes(shape[1:], into, end, first):
            yield Box((top, *box.offsets), (1, *box.sizes), box.first)
        yield from boxes(shape, top * row + end, stop, first + end - into)
        return
    rows = (stop - start) // row
    yield Box((top, *(0 for _ in shape[1:])), (rows, *shape[1:]), first)
    yield from boxes(shape, start + rows * row, stop, first + rows * row)


@dataclass(frozen=True, eq=False)
class Slice:
    """Elements `[start, start + len(local))` of a tensor of `shape`, or of a `part` of it, in row-major order.

    Attributes:
        local: 1-D, contiguous; read into in place. It may be empty.
        writes: whether this rank writes it (what several ranks hold is written once in any case).
        part: the box of the tensor that the elements are of; None: the whole tensor.
    """

    local: Tensor
    shape: torch.Size
    start: int
    writes: bool = True
    part: Box | None = None

    def saved_as(self, shape: torch.Size) -> Slice | None:
        """What to read a saved tensor of another `shape` into; None: it cannot be the same tensor."""
        return None

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device

    def size(self) -> torch.Size:
        return self.shape

    def of(self, local: Tensor) -> Slice:
        """The same part with other elements."""
        return replace(self, local=local)

    def _boxes(self) -> list[Box]:
        if not self.shape.numel():  # one box without elements, so that the file knows the name
            return [Box((0,) * len(self.shape), tuple(self.shape), 0)]
        stop = self.start + self.local.numel()
        if self.part is None:
            return list(boxes(self.shape, self.start, stop))
        return [box.inside(self.part) for box in boxes(self.part.sizes, self.start, stop)]

    def _written(self) -> list[Box]:
        """The boxes that a file holds."""
        return self._boxes()

    def taken_from(self, whole: Tensor) -> Tensor:
        """1-D: these elements of the whole tensor."""
        if self.part is not None:
            ends = zip(self.part.offsets, self.part.sizes, strict=True)
            whole = whole[tuple(slice(first, first + size) for first, size in ends)]
        return whole.reshape(-1)[self.start : self.start + self.local.numel()]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.local.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.shape),
            )
            for box in (self._written() if self.writes else [])
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        box = next(box for box in self._boxes() if torch.Size(box.offsets) == index.offset)
        return self.local[box.first : box.first + math.prod(box.sizes)].view(box.sizes)


class RankRow(Slice):
    """One rank's row of a tensor that has a row for each rank. It may be read by any other number of ranks."""

    @classmethod
    def of_rank(cls, local: Tensor, shape: Sequence[int], rank: int, ranks: int) -> RankRow:
        """`local`: [elements of `shape`]."""
        return cls(local, torch.Size((ranks, *shape)), rank * local.numel())

    def saved_as(self, shape: torch.Size) -> Slice | None:
        """Of more rows or fewer: every row whose number, by the number of ranks now, leaves this one's."""
        if shape[1:] != self.shape[1:]:
            return None
        each, ranks = self.local.numel(), self.shape[0]
        numbers = range(self.start // max(1, each), shape[0], ranks)
        return RowSlice(self.local.new_empty(len(numbers) * each), shape, 0, rows=tuple(numbers))


@dataclass(frozen=True, eq=False)
class RowSlice(Slice):
    """Some whole `rows` of a tensor, one after the other in `local`. Only read."""

    rows: tuple[int, ...] = ()

    def _boxes(self) -> list[Box]:
        each = math.prod(self.shape[1:])
        return [
            box
            for index, row in enumerate(self.rows)
            for box in boxes(self.shape, row * each, (row + 1) * each, index * each)
        ]


def _chunk(box: Box) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
