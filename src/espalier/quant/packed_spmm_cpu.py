"""Sparse products that read packed rows on the CPU, in numba: see packed_spmm.py.

Sixteen codes of b bits are 2 b bytes: two words, shifted in the lanes of a vector, widened to float32 and added to the
target's row, which stays in the first cache. Rows of the edges that come next are asked for while one is added.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from espalier.kernels import row_bits_cpu, simd
from espalier.kernels.numba_compile import emitted, jit, njit
from espalier.kernels.row_bits_cpu import unpack_row
from espalier.kernels.simd import LANES, address, floats, load, plus, spread, store, times

_EDGES = "Tuple((int64[::1], int32[::1], float32[::1]))"
_ROWS = "Tuple((int64[::1], uint8[::1], float32[::1]))"
AHEAD = 16
"""Edges between asking for a row and adding it; its place is asked for twice as early."""
_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_WIDE, _NARROW = ir.VectorType(_INT64, LANES), ir.VectorType(_INT32, LANES)


def _splat(builder: Any, scalar: Any, kind: Any) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(_NARROW, [0] * LANES))


@emitted(floats)
def codes(builder: Any, place: Any, bits: Any, signed: Any) -> Any:
    """Sixteen codes of `bits` bits (int64, 1 to 8) from an address on; reads 8 + `bits` bytes."""
    pair = ir.Constant(_WIDE, ir.Undefined)
    for k, at in enumerate((place, builder.add(place, bits))):
        word = builder.load(builder.inttoptr(at, _INT64.as_pointer()), align=1)
        pair = builder.insert_element(pair, word, ir.Constant(_INT32, k))
    lanes = ir.Constant(_NARROW, [0] * 8 + [1] * 8)
    words = builder.shuffle_vector(pair, ir.Constant(_WIDE, ir.Undefined), lanes)
    shifts = builder.mul(ir.Constant(_WIDE, [*range(8), *range(8)]), _splat(builder, bits, _WIDE))
    low = builder.trunc(builder.lshr(words, shifts), _NARROW)
    above = _splat(builder, builder.trunc(builder.sub(ir.Constant(_INT64, 32), bits), _INT32), _NARROW)
    high = builder.shl(low, above)
    is_signed = builder.icmp_signed("!=", signed, ir.Constant(_INT64, 0))
    found = builder.select(is_signed, builder.ashr(high, above), builder.lshr(high, above))
    return builder.sitofp(found, ir.VectorType(ir.FloatType(), LANES))


@emitted(types.void)
def ask(builder: Any, place: Any) -> None:
    """Has the cache line of an address fetched, to be read."""
    pointer = builder.inttoptr(place, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT32, _INT32, _INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, *(ir.Constant(_INT32, value) for value in (0, 3, 1))])


@njit
def _add_row(span: Any, kind: Any, scale: Any, columns: int, to: int, spare: Any) -> None:
    """Adds `scale` times a row to float32 at the address `to`, whose number is a multiple of 16. `span`: addresses of
    the row and of the end of all; `kind`: bits of a code, and whether they are signed."""
    place, end = span
    bits, signed = kind
    taken = (columns + LANES - 1) // LANES
    if place + 2 * bits * taken + 8 <= end:
        factor = spread(np.float32(scale))
        for k in range(taken):
            at = to + 4 * LANES * k
            store(at, plus(load(at), times(factor, codes(place + 2 * bits * k, bits, signed))))
        return
    sign = np.uint64(1) << np.uint64(bits - 1) if signed else np.uint64(0)
    unpack_row(place, end, bits, sign, columns, address(spare))
    whole = spare.view(np.int8)
    for column in range(columns):
        value = np.float32(whole[column]) if signed else np.float32(spare[column])
        at = to + 4 * column
        simd.store_one(at, simd.load_one(at) + np.float32(scale) * value)


@njit
def _ask_ahead(indices: Any, edge: int, rows: Any, base: int, size: int) -> None:
    """Asks for the row of an edge that comes soon, and for the place of a later one's. `size`: bytes of each row; 0:
    see `rows`."""
    offsets, widths, scales = rows
    last = indices.size - 1
    soon = np.int64(indices[min(edge + AHEAD, last)])
    if size:
        ask(base + size * soon)
        ask(base + size * soon + size - 1)
    else:
        later = np.int64(indices[min(edge + 2 * AHEAD, last)])
        ask(address(offsets) + 8 * later)
        ask(address(widths) + later)
        ask(base + offsets[soon])
        ask(base + offsets[soon + 1] - 1)
    if scales.size:
        ask(address(scales) + 4 * soon)


@njit
def _copy(line: Any, to: int, columns: int) -> None:
    """The first `columns` values of a line to the address `to`."""
    for k in range(columns // LANES):
        store(to + 4 * LANES * k, load(address(line) + 4 * LANES * k))
    for column in range(columns // LANES * LANES, columns):
        simd.store_one(to + 4 * column, line[column])


@jit(
    f"(uint8[::1], {_EDGES}, {_ROWS}, UniTuple(int64, 2), float32[:, ::1])",
    parallel=True,
    uses=(simd, row_bits_cpu),
)
def aggregate(packed: Any, edges: Any, rows: Any, options: Any, out: Any) -> None:
    """Fills `out`. `edges`: where targets begin, sources, weights (empty: 1); `rows`: offsets, widths, scales (empty:
    1); `options`: signed, and the width that all rows have (0: see `rows`), for which nothing else is looked up."""
    indptr, indices, weights = edges
    offsets, widths, scales = rows
    signed, same = options
    targets, columns = out.shape
    pieces = min(256, max(1, targets // 64))
    base, end = address(packed), address(packed) + packed.size
    size = (columns * same + 7) // 8
    for piece in numba.prange(pieces):
        line = np.empty((columns + LANES - 1) // LANES * LANES, np.float32)
        spare = np.empty(columns + 8, np.uint8)
        for target in range(piece * targets // pieces, (piece + 1) * targets // pieces):
            line[:] = 0
            for edge in range(indptr[target], indptr[target + 1]):
                _ask_ahead(indices, edge, rows, base, size)
                source = np.int64(indices[edge])
                bits = same if same else np.int64(widths[source])
                place = base + (size * source if same else offsets[source])
                scale = scales[source] if scales.size else np.float32(1)
                if bits:
                    factor = scale * weights[edge] if weights.size else scale
                    _add_row((place, end), (bits, signed), factor, columns, address(line), spare)
            _copy(line, address(out) + 4 * columns * target, columns)
