"""Decompression of request bodies, by their `Content-Encoding`."""

import zlib

from maitred.core.errors import BodyTooLarge, InvalidRequest, UnsupportedBody

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""The codings, each with the argument of `zlib.decompressobj`."""
_BARE_WINDOW_BITS = -zlib.MAX_WBITS
"""Argument for deflate without zlib's header, as some clients send it."""
ACCEPTED_CODINGS = b"gzip, deflate"
_MAX_MEMBERS = 1_000
"""Largest number of gzip members: each costs time, even if it is empty."""
_STEP_BYTES = 64 * 1024


def read_coding(content_encoding: str | None) -> str | None:
    """Returns the coding of a body; None: it is not compressed.

    Raises:
        UnsupportedBody: The server does not know the coding, or there are several.
    """
    if content_encoding is None:
        return None
    words = (word.strip() for word in content_encoding.lower().split(","))
    coding = ", ".join(word for word in words if word not in ("", "identity"))
    if not coding:
        return None
    if coding not in _WINDOW_BITS:
        raise UnsupportedBody(
            f"The body has the Content-Encoding {coding[:50]!r}, which this server does not read. Send it with gzip or "
            "deflate, or without Content-Encoding."
        )
    return coding


def decompress(body: bytes, coding: str, limit_bytes: int) -> bytes:
    """Returns the body without its coding; it releases the GIL, so it can run in a thread.

    Raises:
        BodyTooLarge: The decompressed body is longer than `limit_bytes`.
        InvalidRequest: The body does not have this coding.
    """
    window_bits = _WINDOW_BITS[coding]
    if coding == "deflate" and body and (body[0] & 0x0F != 8 or int.from_bytes(body[:2]) % 31):
        window_bits = _BARE_WINDOW_BITS
    view, position = memoryview(body), 0
    pieces: list[bytes] = []
    left_bytes = limit_bytes
    for _ in range(_MAX_MEMBERS):  # gzip may consist of several members
        decompressor = zlib.decompressobj(window_bits)
        while not decompressor.eof:
            if position >= len(body):
                raise InvalidRequest(f"The compressed body ({coding}) is incomplete.")
            try:
                # In steps: what is left behind the end of a member is copied.
                piece = decompressor.decompress(view[position : position + _STEP_BYTES], left_bytes + 1)
            except zlib.error as error:
                raise InvalidRequest(
                    f"The body cannot be read as its Content-Encoding says ({coding}): {error}."
                ) from None
            position += min(_STEP_BYTES, len(body) - position) - len(decompressor.unused_data)
            left_bytes -= len(piece)
            if left_bytes < 0:
                raise BodyTooLarge(
                    f"The decompressed body is larger than {limit_bytes:,} bytes, the most this server reads."
                )
            pieces.append(piece)
        if position == len(body):
            return b"".join(pieces)
    raise InvalidRequest(f"The compressed body ({coding}) has more than {_MAX_MEMBERS:,} members. Compress it as one.")
