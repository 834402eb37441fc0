"""Encoder of request heads. The lines that all requests of one kind share are encoded once."""

from collections.abc import Mapping

_FORBIDDEN = {*range(32), 127} - {9}
"""Bytes that no header value may have: with them, a value could end its line and begin another header."""


def encode_head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """Encodes the shared lines of a head, to which `encode_request` adds the lines that differ.

    Raises:
        ValueError: A header cannot be sent.
    """
    lines = [f"{method} {target} HTTP/1.1".encode()]
    lines += [encode_header(name, value) for name, value in headers.items()]
    return b"\r\n".join(lines) + b"\r\n"


def encode_header(name: str, value: str) -> bytes:
    """Encodes one header, without the end of its line.

    Raises:
        ValueError: The header cannot be sent.
    """
    raw = f"{name}: {value}".encode()
    if not _FORBIDDEN.isdisjoint(raw):
        raise ValueError(f"The header {name!r} has a line break or another control character in it. Remove it.")
    return raw


def encode_request(head: bytes, header_lines: list[bytes], body: bytes) -> bytes:
    """Encodes a request with a body, in one piece.

    Args:
        head: Shared lines, as `encode_head` made them.
        header_lines: Headers of this request alone, as `encode_header` made them.
        body: Body of the request.
    """
    return b"%b%b\r\ncontent-length: %d\r\n\r\n%b" % (head, b"\r\n".join(header_lines), len(body), body)
