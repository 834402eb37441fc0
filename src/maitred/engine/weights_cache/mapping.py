"""A file as memory, at an address of one's choice, and shared with every process that maps it too.

The mapping is private: what is written to a page makes a copy of that page and never reaches the file. Nobody should
write, but MKL keeps books in the first page of a weight that it computes with; all other pages stay shared.

Python's own `mmap` leaves the address to the system. MKL finds a packed weight again only at an address that is like
the one it was packed at (see `engine.kernels.linear.packed`), so a piece of address space is reserved first, and the
file is mapped into it where it fits.
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
"""``MAP_FIXED``: the same on Linux and macOS; Python's `mmap` does not name it."""
_FAILED = ctypes.c_void_p(-1).value


class MappedFile:
    """A whole file in memory, until nobody holds a tensor of it any more.

    Args:
        path: Not empty, and never changed: whoever writes it anew puts another file in its place.
        alignment: The address is a multiple of it. Bytes.

    Raises:
        OSError: It cannot be opened or mapped.
    """

    def __init__(self, path: Path, alignment: int) -> None:
        with path.open("rb") as file:
            self.size_bytes = os.fstat(file.fileno()).st_size
            self._address = _map(file.fileno(), self.size_bytes, max(alignment, mmap.PAGESIZE))
        weakref.finalize(self, _libc().munmap, self._address, self.size_bytes)

    def tensor(self, offset: int, shape: list[int], dtype: torch.dtype) -> Tensor:
        """What lies at an offset, as a tensor that keeps the file mapped."""
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
    """Maps a file at a multiple of `alignment`. Returns the address."""
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
