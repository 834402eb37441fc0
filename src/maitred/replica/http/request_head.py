"""The head of a request. What is the same for all requests of a sort is written once."""

from collections.abc import Mapping

_FORBIDDEN = {*range(32), 127} - {9}
"""Bytes that no value may have: with them, a value could end its line and begin another header."""


def encode_head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """The lines of a head up to its last one, to which `encode_request` adds what differs.

    Raises:
        ValueError: A header cannot be sent.
    """
    lines = [f"{method} {target} HTTP/1.1".encode()]
    lines += [encode_line(name, value) for name, value in headers.items()]
    return b"\r\n".join(lines) + b"\r\n"


def encode_line(name: str, value: str) -> bytes:
    """One header, without the end of its line.

    Raises:
        ValueError: It cannot be sent.
    """
    raw = f"{name}: {value}".encode()
    if not _FORBIDDEN.isdisjoint(raw):
        raise ValueError(f"The header {name!r} has a line break or another control character in it. Remove it.")
    return raw


def encode_request(head: bytes, lines: list[bytes], body: bytes) -> bytes:
    """A request with a body, in one piece.

    Args:
        head: As `encode_head` made it.
        lines: Headers of this request alone, as `encode_line` made them.
        body: What is sent.
    """
    return b"%b%b\r\ncontent-length: %d\r\n\r\n%b" % (head, b"\r\n".join(lines), len(body), body)
