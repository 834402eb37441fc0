"""Residual sum and RMS norm (Zhang and Sennrich, 2019) in one pass over the rows.

A decoder layer twice adds a result to the residual stream and normalises the sum. In torch that is six small
operations, and for a small model their dispatch costs more than their arithmetic.
"""

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from maitred.engine.compiled import compiled_fast
from maitred.engine.kernels.paged import Array


class AddNorm(Protocol):
    """``stream += addend`` in place, then the norm of the sum."""

    def __call__(self, stream: Tensor, addend: Tensor, gain: Tensor, epsilon: float) -> Tensor:
        """``[T, hidden]`` each, and ``[hidden]`` for the gain; returns the normalised rows."""
        ...


def add_norm(stream: Tensor, addend: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """The specification, in torch."""
    stream += addend
    return functional.rms_norm(stream, gain.shape, gain, epsilon)


def add_norm_fused(stream: Tensor, addend: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """The same for contiguous fp32 rows on a CPU."""
    normalised = torch.empty_like(stream)
    _add_norm(stream.numpy(), addend.numpy(), gain.numpy(), np.float32(epsilon), normalised.numpy())
    return normalised


def make_add_norm(dtype: torch.dtype, device: torch.device) -> AddNorm:
    """The fastest for these activations."""
    return add_norm_fused if device.type == "cpu" and dtype == torch.float32 else add_norm


@compiled_fast
def _add_norm(stream: Array, addend: Array, gain: Array, epsilon: np.float32, normalised: Array) -> None:
    columns = stream.shape[1]
    for row in range(stream.shape[0]):
        squares = np.float32(0.0)
        for column in range(columns):
            value = stream[row, column] + addend[row, column]
            stream[row, column] = value
            squares += value * value
        scale = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(columns) + epsilon))
        for column in range(columns):
            normalised[row, column] = stream[row, column] * scale * gain[column]
