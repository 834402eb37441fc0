"""Interface of a response's connection, with facts that ASGI does not provide.

The protocol of the HTTP server implements it and puts itself into the scope's `extensions`. With another server, the
response uses a `PlainAsgiConnection`, which never stalls and is never lost.
"""

import asyncio
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, cast

_AT_ONCE = struct.pack("ii", 1, 0)
"""Socket option for a lingering time of 0 s: the connection is reset."""
EXTENSION = "maitred.connection"
"""The key of the connection under `extensions`."""


class ServerConnection(Protocol):
    """The connection to the client, as seen by the server."""

    on_lost: Callable[[], None] | None
    """Called when the client closes the connection; see `HttpExchange.cancel_on_disconnect`."""

    @property
    def lost(self) -> bool:
        """Whether the connection is closed."""
        ...

    @property
    def peer_died(self) -> bool:
        """Whether it is closed because the process at its other end has died; known only of a Unix socket."""
        ...

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

    def hand_over(self, successor: "SuccessorProtocol") -> bool:
        """Gives the connection to another protocol in place of an answer; False: that is not possible."""
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

    def hand_over(self, successor: "SuccessorProtocol") -> bool:
        """Returns False: ASGI has no way to do it."""
        return False


class SuccessorProtocol(asyncio.Protocol, ABC):
    """Protocol that follows HTTP on a connection of the server.

    Attributes:
        app: The application of the server; it changes with the configuration.
        connections: All connections of the server, which closes them when it stops.
        tasks: All tasks of the server, which it waits for when it stops.
        peer_pid: Process at the other end of a Unix socket; 0: unknown.
        transport: The transport of the connection.
    """

    app: Any
    connections: set[Any]
    tasks: set[asyncio.Task[None]]
    peer_pid = 0
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the connection, in place of the protocol before."""
        self.transport = cast(asyncio.Transport, transport)
        self.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Takes the connection off the server's list."""
        self.connections.discard(self)

    @abstractmethod
    def shutdown(self) -> None:
        """Called when the server stops, or accepts no more connections."""


def reset(transport: asyncio.Transport) -> None:
    """Cuts a connection at once: the kernel drops unsent data, instead of keeping it for a peer that does not read."""
    raw = transport.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    transport.abort()  # a close would wait until all data was read
