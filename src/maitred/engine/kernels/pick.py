"""Compiled gather of rows: copies selected rows side by side."""

from functools import cache
from typing import Any

from numba import carray

from maitred.engine.kernels.job import COUNT, NEXT, ROWS_AT_A_TIME, CompiledEntry, floats, longs, take


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
