"""SIMD vectors of 64 bytes of float32 or float64 inside numba kernels: loads, sums and stores in LLVM code.

The exponential of float32 is a polynomial (Cephes' expf, 2 units in the last place), which LLVM runs on whole vectors;
the library's takes one number at a time.

A kernel module that calls these names this module in `jit(uses=...)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from espalier.kernels.numba_compile import counted, emitted, fetch_line, in_all_lanes, intrinsic, named

VECTOR = 64
"""Bytes of one vector: AVX-512's; LLVM splits it where registers are shorter."""

INT32, INT64 = ir.IntType(32), ir.IntType(64)


class Vectors:
    """Writes LLVM code for `count` vectors at a column of one row. Has state: the code written."""

    def __init__(self, context: Any, builder: Any, dtype: Any, count: int, lanes: int = 0) -> None:
        self.context, self.builder, self.count = context, builder, count
        self.element = context.get_data_type(dtype)
        self.bytes = 4 if dtype == types.float32 else 8
        self.lanes = lanes or VECTOR // self.bytes
        self.vector = ir.VectorType(self.element, self.lanes)
        self.sums = [cgutils.alloca_once(builder, self.vector) for _ in range(count)]

    def spread(self, value: Any, kind: Any = None) -> Any:
        """`value` in every lane."""
        return in_all_lanes(self.builder, value, kind or self.vector)

    def mask(self, live: Any) -> Any:
        """The first `live` lanes."""
        kind = ir.VectorType(INT64, self.lanes)
        return self.builder.icmp_signed("<", ir.Constant(kind, list(range(self.lanes))), self.spread(live, kind))

    def base(self, array_type: Any, value: Any, column: Any) -> tuple[Any, Any]:
        """Address of `column` in row 0, and the bytes from row to row."""
        array = self.context.make_array(array_type)(self.context, self.builder, value)
        stride = cgutils.unpack_tuple(self.builder, array.strides)[0]
        start = self.builder.ptrtoint(array.data, INT64)
        return self.builder.add(start, self.builder.mul(column, INT64(self.bytes))), stride

    def row(self, base: tuple[Any, Any], row: Any) -> Any:
        """Address of `row`."""
        return self.builder.add(base[0], self.builder.mul(row, base[1]))

    def load(self, address: Any, at: int, mask: Any) -> Any:
        """The vector number `at` behind an address."""
        where = self.builder.inttoptr(self.builder.add(address, INT64(at * VECTOR)), self.vector.as_pointer())
        if mask is None:
            loaded = self.builder.load(where)
            loaded.align = self.bytes
            return loaded
        name = f"llvm.masked.load.v{self.lanes}f{self.bytes * 8}.p0"
        zeros = ir.Constant(self.vector, None)
        return named(self.builder, name, self.vector, where, INT32(self.bytes), mask, zeros)

    def store(self, value: Any, address: Any, at: int, mask: Any) -> None:
        """It becomes the vector number `at` behind an address."""
        where = self.builder.inttoptr(self.builder.add(address, INT64(at * VECTOR)), self.vector.as_pointer())
        if mask is None:
            self.builder.store(value, where).align = self.bytes
            return
        name = f"llvm.masked.store.v{self.lanes}f{self.bytes * 8}.p0"
        named(self.builder, name, ir.VoidType(), value, where, INT32(self.bytes), mask)

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
        with cgutils.for_range_slice(self.builder, first, last, INT64(1), INT64) as (entry, _):
            column = self.builder.zext(self.builder.load(self.builder.gep(ids, [entry])), INT64)
            address = self.row(x, column)
            factor = None if weight is None else self.spread(weight(entry, column))
            for at, total in enumerate(self.sums):
                value = self.load(address, at, mask)
                if factor is not None:
                    value = self.builder.fmul(value, factor, flags=["contract"])
                self.builder.store(combine(self.builder.load(total), value, flags=["contract"]), total)

    def add_products(self, vectors: list[Any], factor: Any) -> None:
        """`simd64`, times one number, join the sums."""
        every = self.spread(factor)
        for total, vector in zip(self.sums, vectors, strict=True):
            value = self.builder.fmul(vector, every, flags=["contract"])
            self.builder.store(self.builder.fadd(self.builder.load(total), value, flags=["contract"]), total)

    def end(self, address: Any, mask: Any) -> None:
        """The sums are written to the row at `address`."""
        for at, total in enumerate(self.sums):
            self.store(self.builder.load(total), address, at, mask)


_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
"""Cephes' constants: e^r for |r| <= ln(2)/2, and ln(2) in two parts of which the first is short."""
_LOWEST = -87.33
"""e^x is below float32's normal numbers from here on, and taken as 0."""


@emitted()
def add_freely(builder: Any, total: Any, term: Any) -> Any:
    """total + term, where a loop of such additions may be reordered into vectors."""
    return builder.fadd(total, term, flags=["reassoc", "contract", "nsz"])


@emitted()
def exponential(builder: Any, x: Any) -> Any:
    """e^x; of a float32 x at most 88."""
    return power_of_e(builder, x)


def power_of_e(builder: Any, value: Any) -> Any:
    """The code of e^value, for a number or a vector."""
    kind, lanes = value.type, getattr(value.type, "count", 1)
    wide = isinstance(kind, ir.VectorType)

    def call(name: str, argument: Any) -> Any:
        element = kind.element if wide else kind
        suffix = f"{f'v{lanes}' if wide else ''}f{32 if element == ir.FloatType() else 64}"
        return named(builder, f"llvm.{name}.{suffix}", kind, argument)

    if (kind.element if wide else kind) == ir.DoubleType():
        return call("exp", value)
    integer = ir.VectorType(INT32, lanes) if wide else INT32

    def every(constant: float, of: Any = kind) -> Any:
        return ir.Constant(of, [constant] * lanes if wide else constant)

    def times(left: Any, right: Any) -> Any:
        return builder.fmul(left, right, flags=["contract"])

    def plus(left: Any, right: Any) -> Any:
        return builder.fadd(left, right, flags=["contract"])

    safe = builder.select(builder.fcmp_ordered(">", value, every(_LOWEST)), value, every(_LOWEST))
    power = call("floor", plus(times(safe, every(1.44269504088896341)), every(0.5)))
    rest = plus(plus(safe, times(power, every(-_LN2_HIGH))), times(power, every(-_LN2_LOW)))
    sum_ = every(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        sum_ = plus(times(sum_, rest), every(coefficient))
    sum_ = plus(plus(times(times(rest, rest), sum_), rest), every(1.0))
    bits = builder.shl(builder.add(builder.fptosi(power, integer), every(127, integer)), every(23, integer))
    result = builder.fmul(sum_, builder.bitcast(bits, kind))
    result = builder.select(builder.fcmp_ordered("<=", value, every(_LOWEST)), every(0.0), result)
    return builder.select(builder.fcmp_unordered("uno", value, value), value, result)


class Lanes:
    """Some consecutive values of several arrays, for the code that `lanewise` makes of a body."""

    def __init__(self, vectors: Vectors, places: list[Any]) -> None:
        self.vectors, self.places, self.builder = vectors, places, vectors.builder

    def read(self, array: int) -> Any:
        """Of that array."""
        return self.vectors.load(self.places[array], 0, None)

    def write(self, array: int, value: Any) -> None:
        """To that array."""
        self.vectors.store(value, self.places[array], 0, None)

    def plus(self, left: Any, right: Any) -> Any:
        return self.builder.fadd(left, right, flags=["contract"])

    def minus(self, left: Any, right: Any) -> Any:
        return self.builder.fsub(left, right, flags=["contract"])

    def times(self, left: Any, right: Any) -> Any:
        return self.builder.fmul(left, right, flags=["contract"])

    def larger(self, left: Any, right: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", left, right), left, right)

    def rectified(self, value: Any, slope: Any) -> tuple[Any, Any]:
        """The leaky ReLU of `value`, and its slope there."""
        positive = self.builder.fcmp_ordered(">", value, ir.Constant(value.type, [0.0] * self.vectors.lanes))
        steep = self.builder.select(
            positive, ir.Constant(value.type, [1.0] * self.vectors.lanes), self.vectors.spread(slope)
        )
        return self.times(value, steep), steep

    def total(self, value: Any) -> Any:
        """The sum of all lanes, in any order."""
        element = self.vectors.element
        name = f"llvm.vector.reduce.fadd.v{self.vectors.lanes}f{8 * self.vectors.bytes}"
        return named(self.builder, name, element, ir.Constant(element, 0.0), value, fastmath=("reassoc",))


def lanewise(arrays: int, body: Callable[..., Any]) -> Any:
    """The intrinsic f(n, array, first, …, number, …): `body(lanes, *numbers)` over n values of each of the flat arrays,
    from its `first` on; the sum of what it returns, if anything."""

    def typed(typing: Any, n: Any, *rest: Any) -> Any:
        dtype = rest[0].dtype

        def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            size, starts = (4 if dtype == types.float32 else 8), []
            for k in range(arrays):
                array = context.make_array(signature.args[1 + 2 * k])(context, builder, args[1 + 2 * k])
                start = builder.mul(args[2 + 2 * k], INT64(size))
                starts.append(builder.add(builder.ptrtoint(array.data, INT64), start))
            accumulator = cgutils.alloca_once_value(builder, ir.Constant(context.get_data_type(dtype), 0.0))

            def some(column: Any, lanes: int) -> None:
                vectors = Vectors(context, builder, dtype, 1, lanes)
                places = [builder.add(start, builder.mul(column, INT64(vectors.bytes))) for start in starts]
                value = body(Lanes(vectors, places), *args[1 + 2 * arrays :])
                if value is not None:
                    builder.store(builder.fadd(builder.load(accumulator), value), accumulator)

            lanes = VECTOR // size
            whole = builder.and_(args[0], INT64(-lanes))
            with cgutils.for_range_slice(builder, INT64(0), whole, INT64(lanes), INT64) as (column, _):
                some(column, lanes)
            while lanes > 1:  # not masked: what a masked store wrote is read again only after a long while
                lanes //= 2
                with builder.if_then(builder.trunc(builder.udiv(args[0], INT64(lanes)), ir.IntType(1))):
                    some(builder.and_(args[0], INT64(-2 * lanes)), lanes)
            return builder.load(accumulator)

        return dtype(n, *rest), write

    return counted(typed, 2 + 2 * arrays + len(inspect.signature(body).parameters) - 1)


def _add_scaled(lanes: Lanes, factor: Any) -> None:
    lanes.write(0, lanes.plus(lanes.read(0), lanes.times(lanes.read(1), lanes.vectors.spread(factor))))


add_scaled = lanewise(2, _add_scaled)
"""f(n, y, at, x, of, factor): y[at:] += factor · x[of:]."""
dot = lanewise(2, lambda lanes: lanes.total(lanes.times(lanes.read(0), lanes.read(1))))
"""f(n, x, at, y, of): the dot product."""


@intrinsic
def prefetch(typing, n, array, first):  # type: ignore[no-untyped-def]
    """Fetches n values of a flat array, from `first` on, into first-level cache."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size = 4 if array.dtype == types.float32 else 8
        buffer = context.make_array(array)(context, builder, args[1])
        start = builder.add(builder.ptrtoint(buffer.data, INT64), builder.mul(args[2], INT64(size)))
        with cgutils.for_range_slice(builder, INT64(0), builder.mul(args[0], INT64(size)), INT64(VECTOR), INT64) as (
            at,
            _,
        ):
            fetch_line(builder, builder.inttoptr(builder.add(start, at), ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(n, array, first), write
