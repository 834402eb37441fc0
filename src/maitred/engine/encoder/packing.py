"""Packed batch of texts as one run of rows without padding, and groups of texts for their attention.

Every operation of an encoder except attention works on one token at a time, so texts of any lengths are concatenated
and no padding is computed. Only for the attention are they arranged side by side, in groups of similar length: a group
is as wide as its longest text, and the padding is masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

_WASTE = 0.25
"""Maximum share of padding in a group."""


@dataclass(frozen=True, slots=True)
class TextGroup:
    """Texts that attend side by side: `B` texts, the longest of `L` tokens."""

    rows: Tensor
    """``[B * L]``: row of the batch at each place of the group; padding repeats the first row."""
    filled: Tensor | None
    """``[B, 1, 1, L]``: whether a place is no padding; None: there is no padding."""
    places: Tensor
    """Indices of the ``B * L`` places that are no padding, in the order of the batch."""
    targets: Tensor
    """Rows of the batch at the places that are no padding."""
    texts: int


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a batch: `T` tokens of `N` texts, one text behind the other."""

    tokens: Tensor
    """``[T]``"""
    positions: Tensor
    """``[T]``, from 0 in each text."""
    starts: Tensor
    """``[N]``: the first row of each text."""
    lengths: Tensor
    """``[N]``"""
    text_of: Tensor
    """``[T]``: index of the text that a row belongs to."""


@dataclass(frozen=True, slots=True)
class PackedBatch(PackedRows):
    """Rows of a batch with groups for the attention of an encoder."""

    groups: list[TextGroup]


def pack(texts: Sequence[Sequence[int]], device: torch.device) -> PackedBatch:
    """Concatenates texts, each of at least one token, and groups them for the attention."""
    rows = pack_rows(texts, device)
    lengths, starts = rows.lengths.cpu(), rows.starts.cpu()
    groups = [_group(lengths[chosen], starts[chosen], device) for chosen in group_by_length(lengths.tolist())]
    return PackedBatch(
        tokens=rows.tokens,
        positions=rows.positions,
        starts=rows.starts,
        lengths=rows.lengths,
        text_of=rows.text_of,
        groups=groups,
    )


def pack_rows(texts: Sequence[Sequence[int]], device: torch.device) -> PackedRows:
    """Concatenates texts, each of at least one token."""
    lengths = [len(text) for text in texts]
    starts = [0, *accumulate(lengths)][:-1]
    lengths_there = torch.tensor(lengths)
    tokens = torch.tensor([token for text in texts for token in text])
    text_of = torch.repeat_interleave(torch.arange(len(texts)), lengths_there)
    starts_there = torch.tensor(starts)
    positions = torch.arange(len(tokens)) - starts_there[text_of]
    return PackedRows(
        tokens=tokens.to(device),
        positions=positions.to(device),
        starts=starts_there.to(device),
        lengths=lengths_there.to(device),
        text_of=text_of.to(device),
    )


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Groups texts, by index, so that no group has too much padding; the longest come first."""
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
        rows=rows.flatten().to(device),
        filled=mask,
        places=places.to(device),
        targets=rows.flatten()[places].to(device),
        texts=len(lengths),
    )
