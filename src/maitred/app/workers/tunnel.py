"""Tunnel for a WebSocket of a worker: the controller speaks on the connection, and the worker passes the bytes on.

The controller has what a WebSocket needs: the limits of sockets, the responses that one remembers, and the route. The
worker gives it the handshake as it came, and reads neither the answer to it nor a frame. A side that does not read is
not read for, and the end of one side is the end of the other.
"""

import asyncio
from pathlib import Path

from maitred.api.exchange import Scope
from maitred.api.http.connection import EXTENSION, ServerConnection, SuccessorProtocol, reset
from maitred.app.workers.controller_client import CONTROLLER_UNAVAILABLE
from maitred.core.errors import InvalidRequest, MaitredError, Unavailable

_RETRY_AFTER_S = 2.0
_LAST_DATA_S = 5.0
"""Time that a client gets to read what was sent before the end."""


async def open_tunnel(scope: Scope, path: Path) -> MaitredError | None:
    """Hands the connection of a handshake over to the controller; returns why it is not possible, if it is not.

    Args:
        scope: The handshake.
        path: The Unix socket where the controller's HTTP server listens.
    """
    connection: ServerConnection = scope["extensions"][EXTENSION]
    try:
        transport, controller_end = await asyncio.get_running_loop().create_unix_connection(_ControllerEnd, str(path))
    except OSError:
        return Unavailable(CONTROLLER_UNAVAILABLE, retry_after_s=_RETRY_AFTER_S)
    client_end = _ClientEnd(transport)
    if not connection.hand_over(client_end):
        transport.close()
        return InvalidRequest("Send a handshake alone, by HTTP/1.1, and wait for the answer to it.")
    controller_end.client_transport = client_end.transport
    transport.write(_head_of(scope))
    return None


def _head_of(scope: Scope) -> bytes:
    """Returns a request without a body as it came."""
    query = scope.get("query_string") or b""
    target = scope["raw_path"] + (b"?" + query if query else b"")
    lines = b"".join(b"%b: %b\r\n" % header for header in scope["headers"])
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (scope["method"].encode("ascii"), target, lines)


class _ControllerEnd(asyncio.Protocol):
    """End of the tunnel at the controller."""

    client_transport: asyncio.Transport | None = None

    def data_received(self, data: bytes) -> None:
        if self.client_transport is not None:
            self.client_transport.write(data)

    def eof_received(self) -> bool:
        if self.client_transport is not None and not self.client_transport.is_closing():
            self.client_transport.write_eof()
        return True  # the client may still answer the close

    def connection_lost(self, exc: Exception | None) -> None:
        client_transport = self.client_transport
        if client_transport is not None:
            client_transport.close()
            if client_transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(_LAST_DATA_S, reset, client_transport)

    def pause_writing(self) -> None:
        if self.client_transport is not None and not self.client_transport.is_closing():
            self.client_transport.pause_reading()

    def resume_writing(self) -> None:
        if self.client_transport is not None and not self.client_transport.is_closing():
            self.client_transport.resume_reading()


class _ClientEnd(SuccessorProtocol):
    """End of the tunnel at the client.

    Args:
        controller_transport: The transport of the other end.
    """

    def __init__(self, controller_transport: asyncio.Transport) -> None:
        self._controller_transport = controller_transport

    def data_received(self, data: bytes) -> None:
        self._controller_transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._controller_transport.close()

    def pause_writing(self) -> None:
        if not self._controller_transport.is_closing():
            self._controller_transport.pause_reading()

    def resume_writing(self) -> None:
        if not self._controller_transport.is_closing():
            self._controller_transport.resume_reading()

    def shutdown(self) -> None:
        """Does nothing: the controller ends its WebSockets when none of their turns runs."""
