"""Explicit SIMD primitives for Numba, mainly a few rows of weights times a strip of a matrix.

Attention over a block of cached tokens consists of two small products of the same form. Scores are ``queries [g,
head_dim] x keys
[head_dim, tokens]``, and the answer is ``probabilities [g, tokens] x values [tokens, head_dim]``. Written as Numba
loops, the compiler cannot see that the arrays do not overlap and leaves much of it scalar. So the inner tile is emitted
as LLVM vector instructions. Strips are one or two vector registers wide, and every matrix element is loaded once for as
many query heads as have their sums in registers.
"""

# ruff: noqa: ANN401 - values of the code generator have no types of their own

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

EDITION = 9
"""Version of the emitted code; raise it with every change to this file.

Numba's cache on disk checks only the file of a kernel, not the files that it uses.
"""

_LOG2_E = float(np.float32(1.4426950408889634))
_LN_2_HIGH, _LN_2_LOW = float(np.float32(0.693359375)), float(np.float32(-2.12194440e-4))
_POLYNOMIAL = tuple(
    float(np.float32(coefficient))
    for coefficient in (
        1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
    )
)  # fmt: skip
"""Coefficients of (e**r - 1 - r) / r**2, highest power first."""

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
    at_once: Any,
    lanes: Any,
    unroll: Any,
    strips: Any,
    matrix_hop: Any,
    sums_hop: Any,
) -> Any:
    """``sums[g, :lanes] += Σ_i weights[g, i] * matrix[i, :lanes]`` for ``g < group`` and ``i < count``.

    Arrays are flat, ``x_at`` is the first element and ``x_stride`` the distance of rows. `weights` and `sums` are
    fp32; `matrix` is fp32, int8, or the bits of bf16 as uint16. `group`, `at_once`, `lanes`, `unroll` and `strips` must
    be constants, and `count` a multiple of `unroll`, the number of independent sums per vector (they hide the latency
    of multiply-adds). `at_once` is how many of the group are summed up together, the others after them; it changes no
    result.

    Further `strips` are computed likewise: they are `matrix_hop` elements apart, and their sums `sums_hop` elements.
    Each weight is loaded once for all of them; the order of a sum is the same.
    """
    constants = (group, at_once, lanes, unroll, strips)
    if not all(isinstance(constant, types.IntegerLiteral) for constant in constants):
        return None
    group_size, together, width, unrolled, abreast = (constant.literal_value for constant in constants)
    signature = types.void(
        *(weights, types.intp, types.intp, matrix, types.intp, types.intp, types.intp, sums, types.intp, types.intp),
        *(*constants, types.intp, types.intp),
    )

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights_from = _pointer(context, builder, weights, arguments[0], arguments[1])
        matrix_from = _pointer(context, builder, matrix, arguments[3], arguments[4])
        sums_from = _pointer(context, builder, sums, arguments[7], arguments[8])
        weights_step, matrix_step, rows, sums_step = arguments[2], arguments[5], arguments[6], arguments[9]
        matrix_hop, sums_hop = arguments[15], arguments[16]
        vector = ir.VectorType(_FLOAT, width)
        multiply_add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{width}f32"
        )
        zero, one = ir.Constant(vector, [0.0] * width), ir.Constant(vector, [1.0] * width)

        def add(part: range) -> None:
            partial = {
                (g, u, k): cgutils.alloca_once_value(builder, zero)
                for g in part
                for u in range(unrolled)
                for k in range(abreast)
            }
            with cgutils.for_range(builder, builder.udiv(rows, _INT64(unrolled))) as loop:
                for u in range(unrolled):
                    row = builder.add(builder.mul(loop.index, _INT64(unrolled)), _INT64(u))
                    first = builder.mul(row, matrix_step)
                    places = (builder.add(first, builder.mul(matrix_hop, _INT64(k))) for k in range(abreast))
                    side = [_load(builder, builder.gep(matrix_from, [at]), matrix.dtype, vector) for at in places]
                    for g in part:
                        index = builder.add(builder.mul(weights_step, _INT64(g)), row)
                        weight = _splat(builder, builder.load(builder.gep(weights_from, [index])), vector)
                        for k, strip in enumerate(side):
                            total = builder.load(partial[g, u, k])
                            builder.store(builder.call(multiply_add, [weight, strip, total]), partial[g, u, k])
            for g in part:
                for k in range(abreast):
                    at = builder.add(builder.mul(sums_step, _INT64(g)), builder.mul(sums_hop, _INT64(k)))
                    place = builder.bitcast(builder.gep(sums_from, [at]), vector.as_pointer())
                    total = builder.load(place, align=4)
                    for u in range(unrolled):
                        # A plain sum would get the kernel's leave to reorder, and its order depend on the group.
                        total = builder.call(multiply_add, [one, builder.load(partial[g, u, k]), total])
                    builder.store(total, place, align=4)

        parts = -(-group_size // together)
        for i in range(parts):
            add(range(i * group_size // parts, (i + 1) * group_size // parts))
        return context.get_dummy_value()

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def copy_numbers(typing_context: Any, target: Any, target_at: Any, source: Any, source_at: Any, count: Any) -> Any:
    """Computes ``target[:count] = source[:count]`` of flat arrays that do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to = _pointer(context, builder, target, arguments[0], arguments[1])
        from_ = _pointer(context, builder, source, arguments[2], arguments[3])
        size = context.get_abi_sizeof(to.type.pointee)
        cgutils.raw_memcpy(builder, to, from_, arguments[4], size, align=size)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, types.intp), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def scale_strip(typing_context: Any, numbers: Any, at: Any, scales: Any, scales_at: Any, lanes: Any) -> Any:
    """Computes ``numbers[:lanes] *= scales[:lanes]`` of flat fp32 arrays, `lanes` a constant."""
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


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def softmax_strips(
    typing_context: Any, scores: Any, at: Any, padded: Any, first: Any, count: Any, scale: Any, lanes: Any
) -> Any:
    """Turns scores `first` to `count`, times `scale`, into probabilities in place, and zeroes all others to `padded`.

    `scores` is flat fp32, `padded` a multiple of the constant `lanes`. A lane adds up every ``lanes``-th number, and
    zeros change no sum. So the result depends on the scores alone, not on the length of the padding. If `first` is the
    constant 0, no code looks for it.
    """
    if not isinstance(lanes, types.IntegerLiteral):
        return None
    width = lanes.literal_value
    whole = isinstance(first, types.IntegerLiteral) and first.literal_value == 0
    vector, ints = ir.VectorType(_FLOAT, width), ir.VectorType(_INT32, width)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _pointer(context, builder, scores, arguments[0], arguments[1])
        strips = builder.udiv(arguments[2], _INT64(width))
        least = None if whole else _splat(builder, builder.trunc(arguments[3], _INT32), ints)
        count = _splat(builder, builder.trunc(arguments[4], _INT32), ints)
        scale = _splat(builder, arguments[5], vector)
        lowest, zero = ir.Constant(vector, [float("-inf")] * width), ir.Constant(vector, [0.0] * width)

        def strip(index: Any) -> tuple[Any, Any]:
            first = builder.mul(index, _INT64(width))
            numbers = builder.add(
                _splat(builder, builder.trunc(first, _INT32), ints), ir.Constant(ints, list(range(width)))
            )
            strip_at = builder.bitcast(builder.gep(place, [first]), vector.as_pointer())
            counts = builder.icmp_signed("<", numbers, count)
            if least is not None:
                counts = builder.and_(counts, builder.icmp_signed(">=", numbers, least))
            return strip_at, counts

        def over_strips(start: Any, step: Callable[[Any, Any, Any], Any]) -> Any:
            """Folds all strips into a vector; `step` gets an address, a mask and the vector so far."""
            folded = cgutils.alloca_once_value(builder, start)
            builder.store(start, folded)
            with cgutils.for_range(builder, strips) as loop:
                builder.store(step(*strip(loop.index), builder.load(folded)), folded)
            return builder.load(folded)

        def larger(one: Any, other: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        def look(strip_at: Any, counts: Any, highest: Any) -> Any:
            return larger(builder.select(counts, builder.load(strip_at, align=4), lowest), highest)

        highest = _across(builder, over_strips(lowest, look), larger)

        def weigh(strip_at: Any, counts: Any, total: Any) -> Any:
            below = builder.fmul(builder.fsub(builder.load(strip_at, align=4), highest), scale)
            weight = builder.select(counts, _exponential(builder, below), zero)
            builder.store(weight, strip_at, align=4)
            return builder.fadd(total, weight)

        total = _across(builder, over_strips(zero, weigh), builder.fadd)
        share = builder.fdiv(ir.Constant(vector, [1.0] * width), total)

        def divide(strip_at: Any, counts: Any, unused: Any) -> Any:
            builder.store(builder.fmul(builder.load(strip_at, align=4), share), strip_at, align=4)
            return unused

        over_strips(zero, divide)
        return context.get_dummy_value()

    signature = types.void(
        scores, types.intp, types.intp, first if whole else types.intp, types.intp, types.float32, lanes
    )
    return signature, generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def cap_strips(typing_context: Any, scores: Any, at: Any, padded: Any, scale: Any, cap: Any, lanes: Any) -> Any:
    """Replaces each score by ``cap * tanh(scale * score / cap)``, up to `padded`, as in `softmax_strips`."""
    if not isinstance(lanes, types.IntegerLiteral):
        return None
    width = lanes.literal_value
    vector = ir.VectorType(_FLOAT, width)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _pointer(context, builder, scores, arguments[0], arguments[1])
        cap = _splat(builder, arguments[4], vector)
        inner = _splat(builder, builder.fdiv(arguments[3], arguments[4]), vector)
        zero, one = ir.Constant(vector, [0.0] * width), ir.Constant(vector, [1.0] * width)
        with cgutils.for_range(builder, builder.udiv(arguments[2], _INT64(width))) as loop:
            strip_at = builder.gep(place, [builder.mul(loop.index, _INT64(width))])
            strip_at = builder.bitcast(strip_at, vector.as_pointer())
            x = builder.fmul(builder.load(strip_at, align=4), inner)
            negative = builder.fcmp_ordered("<", x, zero)
            below = builder.select(negative, x, builder.fsub(zero, x))
            # tanh |x| = (1 - e**-2|x|) / (1 + e**-2|x|): the exponential cannot overflow.
            away = _exponential(builder, builder.fadd(below, below))
            size = builder.fdiv(builder.fsub(one, away), builder.fadd(one, away))
            builder.store(
                builder.fmul(builder.select(negative, builder.fsub(zero, size), size), cap), strip_at, align=4
            )
        return context.get_dummy_value()

    return types.void(scores, types.intp, types.intp, types.float32, types.float32, lanes), generate


@intrinsic  # type: ignore[untyped-decorator]
def exponential(typing_context: Any, x: Any) -> Any:
    """Computes e**x for x <= 0 in fp32, in operations that vectorise.

    x = n ln 2 + r, ln 2 in two parts; a polynomial gives e**r, and n goes into the exponent's bits (Cephes' expf,
    Moshier, 1992).
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _exponential(builder, arguments[0])

    return types.float32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    """Reinterprets an int32 as an fp32 number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def narrow(typing_context: Any, number: Any, array: Any) -> Any:
    """Converts an fp32 number to the type of `array`: for uint16, the bits of the nearest bf16 (ties to even)."""

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
    """Loads a strip as fp32; bf16 is the upper half of an fp32 number."""
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
    """Broadcasts a number to all lanes of a vector."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, _INT32(0))
    return builder.shuffle_vector(
        first, undefined, ir.Constant(ir.VectorType(_INT32, vector.count), [0] * vector.count)
    )


def _across(builder: Any, numbers: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Reduces all lanes, and returns the result in every lane."""
    width = numbers.type.count
    while width > 1:
        width //= 2
        order = ir.Constant(ir.VectorType(_INT32, numbers.type.count), [i ^ width for i in range(numbers.type.count)])
        numbers = join(numbers, builder.shuffle_vector(numbers, numbers, order))
    return numbers


def _exponential(builder: Any, x: Any) -> Any:
    """Emits the code of `exponential`, for a number or a vector, without reordering operations."""
    kind = x.type
    lanes = kind.count if isinstance(kind, ir.VectorType) else 0
    whole = ir.VectorType(_INT32, lanes) if lanes else _INT32
    suffix = f"v{lanes}f32" if lanes else "f32"
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fma.{suffix}")
    round_down = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind]), f"llvm.floor.{suffix}")

    def all_(number: float, of: Any = kind) -> Any:
        return ir.Constant(of, [number] * lanes if lanes else number)

    def times(factor: Any, other: Any, addend: Any) -> Any:
        return builder.call(fma, [factor, other, addend])

    x = builder.select(builder.fcmp_unordered("<", x, all_(-87.0)), all_(-87.0), x)
    n = builder.call(round_down, [times(x, all_(_LOG2_E), all_(0.5))])
    r = times(n, all_(-_LN_2_LOW), times(n, all_(-_LN_2_HIGH), x))
    p = all_(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = times(p, r, all_(coefficient))
    p = builder.fadd(times(builder.fmul(p, r), r, r), all_(1.0))
    power = builder.shl(builder.add(builder.fptosi(n, whole), all_(127, whole)), all_(23, whole))
    return builder.fmul(p, builder.bitcast(power, kind))
