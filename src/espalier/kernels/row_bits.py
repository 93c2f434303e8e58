"""Rows of integer codes of 0 to 8 bits, one width for each row or one for all, packed to bytes and back.

A row of n codes of b bits fills ceil(n * b / 8) bytes: code j is at the bits from j * b on, the lowest bit first, and
the last byte is filled up with zeros. A row of width 0 is all zeros and takes no bytes. Rows follow one another without
gaps; `row_offsets` says where each begins. `bits.py` packs float32 with a scale for each block of 256 in one pass, for
messages; its codes are dealt out in strides, so its wire format is its own. The fast forms are in row_bits_cpu.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from espalier.kernels.base import operation
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Int64, Integer, UInt8

MOST = 8
"""Bits of a code at most."""
_SOME = 1 << 14
"""Codes from which waking other threads pays."""


def row_bytes(columns: int, widths: Any) -> Any:
    """Bytes of a row of `columns` codes of `widths` bits (NumPy arrays and tensors allowed)."""
    return (widths * columns + 7) // 8


def row_offsets(columns: int, widths: UInt8[Tensor, " rows"]) -> Int64[Tensor, " rows+1"]:
    """The byte at which each row begins, and where the last one ends."""
    offsets = torch.zeros(len(widths) + 1, dtype=torch.int64)
    torch.cumsum(row_bytes(columns, widths.to(torch.int64)), 0, out=offsets[1:])
    return offsets


def widths_of(rows: int, widths: Any) -> UInt8[Tensor, " rows"]:
    """One width for each row, checked.

    Args:
        rows: how many rows.
        widths: an int for all, or integers [rows].
    Raises UserError: a width outside 0 to 8, or not one for each row.
    """
    given = torch.as_tensor(widths)
    if (given.is_floating_point() and given.numel()) or given.shape not in ((), (rows,)):
        raise UserError(
            f"{rows} rows got widths of shape {tuple(given.shape)} and {given.dtype}.", do="one integer, or one a row"
        )
    bad = torch.nonzero(((given < 0) | (given > MOST)).reshape(-1))
    if len(bad):
        at = int(bad[0])
        raise UserError(f"Row {at} has {int(given.reshape(-1)[at])} bits.", do=f"give it 0 to {MOST}")
    return given.to(torch.uint8).expand(rows).contiguous()


@operation("pack_rows")
def pack_rows(codes: Integer[Tensor, "rows columns"], widths: UInt8[Tensor, " rows"]) -> UInt8[Tensor, " bytes"]:
    """The rows' codes as bytes.

    Args:
        codes: uint8, each below 2^width; or int8, each from -2^(width-1) to 2^(width-1) - 1 (two's complement).
        widths: bits of a code in each row (`widths_of` checks them).
    Raises UserError: a code that its row's width cannot hold.
    """
    offsets = row_offsets(codes.shape[1], widths)
    packed = torch.zeros(int(offsets[-1]), dtype=torch.uint8)
    wide = codes.to(torch.int64)
    for width in widths.unique().tolist():
        rows = torch.nonzero(widths == width)[:, 0]
        signed = codes.dtype == torch.int8 and width
        low, high = (-(1 << width >> 1), 1 << width >> 1) if signed else (0, 1 << width)
        bad = torch.nonzero(((wide[rows] < low) | (wide[rows] >= high)).any(1))
        if len(bad):
            raise _too_large(codes, widths, int(rows[bad[0, 0]]))
        if width:
            bits = (wide[rows][:, :, None] >> torch.arange(width)) & 1
            lines = np.packbits(bits.flatten(1).numpy().astype(np.uint8), axis=1, bitorder="little")
            packed[offsets[rows][:, None] + torch.arange(lines.shape[1])] = torch.from_numpy(lines)
    return packed


@operation("unpack_rows")
def unpack_rows(
    packed: UInt8[Tensor, " bytes"], widths: UInt8[Tensor, " rows"], columns: int, signed: bool = False
) -> Integer[Tensor, "rows columns"]:
    """The codes that `pack_rows` was given: uint8, or int8 if `signed`.

    Raises UserError: `packed` is not as long as the rows are.
    """
    offsets = _checked(packed, widths, columns)
    codes = torch.zeros(len(widths), columns, dtype=torch.int64)
    for width in [width for width in widths.unique().tolist() if width]:
        rows = torch.nonzero(widths == width)[:, 0]
        lines = packed[offsets[rows][:, None] + torch.arange(row_bytes(columns, width))]
        bits = np.unpackbits(lines.numpy(), axis=1, bitorder="little", count=columns * width)
        fields = (torch.from_numpy(bits).view(len(rows), columns, width).long() << torch.arange(width)).sum(2)
        codes[rows] = (fields ^ (1 << width >> 1)) - (1 << width >> 1) if signed else fields
    return codes.to(torch.int8 if signed else torch.uint8)


def _too_large(codes: Tensor, widths: Tensor, row: int) -> UserError:
    low, high = int(codes[row].min()), int(codes[row].max())
    return UserError(
        f"Row {row} holds codes from {low} to {high}, which {int(widths[row])} bits of {codes.dtype} cannot hold."
    )


def _checked(packed: Tensor, widths: Tensor, columns: int) -> Tensor:
    offsets = row_offsets(columns, widths)
    if len(packed) != int(offsets[-1]):
        whole = int(torch.searchsorted(offsets, len(packed), right=True)) - 1
        raise UserError(
            f"{len(widths)} rows of {columns} codes take {int(offsets[-1]):,} bytes, and {len(packed):,} are there.",
            why=f"they end in row {whole}" if whole < len(widths) else "bytes follow the last row",
        )
    return offsets


@pack_rows.fast("cpu", wins=lambda codes, widths: codes.dtype in (torch.uint8, torch.int8))
def pack_by_words(codes: Tensor, widths: Tensor) -> Tensor:
    """numba: eight codes of b bits are b bytes, joined in one 64-bit word."""
    from espalier.kernels import row_bits_cpu

    offsets = row_offsets(codes.shape[1], widths)
    packed = torch.empty(int(offsets[-1]), dtype=torch.uint8)
    signed = codes.dtype == torch.int8
    pieces = _pieces(codes.numel())
    bad = row_bits_cpu.pack(codes.contiguous().view(torch.uint8), widths, offsets, packed, (int(signed), pieces))
    if bad >= 0:
        raise _too_large(codes, widths, bad)
    return packed


@unpack_rows.fast("cpu")
def unpack_by_words(packed: Tensor, widths: Tensor, columns: int, signed: bool = False) -> Tensor:
    """numba."""
    from espalier.kernels import row_bits_cpu

    offsets = _checked(packed, widths, columns)
    codes = torch.empty(len(widths), columns, dtype=torch.uint8)
    row_bits_cpu.unpack(packed.contiguous(), widths, offsets, codes, (int(signed), _pieces(codes.numel())))
    return codes.view(torch.int8) if signed else codes


def _pieces(codes: int) -> int:
    return 1 if codes < _SOME else 64
