"""Row format: how a packed feature row is stored, as it is (fp32), in bfloat16, or in int8 or int4 with a scale of its
own.

`fp32` keeps the bytes of the feature file where its dtype converts to float32 without loss, and float32 of float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from espalier.kernels import row_bits, row_widths
from espalier.kernels.row_widths import RowWidths
from espalier.recipe.errors import UserError

Kind = Literal["fp32", "bf16", "int8", "int4"]
BITS = {"int8": 8, "int4": 4}
_SCALE = 4  # bytes of a row's float32 scale, which stand first


@dataclass(frozen=True)
class RowFormat:
    """Rows of `width` values as bytes.

    Attributes:
        kind: "fp32", "bf16", "int8" or "int4". The error of a value is at most 2^-8 of it with bf16, and of the largest
            magnitude in its row 1/254 with int8, 1/14 with int4.
        dtype: of the feature file.
    """

    kind: Kind
    width: int
    dtype: torch.dtype

    @property
    def stored(self) -> torch.dtype:
        """The dtype of values on disk; two of int4 are in a byte."""
        wide = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(self.kind, torch.int8)
        return self.dtype if self.dtype.itemsize <= wide.itemsize else wide  # nothing would be gained

    @property
    def levels(self) -> int:
        """The largest code of int8 or int4."""
        return (1 << (BITS[self.kind] - 1)) - 1

    @property
    def lossless(self) -> bool:
        """Whether `decode` gives what float32 holds of the feature file's values."""
        return self.stored == self.dtype or self.kind == "fp32"

    @property
    def row_bytes(self) -> int:
        """Of a row; those with a scale are a multiple of four, so that every scale is aligned."""
        return int(self.widths(1).total(self._bytes))

    def widths(self, rows: int) -> RowWidths:
        """Of the values of so many rows: all have as many bits, since rows are read by their numbers."""
        return row_widths.uniform(BITS[self.kind] if self._scaled else 8 * self.stored.itemsize, rows)

    def _bytes(self, bits: Any) -> Any:
        codes = row_bits.row_bytes(self.width, bits)
        return _SCALE + -(-codes // 4) * 4 if self._scaled else codes

    @property
    def _code_bytes(self) -> int:
        return int(row_bits.row_bytes(self.width, BITS[self.kind]))

    @property
    def _scaled(self) -> bool:
        return self.stored == torch.int8 != self.dtype

    def encode(self, rows: Tensor, first: int = 0) -> Tensor:
        """[rows, width] of the file's dtype as uint8 [rows, row_bytes]; no copy where the bytes are kept. Raises
        UserError where a value is not finite; `first` is the number of the first row."""
        rows = rows.contiguous()
        if not math.isfinite(_total(rows)):  # or finite values whose sum is not
            _refuse_not_finite(rows, first)
        if not self._scaled:
            return rows.to(self.stored).view(torch.uint8).view(len(rows), self.row_bytes)
        values = rows.float()
        scale = values.abs().amax(1, keepdim=True) / self.levels if self.width else values.new_zeros(len(values), 1)
        out = torch.zeros(len(rows), self.row_bytes, dtype=torch.uint8)
        out[:, :_SCALE] = scale.view(torch.uint8)
        levels = self.levels
        tiny = torch.finfo(torch.float32).tiny
        codes = (values / scale.clamp_min(tiny)).round_().clamp_(-levels, levels)
        packed = codes.to(torch.int8)
        if self.kind == "int4":
            packed = row_bits.pack_rows(packed, row_bits.widths_of(len(rows), 4)).view(len(rows), self._code_bytes)
        out[:, _SCALE : _SCALE + self._code_bytes] = packed.view(torch.uint8)
        return out

    def decode(self, data: Tensor, out: Tensor | None = None) -> Tensor:
        """uint8 [rows, row_bytes] as float32 [rows, width], in `out` where it is given."""
        out = torch.empty(len(data), self.width) if out is None else out
        if not self._scaled:
            return out.copy_(data.view(self.stored).view(len(data), self.width))
        codes = data[:, _SCALE : _SCALE + self._code_bytes]
        if self.kind == "int4":  # as `row_bits.unpack_rows`, on any device
            halves = torch.stack([codes & 15, codes >> 4], 2).flatten(1)[:, : self.width]
            codes = (halves ^ 8) - 8
        out.copy_(codes.view(torch.int8))
        return out.mul_(data[:, :_SCALE].view(torch.float32))


def _total(rows: Tensor) -> float:
    if rows.dtype in (torch.float32, torch.float64):  # by NumPy: torch's threads would spin while others read and write
        with np.errstate(all="ignore"):
            return float(rows.numpy().sum())
    return float(rows.sum(dtype=torch.float32))


def _refuse_not_finite(rows: Tensor, first: int) -> None:
    bad = ~torch.isfinite(rows).all(1)
    if bool(bad.any()):
        raise UserError(
            f"The graph's features hold NaN or infinity, first in row {first + int(bad.int().argmax())}.",
            why="one such value spreads to all neighbouring nodes",
            do="replace it before packing (numpy.nan_to_num)",
        )
