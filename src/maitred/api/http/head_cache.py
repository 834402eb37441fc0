"""Heads that are repeated: a client's requests differ in their bodies, and in little else.

Whoever keeps a connection sends the same path and the same headers with each request, but for the length of the body.
To the parser each is new, and tells every header by a call. So of a request that came whole, in one read, its head is
kept as what stands before the digits of its length and what stands after them. What begins so, and ends with as many
bytes as it says, means the same as before: the parser, which begins anew with every request, would see no difference.
All else, and every first request of a connection, is the parser's.
"""

import re
from collections.abc import Sequence
from typing import Any, Self

from maitred.api.errors import Header
from maitred.api.parsed_head import KEPT

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)\r\n", re.IGNORECASE)
_MOST_DIGITS = 9
_OTHERWISE = frozenset({b"transfer-encoding", b"expect", b"upgrade"})
"""With these, a body is not just so many bytes after the head."""


class CachedHead:
    """A head that may come again.

    Args:
        before: What stands before the digits of the length.
        after: What stands after them, up to the body.
        scope: What ASGI is told of the request.
        length_at: Where among the headers the length is.
    """

    __slots__ = ("_after", "_before", "_length_at", "_scope")

    def __init__(self, before: bytes, after: bytes, scope: dict[str, Any], length_at: int) -> None:
        self._before = before
        self._after = after
        extensions = scope.get("extensions")
        self._scope = scope if extensions is None else {**scope, "extensions": {**extensions, KEPT: {}}}
        self._length_at = length_at

    @classmethod
    def of(cls, data: bytes, scope: dict[str, Any]) -> Self | None:
        """That of a request which the parser has read from just these bytes; None: it had better read the next, too."""
        ends = data.find(b"\r\n\r\n") + 4
        names = [name for name, _ in scope["headers"]]
        length = _LENGTH.search(data, 0, ends)
        if length is None or names.count(b"content-length") != 1 or not _OTHERWISE.isdisjoint(names):
            return None
        if ends + int(length[1]) != len(data):
            return None
        return cls(data[: length.start(1)], data[length.end(1) : ends], scope, names.index(b"content-length"))

    def body_in(self, data: bytes) -> bytes | None:
        """The body of a request with this head, if the bytes are one and nothing else."""
        if not data.startswith(self._before):
            return None
        begins = len(self._before)
        ends = data.find(b"\r", begins, begins + _MOST_DIGITS + 1)
        if ends < 0 or not data.startswith(self._after, ends):
            return None
        body = data[ends + len(self._after) :]
        return body if data[begins:ends] == b"%d" % len(body) else None

    def scope_for(self, body: bytes) -> Any:  # noqa: ANN401 - as uvicorn's
        """What ASGI is told of a request with this body."""
        headers: Sequence[Header] = self._scope["headers"]
        length = b"%d" % len(body)
        if headers[self._length_at][1] != length:
            headers = [*headers]
            headers[self._length_at] = (b"content-length", length)
        return {**self._scope, "headers": headers, "state": self._scope["state"].copy()}
