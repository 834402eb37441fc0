"""The inner tile of a quantised product, as LLVM vector instructions: a few rows times a panel of outputs.

A weight is kept in panels of `PANEL` outputs, a panel as steps of 64-byte vectors, 16 outputs to a vector. Of 8-bit
weights, a step is four consecutive inputs, side by side; of 4-bit weights it is eight, the first four in the lower
halves of the bytes; of fp32 weights it is one. So a panel is read from its beginning to its end, each weight is loaded
once for all rows of the tile, and each input once for all outputs.

Rows are either signed bytes, multiplied with the weights' unsigned ones four at a time and added up to 32 bits without
rounding (``VPDPBUSD`` of AVX-512 VNNI, or ``VPMADDWD`` on halves of them, in Intel's manual), or fp32, multiplied with
weights that are converted on the way. The order of every sum that rounds is spelled out and is the same for tiles of
all heights. So a row's result does not depend on the rows beside it, to the last bit.
"""

# ruff: noqa: ANN401 - values of the code generator have no types of their own

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from maitred.engine.kernels.linear.dots import PAIRS, VNNI

LANES, VECTORS = 16, 4
PANEL = LANES * VECTORS
"""Outputs that a tile computes together."""
MOST_ROWS = 6
"""Rows of a tile whose sums, with a panel's vectors, fit into 32 registers."""
EDITION = 3
"""Raise it with every change to this file. Numba's cache on disk watches the file of a kernel, not what it uses."""

_HALF, _INT, _LONG, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTS, _FLOATS, _HALVES = (ir.VectorType(element, LANES) for element in (_INT, _FLOAT, _HALF))

Sums = dict[tuple[int, int], Any]


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def integer_tile(
    typing_context: Any,
    height: Any,
    rows_at: Any,
    row_bytes: Any,
    row_scales_at: Any,
    row_sums_at: Any,
    weights_at: Any,
    scales_at: Any,
    bias_at: Any,
    out_at: Any,
    out_bytes: Any,
    outputs: Any,
    groups: Any,
    steps: Any,
    ahead_at: Any,
    bits: Any,
    dot: Any,
) -> Any:
    """Computes `height` rows of signed bytes, at most `MOST_ROWS`.

    ::

        out[r, o] = row_scale[r] * Σ_g (scale[g, o] * Σ_k row[r, k] * weight[o, k] - offset[g, o] * row_sum[r, g])
                    + bias[o]

    All but the constants `bits` and `dot` (see `maitred.engine.kernels.linear.dots`) are addresses and counts. 8-bit
    weights have one fp32 scale for each output, and an offset of 128 scales; 4-bit ones have scales, then offsets, in
    bf16 for each group of `steps` steps. At each step, one cache line of `ahead_at` is fetched into the second-level
    cache.
    """
    narrow, way = bits.literal_value == 4, dot.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _for_each_height(builder, arguments[0], lambda rows: _integer(builder, rows, narrow, way, *arguments[1:14]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 14, bits, dot), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def real_tile(
    typing_context: Any,
    height: Any,
    rows_at: Any,
    row_bytes: Any,
    weights_at: Any,
    scales_at: Any,
    bias_at: Any,
    out_at: Any,
    out_bytes: Any,
    outputs: Any,
    groups: Any,
    steps: Any,
    bits: Any,
) -> Any:
    """The same for fp32 rows: ``out[r, o] = Σ_k row[r, k] * (scale[g, o] * weight[o, k] - offset[g, o]) + bias[o]``.

    Rows must be as long as the groups are, with zeros at the end. Weights may have 32 bits, too, and a scale of 1.
    """
    kind = bits.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _for_each_height(builder, arguments[0], lambda rows: _real(builder, rows, kind, *arguments[1:11]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11, bits), generate


def _for_each_height(builder: Any, height: Any, emit: Callable[[int], None]) -> None:
    """Code for every height that a tile can have."""
    for rows in range(1, MOST_ROWS + 1):
        with builder.if_then(builder.icmp_signed("==", height, _LONG(rows))):
            emit(rows)


def _integer(
    builder: Any, height: int, narrow: bool, way: int, row: Any, row_step: Any, row_scales: Any, row_sums: Any,
    weight: Any, scales: Any, bias: Any, out: Any, out_step: Any, outputs: Any, groups: Any, steps: Any, ahead: Any,
) -> None:  # fmt: skip
    tile, dot, quads = Tile(builder, height), _dot(builder, way), 2 if narrow else 1
    fetch = prefetch(builder)
    totals, sums = tile.zeros(_FLOATS), tile.zeros(_INTS)
    with cgutils.for_range(builder, groups) as group:

        def row_sum(r: int) -> Any:
            index = builder.add(builder.mul(groups, _LONG(r)), group.index)
            return builder.load(element(builder, row_sums, _INT, index))

        for r in range(height):
            start = splat(builder, _INT(0) if narrow else builder.mul(row_sum(r), _INT(-128)), _INTS)
            for v in range(VECTORS):
                builder.store(start, sums[r, v])
        first = builder.mul(group.index, steps)
        with cgutils.for_range(builder, steps) as loop:
            step = builder.add(first, loop.index)
            vectors = tile.weights(weight, step)
            fetch(builder.add(ahead, builder.mul(step, _LONG(64))))
            offset = builder.add(row, builder.mul(step, _LONG(4 * quads)))
            for quad in range(quads):
                unsigned = [_nibbles(builder, vector, quad) for vector in vectors] if narrow else vectors
                for r in range(height):
                    at = builder.add(offset, builder.mul(row_step, _LONG(r)))
                    signed = splat(builder, builder.load(element(builder, at, _INT, quad), align=4), _INTS)
                    for v in range(VECTORS):
                        builder.store(dot(builder.load(sums[r, v]), unsigned[v], signed), sums[r, v])
        for r in range(height):
            less = splat(builder, builder.sitofp(builder.neg(row_sum(r)), _FLOAT), _FLOATS)
            for v in range(VECTORS):
                scale, offset = _scale_and_offset(builder, scales, group.index, v, narrow)
                total = builder.load(totals[r, v])
                total = tile.fma(builder.sitofp(builder.load(sums[r, v]), _FLOATS), scale, total)
                builder.store(tile.fma(less, offset, total) if narrow else total, totals[r, v])
    store = _masked_store(builder, outputs)
    for r, v in totals:
        row_scale = splat(builder, builder.load(element(builder, row_scales, _FLOAT, r)), _FLOATS)
        addend = builder.load(element(builder, bias, _FLOATS, v), align=4)
        result = tile.fma(builder.load(totals[r, v]), row_scale, addend)
        store(result, builder.add(out, builder.mul(out_step, _LONG(r))), v)


def _real(
    builder: Any, height: int, bits: int, row: Any, row_step: Any, weight: Any, scales: Any, bias: Any, out: Any,
    out_step: Any, outputs: Any, groups: Any, steps: Any,
) -> None:  # fmt: skip
    tile, narrow, inputs = Tile(builder, height), bits == 4, 32 // bits
    sums = tile.zeros(_FLOATS)
    with cgutils.for_range(builder, groups) as group:
        factors = [_scale_and_offset(builder, scales, group.index, v, narrow) for v in range(VECTORS)]
        first = builder.mul(group.index, steps)
        with cgutils.for_range(builder, steps) as loop:
            step = builder.add(first, loop.index)
            vectors = tile.weights(weight, step)
            offset = builder.add(row, builder.mul(step, _LONG(4 * inputs)))
            for k in range(inputs):
                values = []
                for vector, (scale, shift) in zip(vectors, factors, strict=True):
                    if narrow:
                        whole = builder.and_(builder.lshr(vector, _all(8 * (k % 4) + 4 * (k // 4))), _all(15))
                        values.append(tile.fma(builder.sitofp(whole, _FLOATS), scale, builder.fneg(shift)))
                    elif bits == 32:
                        values.append(builder.bitcast(vector, _FLOATS))
                    else:
                        whole = builder.and_(builder.lshr(vector, _all(8 * k)), _all(255))
                        values.append(builder.sitofp(builder.sub(whole, _all(128)), _FLOATS))
                for r in range(height):
                    at = builder.add(offset, builder.mul(row_step, _LONG(r)))
                    number = splat(builder, builder.load(element(builder, at, _FLOAT, k), align=4), _FLOATS)
                    for v in range(VECTORS):
                        builder.store(tile.fma(number, values[v], builder.load(sums[r, v])), sums[r, v])
    store = _masked_store(builder, outputs)
    for r, v in sums:
        addend = builder.load(element(builder, bias, _FLOATS, v), align=4)
        scale = _all_ones() if narrow else _scale_and_offset(builder, scales, _LONG(0), v, narrow)[0]
        result = tile.fma(builder.load(sums[r, v]), scale, addend)
        store(result, builder.add(out, builder.mul(out_step, _LONG(r))), v)


class Tile:
    """What all kinds of tiles are made with."""

    def __init__(self, builder: Any, height: int, vectors: int = VECTORS) -> None:
        self._builder = builder
        self.height, self.vectors = height, vectors
        self._places = [(r, v) for r in range(height) for v in range(vectors)]
        self._fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), "llvm.fma.v16f32"
        )

    def zeros(self, vector: Any) -> Sums:
        """One sum for each row and vector of outputs."""
        zero = ir.Constant(vector, None)
        return {place: cgutils.alloca_once_value(self._builder, zero) for place in self._places}

    def weights(self, weight: Any, step: Any) -> list[Any]:
        """The panel's weights of one step."""
        at = self._builder.add(weight, self._builder.mul(step, _LONG(64 * VECTORS)))
        return [self._builder.load(element(self._builder, at, _INTS, _LONG(v)), align=64) for v in range(VECTORS)]

    def fma(self, factor: Any, other: Any, addend: Any) -> Any:
        """Rounded once."""
        return self._builder.call(self._fma, [factor, other, addend])


def _all(number: int) -> Any:
    return ir.Constant(_INTS, [number] * LANES)


def _all_ones() -> Any:
    return ir.Constant(_FLOATS, [1.0] * LANES)


def element(builder: Any, address: Any, kind: Any, index: Any) -> Any:
    """A pointer to an element, by its index, of what is at an address."""
    index = _LONG(index) if isinstance(index, int) else index
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


def splat(builder: Any, scalar: Any, vector: Any) -> Any:
    """The same number in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, _INT(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def prefetch(builder: Any) -> Callable[[Any], None]:
    """Has a cache line brought to the second-level cache."""
    number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [pointer, *[number] * 3]), "llvm.prefetch.p0"
    )
    read, second_level, data = number(0), number(2), number(1)

    def fetch(address: Any) -> None:
        builder.call(function, [builder.inttoptr(address, pointer), read, second_level, data])

    return fetch


def _nibbles(builder: Any, vector: Any, upper: int) -> Any:
    """The lower or the upper halves of all bytes, as bytes."""
    shifted = builder.lshr(vector, _all(4)) if upper else vector
    return builder.and_(shifted, _all(0x0F0F0F0F))


def _scale_and_offset(builder: Any, scales: Any, group: Any, v: int, narrow: bool) -> tuple[Any, Any]:
    """Of 16 outputs: two bf16 vectors per group, or one fp32 vector for all."""
    if not narrow:
        return builder.load(element(builder, scales, _FLOATS, v), align=4), None
    at = builder.mul(group, _LONG(2 * VECTORS))

    def numbers(index: int) -> Any:
        place = element(builder, scales, _HALVES, builder.add(at, _LONG(index)))
        return builder.bitcast(builder.shl(builder.zext(builder.load(place, align=2), _INTS), _all(16)), _FLOATS)

    return numbers(v), numbers(VECTORS + v)


def _dot(builder: Any, way: int) -> Callable[[Any, Any, Any], Any]:
    """``sums + Σ of 4 unsigned bytes times 4 signed ones``, lane by lane."""
    if way == VNNI:
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_INTS, [_INTS] * 3), "llvm.x86.avx512.vpdpbusd.512"
        )
        return lambda sums, unsigned, signed: builder.call(function, [sums, unsigned, signed])
    if way == PAIRS:
        return _pairs(builder)

    def bytes_of(vector: Any, right: Callable[..., Any]) -> Iterator[Any]:
        return (right(builder.shl(vector, _all(24 - 8 * byte)), _all(24)) for byte in range(4))

    def emulated(sums: Any, unsigned: Any, signed: Any) -> Any:
        for positive, either in zip(bytes_of(unsigned, builder.lshr), bytes_of(signed, builder.ashr), strict=True):
            sums = builder.add(sums, builder.mul(positive, either))
        return sums

    return emulated


def _pairs(builder: Any) -> Callable[[Any, Any, Any], Any]:
    """The same with products of 16 bits, two of which are added up at a time."""
    quarter, half = ir.VectorType(_INT, LANES // 2), ir.VectorType(_HALF, LANES)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(quarter, [half, half]), "llvm.x86.avx2.pmadd.wd"
    )
    eight = ir.Constant(ir.VectorType(_HALF, 2 * LANES), [8] * 2 * LANES)

    def multiplied(one: Any, other: Any) -> Any:
        undefined = ir.Constant(one.type, ir.Undefined)
        sides = []
        for first in (0, LANES):
            part = ir.Constant(ir.VectorType(_INT, LANES), list(range(first, first + LANES)))
            sides.append(
                builder.call(function, [builder.shuffle_vector(vector, undefined, part) for vector in (one, other)])
            )
        return builder.shuffle_vector(*sides, ir.Constant(_INTS, list(range(LANES))))

    def dot(sums: Any, unsigned: Any, signed: Any) -> Any:
        halves = ir.VectorType(_HALF, 2 * LANES)
        even, odd = (builder.and_(vector, _all(0x00FF00FF)) for vector in (unsigned, builder.lshr(unsigned, _all(8))))
        bytes_ = builder.bitcast(signed, halves)
        lower, upper = builder.ashr(builder.shl(bytes_, eight), eight), builder.ashr(bytes_, eight)
        for positive, either in ((even, lower), (odd, upper)):
            sums = builder.add(sums, multiplied(builder.bitcast(positive, halves), either))
        return sums

    return dot


def _masked_store(builder: Any, count: Any) -> Callable[[Any, Any, int], None]:
    """Stores vector `v` of a row as far as outputs exist."""
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [_FLOATS, _FLOATS.as_pointer(), _INT, ir.VectorType(ir.IntType(1), LANES)]),
        "llvm.masked.store.v16f32.p0",
    )
    limit = splat(builder, builder.trunc(count, _INT), _INTS)

    def store(value: Any, row: Any, v: int) -> None:
        lanes = ir.Constant(_INTS, [v * LANES + lane for lane in range(LANES)])
        mask = builder.icmp_signed("<", lanes, limit)
        builder.call(function, [value, element(builder, row, _FLOATS, v), _INT(4), mask])

    return store
