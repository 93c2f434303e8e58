"""Kernels: sums of rows of a dense matrix, named by lists of ids; the product of CSR and of CBM with a dense matrix.

A row of the result is summed in vector registers, up to 16 vectors of 64 bytes at a time, by LLVM code written here:
numba's own loops would write the sum back to memory after every addition. The order of additions is that of the list,
whatever the width and the number of threads.
"""

# ruff: noqa: PLR0913, PLR0917  (kernels take their arrays one by one)

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from espalier.kernels.compiled import intrinsic, jit, njit

VECTOR = 64
"""Bytes of one vector: AVX-512's; LLVM splits it where registers are shorter."""
SIZES = (16, 8, 4, 2, 1)
"""Vectors summed at once. 16 leave half of AVX-512's 32 registers to the loads."""

_I32, _I64 = ir.IntType(32), ir.IntType(64)


class _Lanes:
    """Writes LLVM code for `count` vectors at a column of one row. Has state: the code written."""

    def __init__(self, context: Any, builder: Any, dtype: Any, count: int) -> None:
        self.context, self.builder, self.count = context, builder, count
        self.element = context.get_data_type(dtype)
        self.bytes = 4 if dtype == types.float32 else 8
        self.lanes = VECTOR // self.bytes
        self.vector = ir.VectorType(self.element, self.lanes)
        self.sums = [cgutils.alloca_once(builder, self.vector) for _ in range(count)]

    def spread(self, value: Any, kind: Any = None) -> Any:
        """`value` in every lane."""
        kind = kind or self.vector
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
        lanes = ir.Constant(ir.VectorType(_I32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), lanes)

    def mask(self, live: Any) -> Any:
        """The first `live` lanes."""
        kind = ir.VectorType(_I64, self.lanes)
        return self.builder.icmp_signed("<", ir.Constant(kind, list(range(self.lanes))), self.spread(live, kind))

    def base(self, array_type: Any, value: Any, column: Any) -> tuple[Any, Any]:
        """Address of `column` in row 0, and the bytes from row to row."""
        array = self.context.make_array(array_type)(self.context, self.builder, value)
        stride = cgutils.unpack_tuple(self.builder, array.strides)[0]
        start = self.builder.ptrtoint(array.data, _I64)
        return self.builder.add(start, self.builder.mul(column, _I64(self.bytes))), stride

    def row(self, base: tuple[Any, Any], row: Any) -> Any:
        return self.builder.add(base[0], self.builder.mul(row, base[1]))

    def load(self, address: Any, at: int, mask: Any) -> Any:
        where = self.builder.inttoptr(self.builder.add(address, _I64(at * VECTOR)), self.vector.as_pointer())
        if mask is None:
            found = self.builder.load(where)
            found.align = self.bytes
            return found
        kinds = [where.type, _I32, mask.type, self.vector]
        name = f"llvm.masked.load.v{self.lanes}f{self.bytes * 8}.p0"
        call = cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(self.vector, kinds), name)
        return self.builder.call(call, [where, _I32(self.bytes), mask, ir.Constant(self.vector, None)])

    def store(self, value: Any, address: Any, at: int, mask: Any) -> None:
        where = self.builder.inttoptr(self.builder.add(address, _I64(at * VECTOR)), self.vector.as_pointer())
        if mask is None:
            self.builder.store(value, where).align = self.bytes
            return
        kinds = [self.vector, where.type, _I32, mask.type]
        name = f"llvm.masked.store.v{self.lanes}f{self.bytes * 8}.p0"
        call = cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(ir.VoidType(), kinds), name)
        self.builder.call(call, [value, where, _I32(self.bytes), mask])

    def add(self, entries: tuple[Any, Any, Any], x: tuple[Any, Any], weight: Any, sign: str, mask: Any) -> None:
        """A loop over the entries (ids, first, last): the row of x that each names, times its weight, is added."""
        ids, first, last = entries
        with cgutils.for_range_slice(self.builder, first, last, _I64(1), _I64) as (entry, _):
            column = self.builder.zext(self.builder.load(self.builder.gep(ids, [entry])), _I64)
            address = self.row(x, column)
            factor = None if weight is None else self.spread(weight(entry, column))
            for at, total in enumerate(self.sums):
                value = self.load(address, at, mask)
                if factor is not None:
                    value = self.builder.fmul(value, factor, flags=["contract"])
                combine = self.builder.fadd if sign == "+" else self.builder.fsub
                self.builder.store(combine(self.builder.load(total), value, flags=["contract"]), total)


def _tile(count: int, masked: bool, weighted: str) -> Any:
    """The intrinsic that sums `count` vectors of one row; of one vector only the first `live` lanes if `masked`.

    `weighted`: "" not at all, "entry" by `weights[entry]`, "column" by `weights[ids[entry]]`.
    """

    @intrinsic
    def tile(typing: Any, y: Any, row: Any, x: Any, plus: Any, minus: Any, weights: Any, parent: Any, at: Any) -> Any:
        # plus, minus: (ids, first, last); at: (column, live). y[row] = (parent < 0 ? 0 : y[parent]) + plus - minus.
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            lanes = _Lanes(context, builder, x.dtype, count)
            column, live = cgutils.unpack_tuple(builder, given[7])
            mask = lanes.mask(live) if masked else None
            out, source = lanes.base(y, given[0], column), lanes.base(x, given[2], column)
            for total in lanes.sums:
                builder.store(ir.Constant(lanes.vector, None), total)
            with builder.if_then(builder.icmp_signed(">=", given[6], _I64(0))):
                address = lanes.row(out, given[6])
                for number, total in enumerate(lanes.sums):
                    builder.store(lanes.load(address, number, mask), total)
            factors = context.make_array(weights)(context, builder, given[5]).data

            def weight(entry: Any, column: Any) -> Any:
                return builder.load(builder.gep(factors, [entry if weighted == "entry" else column]))

            for kind, value, sign in ((plus, given[3], "+"), (minus, given[4], "-")):
                ids, first, last = cgutils.unpack_tuple(builder, value)
                data = context.make_array(kind.types[0])(context, builder, ids).data
                lanes.add((data, first, last), source, weight if weighted else None, sign, mask)
            address = lanes.row(out, given[1])
            for number, total in enumerate(lanes.sums):
                lanes.store(builder.load(total), address, number, mask)
            return context.get_dummy_value()

        return types.void(y, row, x, plus, minus, weights, parent, at), generate

    return tile


def _row(weighted: str) -> Any:
    """The function that makes one row of y, tile by tile (`tiles` of the width)."""
    one, two, four, eight, sixteen = (_tile(count, False, weighted) for count in (1, 2, 4, 8, 16))
    part = _tile(1, True, weighted)

    @njit
    def row(y, i, x, plus, minus, weights, parent, tiles):  # type: ignore[no-untyped-def]
        for t in range(tiles.shape[0]):
            vectors, at = tiles[t, 1], (tiles[t, 0], tiles[t, 2])
            if vectors == 8:
                eight(y, i, x, plus, minus, weights, parent, at)
            elif vectors == 16:
                sixteen(y, i, x, plus, minus, weights, parent, at)
            elif vectors == 4:
                four(y, i, x, plus, minus, weights, parent, at)
            elif vectors == 2:
                two(y, i, x, plus, minus, weights, parent, at)
            elif vectors == 1:
                one(y, i, x, plus, minus, weights, parent, at)
            else:
                part(y, i, x, plus, minus, weights, parent, at)

    return row


_ROW, _ROW_BY_ENTRY, _ROW_BY_COLUMN = _row(""), _row("entry"), _row("column")


def tiles(width: int, element_bytes: int) -> Any:
    """How a row of `width` values is covered: int64 [tiles, 3] of first column, vectors, and live lanes.

    The last tile ends with the row and may overlap the one before, which does no harm: it writes the same values. Only
    a row shorter than a vector is masked (0 vectors, then its live lanes).
    """
    lanes = VECTOR // element_bytes
    if width < lanes:
        return np.array([[0, 0, width]], dtype=np.int64)
    found, column = [], 0
    while column < width:
        left = width - column
        closing = [size for size in SIZES if size * lanes >= left and size * lanes <= width]
        size = min(closing) if closing else max(size for size in SIZES if size * lanes <= left)
        column = min(column, width - size * lanes)
        found.append([column, size, 0])
        column += size * lanes
    return np.array(found, dtype=np.int64)


def pieces(indptr: Any, count: int) -> Any:
    """Row numbers int64 [at most count + 1] that cut the rows into pieces of about as many entries."""
    total = indptr[-1] + len(indptr)
    cuts = np.searchsorted(indptr + np.arange(len(indptr)), np.linspace(0, total, count + 1)[1:-1])
    return np.unique(np.concatenate([[0], cuts, [len(indptr) - 1]])).astype(np.int64)


@jit(
    "(float32[:, ::1], int64[::1], int32[::1], float32[:, ::1], int64[::1], int64[:, ::1])",
    "(float64[:, ::1], int64[::1], int32[::1], float64[:, ::1], int64[::1], int64[:, ::1])",
    parallel=True,
)
def add_rows(y, indptr, indices, x, cuts, tiles):  # type: ignore[no-untyped-def]
    """y = A·x for a binary A; rows `cuts[p]` to `cuts[p + 1]` are one piece of work."""
    for piece in numba.prange(len(cuts) - 1):
        for i in range(cuts[piece], cuts[piece + 1]):
            plus, minus = (indices, indptr[i], indptr[i + 1]), (indices, np.int64(0), np.int64(0))
            _ROW(y, i, x, plus, minus, x[0], np.int64(-1), tiles)


@jit(
    "(float32[:, ::1], int64[::1], int32[::1], float32[::1], float32[:, ::1], int64[::1], int64[:, ::1])",
    "(float64[:, ::1], int64[::1], int32[::1], float64[::1], float64[:, ::1], int64[::1], int64[:, ::1])",
    parallel=True,
)
def add_weighted_rows(y, indptr, indices, values, x, cuts, tiles):  # type: ignore[no-untyped-def]
    """y = A·x for an A with `values`; rows `cuts[p]` to `cuts[p + 1]` are one piece of work."""
    for piece in numba.prange(len(cuts) - 1):
        for i in range(cuts[piece], cuts[piece + 1]):
            plus, minus = (indices, indptr[i], indptr[i + 1]), (indices, np.int64(0), np.int64(0))
            _ROW_BY_ENTRY(y, i, x, plus, minus, values, np.int64(-1), tiles)
