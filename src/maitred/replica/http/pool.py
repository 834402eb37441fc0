"""The connections to one server: kept while they are of use, and made when none is free."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from aiohappyeyeballs import AddrInfoType, start_connection

from maitred.replica.http.connection import HttpConnection, Response, ResponseBroken

_KEEP_S = 3.0
"""Less than servers keep an idle connection (uvicorn 5 s, Node 5 s): the one that closes it should be this end."""
_KNOWN_S = 10.0
"""How long the addresses of a name are taken as they were."""
_NOTHING_ASKED = 408
"""Of HTTP: no request has come in time. On a connection that was kept it is said of its idleness."""
_SECOND_ADDRESS_S = 0.25
"""After which the next address is tried beside one that does not answer: the delay that RFC 8305 recommends."""


class ConnectFailed(Exception):
    """No connection could be made, or not one that is safe. Its text has the system's reason."""


class OpenConnections:
    """All that are open, to whatever server. A context; leaving it closes them.

    What is made of it and used is of the event loop that entered it.
    """

    def __init__(self) -> None:
        self._open: set[HttpConnection] = set()
        self._all_closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in [*self._open]:
            connection.close()
        if self._open:
            self._all_closed.clear()
            await self._all_closed.wait()

    def add(self, connection: HttpConnection) -> None:
        """It has been made."""
        self._open.add(connection)

    def remove(self, connection: HttpConnection) -> None:
        """It is closed."""
        self._open.discard(connection)
        if not self._open:
            self._all_closed.set()


class HostPool:
    """Of one server.

    Args:
        connections: Closes what is open here in the end.
        host: Name or address.
        port: Where it listens.
        connect_timeout_s: For a connection, with its TLS handshake.
        tls: Makes what its certificate is checked by; None: there is no TLS.
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
        self._free: list[tuple[HttpConnection, float]] = []
        """With the time since when, the longest free first."""
        self._sweeping: asyncio.TimerHandle | None = None
        self._addresses: list[AddrInfoType] = []
        self._known_until_s = 0.0
        self._looking_up = asyncio.Lock()

    async def ask(self, request: bytes, *, kept: bool = True, until_s: float | None = None) -> Response:
        """Sends a request; the response, when its head is there.

        A server may close a connection in the moment in which it is used again. Where it has not said a word, or only
        that nothing was asked in time, the request goes out once more, on a new one.

        Args:
            request: All of it.
            kept: Whether it may go on a connection that has served before.
            until_s: When the head must be there, by the event loop's clock; None: whenever.

        Raises:
            Unreachable: It could not be sent.
            Interrupted: No head came.
            TimeoutError: It has not come in time.
        """
        while kept and self._free:
            connection, _ = self._free.pop()
            if connection.open:
                response = connection.send(request)
                try:
                    await response.wait_head(until_s)
                except ResponseBroken as failure:
                    if not failure.untouched:
                        raise
                    break
                if response.status != _NOTHING_ASKED:
                    return response
                response.close()
                break
        async with asyncio.timeout_at(until_s):
            connection = await self._dial()
        response = connection.send(request)
        await response.wait_head(until_s)
        return response

    async def _dial(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if self._make_tls is not None and self._tls is None:
                    self._tls = self._make_tls()
                addresses = await self._resolve(loop)
                to: dict[str, Any] = {"ssl": self._tls, "server_hostname": None if self._tls is None else self._host}
                if len(addresses) == 1 and addresses[0][0] == socket.AF_INET:
                    # The event loop's own way takes a third of the time.
                    host, port = addresses[0][4][:2]
                    _, connection = await loop.create_connection(self._connection, host, port, **to)
                else:
                    sock = await start_connection(
                        addresses, happy_eyeballs_delay=_SECOND_ADDRESS_S, interleave=1, loop=loop
                    )
                    try:
                        _, connection = await loop.create_connection(self._connection, sock=sock, **to)
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

    def _connection(self) -> HttpConnection:
        return HttpConnection(self._release, self._connections.remove)

    async def _resolve(self, loop: asyncio.AbstractEventLoop) -> list[AddrInfoType]:
        """Where it is. Of many who ask at once, one looks."""
        async with self._looking_up:
            if not self._addresses or self._known_until_s < loop.time():
                self._addresses = [*await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)]
                self._known_until_s = loop.time() + _KNOWN_S
        return self._addresses

    def _release(self, connection: HttpConnection) -> None:
        """It has served, and can serve again."""
        loop = asyncio.get_running_loop()
        self._free.append((connection, loop.time()))
        if self._sweeping is None:
            self._sweeping = loop.call_later(_KEEP_S, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Closes what nobody has used for long."""
        old_s = loop.time() - _KEEP_S
        old = [connection for connection, since_s in self._free if since_s <= old_s]
        self._free = [each for each in self._free if each[1] > old_s and each[0].open]
        for connection in old:
            connection.close()
        self._sweeping = loop.call_at(self._free[0][1] + _KEEP_S, self._sweep, loop) if self._free else None
