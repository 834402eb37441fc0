"""HTTP/1.1 on one connection: a request that has come whole is read, and its answer written, without ASGI's messages.

Most answers meet a client that has room for them: what is to be sent is put together here and handed to the transport
in one piece. Each way begins with the question whether that can be done. Where it cannot (the client has left, does not
read, speaks HTTP/1.0 or wants a HEAD) it says so and has done nothing, and ASGI's `send` decides as ever. What uvicorn
knows of the request is kept as `send` keeps it, so both may be used for parts of one answer.
"""

from collections.abc import Sequence
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from maitred.api.errors import Header


class DirectHttp(HttpToolsProtocol):
    """uvicorn's protocol, with ways around its messages. See `maitred.api.connection.Connection` for each."""

    _running: RequestResponseCycle | None = None
    """The request that is being answered, or was last."""

    @property
    def writable(self) -> bool:
        """See `Connection.writable`."""
        return not self.flow.write_paused

    @property
    def ready(self) -> bool:
        """See `Connection.ready`."""
        running = self._running
        if running is None or running.disconnected or running.response_complete or self.flow.write_paused:
            return False
        return bool(running.chunked_encoding)  # decided with the head

    def take_body(self) -> bytes | None:
        """See `Connection.take_body`."""
        running = self._running
        if running is None or running.more_body or running.disconnected or running.waiting_for_100_continue:
            return None
        body, running.body = bytes(running.body), bytearray()
        return body

    def answer(self, status: int, headers: Sequence[Header], body: bytes) -> bool:
        """See `Connection.answer`."""
        running = self._unanswered()
        if running is None:
            return False
        head = _head(status, [*running.default_headers, *headers])
        if head is None:
            return False
        running.response_started, running.waiting_for_100_continue = True, False
        running.chunked_encoding = False
        self.transport.write(head + b"\r\n" + body)
        self._complete(running)
        return True

    def begin(self, status: int, headers: Sequence[Header], piece: bytes) -> bool:
        """See `Connection.begin`."""
        running = self._unanswered()
        if running is None:
            return False
        head = _head(status, [*running.default_headers, *headers, (b"transfer-encoding", b"chunked")])
        if head is None:
            return False
        running.response_started, running.waiting_for_100_continue = True, False
        running.chunked_encoding = True
        self.transport.write(b"%b\r\n%x\r\n%b\r\n" % (head, len(piece), piece) if piece else head + b"\r\n")
        return True

    def write(self, piece: bytes) -> None:
        """See `Connection.write`."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def end(self, piece: bytes) -> None:
        """See `Connection.end`."""
        running = self._running
        assert running is not None, "it is ready"
        self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(piece), piece) if piece else b"0\r\n\r\n")
        self._complete(running)

    def _unanswered(self) -> RequestResponseCycle | None:
        """The request, if nothing has been answered and its answer can go out at once, with the connection kept."""
        running = self._running
        if running is None or running.response_started or running.disconnected or not running.keep_alive:
            return None
        return None if self.flow.write_paused or running.scope["method"] == "HEAD" else running

    def _complete(self, running: RequestResponseCycle) -> None:
        running.response_complete = True
        running.message_event.set()
        if not running.keep_alive:
            self.transport.close()  # it was to be kept when the answer began
        self.on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401 - as uvicorn's
        self._running = cycle
        super()._start_asgi_task(cycle, app)


def _head(status: int, headers: Sequence[Header]) -> bytes | None:
    """The head without its last line; None where `send` has to see to it, which minds what a header may hold."""
    head = STATUS_LINE[status] + b"".join([b"%b: %b\r\n" % header for header in headers])
    lines = len(headers) + 1
    sound = head.count(b"\n") == lines == head.count(b"\r")
    return head if sound and (b"connection", b"close") not in headers else None
