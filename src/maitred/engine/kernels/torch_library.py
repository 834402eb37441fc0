"""Access to torch's CPU library, for functions in it that torch does not expose."""

import ctypes
from functools import cache
from pathlib import Path

import torch


@cache
def torch_library() -> ctypes.CDLL | None:
    """Loads torch's CPU library, which contains OpenMP and possibly MKL; None: this torch has no such file."""
    try:
        return ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
    except (OSError, StopIteration):
        return None
