"""Tensors in one file, each at an address that its reader can compute on.

    magic number | length of the index | SHA-256 of the index | index (JSON) | ... tensor ... tensor

Numbers are little-endian 64-bit. The index says what else the writer has to say, how long the file is, and for every
tensor its type, shape and place, a multiple of what it asked for. Pieces that are zero are not written: they take no
disk, and reading them takes no memory until somebody does.

Safetensors, which the checkpoints come in, aligns tensors to eight bytes and has no holes; that is why this is not it.
"""

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from torch import Tensor

from maitred.engine.weights_cache.mapping import MappedFile

_MAGIC = b"MAITRED\0"
_HEAD = struct.Struct("<8sQ32s")
_MOST_INDEX_BYTES = 1 << 28
_PIECE_BYTES = 4 << 20
"""Written at once. Large: a file system that can then keeps the file in large pages, too."""


class BrokenFile(Exception):
    """A file is not one of these, or not a whole one; the text says why."""


class _Entry(msgspec.Struct, array_like=True):
    dtype: str
    shape: list[int]
    offset: int


class _Index(msgspec.Struct):
    notes: Any
    alignment: int
    size_bytes: int
    tensors: dict[str, _Entry]


@dataclass(frozen=True, slots=True)
class AlignedTensor:
    """A tensor to be written.

    Attributes:
        tensor: On the CPU.
        alignment: Its address will be a multiple of it. Bytes; a power of two.
    """

    tensor: Tensor
    alignment: int


def write_tensors(file: BinaryIO, tensors: Mapping[str, AlignedTensor], notes: Any) -> None:  # noqa: ANN401 - JSON
    """Writes tensors, and `notes` (whatever JSON can say), into an empty file.

    Raises:
        OSError: The disk is full, or fails.
    """
    entries: dict[str, _Entry] = {}
    place = 0
    for name, placed in tensors.items():
        place = -(-place // placed.alignment) * placed.alignment
        shape = list(placed.tensor.shape)
        entries[name] = _Entry(str(placed.tensor.dtype).removeprefix("torch."), shape, place)
        place += placed.tensor.nbytes
    alignment = max((placed.alignment for placed in tensors.values()), default=1)
    index = _Index(notes, alignment, 0, entries)
    # The index is in front, so how long it is moves all tensors; room for the digits that it grows by is left.
    start = -(-(_HEAD.size + len(msgspec.json.encode(index)) + 16 * len(entries) + 32) // alignment) * alignment
    for entry in entries.values():
        entry.offset += start
    index.size_bytes = start + place
    for name, placed in tensors.items():
        _write(file, entries[name].offset, placed.tensor)
    text = msgspec.json.encode(index)
    assert _HEAD.size + len(text) <= start
    os.ftruncate(file.fileno(), index.size_bytes)
    file.seek(0)
    file.write(_HEAD.pack(_MAGIC, len(text), hashlib.sha256(text).digest()) + text)
    file.flush()


def map_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a file, mapped and not read, and its notes.

    Raises:
        FileNotFoundError: There is none.
        BrokenFile: It cannot be used.
    """
    try:
        with path.open("rb") as file:
            index = _read_index(file)
        mapped = MappedFile(path, index.alignment)
        return {
            name: mapped.tensor(entry.offset, entry.shape, getattr(torch, entry.dtype))
            for name, entry in index.tensors.items()
        }, index.notes
    except FileNotFoundError:
        raise
    except (OSError, ValueError, AttributeError, RuntimeError, msgspec.MsgspecError) as fault:
        raise BrokenFile(str(fault)) from fault


def _read_index(file: BinaryIO) -> _Index:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise BrokenFile("it does not begin as one of maitred's")
    _, length, digest = _HEAD.unpack(head)
    text = file.read(min(length, _MOST_INDEX_BYTES))
    if hashlib.sha256(text).digest() != digest:
        raise BrokenFile("its index is damaged")
    index = msgspec.json.decode(text, type=_Index)
    size_bytes = os.fstat(file.fileno()).st_size
    if size_bytes != index.size_bytes:
        raise BrokenFile(f"it has {size_bytes} bytes instead of {index.size_bytes}")
    return index


def _write(file: BinaryIO, offset: int, tensor: Tensor) -> None:
    memory = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    for start in range(0, len(memory), _PIECE_BYTES):
        piece = memory[start : start + _PIECE_BYTES]
        if piece.any():
            file.seek(offset + start)
            file.write(piece.data)
