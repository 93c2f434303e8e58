"""Rows that cross between ranks as integer codes: what `[quant]` has rounded takes its own bits on the wire.

Rows are codes times steps. Messages (rows that were multiplied and are about to be summed) have a step for each column:
their codes are packed in the bits of a message, and behind the rows for a peer its message has the steps, a byte each.
Rows that a layer sums as it reads them have a step each, which follows the row, and codes of 8 bits, or of the width
that all have. What arrives is multiplied as it was where it came from: the same bits. Gradients cross as the transport
has them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from espalier.kernels.row_bits import pack_rows, row_bytes, unpack_rows, widths_of
from espalier.kernels.step_codes import STEPS


class RowSize(NamedTuple):
    """Bytes of a row on the wire, and how many such rows behind those for each peer have the steps of columns."""

    bytes: int
    steps: int = 0


def row_size(columns: int, bits: int, plain_bytes: int = 0, *, by_row: bool = False) -> RowSize:
    """Of rows of `columns` codes of `bits` bits and `plain_bytes` of values without codes; `by_row`: see `Coding`."""
    packed = int(row_bytes(columns, bits))
    if by_row:
        return RowSize(packed + 1 + plain_bytes)
    return RowSize(packed + plain_bytes, -(-columns // (packed + plain_bytes)))


class Coding(NamedTuple):
    """How floating-point rows [owned, columns] are codes times steps.

    Attributes:
        bits: of a code, 1 to 8; signed: whether codes have a sign.
        steps: uint8, places in `kernels.step_codes.STEPS`: of the first columns of a row (others
        cross as they are); or,
            `by_row`, of own rows [owned].
        gain: what steps are multiplied by, as `kind`; rounded: dtype of codes times steps (None: that of the rows).
    """

    bits: int
    steps: Tensor
    by_row: bool = False
    signed: bool = True
    gain: float = 1.0
    kind: torch.dtype = torch.float32
    rounded: torch.dtype | None = None

    def unit(self, steps: Tensor) -> Tensor:
        """Steps as numbers."""
        step_sizes = STEPS.to(steps.device, self.kind)[steps.long()]
        return step_sizes if self.gain == 1 else step_sizes * self.gain

    def columns(self, width: int) -> int:
        """How many columns of rows of `width` have codes."""
        return width if self.by_row else len(self.steps)

    def size(self, width: int, value: int) -> RowSize:
        """Of rows of `width` values of `value` bytes."""
        columns = self.columns(width)
        return row_size(columns, self.bits, (width - columns) * value, by_row=self.by_row)

    def encoded(self, rows: Tensor, steps: Tensor) -> Tensor:
        """uint8 [rows, bytes] of `rows`, of which `steps` [rows] are the steps where each has its own."""
        columns = self.columns(rows.shape[1])
        wide = torch.promote_types(rows.dtype, torch.float32)
        unit = self.unit(steps)[:, None] if self.by_row else self.unit(self.steps)
        whole = (rows[:, :columns].to(wide) / unit.to(self.rounded or rows.dtype).to(wide)).round()
        codes = whole.to(torch.int8 if self.signed else torch.uint8).cpu()
        packed = pack_rows(codes, widths_of(len(codes), self.bits)).view(len(rows), -1 if len(rows) else 0)
        parts = [packed.to(rows.device), steps[:, None]] if self.by_row else [packed.to(rows.device)]
        if columns < rows.shape[1]:
            parts.append(rows[:, columns:].contiguous().view(torch.uint8))
        return torch.cat(parts, 1)

    def decode(self, lines: Tensor, steps: Tensor, out: Tensor) -> None:
        """`encoded` into `out`; `steps` of columns, where rows have none of their own."""
        columns = self.columns(out.shape[1])
        packed = int(row_bytes(columns, self.bits))
        widths = widths_of(len(lines), self.bits)
        codes = unpack_rows(lines[:, :packed].flatten().cpu(), widths, columns, self.signed).to(out.device)
        unit = self.unit(lines[:, packed])[:, None] if self.by_row else self.unit(steps)
        kind = self.rounded or out.dtype
        out[:, :columns] = codes.to(kind) * unit.to(kind)
        if columns < out.shape[1]:
            out[:, columns:] = lines[:, packed:].contiguous().view(out.dtype)
