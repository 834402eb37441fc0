"""How a processor multiplies bytes four at a time and adds the products up.

All ways give the same numbers to the last bit, so products with rounded weights are the same on all processors. What
the processor has decides, and not a clock: one instruction in place of several is faster at any hour, and at an hour
when others take the cores a clock may say otherwise.

A product of bytes has 16 bits, and the sum of two may have one more. AVX2 has an instruction that multiplies unsigned
bytes with signed ones and adds two products up (``VPMADDUBSW``), but what outgrows 16 bits is cut there. So the signs
of weights are moved to the rows' bytes, where they cost one instruction more: twice 127 times 127 fits. Weights of 4
bits have no sign, and the sums of 32 of their products fit, so these are added up in 16 bits.
"""

# ruff: noqa: ANN401 - values of the code generator have no types of their own

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from llvmlite import ir
from numba.core import cgutils

LANES = 16
"""Of a vector, in numbers of 32 bits; where registers are half as long, it takes two."""
PLAIN, PAIRS, VNNI = range(3)
"""With what every processor has; by pairs of products of 16 bits (AVX2); in one instruction (AVX-512 VNNI)."""

_HALF, _INT = ir.IntType(16), ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)
_BYTES_256, _HALVES_256, _INTS_256 = (ir.VectorType(ir.IntType(bits), 256 // bits) for bits in (8, 16, 32))
_HALVES = ir.VectorType(_HALF, 2 * LANES)
_NO_WEIGHT = 0x80
"""The unsigned byte that stands for 0 among weights of 8 bits."""


def best_dot(features: frozenset[str]) -> int:
    """The fastest way that a processor has.

    Args:
        features: See `maitred.engine.kernels.registers.processor_features`.
    """
    return VNNI if "avx512vnni" in features else PAIRS if "avx2" in features else PLAIN


class DotKernel(Protocol):
    """Code of one way: sums of products of four unsigned bytes of weights with four signed ones of a row, by lanes."""

    sums: Any
    """The type of so many sums."""
    offset: int
    """What the unsigned bytes are too large by, for the sums to make up for."""

    def add(self, sums: Any, weights: Any, row: Any) -> Any:
        """The sums with one more product in each lane."""
        ...

    def ints(self, sums: Any) -> Any:
        """The sums in 32 bits."""
        ...


def dots(builder: Any, way: int, *, narrow: bool) -> DotKernel:
    """Code for weights of 8 bits, of which 128 stands for 0, or for narrow ones of 4 bits, of which 0 does."""
    if way == PAIRS:
        return _NarrowPairs(builder, 0) if narrow else _Pairs(builder, 0)
    offset = 0 if narrow else _NO_WEIGHT
    return _VNNI(builder, offset) if way == VNNI else _Plain(builder, offset)


class _DotProduct:
    """Sums of 32 bits, unless it says otherwise."""

    sums: Any = _INTS

    def __init__(self, builder: Any, offset: int) -> None:
        self._builder = builder
        self.offset = offset

    def ints(self, sums: Any) -> Any:
        return sums


class _VNNI(_DotProduct):
    def add(self, sums: Any, weights: Any, row: Any) -> Any:
        kind = ir.FunctionType(_INTS, [_INTS] * 3)
        function = cgutils.get_or_insert_function(self._builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        return self._builder.call(function, [sums, weights, row])


class _Plain(_DotProduct):
    def add(self, sums: Any, weights: Any, row: Any) -> Any:
        builder = self._builder

        def bytes_of(vector: Any, right: Callable[..., Any]) -> Iterator[Any]:
            return (right(builder.shl(vector, _all(24 - 8 * byte)), _all(24)) for byte in range(4))

        for positive, either in zip(bytes_of(weights, builder.lshr), bytes_of(row, builder.ashr), strict=True):
            sums = builder.add(sums, builder.mul(positive, either))
        return sums


class _Pairs(_DotProduct):
    """Two products in 16 bits, four in 32."""

    def add(self, sums: Any, weights: Any, row: Any) -> Any:
        builder = self._builder
        weights = builder.xor(weights, _all(int.from_bytes(bytes(4 * [_NO_WEIGHT]), signed=True)))
        sides = []
        for weight, numbers in zip(_sides(builder, weights), _sides(builder, row), strict=True):
            positive, turned = _sign(builder, weight, weight), _sign(builder, numbers, weight)
            sides.append(_quads(builder, _pairs(builder, positive, turned)))
        return builder.add(sums, _joined(builder, sides, _INTS))


class _NarrowPairs(_DotProduct):
    """Sums of up to 32 products of 4 bits and 8 in 16 bits: ``32 / 2 * 15 * 127`` are 30,480 in each half.

    More than `maitred.engine.kernels.linear.panels.GROUP_INPUTS` there are not.
    """

    sums: Any = _HALVES

    def add(self, sums: Any, weights: Any, row: Any) -> Any:
        builder = self._builder
        sides = [_pairs(builder, *both) for both in zip(_sides(builder, weights), _sides(builder, row), strict=True)]
        return builder.add(sums, _joined(builder, sides, _HALVES))

    def ints(self, sums: Any) -> Any:
        builder = self._builder
        parts = _sides(builder, builder.bitcast(sums, _INTS))
        return _joined(builder, [_quads(builder, builder.bitcast(part, _HALVES_256)) for part in parts], _INTS)


def _all(number: int) -> Any:
    return ir.Constant(_INTS, [number] * LANES)


def _sides(builder: Any, vector: Any) -> list[Any]:
    """The two halves of 16 numbers of 32 bits, as bytes."""
    undefined = ir.Constant(_INTS, ir.Undefined)
    parts = (ir.Constant(_INTS_256, list(range(first, first + LANES // 2))) for first in (0, LANES // 2))
    return [builder.bitcast(builder.shuffle_vector(vector, undefined, part), _BYTES_256) for part in parts]


def _joined(builder: Any, sides: list[Any], kind: Any) -> Any:
    order = ir.Constant(ir.VectorType(_INT, kind.count), list(range(kind.count)))
    return builder.shuffle_vector(*sides, order)


def _sign(builder: Any, numbers: Any, signs: Any) -> Any:
    """Bytes with the sign turned, or 0, where others are below 0, or 0."""
    return _call(builder, "psign.b", _BYTES_256, numbers, signs)


def _pairs(builder: Any, unsigned: Any, signed: Any) -> Any:
    """Sums of two products of bytes, in 16 bits."""
    return _call(builder, "pmadd.ub.sw", _HALVES_256, unsigned, signed)


def _quads(builder: Any, halves: Any) -> Any:
    """Sums of two numbers of 16 bits, in 32."""
    return _call(builder, "pmadd.wd", _INTS_256, halves, ir.Constant(_HALVES_256, [1] * _HALVES_256.count))


def _call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.avx2.{name}")
    return builder.call(function, arguments)
