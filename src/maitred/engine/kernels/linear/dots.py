"""Dot products of bytes: how a processor multiplies four bytes at a time and adds up the products.

All methods give the same numbers to the last bit, so products with quantised weights are equal on all processors. The
processor's instruction sets decide the method, not a measurement: one instruction is always faster than several, and a
measurement may be wrong while other programs use the cores.

A product of bytes has 16 bits, and the sum of two may have one more. AVX2 has an instruction that multiplies unsigned
bytes with signed ones and adds two products up (``VPMADDUBSW``), but it saturates at 16 bits. So the signs of the
weights are moved to the rows' bytes, which costs one more instruction: twice 127 times 127 fits. Weights of 4
bits have no sign, and the sums of 32 of their products fit, so these are added up in 16 bits.
"""

# ruff: noqa: ANN401 - values of the code generator have no types of their own

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from llvmlite import ir
from numba.core import cgutils

LANES = 16
"""Numbers of 32 bits in a vector; on processors with registers of half the length, a vector takes two registers."""
PLAIN, PAIRS, VNNI = range(3)
"""Methods: with plain instructions; by pairs of products in 16 bits (AVX2); in one instruction (AVX-512 VNNI)."""

_HALF, _INT = ir.IntType(16), ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)
_BYTES_256, _HALVES_256, _INTS_256 = (ir.VectorType(ir.IntType(bits), 256 // bits) for bits in (8, 16, 32))
_HALVES = ir.VectorType(_HALF, 2 * LANES)
_NO_WEIGHT = 0x80
"""Unsigned byte that represents 0 among 8-bit weights."""


def best_dot(features: frozenset[str]) -> int:
    """Returns the fastest method of a processor.

    Args:
        features: Result of `maitred.engine.compiled.processor_features`.
    """
    return VNNI if "avx512vnni" in features else PAIRS if "avx2" in features else PLAIN


class DotKernel(Protocol):
    """Code generator of one method: adds products of four weight bytes with four row bytes to the sums of lanes."""

    sums: Any
    """Vector type of the sums."""
    offset: int
    """Zero point of the unsigned bytes, which the sums must compensate."""

    def add(self, sums: Any, weights: Any, row: Any) -> Any:
        """Emits the sums with one more product in each lane."""
        ...

    def ints(self, sums: Any) -> Any:
        """Emits the sums in 32 bits."""
        ...


def dots(builder: Any, instruction: int, *, narrow: bool) -> DotKernel:
    """Makes the code generator for 8-bit weights, of which 128 represents 0, or 4-bit weights, of which 0 does."""
    if instruction == PAIRS:
        return _NarrowPairs(builder, 0) if narrow else _Pairs(builder, 0)
    offset = 0 if narrow else _NO_WEIGHT
    return _VNNI(builder, offset) if instruction == VNNI else _Plain(builder, offset)


class _DotProduct:
    """Base class with sums of 32 bits."""

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
    """Method that adds two products in 16 bits and four in 32 bits (AVX2)."""

    def add(self, sums: Any, weights: Any, row: Any) -> Any:
        builder = self._builder
        weights = builder.xor(weights, _all(int.from_bytes(bytes(4 * [_NO_WEIGHT]), signed=True)))
        sides = []
        for weight, numbers in zip(_sides(builder, weights), _sides(builder, row), strict=True):
            positive, turned = _sign(builder, weight, weight), _sign(builder, numbers, weight)
            sides.append(_quads(builder, _pairs(builder, positive, turned)))
        return builder.add(sums, _concatenate(builder, sides, _INTS))


class _NarrowPairs(_DotProduct):
    """Method for 4-bit weights with up to 32 products in 16 bits: ``32 / 2 * 15 * 127`` are 30,480 in each half.

    There are never more than `maitred.engine.kernels.linear.panels.GROUP_INPUTS` products.
    """

    sums: Any = _HALVES

    def add(self, sums: Any, weights: Any, row: Any) -> Any:
        builder = self._builder
        sides = [_pairs(builder, *both) for both in zip(_sides(builder, weights), _sides(builder, row), strict=True)]
        return builder.add(sums, _concatenate(builder, sides, _HALVES))

    def ints(self, sums: Any) -> Any:
        builder = self._builder
        parts = _sides(builder, builder.bitcast(sums, _INTS))
        return _concatenate(builder, [_quads(builder, builder.bitcast(part, _HALVES_256)) for part in parts], _INTS)


def _all(number: int) -> Any:
    return ir.Constant(_INTS, [number] * LANES)


def _sides(builder: Any, vector: Any) -> list[Any]:
    """Splits 16 numbers of 32 bits into two halves, as bytes."""
    undefined = ir.Constant(_INTS, ir.Undefined)
    parts = (ir.Constant(_INTS_256, list(range(first, first + LANES // 2))) for first in (0, LANES // 2))
    return [builder.bitcast(builder.shuffle_vector(vector, undefined, part), _BYTES_256) for part in parts]


def _concatenate(builder: Any, sides: list[Any], kind: Any) -> Any:
    order = ir.Constant(ir.VectorType(_INT, kind.count), list(range(kind.count)))
    return builder.shuffle_vector(*sides, order)


def _sign(builder: Any, numbers: Any, signs: Any) -> Any:
    """Emits bytes that are negated where `signs` are negative, and 0 where they are 0."""
    return _call(builder, "psign.b", _BYTES_256, numbers, signs)


def _pairs(builder: Any, unsigned: Any, signed: Any) -> Any:
    """Emits the sums of two products of bytes, in 16 bits."""
    return _call(builder, "pmadd.ub.sw", _HALVES_256, unsigned, signed)


def _quads(builder: Any, halves: Any) -> Any:
    """Emits the sums of two numbers of 16 bits, in 32 bits."""
    return _call(builder, "pmadd.wd", _INTS_256, halves, ir.Constant(_HALVES_256, [1] * _HALVES_256.count))


def _call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.avx2.{name}")
    return builder.call(function, arguments)
