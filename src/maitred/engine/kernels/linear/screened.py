"""Exact search for the largest output of each row, which reads only a small part of the weight.

A greedy answer needs only the largest logit, but a head is the largest weight of a small model, and with few rows a
product takes as long as reading its weight. So all outputs are first computed from a second weight, rounded to 8 bits:
a quarter of the memory. The error of an output is bounded by norms (Cauchy-Schwarz)::

    |w·h - w'·h'|  <=  |w - w'| |h|  +  |w'| |h - h'|

where ``w'`` and ``h'`` are the rounded vectors. Exact outputs are then computed in strips from the unrounded weight
(see `maitred.engine.kernels.linear.form.StripLinear`), with the same bits as in the whole product. First the strip with
the largest rounded output of each row is computed. Another output whose upper bound is below the largest exact output
of that strip cannot be the largest. Strips with outputs that can be larger are computed too, so the largest output is
exact; all other outputs are set to minus infinity. Of 150,000 random outputs a dozen remain.

If many outputs remain, nothing is gained, and the search costs a quarter of a product in addition; see `HeadSearch`.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numba import carray
from numba.extending import register_jitable
from torch import Tensor

from maitred.engine.kernels.job import COUNT, NEXT, CompiledEntry, floats, int8s, ints, longs, take
from maitred.engine.kernels.linear.form import Linear, StripLinear
from maitred.engine.kernels.linear.packed import PackedLinear
from maitred.engine.kernels.linear.panels import lengths_of_8_bits
from maitred.engine.kernels.linear.quantised import QuantisedLinear
from maitred.engine.kernels.linear.strips import MOST_ROWS
from maitred.engine.kernels.linear.tiled import TiledLinear
from maitred.engine.kernels.simd import float_of_bits
from maitred.engine.kernels.tape import Tape

WORTH_WEIGHTS = 1 << 24
"""Minimum size of a weight for a search.

A smaller weight stays in the processor's cache, or is read too fast for a gain.
"""
EDITION = 3
"""Version of the compiled code; raise it with every change. See `maitred.engine.kernels.linear.tiles.EDITION`."""
_SLACK = 1.001
"""Factor for the rounding of the norms themselves."""
_WORTH_SHARE = 0.5
"""Share of all strips that may be computed, counted once for each row: a search computes them row by row."""
_PATIENCE_STEPS = 64


class HeadSearch:
    """Decision whether a step is a search: suspended for some steps after one that computed too many strips.

    Args:
        strips: Number of strips of the product.
    """

    def __init__(self, strips: int) -> None:
        self._strips = strips
        self._rest = 0

    def begins(self, rows: int) -> bool:
        """Returns whether the next step of so many rows is to be a search."""
        if self._rest:
            self._rest -= 1
            return False
        return rows <= MOST_ROWS

    def record(self, strips: Tensor) -> None:
        """Records how many strips of each row a search computed."""
        if int(strips.sum()) > _WORTH_SHARE * self._strips:
            self._rest = _PATIENCE_STEPS


class ScreenedLinear:
    """Linear in fp32 that can also be searched for the largest output of each row.

    Args:
        exact: Exact product.
        weight: Weight of the exact product, fp32 ``[out, in]``.
    """

    __slots__ = ("_bounds", "_exact", "_inputs", "_outputs", "_rough")
    kind: ClassVar[str] = "screened"
    alignment: ClassVar[int] = PackedLinear.alignment

    def __init__(self, exact: StripLinear, weight: Tensor) -> None:
        rough = QuantisedLinear(weight, bits=8, real=False)
        off, length = lengths_of_8_bits(weight, *(rough.tensors()[name] for name in ("panels", "scales")))
        # The bound includes the rounding of the sums themselves: n additions of fp32, twice.
        off = off + (weight.shape[1] + 64) * 2.0**-23 * (off + length)
        self._hold(exact, rough, torch.stack((_by_strip(exact, off), _by_strip(exact, length))) * _SLACK)

    def _hold(self, exact: StripLinear, rough: QuantisedLinear, bounds: Tensor) -> None:
        self._exact, self._rough, self._bounds = exact, rough, bounds.contiguous()
        self._outputs, self._inputs = exact.shape

    def search(self) -> HeadSearch:
        """Makes the object that decides before each step whether the step is a search."""
        return HeadSearch(self._bounds.shape[1])

    def __call__(self, rows: Tensor) -> Tensor:
        """Maps ``[T, in]`` to ``[T, out]`` exactly, for all outputs."""
        return self._exact(rows)

    def scratch_bytes(self, rows: int) -> int:
        """Returns the scratch memory of a search; implements `TapedLinear.scratch_bytes`."""
        searched = min(rows, MOST_ROWS)
        return self._rough.scratch_bytes(searched) + searched * self._bounds.shape[1] * (4 + 1)

    def record(self, tape: Tape, rows: int, out: int, counter: int, scratch: int, most_rows: int) -> None:
        """Records the exact product on a tape; implements `TapedLinear.record`."""
        self._exact.record(tape, rows, out, counter, scratch, most_rows)

    def record_search(
        self, tape: Tape, rows: int, out: int, counter: int, scratch: int, most_rows: int, found: Tensor
    ) -> None:
        """Records a search, of at most `maitred.engine.kernels.linear.strips.MAX_ROWS` rows.

        Args:
            tape: Tape that is played no longer than this product lives.
            rows: Address of fp32 ``[max_rows, in]``.
            out: Address of fp32 ``[max_rows, out]``.
            counter: Address of an int64: the number of rows when the tape is played.
            scratch: Address of scratch memory of `scratch_bytes(max_rows)`.
            most_rows: Maximum number of rows.
            found: int64 ``[max_rows]``: receives the number of strips of each row that the search computed.
        """
        searched, strips = min(most_rows, MOST_ROWS), self._bounds.shape[1]
        self._rough.record(tape, rows, out, counter, scratch, searched)
        most = scratch + self._rough.scratch_bytes(searched)
        marks = most + searched * strips * 4
        exact = self._exact
        places = [rows, out, self._bounds.data_ptr(), most, marks, found.data_ptr()]
        fields = [*places, self._inputs, self._outputs, exact.part, strips]
        for screening in (mark_best_strips(exact.strip), mark_other_strips(exact.strip)):
            tape.add(screening, fields, counter, 1)
            exact.record_strips(tape, rows, out, counter, marks)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of both products and the bounds; implements `Linear.tensors`."""
        parts = {"exact": self._exact.tensors(), "rough": self._rough.tensors()}
        named = {f"{part}.{name}": tensor for part, own in parts.items() for name, tensor in own.items()}
        return {**named, "bounds": self._bounds}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Makes the product from its tensors; implements `Linear.of`."""

        def part(name: str) -> dict[str, Tensor]:
            return {key.removeprefix(f"{name}."): own for key, own in tensors.items() if key.startswith(f"{name}.")}

        exact = part("exact")
        form: type[StripLinear] = PackedLinear if "layout" in exact else TiledLinear
        linear = cls.__new__(cls)
        linear._hold(form.of(exact), QuantisedLinear.of(part("rough")), tensors["bounds"])
        return linear


def searchable(product: Linear, weight: Tensor) -> ScreenedLinear | None:
    """Makes a searchable product, if the product supports strips and a search pays; otherwise None."""
    if weight.numel() < WORTH_WEIGHTS or not isinstance(product, PackedLinear | TiledLinear):
        return None
    if isinstance(product, PackedLinear) and not product.reads_strips:
        return None
    return ScreenedLinear(product, weight)


def _by_strip(exact: StripLinear, numbers: Tensor) -> Tensor:
    """Returns the largest number of each strip."""
    of_part = -(-exact.part // exact.strip)
    parts = numbers.new_zeros(-(-len(numbers) // exact.part), of_part * exact.strip)
    for index, own in enumerate(parts):
        part = numbers[index * exact.part :][: exact.part]
        own[: len(part)] = part
    return parts.view(-1, exact.strip).amax(dim=1)


_FIELDS = "rows", "out", "bounds", "most", "marks", "found", "inputs", "outputs", "part", "strips"
"""Names of the own fields of a screening's job.

They are addresses of rows, of the outputs of the rounded weight, of the bounds ``[2, strips]``, of the upper bound of
each strip's outputs ``[rows, strips]``, of the marks of strips to compute ``[strips, rows]``, and of the number of
marked strips of each row ``[rows]``; then sizes, ``part`` as in `StripLinear`.
"""
_ROWS, _OUT, _BOUNDS, _MOST, _MARKS, _FOUND, _INPUTS, _OUTPUTS, _PART, _STRIPS = range(
    COUNT + 1, COUNT + 1 + len(_FIELDS)
)
_ALL = COUNT + 1 + len(_FIELDS)


@register_jitable  # type: ignore[untyped-decorator]
def _key(pattern: np.int32) -> np.int32:
    """Converts the bits of an fp32 number to an integer of the same order; the conversion is its own inverse."""
    return np.int32(pattern ^ np.int32(np.int32(pattern >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@cache
def mark_best_strips(strip_outputs: int) -> CompiledEntry:
    """Compiles a kernel that marks each row's strip with the largest rounded output, and bounds all strips' outputs."""
    edition = EDITION

    def compute(address: Any) -> None:  # noqa: ANN401 - a C pointer
        if edition < 0:  # never; but what a function names is part of its key on disk
            return
        job = carray(address, _ALL)
        inputs, outputs, part, strips = job[_INPUTS], job[_OUTPUTS], job[_PART], job[_STRIPS]
        of_part = (part + strip_outputs - 1) // strip_outputs
        bounds = carray(floats(job[_BOUNDS]), 2 * strips)
        marks = carray(int8s(job[_MARKS]), (strips, job[COUNT]))
        row = take(job, NEXT, 1)
        while row < job[COUNT]:
            numbers = carray(floats(job[_ROWS] + row * inputs * 4), inputs)
            bits = carray(ints(job[_ROWS] + row * inputs * 4), inputs)
            most = carray(floats(job[_MOST] + row * 4 * strips), strips)
            # The norms of the row and of its rounding error; rounded as in `maitred.engine.kernels.linear.job`.
            highest = np.int32(0)
            for i in range(inputs):
                highest = max(highest, bits[i] & np.int32(0x7FFFFFFF))
            largest = float_of_bits(highest)
            scale = largest / np.float32(127.0)
            shrink = np.float32(127.0) / largest if highest else np.float32(0.0)
            length = np.float32(0.0)
            away = np.float32(0.0)
            for i in range(inputs):
                length += numbers[i] * numbers[i]
                rest = numbers[i] - scale * np.rint(numbers[i] * shrink)
                away += rest * rest
            length, away = np.sqrt(length), np.sqrt(away)
            marks[:, row] = np.int8(0)
            best, best_top = 0, np.int32(-0x80000000)
            for part_first in range(0, outputs, part):
                part_end = min(part_first + part, outputs)
                strip = part_first // part * of_part
                for first in range(part_first, part_end, strip_outputs):
                    # Keys are ordered as the numbers are, and compare as vectors: most strips have one size.
                    width = min(strip_outputs, part_end - first)
                    patterns = carray(ints(job[_OUT] + (row * outputs + first) * 4), width)
                    top = np.int32(-0x80000000)
                    if width == strip_outputs:
                        for i in range(strip_outputs):
                            key = _key(patterns[i])
                            top = key if key > top else top
                    else:
                        for i in range(width):
                            key = _key(patterns[i])
                            top = key if key > top else top
                    if top > best_top:
                        best, best_top = strip, top
                    off = bounds[strip] * length + bounds[strips + strip] * away
                    most[strip] = float_of_bits(_key(top)) + off
                    strip += 1
            marks[best, row] = np.int8(1)
            row = take(job, NEXT, 1)

    return CompiledEntry(compute)


@cache
def mark_other_strips(strip_outputs: int) -> CompiledEntry:
    """Compiles a kernel that marks strips whose outputs can be the largest, and sets all others to minus infinity."""
    edition = EDITION

    def compute(address: Any) -> None:  # noqa: ANN401 - a C pointer
        if edition < 0:  # never; but what a function names is part of its key on disk
            return
        job = carray(address, _ALL)
        outputs, part, strips = job[_OUTPUTS], job[_PART], job[_STRIPS]
        of_part = (part + strip_outputs - 1) // strip_outputs
        founds = carray(longs(job[_FOUND]), job[COUNT])
        marks = carray(int8s(job[_MARKS]), (strips, job[COUNT]))
        row = take(job, NEXT, 1)
        while row < job[COUNT]:
            out = carray(floats(job[_OUT] + row * outputs * 4), outputs)
            most = carray(floats(job[_MOST] + row * 4 * strips), strips)
            best = 0
            while not marks[best, row]:
                best += 1
            marks[best, row] = np.int8(0)
            largest = np.float32(-np.inf)
            first = best // of_part * part + best % of_part * strip_outputs
            for i in range(first, min(min(first + strip_outputs, (best // of_part + 1) * part), outputs)):
                largest = out[i] if out[i] > largest else largest
            found = 1
            for part_first in range(0, outputs, part):
                part_end = min(part_first + part, outputs)
                strip = part_first // part * of_part
                for first in range(part_first, part_end, strip_outputs):
                    # NaN is below nothing, so its strip is computed, and the sampler sees the NaN.
                    if strip != best and most[strip] < largest:
                        out[first : min(first + strip_outputs, part_end)] = -np.inf
                    elif strip != best:
                        marks[strip, row] = np.int8(1)
                        found += 1
                    strip += 1
            founds[row] = found
            row = take(job, NEXT, 1)

    return CompiledEntry(compute)
