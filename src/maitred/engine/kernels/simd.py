"""One explicit SIMD primitive for Numba: a few rows of weights times a strip of a matrix.

Attention over a block of cached tokens is twice the same small product. Scores are ``queries [g, head_dim] x keys
[head_dim, tokens]``, and the answer is ``probabilities [g, tokens] x values [tokens, head_dim]``. Written as Numba
loops, the compiler cannot see that the arrays do not overlap and leaves much of it scalar. So the inner tile is
emitted as LLVM vector instructions: a strip as wide as a vector register, every matrix element loaded once for all
query heads that share it, and all sums kept in registers.
"""

# ruff: noqa: ANN401 - values of the code generator have no types of their own

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

EDITION = 4
"""Raise it with every change to this file. Numba's cache on disk watches the file of a kernel, not what it uses."""

_FLOAT = ir.FloatType()
_INT8 = ir.IntType(8)
_INT16 = ir.IntType(16)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_weighted_rows(
    typing_context: Any,
    weights: Any,
    weights_at: Any,
    weights_stride: Any,
    matrix: Any,
    matrix_at: Any,
    matrix_stride: Any,
    count: Any,
    sums: Any,
    sums_at: Any,
    sums_stride: Any,
    group: Any,
    lanes: Any,
    unroll: Any,
) -> Any:
    """``sums[g, :lanes] += Σ_i weights[g, i] * matrix[i, :lanes]`` for ``g < group`` and ``i < count``.

    Arrays are flat, ``x_at`` is the first element and ``x_stride`` the distance of rows. `weights` and `sums` are
    fp32; `matrix` is fp32, int8, or the bits of bf16 as uint16. `group`, `lanes` and `unroll` must be constants, and
    `count` a multiple of `unroll`, the number of independent sums per vector (they hide the latency of multiply-adds).
    """
    constants = (group, lanes, unroll)
    if not all(isinstance(constant, types.IntegerLiteral) for constant in constants):
        return None
    group_size, width, unrolled = (constant.literal_value for constant in constants)
    signature = types.void(
        *(weights, types.intp, types.intp, matrix, types.intp, types.intp, types.intp, sums, types.intp, types.intp),
        *constants,
    )

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights_from = _pointer(context, builder, weights, arguments[0], arguments[1])
        matrix_from = _pointer(context, builder, matrix, arguments[3], arguments[4])
        sums_from = _pointer(context, builder, sums, arguments[7], arguments[8])
        weights_step, matrix_step, rows, sums_step = arguments[2], arguments[5], arguments[6], arguments[9]
        vector = ir.VectorType(_FLOAT, width)
        multiply_add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{width}f32"
        )
        zero, one = ir.Constant(vector, [0.0] * width), ir.Constant(vector, [1.0] * width)
        partial = {(g, u): cgutils.alloca_once_value(builder, zero) for g in range(group_size) for u in range(unrolled)}
        with cgutils.for_range(builder, builder.udiv(rows, _INT64(unrolled))) as loop:
            for u in range(unrolled):
                row = builder.add(builder.mul(loop.index, _INT64(unrolled)), _INT64(u))
                strip = _load(builder, builder.gep(matrix_from, [builder.mul(row, matrix_step)]), matrix.dtype, vector)
                for g in range(group_size):
                    index = builder.add(builder.mul(weights_step, _INT64(g)), row)
                    weight = _splat(builder, builder.load(builder.gep(weights_from, [index])), vector)
                    total = builder.load(partial[g, u])
                    builder.store(builder.call(multiply_add, [weight, strip, total]), partial[g, u])
        for g in range(group_size):
            place = builder.gep(sums_from, [builder.mul(sums_step, _INT64(g))])
            place = builder.bitcast(place, vector.as_pointer())
            total = builder.load(place, align=4)
            for u in range(unrolled):
                # A plain sum would get the kernel's leave to reorder, and its order would depend on the group.
                total = builder.call(multiply_add, [one, builder.load(partial[g, u]), total])
            builder.store(total, place, align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def scale_strip(typing_context: Any, numbers: Any, at: Any, scales: Any, scales_at: Any, lanes: Any) -> Any:
    """``numbers[:lanes] *= scales[:lanes]``, of flat fp32 arrays, `lanes` a constant."""
    if not isinstance(lanes, types.IntegerLiteral):
        return None
    vector = ir.VectorType(_FLOAT, lanes.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _pointer(context, builder, numbers, arguments[0], arguments[1])
        place = builder.bitcast(place, vector.as_pointer())
        factors = _pointer(context, builder, scales, arguments[2], arguments[3])
        factors = builder.load(builder.bitcast(factors, vector.as_pointer()), align=4)
        builder.store(builder.fmul(builder.load(place, align=4), factors), place, align=4)
        return context.get_dummy_value()

    return types.void(numbers, types.intp, scales, types.intp, lanes), generate


@intrinsic  # type: ignore[untyped-decorator]
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    """The fp32 number that an int32 spells."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def narrowed(typing_context: Any, number: Any, array: Any) -> Any:
    """An fp32 number as `array` holds it: itself, or, for uint16, the bits of the nearest bf16 (ties to even)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if array.dtype == types.float32:
            return arguments[0]
        bits = builder.bitcast(arguments[0], _INT32)
        odd = builder.and_(builder.lshr(bits, _INT32(16)), _INT32(1))
        rounded = builder.add(bits, builder.add(odd, _INT32(0x7FFF)))
        return builder.trunc(builder.lshr(rounded, _INT32(16)), _INT16)

    return array.dtype(types.float32, array), generate


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, value=array).data, [at])


def _load(builder: Any, place: Any, dtype: Any, vector: Any) -> Any:
    """A strip as fp32; bf16 is the upper half of an fp32 number."""
    if dtype == types.float32:
        return builder.load(builder.bitcast(place, vector.as_pointer()), align=4)
    wide = ir.VectorType(_INT32, vector.count)
    if dtype == types.int8:
        bytes_ = builder.load(builder.bitcast(place, ir.VectorType(_INT8, vector.count).as_pointer()), align=1)
        return builder.sitofp(builder.sext(bytes_, wide), vector)
    halves = builder.load(builder.bitcast(place, ir.VectorType(_INT16, vector.count).as_pointer()), align=2)
    bits = builder.shl(builder.zext(halves, wide), ir.Constant(wide, [16] * vector.count))
    return builder.bitcast(bits, vector)


def _splat(builder: Any, scalar: Any, vector: Any) -> Any:
    """The same number in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, _INT32(0))
    return builder.shuffle_vector(
        first, undefined, ir.Constant(ir.VectorType(_INT32, vector.count), [0] * vector.count)
    )
