"""A batch of texts as one run of rows, without padding, and which of them attend to each other.

All but the attention of an encoder looks at one token at a time, so texts of any lengths lie one behind the other and
nothing is computed that nobody asked for. Only for the attention are they laid side by side, in groups of similar
length: a group is as wide as its longest text, and what it has too many is masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

_WASTE = 0.25
"""Part of a group's places that may be padding."""


@dataclass(frozen=True, slots=True)
class TextGroup:
    """Texts that attend side by side, `B` of them, the longest `L` tokens."""

    rows: Tensor
    """``[B * L]``: which row of the batch stands at each place; padding repeats the first."""
    filled: Tensor | None
    """``[B, 1, 1, L]``: the places that are no padding; None: there is none."""
    places: Tensor
    """Which of the ``B * L`` places are no padding, in the order of..."""
    targets: Tensor
    """...their rows in the batch."""
    texts: int


@dataclass(frozen=True, slots=True)
class PackedRows:
    """`T` tokens of `N` texts, one text behind the other."""

    tokens: Tensor
    """``[T]``"""
    positions: Tensor
    """``[T]``, from 0 in each text."""
    starts: Tensor
    """``[N]``: the first row of each text."""
    lengths: Tensor
    """``[N]``"""
    text_of: Tensor
    """``[T]``: which text a row belongs to."""


@dataclass(frozen=True, slots=True)
class PackedBatch(PackedRows):
    """A batch as an encoder computes it."""

    groups: list[TextGroup]


def pack(texts: Sequence[Sequence[int]], device: torch.device) -> PackedBatch:
    """Lays the texts, each of at least one token, one behind the other, and side by side for the attention."""
    rows = pack_rows(texts, device)
    lengths, starts = rows.lengths.cpu(), rows.starts.cpu()
    groups = [_group(lengths[chosen], starts[chosen], device) for chosen in grouped(lengths.tolist())]
    return PackedBatch(rows.tokens, rows.positions, rows.starts, rows.lengths, rows.text_of, groups)


def pack_rows(texts: Sequence[Sequence[int]], device: torch.device) -> PackedRows:
    """Lays the texts, each of at least one token, one behind the other."""
    lengths = [len(text) for text in texts]
    starts = [0, *accumulate(lengths)][:-1]
    lengths_there = torch.tensor(lengths)
    tokens = torch.tensor([token for text in texts for token in text])
    text_of = torch.repeat_interleave(torch.arange(len(texts)), lengths_there)
    starts_there = torch.tensor(starts)
    positions = torch.arange(len(tokens)) - starts_there[text_of]
    return PackedRows(
        tokens.to(device), positions.to(device), starts_there.to(device), lengths_there.to(device), text_of.to(device)
    )


def grouped(lengths: Sequence[int]) -> list[list[int]]:
    """The texts, by index, in groups of which no more than a part is padding; the longest first."""
    groups: list[list[int]] = []
    longest = filled = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if groups and filled + length >= (1 - _WASTE) * longest * (len(groups[-1]) + 1):
            groups[-1].append(index)
            filled += length
        else:
            groups.append([index])
            longest = filled = length
    return groups


def _group(lengths: Tensor, starts: Tensor, device: torch.device) -> TextGroup:
    longest = int(lengths.max())
    offsets = torch.arange(longest)
    filled = offsets < lengths[:, None]
    rows = torch.where(filled, starts[:, None] + offsets, starts[:, None])
    mask = None if bool(filled.all()) else filled[:, None, None, :].to(device)
    places = filled.flatten().nonzero().flatten()
    return TextGroup(
        rows.flatten().to(device), mask, places.to(device), rows.flatten()[places].to(device), len(lengths)
    )  # fmt: skip
