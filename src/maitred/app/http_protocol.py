"""HTTP/1.1 on one connection, with bounds on the part that comes before a request is one.

Body size and concurrency are the edge's business; but the edge hears of a request only when its head is complete. Until
then a client could send headers without end, or none at all and keep the connection for ever.
"""

import asyncio
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_LIMIT_BYTES = 64 * 1024
"""Request line and headers; API keys, cookies and trace headers need a tenth of it."""
HEAD_DEADLINE_S = 30.0
"""From the opening of the connection, or the first byte of a later request, to the end of the headers."""

_TOO_LARGE = b'{"error":{"message":"The request\'s headers are too large.","type":"invalid_request_error","param":null,'
_TOO_LARGE += b'"code":"headers_too_large"}}'


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol, which hangs up on heads that are too long or too slow."""

    _head_bytes = 0
    _in_head = True
    _ended_another = False
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(cast(asyncio.Transport, transport))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._head_is_complete()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._ended_another = False
        super().data_received(data)
        if self._in_head and not self._ended_another:
            # What was fed and has not completed the head belongs to it; unless an earlier request ended in it, of which
            # the most may be the body. So a pipelined head can be longer, by one read at most.
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT_BYTES and not self.transport.is_closing():
                self.transport.write(
                    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
                    b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(_TOO_LARGE), _TOO_LARGE)
                )
                self.transport.close()

    def on_message_begin(self) -> None:
        """The parser has seen the first byte of a request."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """The parser has seen the end of the head; the request starts."""
        self._head_is_complete()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The parser has seen the end of a request; what follows is the next."""
        super().on_message_complete()
        self._ended_another = True

    def _await_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_DEADLINE_S, self._hang_up)

    def _head_is_complete(self) -> None:
        self._in_head = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _hang_up(self) -> None:
        self.transport.close()
