"""Encoder of HTTP/1.1 requests. The header lines that many requests share are encoded once and reused."""

from collections.abc import Mapping

_FORBIDDEN_BYTES = {*range(32), 127} - {9}
"""Control characters, which no header may contain; a line break would allow header injection."""


def encode_head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """Encodes the request line and the shared headers; `encode_request` adds the headers of one request.

    Raises:
        ValueError: A header contains a control character.
    """
    lines = [f"{method} {target} HTTP/1.1".encode()]
    lines += [encode_header(name, value) for name, value in headers.items()]
    return b"\r\n".join(lines) + b"\r\n"


def encode_header(name: str, value: str) -> bytes:
    """Encodes one header line, without its CRLF.

    Raises:
        ValueError: The header contains a control character.
    """
    line = f"{name}: {value}".encode()
    if not _FORBIDDEN_BYTES.isdisjoint(line):
        raise ValueError(f"The header {name!r} has a line break or another control character in it. Remove it.")
    return line


def encode_request(head: bytes, header_lines: list[bytes], body: bytes) -> bytes:
    """Encodes a complete request with its body, as one bytes object.

    Args:
        head: Result of `encode_head`.
        header_lines: Further headers of this request, each a result of `encode_header`.
        body: Body of the request.
    """
    return b"%b%b\r\ncontent-length: %d\r\n\r\n%b" % (head, b"\r\n".join(header_lines), len(body), body)
