"""Connection of a response, as far as the server tells more of it than ASGI does.

The HTTP server's protocol implements it and puts itself into the scope's `extensions`. A server that does not leaves
the answer with a `PlainAsgiConnection`, which never stalls and is never lost.
"""

from collections.abc import Callable
from typing import Protocol

EXTENSION = "maitred.connection"
"""The key under `extensions`."""


class ServerConnection(Protocol):
    """The client's end, as far as it can be seen from here."""

    lost: bool
    """Whether it is closed."""
    on_lost: Callable[[], None] | None
    """Called when it is closed from the other side; see `HttpExchange.cancel_on_disconnect`."""

    @property
    def writable(self) -> bool:
        """Whether sending now would not have to wait. While this holds, ASGI's `send` does not suspend."""
        ...

    @property
    def stalled(self) -> bool:
        """Whether it was cut because its client had stopped reading."""
        ...

    @property
    def ready(self) -> bool:
        """Whether a stream has begun and can go on at once, without ASGI's `send`."""
        ...

    def take_body(self) -> bytes | None:
        """The body of the request, if all of it has come; None: it is to be read by ASGI's `receive`."""
        ...

    def answer(self, status: int, head: bytes, body: bytes) -> bool:
        """Sends a whole answer, if that can be done at once; False: nothing was sent, and `send` has to do it.

        Args:
            status: Of HTTP.
            head: The headers, a line each, with names in lower case; one of them is the length of the body.
            body: Not larger than what a connection may hold unsent.
        """
        ...

    def begin(self, status: int, head: bytes, piece: bytes) -> bool:
        """Sends the head of a stream and its first piece, which may be empty; returns as `answer` does."""
        ...

    def write(self, piece: bytes) -> None:
        """Sends a piece of a stream, not empty, as `send` would. Only while it is `ready`."""
        ...

    def end(self, piece: bytes) -> None:
        """Sends the last piece of a stream, which may be empty, and ends it as complete. Only while it is `ready`."""
        ...

    def linger(self) -> None:
        """Called when an answer is broken off: what is still unsent gets a little time, and then is dropped."""
        ...


class PlainAsgiConnection:
    """Connection of a server that tells nothing beyond ASGI. Implements `ServerConnection`."""

    writable = True
    stalled = False
    ready = False
    lost = False
    on_lost: Callable[[], None] | None = None

    def take_body(self) -> None:
        """Returns None: the body is to be read by ASGI's `receive`."""

    def answer(self, status: int, head: bytes, body: bytes) -> bool:
        """Returns False: `send` has to send the answer."""
        return False

    def begin(self, status: int, head: bytes, piece: bytes) -> bool:
        """Returns False: `send` has to begin the stream."""
        return False

    def write(self, piece: bytes) -> None:
        """Raises NotImplementedError; only a connection that is `ready` is written to."""
        raise NotImplementedError

    def end(self, piece: bytes) -> None:
        """Raises NotImplementedError; only a connection that is `ready` is ended."""
        raise NotImplementedError

    def linger(self) -> None:
        """Does nothing: the server ends the connection by itself."""
