"""The largest output of a row, exactly, from a weight of which a small part is read.

A greedy answer needs the largest logit and no other, but a head is the largest weight of a small model, and with few
rows a product takes as long as its weight takes to be read. So all outputs are computed from a second weight first,
rounded to 8 bits: a quarter of the memory. How far an output can be off is known from lengths (Cauchy-Schwarz)::

    |w·h - w'·h'|  <=  |w - w'| |h|  +  |w'| |h - h'|

where ``w'`` and ``h'`` are what was rounded. Outputs are computed from the weight as it is in strips (see
`maitred.engine.kernels.linear.form.StripLinear`), with the same bits as ever: first of each row the one strip that
holds the largest rounded output. Another output that stays below the largest of these even if it is off by that much
cannot be the largest. Those that can are computed, too, so that the largest of them is what it would have been; all
others are set to minus infinity. Of 150,000 random outputs a dozen are left.

Where many are, nothing is gained, and a search costs a quarter of a product on top; see `HeadSearch`.
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
"""Fewer stay in a processor's cache, or are read so soon that a search gains nothing."""
EDITION = 3
"""Raise it with every change to what is compiled; see `maitred.engine.kernels.linear.tiles.EDITION`."""
_SLACK = 1.001
"""For the rounding of the lengths themselves."""
_WORTH_SHARE = 0.5
"""So many of all strips may be computed, counted once for each row: a search computes them row by row."""
_PATIENCE_STEPS = 64


class HeadSearch:
    """Whether a search pays: given up for some steps after one in which too much was computed all the same.

    Args:
        strips: Of the product.
    """

    def __init__(self, strips: int) -> None:
        self._strips = strips
        self._rest = 0

    def begins(self, rows: int) -> bool:
        """Whether the next step of so many rows is to be a search."""
        if self._rest:
            self._rest -= 1
            return False
        return rows <= MOST_ROWS

    def record(self, strips: Tensor) -> None:
        """How many strips of each row were computed in the end."""
        if int(strips.sum()) > _WORTH_SHARE * self._strips:
            self._rest = _PATIENCE_STEPS


class ScreenedLinear:
    """A product in fp32 that can also be searched for the largest output of each row.

    Args:
        exact: The product.
        weight: What it multiplies with, fp32 ``[out, in]``.
    """

    __slots__ = ("_bounds", "_exact", "_inputs", "_outputs", "_rough")
    kind: ClassVar[str] = "screened"
    alignment: ClassVar[int] = PackedLinear.alignment

    def __init__(self, exact: StripLinear, weight: Tensor) -> None:
        rough = QuantisedLinear(weight, bits=8, real=False)
        off, length = lengths_of_8_bits(weight, *(rough.tensors()[name] for name in ("panels", "scales")))
        # What the order of additions changes is beyond neither: n additions of fp32, twice.
        off = off + (weight.shape[1] + 64) * 2.0**-23 * (off + length)
        self._hold(exact, rough, torch.stack((_by_strip(exact, off), _by_strip(exact, length))) * _SLACK)

    def _hold(self, exact: StripLinear, rough: QuantisedLinear, bounds: Tensor) -> None:
        self._exact, self._rough, self._bounds = exact, rough, bounds.contiguous()
        self._outputs, self._inputs = exact.shape

    def search(self) -> HeadSearch:
        """To ask before each step whether it is to be one."""
        return HeadSearch(self._bounds.shape[1])

    def __call__(self, rows: Tensor) -> Tensor:
        """``[T, in]`` -> ``[T, out]``: all of them."""
        return self._exact(rows)

    def scratch_bytes(self, rows: int) -> int:
        """See `maitred.engine.kernels.linear.form.TapedLinear`."""
        searched = min(rows, MOST_ROWS)
        return self._rough.scratch_bytes(searched) + searched * self._bounds.shape[1] * (4 + 1)

    def record(self, tape: Tape, rows: int, out: int, counter: int, room: int, most_rows: int) -> None:
        """See `maitred.engine.kernels.linear.form.TapedLinear`."""
        self._exact.record(tape, rows, out, counter, room, most_rows)

    def record_search(
        self, tape: Tape, rows: int, out: int, counter: int, room: int, most_rows: int, found: Tensor
    ) -> None:
        """The same for a search, of at most `maitred.engine.kernels.linear.strips.MOST_ROWS` rows.

        Args:
            tape: To be played as long as this product lives.
            rows: Address of fp32 ``[most_rows, in]``.
            out: Address of fp32 ``[most_rows, out]``.
            counter: Address of an int64: how many rows there are when the tape is played.
            room: Address of `room_bytes` for ``most_rows``.
            most_rows: Most that there can be.
            found: int64 ``[most_rows]``: gets the number of strips of each row that were computed in the end.
        """
        searched, strips = min(most_rows, MOST_ROWS), self._bounds.shape[1]
        self._rough.record(tape, rows, out, counter, room, searched)
        most = room + self._rough.scratch_bytes(searched)
        marks = most + searched * strips * 4
        exact = self._exact
        places = [rows, out, self._bounds.data_ptr(), most, marks, found.data_ptr()]
        fields = [*places, self._inputs, self._outputs, exact.part, strips]
        for screening in (mark_best_strips(exact.strip), mark_other_strips(exact.strip)):
            tape.add(screening, fields, counter, 1)
            exact.record_strips(tape, rows, out, counter, marks)

    def tensors(self) -> dict[str, Tensor]:
        """See `Linear`."""
        parts = {"exact": self._exact.tensors(), "rough": self._rough.tensors()}
        named = {f"{part}.{name}": tensor for part, own in parts.items() for name, tensor in own.items()}
        return {**named, "bounds": self._bounds}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """See `Linear`."""

        def part(name: str) -> dict[str, Tensor]:
            return {key.removeprefix(f"{name}."): own for key, own in tensors.items() if key.startswith(f"{name}.")}

        exact = part("exact")
        form: type[StripLinear] = PackedLinear if "layout" in exact else TiledLinear
        linear = cls.__new__(cls)
        linear._hold(form.of(exact), QuantisedLinear.of(part("rough")), tensors["bounds"])
        return linear


def searchable(product: Linear, weight: Tensor) -> ScreenedLinear | None:
    """The same product with a search, where there can be one and it would pay."""
    if weight.numel() < WORTH_WEIGHTS or not isinstance(product, PackedLinear | TiledLinear):
        return None
    if isinstance(product, PackedLinear) and not product.reads_strips:
        return None
    return ScreenedLinear(product, weight)


def _by_strip(exact: StripLinear, numbers: Tensor) -> Tensor:
    """The largest of each strip."""
    of_part = -(-exact.part // exact.strip)
    parts = numbers.new_zeros(-(-len(numbers) // exact.part), of_part * exact.strip)
    for index, own in enumerate(parts):
        part = numbers[index * exact.part :][: exact.part]
        own[: len(part)] = part
    return parts.view(-1, exact.strip).amax(dim=1)


_FIELDS = "rows", "out", "bounds", "most", "marks", "found", "inputs", "outputs", "part", "strips"
"""Of a screening's job, behind those that all have: addresses of rows, of what the rounded weight gave, of the bounds
``[2, strips]``, of the most that an output of each strip can be ``[rows, strips]``, of which strips are to be computed
``[strips, rows]``, and of how many of a row are ``[rows]``; then sizes, ``part`` as in `StripLinear`."""
_ROWS, _OUT, _BOUNDS, _MOST, _MARKS, _FOUND, _INPUTS, _OUTPUTS, _PART, _STRIPS = range(
    COUNT + 1, COUNT + 1 + len(_FIELDS)
)
_ALL = COUNT + 1 + len(_FIELDS)


@register_jitable  # type: ignore[untyped-decorator]
def _key(pattern: np.int32) -> np.int32:
    """An fp32 number's bits as an integer that is ordered as the number is; the key's own key are the bits again."""
    return np.int32(pattern ^ np.int32(np.int32(pattern >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@cache
def mark_best_strips(strip_outputs: int) -> CompiledEntry:
    """Marks the strip with each row's largest rounded output, and notes the most that those of all strips can be."""
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
            # The row's length, and that of what its rounding takes off; as in `maitred.engine.kernels.linear.job`.
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
                    # Ordered as the numbers are, and compared many at a time: all but the last are of one size.
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
    """Marks the strips that can hold more than the one that was computed, and makes minus infinity of all others."""
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
                    # What is no number is below nothing, so it is computed, and seen by whoever draws.
                    if strip != best and most[strip] < largest:
                        out[first : min(first + strip_outputs, part_end)] = -np.inf
                    elif strip != best:
                        marks[strip, row] = np.int8(1)
                        found += 1
                    strip += 1
            founds[row] = found
            row = take(job, NEXT, 1)

    return CompiledEntry(compute)
