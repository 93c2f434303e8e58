"""SpMM kernels: sums of rows of a dense matrix, for CSR and CBM; transpose by counting.

A row of the result is summed in vector registers, up to 8 vectors of 64 bytes at a time, by LLVM code written here:
numba's own loops would write the sum back to memory after every addition. The order of additions is that of the list,
whatever the width and the number of threads.
"""

# ruff: noqa: PLR0913, PLR0917  (kernels take their arrays one by one)

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
from numba.core import cgutils, types

from espalier.kernels import simd64
from espalier.kernels.numba_compile import intrinsic, jit, njit
from espalier.kernels.simd64 import INT64, VECTOR, Vectors

SIZES = (8, 4, 2, 1)
"""Vectors summed at once: 8 hide the latency of additions; 16 were a tenth slower at 500 columns."""


def _row(weighted: str) -> Any:
    """The intrinsic y[row] = (above[parent], nothing if -1) + x[plus[first:last]] - x[minus[start:end]], tile by tile.

    `weighted`: "" not at all, "entry" by `weights[entry]`, "column" by `weights[ids[entry]]`. All of it is one piece of
    LLVM code: a function called with arrays would count their references, which costs more than a short row's sum.
    """

    @intrinsic
    def row(typing, y, row, above, parent, x, plus, first, last, minus, start, end, weights, tiles):  # type: ignore[no-untyped-def]
        signature = types.void(y, row, above, parent, x, plus, first, last, minus, start, end, weights, tiles)

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            def data(at: int) -> Any:
                return context.make_array(signature.args[at])(context, builder, given[at])

            ids = ((data(5).data, given[6], given[7], "+"), (data(8).data, given[9], given[10], "-"))
            factors = data(11).data
            table = data(12)

            def weight(entry: Any, column: Any) -> Any:
                return builder.load(builder.gep(factors, [entry if weighted == "entry" else column]))

            def tile(count: int, masked: bool, column: Any, live: Any) -> None:
                lanes = Vectors(context, builder, x.dtype, count)
                mask = lanes.mask(live) if masked else None
                out = lanes.base(y, given[0], column)
                source = lanes.base(x, given[4], column)
                begin = lanes.row(lanes.base(above, given[2], column), given[3])
                lanes.begin(begin, builder.icmp_signed(">=", given[3], INT64(0)), mask)
                for entries in ids:
                    lanes.add(entries, source, weight if weighted else None, mask)
                lanes.end(lanes.row(out, given[1]), mask)

            count = cgutils.unpack_tuple(builder, table.shape)[0]
            with cgutils.for_range(builder, count, intp=INT64) as loop:
                place = builder.mul(loop.index, INT64(3))
                column, vectors, live = (
                    builder.load(builder.gep(table.data, [builder.add(place, INT64(k))])) for k in range(3)
                )
                for size in (*SIZES, 0):
                    with builder.if_then(builder.icmp_signed("==", vectors, INT64(size))):
                        tile(size or 1, size == 0, column, live)
            return context.get_dummy_value()

        return signature, generate

    return row


_ROW, _ROW_BY_ENTRY, _ROW_BY_COLUMN = _row(""), _row("entry"), _row("column")


@functools.lru_cache(maxsize=256)
def tiles(width: int, element_bytes: int) -> Any:
    """How a row of `width` values is covered: int64 [tiles, 3] of first column, vectors, and live lanes.

    The last tile ends with the row and may overlap the one before, which does no harm: it writes the same values. Only
    a row shorter than a vector is masked (0 vectors, then its live lanes).
    """
    lanes = VECTOR // element_bytes
    if width < lanes:
        return np.array([[0, 0, width]], dtype=np.int64)
    spans = []
    column = 0
    while column < width:
        left = width - column
        closing = [size for size in SIZES if size * lanes >= left and size * lanes <= width]
        size = min(closing) if closing else max(size for size in SIZES if size * lanes <= left)
        column = min(column, width - size * lanes)
        spans.append([column, size, 0])
        column += size * lanes
    return np.array(spans, dtype=np.int64)


@jit(
    "(real[:, ::1], int64[::1], int32[::1], real[::1], real[:, ::1], real[:, ::1], int64, int64[::1], int64[:, ::1])",
    parallel=True,
    uses=(simd64,),
)
def add_rows(y, indptr, indices, values, x, start, step, cuts, tiles):  # type: ignore[no-untyped-def]
    """y = A·x, row i added to start[i · step] where step is not negative; empty `values` stand for a binary A.

    Rows `cuts[p]` to `cuts[p + 1]` are one piece of work.
    """
    zero = np.int64(0)
    for piece in numba.prange(len(cuts) - 1):
        for i in range(cuts[piece], cuts[piece + 1]):
            above = step if step < 0 else i * step
            first = indptr[i]
            last = indptr[i + 1]
            if len(values):
                _ROW_BY_ENTRY(y, i, start, above, x, indices, first, last, indices, zero, zero, values, tiles)
            else:
                _ROW(y, i, start, above, x, indices, first, last, indices, zero, zero, indices, tiles)


@njit
def _scale_rows(y, order, left, first, end):  # type: ignore[no-untyped-def]
    """Rows order[first:end] of y times their factor in `left`."""
    for p in range(first, end):
        factor = left[order[p]]
        for f in range(y.shape[1]):
            y[order[p], f] *= factor


@jit(
    "(real[:, ::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], real[::1],"
    " real[::1], real[:, ::1], int64[::1], int64[:, ::1])",
    parallel=True,
    uses=(simd64,),
)
def add_differences(  # type: ignore[no-untyped-def]
    y, order, parent, plus_ptr, plus, minus_ptr, minus, left, right, x, cuts, tiles
):
    """y = diag(left)·A·diag(right)·x for a binary A kept as differences (CBM); empty factors stand for ones.

    Row order[p] is y[parent[p]] (nothing if -1) plus the rows of x in its list `plus`, less those in `minus`. Places
    `cuts[p]` to `cuts[p + 1]` are whole branches of the tree; `left` is applied once a piece is done.
    """
    for piece in numba.prange(len(cuts) - 1):
        for p in range(cuts[piece], cuts[piece + 1]):
            row = np.int64(order[p])
            above = np.int64(parent[p])
            first = np.int64(plus_ptr[p])
            last = np.int64(plus_ptr[p + 1])
            start = np.int64(minus_ptr[p])
            end = np.int64(minus_ptr[p + 1])
            if len(right):
                _ROW_BY_COLUMN(y, row, y, above, x, plus, first, last, minus, start, end, right, tiles)
            else:
                _ROW(y, row, y, above, x, plus, first, last, minus, start, end, left, tiles)
        if len(left):
            _scale_rows(y, order, left, cuts[piece], cuts[piece + 1])


@jit("(int64[::1], int32[::1], int64[::1], int32[::1], int64[::1])")
def turn(indptr: Any, indices: Any, free: Any, rows: Any, order: Any) -> Any:
    """The row of each entry, and where it stood, column by column; in a column in the order they stood in.

    `free` [columns]: the offset of each column, which ends as that of the next; `rows`, `order` [entries] are filled.
    """
    for row in range(len(indptr) - 1):
        for entry in range(indptr[row], indptr[row + 1]):
            column = indices[entry]
            at = free[column]
            free[column] = at + 1
            rows[at] = row
            order[at] = entry
