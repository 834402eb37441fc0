"""One file of the usage journal: how entries are framed, and how they are read back after anything may have happened.

An entry is ``length | length ^ MARK | CRC-32 | MessagePack``, the first three of 4 bytes each, little-endian. The
length vouches for itself, which tells two ends apart. An entry that is merely incomplete was *torn*: a process that is
killed within a write leaves what had reached the kernel by then, up to some page. Nobody was told that such an entry is
safe. Anything else is damage: a disk's, or somebody's.

Reading stops at the first frame that does not hold. It could search for the next one, but entries carry text that
clients chose, and a search would find whatever frames somebody hid in theirs.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from maitred.core.answer import Outcome
from maitred.core.errors import StoreUnavailable
from maitred.core.usage import UsageEvent

SUFFIX = ".segment"


class BeginRecord(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Work has begun; the event is as much as was known then."""

    event: UsageEvent


class UsageRecord(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """What was used, as it goes to the ledger."""

    event: UsageEvent


class _Begun1(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """As it was written at first: events were maps, and did not say when work began."""

    lease: str
    time_s: float
    event: dict[str, Any]


class _Recorded1(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Written by the same."""

    event: dict[str, Any]


class SegmentDamage(msgspec.Struct, frozen=True):
    """Where a segment could not be read any further."""

    path: Path
    offset: int
    lost_bytes: int
    reason: str
    torn: bool = False
    """The last entry is incomplete; nothing that was ever recorded is missing, unless the machine itself died."""

    def __str__(self) -> str:
        return f"{self.path} at byte {self.offset}: {self.reason}; {self.lost_bytes} bytes were not read"


_HEADER = struct.Struct("<III")
_MARK = 0x4D544431
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(BeginRecord | UsageRecord | _Begun1 | _Recorded1).decode
_crc32 = zlib.crc32
_pack = _HEADER.pack


def frame(entry: BeginRecord | UsageRecord) -> bytes:
    """The bytes that an entry is in a segment."""
    payload = _encode(entry)
    length = len(payload)
    return _pack(length, length ^ _MARK, _crc32(payload)) + payload


def _of_today(entry: BeginRecord | UsageRecord | _Begun1 | _Recorded1) -> BeginRecord | UsageRecord:
    """The same entry as this version writes it."""
    if isinstance(entry, BeginRecord | UsageRecord):
        return entry
    event = UsageEvent(**{**entry.event, "outcome": Outcome(entry.event["outcome"])})
    if isinstance(entry, _Begun1):
        return BeginRecord(msgspec.structs.replace(event, time_s=entry.time_s))
    return UsageRecord(event)


def frame_of_nothing(size: int) -> bytes:
    """The beginning of an entry that has no end: read as torn."""
    return _pack(size, size ^ _MARK, 0).ljust(size, b"\0")


class Segment:
    """Reads one segment from some offset on; iterate once.

    Never raises for what the file holds: after the iteration, `damage` says whether all of it could be read.

    Args:
        path: The file.
        offset: Of a frame; as iteration gave it.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self.damage: SegmentDamage | None = None

    def __iter__(self) -> Iterator[tuple[BeginRecord | UsageRecord, int]]:
        """Each entry with the offset at which it ends.

        Raises:
            StoreUnavailable: The file cannot be read at all; its contents may be sound.
        """
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(self._offset)
                while self._offset < size:
                    if size - self._offset < _HEADER.size:
                        return self._stop(size, "it ends within an entry", torn=True)
                    length, marked, checksum = _HEADER.unpack(file.read(_HEADER.size))
                    if length ^ _MARK != marked:
                        return self._stop(size, "no entry begins here")
                    if length > size - self._offset - _HEADER.size:
                        return self._stop(size, "it ends within an entry", torn=True)
                    payload = file.read(length)
                    if _crc32(payload) != checksum:
                        return self._stop(size, "the checksum is wrong")
                    try:
                        entry = _of_today(_decode(payload))
                    except (msgspec.MsgspecError, TypeError, ValueError, KeyError) as error:
                        return self._stop(size, f"the entry is not one that this version knows ({error})")
                    self._offset += _HEADER.size + length
                    yield entry, self._offset
        except OSError as error:
            raise StoreUnavailable(
                f"The usage journal {self._path} cannot be read ({error.strerror}). Repair what keeps it from being "
                "read; what is in it is not lost."
            ) from error

    def _stop(self, size: int, reason: str, *, torn: bool = False) -> None:
        self.damage = SegmentDamage(self._path, self._offset, size - self._offset, reason, torn)
