"""Sampling on an accelerator: the integer arithmetic of `row_kernels` as batched tensor operations.

Rows are divided into three groups: greedy, without filters, and with filters. Each group uses as few operations as its
parameters allow. For filters, the 1024 heaviest tokens are selected first. Their exact mass shows which rows have a
larger nucleus, and only these rows are sorted completely.

Each operation is a separate kernel with IEEE 754 rounding, and all sums are integer sums. So the batch size and the
order of additions on the device cannot change a token.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maitred.engine.sampling.draw import DrawParameters
from maitred.engine.sampling.fixed_point import (
    FRACTION_BITS,
    INDEX_BITS,
    INDEX_MASK,
    LOWEST,
    MANTISSA_BITS,
    POLYNOMIAL,
    SHARE_ONE,
)
from maitred.engine.sampling.row_kernels import NOT_A_NUMBER

_HEAD_TOKENS = 1024


class DeviceRows:
    """Rows of a batch grouped by sampling method, with their parameters on the device.

    Args:
        parameters: One entry per row.
        device: Device of the logits.
    """

    def __init__(self, parameters: DrawParameters, device: torch.device) -> None:
        self._device = device
        drawn = parameters.scales > 0
        filtered = drawn & ((parameters.top_ks > 0) | (parameters.top_ps < SHARE_ONE) | (parameters.min_weights > 1))
        self._all_greedy = not drawn.any()
        self._drawn = self._index(drawn)
        self._scales = self._on_device(parameters.scales[drawn])
        self._filtered = self._index(filtered[drawn])
        self._any_filtered = bool(filtered.any())
        self._top_ks = self._on_device(parameters.top_ks[filtered])
        self._most_top_k = int(parameters.top_ks[filtered].max(initial=0))
        self._top_ps = self._on_device(parameters.top_ps[filtered])
        self._min_weights = self._on_device(parameters.min_weights[filtered])

    def draw(self, logits: Tensor, bits: NDArray[np.int64]) -> list[int]:
        """Chooses a token for each row; `NOT_A_NUMBER` where a row has a NaN or +inf."""
        tops = logits.amax(dim=-1, keepdim=True)
        ids = torch.arange(logits.shape[1], device=self._device)
        tokens = torch.where(logits == tops, ids, logits.shape[1]).amin(dim=-1)
        if not self._all_greedy:
            mine = self._drawn
            weights = weigh(logits[mine], tops[mine], self._scales)
            if self._any_filtered:
                weights[self._filtered] = self._filter(weights[self._filtered])
            running = weights.cumsum(dim=-1)
            target = share_of(running[:, -1], torch.from_numpy(bits).to(self._device)[mine])
            drawn = torch.searchsorted(running, target[:, None], right=True)[:, 0]
            tokens[mine] = torch.where(tops[mine, 0] == -torch.inf, tokens[mine], drawn)
        tokens = torch.where(tops[:, 0] < torch.inf, tokens, NOT_A_NUMBER)
        chosen: list[int] = tokens.tolist()
        return chosen

    def _filter(self, weights: Tensor) -> Tensor:
        """Returns the weights, with 0 for tokens that the filters drop."""
        vocabulary = weights.shape[1]
        head = min(vocabulary, max(_HEAD_TOKENS, self._most_top_k))
        ranks = (weights << INDEX_BITS) | (INDEX_MASK - torch.arange(vocabulary, device=self._device))
        totals = weights.sum(dim=-1)
        cutoffs, whole = _cutoffs(ranks, totals, self._top_ks, self._top_ps, head)
        if head < vocabulary and not bool(whole.all()):
            rest = (~whole).nonzero()[:, 0]
            cutoffs[rest] = _cutoffs(ranks[rest], totals[rest], self._top_ks[rest], self._top_ps[rest], vocabulary)[0]
        cutoffs = torch.maximum(cutoffs, self._min_weights << INDEX_BITS)
        return torch.where(ranks >= cutoffs[:, None], weights, 0)

    def _index(self, mask: NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(np.flatnonzero(mask)).to(self._device)

    def _on_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def weigh(logits: Tensor, tops: Tensor, scales: Tensor) -> Tensor:
    """Computes `fixed_point.weight` of every logit; `tops` is [rows, 1], `scales` [rows]."""
    exponent = logits.sub(tops).mul_(scales[:, None]).clamp_min_(LOWEST)
    shift = (0.5 - exponent).to(torch.int64)
    f = exponent.add_(shift)
    power = f * POLYNOMIAL[-1]
    for coefficient in POLYNOMIAL[-2:0:-1]:
        power.add_(coefficient).mul_(f)
    mantissa = power.add_(POLYNOMIAL[0]).mul_(1 << MANTISSA_BITS).to(torch.int64)
    return (mantissa << (FRACTION_BITS - MANTISSA_BITS)) >> shift


def share_of(totals: Tensor, shares: Tensor) -> Tensor:
    """Computes `fixed_point.share_of` row by row."""
    return ((totals >> 31) * shares + ((totals & 0x7FFFFFFF) * shares >> 31)) >> 1


def _cutoffs(ranks: Tensor, totals: Tensor, top_ks: Tensor, top_ps: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """Returns each row's lowest rank kept by top_k and top_p, and whether `head` tokens sufficed."""
    vocabulary = ranks.shape[1]
    leaders = ranks.topk(head, dim=-1).values
    masses = leaders >> INDEX_BITS
    running = masses.cumsum(dim=-1)
    limited = (top_ks > 0) & (top_ks < vocabulary)
    limits = torch.where(limited, top_ks, vocabulary)
    totals = torch.where(limited, running.gather(1, (limits.clamp_max(head) - 1)[:, None])[:, 0], totals)
    nucleus = top_ps < SHARE_ONE
    targets = share_of(totals, top_ps)
    sizes = ((running - masses) < targets[:, None]).sum(dim=-1).clamp_min(1)
    sizes = torch.where(nucleus, torch.minimum(sizes, limits), limits).clamp_max(head)
    cutoffs = leaders.gather(1, sizes[:, None] - 1)[:, 0]
    whole = limited | ~nucleus | (running[:, -1] >= targets)
    return torch.where(limited | nucleus, cutoffs, 0), whole
