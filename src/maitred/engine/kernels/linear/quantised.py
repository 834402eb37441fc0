"""Linear with weights of 8 or 4 bits, for rows that are rounded to 8 bits or stay fp32.

A decode step of few rows takes as long as reading the weights, so half the bits take half the time. With many rows the
arithmetic takes longest, and a processor with VNNI does four times as much of it in bytes as in fp32. Figures:
``docs/quantization.md``.
"""

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from maitred.engine.kernels.job import CompiledEntry
from maitred.engine.kernels.linear.job import FIELDS, bf16_product, product, quantise_rows, round_rows, widen_rows
from maitred.engine.kernels.linear.panels import (
    GROUP_INPUTS,
    GroupedWeight,
    panels_of_4_bits,
    panels_of_8_bits,
    panels_of_16_bits,
)
from maitred.engine.kernels.linear.tiles import BF16, PANEL, ROW, SCALE_FORMS
from maitred.engine.kernels.tape import Tape

_ROWS_WORTH_A_THREAD = 8
"""Minimum rows per thread for preparing rows: fewer take less time than waking a second thread."""
_MOST_PANELS_AT_A_TIME = 8
_TURNS = 4
"""Minimum number of shares per thread, so that other threads can take over the work of a late one."""
_PANELS = {4: panels_of_4_bits, 8: panels_of_8_bits, 16: panels_of_16_bits}
_MOST_INPUTS = (1 << 31) // (255 * 127)
"""Maximum inputs of a weight; more products of bytes could overflow a sum of 32 bits."""


class QuantisedLinear:
    """Linear ``rows @ weight.T + bias`` with a weight that is quantised once.

    8-bit weights have a scale for each output; 4-bit ones a scale and an offset for each output and each
    `GROUP_INPUTS` inputs, in bf16. Weights that a checkpoint stores in 8 or 4 bits keep what they have there.

    Args:
        weight: fp32 ``[out, in]`` on the CPU, or a weight that has few bits already.
        bias: ``[out]``
        bits: Bits of a weight: 16 (bf16, where `multiplies_bf16`), 8 or 4; those that it has for a grouped weight.
        real: Whether rows stay fp32. Otherwise each row is rounded to 8 bits with its own scale, or to bf16; for a
            grouped weight, with a scale for each group of inputs.
    """

    __slots__ = (
        "_fields",
        "_groups",
        "_item",
        "_panels",
        "_parts",
        "_product",
        "_ready",
        "_real",
        "_row_scales",
        "_shape",
        "_width",
    )
    kind: ClassVar[str] = "quantised"
    alignment: ClassVar[int] = 64

    def __init__(self, weight: Tensor | GroupedWeight, bias: Tensor | None = None, *, bits: int, real: bool) -> None:
        outputs, inputs = weight.shape
        if not real and inputs > _MOST_INPUTS:
            raise ValueError(f"A weight with {inputs} inputs cannot be rounded; {_MOST_INPUTS} are the most.")
        if isinstance(weight, GroupedWeight):
            (panels, scales), kind, group = weight.panels(), weight.kind, weight.group_inputs
        else:
            (panels, scales), kind = _PANELS[bits](weight), BF16 if bits == 4 else ROW
            group = GROUP_INPUTS if bits == 4 else -(-inputs * bits // 32) * 32 // bits
        padded = torch.zeros(len(panels) * PANEL)
        if bias is not None:
            padded[:outputs] = bias
        shape = torch.tensor([outputs, inputs, bits, real, kind, group])
        self._hold({"panels": panels, "scales": scales, "bias": padded, "shape": shape})

    def _hold(self, parts: Mapping[str, Tensor]) -> None:
        self._parts = {name: align(part, self.alignment) for name, part in parts.items()}
        outputs, inputs, bits, real, kind, group = map(int, self._parts["shape"].tolist())
        self._groups = -(-inputs // group)
        self._row_scales = self._groups if SCALE_FORMS[kind].of_rows else 1
        self._shape, self._width = (outputs, inputs), self._groups * group
        # Bytes of a number of a prepared row.
        self._item = 4 if real else bits // 8 if bits == 16 else 1
        self._product = bf16_product() if bits == 16 else product(bits, kind, real=bool(real))
        self._real = bool(real)
        self._ready = (widen_rows() if self._width > inputs else None) if real else quantise_rows()
        if bits == 16:
            self._ready = round_rows()
        panels, scales = self._parts["panels"], self._parts["scales"]
        self._panels = len(panels)
        self._fields = dict.fromkeys(FIELDS, 0) | {
            "row_bytes": self._width * self._item,
            "inputs": inputs,
            "groups": self._groups,
            "steps": group * bits // 32,
            "weights": panels.data_ptr(),
            "panel_bytes": panels[0].nbytes,
            "scales": scales.data_ptr(),
            "scale_bytes": scales[0].nbytes,
            "bias": self._parts["bias"].data_ptr(),
            "outputs": outputs,
            "panels": self._panels,
            "scales_of_row": self._row_scales,
        }

    def __call__(self, rows: Tensor) -> Tensor:
        """Maps ``[T, in]`` to ``[T, out]``."""
        count, threads = len(rows), torch.get_num_threads()
        rows, out = rows.contiguous(), rows.new_empty(count, self._shape[0])
        scratch = torch.empty(self.scratch_bytes(count), dtype=torch.uint8)
        for entry, fields, worth in self._calls(rows.data_ptr(), out.data_ptr(), scratch.data_ptr(), count, threads):
            entry.run(count, fields, min(threads, count // worth) if worth else min(threads, self._panels))
        return out

    def scratch_bytes(self, rows: int) -> int:
        """Returns the scratch memory for the prepared rows; implements `TapedLinear.scratch_bytes`."""
        if self._ready is None:
            return 0
        # The bytes of all rows, their scales, their sums: widths are multiples of 4, so all parts are aligned.
        own: int = self._width * self._item + (0 if self._real else 4 * (self._row_scales + self._groups))
        return rows * own

    def record(self, tape: Tape, rows: int, out: int, counter: int, scratch: int, most_rows: int) -> None:
        """Records the product on a tape; implements `TapedLinear.record`."""
        for entry, fields, worth in self._calls(rows, out, scratch, most_rows, tape.threads):
            tape.add(entry, fields, counter, worth)

    def _calls(
        self, rows: int, out: int, scratch: int, count: int, threads: int
    ) -> list[tuple[CompiledEntry, list[int], int]]:
        """Returns the calls in order: entry, job fields, and minimum rows per thread."""
        job = self._job(
            threads,
            rows=rows if self._ready is None else scratch,
            row_scales=scratch + count * self._width * self._item,
            row_sums=scratch + count * (self._width * self._item + 4 * self._row_scales),
            source=rows,
            out=out,
        )
        ready = [] if self._ready is None else [(self._ready, job, _ROWS_WORTH_A_THREAD)]
        return [*ready, (self._product, job, 0)]

    def _job(self, threads: int, **fields: int) -> list[int]:
        """Makes the fields of a job for so many threads; see `maitred.engine.kernels.linear.job.FIELDS`."""
        share = max(1, min(_MOST_PANELS_AT_A_TIME, self._panels // (_TURNS * threads)))
        return list((self._fields | {"share": share} | fields).values())

    def tensors(self) -> dict[str, Tensor]:
        """Returns panels, scales, bias and shape; implements `Linear.tensors`."""
        return dict(self._parts)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Makes the product from its tensors; implements `Linear.of`."""
        linear = cls.__new__(cls)
        linear._hold(tensors)
        return linear


def align(tensor: Tensor, alignment: int) -> Tensor:
    """Returns the tensor, or a copy of it at an aligned address if it is not aligned."""
    if tensor.data_ptr() % alignment == 0:
        return tensor
    scratch = torch.empty(tensor.nbytes + alignment, dtype=torch.uint8)
    first = -scratch.data_ptr() % alignment
    return scratch[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
