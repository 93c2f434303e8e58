"""Sparse products that read packed rows on the CPU, in numba: see packed_spmm.py.

32 codes of b bits are 4 b bytes. A shuffle gives each lane of 16 bits the bytes its code lies in, and two shifts leave
the code, by constants for each b. Sums without weights and scales are those of 16-bit integers, of as many rows as
cannot overflow; else codes are widened to float32 and multiplied. The sums of 128 columns stay in registers, and where
rows do not fit the second cache, those of the edges that come next are asked for while one is added.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import models, register_model

from espalier.kernels import simd
from espalier.kernels.numba_compile import emitted, fetch_line, in_all_lanes, jit, njit
from espalier.kernels.simd import LANES, address, load, spread, store

_EDGES = "Tuple((int64[::1], int32[::1], float32[::1]))"
_ROWS = "Tuple((int64[::1], uint8[::1], float32[::1]))"
AHEAD = 16
"""Edges between asking for a row and adding it; its place is asked for twice as early."""
NEAR = 1 << 19
"""Bytes of all rows up to which none is asked for: they are in the second cache."""
TOGETHER = 128
"""Rows whose codes, at most 255, 16 bits hold the sums of."""
CODES = 2 * LANES
"""Codes that are unpacked at once."""
_BYTE, _INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_SHORTS, _FLOATS = ir.VectorType(_INT16, CODES), ir.VectorType(ir.FloatType(), LANES)


class Shorts(types.Type):
    """32 int16."""

    def __init__(self) -> None:
        super().__init__("Shorts32")


@register_model(Shorts)
class _ShortsModel(models.PrimitiveModel):
    def __init__(self, data_model_manager: Any, kind: Any) -> None:
        super().__init__(data_model_manager, kind, _SHORTS)


@emitted(Shorts())
def no_shorts(builder: Any) -> Any:
    """Zeros."""
    return ir.Constant(_SHORTS, [0] * CODES)


def _codes(builder: Any, place: Any, bits: int, signed: Any) -> Any:
    """32 codes from an address on, int16; reads their 4 `bits` bytes."""
    source = ir.VectorType(_BYTE, 4 * bits)
    packed = builder.load(builder.inttoptr(place, source.as_pointer()), align=1)
    firsts = [bits * code // 8 for code in range(CODES)]
    order = [min(first + k, 4 * bits - 1) for first in firsts for k in (0, 1)]
    order = ir.Constant(ir.VectorType(_INT32, 2 * CODES), order)
    pairs = builder.bitcast(builder.shuffle_vector(packed, ir.Constant(source, ir.Undefined), order), _SHORTS)
    above = ir.Constant(_SHORTS, [16 - bits - bits * code % 8 for code in range(CODES)])
    shifted = builder.ashr(builder.shl(pairs, above), ir.Constant(_SHORTS, [16 - bits] * CODES))
    mask = builder.select(builder.icmp_signed("!=", signed, signed.type(0)), _INT16(-1), _INT16((1 << bits) - 1))
    return builder.and_(shifted, in_all_lanes(builder, mask, _SHORTS))


def _halves(builder: Any, codes: Any) -> list[Any]:
    """As float32, 16 each."""
    lanes = [ir.Constant(ir.VectorType(_INT32, LANES), list(range(half, half + LANES))) for half in (0, LANES)]
    parts = [builder.shuffle_vector(codes, ir.Constant(_SHORTS, ir.Undefined), lane) for lane in lanes]
    return [builder.sitofp(part, _FLOATS) for part in parts]


@emitted()
def add_codes(builder: Any, sums: Any, place: Any, kind: Any, factor: Any) -> Any:
    """`sums`, of 32 int16 or 16 float32 each, and the codes from an address on, float32 times `factor`. `kind`: bits of
    a code (0: nothing is added), and whether it is signed."""
    bits, signed = (builder.extract_value(kind, k) for k in (0, 1))
    before = [builder.extract_value(sums, k) for k in range(sums.type.count)]
    whole, factors = before[0].type == _SHORTS, in_all_lanes(builder, factor, _FLOATS)
    cases, done = [(builder.block, before)], builder.append_basic_block("done")
    switch = builder.switch(bits, done)
    for width in range(1, 9):
        block, after = builder.append_basic_block(f"bits{width}"), []
        switch.add_case(bits.type(width), block)
        builder.position_at_end(block)
        for k in range(0, len(before), 1 if whole else 2):
            at = builder.add(place, _INT64(4 * width * (k if whole else k // 2)))
            codes = _codes(builder, at, width, signed)
            if whole:
                after.append(builder.add(before[k], codes))
            else:
                for total, values in zip(before[k : k + 2], _halves(builder, codes), strict=True):
                    after.append(builder.fadd(total, builder.fmul(values, factors)))
        builder.branch(done)
        cases.append((block, after))
    builder.position_at_end(done)
    phis = [builder.phi(total.type) for total in before]
    for block, values in cases:
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(value, block)
    for k, phi in enumerate(phis):
        sums = builder.insert_value(sums, phi, k)
    return sums


@emitted(types.void)
def move(builder: Any, sums: Any, to: Any, more: Any) -> None:
    """Sums as float32 to an address, added to what is there where `more`."""
    parts = [builder.extract_value(sums, k) for k in range(sums.type.count)]
    parts = [half for part in parts for half in (_halves(builder, part) if part.type == _SHORTS else [part])]
    for k, part in enumerate(parts):
        place = builder.inttoptr(builder.add(to, _INT64(4 * LANES * k)), _FLOATS.as_pointer())
        zeros = ir.Constant(_FLOATS, [0.0] * LANES)
        old = builder.select(builder.icmp_signed("!=", more, more.type(0)), builder.load(place, align=4), zeros)
        builder.store(builder.fadd(part, old), place, align=4)


@emitted(types.void)
def ask(builder: Any, place: Any) -> None:
    """Has the cache line of an address fetched, to be read."""
    fetch_line(builder, builder.inttoptr(place, ir.IntType(8).as_pointer()))


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
def _sums(sums: Any, span: Any, edges: Any, rows: Any, packed: Any, options: Any) -> Any:
    """`sums` and the rows of some edges. `span`: the first edge and the end, and the first 32 columns; `options`: see
    `aggregate`."""
    first, last, block = span
    _, indices, weights = edges
    offsets, widths, scales = rows
    bytes_, spare = packed
    signed, same, columns = options
    base, end, size = address(bytes_), address(bytes_) + bytes_.size, (columns * same + 7) // 8
    far = bytes_.size > NEAR
    for edge in range(first, last):
        if far:
            _ask_ahead(indices, edge, rows, base, size)
        source = np.int64(indices[edge])
        bits = same if same else np.int64(widths[source])
        row = base + (size * source if same else offsets[source])
        place = row + 4 * bits * block
        if place + 16 * bits > end:  # near the end of all
            for k in range(end - row):
                spare[k] = bytes_[row - base + k]
            place = address(spare) + 4 * bits * block
        factor = scales[source] if scales.size else np.float32(1)
        factor = factor * weights[edge] if weights.size else factor
        sums = add_codes(sums, place, (bits, signed), factor)
    return sums


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
    uses=(simd,),
)
def aggregate(packed: Any, edges: Any, rows: Any, options: Any, out: Any) -> None:
    """Fills `out`. `edges`: where targets begin, sources, weights (empty: 1); `rows`: offsets, widths, scales (empty:
    1); `options`: signed, and the width that all rows have (0: see `rows`), for which nothing else is looked up."""
    indptr, _, weights = edges
    signed, same = options
    targets, columns = out.shape
    pieces = min(256, max(1, targets // 64))
    whole = not weights.size and not rows[2].size
    for piece in numba.prange(pieces):
        line, spare = np.empty(columns + 4 * CODES, np.float32), np.empty(columns + 20 * CODES, np.uint8)
        no, nothing = no_shorts(), spread(np.float32(0))
        for target in range(piece * targets // pieces, (piece + 1) * targets // pieces):
            first, last = indptr[target], indptr[target + 1]
            for block in range(0, (columns + CODES - 1) // CODES, 4):
                inside = CODES * (block + 4) <= columns
                to = address(out) + 4 * (columns * target + CODES * block) if inside else address(line)
                if whole:
                    for begin in range(first, max(last, first + 1), TOGETHER):
                        span = begin, min(begin + TOGETHER, last), block
                        sums = _sums((no, no, no, no), span, edges, rows, (packed, spare), (signed, same, columns))
                        move(sums, to, begin - first)
                else:
                    none = (nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
                    floats = _sums(none, (first, last, block), edges, rows, (packed, spare), (signed, same, columns))
                    move(floats, to, first - first)
                if not inside:
                    left = columns - CODES * block
                    _copy(line, address(out) + 4 * (columns * target + CODES * block), left)
