"""Compiled kernels of quantised products, and of the preparation of their rows."""

from functools import cache
from typing import Any

import numpy as np
from numba import carray

from maitred.engine.compiled import processor_features
from maitred.engine.kernels.job import COUNT, NEXT, ROWS_AT_A_TIME, CompiledEntry, floats, int8s, ints, take
from maitred.engine.kernels.linear.dots import best_dot
from maitred.engine.kernels.linear.tiles import (
    EDITION,
    MOST_ROWS,
    PANEL,
    VECTORS,
    bf16_tile,
    integer_tile,
    real_tile,
)
from maitred.engine.kernels.simd import float_of_bits

FIELDS = (
    "rows", "row_bytes", "row_scales", "row_sums", "inputs", "groups", "steps", "weights", "panel_bytes", "scales",
    "scale_bytes", "bias", "outputs", "out", "source", "panels", "share", "scales_of_row",
)  # fmt: skip
"""Names of a job's own fields: addresses and sizes.

``steps`` is the number of steps of one group, ``share`` the number of panels that a thread takes at a time, and
``source`` the address of the rows that are prepared at ``rows``, and ``scales_of_row`` the number of scales of a
rounded row.
"""
(
    _ROWS, _ROW_BYTES, _ROW_SCALES, _ROW_SUMS, _INPUTS, _GROUPS, _STEPS, _WEIGHTS, _PANEL_BYTES, _SCALES,
    _SCALE_BYTES, _BIAS, _OUTPUTS, _OUT, _SOURCE, _PANELS, _SHARE,
    _SCALES_OF_ROW,
) = range(COUNT + 1, COUNT + 1 + len(FIELDS))  # fmt: skip
_ALL = COUNT + 1 + len(FIELDS)


@cache
def product(bits: int, kind: int, *, real: bool, dot: int | None = None) -> CompiledEntry:
    """Compiles the product of rows with weights of so many bits; threads take panels.

    Args:
        bits: Bits of a weight: 8 or 4.
        kind: Form of its scales; see `maitred.engine.kernels.linear.tiles.SCALE_FORMS`.
        real: Whether rows are fp32; otherwise they are the result of `quantise_rows`.
        dot: Method of multiplying bytes; the fastest of the processor unless given.
    """
    instruction = best_dot(processor_features()) if dot is None else dot
    edition, most, vectors, panel_outputs = EDITION, MOST_ROWS, VECTORS, PANEL
    widens = int("f16c" in processor_features())

    def compute(address: Any) -> None:  # noqa: ANN401 - a C pointer
        job = carray(address, _ALL)
        if edition < 0:  # never; but what a function names is part of its key on disk
            return
        count, row_bytes, groups, steps = job[COUNT], job[_ROW_BYTES], job[_GROUPS], job[_STEPS]
        outputs, last, share, row_scales = job[_OUTPUTS], job[_PANELS], job[_SHARE], job[_SCALES_OF_ROW]
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
                            left, groups, steps, bits, kind, widens,
                        )  # fmt: skip
                    else:
                        integer_tile(
                            end - row, job[_ROWS] + row * row_bytes, row_bytes, job[_ROW_SCALES] + 4 * row * row_scales,
                            job[_ROW_SUMS] + 4 * row * groups, weights, scales, bias, out, outputs * 4, left, groups,
                            steps, ahead + t * groups * steps * ahead_bytes, ahead_bytes, bits, instruction, kind,
                            widens,
                        )  # fmt: skip
            first = take(job, NEXT, share)

    return CompiledEntry(compute)


@cache
def bf16_product() -> CompiledEntry:
    """Compiles the product of rows that `round_rows` has rounded with weights in bf16; threads take panels."""
    edition, most, vectors, panel_outputs = EDITION, MOST_ROWS, VECTORS, PANEL

    def compute(address: Any) -> None:  # noqa: ANN401 - a C pointer
        job = carray(address, _ALL)
        if edition < 0:  # never; but what a function names is part of its key on disk
            return
        count, row_bytes, steps, outputs = job[COUNT], job[_ROW_BYTES], job[_STEPS], job[_OUTPUTS]
        last, share = job[_PANELS], job[_SHARE]
        tiles = (count + most - 1) // most
        ahead_bytes = min(64, (64 * vectors + tiles - 1) // tiles)
        first = take(job, NEXT, share)
        while first < last:
            for panel in range(first, min(first + share, last)):
                weights = job[_WEIGHTS] + panel * job[_PANEL_BYTES]
                bias = job[_BIAS] + panel * panel_outputs * 4
                ahead = weights + (job[_PANEL_BYTES] if panel + 1 < min(first + share, last) else 0)
                for t in range(tiles):
                    row, end = t * count // tiles, (t + 1) * count // tiles
                    out = job[_OUT] + (row * outputs + panel * panel_outputs) * 4
                    bf16_tile(
                        end - row, job[_ROWS] + row * row_bytes, row_bytes, weights, bias, out, outputs * 4,
                        outputs - panel * panel_outputs, steps, ahead + t * steps * ahead_bytes, ahead_bytes,
                    )  # fmt: skip
            first = take(job, NEXT, share)

    return CompiledEntry(compute)


@cache
def round_rows() -> CompiledEntry:
    """Compiles the rounding of fp32 rows to bf16, to the nearest and halves to even, padded to pairs with zeros."""

    def convert(address: Any) -> None:  # noqa: ANN401 - a C pointer
        job = carray(address, _ALL)
        inputs, pairs = job[_INPUTS], job[_ROW_BYTES] // 4
        first = take(job, NEXT, ROWS_AT_A_TIME)
        while first < job[COUNT]:
            for row in range(first, min(first + ROWS_AT_A_TIME, job[COUNT])):
                source = carray(ints(job[_SOURCE] + row * inputs * 4), inputs)
                target = carray(ints(job[_ROWS] + row * job[_ROW_BYTES]), pairs)
                for pair in range(inputs // 2):
                    low = np.uint32(source[2 * pair])
                    high = np.uint32(source[2 * pair + 1])
                    low += np.uint32(0x7FFF) + ((low >> np.uint32(16)) & np.uint32(1))
                    high += np.uint32(0x7FFF) + ((high >> np.uint32(16)) & np.uint32(1))
                    target[pair] = np.int32((low >> np.uint32(16)) | (high & np.uint32(0xFFFF0000)))
                if inputs % 2:
                    low = np.uint32(source[inputs - 1])
                    low += np.uint32(0x7FFF) + ((low >> np.uint32(16)) & np.uint32(1))
                    target[pairs - 1] = np.int32(low >> np.uint32(16))
            first = take(job, NEXT, ROWS_AT_A_TIME)

    return CompiledEntry(convert)


@cache
def quantise_rows() -> CompiledEntry:
    """Compiles the rounding of fp32 rows to signed bytes, with scales of each row and the sum of each group's bytes.

    A row has one scale, or one for each group of inputs; the largest number of a row or of a group becomes 127. So no
    row depends on the rows beside it.
    """

    def quantise(address: Any) -> None:  # noqa: ANN401 - a C pointer
        job = carray(address, _ALL)
        last, row_bytes, inputs, groups = job[COUNT], job[_ROW_BYTES], job[_INPUTS], job[_GROUPS]
        length, scales_of_row = row_bytes // groups, job[_SCALES_OF_ROW]
        scaled = row_bytes // scales_of_row
        first = take(job, NEXT, ROWS_AT_A_TIME)
        while first < last:
            for row in range(first, min(first + ROWS_AT_A_TIME, last)):
                rounded = carray(int8s(job[_ROWS] + row * row_bytes), row_bytes)
                sums = carray(ints(job[_ROW_SUMS] + row * groups * 4), groups)
                scales = carray(floats(job[_ROW_SCALES] + row * scales_of_row * 4), scales_of_row)
                for part in range(scales_of_row):
                    begin = part * scaled
                    width = min(scaled, inputs - begin)
                    source = carray(floats(job[_SOURCE] + (row * inputs + begin) * 4), width)
                    bits = carray(ints(job[_SOURCE] + (row * inputs + begin) * 4), width)
                    # Magnitudes are ordered as their bits are, and integer comparisons vectorise, unlike those of
                    # floats.
                    highest = np.int32(0)
                    for i in range(width):
                        highest = max(highest, bits[i] & np.int32(0x7FFFFFFF))
                    largest = float_of_bits(highest)
                    scales[part] = largest / np.float32(127.0)
                    shrink = np.float32(127.0) / largest if highest else np.float32(0.0)
                    target = carray(int8s(job[_ROWS] + row * row_bytes + begin), width)
                    for i in range(width):
                        target[i] = np.int8(np.rint(source[i] * shrink))
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
