"""Inner tile of a quantised product, as LLVM vector instructions: a few rows times a panel of outputs.

A weight is kept in panels of `PANEL` outputs, a panel as steps of 64-byte vectors, 16 outputs to a vector. Of 8-bit
weights, a step is four consecutive inputs, side by side; of 4-bit weights it is eight, the first four in the lower
halves of the bytes. So a panel is read from its beginning to its end, each weight is loaded once for all rows of the
tile, and each input once for all outputs. The numbers of outputs and rows depend on the processor's registers: sums
that do not fit into them are kept in memory instead, at half the speed (``docs/design/0050-narrow-registers.md``).

Rows are either signed bytes, multiplied with the weights' unsigned ones four at a time and added up to 32 bits without
rounding (see `maitred.engine.kernels.linear.dots`), or fp32, multiplied with weights that are converted on the way. The
order of every sum that rounds is spelled out and is the same for tiles of all sizes. So a row's result does not depend
on the rows beside it, to the last bit.
"""

# ruff: noqa: ANN401 - values of the code generator have no types of their own

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from maitred.engine.compiled import VECTOR_LANES
from maitred.engine.kernels.linear.dots import LANES, dots

VECTORS, MOST_ROWS = (4, 6) if VECTOR_LANES == LANES else (1, 4)
"""Vectors and maximum rows of a tile, whose sums and weights are in registers: 32, or 16 of half the length."""
PANEL = LANES * VECTORS
"""Outputs that a tile computes together."""
EDITION = 6
"""Version of the emitted code; raise it with every change to this file or to `dots`.

Numba's cache on disk checks only the file of a kernel, not the files that it uses.
"""

_HALF, _INT, _LONG, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTS, _FLOATS, _HALVES = (ir.VectorType(element, LANES) for element in (_INT, _FLOAT, _HALF))
_MASK = ir.VectorType(ir.IntType(1), LANES)

_FP16, _BYTES = (ir.VectorType(element, LANES) for element in (ir.HalfType(), ir.IntType(8)))
ROW, BF16, FP16, FP16_ALONE, BYTES, SIGNED_BYTES, FP32 = range(7)
"""Forms of scales, see `SCALE_FORMS`."""


class ScaleForm(NamedTuple):
    """How the scales of a panel are stored: of each group its scales, then its offsets, outputs side by side.

    Attributes:
        bytes: Size of a scale.
        parts: 2 with offsets, else 1.
        sharing: Groups whose scales are products of a byte and a factor in fp16 that they share; the factors stand
            before the bytes. 0: scales are stored as they are.
        of_rows: Whether rows that are rounded have a scale for each group of inputs; otherwise they have one.
    """

    bytes: int
    parts: int
    sharing: int = 0
    of_rows: bool = True


SCALE_FORMS = (
    ScaleForm(4, 1, of_rows=False),
    ScaleForm(2, 2, of_rows=False),
    ScaleForm(2, 2),
    ScaleForm(2, 1),
    ScaleForm(1, 2, sharing=8),
    ScaleForm(1, 1, sharing=16),
    ScaleForm(4, 2),
)
"""Forms: fp32 for an output; bf16 with offsets, as maitred rounds to 4 bits; and those of checkpoints: fp16 with and
without offsets, unsigned bytes with offsets, signed bytes, and fp32 with offsets."""

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
    ahead_bytes: Any,
    bits: Any,
    dot: Any,
    kind: Any,
    widens: Any,
) -> Any:
    """Computes `height` rows of signed bytes, at most `MAX_TILE_ROWS`.

    ::

        out[r, o] = row_scale[r] * Σ_g (scale[g, o] * Σ_k row[r, k] * weight[o, k] - offset[g, o] * row_sum[r, g])
                    + bias[o]

    where rows may also have a scale for each group. All but the constants `bits`, `dot` (see
    `maitred.engine.kernels.linear.dots`), `kind` (of `SCALE_FORMS`) and `widens` (whether the processor widens fp16)
    are addresses and counts. 8-bit weights are 128 less than their bytes. A group has `steps` steps. At each step, the
    cache line of `ahead_at` is fetched into the second-level cache, and `ahead_at` moves on by `ahead_bytes`.
    """
    scales = _ScaleReader(kind.literal_value, bool(widens.literal_value))
    narrow, instruction = bits.literal_value == 4, dot.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _for_each_height(
            builder,
            MOST_ROWS,
            arguments[0],
            lambda rows: _integer(builder, rows, narrow, instruction, scales, *arguments[1:15]),
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 15, bits, dot, kind, widens), generate


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
    kind: Any,
    widens: Any,
) -> Any:
    """Computes `height` fp32 rows: ``Σ_k row[r, k] * (scale[g, o] * weight[o, k] - offset[g, o]) + bias[o]``.

    Rows must be padded with zeros to a whole number of groups.
    """
    width, scales = bits.literal_value, _ScaleReader(kind.literal_value, bool(widens.literal_value))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _for_each_height(
            builder, MOST_ROWS, arguments[0], lambda rows: _real(builder, rows, width, scales, *arguments[1:11])
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11, bits, kind, widens), generate


class _TileNumber(ir.types._BaseFloatType):  # type: ignore[misc]
    """Number of 16 bits with fp32's exponent, which the code generator has no type for."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_TileNumber._create_instance()
_BFLOATS = ir.VectorType(_TileNumber(), 2 * LANES)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def bf16_tile(
    typing_context: Any,
    height: Any,
    rows_at: Any,
    row_bytes: Any,
    weights_at: Any,
    bias_at: Any,
    out_at: Any,
    out_bytes: Any,
    outputs: Any,
    steps: Any,
    ahead_at: Any,
    ahead_bytes: Any,
) -> Any:
    """Computes `height` rows of bf16: ``Σ_k row[r, k] * weight[o, k] + bias[o]`` in fp32, two inputs at a time.

    A step is two consecutive inputs, side by side. For processors with AVX-512 BF16 (``VDPBF16PS``).
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _for_each_height(builder, MOST_ROWS, arguments[0], lambda rows: _bf16(builder, rows, *arguments[1:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), generate


def _bf16(
    builder: Any, height: int, row: Any, row_step: Any, weight: Any, bias: Any, out: Any, out_step: Any, outputs: Any,
    steps: Any, ahead: Any, ahead_step: Any,
) -> None:  # fmt: skip
    tile, fetch = Tile(builder, height), prefetch(builder)
    sums = tile.zeros(_FLOATS)
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _BFLOATS, _BFLOATS])
    dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    with cgutils.for_range(builder, steps) as loop:
        vectors = [builder.bitcast(vector, _BFLOATS) for vector in tile.weights(weight, loop.index)]
        fetch(builder.add(ahead, builder.mul(loop.index, ahead_step)))
        offset = builder.add(row, builder.mul(loop.index, _LONG(4)))
        for r in range(height):
            at = builder.add(offset, builder.mul(row_step, _LONG(r)))
            pair = splat(builder, builder.load(element(builder, at, _INT, 0), align=4), _INTS)
            pair = builder.bitcast(pair, _BFLOATS)
            for v in range(VECTORS):
                builder.store(builder.call(dot, [builder.load(sums[r, v]), vectors[v], pair]), sums[r, v])

    def result(r: int, v: int) -> Any:
        addend = builder.load(element(builder, bias, _FLOATS, v), align=4)
        return builder.fadd(builder.load(sums[r, v]), addend)

    tile.store(result, out, out_step, outputs)


def _for_each_height(builder: Any, most: int, height: Any, emit: Callable[[int], None]) -> None:
    """Emits code for every height that a tile can have."""
    for rows in range(1, most + 1):
        with builder.if_then(builder.icmp_signed("==", height, _LONG(rows))):
            emit(rows)


def _integer(
    builder: Any, height: int, narrow: bool, instruction: int, scale_form: "_ScaleReader",
    row: Any, row_step: Any, row_scales: Any, row_sums: Any,
    weight: Any, scales: Any, bias: Any, out: Any, out_step: Any, outputs: Any, groups: Any, steps: Any, ahead: Any,
    ahead_step: Any,
) -> None:  # fmt: skip
    tile, dot, quads = Tile(builder, height), dots(builder, instruction, narrow=narrow), 2 if narrow else 1
    fetch, of_rows = prefetch(builder), scale_form.form.of_rows
    totals, sums = tile.zeros(_FLOATS), tile.zeros(dot.sums)

    def row_scale_of(r: int, group: Any) -> Any:
        index = _LONG(r) if group is None else builder.add(builder.mul(groups, _LONG(r)), group)
        return builder.load(element(builder, row_scales, _FLOAT, index))

    with cgutils.for_range(builder, groups) as group:

        def row_sum(r: int) -> Any:
            index = builder.add(builder.mul(groups, _LONG(r)), group.index)
            return builder.load(element(builder, row_sums, _INT, index))

        for r in range(height):
            start = ir.Constant(dot.sums, None)
            if dot.offset:
                start = splat(builder, builder.mul(row_sum(r), _INT(-dot.offset)), _INTS)
            for v in range(VECTORS):
                builder.store(start, sums[r, v])
        first = builder.mul(group.index, steps)
        with cgutils.for_range(builder, steps) as loop:
            step = builder.add(first, loop.index)
            vectors = tile.weights(weight, step)
            fetch(builder.add(ahead, builder.mul(step, ahead_step)))
            offset = builder.add(row, builder.mul(step, _LONG(4 * quads)))
            for quad in range(quads):
                unsigned = [_nibbles(builder, vector, quad) for vector in vectors] if narrow else vectors
                for r in range(height):
                    at = builder.add(offset, builder.mul(row_step, _LONG(r)))
                    signed = splat(builder, builder.load(element(builder, at, _INT, quad), align=4), _INTS)
                    for v in range(VECTORS):
                        builder.store(dot.add(builder.load(sums[r, v]), unsigned[v], signed), sums[r, v])
        factors = [scale_form.read(builder, scales, group.index, v) for v in range(VECTORS)]
        for r in range(height):
            less = builder.sitofp(builder.neg(row_sum(r)), _FLOAT)
            if of_rows:
                row_scale = row_scale_of(r, group.index)
                less, row_scale = builder.fmul(less, row_scale), splat(builder, row_scale, _FLOATS)
            less = splat(builder, less, _FLOATS)
            for v, (scale, offset) in enumerate(factors):
                total = builder.load(totals[r, v])
                product = builder.sitofp(dot.ints(builder.load(sums[r, v])), _FLOATS)
                product = builder.fmul(product, row_scale) if of_rows else product
                total = tile.fma(product, scale, total)
                builder.store(total if offset is None else tile.fma(less, offset, total), totals[r, v])

    def result(r: int, v: int) -> Any:
        addend = builder.load(element(builder, bias, _FLOATS, v), align=4)
        total = builder.load(totals[r, v])
        if of_rows:
            return builder.fadd(total, addend)
        return tile.fma(total, splat(builder, row_scale_of(r, None), _FLOATS), addend)

    tile.store(result, out, out_step, outputs)


def _real(
    builder: Any, height: int, bits: int, scale_form: "_ScaleReader",
    row: Any, row_step: Any, weight: Any, scales: Any, bias: Any, out: Any,
    out_step: Any, outputs: Any, groups: Any, steps: Any,
) -> None:  # fmt: skip
    tile, narrow, inputs, of_groups = Tile(builder, height), bits == 4, 32 // bits, scale_form.kind != ROW
    sums = tile.zeros(_FLOATS)
    with cgutils.for_range(builder, groups) as group:
        factors = [scale_form.read(builder, scales, group.index, v) for v in range(VECTORS)]
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
                    else:
                        whole = builder.and_(builder.lshr(vector, _all(8 * k)), _all(255))
                        whole = builder.sub(whole, _all(128))
                    value = builder.sitofp(whole, _FLOATS)
                    if shift is not None:
                        value = tile.fma(value, scale, builder.fneg(shift))
                    elif of_groups:
                        value = builder.fmul(value, scale)
                    values.append(value)
                for r in range(height):
                    at = builder.add(offset, builder.mul(row_step, _LONG(r)))
                    number = splat(builder, builder.load(element(builder, at, _FLOAT, k), align=4), _FLOATS)
                    for v in range(VECTORS):
                        builder.store(tile.fma(number, values[v], builder.load(sums[r, v])), sums[r, v])

    def result(r: int, v: int) -> Any:
        addend = builder.load(element(builder, bias, _FLOATS, v), align=4)
        scale = _all_ones() if of_groups else scale_form.read(builder, scales, _LONG(0), v)[0]
        return tile.fma(builder.load(sums[r, v]), scale, addend)

    tile.store(result, out, out_step, outputs)


class Tile:
    """Code generator with the operations that all kinds of tiles share."""

    def __init__(self, builder: Any, height: int, vectors: int = VECTORS) -> None:
        self._builder = builder
        self.height, self.vectors = height, vectors
        self._places = [(r, v) for r in range(height) for v in range(vectors)]
        self._fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), "llvm.fma.v16f32"
        )

    def zeros(self, vector: Any) -> Sums:
        """Allocates one zero sum for each row and vector of outputs."""
        zero = ir.Constant(vector, None)
        return {place: cgutils.alloca_once_value(self._builder, zero) for place in self._places}

    def weights(self, weight: Any, step: Any) -> list[Any]:
        """Loads the panel's weights of one step."""
        at = self._builder.add(weight, self._builder.mul(step, _LONG(64 * VECTORS)))
        return [self._builder.load(element(self._builder, at, _INTS, _LONG(v)), align=64) for v in range(VECTORS)]

    def fma(self, factor: Any, other: Any, addend: Any) -> Any:
        """Emits ``factor * other + addend``, rounded once."""
        return self._builder.call(self._fma, [factor, other, addend])

    def store(self, result: Callable[[int, int], Any], out: Any, out_step: Any, outputs: Any) -> None:
        """Stores the result of every row and vector, as far as outputs exist."""
        builder = self._builder
        rows = [builder.add(out, builder.mul(out_step, _LONG(r))) for r in range(self.height)]
        all_exist = builder.icmp_signed(">=", outputs, _LONG(LANES * self.vectors))
        with builder.if_else(all_exist) as (whole, partly):
            with whole:
                for r, v in self._places:
                    builder.store(result(r, v), element(builder, rows[r], _FLOATS, v), align=4)
            with partly:
                lanes = MaskedLanes(builder, outputs)
                for r, v in self._places:
                    lanes.store(result(r, v), rows[r], v)


def _all(number: int) -> Any:
    return ir.Constant(_INTS, [number] * LANES)


def _all_ones() -> Any:
    return ir.Constant(_FLOATS, [1.0] * LANES)


def element(builder: Any, address: Any, kind: Any, index: Any) -> Any:
    """Returns a pointer to the element with an index in an array at an address."""
    index = _LONG(index) if isinstance(index, int) else index
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


def splat(builder: Any, scalar: Any, vector: Any) -> Any:
    """Broadcasts a number to all lanes of a vector."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, _INT(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def prefetch(builder: Any) -> Callable[[Any], None]:
    """Returns a function that emits the fetch of a cache line into the second-level cache."""
    number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [pointer, *[number] * 3]), "llvm.prefetch.p0"
    )
    read, second_level, data = number(0), number(2), number(1)

    def fetch(address: Any) -> None:
        builder.call(function, [builder.inttoptr(address, pointer), read, second_level, data])

    return fetch


def _nibbles(builder: Any, vector: Any, upper: int) -> Any:
    """Extracts the lower or the upper halves of all bytes, as bytes."""
    shifted = builder.lshr(vector, _all(4)) if upper else vector
    return builder.and_(shifted, _all(0x0F0F0F0F))


class _ScaleReader:
    """Code generator that loads the scales and offsets of a group."""

    def __init__(self, kind: int, widens: bool) -> None:
        self.kind, self.form = kind, SCALE_FORMS[kind]
        self._widen_half = _widen_bf16 if kind == BF16 else _extend_fp16 if widens else _widen_fp16

    def read(self, builder: Any, scales: Any, group: Any, v: int) -> tuple[Any, Any]:
        """Emits the scales of 16 outputs, and their offsets or None."""
        size, parts, sharing, _ = self.form
        if sharing:
            # Each so many groups have a block: fp16 factors, then bytes.
            length = parts * PANEL * (2 + sharing)
            block = builder.add(scales, builder.mul(builder.udiv(group, _LONG(sharing)), _LONG(length)))
            factors = self._parts(builder, block, _LONG(0), 2, v)
            within = builder.urem(group, _LONG(sharing))
            numbers = self._parts(builder, builder.add(block, _LONG(parts * PANEL * 2)), within, 1, v)
            found = [builder.fmul(number, factor) for number, factor in zip(numbers, factors, strict=True)]
        else:
            found = self._parts(builder, scales, _LONG(0) if self.kind == ROW else group, size, v)
        return found[0], found[1] if parts == 2 else None

    def _parts(self, builder: Any, address: Any, group: Any, size: int, v: int) -> list[Any]:
        stored = {1: _BYTES, 2: _HALVES, 4: _FLOATS}[size]
        first = builder.mul(group, _LONG(self.form.parts * VECTORS))
        places = (builder.add(first, _LONG(part * VECTORS + v)) for part in range(self.form.parts))
        loaded = [builder.load(element(builder, address, stored, place), align=size) for place in places]
        if size == 4:
            return loaded
        if size == 2:
            return [self._widen_half(builder, half) for half in loaded]
        extend = builder.sext if self.kind == SIGNED_BYTES else builder.zext
        return [builder.sitofp(extend(number, _INTS), _FLOATS) for number in loaded]


def _widen_bf16(builder: Any, numbers: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(numbers, _INTS), _all(16)), _FLOATS)


def _extend_fp16(builder: Any, numbers: Any) -> Any:
    return builder.fpext(builder.bitcast(numbers, _FP16), _FLOATS)


def _widen_fp16(builder: Any, numbers: Any) -> Any:
    # With the exponent moved, a number is 2^112 times too small: exact for the least numbers too.
    bits = builder.zext(numbers, _INTS)
    moved = builder.shl(builder.and_(bits, _all(0x7FFF)), _all(13))
    sized = builder.fmul(builder.bitcast(moved, _FLOATS), ir.Constant(_FLOATS, [2.0**112] * LANES))
    sign = builder.shl(builder.and_(bits, _all(0x8000)), _all(16))
    return builder.bitcast(builder.or_(builder.bitcast(sized, _INTS), sign), _FLOATS)


class MaskedLanes:
    """Masked access to the vectors of a row that has only `count` numbers.

    Args:
        builder: Builder of the code.
        count: Number of existing numbers.
    """

    def __init__(self, builder: Any, count: Any) -> None:
        self._builder = builder
        self._limit = splat(builder, builder.trunc(count, _INT), _INTS)

    def store(self, value: Any, row: Any, v: int) -> None:
        """Stores vector `v` of a row."""
        self._call("store", ir.VoidType(), _FLOATS, _FLOATS.as_pointer(), _INT, _MASK)(
            value, *self._place(row, v), self._mask(v)
        )

    def load(self, row: Any, v: int) -> Any:
        """Loads vector `v` of a row, with zeros in missing lanes."""
        return self._call("load", _FLOATS, _FLOATS.as_pointer(), _INT, _MASK, _FLOATS)(
            *self._place(row, v), self._mask(v), ir.Constant(_FLOATS, None)
        )

    def _call(self, name: str, result: Any, *kinds: Any) -> Callable[..., Any]:
        kind = ir.FunctionType(result, kinds)
        function = cgutils.get_or_insert_function(self._builder.module, kind, f"llvm.masked.{name}.v16f32.p0")
        return lambda *arguments: self._builder.call(function, arguments)

    def _place(self, row: Any, v: int) -> tuple[Any, Any]:
        return element(self._builder, row, _FLOATS, v), _INT(4)

    def _mask(self, v: int) -> Any:
        lanes = ir.Constant(_INTS, [v * LANES + lane for lane in range(LANES)])
        return self._builder.icmp_signed("<", lanes, self._limit)
