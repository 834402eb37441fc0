"""Header of a GGUF file: its metadata, and where each tensor lies.

Layout of version 2 and 3 (the GGUF specification of ggml): magic, version, two counts, the metadata as pairs of name
and typed value, one entry per tensor, and, aligned, the tensors. A large model is split into several files, named
``NAME-00001-of-00003.gguf``, whose first one has the metadata. This module imports nothing heavy, since gateways use it
too.
"""

import math
import mmap
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maitred.core.errors import ConfigInvalid

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
"""Number of a type of metadata -> its form."""
_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class BlockFormat(NamedTuple):
    """Type of a tensor's numbers: so many of them make a block of so many bytes."""

    name: str
    numbers: int
    bytes: int


FORMATS = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    2: BlockFormat("Q4_0", 32, 18),
    3: BlockFormat("Q4_1", 32, 20),
    6: BlockFormat("Q5_0", 32, 22),
    7: BlockFormat("Q5_1", 32, 24),
    8: BlockFormat("Q8_0", 32, 34),
    12: BlockFormat("Q4_K", 256, 144),
    13: BlockFormat("Q5_K", 256, 176),
    14: BlockFormat("Q6_K", 256, 210),
    30: BlockFormat("BF16", 1, 2),
}
"""Number of a type of tensors -> its form, for all types that maitred reads."""
_UNREAD = {
    10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Names of types that maitred does not read, for messages."""


class TensorEntry(NamedTuple):
    """Place and form of one tensor in a file."""

    shape: tuple[int, ...]
    """As in torch: the longest stride first, ``[out, in]`` for a weight."""
    format: BlockFormat
    offset: int
    """Bytes from the beginning of the file."""

    @property
    def bytes(self) -> int:
        """Size of the tensor in the file."""
        return math.prod(self.shape) // self.format.numbers * self.format.bytes


class GGUFHeader(NamedTuple):
    """Metadata and tensor entries of one file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]

    @classmethod
    def read(cls, path: Path) -> "GGUFHeader":
        """Reads the header of a file.

        Raises:
            ConfigInvalid: The file is cut or is no GGUF file, or has tensors of a type that maitred does not read.
        """
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _HeaderReader(data, path).read()
                end = max((entry.offset + entry.bytes for entry in header.tensors.values()), default=0)
                if end > len(data):
                    raise ConfigInvalid(f"{path} is cut: it has {len(data)} of {end} bytes. Fetch it again.")
                return header
        except (struct.error, IndexError, KeyError, UnicodeDecodeError, OverflowError, ValueError) as fault:
            raise ConfigInvalid(f"{path} cannot be read as a GGUF file: {fault}. Fetch it again.") from fault
        except OSError as fault:
            raise ConfigInvalid(f"{path} cannot be read: {fault.strerror or fault}.") from fault


class _HeaderReader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def read(self) -> GGUFHeader:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin with the letters GGUF")
        version = self._data[4:8]
        if (number := int.from_bytes(version, "little")) not in _VERSIONS:
            other_end = int.from_bytes(version, "big") in _VERSIONS
            raise ValueError("its numbers are big-endian" if other_end else f"its version is {number}, not 2 or 3")
        self._at = 8
        tensors, pairs = self._number(10), self._number(10)
        metadata = {self._string(): self._value(self._number(4)) for _ in range(pairs)}
        entries = [self._entry() for _ in range(tensors)]
        alignment = int(metadata.get(_ALIGNMENT, 32))
        begin = -(-self._at // alignment) * alignment
        return GGUFHeader(metadata, {name: entry._replace(offset=begin + entry.offset) for name, entry in entries})

    def _entry(self) -> tuple[str, TensorEntry]:
        name = self._string()
        sides = [self._number(10) for _ in range(self._number(4))]
        kind, offset = self._number(4), self._number(10)
        form = FORMATS.get(kind)
        if form is None:
            raise ConfigInvalid(
                f"{self._path} has tensors of the type {_UNREAD.get(kind, kind)}, such as {name}. maitred reads "
                f"{', '.join(form.name for form in FORMATS.values())}. Take another file of the model, such as "
                "its Q4_K_M or Q8_0."
            )
        if sides and sides[0] % form.numbers:
            raise ValueError(f"a row of {name} is no whole number of blocks")
        return name, TensorEntry(tuple(reversed(sides)), form, offset)

    def _number(self, kind: int) -> Any:  # noqa: ANN401 - an integer, a float or a truth value
        form = _SCALARS[kind]
        (number,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return number

    def _string(self) -> str:
        length = self._number(10)
        end = self._at + length
        if end > len(self._data):
            raise ValueError("it is cut")
        text = self._data[self._at : end]
        self._at = end
        # Texts of vocabularies may be cut within a character.
        return text.decode("utf-8", "surrogateescape")

    def _value(self, kind: int) -> Any:  # noqa: ANN401 - any value of the metadata
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(kind)
        inner, count = self._number(4), self._number(10)
        if count > len(self._data):
            raise ValueError("it is cut")
        if inner not in _SCALARS:
            read: Callable[[int], Any] = self._value
            return [read(inner) for _ in range(count)]
        form = _SCALARS[inner]
        many = struct.Struct(f"<{count}{form.format[-1]}")
        values = list(many.unpack_from(self._data, self._at))
        self._at += many.size
        return values


def gguf_parts(path: Path) -> list[Path]:
    """Returns all files of the model that a file belongs to, the one with the metadata first.

    Raises:
        ConfigInvalid: A part is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['name']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if absent := [part.name for part in parts if not part.is_file()]:
        raise ConfigInvalid(f"{path} is one of {count} files of its model. Fetch the others too: {', '.join(absent)}.")
    return parts


def gguf_models(folder: Path) -> list[Path]:
    """Returns the GGUF files of a folder, of a split model the first one alone."""
    found = []
    for path in sorted(folder.glob("*.gguf")):
        match = _PART.fullmatch(path.name)
        if match is None or int(match["number"]) == 1:
            found.append(path)
    return found


def model_name(path: Path) -> str:
    """Returns the name of the model in a file: the file's name without its ending."""
    match = _PART.fullmatch(path.name)
    return path.stem if match is None else match["name"]


def read_headers(path: Path) -> Iterator[tuple[Path, GGUFHeader]]:
    """Yields all files of a model with their headers."""
    for part in gguf_parts(path):
        yield part, GGUFHeader.read(part)


class NumberCounts(NamedTuple):
    """Numbers of a file by the bits that a CPU keeps of them; all zero for what is no GGUF file."""

    unpacked: int = 0
    bits_4: int = 0
    bits_8: int = 0


_BITS_4, _BITS_8 = ("Q4_0", "Q4_1", "Q4_K"), ("Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K")
"""Types that a CPU keeps in 4 and in 8 bits in fp32; see `maitred.engine.gguf.blocks.grouped_weight`."""


def count_numbers(path: Path, *, unpacked: Collection[str] = ()) -> NumberCounts:
    """Returns how many numbers of a file a CPU keeps in how many bits.

    Args:
        path: The file.
        unpacked: Names of tensors that are unpacked; norms and biases always are.
    """
    if path.suffix != ".gguf":
        return NumberCounts()
    counts = [0, 0, 0]
    for name, entry in GGUFHeader.read(path).tensors.items():
        kept = (entry.format.name in _BITS_4) + 2 * (entry.format.name in _BITS_8)
        counts[0 if name in unpacked else kept] += math.prod(entry.shape)
    return NumberCounts(*counts)
