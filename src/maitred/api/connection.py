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

    on_lost: Callable[[], None] | None
    """Called when it is closed from the other side; for the request that is answered on it, while it is."""

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
    on_lost: Callable[[], None] | None = None

    def write(self, piece: bytes) -> None:
        """See `Connection`."""
        raise NotImplementedError

    def linger(self) -> None:
        """See `Connection`."""


def connection_of(scope: Mapping[str, Any]) -> Connection:
    """The connection that a request came by."""
    extensions = scope.get("extensions") or {}
    return cast("Connection", extensions.get(EXTENSION) or Unknown())
