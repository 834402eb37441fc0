"""Linear for fp32 in our own strips, for processors without MKL.

A row's result does not depend on the rows beside it, to the last bit, on every processor. Figures:
``docs/design/0050-narrow-registers.md``.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from maitred.engine.compiled import VECTOR_LANES
from maitred.engine.kernels.linear.dots import LANES
from maitred.engine.kernels.linear.quantised import align
from maitred.engine.kernels.linear.strips import (
    FIELDS,
    NARROW,
    OF_MKL,
    WEIGHTS_WORTH_A_THREAD,
    TileShape,
    block_inputs,
    strips_at_a_time,
    strips_product,
)
from maitred.engine.kernels.tape import Tape

BEST = OF_MKL if VECTOR_LANES == LANES else NARROW
_ABREAST_BYTES = 1 << 18
"""Bytes of weights that all rows go through before further weights: about half of a second-level cache."""


class TiledLinear:
    """Linear ``rows @ weight.T + bias`` with a weight laid out in strips; it keeps no other copy of the weight.

    Implements `maitred.engine.kernels.linear.form.StripLinear`: there is one part.

    Args:
        weight: fp32 ``[out, in]`` on the CPU.
        bias: ``[out]``
        tile: Shape of a tile; the best for the processor's registers unless given.
    """

    __slots__ = ("_bias", "_packed", "_shape", "_tile")
    kind: ClassVar[str] = "tiled"
    alignment: ClassVar[int] = 64

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, tile: TileShape = BEST) -> None:
        outputs, inputs = weight.shape
        packed = align(torch.zeros(-(-outputs // tile.outputs) * tile.outputs * inputs), self.alignment)
        for place, strips in _strips(weight, tile.outputs):
            packed[place : place + strips.numel()].view_as(strips).copy_(strips)
        self._hold(packed, (outputs, inputs), bias, tile)

    def _hold(self, packed: Tensor, shape: tuple[int, int], bias: Tensor | None, tile: TileShape) -> None:
        self._packed, self._shape, self._bias, self._tile = packed, shape, bias, tile

    def __call__(self, rows: Tensor) -> Tensor:
        """Maps ``[T, in]`` to ``[T, out]``."""
        count, threads = len(rows), torch.get_num_threads()
        rows, out = rows.contiguous(), rows.new_empty(count, self._shape[0])
        worth = self._rows_worth_a_thread
        fields = self._fields(rows.data_ptr(), out.data_ptr(), threads)
        strips_product(self._tile).run(count, fields, max(1, min(threads, count // worth)) if worth else threads)
        return out

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        return self._shape

    @property
    def part(self) -> int:
        """Number of outputs in a part, which are all outputs; implements `StripLinear.part`."""
        return self._shape[0]

    @property
    def strip(self) -> int:
        """Number of outputs in a strip; implements `StripLinear.strip`."""
        return self._tile.outputs

    def scratch_bytes(self, rows: int) -> int:
        """Returns 0: no scratch memory is needed; implements `TapedLinear.scratch_bytes`."""
        return 0

    def record(self, tape: Tape, rows: int, out: int, counter: int, scratch: int, most_rows: int) -> None:
        """Records the product on a tape; implements `TapedLinear.record`."""
        tape.add(strips_product(self._tile), self._fields(rows, out, tape.threads), counter, self._rows_worth_a_thread)

    def record_strips(self, tape: Tape, rows: int, out: int, counter: int, marks: int) -> None:
        """Records the product of marked strips on a tape; implements `StripLinear.record_strips`."""
        tape.add(strips_product(self._tile), [*self._fields(rows, out, tape.threads)[:-1], marks], counter, 0)

    @property
    def _rows_worth_a_thread(self) -> int:
        """Minimum rows per thread; 0: any number of rows is enough for all threads."""
        return WEIGHTS_WORTH_A_THREAD // (self._shape[0] * self._shape[1])

    def _fields(self, rows: int, out: int, threads: int) -> list[int]:
        """Makes the fields of a job; see `maitred.engine.kernels.linear.strips.FIELDS`."""
        outputs, inputs = self._shape
        block = block_inputs(inputs)
        share = strips_at_a_time(-(-outputs // self.strip), threads)
        fields = dict.fromkeys(FIELDS, 0) | {
            "inputs": inputs,
            "outputs": outputs,
            "rows": rows,
            "bias": 0 if self._bias is None else self._bias.data_ptr(),
            "out": out,
            "first": self._packed.data_ptr(),
            "block": block,
            "part": outputs,
            "threads": threads,
            "share": share,
            "abreast": max(1, min(share, _ABREAST_BYTES // (4 * block * self.strip))),
        }
        return list(fields.values())

    def tensors(self) -> dict[str, Tensor]:
        """Returns the packed weight, its shape and the bias; implements `Linear.tensors`."""
        tensors = {"packed": self._packed, "shape": torch.tensor([*self._shape, *self._tile])}
        return tensors if self._bias is None else tensors | {"bias": self._bias}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Makes the product from its tensors; implements `Linear.of`."""
        outputs, inputs, *tile = tensors["shape"].tolist()
        linear = cls.__new__(cls)
        linear._hold(align(tensors["packed"], cls.alignment), (outputs, inputs), tensors.get("bias"), TileShape(*tile))
        return linear


def _strips(weight: Tensor, strip: int) -> Iterator[tuple[int, Tensor]]:
    """Yields the strips of each block ``[strips, inputs, outputs]`` with their offsets; the short strip is last."""
    outputs, inputs = weight.shape
    block, padded = block_inputs(inputs), -(-outputs // strip) * strip
    whole = outputs // strip * strip
    for first in range(0, inputs, block):
        part = weight[:, first : first + block]
        place = padded * first
        if whole:
            yield place, part[:whole].view(-1, strip, part.shape[1]).transpose(1, 2)
        if whole < outputs:
            width = -(-(outputs - whole) // LANES) * LANES
            last = functional.pad(part[whole:], (0, 0, 0, width - (outputs - whole)))
            yield place + whole * part.shape[1], last.T[None]
