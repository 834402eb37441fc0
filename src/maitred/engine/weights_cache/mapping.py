"""Mapped file at an address of one's choice, whose memory is shared by all processes that map it.

The mapping is private: a write copies the page and never reaches the file. Only MKL writes: it keeps records in the
first page of a weight that it computes with. All other pages stay shared.

Python's own `mmap` leaves the address to the system. MKL finds a packed weight only at an address with the alignment of
the address it was packed at (see `engine.kernels.linear.packed`). So a piece of address space is reserved first, and
the file is mapped into it at an aligned address.
"""

import ctypes
import mmap
import os
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FIXED = 0x10
"""``MAP_FIXED`` of Linux and macOS; Python's `mmap` does not define it."""
_FAILED = ctypes.c_void_p(-1).value


class MappedFile:
    """Whole file mapped into memory, until no tensor of it exists any more.

    Args:
        path: File that is not empty, and never changed: a writer replaces it by another file.
        alignment: Alignment of the address in bytes.

    Raises:
        OSError: The file cannot be opened or mapped.
    """

    def __init__(self, path: Path, alignment: int) -> None:
        with path.open("rb") as file:
            self.size_bytes = os.fstat(file.fileno()).st_size
            self._address = _map(file.fileno(), self.size_bytes, max(alignment, mmap.PAGESIZE))
        weakref.finalize(self, _libc().munmap, self._address, self.size_bytes)

    def tensor(self, offset: int, shape: list[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor on the memory at an offset; it keeps the file mapped."""
        count = dtype.itemsize
        for side in shape:
            count *= side
        if not count:
            return torch.empty(shape, dtype=dtype)
        if not 0 <= offset <= offset + count <= self.size_bytes:
            raise ValueError(f"The file ends before {offset + count}.")
        memory = (ctypes.c_uint8 * count).from_address(self._address + offset)
        setattr(memory, "mapped_file", self)  # noqa: B010 - the tensor holds the memory, and that holds the mapping
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _map(descriptor: int, size: int, alignment: int) -> int:
    """Maps a file at a multiple of `alignment`, and returns the address."""
    libc = _libc()
    reserved = libc.mmap(None, size + alignment, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    address: int = -(-reserved // alignment) * alignment
    end = address + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    mapped = libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _FIXED, descriptor, 0)
    fault = ctypes.get_errno()
    before, behind = address - reserved, reserved + size + alignment - end
    for start, length in ((reserved, before), (end, behind)) if mapped == address else ((reserved, size + alignment),):
        if length >= mmap.PAGESIZE:
            libc.munmap(start, length)
    if mapped != address:
        raise OSError(fault, os.strerror(fault))
    return address


@cache
def _libc() -> Any:  # noqa: ANN401 - a library's functions have no types
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = [address, size, number, number, number, ctypes.c_long], address
    libc.munmap.argtypes, libc.munmap.restype = [address, size], number
    return libc
