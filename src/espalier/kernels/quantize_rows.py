"""Rows of float32 to codes of 1 to 8 bits between the row's own smallest and largest value, rounded at random.

A row on the wire is Z and S, both bfloat16, then its codes as `row_bits` packs them: 4 + ceil(columns * bits / 8)
bytes. Z is the row's minimum rounded down, S is (maximum - Z) / (2^bits - 1) rounded up; a value h becomes
floor((h - Z) / S + u), u uniform in [0, 1), and comes back as Z + code * S. As codes are made with the rounded Z and S,
the mean of what comes back is h (the low-bit module of Sylvie, arXiv 2303.01277, whose codes are made with the exact
scale and sent with a rounded one). u depends on a key, the row's number and the column alone.

With subtractive dither (Schuchman, IEEE Trans. Communication Technology 12, 1964) the receiver, who has the key, takes
u off again: a value comes back as Z + (code + 1/2 - u) S. What is lost is then uniform over one S, whatever the value:
the mean is h as before, and the variance S^2 / 12; where u stays it is r (S - r), r = (h - Z) mod S, up to S^2 / 4.

The nearest form is for differences whose error is sent later: S is (maximum - Z) / 2^bits, and a value comes back as
the middle of its interval, Z + (code + 1/2) S. What is lost of a row then spans 2^bits times less than the row, also
with one bit, where rounding at random between smallest and largest can double it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from espalier.kernels import row_bits
from espalier.kernels.base import operation

if TYPE_CHECKING:
    from jaxtyping import Float32, Int64, UInt8

SCALES = 4
"""Bytes of Z and S."""
TINY = 2.0**-118
"""A row whose S is smaller comes back as Z: one over it would not be finite."""
_SOME = 1 << 15
"""Values from which waking other threads pays."""


def wire_bytes(columns: int, widths: Any) -> Any:
    """Bytes of a row on the wire (NumPy arrays and tensors allowed)."""
    return SCALES + row_bits.row_bytes(columns, widths)


@operation("quantize_rows")
def quantize_rows(
    rows: Float32[Tensor, "all columns"],
    chosen: Int64[Tensor, " rows"],
    widths: UInt8[Tensor, " rows"],
    places: tuple[Int64[Tensor, " rows"], UInt8[Tensor, " bytes"]],
    key: int | None,
) -> int:
    """Writes the rows `chosen` of `rows` into a buffer.

    Args:
        widths: bits of each, 1 to 8.
        places: where each begins in the buffer, and the buffer.
        key: of the random numbers, 0 to 2^32 - 1; None: the nearest form.

    Returns:
        The first of `chosen` whose values are not all finite, or span more than a float32; or -1. What is after it may
        not be written.
    """
    begins, wire = places
    taken = rows[chosen]
    if not len(chosen):
        return -1
    if not rows.shape[1]:
        taken = taken.new_zeros(len(chosen), 1)
    low, levels = _down(taken.amin(1)), ((1 << widths.int()) - 1).float()
    scale = _up((taken.amax(1) - low) / (levels + (key is None)))
    bad = (~taken.isfinite().all(1) | ~scale.isfinite()).nonzero()
    if len(bad):
        return int(bad[0])
    scale[scale < TINY] = 0
    inverse = torch.where(scale > 0, 1 / scale, 0)
    noise = 0.0 if key is None else torch.from_numpy(_noise(key, len(chosen), taken.shape[1]))
    codes = torch.floor((taken - low[:, None]) * inverse[:, None] + noise)
    codes = torch.minimum(codes, levels[:, None]).to(torch.uint8)
    scales = torch.stack([low + 0.5 * scale if key is None else low, scale], 1).to(torch.bfloat16).view(torch.uint8)
    for at, width in enumerate(widths.tolist()):
        begin, size = int(begins[at]), int(row_bits.row_bytes(rows.shape[1], width))
        wire[begin : begin + SCALES] = scales[at]
        packed = row_bits.pack_rows.reference.run(codes[at : at + 1, : rows.shape[1]], widths[at : at + 1])
        wire[begin + SCALES : begin + SCALES + size] = packed
    return -1


@operation("restore_rows")
def restore_rows(
    wire: UInt8[Tensor, " bytes"],
    begins: Int64[Tensor, " rows"],
    widths: UInt8[Tensor, " rows"],
    out: Float32[Tensor, "rows columns"],
    key: int | None = None,
) -> None:
    """Fills `out` with what `quantize_rows` wrote at `begins`. `key`: with which it wrote just these rows, whose dither
    is taken off; None: it stays."""
    noise = None if key is None else torch.from_numpy(_noise(key, *out.shape))
    for at, width in enumerate(widths.tolist()):
        begin = int(begins[at])
        low, scale = wire[begin : begin + SCALES].clone().view(torch.bfloat16).float()
        begin += SCALES
        packed = wire[begin : begin + int(row_bits.row_bytes(out.shape[1], width))]
        codes = row_bits.unpack_rows.reference.run(packed, widths[at : at + 1], out.shape[1])[0]
        out[at] = low + (codes.float() if noise is None else codes.float() + (0.5 - noise[at])) * scale


def _down(values: Tensor) -> Tensor:
    """The largest bfloat16 that is not above, as float32."""
    bits = values.view(torch.int32)
    cut = bits & ~0xFFFF
    return torch.where((bits < 0) & (bits != cut), cut + 0x10000, cut).view(torch.float32)


def _up(values: Tensor) -> Tensor:
    """The smallest bfloat16 that is not below, as float32; of values of at least 0."""
    return ((values.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def _noise(key: int, rows: int, columns: int) -> np.ndarray:
    """float32 [rows, columns] in [0, 1): a 32-bit mix (lowbias32, Wellons 2018) of the key, the row and the column."""
    with np.errstate(over="ignore"):
        row = _mixed(np.arange(rows, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(key))
        at = np.arange(columns, dtype=np.uint32) * np.uint32(0x85EBCA6B)
        return (_mixed(row[:, None] + at[None]) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def _mixed(h: np.ndarray) -> np.ndarray:
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    return np.asarray(h ^ (h >> np.uint32(16)))


@quantize_rows.fast("cpu")
def quantize_by_words(
    rows: Tensor, chosen: Tensor, widths: Tensor, places: tuple[Tensor, Tensor], key: int | None
) -> int:
    """numba."""
    from espalier.kernels import quantize_rows_cpu

    begins, wire = places
    pieces = _pieces(len(chosen) * rows.shape[1])
    count = quantize_rows_cpu.quantize(
        rows.contiguous(), chosen, widths, begins, wire, (key or 0, pieces, int(key is None))
    )
    return int(count)


@restore_rows.fast("cpu")
def restore_by_words(wire: Tensor, begins: Tensor, widths: Tensor, out: Tensor, key: int | None = None) -> None:
    """numba."""
    from espalier.kernels import quantize_rows_cpu

    options = (key or 0, _pieces(out.numel()), int(key is not None))
    quantize_rows_cpu.restore(wire, begins, widths, out, options)


def _pieces(values: int) -> int:
    return 1 if values < _SOME else 64
