"""Weights of 8 or 4 bits, in the layout that `maitred.engine.kernels.linear.tiles` reads.

They are quantised here, or have been by a checkpoint.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from maitred.engine.kernels.linear.dots import LANES
from maitred.engine.kernels.linear.tiles import BYTES, FP16, FP16_ALONE, FP32, PANEL, SIGNED_BYTES, VECTORS

GROUP_INPUTS = 32
"""Inputs that share a scale and an offset in a 4-bit weight; their sums must fit into 16 bits, see `dots`."""
_PANELS_AT_A_TIME = 64
"""Panels of a piece, so that a large weight is not copied as a whole."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Weight of a checkpoint that stores numbers of 4 or 8 bits, with a scale for some inputs of each output.

    A weight is ``scale * (number - zero) - offset``, where `zero` is 0 for 4 bits and 128 for 8. Scales and offsets
    are stored, or products of a stored byte and a factor that several groups share. fp32 has room for the product with
    a number, so a weight is rounded once at most, when the offset is subtracted.

    Attributes:
        bits: Bits of a number: 4 or 8.
        numbers: uint8 ``[out, in]``.
        scales: ``[out, groups]``, fp16 or fp32; with factors uint8 or int8.
        offsets: As the scales; None if there are none.
        factors: fp16 ``[out, groups that share one, 1 or 2]``, of scales and of offsets; None if there are none.
    """

    bits: int
    numbers: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    factors: Tensor | None = None

    @classmethod
    def stack(cls, weights: Sequence["GroupedWeight"]) -> "GroupedWeight":
        """Stacks weights along their outputs, unchanged; of different forms, they take 8 bits and scales in fp32."""
        if len({(weight.kind, weight.group_inputs, weight.bits) for weight in weights}) > 1:
            group = min(weight.group_inputs for weight in weights)
            weights = [weight._widen(group) for weight in weights]

        def join(parts: list[Tensor | None]) -> Tensor | None:
            present = [part for part in parts if part is not None]
            return torch.cat(present) if present else None

        return cls(
            weights[0].bits,
            torch.cat([weight.numbers for weight in weights]),
            torch.cat([weight.scales for weight in weights]),
            offsets=join([weight.offsets for weight in weights]),
            factors=join([weight.factors for weight in weights]),
        )

    @property
    def shape(self) -> torch.Size:
        """Numbers of outputs and inputs."""
        return self.numbers.shape

    @property
    def group_inputs(self) -> int:
        """Inputs that share a scale."""
        return self.numbers.shape[1] // self.scales.shape[1]

    @property
    def kind(self) -> int:
        """Form of the scales; see `maitred.engine.kernels.linear.tiles.SCALE_FORMS`."""
        if self.scales.dtype == torch.float32:
            return FP32
        if self.factors is not None:
            return SIGNED_BYTES if self.offsets is None else BYTES
        return FP16_ALONE if self.offsets is None else FP16

    def panels(self) -> tuple[Tensor, Tensor]:
        """Lays the weight out as the tiles read it, unchanged.

        Returns:
            Bytes ``[panels, steps, VECTORS, LANES, 4]``, and scales ``[panels, …]`` as bytes; see `SCALE_FORMS`.
        """
        missing = -len(self.numbers) % PANEL
        numbers = functional.pad(self.numbers, (0, 0, 0, missing))
        if self.bits == 4:
            halves = numbers.view(-1, VECTORS, LANES, numbers.shape[1] // 8, 2, 4)
            numbers = halves[..., 0, :] | halves[..., 1, :] << 4
        else:
            numbers = numbers.view(-1, VECTORS, LANES, numbers.shape[1] // 4, 4)
        both = [self.scales] if self.offsets is None else [self.scales, self.offsets]
        scales = _by_panel(torch.stack(both, dim=2), missing)
        if self.factors is not None:
            factors = _by_panel(self.factors, missing)
            scales = torch.cat((factors, scales.view(*factors.shape[:2], -1)), dim=2)
        return numbers.permute(0, 3, 1, 2, 4).contiguous(), scales.contiguous()

    def plain(self) -> Tensor:
        """Returns the weight in fp32."""
        scales, offsets = self._scales_and_offsets()
        grouped = self.numbers.view(*scales.shape, -1).float().sub_(0 if self.bits == 4 else 128)
        grouped.mul_(scales[..., None])
        return (grouped if offsets is None else grouped.sub_(offsets[..., None])).view(self.shape)

    def _scales_and_offsets(self) -> tuple[Tensor, Tensor | None]:
        """Returns scales and offsets in fp32 ``[out, groups]``."""
        parts = [self.scales.float(), None if self.offsets is None else self.offsets.float()]
        if self.factors is not None:
            factors = self.factors.float().repeat_interleave(self.scales.shape[1] // self.factors.shape[1], dim=1)
            parts = [None if part is None else part * factors[..., side] for side, part in enumerate(parts)]
        assert parts[0] is not None
        return parts[0], parts[1]

    def _widen(self, group: int) -> "GroupedWeight":
        """Returns the same weight in 8 bits, with scales and offsets in fp32 for groups of so many inputs."""
        scales, offsets = self._scales_and_offsets()
        offsets = torch.zeros_like(scales) if offsets is None else offsets
        times = self.group_inputs // group
        numbers = self.numbers + 128 if self.bits == 4 else self.numbers
        return GroupedWeight(8, numbers, *(part.repeat_interleave(times, dim=1) for part in (scales, offsets)))


def _by_panel(parts: Tensor, missing: int) -> Tensor:
    """Lays ``[out, groups, parts]`` out by panels; returns bytes ``[panels, groups, bytes]``, outputs side by side."""
    padded = functional.pad(parts, (0, 0, 0, 0, 0, missing))
    placed = padded.view(-1, PANEL, *parts.shape[1:]).permute(0, 2, 3, 1).contiguous()
    return placed.view(torch.uint8).flatten(2)


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


def panels_of_16_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight to bf16; one that is in bf16 stays as it is.

    Args:
        weight: ``[out, in]``

    Returns:
        Bytes ``[panels, in / 2, VECTORS, LANES, 4]``, and fp32 scales ``[panels, 1]``, which are not read.
    """
    width = -(-weight.shape[1] // 2) * 2
    panels = torch.empty(_panels(weight), width // 2, VECTORS, LANES, 4, dtype=torch.uint8)
    for place, part in _parts(weight, width):
        stored = part.bfloat16().view(torch.uint8)
        panels[place] = stored.view(-1, VECTORS, LANES, width // 2, 4).permute(0, 3, 1, 2, 4)
    return panels, torch.ones(_panels(weight), 1)


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
