"""Gated activation of an MLP (SwiGLU and GeGLU; Shazeer, 2020), computed row by row.

Torch shares the elements of all rows out among threads and may cut a row anywhere. It computes the ends of a share in
another way than its middle. So a row's last bits depend on the number of rows. Here each row is computed from its
beginning, in one pass that stores no intermediate product.
"""

import math
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from numba import carray
from torch import Tensor
from torch.nn import functional

from maitred.engine.kernels.job import COUNT, NEXT, ROWS_AT_A_TIME, CompiledEntry, floats, take
from maitred.engine.kernels.simd import EDITION, exponential

_GELU_SLOPE, _GELU_CUBE = math.sqrt(8 / math.pi), 0.044715
"""GELU by tanh (Hendrycks and Gimpel, 2016) is ``x * sigmoid(slope * (x + cube * x**3))``."""


class GatedActivation(Protocol):
    """Function that computes ``activation(gate) * up`` of ``[gate, up]`` side by side."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Maps ``[T, 2 * inner]`` to ``[T, inner]``."""
        ...


def gate(gate_up: Tensor, *, gelu: bool = False) -> Tensor:
    """Computes the gated activation in torch, SiLU or GELU by tanh; this is the specification."""
    opening, up = gate_up.chunk(2, dim=-1)
    return (functional.gelu(opening, approximate="tanh") if gelu else functional.silu(opening)) * up


def gate_fused(gate_up: Tensor, *, gelu: bool = False) -> Tensor:
    """Computes the gated activation of contiguous fp32 rows on a CPU in one pass."""
    gated = torch.empty(len(gate_up), gate_up.shape[1] // 2)
    gate_rows(gelu=gelu).run(len(gated), [gate_up.data_ptr(), gated.data_ptr(), gated.shape[1]])
    return gated


def make_gate(dtype: torch.dtype, device: torch.device, *, gelu: bool = False) -> GatedActivation:
    """Returns the fastest gated activation for this type and device."""
    made = gate_fused if device.type == "cpu" and dtype == torch.float32 else gate
    return partial(made, gelu=True) if gelu else made


@cache
def gate_rows(*, gelu: bool = False) -> CompiledEntry:
    """Compiles the gated activation of rows. Fields: ``[gate, up]`` of all rows, result, its width."""
    own, rows_at_a_time, edition = COUNT + 1, ROWS_AT_A_TIME, EDITION
    slope, cube = np.float32(_GELU_SLOPE), np.float32(_GELU_CUBE)

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
                    z = slope * (x + cube * x * x * x) if gelu else x
                    away = exponential(-abs(z))
                    share = (np.float32(1.0) if z >= np.float32(0.0) else away) / (np.float32(1.0) + away)
                    result[i] = x * share * up[i]
            first = take(job, NEXT, rows_at_a_time)

    return CompiledEntry(compute, fast=True)
