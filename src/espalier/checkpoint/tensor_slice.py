"""A rank's slice of a tensor that is cut in its flat (row-major) order.

A contiguous run of elements is a few boxes of the tensor: the end of a row, whole rows, the beginning of another. So
the file holds plain tensors of their full shape, whatever cut them, and any other cut reads what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Box:
    """A box of a tensor, and where its elements lie in a run that begins at `first` of the slice."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int = 0

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor of that shape."""
        return cls((0,) * len(shape), tuple(shape))

    def overlap(self, other: Box) -> Box | None:
        """What both have; None where that is nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self.ends, other.ends)
        sizes = tuple(end - begin for begin, end in zip(offsets, ends, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    @property
    def ends(self) -> tuple[int, ...]:
        """Behind its last element, in each dimension."""
        return tuple(begin + size for begin, size in zip(self.offsets, self.sizes, strict=True))

    def within(self, tensor: Tensor, outer: Box) -> Tensor:
        """This box, of a `tensor` that holds the elements of `outer`."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset - outer.offsets[dim], size)
        return tensor

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

    def boxes(self) -> list[Box]:
        """Where its elements lie in the tensor."""
        if not self.shape.numel():  # one box without elements, so that the file knows the name
            return [Box.whole(self.shape)]
        stop = self.start + self.local.numel()
        if self.part is None:
            return list(boxes(self.shape, self.start, stop))
        return [box.inside(self.part) for box in boxes(self.part.sizes, self.start, stop)]

    def written(self) -> list[Box]:
        """The boxes of it that this rank writes."""
        return self.boxes() if self.writes else []

    def of_box(self, box: Box) -> Tensor:
        """The elements of one of its boxes."""
        return self.local[box.first : box.first + math.prod(box.sizes)].view(box.sizes)

    def taken_from(self, whole: Tensor) -> Tensor:
        """1-D: these elements of the whole tensor."""
        if self.part is not None:
            ends = zip(self.part.offsets, self.part.sizes, strict=True)
            whole = whole[tuple(slice(first, first + size) for first, size in ends)]
        return whole.reshape(-1)[self.start : self.start + self.local.numel()]


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
        each = self.local.numel()
        ranks = self.shape[0]
        numbers = range(self.start // max(1, each), shape[0], ranks)
        return RowSlice(self.local.new_empty(len(numbers) * each), shape, 0, rows=tuple(numbers))


@dataclass(frozen=True, eq=False)
class RowSlice(Slice):
    """Some whole `rows` of a tensor, one after the other in `local`. Only read."""

    rows: tuple[int, ...] = ()

    def boxes(self) -> list[Box]:
        each = math.prod(self.shape[1:])
        return [
            box
            for index, row in enumerate(self.rows)
            for box in boxes(self.shape, row * each, (row + 1) * each, index * each)
        ]
