"""Compiled kernels of quantised products, and of the preparation of their rows."""

from functools import cache
from typing import Any

import numpy as np
from numba import carray

from maitred.engine.compiled import processor_features
from maitred.engine.kernels.job import COUNT, NEXT, ROWS_AT_A_TIME, CompiledEntry, floats, int8s, ints, take
from maitred.engine.kernels.linear.dots import best_dot
from maitred.engine.kernels.linear.tiles import (
    BF16,
    EDITION,
    FP16,
    FP16_IN_STEPS,
    MOST_ROWS,
    PANEL,
    VECTORS,
    integer_tile,
    real_tile,
)
from maitred.engine.kernels.simd import float_of_bits

FIELDS = (
    "rows", "row_bytes", "row_scales", "row_sums", "inputs", "groups", "steps", "weights", "panel_bytes", "scales",
    "scale_bytes", "bias", "outputs", "out", "source", "panels", "share",
)  # fmt: skip
"""Names of a job's own fields: addresses and sizes.

``steps`` is the number of steps of one group, ``share`` the number of panels that a thread takes at a time, and
``source`` the address of the rows that are prepared at ``rows``.
"""
(
    _ROWS, _ROW_BYTES, _ROW_SCALES, _ROW_SUMS, _INPUTS, _GROUPS, _STEPS, _WEIGHTS, _PANEL_BYTES, _SCALES,
    _SCALE_BYTES, _BIAS, _OUTPUTS, _OUT, _SOURCE, _PANELS, _SHARE,
) = range(COUNT + 1, COUNT + 1 + len(FIELDS))  # fmt: skip
_ALL = COUNT + 1 + len(FIELDS)


@cache
def product(bits: int, *, real: bool, dot: int | None = None, half: bool = False) -> CompiledEntry:
    """Compiles the product of rows with weights of so many bits; threads take panels.

    Args:
        bits: Bits of a weight: 8 or 4.
        real: Whether rows are fp32; otherwise they are the result of `quantise_rows`.
        dot: Method of multiplying bytes; the fastest of the processor unless given.
        half: Whether the scales of 4-bit weights are fp16; otherwise they are bf16.
    """
    instruction = best_dot(processor_features()) if dot is None else dot
    edition, most, vectors, panel_outputs = EDITION, MOST_ROWS, VECTORS, PANEL
    kind = BF16 if not half else FP16 if "f16c" in processor_features() else FP16_IN_STEPS

    def compute(address: Any) -> None:  # noqa: ANN401 - a C pointer
        job = carray(address, _ALL)
        if edition < 0:  # never; but what a function names is part of its key on disk
            return
        count, row_bytes, groups, steps = job[COUNT], job[_ROW_BYTES], job[_GROUPS], job[_STEPS]
        outputs, last, share = job[_OUTPUTS], job[_PANELS], job[_SHARE]
        tiles = (count + most - 1) // most
        # The next panel is fetched while this one is multiplied: each tile fetches a part, at most a line a step.
        ahead_bytes = min(64, (64 * vectors + tiles - 1) // tiles)
        first = take(job, NEXT, share)
        while first < last:
            for panel in range(first, min(first + share, last)):
                weights, scales = job[_WEIGHTS] + panel * job[_PANEL_BYTES], job[_SCALES] + panel * job[_SCALE_BYTES]
                bias = job[_BIAS] + panel * panel_outputs * 4
                left = outputs - panel * panel_outputs
                # No panel follows the last one of a share.
                ahead = weights + (job[_PANEL_BYTES] if panel + 1 < min(first + share, last) else 0)
                for t in range(tiles):
                    row, end = t * count // tiles, (t + 1) * count // tiles
                    out = job[_OUT] + (row * outputs + panel * panel_outputs) * 4
                    if real:
                        real_tile(
                            end - row, job[_ROWS] + row * row_bytes, row_bytes, weights, scales, bias, out, outputs * 4,
                            left, groups, steps, bits, kind,
                        )  # fmt: skip
                    else:
                        integer_tile(
                            end - row, job[_ROWS] + row * row_bytes, row_bytes, job[_ROW_SCALES] + 4 * row,
                            job[_ROW_SUMS] + 4 * row * groups, weights, scales, bias, out, outputs * 4, left, groups,
                            steps, ahead + t * groups * steps * ahead_bytes, ahead_bytes, bits, instruction, kind,
                        )  # fmt: skip
            first = take(job, NEXT, share)

    return CompiledEntry(compute)


@cache
def quantise_rows() -> CompiledEntry:
    """Compiles the rounding of fp32 rows to signed bytes, with a scale per row and the sum of each group's bytes.

    The largest number of a row becomes 127. Each row has its own scale, so it does not depend on the rows beside it.
    """

    def quantise(address: Any) -> None:  # noqa: ANN401 - a C pointer
        job = carray(address, _ALL)
        last, row_bytes, inputs, groups = job[COUNT], job[_ROW_BYTES], job[_INPUTS], job[_GROUPS]
        length = row_bytes // groups
        first = take(job, NEXT, ROWS_AT_A_TIME)
        while first < last:
            for row in range(first, min(first + ROWS_AT_A_TIME, last)):
                source = carray(floats(job[_SOURCE] + row * inputs * 4), inputs)
                bits = carray(ints(job[_SOURCE] + row * inputs * 4), inputs)
                rounded = carray(int8s(job[_ROWS] + row * row_bytes), row_bytes)
                sums = carray(ints(job[_ROW_SUMS] + row * groups * 4), groups)
                # Magnitudes are ordered as their bits are, and integer comparisons vectorise, unlike those of floats.
                highest = np.int32(0)
                for i in range(inputs):
                    highest = max(highest, bits[i] & np.int32(0x7FFFFFFF))
                largest = float_of_bits(highest)
                carray(floats(job[_ROW_SCALES] + row * 4), 1)[0] = largest / np.float32(127.0)
                shrink = np.float32(127.0) / largest if highest else np.float32(0.0)
                for i in range(inputs):
                    rounded[i] = np.int8(np.rint(source[i] * shrink))
                for i in range(inputs, row_bytes):
                    rounded[i] = np.int8(0)
                for group in range(groups):
                    total = np.int32(0)
                    for i in range(length):
                        total += np.int32(rounded[group * length + i])
                    sums[group] = total
            first = take(job, NEXT, ROWS_AT_A_TIME)

    return CompiledEntry(quantise)


@cache
def widen_rows() -> CompiledEntry:
    """Compiles a copy of fp32 rows padded with zeros to a whole number of groups."""

    def widen(address: Any) -> None:  # noqa: ANN401 - a C pointer
        job = carray(address, _ALL)
        inputs, width = job[_INPUTS], job[_ROW_BYTES] // 4
        first = take(job, NEXT, ROWS_AT_A_TIME)
        while first < job[COUNT]:
            for row in range(first, min(first + ROWS_AT_A_TIME, job[COUNT])):
                source = carray(floats(job[_SOURCE] + row * inputs * 4), inputs)
                widened = carray(floats(job[_ROWS] + row * width * 4), width)
                widened[:inputs] = source
                widened[inputs:] = np.float32(0.0)
            first = take(job, NEXT, ROWS_AT_A_TIME)

    return CompiledEntry(widen)
