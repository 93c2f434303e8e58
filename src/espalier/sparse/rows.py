"""Kernels: sums of rows of a dense matrix, named by lists of ids; the product of CSR and of CBM with a dense matrix.

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
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from espalier.kernels.compiled import intrinsic, jit

VECTOR = 64
"""Bytes of one vector: AVX-512's; LLVM splits it where registers are shorter."""
SIZES = (8, 4, 2, 1)
"""Vectors summed at once: 8 hide the latency of additions; 16 were a tenth slower at 500 columns."""

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

    def begin(self, address: Any, there: Any, mask: Any) -> None:
        """The sums start with the row at `address` if `there`, else with zeros."""
        for total in self.sums:
            self.builder.store(ir.Constant(self.vector, None), total)
        with self.builder.if_then(there):
            for at, total in enumerate(self.sums):
                self.builder.store(self.load(address, at, mask), total)

    def add(self, entries: tuple[Any, Any, Any, str], x: tuple[Any, Any], weight: Any, mask: Any) -> None:
        """A loop over the entries (ids, first, last, sign): the row of x that each names, weighted, joins the sums."""
        ids, first, last, sign = entries
        combine = self.builder.fadd if sign == "+" else self.builder.fsub
        with cgutils.for_range_slice(self.builder, first, last, _I64(1), _I64) as (entry, _):
            column = self.builder.zext(self.builder.load(self.builder.gep(ids, [entry])), _I64)
            address = self.row(x, column)
            factor = None if weight is None else self.spread(weight(entry, column))
            for at, total in enumerate(self.sums):
                value = self.load(address, at, mask)
                if factor is not None:
                    value = self.builder.fmul(value, factor, flags=["contract"])
                self.builder.store(combine(self.builder.load(total), value, flags=["contract"]), total)

    def end(self, address: Any, mask: Any) -> None:
        """The sums are written to the row at `address`."""
        for at, total in enumerate(self.sums):
            self.store(self.builder.load(total), address, at, mask)


def _row(weighted: str) -> Any:
    """The intrinsic y[row] = (y[parent], nothing if -1) + x[plus[first:last]] - x[minus[start:end]], tile by tile.

    `weighted`: "" not at all, "entry" by `weights[entry]`, "column" by `weights[ids[entry]]`. All of it is one piece of
    LLVM code: a function called with arrays would count their references, which costs more than a short row's sum.
    """

    @intrinsic
    def row(typing, y, row, parent, x, plus, first, last, minus, start, end, weights, tiles):  # type: ignore[no-untyped-def]
        signature = types.void(y, row, parent, x, plus, first, last, minus, start, end, weights, tiles)

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            def data(at: int) -> Any:
                return context.make_array(signature.args[at])(context, builder, given[at])

            ids = ((data(4).data, given[5], given[6], "+"), (data(7).data, given[8], given[9], "-"))
            factors, table = data(10).data, data(11)

            def weight(entry: Any, column: Any) -> Any:
                return builder.load(builder.gep(factors, [entry if weighted == "entry" else column]))

            def tile(count: int, masked: bool, column: Any, live: Any) -> None:
                lanes = _Lanes(context, builder, x.dtype, count)
                mask = lanes.mask(live) if masked else None
                out, source = lanes.base(y, given[0], column), lanes.base(x, given[3], column)
                lanes.begin(lanes.row(out, given[2]), builder.icmp_signed(">=", given[2], _I64(0)), mask)
                for entries in ids:
                    lanes.add(entries, source, weight if weighted else None, mask)
                lanes.end(lanes.row(out, given[1]), mask)

            count = cgutils.unpack_tuple(builder, table.shape)[0]
            with cgutils.for_range(builder, count, intp=_I64) as loop:
                place = builder.mul(loop.index, _I64(3))
                column, vectors, live = (
                    builder.load(builder.gep(table.data, [builder.add(place, _I64(k))])) for k in range(3)
                )
                for size in (*SIZES, 0):
                    with builder.if_then(builder.icmp_signed("==", vectors, _I64(size))):
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
    total = indptr[-1] + len(indptr) - 1
    cuts = np.searchsorted(indptr + np.arange(len(indptr)), np.linspace(0, total, count + 1)[1:-1])
    return np.unique(np.concatenate([[0], cuts, [len(indptr) - 1]])).astype(np.int64)


@jit(
    "(float32[:, ::1], int64[::1], int32[::1], float32[:, ::1], int64[::1], int64[:, ::1])",
    "(float64[:, ::1], int64[::1], int32[::1], float64[:, ::1], int64[::1], int64[:, ::1])",
    parallel=True,
)
def add_rows(y, indptr, indices, x, cuts, tiles):  # type: ignore[no-untyped-def]
    """y = A·x for a binary A; rows `cuts[p]` to `cuts[p + 1]` are one piece of work."""
    none, zero = np.int64(-1), np.int64(0)
    for piece in numba.prange(len(cuts) - 1):
        for i in range(cuts[piece], cuts[piece + 1]):
            _ROW(y, i, none, x, indices, indptr[i], indptr[i + 1], indices, zero, zero, indices, tiles)


@jit(
    "(float32[:, ::1], int64[::1], int32[::1], float32[::1], float32[:, ::1], int64[::1], int64[:, ::1])",
    "(float64[:, ::1], int64[::1], int32[::1], float64[::1], float64[:, ::1], int64[::1], int64[:, ::1])",
    parallel=True,
)
def add_weighted_rows(y, indptr, indices, values, x, cuts, tiles):  # type: ignore[no-untyped-def]
    """y = A·x for an A with `values`; rows `cuts[p]` to `cuts[p + 1]` are one piece of work."""
    none, zero = np.int64(-1), np.int64(0)
    for piece in numba.prange(len(cuts) - 1):
        for i in range(cuts[piece], cuts[piece + 1]):
            _ROW_BY_ENTRY(y, i, none, x, indices, indptr[i], indptr[i + 1], indices, zero, zero, values, tiles)


@jit(
    "(float32[:, ::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], float32[::1],"
    " float32[:, ::1], int64[::1], int64[:, ::1])",
    "(float64[:, ::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], float64[::1],"
    " float64[:, ::1], int64[::1], int64[:, ::1])",
    parallel=True,
)
def add_differences(y, order, parent, plus_ptr, plus, minus_ptr, minus, left, x, cuts, tiles):  # type: ignore[no-untyped-def]
    """y = diag(left)·A·x for a binary A kept as differences (CBM); an empty `left` stands for ones.

    Row order[p] is y[parent[p]] (nothing if -1) plus the rows of x in its list `plus`, less those in `minus`. Places
    `cuts[p]` to `cuts[p + 1]` are whole branches of the tree; `left` is applied once a piece is done.
    """
    for piece in numba.prange(len(cuts) - 1):
        for p in range(cuts[piece], cuts[piece + 1]):
            row, above = np.int64(order[p]), np.int64(parent[p])
            first, last = np.int64(plus_ptr[p]), np.int64(plus_ptr[p + 1])
            start, end = np.int64(minus_ptr[p]), np.int64(minus_ptr[p + 1])
            _ROW(y, row, above, x, plus, first, last, minus, start, end, left, tiles)
        if len(left):
            for p in range(cuts[piece], cuts[piece + 1]):
                factor = left[order[p]]
                for f in range(y.shape[1]):
                    y[order[p], f] *= factor


@jit(
    "(float32[:, ::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], float32[::1],"
    " float32[::1], float32[:, ::1], int64[::1], int64[:, ::1])",
    "(float64[:, ::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], float64[::1],"
    " float64[::1], float64[:, ::1], int64[::1], int64[:, ::1])",
    parallel=True,
)
def add_scaled_differences(  # type: ignore[no-untyped-def]
    y, order, parent, plus_ptr, plus, minus_ptr, minus, left, right, x, cuts, tiles
):
    """`add_differences` of diag(left)·A·diag(right)."""
    for piece in numba.prange(len(cuts) - 1):
        for p in range(cuts[piece], cuts[piece + 1]):
            row, above = np.int64(order[p]), np.int64(parent[p])
            first, last = np.int64(plus_ptr[p]), np.int64(plus_ptr[p + 1])
            start, end = np.int64(minus_ptr[p]), np.int64(minus_ptr[p + 1])
            _ROW_BY_COLUMN(y, row, above, x, plus, first, last, minus, start, end, right, tiles)
        if len(left):
            for p in range(cuts[piece], cuts[piece + 1]):
                factor = left[order[p]]
                for f in range(y.shape[1]):
                    y[order[p], f] *= factor
