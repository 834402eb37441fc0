"""Decodes the body of a response from its `Content-Encoding`, which a server or a proxy may use though nobody asked.

Bodies are compressed in many ways: with several codings one upon the other, with a gzip member for each flush, as
deflate with and without its header. Some are called gzip and are not compressed at all.
"""

import zlib
from collections.abc import Sequence

_GZIP = ("gzip", "x-gzip")
_ZLIB_CODINGS = (*_GZIP, "deflate")
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_MAX_CODINGS = 4
_MAX_MEMBERS = 16_384
"""Most gzip members of a body: each costs time, even if it is empty."""


class ContentBroken(Exception):
    """Error for a body that does not have the codings of its head; the message says what is wrong."""


class ContentDecoder:
    """Decoder of one body, which arrives in pieces.

    Args:
        codings: Codings of the body, in the order in which they were applied.
    """

    def __init__(self, codings: Sequence[str]) -> None:
        if len(codings) > _MAX_CODINGS or not set(codings) <= set(_ZLIB_CODINGS):
            raise ContentBroken(f"it sent a body with the coding {', '.join(codings)[:60]!r}, which nobody asked for")
        self._coding, *inner = reversed(codings)
        self._inner = ContentDecoder(inner[::-1]) if inner else None
        self._begin: bytes | None = b""
        """First bytes, while they are too few to tell what they are; None: that is known."""
        self._decompressor: zlib._Decompress | None = None
        """Decompressor of the current member; None: what comes is passed on as it is."""
        self._members = 1

    def decode(self, data: bytes, max_bytes: int) -> bytes:
        """Returns decoded data, of at most one byte more than `max_bytes`.

        Raises:
            ContentBroken: The body does not have its coding.
        """
        if self._begin is not None:
            data = self._begin = self._begin + data
            if len(data) < len(_GZIP_MAGIC):
                return b""
            self._begin, self._decompressor = None, _open(self._coding, data)
        if self._decompressor is not None:
            data = self._decompress(self._decompressor, data, max(1, max_bytes + 1))
        return data if self._inner is None else self._inner.decode(data, max_bytes)

    def _decompress(self, decompressor: "zlib._Decompress", data: bytes, most_bytes: int) -> bytes:
        pieces: list[bytes] = []
        while data and most_bytes > 0:
            if decompressor.eof:
                if self._coding not in _GZIP or not data.startswith(_GZIP_MAGIC[:1]):
                    break  # padding behind the body
                self._members += 1
                if self._members > _MAX_MEMBERS:
                    raise ContentBroken("it sent a compressed body of too many members")
                decompressor = self._decompressor = zlib.decompressobj(_GZIP_WINDOW)
            try:
                piece = decompressor.decompress(data, most_bytes)
            except zlib.error:
                raise ContentBroken("it sent a compressed body that cannot be read") from None
            pieces.append(piece)
            most_bytes -= len(piece)
            data = decompressor.unused_data
        return b"".join(pieces)


def make_content_decoder(content_encoding: bytes | None) -> ContentDecoder | None:
    """Makes the decoder of a body with this `Content-Encoding`; None: the body has no coding.

    Raises:
        ContentBroken: One of its codings is not known here.
    """
    if content_encoding is None:
        return None
    words = (word.strip().lower() for word in content_encoding.decode("latin-1").split(","))
    codings = [word for word in words if word not in ("", "identity", "none", "utf-8")]
    return ContentDecoder(codings) if codings else None


def _open(coding: str, begin: bytes) -> "zlib._Decompress | None":
    """Opens the decompressor of a body that begins like this; None: it is not compressed."""
    if begin.startswith(_GZIP_MAGIC):
        return zlib.decompressobj(_GZIP_WINDOW)
    if coding in _GZIP:
        return None
    # HTTP means the form with zlib's header (RFC 1950); some servers send the bare one (RFC 1951).
    has_header = begin[0] & 0x0F == 8 and int.from_bytes(begin[:2]) % 31 == 0
    return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
