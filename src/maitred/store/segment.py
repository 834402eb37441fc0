"""Segment of the usage journal: the framing of entries, and the reading after any kind of damage.

An entry is ``length | length ^ MARK | CRC-32 | MessagePack``, the first three of 4 bytes each, little-endian. The
length is stored twice, which distinguishes two kinds of incomplete ends. An entry that is only incomplete is called
*torn*: a process that is killed within a write leaves the bytes that had reached the kernel by then, up to some page.
No caller has received a confirmation of such an entry. Every other invalid end is damage by a disk or a person.

Reading stops at the first invalid frame. A search for the next frame would be unsafe, because entries contain text that
clients chose, and it would find frames that a client had hidden in its text.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from maitred.core.context import Outcome
from maitred.core.errors import StoreUnavailable
from maitred.core.usage import UsageEvent

SUFFIX = ".segment"


class BeginRecord(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Entry for a request that has begun; its event has the data that was known at that time."""

    event: UsageEvent


class UsageRecord(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Entry for the usage of a request, as it goes to the ledger."""

    event: UsageEvent
    response: str = ""
    """Id of the response that is stored in one transaction with this usage; empty: there is none."""


class ReleaseRecord(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Entry for usage that goes to the ledger without its response, which is not stored after all."""

    id: str
    """Id of the event."""


class _BeginRecordV1(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First format of `BeginRecord`: events were maps without the time when work began."""

    lease: str
    time_s: float
    event: dict[str, Any]


class _UsageRecordV1(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First format of `UsageRecord`: events were maps."""

    event: dict[str, Any]


class SegmentDamage(msgspec.Struct, frozen=True):
    """Damage of a segment: the position where reading stopped, and the reason."""

    path: Path
    offset: int
    lost_bytes: int
    reason: str
    torn: bool = False
    """Whether the damage is only an incomplete last entry.

    In that case all recorded entries are there, unless the machine itself crashed.
    """

    def __str__(self) -> str:
        return f"{self.path} at byte {self.offset}: {self.reason}; {self.lost_bytes} bytes were not read"


_HEADER = struct.Struct("<III")
_MARK = 0x4D544431
_encode = msgspec.msgpack.Encoder().encode
_Entry = BeginRecord | UsageRecord | ReleaseRecord
_decode = msgspec.msgpack.Decoder(_Entry | _BeginRecordV1 | _UsageRecordV1).decode
_crc32 = zlib.crc32
_pack = _HEADER.pack


def encode_frame(entry: _Entry) -> bytes:
    """Encodes an entry as its bytes in a segment."""
    payload = _encode(entry)
    length = len(payload)
    return _pack(length, length ^ _MARK, _crc32(payload)) + payload


def _upgrade_entry(entry: _Entry | _BeginRecordV1 | _UsageRecordV1) -> _Entry:
    """Converts an entry of any format to the one of this version."""
    if isinstance(entry, _Entry):
        return entry
    event = UsageEvent(**{**entry.event, "outcome": Outcome(entry.event["outcome"])})
    if isinstance(entry, _BeginRecordV1):
        return BeginRecord(msgspec.structs.replace(event, time_s=entry.time_s))
    return UsageRecord(event)


def torn_frame(size: int) -> bytes:
    """Makes the beginning of an entry without its end, which a reader treats as torn."""
    return _pack(size, size ^ _MARK, 0).ljust(size, b"\0")


class Segment:
    """Reader of one segment from an offset on; it can be iterated once.

    Invalid contents never raise: after the iteration, `damage` says whether the whole file could be read.

    Args:
        path: The file.
        offset: Offset of a frame, as an earlier iteration gave it.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self.damage: SegmentDamage | None = None

    def __iter__(self) -> Iterator[tuple[_Entry, int]]:
        """Yields each entry with the offset at which it ends.

        Raises:
            StoreUnavailable: The file cannot be read at all; its contents may be valid.
        """
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(self._offset)
                while self._offset < size:
                    if size - self._offset < _HEADER.size:
                        return self._stop(size, "it ends within an entry", torn=True)
                    length, masked_length, checksum = _HEADER.unpack(file.read(_HEADER.size))
                    if length ^ _MARK != masked_length:
                        return self._stop(size, "no entry begins here")
                    if length > size - self._offset - _HEADER.size:
                        return self._stop(size, "it ends within an entry", torn=True)
                    payload = file.read(length)
                    if _crc32(payload) != checksum:
                        return self._stop(size, "the checksum is wrong")
                    try:
                        entry = _upgrade_entry(_decode(payload))
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
        self.damage = SegmentDamage(self._path, self._offset, lost_bytes=size - self._offset, reason=reason, torn=torn)
