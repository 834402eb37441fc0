"""The library that torch computes on CPUs with, for what is in it and torch does not show."""

import ctypes
from functools import cache
from pathlib import Path

import torch


@cache
def torch_library() -> ctypes.CDLL | None:
    """OpenMP and, where torch was built with it, MKL are in it; None: this torch has no such file."""
    try:
        return ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
    except (OSError, StopIteration):
        return None
