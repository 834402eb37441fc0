"""What an answer may know of the connection that it goes out on, beyond what ASGI tells.

The HTTP server's protocol implements it and puts itself into the scope's `extensions`. A server that does not leaves
an answer with an `Unknown` one, which never stalls and is never lost.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

EXTENSION = "maitred.connection"
"""The key under `extensions`."""


class Connection(Protocol):
    """The client's end, as far as it can be seen from here."""

    lost: bool
    """Whether it is closed."""
    on_lost: Callable[[], None] | None
    """Called when it is closed from the other side; see `Watch`."""

    @property
    def writable(self) -> bool:
        """Whether sending now would not have to wait. While this holds, ASGI's `send` does not suspend."""
        ...

    @property
    def complete(self) -> bool:
        """Whether all of the request has come: reading it does not suspend."""
        ...

    @property
    def stalled(self) -> bool:
        """Whether it was cut because its client had stopped reading."""
        ...

    @property
    def ready(self) -> bool:
        """Whether a stream has begun and can go on at once, without ASGI's `send`."""
        ...

    def write(self, piece: bytes) -> None:
        """Sends a piece of a stream, not empty, as `send` would. Only while it is `ready`."""
        ...

    def linger(self) -> None:
        """Called when an answer is broken off: what is still unsent gets a little time, and then is dropped."""
        ...


class Unknown:
    """Of a server that tells nothing of it. Implements `Connection`."""

    writable = True
    complete = False
    stalled = False
    ready = False
    lost = False
    on_lost: Callable[[], None] | None = None

    def write(self, piece: bytes) -> None:
        """See `Connection`."""
        raise NotImplementedError

    def linger(self) -> None:
        """See `Connection`."""


class Watch:
    """Tells when a connection is lost, for as long as its block runs, and costs nothing while it is not.

    Args:
        connection: The client's.
        left: Called when it is lost, or if it has been before the block began.
    """

    __slots__ = ("_connection", "_left")

    def __init__(self, connection: Connection, left: Callable[[], None]) -> None:
        self._connection = connection
        self._left = left

    def __enter__(self) -> None:
        self._connection.on_lost = self._left
        if self._connection.lost:
            self._left()

    def __exit__(self, *_: object) -> None:
        if self._connection.on_lost is self._left:  # the next request on it may have begun
            self._connection.on_lost = None


def connection_of(scope: Mapping[str, Any]) -> Connection:
    """The connection that a request came by."""
    extensions = scope.get("extensions") or {}
    return cast("Connection", extensions.get(EXTENSION) or Unknown())
