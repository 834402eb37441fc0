"""Connection pool of one server: reuses idle connections, and opens new ones when none is idle."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from aiohappyeyeballs import AddrInfoType, start_connection

from maitred.replica.http.connection import HttpConnection, Response, ResponseBroken
from maitred.replica.http.proxy import HttpProxy, ProxyRefused

_KEEPALIVE_EXPIRY_S = 3.0
"""Time after which an idle connection is closed.

It is shorter than the keep-alive time-outs of servers (uvicorn 5 s, Node 5 s), so that the client closes first.
"""
_DNS_TTL_S = 10.0
"""Time for which resolved addresses are cached."""
_REQUEST_TIMEOUT_STATUS = 408
"""HTTP status of a server that closes a connection because it received no request in time.

On a reused connection that the server then closes it means that the connection was idle too long, so the request can be
repeated. Otherwise it is the answer to the request.
"""
_HAPPY_EYEBALLS_DELAY_S = 0.25
"""Delay before a parallel attempt to connect to the next address, as recommended by RFC 8305."""


class ConnectFailed(Exception):
    """The connection could not be established, or its TLS handshake failed.

    The message contains the operating system's reason.
    """


class OpenConnections:
    """Set of the open connections of all pools. It is an async context manager; its exit closes the connections.

    The set and its connections may be used only in the event loop in which it was entered.
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
        """Adds an opened connection."""
        self._connections.add(connection)

    def remove(self, connection: HttpConnection) -> None:
        """Removes a closed connection."""
        self._connections.discard(connection)
        if not self._connections:
            self._all_closed.set()


class HttpConnectionPool:
    """Connection pool of one server.

    Args:
        connections: Set of open connections to which this pool adds its own; it closes them at its exit.
        host: Name or address of the server.
        port: Port of the server.
        connect_timeout_s: Time limit for connecting, including the TLS handshake.
        tls: Factory of the TLS context; None: the connection uses no TLS.
        proxy: Proxy that leads to the server; None: it is connected directly.
    """

    def __init__(
        self,
        connections: OpenConnections,
        host: str,
        port: int,
        connect_timeout_s: float,
        tls: Callable[[], ssl.SSLContext] | None = None,
        proxy: HttpProxy | None = None,
    ) -> None:
        self._connections = connections
        self._host = host
        self._port = port
        self._connect_timeout_s = connect_timeout_s
        self._make_tls = tls
        self._proxy = proxy
        self._peer = (host, port) if proxy is None else (proxy.host, proxy.port)
        """Host and port that are connected: the server's, or those of the proxy."""
        self._tls: ssl.SSLContext | None = None
        self._idle_connections: list[tuple[HttpConnection, float]] = []
        """Idle connections with the start of their idle time; the longest idle one first."""
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._addresses: list[AddrInfoType] = []
        self._addresses_expiry_s = 0.0
        self._resolve_lock = asyncio.Lock()

    async def send(self, request: bytes, *, reuse: bool = True, deadline_s: float | None = None) -> Response:
        """Sends a request, waits for the head of the response and returns the response.

        A server may close an idle connection at the moment when it is reused. If the server then sends nothing or
        a 408, the request is sent again on a new connection.

        Args:
            request: The complete request.
            reuse: Whether the request may use an idle connection.
            deadline_s: Deadline of the response head, by the clock of the event loop; None: there is none.

        Raises:
            ConnectFailed: No connection could be established.
            ResponseBroken: The connection ended before the head.
            TimeoutError: The head was not received by the deadline.
        """
        while reuse and self._idle_connections:
            connection, _ = self._idle_connections.pop()
            if connection.is_open:
                response = connection.send(request)
                try:
                    await response.wait_head(deadline_s)
                except ResponseBroken as failure:
                    if not failure.nothing_received:
                        raise
                    break
                closes = response.headers.get(b"connection", b"").lower() == b"close"
                if response.status != _REQUEST_TIMEOUT_STATUS or not closes:
                    return response
                response.close()
                break
        async with asyncio.timeout_at(deadline_s):
            connection = await self._connect()
        response = connection.send(request)
        await response.wait_head(deadline_s)
        return response

    async def send_streamed(self, head: bytes, body: Iterator[bytes], *, deadline_s: float) -> Response:
        """Sends a request whose body is written piece by piece, and returns the response when its head has come.

        It has a connection of its own: an idle one may be closed by the server at this moment, and the body would be
        sent twice.

        Args:
            head: The head of the request, complete, with ``connection: close``.
            body: Pieces of the body.
            deadline_s: Deadline of the response head, by the clock of the event loop.

        Raises:
            ConnectFailed: No connection could be established.
            ResponseBroken: The connection ended before the head.
            TimeoutError: The head was not received by the deadline.
        """
        async with asyncio.timeout_at(deadline_s):
            connection = await self._connect()
            response = connection.send(head)
            try:
                await connection.write_body(body)
            except BaseException:
                connection.close()
                raise
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
                has_tunnel = self._proxy is not None and self._tls is not None
                if len(addresses) == 1 and addresses[0][0] == socket.AF_INET and not has_tunnel:
                    # A direct connect takes a third of the time of `start_connection`.
                    host, port = addresses[0][4][:2]
                    _, connection = await loop.create_connection(self._make_connection, host, port, **options)
                else:
                    sock = await start_connection(
                        addresses, happy_eyeballs_delay=_HAPPY_EYEBALLS_DELAY_S, interleave=1, loop=loop
                    )
                    try:
                        if has_tunnel and self._proxy is not None:
                            await self._proxy.open_tunnel(sock, self._host, self._port)
                        _, connection = await loop.create_connection(self._make_connection, sock=sock, **options)
                    except BaseException:
                        sock.close()
                        raise
        except TimeoutError:
            raise ConnectFailed(
                f"no connection to {self._host}:{self._port} in {self._connect_timeout_s:g} s"
            ) from None
        except ProxyRefused as refused:
            raise ConnectFailed(f"no connection to {self._host}:{self._port}: {refused}") from None
        except (OSError, ValueError) as error:
            by = "" if self._proxy is None else f" through the proxy {self._proxy.name}"
            raise ConnectFailed(f"no connection to {self._host}:{self._port}{by}: {error}") from None
        self._connections.add(connection)
        return connection

    def _make_connection(self) -> HttpConnection:
        return HttpConnection(self._release, self._connections.remove)

    async def _resolve(self, loop: asyncio.AbstractEventLoop) -> list[AddrInfoType]:
        """Resolves the host name, with a cache; concurrent callers share one look-up."""
        async with self._resolve_lock:
            if not self._addresses or self._addresses_expiry_s < loop.time():
                self._addresses = [*await loop.getaddrinfo(*self._peer, type=socket.SOCK_STREAM)]
                self._addresses_expiry_s = loop.time() + _DNS_TTL_S
        return self._addresses

    def _release(self, connection: HttpConnection) -> None:
        """Returns a connection to the pool after its response."""
        loop = asyncio.get_running_loop()
        self._idle_connections.append((connection, loop.time()))
        if self._expiry_timer is None:
            self._expiry_timer = loop.call_later(_KEEPALIVE_EXPIRY_S, self._close_expired, loop)

    def _close_expired(self, loop: asyncio.AbstractEventLoop) -> None:
        """Closes the connections that have been idle for `_KEEPALIVE_EXPIRY_S`."""
        cutoff_s = loop.time() - _KEEPALIVE_EXPIRY_S
        expired_connections = [connection for connection, since_s in self._idle_connections if since_s <= cutoff_s]
        self._idle_connections = [entry for entry in self._idle_connections if entry[1] > cutoff_s and entry[0].is_open]
        for connection in expired_connections:
            connection.close()
        self._expiry_timer = (
            loop.call_at(self._idle_connections[0][1] + _KEEPALIVE_EXPIRY_S, self._close_expired, loop)
            if self._idle_connections
            else None
        )
