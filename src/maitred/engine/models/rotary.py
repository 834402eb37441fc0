"""Rotary embedding: table of the angles by which positions rotate query and key vectors."""

import math

import torch
from torch import Tensor

from maitred.engine.models.config import ModelConfig, RotaryConfig


def rotary_table(config: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """Computes cosines and sines of every position: fp32 ``[context_tokens, head_dim]``, cosines in the first half.

    Pair ``i`` of a head is its elements ``i`` and ``i + head_dim / 2``, as the checkpoints of all supported families
    lay them out.
    """
    positions = torch.arange(config.context_tokens, dtype=torch.float32, device=device)
    angles = positions[:, None] * _frequencies(config.rotary, config.head_dim).to(device)[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def _frequencies(rotary: RotaryConfig, head_dim: int) -> Tensor:
    """Returns the radians per token of each pair, fp32 ``[head_dim / 2]``."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rotary.theta**exponents
    if rotary.scaling == "linear":
        return frequencies / rotary.factor
    if rotary.scaling == "llama3":
        low, high = rotary.low_frequency_factor, rotary.high_frequency_factor
        turns = rotary.original_context_tokens * frequencies / (2 * math.pi)
        # 1 where a pair turns often within the original context (left alone), 0 where it hardly turns (stretched).
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / rotary.factor)
    return frequencies


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Rotates ``heads`` ``[T, n, head_dim]`` by the rows ``[T, head_dim]`` of a rotary table, in fp32."""
    half = heads.shape[-1] // 2
    cosines, sines = table[:, None, :half], table[:, None, half:]
    first, second = heads[..., :half].float(), heads[..., half:].float()
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(heads.dtype)
