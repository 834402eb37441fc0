"""The largest output of a row, exactly, from a weight of which a small part is read.

A greedy answer needs the largest logit and no other, but a head is the largest weight of a small model, and with few
rows a product takes as long as its weight takes to be read. So all outputs are computed from a second weight first,
rounded to 8 bits: a quarter of the memory. How far an output can be off is known from lengths (Cauchy-Schwarz)::

    |w·h - w'·h'|  <=  |w - w'| |h|  +  |w'| |h - h'|

where ``w'`` and ``h'`` are what was rounded. An output that stays below another one even if it is off by that much and
the other one as well cannot be the largest. Those that can are computed from the weight as it is, in strips (see
`strips`) and with the same bits as ever, so that the largest of them is what it would have been; all others are set to
minus infinity. Of 150,000 random outputs a dozen are left.

Where many are, nothing is gained, and a search costs a quarter of a product on top; see `Search`.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numba import carray
from torch import Tensor

from maitred.engine.kernels.job import COUNT, NEXT, Entry, floats, int8s, ints, longs, take
from maitred.engine.kernels.linear.packed import PackedLinear
from maitred.engine.kernels.linear.panels import lengths_of_8_bits
from maitred.engine.kernels.linear.quantised import QuantisedLinear
from maitred.engine.kernels.linear.strips import STRIP, strips_product
from maitred.engine.kernels.simd import float_of_bits
from maitred.engine.kernels.tape import Tape

MOST_ROWS = 8
"""That are searched at once. Each has strips of its own that are left; with more rows, all but nothing is saved."""
WORTH_WEIGHTS = 1 << 24
"""Fewer stay in a processor's cache, or are read so soon that a search gains nothing."""
EDITION = 1
"""Raise it with every change to what is compiled; see `maitred.engine.kernels.linear.tiles.EDITION`."""
_SLACK = 1.001
"""For the rounding of the lengths themselves."""
_WORTH_SHARE = 0.125
"""Of strips, which are computed row by row in a search."""
_PATIENCE_STEPS = 64


class Search:
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

    def found(self, strips: Tensor) -> None:
        """How many strips of each row were computed in the end."""
        if int(strips.sum()) > _WORTH_SHARE * self._strips * len(strips):
            self._rest = _PATIENCE_STEPS


class ScreenedLinear:
    """A product in fp32 that can also be searched for the largest output of each row.

    Args:
        exact: The product; one that reads strips.
        weight: What it multiplies with, fp32 ``[out, in]``.
    """

    __slots__ = ("_bounds", "_exact", "_inputs", "_outputs", "_rough")
    kind: ClassVar[str] = "screened"
    alignment: ClassVar[int] = PackedLinear.alignment

    def __init__(self, exact: PackedLinear, weight: Tensor) -> None:
        rough = QuantisedLinear(weight, bits=8, real=False)
        off, length = lengths_of_8_bits(weight, *(rough.tensors()[name] for name in ("panels", "scales")))
        # What the order of additions changes is beyond neither: n additions of fp32, twice.
        off = off + (weight.shape[1] + 64) * 2.0**-23 * (off + length)
        self._hold(exact, rough, torch.stack((_by_strip(exact, off), _by_strip(exact, length))) * _SLACK)

    def _hold(self, exact: PackedLinear, rough: QuantisedLinear, bounds: Tensor) -> None:
        self._exact, self._rough, self._bounds = exact, rough, bounds.contiguous()
        self._outputs, self._inputs = exact.shape

    def search(self) -> Search:
        """To ask before each step whether it is to be one."""
        return Search(self._bounds.shape[1])

    def __call__(self, rows: Tensor) -> Tensor:
        """``[T, in]`` -> ``[T, out]``: all of them."""
        return self._exact(rows)

    def room_bytes(self, rows: int) -> int:
        """See `maitred.engine.kernels.linear.form.Taped`."""
        searched = min(rows, MOST_ROWS)
        return self._rough.room_bytes(searched) + searched * self._bounds.shape[1] * (8 + 1)

    def record(self, tape: Tape, rows: int, out: int, counter: int, room: int, most_rows: int) -> None:
        """See `maitred.engine.kernels.linear.form.Taped`."""
        self._exact.record(tape, rows, out, counter, room, most_rows)

    def record_search(
        self, tape: Tape, rows: int, out: int, counter: int, room: int, most_rows: int, found: Tensor
    ) -> None:
        """The same for a search, of at most `MOST_ROWS` rows.

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
        tops = room + self._rough.room_bytes(searched)
        marks = tops + searched * strips * 8
        places = [rows, out, self._bounds.data_ptr(), tops, marks, found.data_ptr()]
        sizes = [self._inputs, self._outputs, self._exact.layout.part, strips]
        tape.add(screen_rows(), places + sizes, counter, 1)
        tape.add(strips_product(), self._exact.strip_fields(rows, out, tape.threads, marks), counter, 0)

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

        linear = cls.__new__(cls)
        linear._hold(PackedLinear.of(part("exact")), QuantisedLinear.of(part("rough")), tensors["bounds"])
        return linear


def searchable(product: object, weight: Tensor) -> ScreenedLinear | None:
    """The same product with a search, where there can be one and it would pay."""
    if isinstance(product, PackedLinear) and product.reads_strips and weight.numel() >= WORTH_WEIGHTS:
        return ScreenedLinear(product, weight)
    return None


def _by_strip(exact: PackedLinear, numbers: Tensor) -> Tensor:
    """The largest of each strip."""
    layout = exact.layout
    of_part = -(-layout.part // STRIP)
    parts = numbers.new_zeros(layout.strips(len(numbers)) // of_part, of_part * STRIP)
    for index, own in enumerate(parts):
        part = numbers[index * layout.part :][: layout.part]
        own[: len(part)] = part
    return parts.view(-1, STRIP).amax(dim=1)


@cache
def screen_rows() -> Entry:
    """Marks the strips that can hold a row's largest output, and makes minus infinity of all others.

    Fields: rows, what the rounded weight gave, bounds ``[2, strips]``, room for each strip's largest output and how far
    it can be off ``[rows, 2, strips]``, marks ``[rows, strips]``, how many of a row are marked ``[rows]``; inputs,
    outputs, outputs of a part, strips.
    """
    own, strip_outputs, edition = COUNT + 1, STRIP, EDITION

    def compute(address: Any) -> None:  # noqa: ANN401 - a C pointer
        if edition < 0:  # never; but what a function names is part of its key on disk
            return
        job = carray(address, own + 10)
        inputs, outputs, part, strips = job[own + 6], job[own + 7], job[own + 8], job[own + 9]
        of_part = (part + strip_outputs - 1) // strip_outputs
        bounds = carray(floats(job[own + 2]), 2 * strips)
        founds = carray(longs(job[own + 5]), job[COUNT])
        row = take(job, NEXT, 1)
        while row < job[COUNT]:
            numbers = carray(floats(job[own] + row * inputs * 4), inputs)
            bits = carray(ints(job[own] + row * inputs * 4), inputs)
            rough = carray(floats(job[own + 1] + row * outputs * 4), outputs)
            patterns = carray(ints(job[own + 1] + row * outputs * 4), outputs)
            tops = carray(floats(job[own + 3] + row * 8 * strips), strips)
            offs = carray(floats(job[own + 3] + (row * 8 + 4) * strips), strips)
            marks = carray(int8s(job[own + 4] + row * strips), strips)
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
            floor = np.float32(-np.inf)
            for strip in range(strips):
                first = strip // of_part * part + strip % of_part * strip_outputs
                end = min(min(first + strip_outputs, (strip // of_part + 1) * part), outputs)
                # Ordered as the numbers are, and compared many at a time.
                top = np.int32(-0x80000000)
                for i in range(first, end):
                    pattern = patterns[i]
                    key = np.int32(pattern ^ np.int32(np.int32(pattern >> np.int32(31)) & np.int32(0x7FFFFFFF)))
                    top = key if key > top else top
                top = np.int32(top ^ np.int32(np.int32(top >> np.int32(31)) & np.int32(0x7FFFFFFF)))
                tops[strip] = float_of_bits(top)
                offs[strip] = bounds[strip] * length + bounds[strips + strip] * away
                least = tops[strip] - offs[strip]
                floor = least if least > floor else floor
            found = 0
            for strip in range(strips):
                first = strip // of_part * part + strip % of_part * strip_outputs
                end = min(min(first + strip_outputs, (strip // of_part + 1) * part), outputs)
                # What is no number is below nothing, so it is computed, and seen by whoever draws.
                below = tops[strip] + offs[strip] < floor
                marks[strip] = np.int8(0 if below else 1)
                if below:
                    rough[first:end] = np.float32(-np.inf)
                else:
                    found += 1
            founds[row] = found
            row = take(job, NEXT, 1)

    return Entry(compute)
