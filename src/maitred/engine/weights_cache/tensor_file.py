"""File format for tensors, each at an address that its reader can compute on.

    magic number | length of the index | SHA-256 of the index | index (JSON) | ... tensor ... tensor

Numbers are little-endian 64-bit. The index contains the writer's notes, the length of the file, and type, shape and
offset of every tensor. An offset is a multiple of the tensor's alignment. Pieces that are zero are not written: they
take no disk, and no memory until they are read.

Safetensors, the format of checkpoints, is not used, since it aligns tensors to eight bytes and has no holes.
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
"""Bytes of a write. Large pieces let a file system keep the file in large pages."""


class BrokenFile(Exception):
    """A file has another format, or is incomplete; the text says why."""


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
    """Tensor to be written, with the alignment of its address.

    Attributes:
        tensor: Tensor on the CPU.
        alignment: Alignment of its address in bytes; a power of two.
    """

    tensor: Tensor
    alignment: int


def write_tensors(file: BinaryIO, tensors: Mapping[str, AlignedTensor], notes: Any) -> None:  # noqa: ANN401 - JSON
    """Writes tensors, and `notes` in JSON, into an empty file.

    Raises:
        OSError: The disk is full or fails.
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
    # The index precedes the tensors, so its length moves them; space for its growing digits is reserved.
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
    """Maps the tensors of a file without reading them, and returns them with its notes.

    Raises:
        FileNotFoundError: There is no such file.
        BrokenFile: The file cannot be used.
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
