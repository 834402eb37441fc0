"""Interface of a response's connection, with facts that ASGI does not provide.

The protocol of the HTTP server implements it and puts itself into the scope's `extensions`. With another server, the
response uses a `PlainAsgiConnection`, which never stalls and is never lost.
"""

from collections.abc import Callable
from typing import Protocol

EXTENSION = "maitred.connection"
"""The key of the connection under `extensions`."""


class ServerConnection(Protocol):
    """The connection to the client, as seen by the server."""

    lost: bool
    """Whether the connection is closed."""
    peer_died: bool
    """Whether it is closed because the process at its other end has died; known only of a Unix socket."""
    on_lost: Callable[[], None] | None
    """Called when the client closes the connection; see `HttpExchange.cancel_on_disconnect`."""

    @property
    def writable(self) -> bool:
        """Whether a send would not have to wait. While this is true, ASGI's `send` does not suspend."""
        ...

    @property
    def stalled(self) -> bool:
        """Whether the connection was cut because its client had stopped reading."""
        ...

    @property
    def ready(self) -> bool:
        """Whether a stream has begun and can continue at once, without ASGI's `send`."""
        ...

    def take_body(self) -> bytes | None:
        """Takes the body of the request if it has arrived completely; None: ASGI's `receive` must read it."""
        ...

    def answer(self, status: int, head: bytes, body: bytes) -> bool:
        """Sends a whole response if that is possible at once; False: nothing was sent, so use `send`.

        Args:
            status: The HTTP status.
            head: The header lines, with names in lower case; they include the content length.
            body: The body, not larger than the unsent data that a connection may hold.
        """
        ...

    def begin(self, status: int, head: bytes, piece: bytes) -> bool:
        """Sends the head of a stream and its first piece, which may be empty; returns the same as `answer`."""
        ...

    def write(self, piece: bytes) -> None:
        """Sends a piece of a stream as `send` would; the piece is not empty.

        Call it only while the connection is `ready`.
        """
        ...

    def end(self, piece: bytes) -> None:
        """Sends the last piece of a stream, which may be empty, and completes the stream.

        Call it only while the connection is `ready`.
        """
        ...

    def linger(self) -> None:
        """Called when a response is aborted: unsent data gets a short time, and is then dropped."""
        ...


class PlainAsgiConnection:
    """Connection of a server that provides only ASGI. Implements `ServerConnection`."""

    writable = True
    stalled = False
    ready = False
    lost = False
    peer_died = False
    on_lost: Callable[[], None] | None = None

    def take_body(self) -> None:
        """Returns None: ASGI's `receive` must read the body."""

    def answer(self, status: int, head: bytes, body: bytes) -> bool:
        """Returns False: `send` must send the response."""
        return False

    def begin(self, status: int, head: bytes, piece: bytes) -> bool:
        """Returns False: `send` must begin the stream."""
        return False

    def write(self, piece: bytes) -> None:
        """Raises NotImplementedError; only a connection that is `ready` is written to."""
        raise NotImplementedError

    def end(self, piece: bytes) -> None:
        """Raises NotImplementedError; only a connection that is `ready` is ended."""
        raise NotImplementedError

    def linger(self) -> None:
        """Does nothing: the server closes the connection itself."""
