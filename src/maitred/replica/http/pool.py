"""Connection pool of one server: keeps idle connections while they are useful, and opens new ones when none is idle."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from aiohappyeyeballs import AddrInfoType, start_connection

from maitred.replica.http.connection import HttpConnection, Response, ResponseBroken

_KEEPALIVE_EXPIRY_S = 3.0
"""Longest idle time of a connection.

Servers close idle ones later (uvicorn 5 s, Node 5 s): this end should close first.
"""
_DNS_TTL_S = 10.0
"""How long the resolved addresses of a host name are reused."""
_REQUEST_TIMEOUT_STATUS = 408
"""HTTP status with which a server ends a connection on which no request came in time.

On a reused connection it means that the connection was idle for too long.
"""
_HAPPY_EYEBALLS_DELAY_S = 0.25
"""Time after which the next address is tried beside one that does not answer: the delay that RFC 8305 recommends."""


class ConnectFailed(Exception):
    """Error of a connection that could not be made, or not safely. Its text has the system's reason."""


class OpenConnections:
    """Set of all open connections, to every server. A context; leaving it closes them.

    It and its connections belong to the event loop in which it was entered.
    """

    def __init__(self) -> None:
        self._connections: set[HttpConnection] = set()
        self._all_closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in [*self._connections]:
            connection.close()
        if self._connections:
            self._all_closed.clear()
            await self._all_closed.wait()

    def add(self, connection: HttpConnection) -> None:
        """Adds a connection that was opened."""
        self._connections.add(connection)

    def remove(self, connection: HttpConnection) -> None:
        """Removes a connection that was closed."""
        self._connections.discard(connection)
        if not self._connections:
            self._all_closed.set()


class HostPool:
    """Connection pool of one server.

    Args:
        connections: Set of open connections, which closes those of this pool in the end.
        host: Name or address of the server.
        port: Port of the server.
        connect_timeout_s: Time limit of a connect, with its TLS handshake.
        tls: Makes the context that checks the server's certificate; None: there is no TLS.
    """

    def __init__(
        self,
        connections: OpenConnections,
        host: str,
        port: int,
        connect_timeout_s: float,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._connections = connections
        self._host = host
        self._port = port
        self._connect_timeout_s = connect_timeout_s
        self._make_tls = tls
        self._tls: ssl.SSLContext | None = None
        self._idle: list[tuple[HttpConnection, float]] = []
        """Idle connections, each with the time since when; the longest idle first."""
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._addresses: list[AddrInfoType] = []
        self._addresses_expire_s = 0.0
        self._resolve_lock = asyncio.Lock()

    async def send(self, request: bytes, *, reuse: bool = True, deadline_s: float | None = None) -> Response:
        """Sends a request and returns the response when its head is there.

        A server may close a connection in the moment in which it is used again. If the server has sent nothing, or only
        that no request came in time, the request is sent once more, on a new connection.

        Args:
            request: The complete request.
            reuse: Whether it may use a connection that has served before.
            deadline_s: Latest time for the head, by the event loop's clock; None: there is none.

        Raises:
            ConnectFailed: The request could not be sent.
            ResponseBroken: The connection ended before the head.
            TimeoutError: The head has not come in time.
        """
        while reuse and self._idle:
            connection, _ = self._idle.pop()
            if connection.is_open:
                response = connection.send(request)
                try:
                    await response.wait_head(deadline_s)
                except ResponseBroken as failure:
                    if not failure.nothing_received:
                        raise
                    break
                if response.status != _REQUEST_TIMEOUT_STATUS:
                    return response
                response.close()
                break
        async with asyncio.timeout_at(deadline_s):
            connection = await self._connect()
        response = connection.send(request)
        await response.wait_head(deadline_s)
        return response

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if self._make_tls is not None and self._tls is None:
                    self._tls = self._make_tls()
                addresses = await self._resolve(loop)
                options: dict[str, Any] = {
                    "ssl": self._tls,
                    "server_hostname": None if self._tls is None else self._host,
                }
                if len(addresses) == 1 and addresses[0][0] == socket.AF_INET:
                    # The event loop's own connect takes a third of the time.
                    host, port = addresses[0][4][:2]
                    _, connection = await loop.create_connection(self._make_connection, host, port, **options)
                else:
                    sock = await start_connection(
                        addresses, happy_eyeballs_delay=_HAPPY_EYEBALLS_DELAY_S, interleave=1, loop=loop
                    )
                    try:
                        _, connection = await loop.create_connection(self._make_connection, sock=sock, **options)
                    except BaseException:
                        sock.close()
                        raise
        except TimeoutError:
            raise ConnectFailed(
                f"no connection to {self._host}:{self._port} in {self._connect_timeout_s:g} s"
            ) from None
        except (OSError, ValueError) as error:
            raise ConnectFailed(f"no connection to {self._host}:{self._port}: {error}") from None
        self._connections.add(connection)
        return connection

    def _make_connection(self) -> HttpConnection:
        return HttpConnection(self._release, self._connections.remove)

    async def _resolve(self, loop: asyncio.AbstractEventLoop) -> list[AddrInfoType]:
        """Resolves the host name; of many concurrent callers, one resolves and the others use its result."""
        async with self._resolve_lock:
            if not self._addresses or self._addresses_expire_s < loop.time():
                self._addresses = [*await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)]
                self._addresses_expire_s = loop.time() + _DNS_TTL_S
        return self._addresses

    def _release(self, connection: HttpConnection) -> None:
        """Returns a connection that has served to the idle ones."""
        loop = asyncio.get_running_loop()
        self._idle.append((connection, loop.time()))
        if self._expiry_timer is None:
            self._expiry_timer = loop.call_later(_KEEPALIVE_EXPIRY_S, self._close_expired, loop)

    def _close_expired(self, loop: asyncio.AbstractEventLoop) -> None:
        """Closes connections that have been idle for too long."""
        expired_s = loop.time() - _KEEPALIVE_EXPIRY_S
        expired = [connection for connection, since_s in self._idle if since_s <= expired_s]
        self._idle = [entry for entry in self._idle if entry[1] > expired_s and entry[0].is_open]
        for connection in expired:
            connection.close()
        self._expiry_timer = (
            loop.call_at(self._idle[0][1] + _KEEPALIVE_EXPIRY_S, self._close_expired, loop) if self._idle else None
        )
