"""Pool of connections to one server, without an upper bound: a tester must not queue unnoticed."""

import asyncio

from maitred.load.play.client.connection import ConnectionFailed, LoadConnection
from maitred.load.play.client.origin import Origin
from maitred.load.play.clock import RunClock


class ConnectionPool:
    """Pool of connections to one origin.

    Args:
        origin: Origin of the server.
        address: Resolved address of the server, or the path of a Unix socket.
        connect_timeout_s: Timeout for a new connection, TLS included.
        clock: Clock of the run.
    """

    def __init__(
        self, origin: Origin, address: tuple[str, int] | str, *, connect_timeout_s: float, clock: RunClock
    ) -> None:
        self.origin = origin
        self._address = address
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self._tls = origin.tls()
        self._idle: list[LoadConnection] = []

    async def take(self, *, new: bool = False) -> LoadConnection:
        """Returns an idle connection, or a new one if there is none or a new one is required.

        Raises:
            ConnectionFailed: No connection could be made.
        """
        while self._idle and not new:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await self._connect()
        except TimeoutError as error:
            raise ConnectionFailed(f"No connection within {self._connect_timeout_s:g} s.") from error
        except OSError as error:
            raise ConnectionFailed(f"No connection: {error.strerror or error}.") from error

    async def _connect(self) -> LoadConnection:
        loop = asyncio.get_running_loop()
        name = self.origin.host if self._tls else None
        if isinstance(self._address, str):
            _, connection = await loop.create_unix_connection(
                lambda: LoadConnection(self._clock), self._address, ssl=self._tls, server_hostname=name
            )
        else:
            _, connection = await loop.create_connection(
                lambda: LoadConnection(self._clock), *self._address, ssl=self._tls, server_hostname=name
            )
        return connection

    def release(self, connection: LoadConnection) -> None:
        """Keeps a reusable connection for the next request, and closes any other."""
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.abort()

    def close(self) -> None:
        """Closes all idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
