"""Tall-matmul kernels: products of a tall matrix with a small one, and the gradient of the small one.

Blocks of six rows are summed in registers while a row of the small matrix, which lies in first-level cache, is read
once for all six. The general product of torch's library took two to three times as long at 64 columns. Sums go in the
order of the columns, gradients in a fixed number of pieces: the same for every number of threads.
"""

# ruff: noqa: PLR0913, PLR0917  (kernels take their arrays one by one)

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
from numba.core import cgutils, types

from espalier.kernels import simd64
from espalier.kernels.numba_compile import intrinsic, jit
from espalier.kernels.simd64 import INT64, VECTOR, Vectors

HEIGHT = 6
"""Rows of a block: with 4 vectors each, 24 of AVX-512's 32 registers."""
SIZES = (4, 2, 1)
CHUNK = 96
"""Rows whose values stay in first-level cache while a gradient is summed over them; a multiple of HEIGHT."""
PIECES = 16
"""Pieces of rows whose gradients are added up; enough for 16 threads."""


def column_sums(x: Any) -> Any:
    """Of a tall NumPy array, in pieces that are added up in their order."""
    pieces = np.empty((PIECES, x.shape[1]), x.dtype)
    sum_columns(pieces, x, tiles(x.shape[1], x.itemsize))
    return pieces.sum(0)


def _block(height: int) -> Any:
    """The intrinsic y[row + r] = start[(row + r) * step] (zeros where step < 0) + Σ_k x[at + r down + k along] w[k]."""

    @intrinsic
    def block(typing, y, row, start, step, x, at, down, along, w, first, last, tiles):  # type: ignore[no-untyped-def]
        signature = types.void(y, row, start, step, x, at, down, along, w, first, last, tiles)

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            values = context.make_array(signature.args[4])(context, builder, given[4]).data
            table = context.make_array(signature.args[11])(context, builder, given[11])

            def tile(count: int, masked: bool, column: Any, live: Any) -> None:
                lines = [Vectors(context, builder, y.dtype, count) for _ in range(height)]
                mask = lines[0].mask(live) if masked else None
                out, begin, right = (
                    lines[0].base(kind, step, column)
                    for kind, step in ((y, given[0]), (start, given[2]), (w, given[8]))
                )
                for r, line in enumerate(lines):
                    place = builder.mul(builder.add(given[1], INT64(r)), given[3])
                    line.begin(line.row(begin, place), builder.icmp_signed(">=", given[3], INT64(0)), mask)
                with cgutils.for_range_slice(builder, given[9], given[10], INT64(1), INT64) as (k, _):
                    address = lines[0].row(right, k)
                    loaded = [lines[0].load(address, v, mask) for v in range(count)]
                    place = builder.add(given[5], builder.mul(k, given[7]))
                    for r, line in enumerate(lines):
                        there = builder.add(place, builder.mul(INT64(r), given[6]))
                        line.add_products(loaded, builder.load(builder.gep(values, [there])))
                for r, line in enumerate(lines):
                    line.end(line.row(out, builder.add(given[1], INT64(r))), mask)

            with cgutils.for_range(builder, cgutils.unpack_tuple(builder, table.shape)[0], intp=INT64) as loop:
                place = builder.mul(loop.index, INT64(3))
                column, size, live = (
                    builder.load(builder.gep(table.data, [builder.add(place, INT64(k))])) for k in range(3)
                )
                for rows in (*SIZES, 0):
                    with builder.if_then(builder.icmp_signed("==", size, INT64(rows))):
                        tile(rows or 1, rows == 0, column, live)
            return context.get_dummy_value()

        return signature, generate

    return block


_BLOCK, _ONE = _block(HEIGHT), _block(1)


@functools.lru_cache(maxsize=64)
def tiles(width: int, element_bytes: int) -> Any:
    """How a row of `width` values is covered without overlap: int64 [tiles, 3] of first column, vectors, live lanes."""
    lanes, spans, column = VECTOR // element_bytes, [], 0
    while width - column >= lanes:
        size = max(size for size in SIZES if size * lanes <= width - column)
        spans.append([column, size, 0])
        column += size * lanes
    return np.array([*spans, *([[column, 0, width - column]] if column < width else [])], np.int64).reshape(-1, 3)


@jit(
    "(real[:, ::1], real[:, ::1], real[:, ::1], real[:, ::1], int64, int64[:, ::1])",
    parallel=True,
    uses=(simd64,),
)
def multiply(y, x, w, start, step, tiles):  # type: ignore[no-untyped-def]
    """y = x·w, added to rows of `start`: to its first (step 0), to each its own (1), or to none (-1)."""
    rows, inputs = x.shape
    flat, zero, unit = x.reshape(-1), np.int64(0), np.int64(1)
    for piece in numba.prange((rows + CHUNK - 1) // CHUNK):
        at, end = piece * CHUNK, min(rows, piece * CHUNK + CHUNK)
        while at + HEIGHT <= end:
            _BLOCK(y, at, start, step, flat, at * inputs, inputs, unit, w, zero, inputs, tiles)
            at += HEIGHT
        while at < end:
            _ONE(y, at, start, step, flat, at * inputs, inputs, unit, w, zero, inputs, tiles)
            at += unit


@jit(
    "(real[:, :, ::1], real[:, ::1], real[:, ::1], real[:, ::1], int64[:, ::1])",
    parallel=True,
    uses=(simd64,),
)
def gradients(of_w, of_start, x, given, tiles):  # type: ignore[no-untyped-def]
    """From `given` [rows, outputs] the gradients of w and of a `start` for all rows, in len(of_w) pieces each."""
    pieces, rows, inputs = len(of_w), len(x), np.int64(x.shape[1])
    flat, zero, unit, ones = x.reshape(-1), np.int64(0), np.int64(1), np.ones(1, x.dtype)
    for piece in numba.prange(pieces):
        piece_gradient = of_w[piece]
        piece_gradient[:] = 0
        of_start[piece] = 0
        first, end = rows * piece // pieces, rows * (piece + 1) // pieces
        while first < end:
            last, k = min(end, first + CHUNK), zero
            while k + HEIGHT <= inputs:
                _BLOCK(piece_gradient, k, piece_gradient, unit, flat, k, unit, inputs, given, first, last, tiles)
                k += HEIGHT
            while k < inputs:
                _ONE(piece_gradient, k, piece_gradient, unit, flat, k, unit, inputs, given, first, last, tiles)
                k += unit
            _ONE(of_start, np.int64(piece), of_start, unit, ones, zero, zero, zero, given, first, last, tiles)
            first = last


@jit(
    "(real[:, ::1], real[:, ::1], int64[:, ::1])",
    parallel=True,
    uses=(simd64,),
)
def sum_columns(sums, x, tiles):  # type: ignore[no-untyped-def]
    """sums[piece] = the sum of the rows of that piece."""
    zero, unit, ones = np.int64(0), np.int64(1), np.ones(1, x.dtype)
    for piece in numba.prange(len(sums)):
        first, last = len(x) * piece // len(sums), len(x) * (piece + 1) // len(sums)
        _ONE(sums, np.int64(piece), sums, -unit, ones, zero, zero, zero, x, first, last, tiles)
