"""The gate of an MLP (Shazeer, 2020), row by row.

Torch shares the elements of all rows out among threads, wherever that cuts a row, and computes the ends of a share by
another route than its middle. So a row's last bits depend on how many rows there are. Here a row is always computed
from its beginning, in one pass that writes no product in between.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from maitred.engine.compiled import compiled_fast
from maitred.engine.kernels.paged import Array, exponential


class Gate(Protocol):
    """``silu(gate) * up`` of ``[gate, up]`` side by side."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """``[T, 2 * inner]`` -> ``[T, inner]``."""
        ...


def gate(gate_up: Tensor) -> Tensor:
    """The specification, in torch."""
    opening, up = gate_up.chunk(2, dim=-1)
    return functional.silu(opening) * up


def gate_fused(gate_up: Tensor) -> Tensor:
    """The same for contiguous fp32 rows on a CPU."""
    gated = torch.empty(len(gate_up), gate_up.shape[1] // 2)
    _gate(gate_up.numpy(), gated.numpy())
    return gated


def make_gate(dtype: torch.dtype, device: torch.device) -> Gate:
    """The fastest for these activations."""
    return gate_fused if device.type == "cpu" and dtype == torch.float32 else gate


@compiled_fast
def _gate(gate_up: Array, gated: Array) -> None:
    inner = gated.shape[1]
    for row in range(gated.shape[0]):
        opening, up, result = gate_up[row, :inner], gate_up[row, inner:], gated[row]
        for i in range(inner):
            x = opening[i]
            away = exponential(-abs(x))
            share = (np.float32(1.0) if x >= np.float32(0.0) else away) / (np.float32(1.0) + away)
            result[i] = x * share * up[i]
