"""Forms with files (`multipart/form-data`, RFC 7578), read as they come, kept on disk, and sent on as they are.

A recording may be larger than what all other requests take together, so a form is written to a temporary file once it
is larger than a mebibyte. Only its fields are read: those that are no files. The form goes on with the boundary of its
sender; the value of one field, the model's name, is exchanged.
"""

import re
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from email.message import Message
from typing import Any, Self

import msgspec

from maitred.core.errors import BodyTooLarge, InvalidRequest

_IN_MEMORY_BYTES = 1 << 20
_PIECE_BYTES = 64 * 1024
_MAX_HEAD_BYTES = 8 * 1024
_MAX_FIELD_BYTES = 256 * 1024
_MAX_PARTS = 256
_FILE_HEAD_BYTES = 4 * 1024
"""Bytes of the beginning of a file that are looked at, for the length of a sound."""
_BOUNDARY = re.compile(r"[\w'()+,./:=? -]{1,70}", re.ASCII)
_SOUND_BYTES_PER_S = 16_000
"""Bytes of a second of compressed sound: 128 kbit/s, for files that do not say how long they are."""


class FormPart(msgspec.Struct):
    """One part of a form."""

    name: str
    is_file: bool
    start: int
    """Offset of its value in the form."""
    size: int = 0
    value: bytes = b""
    """The value of a field, or the beginning of a file."""


class FormReader:
    """Reader of a form, piece by piece. As a context manager it removes the temporary file.

    Args:
        content_type: Content type of the request, with the boundary.
        max_bytes: Largest size of the form.

    Raises:
        InvalidRequest: There is no boundary.
    """

    def __init__(self, content_type: str, max_bytes: int) -> None:
        boundary = _parameter("content-type", content_type, "boundary")
        if not _BOUNDARY.fullmatch(boundary) or boundary.endswith(" "):
            raise InvalidRequest(
                "The content type of a form has a boundary of 1 to 70 characters. Let your client set it.",
                param="Content-Type",
            )
        self.content_type = f'multipart/form-data; boundary="{boundary}"'
        self.parts: list[FormPart] = []
        self.size = 0
        self._max_bytes = max_bytes
        self._boundary = boundary.encode()
        self._delimiter = b"\r\n--" + self._boundary
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115 - closed by `__exit__`
        self._buffer = bytearray(b"\r\n")
        self._offset = -2
        """Offset of the buffer in the form; a line break is thought before its first boundary."""
        self._part: FormPart | None = None
        self._is_in_head = self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def feed(self, data: bytes) -> None:
        """Takes the next piece of the form.

        Raises:
            BodyTooLarge: The form is too large.
            InvalidRequest: It is no form, or has too many parts, or a field that is too long.
        """
        self.size += len(data)
        if self.size > self._max_bytes:
            raise BodyTooLarge(
                f"The form is larger than {self._max_bytes:,} bytes, the most that this server takes "
                "(`server.max_upload_bytes`). Send a smaller file, or in parts."
            )
        self._file.write(data)  # into the page cache: it takes microseconds
        self._buffer += data
        while not self._is_over and (self._read_head() if self._is_in_head else self._read_value()):
            pass
        if self._is_over:
            self._buffer.clear()  # what follows the last boundary is no part of the form

    def finish(self) -> "FormBody":
        """Returns the whole form.

        Raises:
            InvalidRequest: Its end is missing.
        """
        if not self._is_over:
            raise InvalidRequest("The form ends before its last boundary. Send it again, whole.")
        return FormBody(self._file, self.size, self.parts, content_type=self.content_type, boundary=self._boundary)

    def _read_value(self) -> bool:
        """Reads to the next boundary; returns whether it was found."""
        buffer, delimiter = self._buffer, self._delimiter
        at = buffer.find(delimiter)
        if at < 0:
            self._take(max(0, len(buffer) - len(delimiter) + 1))
            return False
        behind = at + len(delimiter)
        line_end = buffer.find(b"\r\n", behind)
        if buffer[behind : behind + 2] != b"--" and line_end < 0:
            if len(buffer) - behind > _MAX_HEAD_BYTES:
                raise _fault("a boundary without an end of its line")
            self._take(at)
            return False
        self._take(at)
        self._part = None
        if self._buffer[len(delimiter) : len(delimiter) + 2] == b"--":
            self._is_over = True
            return False
        self._drop(line_end + 2 - at)
        self._is_in_head = True
        return True

    def _read_head(self) -> bool:
        """Reads the head of a part; returns whether it is complete."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise _fault("a part with a head without an end")
            return False
        lines = bytes(self._buffer[:end]).decode("utf-8", "replace").split("\r\n")
        disposition = next(
            (line.partition(":")[2].strip() for line in lines if line.lower().startswith("content-disposition:")), ""
        )
        name = _parameter("content-disposition", disposition, "name")
        if not name or not disposition.lower().startswith("form-data"):
            raise _fault("a part without a name")
        if len(self.parts) >= _MAX_PARTS:
            raise _fault(f"more than {_MAX_PARTS} parts")
        self._drop(end + 4)
        self._part = FormPart(name, "filename" in disposition.lower(), self._offset)
        self.parts.append(self._part)
        self._is_in_head = False
        return True

    def _take(self, size: int) -> None:
        """Takes bytes of a value out of the buffer."""
        part = self._part
        if part is not None:
            part.size += size
            most = _FILE_HEAD_BYTES if part.is_file else _MAX_FIELD_BYTES
            if not part.is_file and part.size > most:
                raise InvalidRequest(f"The field {part.name[:100]!r} is longer than {most:,} bytes. Shorten it.")
            part.value += bytes(self._buffer[: min(size, most - len(part.value))])
        self._drop(size)

    def _drop(self, size: int) -> None:
        del self._buffer[:size]
        self._offset += size


class FormBody:
    """A whole form. Implements `maitred.core.text_replica.PassthroughBody`.

    Args:
        file: The form as it was sent.
        size: Its size.
        parts: Its parts.
        content_type: Its content type.
        boundary: What separates its parts.
    """

    def __init__(
        self,
        file: "tempfile.SpooledTemporaryFile[bytes]",
        size: int,
        parts: Sequence[FormPart],
        *,
        content_type: str,
        boundary: bytes,
    ) -> None:
        self.content_type = content_type
        self.is_small = size <= _PIECE_BYTES
        self._file = file
        self._size = size
        self._parts = parts
        self._boundary = boundary

    def fields(self) -> Mapping[str, Any]:
        """Returns the fields that are no files, as texts; of a repeated one the last."""
        return {part.name: part.value.decode("utf-8", "replace") for part in self._parts if not part.is_file}

    def audio_s(self) -> tuple[float, bool]:
        """Returns the seconds of sound in the files, and whether they are estimated by the size."""
        seconds, is_estimated = 0.0, False
        for part in self._parts:
            if part.is_file:
                exact = _wave_seconds(part.value, part.size)
                seconds += part.size / _SOUND_BYTES_PER_S if exact is None else exact
                is_estimated |= exact is None
        return seconds, is_estimated

    def encode(self, model: str, parameters: Mapping[str, Any]) -> tuple[int, Iterator[bytes]]:
        """Returns the form with the server's name of the model, and fields that it does not have."""
        given = {part.name.removesuffix("[]") for part in self._parts}
        added = b"".join(self._encode_field(name, value) for name, value in parameters.items() if name not in given)
        named, name = [part for part in self._parts if part.name == "model" and not part.is_file], model.encode()
        size = len(added) + self._size + sum(len(name) - part.size for part in named)
        return size, self._pieces(added, named, name)

    def _pieces(self, added: bytes, named: Sequence[FormPart], name: bytes) -> Iterator[bytes]:
        if added:
            yield added
        at = 0
        for part in named:
            yield from self._read(at, part.start)
            yield name
            at = part.start + part.size
        yield from self._read(at, self._size)

    def _read(self, start: int, end: int) -> Iterator[bytes]:
        while start < end:
            self._file.seek(start)
            piece = self._file.read(min(_PIECE_BYTES, end - start))
            start += len(piece)
            yield piece

    def _encode_field(self, name: str, value: object) -> bytes:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        escaped = name.replace('"', "%22").replace("\r", "").replace("\n", "")
        head = f'Content-Disposition: form-data; name="{escaped}"'.encode()
        return b"--%b\r\n%b\r\n\r\n%b\r\n" % (self._boundary, head, text.encode())


def _parameter(header: str, value: str, name: str) -> str:
    """Returns a parameter of a header's value; empty: it has none."""
    message = Message()
    try:
        message[header] = value
        found = message.get_param(name, header=header)
    except (ValueError, TypeError):
        return ""
    return found if isinstance(found, str) else ""


def _fault(what: str) -> InvalidRequest:
    return InvalidRequest(f"The form has {what}. Send it as multipart/form-data, as your client's file upload does.")


def _wave_seconds(head: bytes, size: int) -> float | None:
    """Returns the length of a WAV file by its head (RIFF, chunk `fmt `); None: it is none."""
    if head[:4] != b"RIFF" or head[8:12] != b"WAVE":
        return None
    at, bytes_per_s = 12, 0
    while at + 8 <= len(head):
        name, length = struct.unpack_from("<4sI", head, at)
        if name == b"fmt " and at + 20 <= len(head):
            bytes_per_s = struct.unpack_from("<I", head, at + 16)[0]
        if name == b"data":
            # A stream that was written as it came has no true length in its head.
            return min(length, size - at - 8) / bytes_per_s if bytes_per_s else None
        at += 8 + length + length % 2
    return None
