"""Products with weights of 8 or 4 bits, for rows that are rounded to 8 bits or stay fp32.

What a decode step of few rows takes is the time to read the weights, so half the bits are half the time. With many
rows it is arithmetic, of which a processor with VNNI does four times as much in bytes as in fp32. Figures:
``docs/quantization.md``.
"""

import ctypes
from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from maitred.engine.kernels.linear.job import FIELDS, product, quantise_rows
from maitred.engine.kernels.linear.panels import GROUP_INPUTS, panels_of_4_bits, panels_of_8_bits
from maitred.engine.kernels.linear.tiles import PANEL

_ROWS_WORTH_SHARING = 16
"""Fewer rows are rounded faster than a second thread is woken."""
_MOST_PANELS_AT_A_TIME = 8
_TURNS = 4
"""A thread comes back for more so often, at least: what one is late by, the others make up for."""
_MOST_INPUTS = (1 << 31) // (255 * 127)
"""More products of bytes could overflow a sum of 32 bits."""

_Job = ctypes.c_int64 * len(FIELDS)
_NEXT, _LAST, _SHARE, _ROWS, _SCALES, _SUMS, _COUNT, _OUT, _SOURCE = (
    FIELDS.index(name) for name in ("next", "last", "share", "rows", "row_scales", "row_sums", "count", "out", "source")
)


class QuantisedLinear:
    """``rows @ weight.T + bias`` with a weight that is rounded once.

    8-bit weights have a scale for each output; 4-bit ones a scale and an offset for each output and each
    `GROUP_INPUTS` inputs.

    Args:
        weight: fp32 ``[out, in]`` on the CPU.
        bias: ``[out]``
        bits: Of a weight, 8 or 4.
        real: Rows stay fp32. Otherwise each row is rounded to 8 bits with a scale of its own.
    """

    __slots__ = ("_form", "_groups", "_job", "_panels", "_parts", "_product", "_quantise", "_shape", "_width")
    kind: ClassVar[str] = "quantised"
    alignment: ClassVar[int] = 64

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, bits: int, real: bool) -> None:
        outputs, inputs = weight.shape
        if inputs > _MOST_INPUTS:
            raise ValueError(f"A weight with {inputs} inputs cannot be rounded; {_MOST_INPUTS} are the most.")
        panels, scales = (panels_of_4_bits if bits == 4 else panels_of_8_bits)(weight)
        padded = torch.zeros(len(panels) * PANEL)
        if bias is not None:
            padded[:outputs] = bias
        shape = torch.tensor([outputs, inputs, bits, real])
        self._hold({"panels": panels, "scales": scales, "bias": padded, "shape": shape})

    def _hold(self, parts: Mapping[str, Tensor]) -> None:
        self._parts = {name: _aligned(part, self.alignment) for name, part in parts.items()}
        outputs, inputs, bits, real = self._parts["shape"].tolist()
        per_step, group = (8, GROUP_INPUTS) if bits == 4 else (4, -(-inputs // 4) * 4)
        self._groups = -(-inputs // group)
        self._shape, self._width = (outputs, inputs), self._groups * group
        self._product = product(bits, real=bool(real))
        self._quantise = None if real else quantise_rows()
        panels, scales = self._parts["panels"], self._parts["scales"]
        self._panels = len(panels)
        fields = dict.fromkeys(FIELDS, 0) | {
            "row_bytes": self._width * (4 if real else 1),
            "inputs": inputs,
            "groups": self._groups,
            "steps": group // per_step,
            "weights": panels.data_ptr(),
            "panel_bytes": panels[0].nbytes,
            "scales": scales.data_ptr(),
            "scale_bytes": scales[0].nbytes,
            "bias": self._parts["bias"].data_ptr(),
            "outputs": outputs,
        }
        self._job = bytes(_Job(*fields.values()))

    def __call__(self, rows: Tensor) -> Tensor:
        """``[T, in]`` -> ``[T, out]``."""
        count, (outputs, inputs) = len(rows), self._shape
        out = rows.new_empty(count, outputs)
        if not count:
            return out
        rows, width, threads = rows.contiguous(), self._width, torch.get_num_threads()
        job = _Job.from_buffer_copy(self._job)
        if self._quantise is None:
            kept = rows if width == inputs else functional.pad(rows, (0, width - inputs))
            job[_ROWS] = kept.data_ptr()
        else:
            # The bytes of all rows, their scales, their sums: widths are multiples of 4, so each is where it must be.
            kept = torch.empty(count * (width + 4 + 4 * self._groups), dtype=torch.uint8)
            job[_ROWS] = place = kept.data_ptr()
            job[_SCALES], job[_SUMS] = place + count * width, place + count * (width + 4)
            job[_SOURCE], job[_LAST] = rows.data_ptr(), count
            sharing = threads if count >= _ROWS_WORTH_SHARING else 1
            job[_SHARE] = -(-count // (_TURNS * sharing))
            self._quantise(job, sharing)
            job[_NEXT] = 0
        job[_COUNT], job[_OUT], job[_LAST] = count, out.data_ptr(), self._panels
        job[_SHARE] = max(1, min(_MOST_PANELS_AT_A_TIME, self._panels // (_TURNS * threads)))
        self._product(job, min(threads, self._panels))
        return out

    def tensors(self) -> dict[str, Tensor]:
        """See `Linear`."""
        return dict(self._parts)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """See `Linear`."""
        linear = cls.__new__(cls)
        linear._hold(tensors)
        return linear


def _aligned(tensor: Tensor, alignment: int) -> Tensor:
    """The same tensor, or a copy from where whole vectors can be loaded."""
    if tensor.data_ptr() % alignment == 0:
        return tensor
    room = torch.empty(tensor.nbytes + alignment, dtype=torch.uint8)
    first = -room.data_ptr() % alignment
    return room[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
