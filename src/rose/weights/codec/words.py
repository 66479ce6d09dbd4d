"""The decorators of the codec's compiled functions, and machine operations that numba does not offer, as LLVM code.

`differing` and `below` look at 64 elements at once and return one bit per element; LLVM makes vector compares of them.
The others are an instruction or a few. Nothing here checks bounds: the callers do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rose.numba_cache import NumbaCache

CODEC = NumbaCache(Path(__file__).parent, "codec")
entry, inner, inlined = CODEC.entry, CODEC.inner, CODEC.inlined  # decorators of the compiled functions

LANES = 64

# Any, because the types of compiled code are numba's to infer, not the checker's.
whole: Any = np.int64
_intrinsic: Any = intrinsic
_I64 = ir.IntType(64)


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any, wide: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), wide.as_pointer())


@_intrinsic
def trailing_zeros(_typing: Any, value: Any) -> Any:
    """Return how many zeros are below the lowest one of an int64; 64 for zero."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), emit


@_intrinsic
def leading_zeros(_typing: Any, value: Any) -> Any:
    """Return how many zeros are above the highest one of an int64; 64 for zero."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), emit


@_intrinsic
def differing(_typing: Any, left: Any, right: Any, index: Any) -> Any:
    """Return which of the 64 elements from `index` on differ, the first in the lowest bit."""
    lanes = ir.VectorType(ir.IntType(left.dtype.bitwidth), LANES)
    align = left.dtype.bitwidth // 8

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places = [_address(context, builder, signature.args[i], arguments[i], arguments[2], lanes) for i in (0, 1)]
        values = [builder.load(place, align=align) for place in places]
        return builder.bitcast(builder.icmp_unsigned("!=", *values), _I64)

    return types.int64(left, right, types.int64), emit


@_intrinsic
def below(_typing: Any, array: Any, index: Any, mask: Any, bound: Any) -> Any:
    """Return which of the 64 masked elements from `index` on are below `bound`; both in half of the type's range."""
    width = array.dtype.bitwidth
    lanes = ir.VectorType(ir.IntType(width), LANES)

    def splat(builder: Any, value: Any) -> Any:
        none = ir.Constant(lanes, ir.Undefined)
        first = builder.insert_element(none, builder.trunc(value, lanes.element), ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _address(context, builder, signature.args[0], arguments[0], arguments[1], lanes)
        values = builder.and_(builder.load(place, align=width // 8), splat(builder, arguments[2]))
        return builder.bitcast(builder.icmp_signed("<", values, splat(builder, arguments[3])), _I64)

    return types.int64(array, types.int64, types.int64, types.int64), emit


@_intrinsic
def ones(_typing: Any, value: Any) -> Any:
    """Return how many bits of an int64 are set."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.int64), emit


@_intrinsic
def load_word(_typing: Any, data: Any, offset: Any) -> Any:
    """Return eight bytes from any offset, the first one lowest."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_address(context, builder, signature.args[0], arguments[0], arguments[1], _I64), align=1)

    return types.int64(data, types.int64), emit


@_intrinsic
def store_word(_typing: Any, data: Any, offset: Any, value: Any) -> Any:
    """Store eight bytes at any offset, the lowest one first."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _address(context, builder, signature.args[0], arguments[0], arguments[1], _I64)
        builder.store(arguments[2], place, align=1)
        return context.get_dummy_value()

    return types.void(data, types.int64, types.int64), emit
