"""Sparse products that read packed rows: A X where X is codes of 0 to 8 bits with a scale for each row.

What is read of X is a fraction of fp32's bytes; rows are unpacked in a cache line's reach and added in the same pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from espalier.kernels.base import operation
from espalier.kernels.row_bits import pack_rows, row_offsets, unpack_rows

if TYPE_CHECKING:
    from jaxtyping import Float32, Int64, Integer, UInt8


class PackedMatrix(NamedTuple):
    """Rows of codes, packed one after the other (`kernels.row_bits`).

    Attributes:
        packed: uint8 [bytes]; offsets: int64 [rows + 1]; widths: uint8 [rows].
        scales: float32 [rows], what a row's codes are multiplied by; columns: codes of a row; signed: two's complement.
        same: the width that all rows have (0: see `widths`); whole: whether all scales are 1.
    """

    packed: UInt8[Tensor, " bytes"]
    offsets: Int64[Tensor, " rows+1"]
    widths: UInt8[Tensor, " rows"]
    scales: Float32[Tensor, " rows"]
    columns: int
    signed: bool
    same: int = 0
    whole: bool = False

    @classmethod
    def of(cls, codes: Integer[Tensor, "rows columns"], widths: Tensor, scales: Tensor) -> PackedMatrix:
        """Codes int8 (signed) or uint8 that fit `widths`."""
        columns = codes.shape[1]
        packed = pack_rows(codes, widths)
        offsets = row_offsets(columns, widths)
        low, high = (int(width) for width in widths.aminmax()) if len(widths) else (0, 0)
        scales, same, whole = scales.float().contiguous(), high if low == high else 0, bool((scales == 1).all())
        return cls(packed, offsets, widths, scales, columns, codes.dtype == torch.int8, same, whole)

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.packed.device

    def dense(self) -> Float32[Tensor, "rows columns"]:
        """codes * scales."""
        return unpack_rows(self.packed, self.widths, self.columns, self.signed) * self.scales[:, None]


@operation("packed_matmul")
def packed_matmul(
    matrix: PackedMatrix, indptr: Tensor, indices: Tensor, weights: Tensor | None = None
) -> Float32[Tensor, "targets columns"]:
    """The sums of rows `indices[indptr[t]:indptr[t + 1]]` of `matrix` for each target, times `weights` (None: 1).

    With scales of 1 and no weights it adds integers, exactly up to 2^24.
    """
    targets = len(indptr) - 1
    rows = matrix.dense()[indices.long()]
    rows = rows if weights is None else rows * weights.float()[:, None]
    of = torch.repeat_interleave(torch.arange(targets), indptr.diff(), output_size=len(indices))
    return torch.zeros(targets, matrix.columns).index_add(0, of, rows)


@packed_matmul.fast("cpu")
def packed_matmul_cpu(
    matrix: PackedMatrix, indptr: Tensor, indices: Tensor, weights: Tensor | None = None
) -> Float32[Tensor, "targets columns"]:
    """numba."""
    from espalier.mechanisms.few_bits import packed_spmm_cpu

    out = torch.empty(len(indptr) - 1, matrix.columns)
    edge = torch.zeros(0) if weights is None else weights.float().contiguous()
    ends = indptr.long().contiguous(), indices.int().contiguous(), edge
    scales = matrix.scales[:0] if matrix.whole else matrix.scales
    given = [tensor.numpy() for tensor in (*ends, matrix.offsets, matrix.widths, scales)]
    options = int(matrix.signed), matrix.same
    packed_spmm_cpu.aggregate(matrix.packed.contiguous(), tuple(given[:3]), tuple(given[3:]), options, out)
    return out
