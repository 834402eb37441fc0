"""Quantisation of weights to 8 or 4 bits, in the layout that `maitred.engine.kernels.linear.tiles` reads."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from maitred.engine.kernels.linear.dots import LANES
from maitred.engine.kernels.linear.tiles import PANEL, VECTORS

GROUP_INPUTS = 32
"""Inputs that share a scale and an offset in a 4-bit weight; their sums must fit into 16 bits, see `dots`."""
_PANELS_AT_A_TIME = 64
"""Panels of a piece, so that a large weight is not copied as a whole."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Weight ``scale * number - offset`` of a checkpoint that stores numbers of 4 bits, in groups of `GROUP_INPUTS`.

    Attributes:
        numbers: uint8 ``[out, in]``, 0 to 15.
        scales: fp16 ``[out, groups]``.
        offsets: fp16 ``[out, groups]``.
    """

    numbers: Tensor
    scales: Tensor
    offsets: Tensor

    @property
    def shape(self) -> torch.Size:
        """Numbers of outputs and inputs."""
        return self.numbers.shape

    def panels(self) -> tuple[Tensor, Tensor]:
        """Lays the weight out as `panels_of_4_bits` does, unchanged: scales and offsets are in fp16."""
        outputs, groups = self.scales.shape
        missing = -outputs % PANEL
        numbers = functional.pad(self.numbers, (0, 0, 0, missing))
        halves = numbers.view(-1, VECTORS, LANES, groups * GROUP_INPUTS // 8, 2, 4)
        panels = (halves[..., 0, :] | halves[..., 1, :] << 4).permute(0, 3, 1, 2, 4)
        both = functional.pad(torch.stack((self.scales, self.offsets), dim=2), (0, 0, 0, 0, 0, missing))
        return panels.contiguous(), both.view(-1, PANEL, groups, 2).permute(0, 2, 3, 1).contiguous()

    def plain(self) -> Tensor:
        """Returns the weight in fp32."""
        grouped = self.numbers.view(*self.scales.shape, GROUP_INPUTS)
        return (grouped * self.scales.float()[..., None]).sub_(self.offsets.float()[..., None]).view(self.numbers.shape)


def panels_of_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises a weight to 8 bits with one scale per output; the largest weight of an output becomes 127.

    Args:
        weight: fp32 ``[out, in]``

    Returns:
        Bytes ``[panels, in / 4, VECTORS, LANES, 4]`` with 128 for zero, and fp32 scales ``[panels, PANEL]``.
    """
    inputs = weight.shape[1]
    steps = -(-inputs // 4)
    panels = torch.empty(_panels(weight), steps, VECTORS, LANES, 4, dtype=torch.uint8)
    scales = torch.empty(_panels(weight), PANEL)
    for place, part in _parts(weight, steps * 4):
        scale = part.abs().amax(dim=1) / 127
        rounded = (part / scale.clamp(min=torch.finfo().tiny)[:, None]).round_().add_(128).to(torch.uint8)
        panels[place] = rounded.view(-1, VECTORS, LANES, steps, 4).permute(0, 3, 1, 2, 4)
        scales[place] = scale.view(-1, PANEL)
    return panels, scales


def lengths_of_8_bits(weight: Tensor, panels: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, for each output, the norms of the rounding error of its weights and of the rounded weights.

    Args:
        weight: fp32 ``[out, in]``
        panels: Panels from `pack_int8_panels` of this weight.
        scales: Scales from `pack_int8_panels` of this weight.
    """
    steps = panels.shape[1]
    off, length = torch.empty(2, len(panels) * PANEL)
    for place, part in _parts(weight, steps * 4):
        numbers = panels[place].permute(0, 2, 3, 1, 4).reshape(-1, steps * 4).float().sub_(128)
        numbers *= scales[place].reshape(-1, 1)
        outputs = slice(place.start * PANEL, place.stop * PANEL)
        off[outputs], length[outputs] = _lengths(part - numbers), _lengths(numbers)
    return off[: len(weight)], length[: len(weight)]


def _lengths(rows: Tensor) -> Tensor:
    """Returns the norm of each row, also where the square of each number is too small for fp32."""
    largest = rows.abs().amax(dim=1)
    lengths: Tensor = torch.linalg.vector_norm(rows / largest.clamp(min=torch.finfo().tiny)[:, None], dim=1)
    return lengths.mul_(largest)


def panels_of_4_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises a weight to 4 bits with a scale and an offset per output and group.

    Args:
        weight: fp32 ``[out, in]``, equal to ``scale * number - offset`` but for rounding.

    Returns:
        Bytes ``[panels, in / 8, VECTORS, LANES, 4]``, inputs 0 to 3 of a step in the lower halves and 4 to 7 in the
        upper ones; and scales and offsets in bf16 ``[panels, groups, 2, PANEL]``.
    """
    groups = -(-weight.shape[1] // GROUP_INPUTS)
    width = groups * GROUP_INPUTS
    panels = torch.empty(_panels(weight), width // 8, VECTORS, LANES, 4, dtype=torch.uint8)
    scales = torch.empty(_panels(weight), groups, 2, PANEL, dtype=torch.bfloat16)
    for place, part in _parts(weight, width):
        grouped = part.view(len(part), groups, GROUP_INPUTS)
        lowest, highest = grouped.amin(dim=2), grouped.amax(dim=2)
        # Rounded to their stored type before use, so that the numbers compensate the rounding.
        scale = ((highest - lowest) / 15).bfloat16()
        offset = (-lowest).bfloat16()
        numbers = (grouped + offset.float()[..., None]) / scale.float().clamp(min=torch.finfo().tiny)[..., None]
        halves = numbers.round_().clamp_(0, 15).to(torch.uint8).view(-1, VECTORS, LANES, width // 8, 2, 4)
        panels[place] = (halves[..., 0, :] | halves[..., 1, :] << 4).permute(0, 3, 1, 2, 4)
        both = torch.stack((scale, offset), dim=2)
        scales[place] = both.view(-1, PANEL, groups, 2).permute(0, 2, 3, 1)
    return panels, scales


def _panels(weight: Tensor) -> int:
    return -(-len(weight) // PANEL)


def _parts(weight: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields the weight in pieces of whole panels, padded with zeros for missing outputs and inputs."""
    for first in range(0, _panels(weight), _PANELS_AT_A_TIME):
        place = slice(first, min(first + _PANELS_AT_A_TIME, _panels(weight)))
        part = weight[place.start * PANEL : place.stop * PANEL].float()
        missing = (place.stop - place.start) * PANEL - len(part)
        yield place, functional.pad(part, (0, width - part.shape[1], 0, missing))
