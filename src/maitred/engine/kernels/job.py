"""Jobs that threads share: a compiled function, and the record of numbers that it works on.

A *job* is an array of int64: counts, sizes and addresses. The first three fields are the same for all jobs: the next
part, the number of threads that have entered, and the number of parts (rows, for example). Threads take the next parts
until none is left, so a thread that loses its core takes fewer parts. The result does not depend on which thread
computes a part.

The threads are those of OpenMP, on which torch and MKL compute too. They are started through the function that compiled
code uses (``GOMP_parallel``, GNU's libgomp ABI). In a step, attention lies between two products. If attention had its
own threads, OpenMP's threads would still spin on the cores that it needs, and would be asleep when the next product
begins.

The simplest job is here as well: `pick_rows` copies rows.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import carray, types
from numba.extending import intrinsic

from maitred.engine.compiled import compiled_entry

NEXT, SLOT, COUNT = range(3)
"""Indices of the fields that all jobs begin with: next part, next thread number, and number of parts."""
ROWS_AT_A_TIME = 4
"""Rows that a thread takes at a time from a job that goes row by row."""
FP32, BF16, INT8 = range(3)
"""Kinds of numbers behind an address; bf16 is read as its bits."""


class CompiledEntry:
    """Compiled function that computes a job, on any number of threads.

    Args:
        function: Function of the job's address. It may refer to compiled functions, intrinsics and plain numbers only.
        fast: Whether sums may be reordered; see `maitred.engine.compiled`.
    """

    def __init__(self, function: Callable[[Any], None], *, fast: bool = False) -> None:
        self.compiled = compiled_entry(function, fast=fast)
        self.address: int = self.compiled.address
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def __call__(self, job: "ctypes.Array[ctypes.c_int64]", threads: int = 1) -> None:
        """Computes a job and returns when it is done."""
        together = enter_together()
        if threads > 1 and together is not None:
            together(self.address, ctypes.addressof(job), threads, 0)
        else:
            self._alone(ctypes.addressof(job))

    def run(self, count: int, fields: Sequence[int], threads: int = 1) -> None:
        """Makes a job from its own fields, without the common ones, and computes it."""
        if count:
            self(make_job(fields, count), threads)


def make_job(fields: Sequence[int], count: int = 0) -> "ctypes.Array[ctypes.c_int64]":
    """Makes a new job from its own fields and its number of parts."""
    return (ctypes.c_int64 * (COUNT + 1 + len(fields)))(0, 0, count, *fields)


def bits_of(number: float) -> int:
    """Returns an fp32 number as a job's field; `maitred.engine.kernels.simd.float_of_bits` reads it."""
    return int(np.float32(number).view(np.int32))


@cache
def torch_library() -> ctypes.CDLL | None:
    """Loads torch's CPU library, which contains OpenMP and possibly MKL; None: this torch has no such file."""
    try:
        return ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
    except (OSError, StopIteration):
        return None


@cache
def enter_together() -> Any:  # noqa: ANN401 - a C function
    """Returns OpenMP's function to run a function on several threads; None: torch has another OpenMP."""
    function = getattr(torch_library(), "GOMP_parallel", None)
    if function is None:
        return None
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return function


@intrinsic  # type: ignore[untyped-decorator]
def take(typing_context: Any, job: Any, field: Any, share: Any) -> Any:  # noqa: ANN401 - the code generator's own types
    """Adds `share` to a job's field atomically and returns its previous value, which no other thread gets."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        fields = context.make_array(job)(context, builder, value=arguments[0]).data
        place = builder.gep(fields, [arguments[1]])
        return builder.atomic_rmw("add", place, arguments[2], "monotonic")

    return types.int64(job, types.int64, types.int64), generate


def _pointer_to(element: Any) -> Any:  # noqa: ANN401 - the code generator's own types
    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(typing_context: Any, address: Any) -> Any:  # noqa: ANN401
        target = types.CPointer(element)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
            return builder.inttoptr(arguments[0], context.get_value_type(target))

        return target(types.int64), generate

    return pointer


floats, ints, longs = _pointer_to(types.float32), _pointer_to(types.int32), _pointer_to(types.int64)
int8s = _pointer_to(types.int8)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def numbers(typing_context: Any, address: Any, kind: Any) -> Any:  # noqa: ANN401 - the code generator's own types
    """Converts an address to a pointer to numbers of a kind, which must be a constant."""
    if not isinstance(kind, types.IntegerLiteral):
        return None
    target = types.CPointer({FP32: types.float32, BF16: types.uint16, INT8: types.int8}[kind.literal_value])

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        return builder.inttoptr(arguments[0], context.get_value_type(target))

    return target(types.int64, kind), generate


@cache
def pick_rows() -> CompiledEntry:
    """Compiles a copy of rows by index. Fields: rows, their width, int64 indices of the selected rows, result."""
    own, rows_at_a_time = COUNT + 1, ROWS_AT_A_TIME

    def pick(address: Any) -> None:  # noqa: ANN401 - a C pointer
        job = carray(address, own + 4)
        width, picks = job[own + 1], carray(longs(job[own + 2]), job[COUNT])
        first = take(job, NEXT, rows_at_a_time)
        while first < job[COUNT]:
            for number in range(first, min(first + rows_at_a_time, job[COUNT])):
                row = carray(floats(job[own] + picks[number] * width * 4), width)
                result = carray(floats(job[own + 3] + number * width * 4), width)
                for i in range(width):
                    result[i] = row[i]
            first = take(job, NEXT, rows_at_a_time)

    return CompiledEntry(pick)
