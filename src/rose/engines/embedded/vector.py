"""The inner loops that must be both fast and exact, as LLVM vector code for numba (docs/engine.md says why).

`tiles` emits rows of activations times panels of sixteen weight columns, with the sums in registers. Each output
element is one chain of fused multiply-adds over k in rising order; the other loops add sixteen partial sums in a fixed
order. So no element depends on the batch around it, bit for bit; no fast-math flag is set. Weights are float32, or
pairs of bf16 (two consecutive k in one 32-bit lane: low half, high half).

All addresses are integers, all strides are bytes. Lengths are multiples of 16; callers pad with zeros.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rose.numba_cache import NumbaCache

KERNELS = NumbaCache(Path(__file__).parent, "kernels")
entry, inner, callback = KERNELS.entry, KERNELS.inner, KERNELS.callback  # the decorators of the engine's functions

LANES = 8
PANEL = 16  # columns of one panel: two vectors

_F32 = ir.FloatType()
_I8 = ir.IntType(8)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VF = ir.VectorType(_F32, LANES)
_VI = ir.VectorType(_I32, LANES)
_VECTOR_BYTES = LANES * 4


def _i64(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _splat_f(value: float) -> ir.Constant:
    return ir.Constant(_VF, [value] * LANES)


def _splat_i(value: int) -> ir.Constant:
    return ir.Constant(_VI, [value] * LANES)


class _Emitter:
    """Vector operations on one builder."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        module = self.b.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.b.call(function, list(arguments))

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.call("llvm.fma.v8f32", _VF, x, y, z)

    def at(self, address: Any, offset: int, kind: Any) -> Any:
        return self.b.inttoptr(self.b.add(address, _i64(offset)) if offset else address, kind.as_pointer())

    def load(self, address: Any, offset: int = 0, kind: Any = _VF) -> Any:
        return self.b.load(self.at(address, offset, kind), align=4)

    def store(self, value: Any, address: Any, offset: int = 0) -> None:
        self.b.store(value, self.at(address, offset, value.type), align=4)

    def prefetch(self, address: Any, offset: int) -> None:
        line = self.at(address, offset, _I8)
        self.call("llvm.prefetch.p0", ir.VoidType(), line, *[ir.Constant(_I32, flag) for flag in (0, 3, 1)])

    def splat(self, scalar: Any) -> Any:
        first = self.b.insert_element(ir.Constant(_VF, ir.Undefined), scalar, ir.Constant(_I32, 0))
        return self.b.shuffle_vector(first, ir.Constant(_VF, ir.Undefined), ir.Constant(_VI, [0] * LANES))

    def loop(self, count: Any, step: int, start: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """Emit a loop that carries `start` through `body`; `count` is at least `step` and a multiple of it."""
        b, before = self.b, self.b.block
        head, after = b.append_basic_block("loop"), b.append_basic_block("after")
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(_I64)
        index.add_incoming(_i64(0), before)
        carried = []
        for value in start:
            phi = b.phi(value.type)
            phi.add_incoming(value, before)
            carried.append(phi)
        results = body(index, list(carried))
        following = b.add(index, _i64(step))
        index.add_incoming(following, b.block)
        for phi, value in zip(carried, results, strict=True):
            phi.add_incoming(value, b.block)
        b.cbranch(b.icmp_signed("<", following, count), head, after)
        b.position_at_end(after)
        return results

    def lane_sum(self, low: Any, high: Any) -> Any:
        """Add sixteen lanes, always in the same order."""
        total = self.b.fadd(low, high)
        for width in (4, 2, 1):
            mask = ir.Constant(_VI, [(lane + width) % LANES for lane in range(LANES)])
            total = self.b.fadd(total, self.b.shuffle_vector(total, ir.Constant(_VF, ir.Undefined), mask))
        return self.b.extract_element(total, ir.Constant(_I32, 0))

    def lane_max(self, values: Any) -> Any:
        for width in (4, 2, 1):
            mask = ir.Constant(_VI, [(lane + width) % LANES for lane in range(LANES)])
            values = self.maximum(values, self.b.shuffle_vector(values, ir.Constant(_VF, ir.Undefined), mask))
        return self.b.extract_element(values, ir.Constant(_I32, 0))

    def maximum(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def minimum(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered("<", x, y), x, y)

    def exp(self, x: Any) -> Any:
        """Return e**x within 2 units in the last place: 2**n times a polynomial on [-ln2/2, ln2/2].

        Below -87 the result is exactly zero, so that masked attention scores weigh nothing.
        """
        b = self.b
        tiny = b.fcmp_ordered("<", x, _splat_f(-87.0))
        x = self.minimum(self.maximum(x, _splat_f(-87.0)), _splat_f(88.0))
        magic = _splat_f(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
        n = b.fsub(self.fma(x, _splat_f(1.4426950408889634), magic), magic)
        r = self.fma(n, _splat_f(-0.693359375), x)
        r = self.fma(n, _splat_f(2.12194440e-4), r)
        p = _splat_f(1.9875691500e-4)
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.fma(p, r, _splat_f(coefficient))
        p = b.fadd(self.fma(p, b.fmul(r, r), r), _splat_f(1.0))
        exponent = b.shl(b.add(b.fptosi(n, _VI), _splat_i(127)), _splat_i(23))
        return b.select(tiny, _splat_f(0.0), b.fmul(p, b.bitcast(exponent, _VF)))


def _call_own_function(builder: Any, name: str, emit: Callable[..., Any], result: Any, values: list[Any]) -> Any:
    """Call `emit`'s code as a function of its own, so that loops do not share, and spill, each other's registers."""
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [value.type for value in values]), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        body = ir.IRBuilder(function.append_basic_block("entry"))
        returned = emit(_Emitter(body), *function.args)
        if returned is None:
            body.ret_void()
        else:
            body.ret(returned)
    return builder.call(function, values)


def _intrinsic(signature: Any, codegen: Callable[..., Any]) -> Any:
    def kernel(_typing: Any, *_arguments: Any) -> Any:
        return signature, codegen

    # numba counts arguments by the signature, and takes a starred one for a tuple.
    names = ["_typing", *(f"argument_{i}" for i in range(len(signature.args)))]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    kernel.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(kernel)


def _kernel(name: str, arguments: str, emit: Callable[..., Any], result: Any = types.void) -> Any:
    """Make a numba intrinsic from an emitter; `arguments` has one letter per argument: i integer, f float."""
    kinds = {"i": types.int64, "f": types.float32}
    signature = result(*[kinds[letter] for letter in arguments])

    def codegen(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.VoidType() if result == types.void else _F32
        returned = _call_own_function(builder, f"rose_{name}", emit, kind, values)
        return context.get_dummy_value() if result == types.void else returned

    return _intrinsic(signature, codegen)


def _emit_tile(rows: int, panels: int, bf16: bool) -> Callable[..., None]:
    vectors = 2 * panels

    def weights(e: _Emitter, base: Any) -> tuple[list[Any], list[Any]]:
        """Return the vectors of one panel for two consecutive k."""
        if not bf16:
            return [e.load(base, 32 * v) for v in range(2)], [e.load(base, 64 + 32 * v) for v in range(2)]
        pairs = [e.load(base, 32 * v, _VI) for v in range(2)]
        even = [e.b.bitcast(e.b.shl(pair, _splat_i(16)), _VF) for pair in pairs]
        odd = [e.b.bitcast(e.b.and_(pair, _splat_i(-65536)), _VF) for pair in pairs]
        return even, odd

    def emit(e: _Emitter, a: Any, a_stride: Any, w: Any, w_stride: Any, k: Any, start: Any, s_stride: Any, c: Any,
             c_stride: Any, ahead: Any) -> None:  # fmt: skip
        b = e.b
        a_rows = [b.add(a, b.mul(a_stride, _i64(row))) for row in range(rows)]
        c_rows = [b.add(c, b.mul(c_stride, _i64(row))) for row in range(rows)]
        s_rows = [b.add(start, b.mul(s_stride, _i64(row))) for row in range(rows)]
        w_panels = [b.add(w, b.mul(w_stride, _i64(panel))) for panel in range(panels)]

        def body(index: Any, sums: list[Any]) -> list[Any]:
            k_bytes = b.mul(index, _i64(4))
            w_bytes = b.mul(index, _i64(32 if bf16 else 64))
            for p, panel in enumerate(w_panels):
                address = b.add(panel, w_bytes)
                for line in range(0, 64 if bf16 else 128, 64):
                    e.prefetch(b.add(address, ahead), line)
                for parity, columns in enumerate(weights(e, address)):
                    for row in range(rows):
                        x = e.splat(e.load(b.add(a_rows[row], k_bytes), 4 * parity, _F32))
                        for v in range(2):
                            at = row * vectors + 2 * p + v
                            sums[at] = e.fma(x, columns[v], sums[at])
            return sums

        first = [e.load(row, _VECTOR_BYTES * v) for row in s_rows for v in range(vectors)]
        sums = e.loop(k, 2, first, body)
        for row in range(rows):
            for v in range(vectors):
                e.store(sums[row * vectors + v], c_rows[row], _VECTOR_BYTES * v)

    return emit


def tiles(panels_by_rows: dict[int, int], bf16: bool) -> Any:
    """Return the kernel of c = start + a @ w for one tile; its first argument picks the tile by its rows.

    Arguments: rows, a, a_stride, w, w_stride (from panel to panel), k (even), start, start_stride, c, c_stride,
    ahead (bytes from these weights to those needed next, which are fetched meanwhile).
    """
    kind = "bf16" if bf16 else "f32"

    def emit(e: _Emitter, rows: Any, *rest: Any) -> None:
        b = e.b
        after = b.append_basic_block("done")
        switch = b.switch(rows, after)
        for count, panels in panels_by_rows.items():
            case = b.append_basic_block(f"rows{count}")
            switch.add_case(_i64(count), case)
            b.position_at_end(case)
            name = f"rose_tile_{kind}_{count}_{panels}"
            _call_own_function(b, name, _emit_tile(count, panels, bf16), ir.VoidType(), list(rest))
            b.branch(after)
        b.position_at_end(after)

    widest = max(panels_by_rows.values())
    return _kernel(f"tiles_{kind}_{widest}", "i" * 11, emit)


def _emit_norm(e: _Emitter, x: Any, weight: Any, out: Any, n: Any, packed: Any) -> None:
    b = e.b

    def add_squares(index: Any, sums: list[Any]) -> list[Any]:
        base = b.add(x, b.mul(index, _i64(4)))
        low, high = e.load(base), e.load(base, 32)
        return [e.fma(low, low, sums[0]), e.fma(high, high, sums[1])]

    low, high = e.loop(n, PANEL, [_splat_f(0.0), _splat_f(0.0)], add_squares)
    inverse_n, eps = e.load(packed, 0, _F32), e.load(packed, 4, _F32)
    mean = b.fadd(b.fmul(e.lane_sum(low, high), inverse_n), eps)
    scale = e.splat(b.fdiv(ir.Constant(_F32, 1.0), e.call("llvm.sqrt.f32", _F32, mean)))

    def scale_row(index: Any, _: list[Any]) -> list[Any]:
        offset = b.mul(index, _i64(4))
        for half in (0, 32):
            scaled = b.fmul(e.load(b.add(x, offset), half), scale)
            e.store(b.fmul(scaled, e.load(b.add(weight, offset), half)), b.add(out, offset), half)
        return []

    e.loop(n, PANEL, [], scale_row)


def _emit_silu_multiply(e: _Emitter, gate: Any, up: Any, out: Any, n: Any) -> None:
    b = e.b

    def body(index: Any, _: list[Any]) -> list[Any]:
        offset = b.mul(index, _i64(4))
        for half in (0, 32):
            x = e.load(b.add(gate, offset), half)
            sigmoid = b.fdiv(_splat_f(1.0), b.fadd(_splat_f(1.0), e.exp(b.fsub(_splat_f(0.0), x))))
            e.store(b.fmul(b.fmul(x, sigmoid), e.load(b.add(up, offset), half)), b.add(out, offset), half)
        return []

    e.loop(n, PANEL, [], body)


def _emit_softmax(e: _Emitter, x: Any, out: Any, n: Any, scale: Any) -> Any:
    b = e.b

    def largest(index: Any, best: list[Any]) -> list[Any]:
        base = b.add(x, b.mul(index, _i64(4)))
        return [e.maximum(e.load(base), best[0]), e.maximum(e.load(base, 32), best[1])]

    lowest = _splat_f(-3.0e38)
    low, high = e.loop(n, PANEL, [lowest, lowest], largest)
    top, factor = e.splat(e.lane_max(e.maximum(low, high))), e.splat(scale)

    def exponentiate(index: Any, sums: list[Any]) -> list[Any]:
        offset = b.mul(index, _i64(4))
        results = []
        for half in range(2):
            difference = b.fmul(b.fsub(e.load(b.add(x, offset), 32 * half), top), factor)
            value = e.exp(difference)
            e.store(value, b.add(out, offset), 32 * half)
            results.append(b.fadd(sums[half], value))
        return results

    low, high = e.loop(n, PANEL, [_splat_f(0.0), _splat_f(0.0)], exponentiate)
    return e.lane_sum(low, high)


# Arguments: x, weight, out, n, address of two floats (1 / real length, epsilon).
rms_norm = _kernel("rms_norm", "iiiii", _emit_norm)
# Arguments: gate, up, out, n.
silu_multiply = _kernel("silu_multiply", "iiii", _emit_silu_multiply)
# Arguments: x, out, n, scale; out = exp((x - max) * scale), returns the sum of out.
exp_and_sum = _kernel("exp_and_sum", "iiif", _emit_softmax, types.float32)


def _call_codegen(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
    kind = ir.FunctionType(ir.VoidType(), [_I64] * (len(values) - 1))
    builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
    return context.get_dummy_value()


# Calls a compiled function of twelve integers by its address, given first. Callers then neither link nor optimise
# its code again, which is most of what compiling them would cost.
call_at = _intrinsic(types.void(*[types.int64] * 13), _call_codegen)
