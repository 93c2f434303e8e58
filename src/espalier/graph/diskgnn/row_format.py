"""Row format: how a packed feature row is stored, as it is (fp32), in bfloat16, or in int8 with a scale of its own.

`fp32` keeps the bytes of the feature file where its dtype converts to float32 without loss, and float32 of float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from espalier.errors import UserError

Kind = Literal["fp32", "bf16", "int8"]
LEVELS = 127
_SCALE = 4  # bytes of a row's float32 scale, which stand first


@dataclass(frozen=True)
class RowFormat:
    """Rows of `width` values as bytes.

    Attributes:
        kind: "fp32", "bf16" or "int8". The error of a value is at most 2^-8 of it with bf16, and 1/254 of the largest
            magnitude in its row with int8.
        dtype: of the feature file.
    """

    kind: Kind
    width: int
    dtype: torch.dtype

    @property
    def stored(self) -> torch.dtype:
        """The dtype of values on disk."""
        small = {"fp32": 4, "bf16": 2, "int8": 1}[self.kind]
        if self.dtype.itemsize <= small:  # nothing would be gained
            return self.dtype
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[self.kind]

    @property
    def lossless(self) -> bool:
        """Whether `decode` gives what float32 holds of the feature file's values."""
        return self.stored == self.dtype or self.kind == "fp32"

    @property
    def row_bytes(self) -> int:
        """Of a row; int8's are a multiple of four, so that every scale is aligned."""
        size = self.width * self.stored.itemsize
        return size if not self._scaled else _SCALE + -(-size // 4) * 4

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
        scale = values.abs().amax(1, keepdim=True) / LEVELS if self.width else values.new_zeros(len(values), 1)
        out = torch.zeros(len(rows), self.row_bytes, dtype=torch.uint8)
        out[:, :_SCALE] = scale.view(torch.uint8)
        codes = (values / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(-LEVELS, LEVELS)
        out[:, _SCALE : _SCALE + self.width] = codes.to(torch.int8).view(torch.uint8)
        return out

    def decode(self, data: Tensor, out: Tensor | None = None) -> Tensor:
        """uint8 [rows, row_bytes] as float32 [rows, width], in `out` where it is given."""
        out = torch.empty(len(data), self.width) if out is None else out
        if not self._scaled:
            return out.copy_(data.view(self.stored).view(len(data), self.width))
        out.copy_(data[:, _SCALE : _SCALE + self.width].view(torch.int8))
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
