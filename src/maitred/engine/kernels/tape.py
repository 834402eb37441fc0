"""Tape: a step recorded as a list of compiled calls, which is played without the interpreter.

A decoder layer is a dozen calls. From Python, each call costs tens of microseconds: arguments are checked, results
allocated, the interpreter's lock released and acquired. In a small model that is more than the arithmetic. But the
functions, their buffers and their order are known beforehand; only the number of rows changes from step to step. So the
calls are recorded once, and a step is one call that goes through the list.
"""

import ctypes
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from maitred.engine.kernels.job import CompiledEntry, enter_together, longs, make_job

ALONE = 1 << 62
"""Grain of a call that manages its threads itself: no number of parts is worth a second thread."""
_CALL_FIELDS = 4


class Tape:
    """Recorded list of compiled calls, played in order.

    Args:
        threads: Maximum number of threads that share a call.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._calls: list[tuple[int, int, int, int]] = []
        self._kept: list[object] = []
        self._header: ctypes.Array[ctypes.c_int64] | None = None

    def add(self, entry: CompiledEntry, fields: list[int], counter: int, worth: int) -> None:
        """Records a call at the end of the tape.

        Args:
            entry: Compiled function that is called.
            fields: Own fields of its job, without the common ones.
            counter: Address of an int64 that holds the number of parts when the tape is played. With 0 parts, the call
                is skipped.
            worth: Minimum parts per thread; 0: one part is enough for all threads.
        """
        job = make_job(fields)
        self._kept += [entry, job]
        self._calls.append((entry.address, ctypes.addressof(job), counter, worth))
        self._header = None

    def play(self) -> None:
        """Makes all calls, one after the other."""
        if self._header is None:
            calls = np.array(self._calls, np.int64).reshape(-1, _CALL_FIELDS)
            function = enter_together()
            together = None if function is None else ctypes.cast(function, ctypes.c_void_p).value
            self._kept.append(calls)
            self._header = make_job([self.threads if together else 1, together or 0, calls.ctypes.data], len(calls))
        _player()(self._header)


@cache
def _player() -> CompiledEntry:
    return CompiledEntry(_play)


_HEADER_FIELDS = 6


def _play(address: Any) -> None:  # noqa: ANN401 - a C pointer
    header = carray(address, _HEADER_FIELDS)
    most, together = header[3], header[4]
    calls = carray(longs(header[5]), header[2] * _CALL_FIELDS)
    for i in range(header[2]):
        entry, job_at = calls[i * _CALL_FIELDS], calls[i * _CALL_FIELDS + 1]
        count, worth = carray(longs(calls[i * _CALL_FIELDS + 2]), 1)[0], calls[i * _CALL_FIELDS + 3]
        if count == 0:
            continue
        job = carray(longs(job_at), 3)
        job[0], job[1], job[2] = 0, 0, count
        threads = most
        if worth > 0:
            threads = max(1, min(most, count // worth))
        if threads > 1:
            enter(together, entry, job_at, threads)
        else:
            call(entry, job_at)


@intrinsic  # type: ignore[untyped-decorator]
def call(typing_context: Any, entry: Any, job: Any) -> Any:  # noqa: ANN401 - the code generator's own types
    """Emits a call of ``void entry(job)``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def enter(typing_context: Any, together: Any, entry: Any, job: Any, threads: Any) -> Any:  # noqa: ANN401
    """Emits a call of ``void together(entry, job, threads, flags)``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        long, number = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [long, long, number, number])
        function, *rest, threads = arguments
        count = builder.trunc(threads, number)
        builder.call(builder.inttoptr(function, kind.as_pointer()), [*rest, count, number(0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
