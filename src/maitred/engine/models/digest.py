"""Fingerprints of a model's files, which gateways and engines compare.

Reading 140 GB to start a gateway would take too long. So of the weights only the index of every file (names, types,
shapes, offsets) and, of every tensor, `SLICES` pieces at even distances are hashed. A fine-tuned, merged, converted
or truncated checkpoint differs in them; a single number changed by hand may not. The fingerprint protects against
mistakes; the secret protects against attackers. This module imports nothing heavy, since gateways use it too.
"""

import hashlib
import json
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from maitred.core.errors import ConfigInvalid
from maitred.core.request import ModelFingerprint
from maitred.engine.gguf.file import GGUFHeader

SLICES = 16
SLICE_BYTES = 4096
MOST_READ_BYTES = 2 << 30
"""Size of weights up to which all of them are read, which takes about a second for each GB."""
_MOST_INDEX_BYTES = 100_000_000
"""Maximum index size of one file (safetensors, "Format": the header has at most 100 MB)."""
_NOTES = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})
"""Fields of ``config.json`` that do not change the computation; the computation type is in the model card."""


def fingerprint_of(folder: Path) -> ModelFingerprint:
    """Computes the fingerprint of a model's folder.

    A file that cannot be parsed is hashed as bytes: the loader reports it.
    """
    return ModelFingerprint(
        shape=shape_digest(folder),
        tokenizer=_of_json(folder / "tokenizer.json"),
        weights=weights_digest(folder),
    )


def shape_digest(folder: Path) -> str:
    """Hashes the part of the fingerprint that describes the computation."""
    return _of_json(folder / "config.json", _NOTES)


def weights_digest(folder: Path) -> str:
    """Hashes the part of the fingerprint that describes the weights."""
    stamps = weights_stamps(folder)
    return _of_weights(tuple(folder / name for name, _, _ in stamps), stamps) if stamps else ""


def content_digest(folder: Path) -> str:
    """Hashes every byte of the weights, or, of more than `MOST_READ_BYTES`, the stamps of their files.

    Answers are kept for a model under this hash, so a single changed number has to change it.
    """
    stamps = weights_stamps(folder)
    hashed = hashlib.sha256()
    if sum(size for _, size, _ in stamps) > MOST_READ_BYTES:
        hashed.update(msgspec.json.encode(stamps))
    else:
        for name, _, _ in stamps:
            with (folder / name).open("rb") as file:
                hashed.update(hashlib.file_digest(file, "sha256").digest())
    return _short(hashed) if stamps else ""


def weight_files(folder: Path) -> list[Path]:
    """Returns the files with weights: the safetensors files of a folder, or, if it has none, its GGUF files."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))


def weights_stamps(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Returns name, size and modification time of all files with weights."""
    files = [(path.name, path.stat()) for path in weight_files(folder)]
    return tuple((name, status.st_size, status.st_mtime_ns) for name, status in files)


class WeightsCheck:
    """Check of the files with weights: it notices that they were exchanged since it was made.

    It compares what the file system knows of each file. A program can set the time of the last modification back, but
    not that of the last change.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = self._read()

    def run(self) -> None:
        """Checks that the files are still the same.

        Raises:
            RuntimeError: They were exchanged.
        """
        if self._read() != self._files:
            raise RuntimeError(
                f"The weights in {self._folder} were exchanged while the engine slept. It starts again with them."
            )

    def _read(self) -> list[tuple[str, int, int, int]]:
        files = [(path.name, path.stat()) for path in weight_files(self._folder)]
        return [(name, status.st_ino, status.st_size, status.st_ctime_ns) for name, status in files]


def _short(hashed: "hashlib._Hash") -> str:
    return hashed.hexdigest()[:32]


def _of_json(path: Path, without: frozenset[str] = frozenset()) -> str:
    """Hashes the content of a JSON file, independently of its formatting."""
    if not path.is_file():
        return ""
    data = path.read_bytes()
    try:
        fields: Any = msgspec.json.decode(data)
    except msgspec.MsgspecError:
        return _short(hashlib.sha256(data))
    if isinstance(fields, dict):
        fields = {name: value for name, value in fields.items() if name not in without}
    return _short(hashlib.sha256(msgspec.json.encode(fields, order="deterministic")))


@lru_cache(maxsize=4)
def _of_weights(files: tuple[Path, ...], stamps: tuple[tuple[str, int, int], ...]) -> str:
    """Hashes all tensors by name, independently of how they are distributed over files.

    The result is cached while the files have the same stamps.
    """
    tensors: dict[str, bytes] = {}
    for path in files:
        with path.open("rb") as file:
            tensors |= _gguf_tensors(file, path) if path.suffix == ".gguf" else _tensors_in(file, path.name)
    hashed = hashlib.sha256()
    for name in sorted(tensors):
        hashed.update(name.encode() + b"\0" + tensors[name])
    return _short(hashed)


def _tensors_in(file: BinaryIO, name: str) -> dict[str, bytes]:
    """Returns name -> hash of each tensor's type, shape and slices."""
    size = file.seek(0, 2)
    file.seek(0)
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        index = json.loads(file.read(min(length, _MOST_INDEX_BYTES)))
        begin = 8 + length
        return {tensor: _of_tensor(file, entry, begin) for tensor, entry in index.items() if tensor != "__metadata__"}
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, OSError):
        return {f"\0{name}": str(size).encode()}


def _gguf_tensors(file: BinaryIO, path: Path) -> dict[str, bytes]:
    """Returns the same of a GGUF file."""
    try:
        entries = GGUFHeader.read(path).tensors
    except ConfigInvalid:
        return {f"\0{path.name}": str(file.seek(0, 2)).encode()}
    return {
        name: _of_slices(file, f"{entry.format.name}{list(entry.shape)}", entry.offset, entry.bytes)
        for name, entry in entries.items()
    }


def _of_tensor(file: BinaryIO, entry: dict[str, Any], begin: int) -> bytes:
    first, last = entry["data_offsets"]
    return _of_slices(file, f"{entry['dtype']}{entry['shape']}", begin + first, last - first)


def _of_slices(file: BinaryIO, form: str, first: int, length: int) -> bytes:
    """Hashes the form of a tensor and slices of its bytes, of which the first is at an offset of the file."""
    hashed = hashlib.sha256(form.encode())
    if length <= SLICES * SLICE_BYTES:
        places = [(0, length)]
    else:
        places = [(piece * (length - SLICE_BYTES) // (SLICES - 1), SLICE_BYTES) for piece in range(SLICES)]
    for place, size in places:
        file.seek(first + place)
        hashed.update(file.read(size))
    return hashed.digest()
