"""Residual sum and RMS norm (Zhang and Sennrich, 2019) in one pass over the rows.

A decoder layer twice adds a result to the residual stream and normalises the sum. In torch that is six small
operations, and for a small model their dispatch costs more than their arithmetic.
"""

import math
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from numba import carray
from torch import Tensor
from torch.nn import functional

from maitred.engine.kernels.job import COUNT, NEXT, ROWS_AT_A_TIME, CompiledEntry, bits_of, floats, take
from maitred.engine.kernels.simd import float_of_bits


class AddNorm(Protocol):
    """Function that computes ``stream += addend`` in place, then the norm of the sum."""

    def __call__(self, stream: Tensor, addend: Tensor, gain: Tensor, epsilon: float) -> Tensor:
        """Takes two ``[T, hidden]`` tensors and a gain ``[hidden]``; returns the normalised rows."""
        ...


def add_norm(stream: Tensor, addend: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """Computes residual sum and norm in torch; this is the specification."""
    stream += addend
    return functional.rms_norm(stream, gain.shape, gain, epsilon)


def add_norm_fused(stream: Tensor, addend: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """Computes residual sum and norm of contiguous fp32 rows on a CPU in one pass."""
    normalised = torch.empty_like(stream)
    rows = (stream.data_ptr(), addend.data_ptr(), gain.data_ptr(), normalised.data_ptr())
    norm_rows().run(len(stream), norm_fields(*rows, stream.shape[1], epsilon))
    return normalised


def norm_fused(rows: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """Computes the norm of contiguous fp32 rows on a CPU, in place."""
    norm_rows().run(
        len(rows), norm_fields(rows.data_ptr(), 0, gain.data_ptr(), rows.data_ptr(), rows.shape[1], epsilon)
    )
    return rows


def make_add_norm(dtype: torch.dtype, device: torch.device) -> AddNorm:
    """Returns the fastest implementation for this type and device."""
    return add_norm_fused if device.type == "cpu" and dtype == torch.float32 else add_norm


def norm_fields(stream: int, addend: int, gain: int, normalised: int, width: int, epsilon: float) -> list[int]:
    """Makes the fields of a job of `norm_rows`.

    Args:
        stream: Address of the rows.
        addend: Address of the rows that are added to the stream in place; 0: nothing is added.
        gain: Address of the gains.
        normalised: Address of the result.
        width: Width of a row.
        epsilon: Added to the mean of squares.
    """
    return [stream, addend, gain, normalised, width, bits_of(epsilon)]


@cache
def norm_rows() -> CompiledEntry:
    """Compiles residual sum and norm of rows; see `norm_fields`."""
    own, rows_at_a_time = COUNT + 1, ROWS_AT_A_TIME

    def norm(address: Any) -> None:  # noqa: ANN401 - a C pointer
        job = carray(address, own + 6)
        stream_at, addend_at, columns = job[own], job[own + 1], job[own + 4]
        gain, epsilon = carray(floats(job[own + 2]), columns), float_of_bits(np.int32(job[own + 5]))
        first = take(job, NEXT, rows_at_a_time)
        while first < job[COUNT]:
            for row in range(first, min(first + rows_at_a_time, job[COUNT])):
                stream = carray(floats(stream_at + row * columns * 4), columns)
                normalised = carray(floats(job[own + 3] + row * columns * 4), columns)
                if addend_at:
                    addend = carray(floats(addend_at + row * columns * 4), columns)
                    for column in range(columns):
                        stream[column] = stream[column] + addend[column]
                squares = np.float32(0.0)
                for column in range(columns):
                    squares += stream[column] * stream[column]
                scale = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(columns) + epsilon))
                for column in range(columns):
                    normalised[column] = stream[column] * scale * gain[column]
            first = take(job, NEXT, rows_at_a_time)

    return CompiledEntry(norm, fast=True)


@cache
def norm_heads() -> CompiledEntry:
    """Compiles the norm of every query and key head in place.

    Fields: rows, floats from one row to the next, gains, heads, width of a head, bits of epsilon.
    """
    own, rows_at_a_time = COUNT + 1, ROWS_AT_A_TIME

    def norm(address: Any) -> None:  # noqa: ANN401 - a C pointer
        job = carray(address, own + 6)
        stride, heads, width = job[own + 1], job[own + 3], job[own + 4]
        gains, epsilon = carray(floats(job[own + 2]), heads * width), float_of_bits(np.int32(job[own + 5]))
        first = take(job, NEXT, rows_at_a_time)
        while first < job[COUNT]:
            for row in range(first, min(first + rows_at_a_time, job[COUNT])):
                for h in range(heads):
                    head = carray(floats(job[own] + (row * stride + h * width) * 4), width)
                    gain = gains[h * width : (h + 1) * width]
                    squares = np.float32(0.0)
                    for i in range(width):
                        squares += head[i] * head[i]
                    scale = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(width) + epsilon))
                    for i in range(width):
                        head[i] = head[i] * scale * gain[i]
            first = take(job, NEXT, rows_at_a_time)

    return CompiledEntry(norm, fast=True)
