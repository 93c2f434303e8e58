"""SIMD vectors of 16 floats inside numba kernels: types and operations that LLVM lowers to what the processor has.

numba vectorizes plain loops by itself, but not those that count, pack or stop. A kernel module that calls these names
this module in `jit(uses=...)`. Addresses are integers; nothing is checked, as in C.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from espalier.kernels.numba_compile import emitted, in_all_lanes, intrinsic, named

LANES = 16

_INT64, _INT32, _INT16, _INT1 = (ir.IntType(bits) for bits in (64, 32, 16, 1))
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT32, LANES)
_BITS, _SHORTS = ir.VectorType(_INT1, LANES), ir.VectorType(_INT16, LANES)
_LONGS = ir.VectorType(_INT64, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)


class Floats(types.Type):
    """16 float32."""

    def __init__(self) -> None:
        super().__init__("Floats16")


class Ints(types.Type):
    """16 int32."""

    def __init__(self) -> None:
        super().__init__("Ints16")


floats, ints, mask = Floats(), Ints(), types.uint16


@register_model(Floats)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, data_model_manager: Any, kind: Any) -> None:
        super().__init__(data_model_manager, kind, _FLOATS)


@register_model(Ints)
class _IntsModel(models.PrimitiveModel):
    def __init__(self, data_model_manager: Any, kind: Any) -> None:
        super().__init__(data_model_manager, kind, _INTS)


def _bits(builder: Any, mask: Any) -> Any:
    """A mask as 16 bits: numba widens integers whenever it combines them."""
    return builder.bitcast(mask if mask.type == _INT16 else builder.trunc(mask, _INT16), _BITS)


@intrinsic
def address(typing: Any, array: Any) -> Any:
    """Where an array's first element lies, as a signed integer: numba makes floats of signed and unsigned together."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        struct = cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0])
        return builder.ptrtoint(struct.data, _INT64)

    return types.int64(array), write


@emitted(floats)
def spread(builder: Any, scalar: Any) -> Any:
    """The float32 in all lanes."""
    return in_all_lanes(builder, scalar, _FLOATS)


@emitted(floats)
def load(builder: Any, place: Any) -> Any:
    """16 float32 from an address of any alignment."""
    return builder.load(builder.inttoptr(place, _FLOATS.as_pointer()), align=4)


@emitted(ints)
def load_ints(builder: Any, place: Any) -> Any:
    """16 int32 from an address of any alignment."""
    return builder.load(builder.inttoptr(place, _INTS.as_pointer()), align=4)


@emitted(floats)
def load_part(builder: Any, place: Any, lanes: Any) -> Any:
    """The float32 of the lanes in the mask; the others read nothing and are 0."""
    pointer = builder.inttoptr(place, _FLOATS.as_pointer())
    chosen = _bits(builder, lanes)
    zeros = ir.Constant(_FLOATS, [0.0] * LANES)
    return named(builder, "llvm.masked.load.v16f32.p0", _FLOATS, pointer, ir.Constant(_INT32, 4), chosen, zeros)


@emitted(types.float32)
def load_one(builder: Any, place: Any) -> Any:
    """One float32."""
    return builder.load(builder.inttoptr(place, ir.FloatType().as_pointer()), align=4)


@emitted(types.void)
def store_one(builder: Any, place: Any, value: Any) -> None:
    """One float32."""
    builder.store(value, builder.inttoptr(place, ir.FloatType().as_pointer()), align=4)


@emitted(floats)
def load_bfloat16(builder: Any, place: Any) -> Any:
    """16 bfloat16, widened: the upper halves of float32."""
    short = builder.load(builder.inttoptr(place, _SHORTS.as_pointer()), align=2)
    bits = builder.shl(builder.zext(short, _INTS), ir.Constant(_INTS, [16] * LANES))
    return builder.bitcast(bits, _FLOATS)


@emitted(floats)
def load_float16(builder: Any, place: Any) -> Any:
    """16 float16, widened."""
    return builder.fpext(builder.load(builder.inttoptr(place, _HALVES.as_pointer()), align=2), _FLOATS)


@emitted(floats)
def gather(builder: Any, place: Any, columns: Any, lanes: Any) -> Any:
    """The float32 at those columns of the row at an address; lanes outside the mask read nothing and are 0."""
    pointers = ir.VectorType(ir.FloatType().as_pointer(), LANES)
    base = builder.inttoptr(place, ir.FloatType().as_pointer())
    places = builder.gep(base, [builder.sext(columns, _LONGS)], source_etype=ir.FloatType())
    places.type = pointers
    zeros, align = ir.Constant(_FLOATS, [0.0] * LANES), ir.Constant(_INT32, 4)
    name = "llvm.masked.gather.v16f32.v16p0"
    return named(builder, name, _FLOATS, places, align, _bits(builder, lanes), zeros)


@emitted(types.void)
def store_part(builder: Any, place: Any, vector: Any, lanes: Any) -> None:
    """The lanes of the mask; what lies at the others is left."""
    pointer = builder.inttoptr(place, vector.type.as_pointer())
    align, chosen = ir.Constant(_INT32, 4), _bits(builder, lanes)
    name = f"llvm.masked.store.v16{'f32' if vector.type == _FLOATS else 'i32'}.p0"
    named(builder, name, ir.VoidType(), vector, pointer, align, chosen)


@emitted(types.void)
def store_wide(builder: Any, place: Any, vector: Any, lanes: Any) -> None:
    """The int32 of the mask as int64; what lies at the others is left."""
    pointer = builder.inttoptr(place, _LONGS.as_pointer())
    wide, chosen = builder.sext(vector, _LONGS), _bits(builder, lanes)
    align, void = ir.Constant(_INT32, 8), ir.VoidType()
    named(builder, "llvm.masked.store.v16i64.p0", void, wide, pointer, align, chosen)


@emitted(types.void)
def store(builder: Any, place: Any, vector: Any) -> None:
    """All 16 lanes to an address of any alignment."""
    builder.store(vector, builder.inttoptr(place, vector.type.as_pointer()), align=4)


@emitted()
def packed(builder: Any, vector: Any, lanes: Any) -> Any:
    """The lanes of the mask moved to the front; what follows them is arbitrary."""
    name = f"llvm.experimental.vector.compress.v16{'f32' if vector.type == _FLOATS else 'i32'}"
    rest = ir.Constant(vector.type, ir.Undefined)
    return named(builder, name, vector.type, vector, _bits(builder, lanes), rest)


def _comparison(sign: str, ordered: bool) -> Any:
    def compared(builder: Any, left: Any, right: Any) -> Any:
        compare = builder.fcmp_ordered if ordered else builder.fcmp_unordered
        return builder.bitcast(compare(sign, left, right), _INT16)

    return emitted(mask)(compared)


at_least = _comparison(">=", ordered=True)
"""Mask of left >= right; a NaN is at least nothing."""
not_below = _comparison(">=", ordered=False)
"""Mask of not (left < right): with the NaNs."""
unordered = _comparison("uno", ordered=False)
"""Mask of lanes where either is NaN."""


@emitted(types.int64)
def count_lanes(builder: Any, lanes: Any) -> Any:
    """How many lanes are in the mask."""
    return builder.zext(builder.ctpop(builder.bitcast(_bits(builder, lanes), _INT16)), _INT64)


def _choice(sign: str) -> Any:
    def chosen(builder: Any, left: Any, right: Any) -> Any:
        return builder.select(builder.fcmp_ordered(sign, left, right), left, right)

    return emitted(floats)(chosen)


larger = _choice(">")
"""Lane by lane; right where either is NaN."""
smaller = _choice("<")
"""Lane by lane; right where either is NaN."""


@emitted(floats)
def plus(builder: Any, left: Any, right: Any) -> Any:
    """The sums, lane by lane."""
    return builder.fadd(left, right)


@emitted(floats)
def times(builder: Any, left: Any, right: Any) -> Any:
    """The products, lane by lane."""
    return builder.fmul(left, right)


@emitted(types.float32)
def total(builder: Any, vector: Any) -> Any:
    """The sum of all lanes, in any order."""
    name, zero = "llvm.vector.reduce.fadd.v16f32", ir.Constant(ir.FloatType(), 0.0)
    return named(builder, name, ir.FloatType(), zero, vector, fastmath=("reassoc",))


@emitted(floats)
def where(builder: Any, lanes: Any, yes: Any, no: Any) -> Any:
    """Lanes of `yes` in the mask, of `no` outside."""
    return builder.select(_bits(builder, lanes), yes, no)


def _reduction(name: str) -> Any:
    def reduced(builder: Any, vector: Any) -> Any:
        return named(builder, f"llvm.vector.reduce.{name}.v16f32", ir.FloatType(), vector, fastmath=("nnan",))

    return emitted(types.float32)(reduced)


largest = _reduction("fmax")
"""Of lanes none of which is NaN."""
smallest = _reduction("fmin")
"""Of lanes none of which is NaN."""


@emitted(ints)
def columns_from(builder: Any, first: Any) -> Any:
    """first, first + 1, …, first + 15."""
    start = in_all_lanes(builder, builder.trunc(first, _INT32), _INTS)
    return builder.add(start, ir.Constant(_INTS, list(range(LANES))))
