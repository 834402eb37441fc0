"""A quantised product as a job that threads take panels of, and the row quantiser before it.

Threads are those that torch and MKL compute on: OpenMP's, entered through the same function that compiled code enters
them by (``GOMP_parallel``, GNU's libgomp ABI). Each takes the next panels until none is left, so a thread that others
keep from its core takes fewer. Which one computes a panel does not change the result.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from numba import carray, types
from numba.extending import intrinsic

from maitred.engine.compiled import compiled_entry
from maitred.engine.kernels.linear.tiles import EDITION, MOST_ROWS, PANEL, integer_tile, real_tile
from maitred.engine.kernels.simd import float_of_bits

FIELDS = (
    "next", "last", "share", "rows", "row_bytes", "row_scales", "row_sums", "count", "inputs", "groups", "steps",
    "weights", "panel_bytes", "scales", "scale_bytes", "bias", "outputs", "out", "source",
)  # fmt: skip
"""Of a job, all int64. ``next`` is the first panel (or row) that nobody has taken yet, of ``last``; ``share`` is how
many are taken at a time. The others are addresses and sizes; ``steps`` are those of one group."""


class Entry:
    """A compiled function that takes a job, for any number of threads."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._compiled = compiled_entry(function)
        self._address = self._compiled.address
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)
        self._together = _together()

    def __call__(self, job: "ctypes.Array[ctypes.c_int64]", threads: int) -> None:
        """Returns when the job is done."""
        if threads > 1 and self._together is not None:
            self._together(self._address, ctypes.addressof(job), threads, 0)
        else:
            self._alone(ctypes.addressof(job))


@cache
def product(bits: int, *, real: bool, native: bool | None = None) -> Entry:
    """The product of rows with weights of so many bits.

    Args:
        bits: 8 or 4.
        real: Rows are fp32; otherwise they are what `quantise_rows` makes of them.
        native: Whether to use VNNI; as the processor has it unless given.
    """
    has_it = bool(llvmlite.binding.get_host_cpu_features().get("avx512vnni"))
    vnni = int(has_it if native is None else native)
    edition, fields, most, panel_outputs = EDITION, len(FIELDS), MOST_ROWS, PANEL

    def compute(address: Any) -> None:  # noqa: ANN401 - a C pointer
        job = carray(address, fields)
        if edition < 0:  # never; but what a function names is part of its key on disk
            return
        last, share, row_bytes, groups, steps = job[1], job[2], job[4], job[9], job[10]
        count, outputs = job[7], job[16]
        tiles = (count + most - 1) // most
        first = _take(job, share)
        while first < last:
            for panel in range(first, min(first + share, last)):
                weights, scales = job[11] + panel * job[12], job[13] + panel * job[14]
                bias = job[15] + panel * panel_outputs * 4
                left = outputs - panel * panel_outputs
                for t in range(tiles):
                    row, end = t * count // tiles, (t + 1) * count // tiles
                    out = job[17] + (row * outputs + panel * panel_outputs) * 4
                    if real:
                        real_tile(
                            end - row, job[3] + row * row_bytes, row_bytes, weights, scales, bias, out, outputs * 4,
                            left, groups, steps, bits,
                        )  # fmt: skip
                    else:
                        integer_tile(
                            end - row, job[3] + row * row_bytes, row_bytes, job[5] + 4 * row,
                            job[6] + 4 * row * groups, weights, scales, bias, out, outputs * 4, left, groups, steps,
                            bits, vnni,
                        )  # fmt: skip
            first = _take(job, share)

    return Entry(compute)


@cache
def quantise_rows() -> Entry:
    """From fp32 rows to signed bytes: a scale for each row, and the sum of the bytes of each group.

    A row's largest number becomes 127. Its scale is its own, so that a row does not depend on those beside it.
    """
    fields = len(FIELDS)

    def quantise(address: Any) -> None:  # noqa: ANN401 - a C pointer
        job = carray(address, fields)
        last, share, row_bytes, inputs, groups = job[1], job[2], job[4], job[8], job[9]
        length = row_bytes // groups
        first = _take(job, share)
        while first < last:
            for row in range(first, min(first + share, last)):
                source = carray(_floats(job[18] + row * inputs * 4), inputs)
                bits = carray(_ints(job[18] + row * inputs * 4), inputs)
                rounded = carray(_bytes(job[3] + row * row_bytes), row_bytes)
                sums = carray(_ints(job[6] + row * groups * 4), groups)
                # The size of a number orders as its bits do, and unlike numbers, bits are compared many at a time.
                highest = np.int32(0)
                for i in range(inputs):
                    highest = max(highest, bits[i] & np.int32(0x7FFFFFFF))
                largest = float_of_bits(highest)
                carray(_floats(job[5] + row * 4), 1)[0] = largest / np.float32(127.0)
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
            first = _take(job, share)

    return Entry(quantise)


@cache
def _together() -> Any:  # noqa: ANN401 - a C function
    """OpenMP's own way to run a function on several threads; None where torch has another OpenMP."""
    try:
        library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
        function = library.GOMP_parallel
    except (OSError, AttributeError, StopIteration):
        return None
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return function


@intrinsic  # type: ignore[untyped-decorator]
def _take(typing_context: Any, job: Any, share: Any) -> Any:  # noqa: ANN401 - the code generator's own types
    """The next panel, and nobody else gets it: adds `share` to the first field."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        counter = context.make_array(job)(context, builder, value=arguments[0]).data
        return builder.atomic_rmw("add", counter, arguments[1], "monotonic")

    return types.int64(job, types.int64), generate


def _pointer_to(element: Any) -> Any:  # noqa: ANN401 - the code generator's own types
    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(typing_context: Any, address: Any) -> Any:  # noqa: ANN401
        target = types.CPointer(element)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
            return builder.inttoptr(arguments[0], context.get_value_type(target))

        return target(types.int64), generate

    return pointer


_floats, _ints, _bytes = _pointer_to(types.float32), _pointer_to(types.int32), _pointer_to(types.int8)
