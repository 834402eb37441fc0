"""The gate of an MLP (Shazeer, 2020), row by row.

Torch shares the elements of all rows out among threads, wherever that cuts a row, and computes the ends of a share by
another route than its middle. So a row's last bits depend on how many rows there are. Here a row is always computed
from its beginning, in one pass that writes no product in between.
"""

from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from numba import carray
from torch import Tensor
from torch.nn import functional

from maitred.engine.kernels.job import COUNT, NEXT, ROWS_AT_A_TIME, CompiledEntry, floats, take
from maitred.engine.kernels.simd import EDITION, exponential


class GatedActivation(Protocol):
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
    gate_rows().run(len(gated), [gate_up.data_ptr(), gated.data_ptr(), gated.shape[1]])
    return gated


def make_gate(dtype: torch.dtype, device: torch.device) -> GatedActivation:
    """The fastest for these activations."""
    return gate_fused if device.type == "cpu" and dtype == torch.float32 else gate


@cache
def gate_rows() -> CompiledEntry:
    """The gate of rows. Fields: ``[gate, up]`` of all rows, result, its width."""
    own, rows_at_a_time, edition = COUNT + 1, ROWS_AT_A_TIME, EDITION

    def compute(address: Any) -> None:  # noqa: ANN401 - a C pointer
        if edition < 0:  # never; but what a function names is part of its key on disk
            return
        job = carray(address, own + 3)
        inner = job[own + 2]
        first = take(job, NEXT, rows_at_a_time)
        while first < job[COUNT]:
            for row in range(first, min(first + rows_at_a_time, job[COUNT])):
                opening = carray(floats(job[own] + row * 2 * inner * 4), inner)
                up = carray(floats(job[own] + (row * 2 + 1) * inner * 4), inner)
                result = carray(floats(job[own + 1] + row * inner * 4), inner)
                for i in range(inner):
                    x = opening[i]
                    away = exponential(-abs(x))
                    share = (np.float32(1.0) if x >= np.float32(0.0) else away) / (np.float32(1.0) + away)
                    result[i] = x * share * up[i]
            first = take(job, NEXT, rows_at_a_time)

    return CompiledEntry(compute, fast=True)
