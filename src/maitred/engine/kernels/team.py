"""Calls that run side by side on the threads that matrix products run on.

A step goes from one product to the next by way of attention. With threads of its own, attention would find OpenMP's
still spinning on the cores that it needs, and the next product would find them asleep. So it takes OpenMP's, through
the function by which compiled code enters them (``GOMP_parallel``, GNU's libgomp ABI).
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch


class Team:
    """Runs a few calls at once, each of which gives the interpreter's lock up while it computes."""

    def __init__(self) -> None:
        self._enter = _gomp_parallel()
        self._left: Iterator[Callable[[], None]] = iter(())
        self._failure: BaseException | None = None
        self._part = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._work)
        """Kept as long as threads may enter it."""

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Returns when all are done, and raises what one of them has raised."""
        self._left = iter(calls)
        if len(calls) > 1 and self._enter is not None:
            self._enter(self._part, None, len(calls), 0)
        else:
            self._work(None)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _work(self, _: object) -> None:
        """Each thread takes calls until none is left; one that comes late finds them done."""
        try:
            for call in self._left:
                call()
        except BaseException as failure:  # on another thread there is no caller to raise it to
            self._failure = failure


@cache
def _gomp_parallel() -> Any:  # noqa: ANN401 - a C function
    """OpenMP's own way to run a function on several threads; None where torch has another OpenMP."""
    try:
        library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
        function = library.GOMP_parallel
    except (OSError, AttributeError, StopIteration):
        return None
    function.restype = None
    return function
