"""Sparse products that read packed rows on the CPU, in numba: see packed_spmm.py."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from espalier.kernels import row_bits_cpu, simd
from espalier.kernels.numba_compile import jit
from espalier.kernels.row_bits_cpu import unpack_row
from espalier.kernels.simd import address

_EDGES = "Tuple((int64[::1], int32[::1], float32[::1]))"
_ROWS = "Tuple((int64[::1], uint8[::1], float32[::1]))"


@jit(
    f"(uint8[::1], {_EDGES}, {_ROWS}, int64, float32[:, ::1])",
    parallel=True,
    uses=(simd, row_bits_cpu),
)
def aggregate(packed: Any, edges: Any, rows: Any, signed: Any, out: Any) -> None:
    """Fills `out`. `edges`: where targets begin, sources, weights (empty: 1); `rows`: offsets, widths, scales."""
    indptr, indices, weights = edges
    offsets, widths, scales = rows
    targets, columns = out.shape
    pieces = min(256, max(1, targets // 64))
    end = address(packed) + packed.size
    for piece in numba.prange(pieces):
        buffer = np.empty(columns + 8, np.int8)
        codes = buffer.view(np.uint8)
        base, to = address(packed), address(codes)
        for target in range(piece * targets // pieces, (piece + 1) * targets // pieces):
            line = out[target]
            line[:] = 0
            for edge in range(indptr[target], indptr[target + 1]):
                source = indices[edge]
                bits = np.int64(widths[source])
                if bits == 0:
                    continue
                sign = np.uint64(1) << np.uint64(bits - 1) if signed else np.uint64(0)
                unpack_row(base + offsets[source], end, bits, sign, columns, to)
                scale = scales[source] * weights[edge] if weights.size else scales[source]
                if signed:
                    for column in range(columns):
                        line[column] += scale * np.float32(buffer[column])
                else:
                    for column in range(columns):
                        line[column] += scale * np.float32(codes[column])
