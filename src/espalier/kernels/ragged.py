"""Ragged rows: values and offsets, for rays with their samples, documents with their tokens, packages with their codes.

Row r has the values `[offsets[r], offsets[r + 1])`: the layout of CSR, of `cu_seqlens` in attention kernels and of
`packed_info` in nerfacc. Padded forms exist for comparison and for code that needs rectangles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Bool, Int64, Shaped


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths.

    Attributes:
        values: [values, ...], the rows one after the other; any dtype.
        offsets: int64 [rows + 1], from 0 to the number of values, never falling.

    >>> rows = Ragged.of_lengths(torch.arange(5), torch.tensor([2, 0, 3]))
    >>> rows.offsets.tolist(), rows.row_ids().tolist()
    ([0, 2, 2, 5], [0, 0, 2, 2, 2])
    """

    values: Tensor
    offsets: Tensor

    @classmethod
    def of_lengths(cls, values: Tensor, lengths: Int64[Tensor, " rows"]) -> Ragged:
        """Rows of those lengths. Raises UserError where they do not add up to the number of values."""
        return cls(values, offsets_of(lengths)).checked()

    @classmethod
    def of_padded(cls, padded: Tensor, lengths: Int64[Tensor, " rows"]) -> Ragged:
        """The first `lengths[r]` values of each row of `padded` [rows, longest, ...]."""
        return cls(padded[mask_of(lengths, padded.shape[1])], offsets_of(lengths)).checked()

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Int64[Tensor, " rows"]:
        """How many values each row has."""
        return self.offsets.diff()

    def checked(self) -> Ragged:
        """Itself. Raises UserError where the offsets are not those of so many values."""
        offsets, count = self.offsets, self.values.shape[0]
        if offsets.dtype != torch.int64 or offsets.dim() != 1 or not offsets.numel():
            raise UserError(f"offsets is {offsets.dtype} {list(offsets.shape)}.", do="int64 [rows + 1]")
        if int(offsets[0]) != 0 or int(offsets[-1]) != count or bool((offsets.diff() < 0).any()):
            raise UserError(
                f"offsets goes from {int(offsets[0])} to {int(offsets[-1])} for {count} values.",
                why="it begins with 0, ends with the number of values, and never falls",
                do="Ragged.of_lengths(values, lengths)",
            )
        return self

    def row(self, index: int) -> Tensor:
        """The values of one row, in the same memory."""
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def row_ids(self) -> Int64[Tensor, " values"]:
        """The number of each value's row."""
        return torch.repeat_interleave(self.lengths, output_size=self.values.shape[0])

    def selected(self, keep: Bool[Tensor, " values"]) -> Ragged:
        """The values where `keep` holds; rows may become empty, their order stays."""
        before = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
        return Ragged(self.values[keep], before[self.offsets])

    def rows(self, start: int, stop: int) -> Ragged:
        """Rows `[start, stop)`, in the same memory."""
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def reversal(self) -> Int64[Tensor, " values"]:
        """For each place the place of the value that stands there when every row is read from its end."""
        starts, ends = self.offsets[:-1], self.offsets[1:]
        ids = self.row_ids()
        return (starts + ends - 1)[ids] - torch.arange(self.values.shape[0], device=self.values.device)

    def padded(self, fill: float = 0.0) -> Shaped[Tensor, "rows longest ..."]:
        """A rectangle as wide as the longest row, filled at the end. Differentiable."""
        longest = int(self.lengths.max()) if len(self) else 0
        shape = (len(self), longest, *self.values.shape[1:])
        mask = mask_of(self.lengths, longest)
        return self.values.new_full(shape, fill).index_put((mask,), self.values)

    def sums(self) -> Shaped[Tensor, "rows ..."]:
        """The sum of each row's values; 0 of an empty row. Differentiable."""
        total = self.values.new_zeros(len(self), *self.values.shape[1:])
        return total.index_add(0, self.row_ids(), self.values)


def offsets_of(lengths: Int64[Tensor, " rows"]) -> Int64[Tensor, " rows_and_one"]:
    """Where each row begins, and at last where the last one ends."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def mask_of(lengths: Int64[Tensor, " rows"], longest: int) -> Bool[Tensor, "rows longest"]:
    """Which cells of a rectangle hold a value."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]
